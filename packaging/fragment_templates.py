"""Writes torchtpu/ops/templates: the fragments of ordinary ops, for arrays of all sizes, a file for each op.

    python packaging/fragment_templates.py            # writes the files
    python packaging/fragment_templates.py --check    # fails where a template is not what tracing gives

The ops are those that `ordinary` calls. One becomes a template where

- tracing it decides nothing by a size, on any platform: it is traced with sizes of which nothing is known but that they
  are at least 2 (jax's symbolic dimensions) and, where the template is for single sizes, that they differ, and
- filled in with other sizes, small and large, equal ones and some of 0 and 1 where that makes no other description, the
  template is to the letter what tracing with those sizes gives.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ |= {"TORCHTPU_CACHE": "off", "TORCHTPU_TIERS": "off"}

import jax
import torch
import torch.nn.functional as F

from torchtpu import ops, startup
from torchtpu.runtime import _C
from torchtpu.runtime.ir.calls import LoweringEntry, describe_results, parameters
from torchtpu.runtime.ir.list_ops import take_apart
from torchtpu.runtime.ir.program import Base, Op
from torchtpu.runtime.lowering import learned_templates, templates, tracing
from torchtpu.runtime.lowering.templates import SHAPE, FragmentTemplate
from torchtpu.runtime.padding.evaluate import Symbols

FOLDER = Path(ops.__path__[0], "templates")
PLATFORMS = ("cpu", "cuda", "tpu")

A, B, C, D = 23, 29, 31, 37  # sizes of the ordinary ops, which have no other number like these
E = 41
SENTINELS = learned_templates.SENTINELS[:6]
SIZES = (2, 3, 5, 7, 11, 13), (7, 4, 3, 2, 9, 5), (16, 64, 32, 8, 2, 48), (65537, 33, 2, 12, 5, 21)
SHAPES = (1,), (0, 3), (5, 0), (2, 2), (4, 1), (2, 1, 3), (1, 7, 3, 2), (3, 2, 2, 2, 5), (100003,)
SYMBOLIC = ("a",), ("a", "b", "c"), (1, "a"), ("a", 1), ("a", 1, "b")

UNARY = (
    torch.neg, torch.abs, torch.exp, torch.log, torch.sqrt, torch.rsqrt, torch.sin, torch.cos, torch.tanh, torch.relu,
    torch.sigmoid, torch.square, torch.reciprocal, torch.floor, torch.ceil, torch.round, torch.sign, torch.isnan,
    torch.isfinite, torch.logical_not, torch.clone, torch.log1p, torch.exp2, torch.erf, F.silu, F.gelu, F.softplus,
    F.leaky_relu, F.elu, F.hardtanh, torch.zeros_like, torch.ones_like, lambda x: x.clamp(0, 1),
    lambda x: x.clamp(min=0), lambda x: x**2, lambda x: x**0.5, lambda x: x.pow(3), lambda x: x.masked_fill(x > 1, 0),
    lambda x: F.gelu(x, approximate="tanh"), lambda x: x.tril(), lambda x: x.triu(),
)  # fmt: skip
BINARY = (
    torch.add, torch.sub, torch.mul, torch.div, torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge,
    torch.maximum, torch.minimum, torch.pow, torch.floor_divide, torch.remainder, torch.logical_and, torch.logical_or,
    torch.bitwise_and, torch.bitwise_or,
)  # fmt: skip
INTO = (torch.Tensor.add_, torch.Tensor.sub_, torch.Tensor.mul_, torch.Tensor.div_, torch.Tensor.copy_)
REDUCTIONS = (
    torch.sum, torch.mean, torch.amax, torch.amin, torch.max, torch.min, torch.argmax, torch.argmin, torch.any,
    torch.all, torch.prod, torch.var, torch.std, torch.cumsum,
)  # fmt: skip
DTYPES = (torch.float32, torch.int64, torch.bool, torch.float64, torch.bfloat16)


def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An array on the device, uploaded: no op makes it."""
    return torch.ones(shape, dtype=dtype).to("tpu")


