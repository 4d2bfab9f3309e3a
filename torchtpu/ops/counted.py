"""Ops that have to know a count before their results have a shape.

A result is a prefix of a larger buffer, laid out as if it were alone.  `count` is a number on the host, `total` the
same number on the device: programs depend on the second alone.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from torchtpu.ops.composed import raise_as_cpu
from torchtpu.ops.counts import read, size_for
from torchtpu.ops.registry import composed

aten: Any = torch.ops.aten


def _places(mask: Tensor, size: int) -> Tensor:
    """The positions of the first `size` ones of a 1-D mask; 0 behind the last."""
    found: Tensor = aten.nonzero_static(mask, size=size, fill_value=0)
    return found.view(size)


def _iota(size: int, like: Tensor) -> Tensor:
    return torch.arange(size, device=like.device)


def _rows_at(rows: Tensor, at: Tensor, total: Tensor) -> Tensor:
    """rows[at], zero from row `total` on."""
    taken = _iota(at.shape[0], at) < total
    found: Tensor = aten._unsafe_masked_index(rows, taken.view(-1, *[1] * (rows.dim() - 1)), [at], 0)
    return found


# Positions of ones


@composed("nonzero")
def nonzero(self: Tensor) -> Tensor:
    ndim = self.dim()
    total = torch.count_nonzero(self)
    (count,) = read("nonzero", total)
    if count == 0 or ndim == 0:
        return _nothing(self).as_strided((count, ndim), (1, count))
    size = size_for(count, self.numel())
    at = _places(self.reshape(-1), size)
    if ndim > 1:  # column after column
        strides = [math.prod(self.shape[d + 1 :]) for d in range(ndim)]
        columns = torch.stack([at // strides[d] % self.shape[d] for d in range(ndim)])
        column, row = _divided(_iota(size * ndim, self), total, ndim, size)
        at = _rows_at(columns.view(-1), column * size + row, total * ndim)
    return at.as_strided((count, ndim), (1, count))


def _divided(place: Tensor, total: Tensor, most: int, size: int) -> tuple[Tensor, Tensor]:
    """(place // total, place % total) of the places in use: the group of `total` elements, and which one of them."""
    group = (place // total).clamp(max=most - 1)
    return group, (place - group * total).clamp(max=size - 1)


@composed("masked_select")
def masked_select(self: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    try:
        x, mask = torch.broadcast_tensors(self, mask)
    except RuntimeError:
        raise_as_cpu(aten.masked_select, self, mask)
        raise
    total = torch.count_nonzero(mask)
    (count,) = read("masked_select", total)
    return _at_mask(x.reshape(-1), 0, mask.reshape(-1), count, total)


@composed("index.Tensor", "_unsafe_index.Tensor")
def index(self: Tensor, indices: list[Tensor | None]) -> Tensor:
    masks = _masks_of(self, indices)
    totals = [torch.count_nonzero(mask) for mask in masks]
    ones = read("index", *totals)
    given = [d for d, i in enumerate(indices) if i is not None]
    if len(given) == 1:
        return _at_mask(self, given[0], masks[0], ones[0], totals[0])
    counts = iter(zip(ones, totals, strict=True))
    numbers: list[Tensor | None] = []
    for i in indices:
        if i is None or i.dtype not in (torch.bool, torch.uint8):
            numbers.append(i)
        else:
            numbers.extend(_columns(i, *next(counts)))
    found: Tensor = aten.index(self, numbers)
    return found


def _masks_of(x: Tensor, indices: list[Tensor | None]) -> list[Tensor]:
    """The masks among the indices; raises where one does not fit."""
    masks = []
    dim = 0
    for i in indices:
        if i is None or i.dtype not in (torch.bool, torch.uint8):
            dim += 1
            continue
        if i.dtype == torch.uint8:
            message = "indexing with dtype torch.uint8 is now deprecated, please use a dtype torch.bool instead."
            warnings.warn(message, stacklevel=4)
        if dim + i.dim() > x.dim():
            raise IndexError(f"too many indices for tensor of dimension {x.dim()}")
        if x.shape[dim : dim + i.dim()] != i.shape:
            wrong = next(d for d, n in enumerate(i.shape) if n != x.shape[dim + d])
            raise IndexError(
                f"The shape of the mask {list(i.shape)} at index {wrong} does not match the shape of the indexed "
                f"tensor {list(x.shape)} at index {dim + wrong}"
            )
        masks.append(i)
        dim += i.dim()
    return masks


def _columns(mask: Tensor, count: int, total: Tensor) -> list[Tensor]:
    """The positions of a mask's ones, one tensor per dimension."""
    at = _places(mask.reshape(-1), size_for(count, mask.numel()))[:count]
    strides = [math.prod(mask.shape[d + 1 :]) for d in range(mask.dim())]
    return [at // strides[d] % mask.shape[d] for d in range(mask.dim())]


def _at_mask(x: Tensor, dim: int, mask: Tensor, count: int, total: Tensor) -> Tensor:
    """x[:, ..., mask], where `mask` stands for the dimensions from `dim` on and has `count` ones."""
    lead, tail = x.shape[:dim], x.shape[dim + mask.dim() :]
    shape = (*lead, count, *tail)
    groups, width = math.prod(lead), math.prod(tail)
    if 0 in shape:
        return x.new_empty(shape)
    size = size_for(count, mask.numel())
    at = _places(mask.reshape(-1), size)
    if groups > 1:  # group after group of `count` rows
        group, row = _divided(_iota(groups * size, x), total, groups, size)
        at, total = group * mask.numel() + _rows_at(at, row, total * groups), total * groups
    rows = x.reshape(groups * mask.numel(), width) if width > 1 else x.reshape(-1)
    found = _rows_at(rows, at, total)
    return _laid_out(found.reshape(-1)[: math.prod(shape)].view(shape), x, dim, mask)


def _laid_out(made: Tensor, x: Tensor, dim: int, mask: Tensor) -> Tensor:
    """`made` with the strides that indexing `x` gives."""
    if x.is_contiguous():
        return made
    number = torch.empty(made.shape[dim], dtype=torch.int64, device="meta")
    like = aten.index(x.to("meta"), [*[None] * dim, *[number] * mask.dim()])
    return made if like.stride() == made.stride() else made.new_empty_strided(like.shape, like.stride()).copy_(made)


# Counts of values


@composed("bincount")
def bincount(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    is_fit = self.dim() == 1 and not self.is_floating_point() and not self.is_complex() and self.dtype != torch.bool
    if minlength < 0 or not is_fit or (weights is not None and weights.shape != self.shape):
        raise_as_cpu(aten.bincount, self, weights, minlength)
    kind = torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
    if self.numel() == 0:
        return torch.zeros(minlength, dtype=torch.int64, device=self.device)
    low, high = read("bincount", *(bound.long() for bound in torch.aminmax(self)))
    if low < 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    count = max(high + 1, minlength)
    sums = torch.zeros(size_for(count), dtype=kind, device=self.device)
    added = torch.ones_like(self, dtype=kind) if weights is None else weights.to(kind)
    return sums.scatter_add_(0, self.long(), added)[:count]


@composed("repeat_interleave.Tensor")
def repeat_interleave(repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    if repeats.dim() != 1 or repeats.dtype not in (torch.int64, torch.int32):
        raise_as_cpu(aten.repeat_interleave.Tensor, repeats)
    if repeats.numel() == 0:
        return torch.empty_like(repeats)
    ends = repeats.long().cumsum(0)
    if output_size is None:
        low, count = read("repeat_interleave", repeats.long().min(), ends[-1])
        if low < 0:
            raise RuntimeError("repeats can not be negative")
        size = size_for(count)
    else:
        size = count = output_size
        torch._assert_async((repeats >= 0).all(), "repeats can not be negative")
        torch._assert_async(ends[-1] == count, "allocated size does not match required size")
    return torch.searchsorted(ends, _iota(size, repeats), right=True)[:count].to(repeats.dtype)


# Different values


def _starts(values: Tensor) -> Tensor:
    """Whether each row differs from the one before it."""
    differs = values[1:] != values[:-1]
    if differs.dim() > 1:
        differs = differs.flatten(1).any(1)
    return torch.cat([torch.ones_like(values[:1], dtype=torch.bool).flatten()[:1], differs])


def _runs(name: str, values: Tensor, returns_counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The first row of each run of equal rows, the run each row is in, and the runs' lengths."""
    starts = _starts(values)
    total = torch.count_nonzero(starts)
    (count,) = read(name, total)
    size = size_for(count, values.shape[0])
    at: Tensor = aten.nonzero_static(starts, size=size + 1, fill_value=values.shape[0]).view(-1)
    lengths = (at[1:] - at[:-1])[:count] if returns_counts else _nothing(values)
    return _rows_at(values, at[:-1], total)[:count], starts.cumsum(0) - 1, lengths


def _nothing(like: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=like.device)


@composed("_unique2")
def unique2(
    self: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    if self.is_complex() or self.numel() == 0:
        return _no_values(aten._unique2, self, sorted, return_inverse, return_counts)
    values, order = self.reshape(-1).sort(stable=True)
    found, run, lengths = _runs("_unique2", values, return_counts)
    inverse = torch.empty_like(run).scatter_(0, order, run).view(self.shape) if return_inverse else _nothing(self)
    return found, inverse, lengths


def _no_values(op: Any, x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What the CPU makes of a tensor that it has nothing to do with, or its error."""
    return tuple(made.to(x.device) for made in op(torch.zeros_like(x, device="cpu"), *args))


@composed("_unique")
def unique(self: Tensor, sorted: bool = True, return_inverse: bool = False) -> tuple[Tensor, Tensor]:
    return unique2(self, sorted, return_inverse)[:2]


@composed("unique_consecutive")
def unique_consecutive(
    self: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    if dim is not None:
        return unique_dim_consecutive(self, dim, return_inverse, return_counts)
    if self.is_complex() or self.numel() == 0:
        return _no_values(aten.unique_consecutive, self, return_inverse, return_counts)
    found, run, lengths = _runs("unique_consecutive", self.reshape(-1), return_counts)
    return found, run.view(self.shape) if return_inverse else _nothing(self), lengths


@composed("unique_dim_consecutive")
def unique_dim_consecutive(
    self: Tensor, dim: int, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    if self.is_complex() or self.numel() == 0 or self.dim() == 0:
        return _no_values(aten.unique_dim_consecutive, self, dim, return_inverse, return_counts)
    return _dim_runs("unique_dim_consecutive", self, dim)


@composed("unique_dim")
def unique_dim(
    self: Tensor, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    if self.is_complex() or self.numel() == 0 or self.dim() == 0:
        return _no_values(aten.unique_dim, self, dim, sorted, return_inverse, return_counts)
    ranks = _ranks(self.movedim(dim, 0).reshape(self.shape[dim], -1))
    while ranks.shape[1] > 1:  # two columns become one whose order is theirs
        if ranks.shape[1] % 2:
            ranks = torch.cat([torch.zeros_like(ranks[:, :1]), ranks], 1)
        ranks = _ranks(ranks[:, ::2] * ranks.shape[0] + ranks[:, 1::2])
    order = ranks.view(-1).argsort(stable=True)
    found, run, lengths = _dim_runs("unique_dim", self.index_select(dim, order), dim)
    return found, torch.empty_like(run).scatter_(0, order, run), lengths


def _dim_runs(name: str, x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """The runs of equal slices along `dim`; PyTorch returns run numbers and lengths asked for or not."""
    rows = x.movedim(dim, 0)
    found, run, lengths = _runs(name, rows.reshape(rows.shape[0], -1), True)
    return found.view(-1, *rows.shape[1:]).movedim(0, dim), run, lengths


def _ranks(columns: Tensor) -> Tensor:
    """Per column, how many different values are less than each one."""
    values, order = columns.sort(stable=True, dim=0)
    differs = (values[1:] != values[:-1]).long().cumsum(0)
    return torch.cat([torch.zeros_like(order[:1]), differs]).gather(0, order.argsort(0))
