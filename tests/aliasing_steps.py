"""The steps of random aliasing programs.

A view or a functional op returns a tensor, which joins the world; a read returns plain values, which are compared.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from aliasing_programs import (
    DTYPES,
    MAX_ELEMENTS,
    OTHERS,
    SHAPES,
    VIEWS,
    WRITES,
    Action,
    Choices,
    Skip,
    World,
    may_write,
    same_storage,
)
from torch import Tensor


def _view(action: Action) -> Action:
    VIEWS.append(action)
    return action


def _write(action: Action) -> Action:
    WRITES.append(action)
    return action


def _other(action: Action) -> Action:
    OTHERS.append(action)
    return action


# ---- views


@_view
def transpose(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    return x.transpose(c.dim(x), c.dim(x))


@_view
def permute(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    dims = list(range(x.dim()))
    return x.permute([dims.pop(c.below(len(dims))) for _ in range(x.dim())])


@_view
def narrow(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    d = c.dim(x)
    start = c.below(x.shape[d] + 1)
    return x.narrow(d, start, c.below(x.shape[d] - start + 1 + (c.below(8) == 0)))


@_view
def step(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    return x[(slice(None),) * (c.dim(x) % x.dim()) + (slice(c.below(2), None, 2 + c.below(2)),)]


@_view
def select(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    d = c.dim(x)
    return x.select(d, c.below(x.shape[d] + (c.below(8) == 0)))


@_view
def newaxis(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    return x.unsqueeze(c.below(x.dim() + 1)) if x.dim() < 4 else x.squeeze()


@_view
def expand(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    shape = [3 if n == 1 else n for n in x.shape]
    return x.expand(2, *shape) if c.below(3) == 0 and x.numel() < MAX_ELEMENTS // 2 else x.expand(shape)


@_view
def flatten(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    start = c.below(x.dim())
    return x.flatten(start, start + c.below(x.dim() - start)) if x.dim() else x.flatten()


@_view
def view(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    return x.view(c.one((-1,), (2, -1), (-1, 3), y.shape))


@_view
def split(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    return c.one(torch.split, torch.chunk)(x, 1 + c.below(3), c.dim(x))[:2]


@_view
def as_strided(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    room = x.untyped_storage().nbytes() // x.element_size()
    size, stride = (1 + c.below(2), 1 + c.below(3)), (c.below(4), c.below(3))
    extent = sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1
    if extent > room:
        raise Skip
    return x.as_strided(size, stride, c.below(room - extent + 1))


@_view
def diagonal(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    return x.diagonal(c.below(3) - 1) if x.dim() == 2 else x.diagonal(0, c.dim(x), c.dim(x))


@_view
def unfold(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    return x.unfold(c.dim(x), 1 + c.below(3), 1 + c.below(2))


@_view
def other_dtype(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    dtype = c.one(torch.int32, torch.float32, torch.int64, torch.int16, torch.uint8, torch.complex64)
    if not x.numel() or not w.may_be_seen_as(x, dtype):  # the strides of nothing decide
        raise Skip
    return x.view(dtype)


@_view
def real(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    return c.one(torch.view_as_real, torch.real, torch.imag)(x)


@_view
def complex_(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    if not x.numel():
        raise Skip
    return torch.view_as_complex(x)


@_view
def lazy(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    if x.dtype is torch.bool:
        raise Skip
    return c.one(torch.conj, torch._neg_view, lambda t: t.mH, lambda t: t.imag.conj())(x)


@_view
def alias(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    return c.one(lambda t: t.detach(), lambda t: t.data, lambda t: t.view_as(t), lambda t: t[...])(x)


@_write
def swap_dims_in_place(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    which = c.below(4)
    if which == 0:
        x.t_()
    elif which == 1:
        x.transpose_(c.dim(x), c.dim(x))
    elif which == 2 and x.dim() < 4:
        x.unsqueeze_(c.below(x.dim() + 1))
    else:
        x.squeeze_()


# ---- writes


@_write
def add_(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    may_write(x)
    x.add_(c.one(1, 2, 3, 1.5, 2 + 1j, True))


@_write
def add_tensor_(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    may_write(x, y)
    x.add_(y, alpha=c.one(1, 2, 3))


@_write
def mul_(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    may_write(x, y)
    x.mul_(c.one(2, -1, 0.5, y, y))


@_write
def copy_(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    may_write(x, y)
    x.copy_(y)


@_write
def copy_from_host_(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    may_write(x)
    x.copy_((torch.arange(x.numel()).view(x.shape) + c.below(3)).to(c.one(x.dtype, torch.float32, torch.int64)))


@_write
def fill_(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    which = c.below(3)
    if which == 0:
        x.zero_()
    elif which == 1:
        x.fill_(c.one(3, 2.5, True))
    else:
        may_write(x, y, is_checked=False)
        x.fill_(y)


@_write
def negate_(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    may_write(x)
    return c.one(torch.Tensor.neg_, torch.Tensor.abs_, torch.Tensor.relu_, torch.Tensor.conj_physical_)(x) and None


@_write
def clamp_(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    may_write(x)
    x.clamp_(c.one(0, -1, None), c.one(1, 2, 3))


@_write
def set_item(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    may_write(x, y)
    x[c.below(3)] = c.one(7, 2.5, y, y)


@_write
def set_slice(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    may_write(x, y)
    x[c.one(slice(1, None), slice(None, 1), slice(None, None, 2), ...)] = c.one(4, y, y)


@_write
def set_masked(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    may_write(x, is_checked=False)
    if x.is_complex() or x.is_neg():
        raise Skip
    x[x > 1] = c.one(5, 2.5)


@_write
def masked_fill_(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    may_write(x, y, is_checked=False)
    x.masked_fill_(y.detach().clone() > 0 if not y.is_complex() else y.detach().clone() != 0, c.one(6, 3.0))


@_write
def set_indexed(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    may_write(x, y, is_checked=False)
    if not x.dim() or x.shape[0] < 2:
        raise Skip
    index = torch.tensor(c.one([0], [1, 0], [-1, 0]))
    x[index if c.below(2) else index.to(x.device)] = c.one(8, 9.5, y)


@_write
def index_fill_(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    may_write(x, is_checked=False)
    if not x.numel():
        raise Skip
    x.index_fill_(c.dim(x), torch.tensor([0], device=x.device), c.one(3, -1))


@_write
def addcmul_(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    may_write(x, y)
    x.addcmul_(y, y, value=c.one(1, 2))


@_write
def foreach_(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    may_write(x, y)
    may_write(y, x)
    if w.is_shared(y):
        raise Skip
    if c.below(2):
        torch._foreach_add_([x, y], c.one(1, 2.5))
    else:
        torch._foreach_mul_([x, y], [2, 3])


@_write
def foreach_halves_(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    may_write(x)
    if x.dim() == 0 or x.shape[0] < 2:
        raise Skip
    torch._foreach_add_([x[:1], x[1:]], 1)


@_write
def out(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    may_write(x, y)
    which = c.below(4)
    if x.shape != y.shape and (same_storage(x, y) or not y.is_contiguous()):
        raise Skip  # it is resized: over its input, or with strides on which PyTorch's own devices differ
    if which == 0:
        torch.add(y, c.one(1, 2.5), out=x)
    elif which == 1:
        torch.neg(y, out=x)
    elif which == 2:
        torch.mul(y, y, out=x)
    elif not same_storage(x, y):
        torch.sum(y, c.dim(y), out=x)


@_write
def cat_out(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    may_write(x, y)
    if y.numel() * 2 > MAX_ELEMENTS or same_storage(x, y):
        raise Skip
    torch.cat([y, y], c.dim(y), out=x)


@_write
def resize_(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    x.resize_(c.one((2, 3), (4,), (0,), (3, 3), (1,), (2, 1, 2)))


@_write
def set_tensor_(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    x.set_(y)


@_write
def set_storage_(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    which = c.below(3)
    if x.is_neg() or x.is_conj() or not w.may_be_seen_as(y, x.dtype):
        raise Skip
    if which == 0:
        x.set_(y.untyped_storage())
    elif which == 1:
        x.set_()
    else:
        room = y.untyped_storage().nbytes() // x.element_size()
        size = c.one((2, 2), (3,), (1, 2))
        offset = c.below(3)
        if room < offset + 4:
            raise Skip
        x.set_(y.untyped_storage(), offset, size)


@_write
def set_data(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    x.data = y


@_write
def resize_storage(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    storage = x.untyped_storage()
    old = storage.nbytes()
    which = c.below(3)
    if which == 0:
        storage.resize_(0)
        storage.resize_(old)
        if w.device == "cpu":  # the device's new bytes are zero
            torch.empty(0, dtype=torch.uint8).set_(storage, 0, (old,), (1,)).zero_()
    elif which == 1:
        storage.resize_(old + 8)
    elif old <= 64:
        storage.resize_(old * 2)


# ---- the rest: new tensors, reads, deaths


@_other
def make(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    return w.make(c.one(*DTYPES), c.one(*SHAPES))


@_other
def make_on_device(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    dtype = c.one(torch.float32, torch.int64)
    return c.one(torch.zeros, torch.ones)(c.one(*SHAPES), dtype=dtype, device=w.device)


def _known(x: Tensor) -> Tensor:
    if x.numel() > MAX_ELEMENTS:
        raise Skip
    return x


@_other
def add(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    return _known(x) + c.one(1, 2, 2.5, y, y)


@_other
def mul(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    return _known(x) * c.one(2, -1, y)


@_other
def clone(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    _known(x)
    return c.one(
        lambda t: t.clone(),
        lambda t: t.contiguous(),
        lambda t: t.clone(memory_format=torch.contiguous_format),
        lambda t: t.to(torch.float32) if not t.is_complex() else t.resolve_conj(),
        lambda t: t.resolve_neg(),
        torch.zeros_like,
    )(x)


@_other
def cat(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    if x.numel() + y.numel() > MAX_ELEMENTS:
        raise Skip
    return c.one(torch.cat, torch.stack)([x, y], c.dim(x))


@_other
def total(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    return x.sum()


@_other
def item(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    return x.flatten()[c.below(x.numel())].item() if x.numel() else x.item()


@_other
def tolist(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    return x.tolist()


@_other
def truth(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    return bool(x)


@_other
def equal(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    return torch.equal(x, y)


@_other
def drop(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    if len(w.tensors) - w.shared > 1:
        del w.tensors[w.shared + c.below(len(w.tensors) - w.shared)]


@_other
def collect_garbage(w: World, x: Tensor, y: Tensor, c: Choices) -> Any:
    if c.below(8) == 0:
        gc.collect()