def ordinary() -> Iterator[Callable[[], Any]]:
    """Calls of the ops of first scripts."""
    for dtype in DTYPES:
        yield from _elementwise(dtype)
    for shape in ((A,), (A, B), (A, A), (1, A), (A, B, C)):
        yield from _reduced(shape)
    for shape in (
        (A, B), (A, 1), (A, B, C), (1, B, C), (1, 1, C), (A, 1, C), (A, B, 1), (A, B, C, D), (A, B, C, C), (1, B, C, D),
        (1, B, 1, D), (A, B, 1, 1),
    ):  # fmt: skip
        yield from _reduced_in_dims(shape)
    yield from _broadcast()
    yield from _products()
    yield from _losses()
    yield from _layers()
    yield from _steps()
    yield from _rearranged()


def _elementwise(dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    numbers: tuple[Any, ...] = (0.5, 1.0, 0, 1, 2, 3, 4, 5, 8, 10, 16, 32, 64, 100, 1000, -1)[
        2 * (dtype in (torch.int64, torch.bool)) :
    ]
    for shape in ((A, B),) if dtype == torch.bool else ((A, B), ()):
        x, y, zero_dim = some(*shape, dtype=dtype), some(*shape, dtype=dtype), some(dtype=dtype)
        yield from (lambda f=f, x=x: f(x) for f in UNARY)
        for f in BINARY:
            yield from (lambda f=f, x=x, y=y: f(x, y) for y in (y, *numbers))
        for f in BINARY[:4] if dtype == torch.float32 else ():
            yield from (lambda f=f, x=x, n=n: f(x, n) for n in (1.0, 2.0, 4, 8, 16, 64, 100))
        for f in BINARY[:4]:
            yield lambda f=f, x=x, y=zero_dim: f(x, y)
            yield lambda f=f, x=zero_dim, y=y: f(x, y)
        if dtype.is_floating_point:
            yield from (lambda f=f, x=x: f(x, 0.75) for f in (torch.add, torch.mul))
            yield from (lambda f=f, x=x, n=n: f(x, n) for f in BINARY[4:10] for n in (0.0, 1.0))
            for f in (torch.Tensor.add_, torch.Tensor.sub_):
                yield lambda f=f, x=x, y=y: (f(x.clone(), y, alpha=0.75), f(x.clone(), y, alpha=-0.75))
            yield lambda x=x, y=y: (torch.add(x, y, alpha=0.75), torch.sub(x, y, alpha=0.75), torch.lerp(x, y, 0.25))
            for f in (torch.Tensor.addcmul_, torch.Tensor.addcdiv_):
                yield lambda f=f, x=x, y=y: (f(x.clone(), y, y, value=0.5), f(x.clone(), y, y))
        for f in INTO:
            yield from (lambda f=f, x=x, y=y: f(x.clone(), y) for y in (y, *numbers))
        yield from (lambda n=n, x=x: n - x for n in numbers)
        yield from (lambda n=n, x=x: n / x for n in numbers)
        yield lambda x=x, y=y: torch.where(x > y, x, y)
        yield lambda x=x: torch.where(x > 0, x, 0)
        yield lambda x=x: x.clone().zero_()
        for value in (0, 1, 0.5, True, 0.0):
            yield lambda shape=shape, value=value: torch.full(shape, value, dtype=dtype, device="tpu")
            yield lambda x=x, value=value: x.clone().fill_(value)
        yield from (lambda x=x, other=other: x.to(other) for other in (*DTYPES, torch.float16, torch.int32))
    for f in BINARY[:4] if dtype == torch.float32 else ():
        for other in ((B,), (1, B), (A, 1)):
            yield lambda f=f, other=other: f(some(A, B, dtype=dtype), some(*other, dtype=dtype))


def _broadcast() -> Iterator[Callable[[], Any]]:
    shapes = (
        ((A, B, C), (C,)), ((A, B, C), (B, C)), ((A, B, C), (A, B, 1)), ((A, B, C), (1, 1, C)), ((A, B, C), (A, 1, C)),
        ((A, B, C), (1, B, C)), ((A, B, C), (A, 1, 1)), ((A, B, C), (B, 1)), ((A, 1, C), (C,)), ((A, 1, C), (A, 1, 1)),
        ((1, B, C), (C,)), ((1, B, C), (B, C)), ((1, B, C), (1, 1, C)), ((1, B, C), (1, B, 1)), ((1, 1, C), (C,)),
        ((1, B, 1), (1, 1, C)), ((A, B, 1), (1, 1, C)), ((A, B, 1), (A, 1, C)), ((A, 1), (B,)), ((A, 1), (1, B)),
        ((1, A), (A,)), ((A, B), (1,)), ((A, B), (A, 1)), ((A,), (1,)), ((A, A), (A,)), ((A, A), (A, 1)),
        ((A, B, C, D), (D,)), ((A, B, C, D), (C, D)), ((A, B, C, D), (1, B, 1, 1)), ((A, B, C, D), (A, B, 1, 1)),
        ((A, B, C, D), (1, 1, C, D)), ((A, B, C, D), (A, B, C, 1)), ((A, B, C, D), (A, 1, C, D)),
        ((A, B, C, D), (A, 1, 1, D)), ((A, B, C, D), (A, 1, 1, 1)), ((A, B, C, C), (1, B, 1, 1)),
        ((A, B, C, C), (A, B, 1, 1)), ((A, B, C, C), (C, C)), ((A, B, C, C), (1, 1, C, C)), ((1, B, C, D), (D,)),
        ((1, B, C, D), (1, 1, C, D)), ((1, B, 1, D), (1, 1, 1, D)), ((1, B, 1, D), (D,)), ((1, B, C, C), (1, 1, C, C)),
    )  # fmt: skip
    for shape, other in shapes:
        x, y = some(*shape), some(*other)
        yield from (lambda f=f, x=x, y=y: (f(x, y), f(y, x)) for f in BINARY[:4])
        yield lambda x=x, y=y: (x == y, x < y, x > y, torch.where(x > y, x, 0), torch.where(x > y, x, y))
        yield lambda x=x, y=y: x.masked_fill(y == 0, float("-inf"))
        yield from (lambda f=f, x=x, y=y: f(x.clone(), y) for f in INTO)


def _reduced(shape: tuple[int, ...]) -> Iterator[Callable[[], Any]]:
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bool):
        x = some(*shape, dtype=dtype)
        for f in REDUCTIONS:
            yield lambda f=f, x=x: f(x)
            for dim in {0, len(shape) - 1, -1} if dtype.is_floating_point else ():
                yield lambda f=f, x=x, dim=dim: f(x, dim)
                yield lambda f=f, x=x, dim=dim: f(x, dim, keepdim=True)
    x = some(*shape)
    for f in (torch.softmax, torch.log_softmax):
        yield lambda f=f, x=x: (f(x, -1), trained(lambda x: f(x, -1).sum(), x))
    yield lambda x=x: x.norm()
    yield lambda x=x: trained(lambda x: x.mean() + x.sum(), x)


def _reduced_in_dims(shape: tuple[int, ...]) -> Iterator[Callable[[], Any]]:
    x = some(*shape)
    for count in range(1, len(shape) + 1):
        for dims in itertools.combinations(range(len(shape)), count):
            yield lambda dims=dims: (x.sum(dims), x.sum(dims, keepdim=True))
    for dim in range(-1, len(shape)):
        yield lambda dim=dim: (x.mean(dim), x.mean(dim, keepdim=True), x.sum(dim), x.sum(dim, keepdim=True))
    for dims in ((2, 3), (-2, -1), (0, 2, 3), (0, 1), (1, 2)):
        yield lambda dims=dims: (x.mean(dims), x.mean(dims, keepdim=True))
    yield lambda: (x.sum(), x.mean(), x.amax(-1), x.amax(-1, keepdim=True), x.argmax(-1), x.max(-1), x.any(), x > 0)
    yield lambda: x.mean((-1, -2), keepdim=True) + x.mean((-2, -1), keepdim=True)
    for dim in range(-1, len(shape)):
        yield lambda dim=dim: trained(lambda x: (x.softmax(dim) + x.log_softmax(dim)).sum(), x)
        yield lambda dim=dim: (x.softmax(dim), x.log_softmax(dim), x.cumsum(dim), x.argmax(dim), x.norm(dim=dim))


def _products() -> Iterator[Callable[[], Any]]:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for shapes in (
            ((A, B), (B, C)), ((A, A), (A, A)), ((A, B), (B, A)), ((A, B), (B,)), ((B,), (B,)), ((D, A, B), (D, B, C)),
            ((A, B), (B, B)), ((D, A, B), (B, C)),
            ((1, B), (B, C)), ((1, B), (B, B)), ((A, B), (B, 1)), ((1, A, B), (1, B, C)), ((1, 1, B), (1, B, C)),
        ):  # fmt: skip
            x, y = (some(*shape, dtype=dtype) for shape in shapes)
            yield lambda x=x, y=y: trained(lambda x, y: (x @ y).sum(), x, y)
        for shape in ((A, B), (1, B), (B,), (D, A, B), (D, 1, B), (1, A, B)):
            for made in (C, B, 1) if len(shape) < 3 else (C, B):
                yield lambda shape=shape, made=made, dtype=dtype: _linear(shape, made, dtype)


def _linear(shape: tuple[int, ...], made: int, dtype: torch.dtype) -> Any:
    """With and without a bias; with a gradient of what is taken, and without."""
    given = [some(*each, dtype=dtype) for each in (shape, (made, shape[-1]), (made,))]
    return [
        (
            F.linear(*some_given),
            trained(lambda *given: F.linear(*given).relu().sum(), *some_given),
            trained(lambda *parameters: F.linear(given[0], *parameters).relu().sum(), *some_given[1:]),
        )
        for some_given in (given, given[:2])
    ]


def trained(f: Callable[..., torch.Tensor], *given: torch.Tensor) -> Any:
    """What a function makes, and its gradients."""
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in given]
    made = f(*leaves)
    made.backward()
    return made, leaves


def _losses() -> Iterator[Callable[[], Any]]:
    for dtype in (torch.float32, torch.float64):
        x, y = some(A, B, dtype=dtype), some(A, B, dtype=dtype)
        yield lambda x=x: trained(F.cross_entropy, x, some(A, dtype=torch.int64))
        for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.binary_cross_entropy_with_logits):
            for shape in ((A, B), (A, 1), (A,)):
                given = some(*shape, dtype=dtype), some(*shape, dtype=dtype)
                yield lambda loss=loss, given=given: trained(loss, *given)
        yield lambda x=x, y=y: trained(lambda x, y: ((x - y) ** 2).mean(), x, y)


def _layers() -> Iterator[Callable[[], Any]]:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for shape in ((A, B), (A,), (A, B, C), (A, B, C, D), ()):
            x = some(*shape, dtype=dtype)
            for activation in (F.relu, torch.tanh, torch.sigmoid, F.gelu, F.silu, torch.exp, torch.log, torch.sqrt):
                yield lambda activation=activation, x=x: trained(lambda x: activation(x).sum(), x)
    for shape in ((A, B), (A, B, C), (1, B, C), (1, 1, C), (1, B), (A, B, C, D)):
        x = some(*shape)
        weights = some(shape[-1]), some(shape[-1])
        yield lambda x=x, w=weights: trained(lambda x, *w: F.layer_norm(x, x.shape[-1:], *w).sum(), x, *w)
        yield lambda x=x: trained(lambda x: F.layer_norm(x, x.shape[-1:]).sum(), x)
        yield lambda x=x, w=weights: trained(lambda x, w: F.rms_norm(x, x.shape[-1:], w).sum(), x, w[0])
    for shape in ((A, B), (A, B, C, D)):
        x, weights = some(*shape), (some(shape[1]), some(shape[1]))
        yield lambda x=x, w=weights: trained(
            lambda x, *w: F.batch_norm(x, torch.zeros_like(w[0]), torch.ones_like(w[0]), *w, training=True).sum(), x, *w
        )
    for spatial in ((C, D), (C, C), (1, 1)):
        x = some(A, B, *spatial)
        for weights in ((some(E, B, 1, 1), some(E)), (some(E, B, 1, 1),), (some(B, B, 1, 1),)):
            yield lambda x=x, w=weights: trained(lambda x, *w: F.conv2d(x, *w).sum(), x, *w)
            yield lambda x=x, w=weights: trained(lambda *w: F.conv2d(x, *w).sum(), *w)
        for is_training in (False, True):
            yield lambda x=x, is_training=is_training: F.batch_norm(
                x, *(some(B) for _ in range(4)), training=is_training
            )
        yield lambda x=x: (x.clone().relu_(), F.silu(x.clone(), inplace=True), F.adaptive_avg_pool2d(x, 1))
    for shape in ((A, B), (A, B, C), (1, B, C), (A, B, C, D)):
        yield lambda shape=shape: trained(lambda x: F.dropout(x, 0.1).sum(), some(*shape))
    for places in (
        some(A, dtype=torch.int64),
        some(C, D, dtype=torch.int64),
        some(1, D, dtype=torch.int64),
        some(dtype=torch.int64),
    ):
        yield lambda places=places: trained(lambda weight: F.embedding(places, weight).sum(), some(A, B))
    for shape in ((A, B, C), (1, B, C), (A, B, C, D), (1, B, C, D)):
        x = some(*shape)
        for is_causal in (False, True):
            yield lambda x=x, c=is_causal: trained(
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=c).sum(), x, x, x
            )
        yield lambda x=x: ((x @ x.mT) / 2).masked_fill(some(*x.shape[-2:-1] * 2) == 0, float("-inf")).softmax(-1) @ x


def _steps() -> Iterator[Callable[[], Any]]:
    for shape in ((A, B), (A,), (A, A), (1, A), (A, 1), (A, B, C), (A, B, C, D)):
        for optimizer in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, _momentum, torch.optim.RMSprop):
            yield lambda optimizer=optimizer, shape=shape: _step(optimizer, some(*shape))


def _momentum(parameters: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=0.01)


def _step(optimizer: Any, parameter: torch.Tensor) -> Any:
    given = parameter.clone().requires_grad_()
    made = optimizer([given], lr=0.1)
    for _ in range(2):
        made.zero_grad()
        given.square().sum().backward()
        made.step()
    return given, made


def _rearranged() -> Iterator[Callable[[], Any]]:
    for dtype in (torch.float32, torch.int64):
        x, y = some(A, B, dtype=dtype), some(A, B, dtype=dtype)
        places = some(C, dtype=torch.int64)
        yield lambda x=x: x.t().contiguous()
        yield lambda x=x: x.t() + x.t()
        yield lambda x=x, places=places: x[places]
        yield lambda x=x, places=places: x.index_select(0, places)
        yield lambda x=x: x.gather(1, some(A, B, dtype=torch.int64))
        yield lambda x=x: x.flip(0)
        for y in (
            x,
            some(A, C, dtype=dtype),
            some(C, B, dtype=dtype),
            some(A, 1, dtype=dtype),
            some(1, B, dtype=dtype),
        ):
            yield from (lambda x=x, y=y, dim=dim: torch.cat([x, y], dim) for dim in (0, 1, -1))
        for shape in ((), (A,), (A, B)):
            y = some(*shape, dtype=dtype)
            yield from (lambda y=y, n=n: torch.stack([y] * n) for n in range(2, 5))
        yield lambda dtype=dtype: torch.arange(A, dtype=dtype, device="tpu")
        yield lambda dtype=dtype: torch.arange(1, A, dtype=dtype, device="tpu")
        for shape in ((A, B, C), (1, B, C), (1, 1, C), (A, B, C, D), (1, B, C, D), (1, B, 1, D), (1, A), (A, 1)):
            y = some(*shape, dtype=dtype)
            for dim in range(len(shape)):
                new, one = ([*shape[:dim], size, *shape[dim + 1 :]] for size in (E, 1))
                yield lambda y=y, new=new, dim=dim, dtype=dtype: torch.cat([y, some(*new, dtype=dtype)], dim)
                yield lambda y=y, one=one, dim=dim, dtype=dtype: torch.cat([y, some(*one, dtype=dtype)], dim)
                yield lambda y=y, dim=dim: (torch.cat([y, y], dim), torch.stack([y, y], dim))
                yield lambda y=y, new=new, dim=dim, dtype=dtype: torch.cat([y, some(*new, dtype=dtype)], dim - y.dim())
                yield lambda y=y, one=one, dim=dim, dtype=dtype: torch.cat([y, some(*one, dtype=dtype)], dim - y.dim())
                yield lambda y=y, dim=dim: (torch.cat([y, y], dim - y.dim()), torch.stack([y, y], dim - y.dim() - 1))
        yield lambda dtype=dtype: torch.cat([some(A, dtype=dtype), some(B, dtype=dtype)])
        yield lambda dtype=dtype: torch.cat([some(A, dtype=dtype), some(A, dtype=dtype)])
        yield lambda x=x: x.argmax(-1, keepdim=True)
        if dtype == torch.float32:
            for place in (0, 1, -1):
                yield lambda x=x, place=place: trained(lambda x: x[place].sum() + x[:, place].sum(), x)
            yield lambda x=x: trained(lambda x: torch.cat([x, x], 1).sum() + torch.stack([x, x]).sum(), x)


def ordinary_ops() -> list[Op]:
    """What `ordinary` records, one op of each description; none of it is compiled."""
    found: dict[str, Op] = {}
    table = startup.lowerings()

    def note(plan: Any) -> None:
        for op in take_apart(plan.program.ops, lambda op: table.entry(op.name, "cpu").maps):
            found.setdefault(list(templates.patterns(described(op)))[-1][0], op)
        plan.failed(NotImplementedError("it is only looked at"))

    recovery = startup.engine()._executor._recovery
    recovery._may_run_again = lambda *_: False  # nor in parts
    startup._lazy.plan = note  # type: ignore[method-assign]
    for call in ordinary():
        with contextlib.suppress(
            NotImplementedError, RuntimeError, TypeError, OSError, IndexError
        ):  # what PyTorch has not in this dtype
            _C.forget_streams()  # where a number is seen for the first time it is not a run-time input
            made = call()
            torch.tpu.synchronize()
            del made
    return list(found.values())


def described(op: Op) -> str:
    """As `Fragments` describes it where nothing is watched."""
    return f"{op.name}({parameters(op)[0]})->({describe_results(op)}) {op.settings}"


def resized(value: Any, new: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Any:
    """An op, or a part of one, with other shapes of its arrays."""
    if isinstance(value, Base):
        return Base(new(value.shape), value.dtype)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: new(held) if field.name == "sizes" else resized(held, new)
            for field in dataclasses.fields(value)
            if (held := getattr(value, field.name)) is not None
        }
        return dataclasses.replace(value, **changed)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(resized(item, new) for item in value)
    return value


def shaped(op: Op, shape: tuple[Any, ...]) -> Op:
    """The op with another shape of all arrays that have dimensions."""
    changed: Op = resized(op, lambda old: shape if old else old)
    return changed


def without_count(sizes: Mapping[str, str]) -> dict[str, str]:
    """The single sizes."""
    return {letter: size for letter, size in sizes.items() if letter != templates.COUNT}


def described_with(pattern: str, letters: Sequence[str], sizes: Sequence[int]) -> str:
    """The description of an op with these sizes for the letters of its pattern."""
    named = dict(zip(letters, map(str, sizes), strict=True))
    described = re.sub(r"\b[A-M](?=x)|(?<=x)[A-M](?=x)", lambda found: named[found[0]], pattern)
    return re.sub(r"(?<=\bint:)[A-M]\b", lambda found: named[found[0]], described)


class Maker:
    """Makes templates for a platform."""

    def __init__(self, platform: str) -> None:
        engine = startup.engine()
        self._context = ops.Context
        self._platform = platform
        self._tracer = tracing.Tracer(engine.client, platform, self._context)

    def make(self, op: Op, entry: LoweringEntry) -> tuple[str, FragmentTemplate] | None:
        """An op's template and where it is found; None where it has none."""
        if op.padding is not None or not entry.persists:
            return None
        return self._of_shape(op, entry) or self._of_sizes(op, entry)

    def agrees(self, op: Op, entry: LoweringEntry, made: tuple[str, FragmentTemplate]) -> bool:
        """Whether tracing the op as it is gives what this template does, made for another platform."""
        sizes = dict(templates.patterns(described(op)))[made[0]]
        if self._tracer.trace([(op, entry)])[0] != made[1].filled(sizes):
            return False
        if SHAPE in sizes:
            return self._decides_nothing_by_shape(op, entry)
        letters = list(without_count(sizes))
        return learned_templates.decides_nothing(self._tracer, op, entry, without_count(sizes), letters)

    def _of_shape(self, op: Op, entry: LoweringEntry) -> tuple[str, FragmentTemplate] | None:
        """A template for whatever shape."""
        if SHAPE not in next(templates.patterns(described(op)))[1] or not self._decides_nothing_by_shape(op, entry):
            return None
        ops = [shaped(op, shape) for shape in (SENTINELS[:2], *SHAPES)]
        try:
            made = self._tracer.trace([(op, entry) for op in ops])
        except Exception:  # noqa: BLE001 - an op that cannot be traced with these sizes
            return None
        pattern, _ = next(templates.patterns(described(op)))
        return self._of_fragments(pattern, 0, entry, list(zip(map(described, ops), made, strict=True)))

    def _of_sizes(self, op: Op, entry: LoweringEntry) -> tuple[str, FragmentTemplate] | None:
        """A template for whatever sizes."""
        *_, (pattern, sizes) = templates.patterns(described(op))
        letters = [letter for letter in sizes if letter != templates.COUNT]
        if len(letters) > len(SENTINELS) or not learned_templates.decides_nothing(
            self._tracer, op, entry, without_count(sizes), letters
        ):
            return None
        old = [int(sizes[letter]) for letter in letters]
        try:
            asked = [(op, entry, dict(zip(old, new, strict=False))) for new in (SENTINELS, *SIZES)]
            made = self._tracer.resized(asked)
        except Exception:  # noqa: BLE001 - an op that cannot be traced with these sizes
            return None
        found = [(described_with(pattern, letters, [became[n] for n in old]), one) for one, became in made]
        return self._of_fragments(pattern, -1, entry, found)

    def _decides_nothing_by_shape(self, op: Op, entry: LoweringEntry) -> bool:
        return not any(self._decisions(lambda symbols, s=s: shaped(op, symbols.sizes(s)), entry) for s in SYMBOLIC)

    def _decisions(self, of: Callable[[Symbols], Op], entry: LoweringEntry) -> tuple[str, ...]:
        """What tracing an op with symbolic sizes took for other than 0 without knowing."""
        symbols = Symbols([(2, 2**31 - 1, 2**31 - 1)] * len(SENTINELS))
        try:
            op = of(symbols)
            trace = tracing._Trace(op, entry, self._context, self._platform, "off")
            structs = [tracing._struct(parameter) for parameter in trace.parameters]
            with startup.engine().client.tracing():
                symbols.trace(trace.function("op"), structs)
        except Exception as error:  # noqa: BLE001 - whatever cannot be done with symbolic sizes
            return (repr(error),)
        return symbols.unequal()

    def _of_fragments(
        self, pattern: str, place: int, entry: LoweringEntry, found: Sequence[tuple[str, tracing.Fragment]]
    ) -> tuple[str, FragmentTemplate] | None:
        """The template of the first, by description, which has sizes that no text has, if it is right for the others
        that have the pattern."""
        sizes = [dict(list(templates.patterns(description))[place:][:1]).get(pattern) for description, _ in found]
        checked = [(s, one) for s, (_, one) in zip(sizes, found, strict=True) if s is not None]
        if len(checked) < 3 or sizes[0] is None:
            return None
        # What is the same in all, as the 2 of a stack of two, is no size.
        varying = {letter: size for letter, size in sizes[0].items() if len({s[letter] for s, _ in checked}) > 1}
        template = templates.template_of(entry.name, found[0][1], varying)
        if template is None or any(template.filled(s) not in (None, one) for s, one in checked):
            return None
        return pattern, template


def make(found: Sequence[Op]) -> dict[str, dict[str, Any]]:
    """What the files hold, by op."""
    makers = {platform: Maker(platform) for platform in PLATFORMS}
    made: dict[str, dict[tuple[str, str], list[str]]] = {}
    sources: dict[str, dict[str, str]] = {}
    for count, op in enumerate(found):
        first: tuple[str, FragmentTemplate] | None = None
        for platform, maker in makers.items():
            entry = startup.lowerings().entry(op.name, platform)
            is_first = first is not None and maker.agrees(op, entry, first)
            template = first if is_first else maker.make(op, entry)
            if template is None:
                break
            first = first or template
            home = inspect.unwrap(entry.function).__module__
            sources.setdefault(op.name, {})[home] = templates.digest_of_sources(home)
            platforms = made.setdefault(op.name, {}).setdefault((template[0], json.dumps(template[1])), [])
            if platform not in platforms:
                platforms.append(platform)
        print(f"\r{count + 1} of {len(found)} ops ", end="", file=sys.stderr)
    return {
        name: {
            "jax": jax.__version__,
            "sources": dict(sorted(sources[name].items())),
            "templates": sorted([platforms, pattern, *json.loads(t)] for (pattern, t), platforms in rows.items()),
        }
        for name, rows in made.items()
    }


def text_of(held: Mapping[str, Any]) -> str:
    """A file's text: a line for each template."""
    rows = ",\n".join(json.dumps(row) for row in held["templates"])
    head = json.dumps({key: value for key, value in held.items() if key != "templates"}, indent=0)
    return f'{head.rstrip("}").rstrip()},\n"templates": [\n{rows}\n]}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="of the ops that are checked")
    options = parser.parse_args()
    first, step = map(int, options.part.split("/"))
    made = make(ordinary_ops()[first::step])
    if not options.check:
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir()
        for name, held in made.items():
            templates.file_of(FOLDER, name).write_text(text_of(held))
        return
    for name, new in made.items():
        file = templates.file_of(FOLDER, name)
        old = json.loads(file.read_text())["templates"] if file.exists() else []
        if missing := [row for row in new["templates"] if row not in old]:
            sys.exit(f"not in {file}, or other there: {missing}; python packaging/fragment_templates.py makes it anew")


if __name__ == "__main__":
    main()
