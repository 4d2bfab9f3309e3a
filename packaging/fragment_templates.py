"""Writes torchtpu/ops/templates: the fragments of ordinary ops, for arrays of all sizes, a file for each op.

    python packaging/fragment_templates.py            # writes the files
    python packaging/fragment_templates.py --check    # fails where a template is not what tracing gives
    python packaging/fragment_templates.py --renew    # looks only at templates of changed lowerings, in minutes

The ops are those that `ordinary` calls. One becomes a template where

- tracing it decides nothing by a size, on any platform: it is traced with sizes of which nothing is known but that they
  are at least 2 (jax's symbolic dimensions); where that decides that two single sizes differ, the template says so, and
- filled in with other sizes, small and large, equal ones and some of 0 and 1 where that makes no other description, the
  template is to the letter what tracing with those sizes gives.

Sizes of less than 20, such as those of kernels, and usual ones of attention's heads stay as they are. An op with
padding becomes a template where tracing it with symbols for the sizes that stay, too, decides nothing by them, and
gives the template for several capacities, wide and narrow bounds. Ops on elements need none with padding: they are
looked for without (`asked_for`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import math
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ |= {"TORCHTPU_CACHE": "off", "TORCHTPU_TIERS": "off"}

import jax
import torch
import torch.nn.functional as F
from described_ops import filled, op_of

from torchtpu import ops, startup
from torchtpu.ops import counted
from torchtpu.runtime import _C
from torchtpu.runtime.ir.calls import LoweringEntry, describe_results, parameters, results_of
from torchtpu.runtime.ir.list_ops import take_apart
from torchtpu.runtime.ir.program import Base, Lifted, Op, Operand, PaddedExtent, Program, Symbolic
from torchtpu.runtime.ir.values import operands
from torchtpu.runtime.lowering import learned_templates, templates, tracing
from torchtpu.runtime.lowering.templates import FragmentTemplate
from torchtpu.runtime.lowering.written import written_fragment
from torchtpu.runtime.padding.evaluate import Sizes, Symbols
from torchtpu.runtime.padding.layout import Bound, Layouts, Outline, value_of
from torchtpu.runtime.padding.whole import on_all_elements
from torchtpu.runtime.partition import pieces

FOLDER = Path(ops.__path__[0], "templates")
PLATFORMS = ("cpu", "cuda", "tpu")

A, B, C, D = 21, 29, 97, 103  # sizes of the ordinary ops, which have no other number like these
E = 41
PART = 23  # of each of these but A, and a number of heads
ANY = 43  # an int that is no size
PRIMES = (29, 97, 103, 41, 53, 59, 61, 67, 71, 73, 79, 83)  # sizes of ops that are made of descriptions
HEADS = (16, 32, 64, 128)  # sizes of attention's heads, of which it takes the root
LITERAL = {*map(str, (*range(20), *HEADS))}
# Tens, whose products have few digits.
SENTINELS = (1010, 1030, 1070, 1090, 1130, 1270, 1310, 1370)
SIZES = (
    (2, 3, 5, 7, 11, 13, 17, 19), (7, 4, 3, 2, 9, 5, 6, 8), (16, 64, 32, 8, 2, 48, 4, 128),
    (65537, 33, 2, 12, 5, 21, 100, 10),
)  # fmt: skip
EQUAL = (6,) * 8
FEWER, MORE = (150, 1050, 900), (181, 1100, 1200)  # sizes of what changes
CHANGING = {256: 181, 1280: 1100, 1536: 1200}  # and their capacities: that of a count is that of its buffer
# Sizes that do not change, and of each that does the capacity, the least size that has it, and how much more room there
# is.
PADDED = (
    ((110, 130, 170, 190, 230, 290, 310, 370), ((208, 2, 0), (272, 17, 0), (336, 2, 0))),
    (SIZES[0], ((32, 17, 0), (8, 2, 0), (128, 33, 0))),
    (SIZES[1], ((64, 2, 1), (32, 2, 0), (256, 129, 1))),
    (SIZES[2], ((256, 129, 0), (32, 2, 1), (32, 17, 0))),
    ((32,) * 8, ((32, 2, 3), (32, 17, 0), (8, 2, 0))),
    ((64,) * 8, ((64, 33, 0), (128, 33, 2), (64, 33, 0))),
    ((96, 32, 4, 8, 2, 16, 48, 24), ((32, 17, 0), (64, 33, 1), (8, 2, 0))),
    (SIZES[1][::-1], ((1152, 1025, 2), (8, 2, 0), (1024, 513, 0))),
    (SIZES[2][::-1], ((8, 2, 0), (1024, 513, 0), (16, 9, 1))),
)  # fmt: skip
# For what has too many elements with the first of these.
SMALL = (22, 26, 34, 38, 46, 58, 62, 74), ((87, 2, 0), (93, 17, 0), (107, 2, 0))
# Kernel, stride and padding.
WINDOWS = (
    (1, 1, 0), (3, 1, 1), (3, 2, 1), (3, 1, 0), (5, 1, 2), (2, 2, 0), (4, 2, 1), (7, 2, 3), (5, 1, 0), (5, 2, 2),
    (7, 1, 3), (3, 2, 0), (4, 4, 0), (8, 4, 2), (9, 1, 4), (10, 5, 0), (11, 4, 5),
)  # fmt: skip
POOLS = (2, 2, 0), (3, 2, 1), (3, 3, 0), (4, 4, 0)
ACTIVATIONS = (
    F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.silu, F.mish, F.hardswish, F.hardsigmoid, F.hardtanh,
    F.softplus, F.logsigmoid, F.hardshrink, F.softshrink, F.tanhshrink, F.softsign, torch.sigmoid, torch.tanh,
    torch.sin, torch.cos, torch.rsqrt, torch.reciprocal, torch.abs, torch.log1p, torch.expm1, torch.erf, torch.atan,
    torch.square,
    lambda x: F.threshold(x, 0.1, 20), lambda x: F.leaky_relu(x, 0.2), lambda x: F.leaky_relu(x, 0.1),
    lambda x: F.hardtanh(x, 0, 1), lambda x: x**3, lambda x: x**0.5, lambda x: x.clamp(0, 1), lambda x: x.clamp(min=0),
    lambda x: x.clamp(-1, 1), lambda x: F.gelu(x, approximate="tanh"), lambda x: F.logsigmoid(-x) * x,
    lambda x: torch.maximum(x, x * 2), lambda x: torch.where(x > 0, x, 0), lambda x: F.dropout(x, 0.5),
    lambda x: x.norm(), lambda x: F.prelu(x, some(1, dtype=x.dtype)), lambda x: torch.logaddexp(x, x * 2),
    lambda x: torch.atan2(x, x * 2),
)  # fmt: skip
IN_PLACE = (
    F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.silu, F.mish, F.hardswish, F.hardsigmoid, F.hardtanh,
    lambda x, inplace: F.leaky_relu(x, 0.2, inplace), lambda x, inplace: F.threshold(x, 0.1, 20, inplace),
)  # fmt: skip
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
RARER_UNARY = (
    torch.acos, torch.asin, torch.atan, torch.sinh, torch.cosh, torch.tan, torch.acosh, torch.asinh, torch.atanh,
    torch.expm1, torch.log2, torch.log10, torch.trunc, torch.frac, torch.erfc, torch.erfinv, torch.isinf, torch.sgn,
    torch.signbit, torch.deg2rad, torch.rad2deg, torch.logit, torch.sinc, torch.nan_to_num, torch.bitwise_not,
    torch.lgamma, torch.digamma, torch.special.entr, torch.special.ndtri, torch.special.log_ndtr, torch.special.i0,
    torch.special.i0e, lambda x: x.clamp(-1, 1), lambda x: x.clamp(max=1), lambda x: x.clamp(min=1e-8), lambda x: x**-1,
    lambda x: x**1.5, lambda x: x**-0.5, lambda x: x**4, lambda x: 2**x, lambda x: x.round(decimals=2),
    lambda x: torch.xlogy(x, x), lambda x: torch.div(x, 2, rounding_mode="trunc"), lambda x: x % 2, lambda x: x.fmod(2),
)  # fmt: skip
RARER_BINARY = (
    torch.atan2, torch.hypot, torch.fmod, torch.fmax, torch.fmin, torch.logaddexp, torch.logaddexp2, torch.logical_xor,
    torch.bitwise_xor, torch.xlogy, torch.copysign, torch.special.xlog1py, torch.nextafter, torch.heaviside,
    lambda x, y: torch.div(x, y, rounding_mode="floor"), lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    lambda x, y: torch.addcmul(x, x, y), lambda x, y: torch.addcdiv(x, x, y), lambda x, y: torch.lerp(x, y, y),
    lambda x, y: torch.addcmul(x, x, y, value=ANY), lambda x, y: x.clamp(y, y), lambda x, y: x.clamp(min=y),
    lambda x, y: x.clamp(max=y), lambda x, y: x << y, lambda x, y: x >> y, torch.complex, torch.polar,
)  # fmt: skip
INTO = (torch.Tensor.add_, torch.Tensor.sub_, torch.Tensor.mul_, torch.Tensor.div_, torch.Tensor.copy_)
REDUCTIONS = (
    torch.sum, torch.mean, torch.amax, torch.amin, torch.max, torch.min, torch.argmax, torch.argmin, torch.any,
    torch.all, torch.prod, torch.var, torch.std, torch.cumsum,
)  # fmt: skip
DTYPES = (torch.float32, torch.int64, torch.bool, torch.float64, torch.bfloat16)
RARER_DTYPES = (torch.int32, torch.uint8, torch.float16, torch.complex64)
MIXED_DTYPES = (
    (torch.float32, torch.bool), (torch.float32, torch.int64), (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16), (torch.float32, torch.int32), (torch.float32, torch.float64),
    (torch.int64, torch.bool), (torch.bfloat16, torch.bool), (torch.complex64, torch.float32),
)  # fmt: skip


def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An array on the device, uploaded: no op makes it. Nobody reads what is in it."""
    return torch.empty(shape, dtype=dtype).to("tpu")


def ordinary() -> Iterator[Callable[[], Any]]:
    """Calls of the ops of first scripts."""
    for dtype in DTYPES:
        yield from _elementwise(dtype)
        yield from _rarer(dtype)
    yield from _rarer_dtypes()
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
    yield from _rarer_steps()
    yield from _rearranged()
    yield from _clipped()
    yield from _taken()
    yield from _masked()


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
        if dtype in (torch.float32, torch.int64):
            yield lambda x=x: (x / ANY, x * ANY, x + ANY, x - ANY, x > ANY, x < ANY, x // ANY, x % ANY)
            for f in BINARY[:10]:
                yield lambda f=f, x=x: _at_one_place(f, x, 3, 4)
        yield lambda x=x, y=y: torch.where(x > y, x, y)
        yield lambda x=x: torch.where(x > 0, x, 0)
        yield lambda x=x: x.clone().zero_()
        for value in (0, 1, 0.5, True, 0.0):
            yield lambda shape=shape, value=value: torch.full(shape, value, dtype=dtype, device="tpu")
            yield lambda x=x, value=value: x.clone().fill_(value)
        yield from (lambda x=x, other=other: x.to(other) for other in (*DTYPES, torch.float16, torch.int32))
    for shape in ((), (A,), (A, B), (A, 1), (1, A), (A, B, C), (A, B, C, D)):
        x = some(*shape, dtype=dtype)
        yield lambda x=x: (torch.ops.aten.div.Scalar(x, ANY), torch.ops.aten.mul.Scalar(x, ANY))
        yield from (lambda f=f, x=x: f(x, some(dtype=x.dtype)) for f in BINARY[:4])
    for f in BINARY[:4] if dtype == torch.float32 else ():
        for other in ((B,), (1, B), (A, 1)):
            yield lambda f=f, other=other: f(some(A, B, dtype=dtype), some(*other, dtype=dtype))


def _rarer(dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """Ops on elements, and activations with their gradients."""
    x, y = some(A, B, dtype=dtype), some(A, B, dtype=dtype)
    yield from (lambda f=f: f(x) for f in RARER_UNARY)
    yield from (lambda f=f: f(x, y) for f in RARER_BINARY)
    if dtype.is_floating_point:
        yield from (lambda f=f: trained(lambda x: f(x).sum(), x) for f in ACTIVATIONS)
        yield from (lambda f=f: trained(lambda x: f(x * 1.5, inplace=True).sum(), x) for f in IN_PLACE)
        for f in (torch.sigmoid_, torch.tanh_, torch.exp_, torch.sqrt_, torch.neg_, torch.abs_, torch.reciprocal_):
            yield lambda f=f: f(x.clone())
        for f in (torch.rsqrt_, torch.floor_, torch.sin_, torch.cos_, torch.log_, torch.round_, torch.square_):
            yield lambda f=f: f(x.clone())
        yield lambda: (x.clone().clamp_(0, 1), x.clone().clamp_(min=0), x.clone().clamp_(-1, 1), x.clone().pow_(2))
        yield lambda: (x.clone().lerp_(y, 0.1), x.clone().lerp_(y, 0.001), x.clone().masked_fill_(y > 0, 0))


def _rarer_dtypes() -> Iterator[Callable[[], Any]]:
    """Two dtypes at once, and few ops of others."""
    for dtypes in MIXED_DTYPES:
        for x, y in itertools.permutations([some(A, B, dtype=dtype) for dtype in dtypes]):
            yield from (lambda f=f, x=x, y=y: f(x, y) for f in (*BINARY[:10], *INTO[:4]))
            number = some(dtype=y.dtype)
            yield from (lambda f=f, x=x, number=number: f(x, number) for f in BINARY[:4])
    for dtype in RARER_DTYPES:
        x, y = some(A, B, dtype=dtype), some(A, B, dtype=dtype)
        for f in BINARY[:10]:
            yield from (lambda f=f, x=x, y=y: f(x, y) for y in (y, 0, 1, 2, 0.5))
        for f in (*UNARY[:12], torch.clone, torch.zeros_like, torch.ones_like):
            yield lambda f=f, x=x: f(x)
        for other in (*DTYPES, *RARER_DTYPES):
            yield lambda x=x, other=other: (x.to(other), some(A, B, dtype=other).to(x.dtype))
        yield from (lambda f=f, x=x, y=y: f(x.clone(), y) for f in INTO)


def _at_one_place(f: Callable[..., Any], x: torch.Tensor, *numbers: int) -> Any:
    """Calls with other numbers each time, which become run-time inputs."""
    made = []
    for n in numbers:
        made.append(f(x, n))
        with contextlib.suppress(NotImplementedError):  # it is only looked at
            torch.tpu.synchronize()
    return made


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
        for shape in ((A, B), (1, B), (B,), (D, A, B), (D, 1, B), (1, A, B), (1, 1, B)):
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
    yield from _convolutions()
    for shape in ((A, B), (A, B, C), (1, B, C), (A, B, C, D)):
        yield lambda shape=shape: trained(lambda x: F.dropout(x, 0.1).sum(), some(*shape))
    for places in (
        some(1, dtype=torch.int64),
        some(1, 1, dtype=torch.int64),
        some(A, 1, dtype=torch.int64),
        some(A, dtype=torch.int64),
        some(C, D, dtype=torch.int64),
        some(1, D, dtype=torch.int64),
        some(dtype=torch.int64),
    ):
        yield lambda places=places: trained(lambda weight: F.embedding(places, weight).sum(), some(A, B))
    for shape in ((A, B, C), (1, B, C), (A, B, C, D), (1, B, C, D)):
        x = some(*shape)
        for is_causal, size in itertools.product((False, True), HEADS):
            yield lambda lead=shape[:-1], c=is_causal, size=size: trained(
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=c).square().sum(),
                *(some(*lead, size) for _ in range(3)),
            )
        yield lambda lead=shape[:-2]: [
            F.scaled_dot_product_attention(some(*lead, 1, size), *(some(*lead, length, size) for _ in range(2)))
            for length in (1, E)
            for size in HEADS
        ]
        yield lambda x=x: ((x @ x.mT) / 2).masked_fill(some(*x.shape[-2:-1] * 2) == 0, float("-inf")).softmax(-1) @ x


def _convolutions() -> Iterator[Callable[[], Any]]:
    x, signal = some(A, B, C, D), some(A, B, C)
    for kernel, stride, padding in (
        (3, 1, 1), (3, 1, 0), (3, 2, 1), (5, 1, 2), (5, 1, 0), (7, 2, 3), (1, 2, 0), (2, 2, 0), (4, 2, 1), (4, 4, 0),
    ):  # fmt: skip
        for weights in ((some(E, B, kernel, kernel), some(E)), (some(E, B, kernel, kernel),)):
            yield lambda w=weights, s=stride, p=padding: trained(lambda *w: F.conv2d(x, *w, s, p).sum(), *w)
            yield lambda w=weights, s=stride, p=padding: trained(lambda x, *w: F.conv2d(x, *w, s, p).sum(), x, *w)
        for weights in ((some(E, B, kernel), some(E)), (some(E, B, kernel),)):
            yield lambda w=weights, s=stride, p=padding: trained(lambda x, *w: F.conv1d(signal, *w, s, p).sum(), *w)
            yield lambda w=weights, s=stride, p=padding: trained(lambda x, *w: F.conv1d(x, *w, s, p).sum(), signal, *w)
    for kernel, stride, padding in ((2, 2, 0), (3, 2, 1), (3, 2, 0), (3, 3, 0)):
        for pool in (F.max_pool2d, F.avg_pool2d):
            yield lambda pool=pool, k=kernel, s=stride, p=padding: trained(lambda x: pool(x, k, s, p).sum(), x)
    yield lambda: trained(lambda x: F.group_norm(x, 4, *(some(B) for _ in range(2))).sum(), x)
    yield lambda: trained(lambda x: F.interpolate(x, scale_factor=2).sum(), x)


def _steps() -> Iterator[Callable[[], Any]]:
    for shape in ((A, B), (A,), (1,), (1, 1), (A, A), (1, A), (A, 1), (A, B, C), (A, B, C, D)):
        for optimizer in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, _momentum, torch.optim.RMSprop):
            yield lambda optimizer=optimizer, shape=shape: _step(optimizer, some(*shape))


def _rarer_steps() -> Iterator[Callable[[], Any]]:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for optimizer in (
            torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD,
            torch.optim.Rprop, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, _centered,
            _nesterov, _momentum, _fused, _amsgrad, _decayed, torch.optim.SGD,
        ):  # fmt: skip
            yield lambda optimizer=optimizer, dtype=dtype: _step(optimizer, some(A, B, dtype=dtype))
    for f in (torch._foreach_abs, torch._foreach_neg, torch._foreach_exp, torch._foreach_sqrt, torch._foreach_zero_):
        yield lambda f=f: f([some(A, B)])
    for f in (
        torch._foreach_add, torch._foreach_sub, torch._foreach_mul, torch._foreach_div, torch._foreach_add_,
        torch._foreach_sub_, torch._foreach_mul_, torch._foreach_div_, torch._foreach_maximum, torch._foreach_minimum,
        torch._foreach_clamp_max_, torch._foreach_clamp_min_, torch._foreach_pow,
    ):  # fmt: skip
        yield from (lambda f=f, y=y: f([some(A, B)], y) for y in ([some(A, B)], 2, 0.5, [0.25], 0.75))
    for alpha in (-1.0, 1.0, -1):
        yield lambda alpha=alpha: torch._foreach_add_([some(A, B)], [some(A, B)], alpha=alpha)
        yield lambda alpha=alpha: torch._foreach_add([some(A, B)], [some(A, B)], alpha=alpha)
    yield lambda: torch._foreach_copy_([some(A, B)], [some(A, B)])
    yield from (
        lambda w=weight: torch._foreach_lerp_([some(A, B)], [some(A, B)], w) for weight in (0.1, 0.001, [some(A, B)])
    )


def _amsgrad(parameters: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, amsgrad=True)


def _decayed(parameters: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=lr, weight_decay=0.01, maximize=True)


def _clipped() -> Iterator[Callable[[], Any]]:
    shapes = (
        (A,), (1,), (A, B), (A, A), (1, B), (A, 1), (A, B, C), (A, B, C, D), (A, B, 3, 3), (A, 1, 3, 3), (A, B, 1, 1),
    )  # fmt: skip
    for dtype, shape in itertools.product((torch.float32, torch.bfloat16), shapes):
        yield lambda shape=shape, dtype=dtype: torch.nn.utils.clip_grad_norm_(_with_gradients(shape, dtype), 1.0)
        yield lambda shape=shape, dtype=dtype: torch.nn.utils.clip_grad_value_(_with_gradients(shape, dtype), 0.5)
    for optimizer, shape in itertools.product(
        (_fused, _centered, _nesterov, torch.optim.Adagrad, torch.optim.Adamax), shapes
    ):
        yield lambda optimizer=optimizer, shape=shape: _step(optimizer, some(*shape))
    for optimizer in (torch.optim.SGD, _momentum, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):
        yield from (lambda o=optimizer, shape=shape: _step(o, some(*shape)) for shape in shapes[-3:])
        for shape in ((A,), (A, B)):
            yield lambda o=optimizer, shape=shape: _step(o, some(*shape, dtype=torch.float64))


def _with_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    parameters = [some(*shape, dtype=dtype).requires_grad_() for _ in range(2)]
    for parameter in parameters:
        parameter.grad = some(*shape, dtype=dtype)
    return parameters


def _fused(parameters: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def _centered(parameters: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=lr, centered=True, momentum=0.9)


def _nesterov(parameters: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)


def _taken() -> Iterator[Callable[[], Any]]:
    """At places in tensors, and into them."""
    for shape, dim in (((A,), 0), ((A, B), 0), ((A, B), 1), ((A, B, C), 0), ((A, B, C), 1), ((1, B, C), 1)):
        at = (slice(None),) * dim
        for places in (some(D, dtype=torch.int64), some(1, dtype=torch.int64)):
            yield lambda shape=shape, at=(*at, places): trained(lambda x: x[at].square().sum(), some(*shape))
            taken = (*shape[:dim], *places.shape, *shape[dim + 1 :])
            yield lambda shape=shape, dim=dim, p=places, taken=taken: trained(
                lambda x, y: x.index_add(dim, p, y).sum() + x.index_select(dim, p).square().sum(),
                some(*shape), some(*taken),
            )  # fmt: skip
            yield lambda shape=shape, dim=dim, p=places, taken=taken: some(*shape).index_copy_(dim, p, some(*taken))
    yield lambda: trained(
        lambda x: x[some(D, dtype=torch.int64), some(D, dtype=torch.int64)].square().sum(), some(A, B)
    )
    for shape, places, dim in (
        ((A, B), (A, 1), 1), ((A, B), (A, B), 1), ((A, B), (A, C), 1), ((A, B, C), (A, B, 1), 2), ((A,), (C,), 0),
        ((A, B), (C, B), 0),
    ):  # fmt: skip
        yield lambda shape=shape, places=places, dim=dim: trained(
            lambda x: x.gather(dim, some(*places, dtype=torch.int64)).square().sum(), some(*shape)
        )
        for dtype in (torch.float32, torch.int64):
            given = some(*shape, dtype=dtype), some(*places, dtype=torch.int64)
            yield lambda given=given, p=places, dim=dim: given[0].scatter(dim, given[1], 1)
            yield lambda given=given, p=places, dim=dim: given[0].clone().scatter_(dim, given[1], 1)
            yield lambda given=given, p=places, dim=dim, t=dtype: given[0].scatter_add(dim, given[1], some(*p, dtype=t))
            yield (
                lambda given=given, p=places, dim=dim, t=dtype: (
                    given[0].clone().scatter_add_(dim, given[1], some(*p, dtype=t))
                )
            )
    for shape in ((A,), (A, B)):
        yield lambda shape=shape: (some(*shape).topk(5, -1), some(*shape).topk(1, -1), some(*shape).sort(-1))
        yield lambda shape=shape: (some(*shape).logsumexp(-1), some(*shape).logsumexp(-1, keepdim=True))


def _masked() -> Iterator[Callable[[], Any]]:
    """By masks, and with them."""
    ids, mask = some(A, B, dtype=torch.int64), some(A, B, dtype=torch.bool)
    yield lambda: (ids == 0, ids != -100, ids.eq(1), ids.ne(0), ~mask, mask & mask, mask | mask, mask.logical_not())
    yield lambda: (
        mask.sum(),
        mask.sum(1),
        mask.cumsum(-1),
        ids.cumsum(-1),
        mask.any(),
        mask.all(),
        mask.long(),
        mask.float(),
    )
    yield lambda: (ids.sum(1), ids.max(), ids.min(), ids.amax(-1), ids * mask, ids.masked_fill(mask, -100))
    yield lambda: (torch.count_nonzero(mask), ids.clamp(min=0), ids.clamp(max=1), some(A, B).clamp(min=1e-9))
    for shape in ((A,), (A, B), (A, B, C), (A, 1), (A, 1, 1), (1, 1, C, C), (A, 1, C, C), (A, 1, 1, C)):
        mask = some(*shape, dtype=torch.bool)
        for dtype in (torch.float32, torch.int64):
            yield lambda m=mask, shape=shape, t=dtype: torch.where(m, some(*shape, dtype=t), some(dtype=t))
            yield lambda m=mask, shape=shape, t=dtype: torch.where(m, some(dtype=t), some(*shape, dtype=t))
        yield lambda m=mask: (torch.where(m, some(), some()), torch.where(m, 0.0, float("-inf")), ~m, m & m)
        for value in (0, 0.0, float("-inf"), -1e9, -100):
            yield lambda m=mask, shape=shape, value=value: some(*shape).masked_fill(m, value)
            yield lambda m=mask, shape=shape, value=value: some(*shape).clone().masked_fill_(m, value)
    for one, other in (((1, 1, 1, C), (1, 1, C, 1)), ((A, 1), (B,)), ((1, 1, C), (1, C, 1)), ((C, 1), (C,))):
        x, y = some(*one, dtype=torch.int64), some(*other, dtype=torch.int64)
        yield lambda x=x, y=y: (x <= y, x < y, x == y, x > y, x >= y, x - y)
    for shape, count in (((A, B), 48), ((A, B, C), 48), ((C,), 48)):
        for dtype in (torch.float32, torch.int64):
            x = some(*shape, dtype=dtype)
            given = some(*shape[: max(1, len(shape) - 1)], dtype=torch.bool)
            for m in (given,) if given.shape == shape else (given, some(*shape, dtype=torch.bool)):
                yield lambda x=x, m=m, count=count: _at_known_mask(x, m, count)
    for size in (8, *HEADS):
        given = [some(A, B, C, size) for _ in range(3)]
        for attended in ((A, 1, C, C), (A, 1, 1, C), (C, C), (A, B, C, C), (1, 1, C, C)):
            for dtype in (torch.float32, torch.bool):
                yield lambda g=given, a=attended, t=dtype: trained(
                    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, some(*a, dtype=t)).square().sum(), *g
                )
        for keywords in (
            {"dropout_p": 0.1},
            {"dropout_p": 0.1, "is_causal": True},
            {"scale": size**-0.5, "is_causal": True},
        ):
            yield lambda g=given, k=keywords: trained(
                lambda *qkv: F.scaled_dot_product_attention(*qkv, **k).square().sum(), *g
            )
        if size == 8:
            yield lambda g=given: trained(lambda *qkv: F.scaled_dot_product_attention(*qkv).square().sum(), *g)
            yield lambda g=given: F.scaled_dot_product_attention(some(A, B, 1, 8), *g[1:])
        yield lambda g=given, size=size: F.scaled_dot_product_attention(
            some(A, B, 1, size), *g[1:], some(A, 1, 1, C), scale=size**-0.5
        )
        yield lambda g=given, size=size: F.scaled_dot_product_attention(*g, some(A, 1, C, C), scale=size**-0.5)


def _at_known_mask(x: torch.Tensor, mask: torch.Tensor, count: int) -> Any:
    """What `x[mask]` does where the count is known."""

    def taken(x: torch.Tensor) -> torch.Tensor:
        return counted._at_mask(x, 0, mask, count, torch.count_nonzero(mask))

    return trained(lambda x: taken(x).square().sum(), x) if x.is_floating_point() else taken(x)


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
        if dtype == torch.float32:
            for ends in ((0, 1), (-1, 1), (0.5, 1.5), (0, 10)):
                yield lambda ends=ends: torch.linspace(*ends, A, device="tpu")
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
            for shape in ((A,), (A, B), (A, B, C), (A, B, C, D)):
                for place, dim in itertools.product((0, 1, 2, -1), range(len(shape))):
                    taken = functools.partial(_selected, dim=dim, place=place)
                    yield lambda shape=shape, taken=taken: trained(taken, some(*shape))
            yield lambda x=x: trained(lambda x: torch.cat([x, x], 1).sum() + torch.stack([x, x]).sum(), x)


def _selected(x: torch.Tensor, dim: int, place: int) -> torch.Tensor:
    return x.select(dim, place).square().sum()


def ordinary_ops(first: int = 0, step: int = 1) -> list[Op]:
    """What a part of `ordinary` records, one op of each pattern."""
    found: dict[str, Op] = {}
    table = startup.lowerings()

    for call in itertools.islice(ordinary(), first, None, step):
        for program in programs_of(call):
            for op in take_apart(program.ops, lambda op: table.entry(op.name, "cpu").maps):
                if written_fragment(op, table.entry(op.name, "cpu")) is not None:
                    continue
                found.setdefault(pattern_of(op)[0], op)
    return list(found.values())


def programs_of(call: Callable[[], Any]) -> list[Program]:
    """What a call records; nothing of it is compiled."""
    found: list[Program] = []

    def note(plan: Any) -> None:
        found.append(plan.program)
        plan.failed(NotImplementedError("it is only looked at"))

    recovery = startup.engine()._executor._recovery
    recovery._may_run_again = lambda *_: False  # nor in parts
    startup._lazy.plan = note  # type: ignore[method-assign]
    with contextlib.suppress(NotImplementedError, RuntimeError, TypeError, OSError, IndexError):  # what PyTorch has not
        _C.forget_streams()  # where a number is seen for the first time it is not a run-time input
        made = call()
        torch.tpu.synchronize()
        del made
    return found


def padded_ops(first: int = 0, step: int = 1) -> list[Op]:
    """What a part of `growing` records, padded as a whole and in pieces, an op of each pattern that is looked for."""
    found: dict[str, Op] = {}
    divider = pieces.Divider(startup.engine().fragments)
    calls = itertools.chain(((call, 1) for call in growing()), ((call, len(MORE)) for call in growing_together()))
    for call, count in itertools.islice(calls, first, None, step):
        fewer, more = (
            [
                part
                for program in programs_of(functools.partial(call, *sizes[:count]))
                for part in (program, *(piece.program for piece in divider.divide(program)))
            ]
            for sizes in (FEWER, MORE)
        )
        layouts = Layouts(startup.engine()._layouts._is_special)  # which knows of no other changes
        seen = Counter[Outline]()
        for program in more:
            with contextlib.suppress(Exception):  # what is not padded
                shared = layouts.outline_of(program)
                others = [other for other in fewer if layouts.outline_of(other) == shared]
                padded = layouts.pad(program, others[seen[shared] :][:1], lambda _: [])
                seen[shared] += 1
                for op in padded.program.ops:
                    if op.padding is not None:
                        asked, capacities = asked_for(op), [capacity for _, _, capacity in op.padding.bounds]
                        are_known = CHANGING.keys() >= {*capacities}
                        if asked.padding is None or are_known or len({*capacities}) == len(capacities) <= len(CHANGING):
                            found.setdefault(pattern_of(asked)[0], asked)
    return list(found.values())


def asked_for(op: Op) -> Op:
    """The op whose fragment is looked for where this one has padding."""
    is_elementwise = any(startup.lowerings().entry(op.name, platform).elementwise for platform in PLATFORMS)
    return on_all_elements(op) if is_elementwise else op


def growing() -> Iterator[Callable[[int], Any]]:
    """Calls of the ops of ordinary loops over batches and sequences of ever other sizes."""
    for shape in (
        (-1, B),
        (-1, 1),
        (-1,),
        (A, -1),
        (A, -1, C),
        (-1, B, C),
        (1, -1, C),
        (-1, B, A, E),
        (A, -1, B, E),
        (1, C, -1, E),
    ):
        yield from _growing_elementwise(shape)
    for shape in ((-1, B), (-1, B, C), (A, -1, C), (1, -1, C), (-1, 1, C)):
        yield from _growing_layers(shape)
    for dtype in (torch.float32, torch.int64):
        yield lambda n, t=dtype: torch.cat([some(n, dtype=t), some(1, dtype=t)])
        yield lambda n, t=dtype: torch.cat([some(1, n, dtype=t), some(1, 1, dtype=t)], 1)
        yield lambda n, t=dtype: torch.cat([some(n, B, dtype=t), some(1, B, dtype=t)])
        yield lambda n, t=dtype: torch.cat([some(A, n, C, dtype=t), some(A, 1, C, dtype=t)], 1)
        yield lambda n, t=dtype: torch.cat([some(1, n, C, dtype=t), some(1, 1, C, dtype=t)], 1)
        yield lambda n, t=dtype: torch.cat([some(A, B, n, C, dtype=t), some(A, B, 1, C, dtype=t)], 2)
        yield lambda n, t=dtype: torch.cat([some(1, B, n, C, dtype=t), some(1, B, 1, C, dtype=t)], 2)
    for lead in ((A,), (1,), (A, B), (1, B)):
        yield lambda n, lead=lead: trained(_attention, *(some(*lead, n, C) for _ in range(3)))
        yield lambda n, lead=lead: _attention(some(*lead, 1, C), some(*lead, n, C), some(*lead, n, C))
        yield lambda n, lead=lead: _causal(some(*lead, n, C), some(*lead, n, C), some(*lead, n, C))
        for is_causal, size in itertools.product((False, True), HEADS):
            yield lambda n, lead=lead, c=is_causal, size=size: trained(
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=c).square().sum(),
                *(some(*lead, n, size) for _ in range(3)),
            )
    for ids in ((-1,), (A, -1), (1, -1), (-1, C)):
        yield lambda n, ids=ids: trained(
            lambda w: F.embedding(some(*(n if i < 0 else i for i in ids), dtype=torch.int64), w).sum(), some(D, B)
        )
    yield lambda n: trained(lambda w: F.embedding(some(A, dtype=torch.int64), w).sum(), some(n, B))
    for shape in ((-1, B), (B, -1), (-1,), (A, -1, 3, 3), (-1, B, 3, 3)):
        yield lambda n, shape=shape: torch.nn.utils.clip_grad_norm_(
            _with_gradients(tuple(n if i < 0 else i for i in shape), torch.float32), 1.0
        )
        for optimizer in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, _momentum):
            yield lambda n, o=optimizer, shape=shape: _step(o, some(*(n if i < 0 else i for i in shape)))
    for lead in ((A,), (1,), (A, B), (1, B)):
        yield lambda n, lead=lead: _with_cache(some(*lead, n, C), some(*lead, 1, C))
        yield lambda n, lead=lead: _with_cache(some(*lead, n, C), some(*lead, 1, C), F.scaled_dot_product_attention)
    for shape in ((A, -1), (-1, A)):
        yield from _growing_models(shape)
    yield from _growing_signals()
    yield lambda n: torch.arange(n, device="tpu")
    yield lambda n: torch.full((n, n), True, device="tpu").tril()
    yield lambda n: torch.zeros(n, B, device="tpu") + torch.ones(n, device="tpu")[:, None]


def _growing_elementwise(shape: tuple[int, ...]) -> Iterator[Callable[[int], Any]]:
    def of(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return some(*(n if size < 0 else size for size in shape), dtype=dtype)

    yield from (lambda n, f=f: f(of(n)) for f in UNARY[:: 1 + 2 * (len(shape) > 3)])
    for f in BINARY[: 12 - 4 * (len(shape) > 3)]:
        yield lambda n, f=f: f(of(n), of(n))
        yield lambda n, f=f: f(of(n), some())
        yield lambda n, f=f: f(of(n), some(shape[-1] if shape[-1] > 0 else n))
        yield from (lambda n, f=f, number=number: f(of(n), number) for number in (0.5, 1.0, 2.0, 0, 1, 2))
        yield lambda n, f=f: _at_one_place(f, of(n), 0.3, 0.7)
    for f in INTO:
        yield lambda n, f=f: f(of(n).clone(), of(n))
        yield from (lambda n, f=f, number=number: f(of(n).clone(), number) for number in (0.5, 1.0, 2.0, 0, 1, 2))
    for f in (torch.sum, torch.mean, torch.amax, torch.amin, torch.argmax, torch.any, torch.var, torch.std):
        yield lambda n, f=f: f(of(n))
        for dim in range(-1, len(shape)):
            yield lambda n, f=f, dim=dim: (f(of(n), dim), f(of(n), dim, keepdim=True))
    for dim in range(-1, len(shape)):
        yield lambda n, dim=dim: trained(lambda x: (x.softmax(dim) + x.log_softmax(dim)).sum(), of(n))
        yield lambda n, dim=dim: of(n).cumsum(dim)
    for f in (torch.sum, torch.mean, torch.relu, torch.tanh, torch.sigmoid, F.gelu, F.silu, torch.exp, torch.square):
        yield lambda n, f=f: trained(lambda x: f(x).sum(), of(n))
        yield lambda n, f=f: trained(lambda x: f(x).mean(), of(n))
    for loss in (F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy_with_logits):
        yield lambda n, loss=loss: trained(loss, of(n), of(n))
    yield lambda n: trained(lambda x, y: ((x - y) ** 2).mean(), of(n), of(n))
    yield lambda n: trained(lambda x: F.dropout(x, 0.1).sum(), of(n))
    yield lambda n: torch.where(of(n) > 0, of(n), 0)
    yield lambda n: of(n).masked_fill(of(n) > 0, 0.0)
    yield lambda n: (
        of(n).clone().zero_(),
        of(n).clone().fill_(1.0),
        torch.zeros_like(of(n)),
        of(n).new_ones(of(n).shape),
    )
    for dtype in (torch.int64, torch.bool, torch.float64, torch.bfloat16):
        yield lambda n, dtype=dtype: (of(n).to(dtype), of(n, dtype).float())


def _growing_layers(shape: tuple[int, ...]) -> Iterator[Callable[[int], Any]]:
    def of(n: int) -> torch.Tensor:
        return some(*(n if size < 0 else size for size in shape))

    wide = shape[-1]
    for made in (E, wide, 1):
        weights = some(made, wide), some(made)
        yield lambda n, w=weights: trained(lambda *g: F.linear(*g).square().sum(), of(n), *w)
        yield lambda n, w=weights: trained(lambda *w: F.linear(of(n), *w).square().sum(), *w)
        yield lambda n, w=weights: trained(lambda *g: F.linear(*g).square().sum(), of(n), w[0])
        yield lambda n, w=weights: trained(lambda x, w: (x @ w).square().sum(), of(n), w[0].t())
        yield lambda n, made=made: F.linear(of(n), some(made, wide), some(made))
    yield lambda n: trained(lambda x, *w: F.layer_norm(x, (wide,), *w).square().sum(), of(n), some(wide), some(wide))
    yield lambda n: trained(lambda x, w: F.rms_norm(x, (wide,), w).square().sum(), of(n), some(wide))
    yield lambda n: trained(lambda x: _attention(*x.chunk(3, -1)), some(*of(n).shape[:-1], 3 * wide))
    yield lambda n: [part * 2 for part in some(*of(n).shape[:-1], 3 * wide).chunk(3, -1)]
    if len(shape) == 3:
        yield lambda n: F.scaled_dot_product_attention(
            *some(*of(n).shape[:-1], 3 * wide).chunk(3, -1), is_causal=True, scale=0.5
        )
    if len(shape) == 2:
        yield lambda n: trained(F.cross_entropy, of(n), some(n, dtype=torch.int64))
        yield lambda n: trained(
            lambda x, *w: F.batch_norm(x, torch.zeros_like(w[0]), torch.ones_like(w[0]), *w, training=True).sum(),
            of(n), some(wide), some(wide),
        )  # fmt: skip
    if shape[1] < 0:
        yield lambda n: (of(n)[:, -1] * 2, of(n)[:, 0] * 2, F.linear(of(n)[:, -1], some(E, wide), some(E)))


def growing_together() -> Iterator[Callable[..., Any]]:
    """Calls of the ops of ordinary loops over batches of ever other lengths, as well, and over what a mask takes."""
    for shape in ((-1, -2), (-1, -2, C), (-1, -2, 1)):
        yield from _growing_elementwise_together(shape)
    yield from _growing_images()
    for shape in ((-1, -2, C), (-2, -1, C)):
        yield from _growing_layers_together(shape)
    yield from _growing_attention()
    for dtype in (torch.int64, torch.bool, torch.float32):
        yield lambda n, m, *_, t=dtype: (
            some(n, m, dtype=t) == 0,
            some(n, m, dtype=t) != 0,
            ~(some(n, m, dtype=t) == 0),
        )
        yield lambda n, m, *_, t=dtype: torch.count_nonzero(some(n, m, dtype=t))
    for shape in ((), (C,), (E, C)):
        yield functools.partial(_at_mask, shape, torch.float32)
    yield functools.partial(_at_mask, (), torch.int64)
    for shape in ((-1, -2), (A, -1)):
        yield functools.partial(_losses_at_mask, shape)
    yield lambda n, m, *_: trained(lambda w: F.embedding(some(n, m, dtype=torch.int64), w).square().sum(), some(D, B))
    yield lambda n, m, *_: trained(
        lambda w, v: F.embedding(some(n, m, dtype=torch.int64), w).add(v[:m]).square().sum(), some(D, B), some(E * D, B)
    )


def _of(shape: tuple[int, ...], sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return some(*(size if size > 0 else sizes[-1 - size] for size in shape), dtype=dtype)


def _growing_signals() -> Iterator[Callable[[int], Any]]:
    for channels, (kernel, stride, padding) in itertools.product((B, 1), WINDOWS):
        for weights in ((some(E, channels, kernel), some(E)), (some(E, channels, kernel),)):
            yield lambda n, c=channels, w=weights, s=stride, p=padding: (
                trained(lambda *w: F.conv1d(some(A, c, n), *w, s, p).square().sum(), *w),
                trained(lambda x, *w: F.conv1d(x, *w, s, p).square().sum(), some(A, c, n), *w),
            )
    for kernel, stride, padding in POOLS:
        for pool in (F.max_pool1d, F.avg_pool1d):
            yield lambda n, pool=pool, k=kernel, s=stride, p=padding: trained(
                lambda x: F.relu(pool(x, k, s, p)).mean((-2, -1)).sum(), some(A, B, n)
            )
    yield functools.partial(_normalized, (A, B, -1))
    for channels in (B, 1):
        yield lambda n, c=channels: trained(_convolved, some(A, c, n), some(E, c, 3), some(E), some(C, E, 3), some(C))
    yield lambda n: trained(lambda x: F.adaptive_avg_pool1d(x, 1).flatten(1).square().sum(), some(A, B, n))
    yield lambda n: trained(lambda x: (x.mean(-1) + x.amax(-1)).square().sum(), some(A, B, n))
    yield lambda n: trained(lambda x, y: torch.cat([x, y], 1).square().mean(), some(A, B, n), some(A, E, n))
    yield lambda n: trained(lambda x: F.interpolate(x, scale_factor=2).square().mean(), some(A, B, n))
    yield lambda n: trained(lambda x: F.group_norm(x, 4, some(4 * PART), some(4 * PART)).sum(), some(A, 4 * PART, n))


def _normalized(shape: tuple[int, ...], *n: int) -> Any:
    """Batch norm in training and evaluation, with and without weights, before an activation and behind one."""
    statistics, weights = (torch.zeros(B, device="tpu"), torch.ones(B, device="tpu")), (some(B), some(B))
    return (
        trained(lambda x, *w: F.batch_norm(x, *statistics, *w, training=True).relu().sum(), _of(shape, n), *weights),
        trained(lambda x, *w: F.batch_norm(x, *statistics, *w, training=True).square().sum(), _of(shape, n), *weights),
        trained(lambda x: F.batch_norm(x, *statistics, training=True).relu().sum(), _of(shape, n)),
        F.batch_norm(_of(shape, n), *statistics, *weights),
    )


def _convolved(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Two layers with what is between and behind them."""
    convolve, pool = ((F.conv1d, F.max_pool1d), (F.conv2d, F.max_pool2d))[x.dim() - 3]
    entered = pool(convolve(x, *weights[:2], padding=1).relu(), 2)
    made = convolve(entered, *weights[2:], padding=1).relu()
    return (made.mean((*range(2, x.dim()),)).square().sum() + made.square().mean()).sum()


def _growing_images() -> Iterator[Callable[..., Any]]:
    """Few, since these have many elements."""
    shape = (A, B, -1, -2)
    for channels, (kernel, stride, padding) in itertools.product((B, 1), WINDOWS[:8]):
        for weights in ((some(E, channels, kernel, kernel), some(E)), (some(E, channels, kernel, kernel),)):
            yield lambda *n, c=channels, w=weights, s=stride, p=padding: (
                trained(lambda *w: F.conv2d(_of((A, c, -1, -2), n), *w, s, p).square().sum(), *w),
                trained(lambda x, *w: F.conv2d(x, *w, s, p).square().sum(), _of((A, c, -1, -2), n), *w),
            )
    yield lambda *n: trained(lambda *w: F.conv2d(_of(shape, n), *w).square().mean(), some(1, B, 1, 1), some(1))
    yield lambda *n: trained(lambda x, *w: F.conv2d(x, *w).square().mean(), _of(shape, n), some(1, B, 1, 1), some(1))
    for kernel, stride, padding in POOLS[:2]:
        for pool in (F.max_pool2d, F.avg_pool2d):
            yield lambda *n, pool=pool, k=kernel, s=stride, p=padding: trained(
                lambda x: F.relu(pool(x, k, s, p)).mean((-2, -1)).sum(), _of(shape, n)
            )
    yield functools.partial(_normalized, shape)
    for channels in (B, 1):
        yield lambda *n, c=channels: trained(
            _convolved, _of((A, c, -1, -2), n), some(E, c, 3, 3), some(E), some(C, E, 3, 3), some(C)
        )
    yield lambda *n: trained(lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1).square().sum(), _of(shape, n))
    yield lambda *n: trained(lambda x, y: torch.cat([x, y], 1).square().mean(), _of(shape, n), _of(shape, n))
    yield lambda *n: trained(F.mse_loss, _of((A, 1, -1, -2), n), _of((A, 1, -1, -2), n))
    yield lambda *n: trained(lambda x: (x.relu() * 0.5 + 1.0).mean(), _of(shape, n))
    yield lambda *n: trained(F.mse_loss, _of(shape, n), _of(shape, n))
    yield lambda *n: trained(lambda x: x.mean((2, 3)).sum() + x.sum((0, 2, 3)).sum(), _of(shape, n))


def _growing_elementwise_together(shape: tuple[int, ...]) -> Iterator[Callable[..., Any]]:
    is_usual = shape in ((-1, -2), (-1, -2, C))
    yield from (lambda *n, f=f: f(_of(shape, n)) for f in UNARY[:: 2 if is_usual else 8])
    for f in BINARY[:10] if is_usual else ():
        yield lambda *n, f=f: (f(_of(shape, n), _of(shape, n)), f(_of(shape, n), some()))
        yield from (lambda *n, f=f, number=number: f(_of(shape, n), number) for number in (0.5, 0, 1))
    for f in (torch.add, torch.mul, torch.Tensor.add_, torch.Tensor.mul_, *BINARY[:4] * is_usual):
        for k in range(1, len(shape)):
            yield lambda *n, f=f, k=k: f(_of(shape, n).clone(), _of(shape[k:], n))
            yield lambda *n, f=f, k=k: f(_of(shape, n).clone(), _of((*shape[:k], *[1] * (len(shape) - k)), n))
        yield lambda *n, f=f: f(_of(shape, n).clone(), _of(shape, n))
        yield from (lambda *n, f=f, number=number: f(_of(shape, n).clone(), number) for number in (0.5, 1.0, 2.0, 1, 2))
    yield lambda *n: [_of(shape, n).clone().zero_(), _of(shape, n).clone().fill_(1.0)]
    for f in (torch.sum, torch.mean, torch.amax, *(torch.argmax, torch.any) * is_usual):
        yield lambda *n, f=f: f(_of(shape, n))
        for dim in range(-1, len(shape)):
            yield lambda *n, f=f, dim=dim: (f(_of(shape, n), dim), f(_of(shape, n), dim, keepdim=True))
    for f in (torch.sum, torch.mean, torch.relu, torch.tanh, torch.sigmoid, F.gelu, F.silu, torch.exp, torch.square):
        yield lambda *n, f=f: trained(lambda x: f(x).sum(), _of(shape, n))
    yield lambda *n: trained(lambda x: torch.square(x).mean(), _of(shape, n))
    yield lambda *n: trained(lambda x: (x.softmax(-1) + x.log_softmax(-1)).sum(), _of(shape, n))
    yield lambda *n: trained(lambda x: F.dropout(x, 0.1).sum(), _of(shape, n))
    yield lambda *n: trained(lambda x: F.dropout(x.transpose(0, 1), 0.1).sum(), _of(shape, n))
    yield lambda *n: trained(F.mse_loss, _of(shape, n), _of(shape, n))
    yield lambda *n: (_of(shape, n).transpose(0, 1).contiguous(), _of(shape, n).transpose(0, 1) + 1.0)
    yield lambda *n: trained(lambda x, y: (x + y.transpose(0, 1)).sum(), _of(shape, n), _of(shape, n).transpose(0, 1))
    for dim in range(2):
        yield lambda *n, dim=dim: trained(lambda x: x.select(dim, 0).sum() + x.select(dim, -1).sum(), _of(shape, n))
        yield lambda *n, dim=dim: trained(lambda x: x.narrow(dim, 1, x.shape[dim] - 1).sum(), _of(shape, n))
    for value in (0, 0.0, float("-inf")):
        yield lambda *n, value=value: _of(shape, n).masked_fill(_of(shape, n) > 0, value)
        yield lambda *n, value=value: _of(shape, n).clone().masked_fill_(_of(shape, n, torch.bool), value)
    yield lambda *n: torch.where(_of(shape, n) > 0, _of(shape, n), 0)
    yield lambda *n: (_of(shape, n, torch.bool).float(), _of(shape, n, torch.int64).float(), _of(shape, n).long())
    if len(shape) == 3:
        yield lambda *n: trained(
            lambda x, m: (x * m.unsqueeze(-1)).sum(1) / m.sum(1, keepdim=True), _of(shape, n), _of(shape[:2], n)
        )
        yield lambda *n: _of(shape, n).masked_fill(_of(shape[:2], n, torch.bool).unsqueeze(-1), 0.0)


def _growing_attention() -> Iterator[Callable[..., Any]]:
    shape = (-1, -2)
    for is_first in (True, False):
        yield from (functools.partial(_self_attention, shape, is_first, PART, size) for size in (4, 8, *HEADS))
        for heads, size in itertools.product((2, 4, 8), (4, 8, 16, 32, 64)):
            if heads * size < min(CHANGING):  # else it would be taken for a capacity
                yield functools.partial(_self_attention, shape, is_first, heads, size)
    for size in (4, 8, *HEADS):
        for is_causal, is_masked in ((False, False), (True, False), (False, True)):
            yield functools.partial(_heads, shape, size, is_causal, is_masked)
    for is_first, norm_first, activation in ((True, False, F.relu), (True, True, F.gelu), (False, False, F.relu)):
        yield functools.partial(_encoder, shape, is_first, norm_first, activation)


def _growing_models(shape: tuple[int, int]) -> Iterator[Callable[..., Any]]:
    """Models of sequences, of which either the number or the length changes."""
    for heads, size in ((4, 8), (PART, 32)):
        yield functools.partial(_self_attention, shape, True, heads, size)
        yield from (functools.partial(_layer_of_heads, shape, heads, size, permuted) for permuted in (False, True))
    for size, is_causal in itertools.product((16, 32, 64), (False, True)):
        yield functools.partial(_heads, shape, size, is_causal, False)
    yield functools.partial(_encoder, shape, True, False, F.relu)
    yield functools.partial(_language, shape)
    if shape[1] < 0:
        yield functools.partial(_shortened, shape)


def _growing_layers_together(shape: tuple[int, ...]) -> Iterator[Callable[..., Any]]:
    def of(n: tuple[int, ...]) -> torch.Tensor:
        return _of(shape, n)

    wide = shape[-1]
    for made in (E, wide, 1, 3 * wide):
        weights = some(made, wide), some(made)
        yield lambda *n, w=weights: trained(lambda *g: F.linear(*g).square().sum(), of(n), *w)
        yield lambda *n, w=weights: trained(lambda *w: F.linear(of(n), *w).square().sum(), *w)
        yield lambda *n, w=weights: trained(lambda *g: F.linear(*g).square().sum(), of(n), w[0])
        yield lambda *n, w=weights: F.linear(of(n), *w).transpose(0, 1) * 2
        yield lambda *n, w=weights: trained(lambda x, *w: F.linear(x.transpose(0, 1), *w).square().sum(), of(n), *w)
    yield lambda *n: trained(lambda x, *w: F.layer_norm(x, (wide,), *w).square().sum(), of(n), some(wide), some(wide))
    yield lambda *n: trained(lambda x, w: F.rms_norm(x, (wide,), w).square().sum(), of(n), some(wide))
    yield lambda *n: trained(
        lambda x: F.cross_entropy(x.flatten(0, 1), _of(shape[:2], n, torch.int64).flatten(), ignore_index=0), of(n)
    )
    yield lambda *n: trained(
        lambda x: F.cross_entropy(x.flatten(0, 1), _of(shape[:2], n, torch.int64).flatten()), of(n)
    )
    yield lambda *n: trained(lambda x: F.cross_entropy(x.transpose(1, 2), _of(shape[:2], n, torch.int64)), of(n))
    yield lambda *n: trained(
        lambda x: F.cross_entropy(x[:, :-1].flatten(0, 1), _of(shape[:2], n, torch.int64)[:, 1:].flatten()), of(n)
    )


def _self_attention(shape: tuple[int, int], is_first: bool, heads: int, size: int, *n: int) -> Any:
    layer = torch.nn.MultiheadAttention(heads * size, heads, dropout=0.1, batch_first=is_first).to("tpu")
    x = _of((*(shape if is_first else shape[::-1]), heads * size), n)
    return [
        trained(lambda x, m=mask: layer(x, x, x, key_padding_mask=m, need_weights=False)[0].square().sum(), x)
        for mask in (None, _of(shape, n, torch.int64) == 0)
    ]


def _heads(shape: tuple[int, int], size: int, is_causal: bool, is_masked: bool, *n: int) -> Any:
    """Attention as small models have it, between two layers."""

    def attended(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(*part.shape[:2], PART, size).transpose(1, 2) for part in x.chunk(3, -1))
        mask = (_of(shape, n) != 0)[:, None, None] if is_masked else None
        made = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)
        return made.transpose(1, 2).flatten(2).square().sum()

    return trained(attended, _of((*shape, 3 * PART * size), n))


def _layer_of_heads(shape: tuple[int, int], heads: int, size: int, is_permuted: bool, *n: int) -> Any:
    """The same with its layers, and a mask of its own."""
    wide = heads * size

    def attended(x: torch.Tensor, enter: torch.Tensor, leave: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        made = F.linear(x, enter, more[0])
        if is_permuted:
            q, k, v = made.view(*x.shape[:2], 3, heads, size).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = (part.view(*x.shape[:2], heads, size).transpose(1, 2) for part in made.split(wide, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device="tpu").tril()
        made = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        made = F.linear(made.transpose(1, 2).reshape(x.shape), leave, more[1])
        by_hand = ((q @ k.mT) * 0.5).masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return (x + made).square().sum() + by_hand.transpose(1, 2).reshape(x.shape).square().sum()

    weights = some(3 * wide, wide), some(wide, wide), some(3 * wide), some(wide)
    return trained(attended, _of((*shape, wide), n), *weights)


def _language(shape: tuple[int, int], *n: int) -> Any:
    """What is around the layers of a language model, whose labels are its inputs, one place on."""
    ids = _of(shape, n, torch.int64)

    def loss(made: Callable[[torch.Tensor], torch.Tensor], wanted: torch.Tensor) -> Any:
        def of(w: torch.Tensor, v: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
            entered = F.embedding(ids, w)
            placed = entered + F.embedding(torch.arange(ids.shape[1], device="tpu"), v)
            left = made(F.linear(placed, u))
            return F.cross_entropy(left.flatten(0, 1), wanted.flatten())

        return trained(of, some(D, B), some(E * D, B), some(E, B))

    return (
        loss(lambda x: x, ids),
        loss(lambda x: x[:, :-1], ids[:, 1:]),
        F.cross_entropy(_of((*shape, E), n).view(-1, E), ids.reshape(-1), ignore_index=-1),
    )


def _shortened(shape: tuple[int, int], *n: int) -> Any:
    """What is taken of inputs that are a place longer."""
    ids = _of(shape, [size + 1 for size in n], torch.int64)
    taken = ids[:, :-1]
    entered = trained(lambda w: F.embedding(taken, w).square().sum(), some(D, B))
    return entered, F.cross_entropy(_of((*shape, E), n).flatten(0, 1), ids[:, 1:].flatten())


def _encoder(shape: tuple[int, int], is_first: bool, norm_first: bool, activation: Any, *n: int) -> Any:
    wide = PART * B
    layer = torch.nn.TransformerEncoderLayer(
        wide, PART, C, batch_first=is_first, norm_first=norm_first, activation=activation
    ).to("tpu")
    x = _of((*(shape if is_first else shape[::-1]), wide), n)
    return trained(lambda x: layer(x, src_key_padding_mask=_of(shape, n, torch.int64) == 0).square().sum(), x)


def _at_mask(tail: tuple[int, ...], dtype: torch.dtype, n: int, m: int, count: int) -> Any:
    return _at_known_mask(some(n, m, *tail, dtype=dtype), some(n, m) > 0, count)


def _losses_at_mask(shape: tuple[int, ...], *n: int) -> Any:
    mask, ids = _of(shape, n) > 0, _of(shape, n, torch.int64)

    def loss(x: torch.Tensor) -> torch.Tensor:
        taken = [counted._at_mask(each, 0, mask, n[2], torch.count_nonzero(mask)) for each in (x, ids)]
        return F.cross_entropy(*taken)

    return trained(loss, _of((*shape, E), n))


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return ((q @ k.mT) * 0.5).softmax(-1).matmul(v).square().sum()


def _with_cache(cache: torch.Tensor, new: torch.Tensor, attend: Callable[..., torch.Tensor] = _attention) -> Any:
    keys, values = torch.cat([cache, new], -2), torch.cat([cache, new], -2)
    return keys, values, attend(new, keys, values)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()
    return (q @ k.mT / 2).masked_fill(~mask, float("-inf")).softmax(-1) @ v


def pattern_of(op: Op) -> templates.Pattern:
    """The pattern for single sizes."""
    found = templates.with_room(described(op)) or described(op)
    lengths = {str(length) for length, _ in _lengths(op)}
    return templates.of_sizes(found, LITERAL - lengths, {str(ANY)}) or (found, {})


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


def with_room(op: Op, new: Sequence[int], rooms: Sequence[tuple[int, int, int]]) -> tuple[Op, dict[int, int]]:
    """An op with padding with other sizes, other capacities and bounds, and what became of all sizes."""
    assert op.padding is not None
    capacities = [*dict.fromkeys(capacity for _, _, capacity in op.padding.bounds)]
    of_capacity = dict(zip(capacities, rooms, strict=False))
    bounds = []
    has_parts = any("floordiv" in size for _, size in _lengths(op))
    for fewest, most, capacity in op.padding.bounds:
        room, least, more = of_capacity[capacity]
        bounds.append((max(least, fewest), room - (capacity - most) - more * (not has_parts), room))
    if any(least >= most for least, most, _ in bounds):
        raise ValueError("an op of larger sizes")
    become = {capacity: room for capacity, (room, _, _) in of_capacity.items()}
    fixed = [size for size in map(int, pattern_of(op)[1].values()) if size not in become]
    become |= dict(zip(fixed, new, strict=False))
    known = [*fixed, *capacities]
    for count in range(2, 5):
        for some in itertools.combinations(known, count):
            become[math.prod(some)] = math.prod(become[size] for size in some)
    for times, parts, size in itertools.product(map(int, templates.TIMES), (1, 3), known):
        become[times * parts * size] = times * parts * become[size]
    symbols, lengths = Symbols(bounds), Sizes(dict(zip("abcdefgh", itertools.starmap(Bound, bounds), strict=False)), {})
    become |= {length: lengths.capacity(symbols.size(size)) for length, size in _lengths(op)}
    become |= {capacity: room for capacity, (room, _, _) in of_capacity.items()}
    padding = dataclasses.replace(op.padding, bounds=tuple(bounds))
    return renumbered(dataclasses.replace(op, padding=padding), become), become


def _lengths(op: Op) -> Iterator[tuple[int, str]]:
    """How long in memory dimensions are whose sizes change, and these."""
    if op.padding is not None:
        for array, part in zip((*operands(op), *results_of(op)), (*op.padding.reads, *op.padding.made), strict=True):
            for length, size in zip(array.base.shape, part.shape, strict=True) if part else ():
                if isinstance(size, str):
                    yield length, size


def small(op: Op) -> Op:
    """The op, with small capacities if it has padding and may have such, that it may have few elements."""
    if op.padding is None:
        return op
    capacities = {capacity for _, _, capacity in op.padding.bounds}
    fixed = [size for size in map(int, pattern_of(op)[1].values()) if size not in capacities]
    try:
        return with_room(op, fixed, PADDED[1][1])[0]
    except ValueError:
        return op


def renumbered(value: Any, numbers: Mapping[int, int]) -> Any:
    """An op, or a part of one, with other numbers for sizes."""
    if isinstance(value, Lifted):
        return value
    if type(value) is int:
        return numbers.get(value, value)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(renumbered(item, numbers) for item in value)
    if isinstance(value, PaddedExtent | Symbolic):
        return renumbered_text(value, numbers)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kept = {"value", "bounds", "arg", "element"}
        names = [field.name for field in dataclasses.fields(value) if field.name not in kept]
        return dataclasses.replace(value, **{name: renumbered(getattr(value, name), numbers) for name in names})
    return value


def renumbered_text(value: Any, numbers: Mapping[int, int] | Mapping[int, str]) -> Any:
    """Expressions with other numbers, or names, for sizes."""
    if isinstance(value, str):
        return re.sub(r"\b\d+\b", lambda found: str(numbers.get(int(found[0]), found[0])), value)
    if isinstance(value, tuple):
        return tuple(renumbered_text(item, numbers) for item in value)
    if isinstance(value, PaddedExtent | Symbolic):
        return type(value)(
            *(renumbered_text(getattr(value, field.name), numbers) for field in dataclasses.fields(value))
        )
    return numbers.get(value, value) if type(value) is int else value


def with_names(op: Op, names: Mapping[int, str], products: Mapping[int, str]) -> Op:
    """An op with padding, with variables for sizes that do not change, too, and expressions for products of some. It
    can be traced, but not made."""
    assert op.padding is not None

    def named(value: Any) -> Any:
        if type(value) is int and value in products:
            return Symbolic(products[value])
        return tuple(map(named, value)) if isinstance(value, tuple) and not hasattr(value, "_fields") else value

    def part(array: Any, extent: PaddedExtent | None) -> Any:
        return renumbered_text(extent or PaddedExtent(array.sizes, array.sizes), products)

    bounds = (*op.padding.bounds, *[(2, 2**31 - 1, 2**31 - 1)] * len(names))
    reads = tuple(map(part, operands(op), op.padding.reads))
    made = tuple(map(part, results_of(op), op.padding.made))
    padding = dataclasses.replace(op.padding, bounds=bounds, reads=reads, made=made)
    return dataclasses.replace(op, args=named(op.args), padding=padding)


def misfit(op: Op, numbers: Container[int]) -> dict[int, int]:
    """One of the numbers that does not fit the others in the padding of an op, and what would; empty where all do."""
    assert op.padding is not None
    capacities = {name: capacity for name, (_, _, capacity) in zip("abc", op.padding.bounds, strict=False)}

    def size(text: int | str) -> int:
        return value_of(text, capacities) if isinstance(text, str) else text

    items = itertools.chain.from_iterable(arg if isinstance(arg, tuple) else [arg] for arg in op.args)
    arrays = [*(item for item in items if isinstance(item, Operand)), *results_of(op)]
    for array, extent in zip(arrays, [*op.padding.reads, *op.padding.made], strict=True):
        if extent is None:
            continue
        for have, text in zip(array.sizes, extent.shape, strict=False):
            if have != size(text) and isinstance(text, str) and have in numbers:
                return {have: size(text)}
        for have, (start, count, step) in zip(extent.factors, extent.ranges, strict=True):
            end = size(start) + size(count) * step
            if isinstance(have, int) and end > have and have in numbers:
                multiples = itertools.count(-(-end // size(count)) * size(count), size(count))
                return {have: next(n for n in multiples if n not in numbers)}
        if not extent.factors:
            continue
        of_shape, of_factors = (math.prod(map(size, part)) for part in (extent.shape, extent.factors))
        for part, times, by in ((extent.shape, of_factors, of_shape), (extent.factors, of_shape, of_factors)):
            for number in map(int, re.findall(r"\d+", str(part)) if of_shape != of_factors else ()):
                if number in numbers and number * times % by == 0:
                    return {number: number * times // by}
    return {}


def shaped(op: Op, shape: tuple[Any, ...]) -> Op:
    """The op with another shape of all arrays that have dimensions."""
    changed: Op = resized(op, lambda old: shape if old else old)
    return changed


Made = tuple[str, FragmentTemplate]  # and the pattern for which it is
Traced = tuple[dict[str, str], tracing.Fragment]  # with what the letters are


class Maker:
    """Makes templates for a platform."""

    def __init__(self, platform: str) -> None:
        engine = startup.engine()
        self._context = ops.Context
        self._platform = platform
        self._tracer = tracing.Tracer(engine.client, platform, self._context)

    def make(self, op: Op, entry: LoweringEntry) -> Made | None:
        """An op's template and where it is found; None where it has none."""
        if op.padding is not None:
            return self._of_padding(op, entry)
        shaped = None if f"int:{ANY}" in described(op) else self._of_shape(op, entry)
        return shaped or self._of_sizes(op, entry)

    def agrees(self, op: Op, entry: LoweringEntry, made: Made) -> bool:
        """Whether tracing the op as it is gives what this template does, made for another platform."""
        pattern, template = made
        shaped = templates.of_shape(described(op))
        if shaped is not None and shaped[0] == pattern:
            return self._decides_nothing_by_shape(op, entry) and self.traced(op, entry) == template.filled(shaped[1])
        if op.padding is not None:
            decided = self._decided_of_padding(op, entry)
            found = [self._with_room(op, entry, *PADDED[k]) for k in (0, 3, 6)]
            return (
                decided is not None
                and all(pair in template.apart for pair in decided)
                and all(each and is_right(template.filled(each[0]), each[1]) for each in found)
            )
        decided = self._decided(op, entry)
        if decided is None or not all(pair in template.apart for pair in decided):
            return False
        return self.traced(op, entry) == template.filled(pattern_of(op)[1]) and self._holds(op, entry, template, EQUAL)

    def renewed(self, line: str, entry: LoweringEntry) -> Made | None:
        """What a line says if it is what tracing gives an op that it is for, else what that has now, if anything."""
        text, wanted, _, *fields = json.loads(line)
        try:
            op, pattern = self._example(text, wanted, entry)
            held = pattern, FragmentTemplate(*fields)
            made = held if self.agrees(op, entry, held) else self.make(op, entry)
        except Exception:  # noqa: BLE001 - whatever a lowering raises now
            return None
        return made if made is not None and made[0] == pattern else None

    def _example(self, text: str, wanted: Sequence[str], entry: LoweringEntry) -> tuple[Op, str]:
        """An op that a line is for, and its pattern; raises ValueError where another line is for that op."""
        if f"<{templates.SHAPE}x" in text:
            return op_of(text.replace(f"<{templates.SHAPE}x", f"<{A}x{B}x")), text
        places = [*zip(text.split("#"), wanted, strict=False)]  # what stands before each size
        letters = dict.fromkeys(letter for size in wanted for letter in size.split(".") if letter.isalpha())
        sized = {letter for before, size in places if not before.endswith("int:") for letter in size.split(".")}
        sizes = {letter: ANY for letter in letters if letter not in sized}
        sizes |= zip([size for before, size in places if before.endswith(" of ")], CHANGING, strict=False)
        sizes |= zip([letter for letter in letters if letter not in sizes], PRIMES, strict=False)
        given = {letter for size in wanted[: text.partition(")->(")[0].count("#")] for letter in size.split(".")}
        for _ in letters:
            op = op_of(filled(text, wanted, sizes))
            if op.padding is not None:
                became = misfit(op, {*sizes.values()})
            elif given >= {*letters}:
                became = {}
            else:  # what only results have follows
                ((_, became),) = self._tracer.resized([(op, entry, {sizes[k]: sizes[k] for k in given if k in sizes})])
            sizes = {letter: became.get(size, size) for letter, size in sizes.items()}
        op = op_of(filled(text, wanted, sizes))
        pattern = pattern_of(op)[0]
        if templates.without_sizes(pattern) != (text, [*wanted]):
            raise ValueError(f"{described(op)} has another pattern")
        return op, pattern

    def traced(self, op: Op, entry: LoweringEntry) -> tracing.Fragment:
        """What tracing the op as it is gives."""
        return self._tracer.trace([(op, entry)])[0]

    def _of_shape(self, op: Op, entry: LoweringEntry) -> Made | None:
        """A template for whatever shape."""
        shaped_op = templates.of_shape(described(op))
        if shaped_op is None or not self._decides_nothing_by_shape(op, entry):
            return None
        ops = [shaped(op, shape) for shape in (SENTINELS[:2], *SHAPES)]
        try:
            made = self._tracer.trace([(op, entry) for op in ops])
        except Exception:  # noqa: BLE001 - an op that cannot be traced with these sizes
            return None
        patterns = [templates.of_shape(described(op)) for op in ops]
        found = [(p[1], one) for p, one in zip(patterns, made, strict=True) if p is not None and p[0] == shaped_op[0]]
        if len(found) < 3 or patterns[0] != (shaped_op[0], found[0][0]):
            return None
        made_for = (_right_for_all(shaped_op[0], entry, found, apart) for apart in ([], [["0", templates.COUNT]]))
        return next(filter(None, made_for), None)

    def _of_sizes(self, op: Op, entry: LoweringEntry) -> Made | None:
        """A template for whatever sizes."""
        pattern, sizes = pattern_of(op)
        apart = self._decided(op, entry)
        if apart is None:
            return None
        found = _from_the_first(self._resized(op, entry, new) for new in (SENTINELS, *SIZES))
        if len(found) < 3:
            return None
        made = _right_for_all(pattern, entry, found, apart)
        if made is None or self._holds(op, entry, made[1], EQUAL):
            return made
        for one, other in itertools.combinations(sizes, 2):  # of which some may not be equal
            new = [6 if letter in (one, other) else size for letter, size in zip(sizes, SIZES[1], strict=False)]
            if not self._holds(op, entry, made[1], new):
                apart.append([one, other])
        return _right_for_all(pattern, entry, found, apart)

    def _of_padding(self, op: Op, entry: LoweringEntry) -> Made | None:
        """A template for whatever sizes and capacity."""
        assert op.padding is not None
        pattern, sizes = pattern_of(op)
        if len(sizes) > len(SENTINELS):
            return None
        if templates.with_room(described(op)) is None:
            return None  # nothing looks for it
        apart = self._decided_of_padding(op, entry)
        if apart is None:
            return None
        for first in (PADDED[0], SMALL):
            found = _from_the_first(self._with_room(op, entry, *numbers) for numbers in (first, *PADDED[1:]))
            parts = _parts(op, [sizes for sizes, _ in found])
            if len(found) >= 5 and parts is not None:
                made = _right_for_all(pattern, entry, found, apart, parts)
                if made is not None:
                    return made
        return None

    def _with_room(
        self, op: Op, entry: LoweringEntry, new: Sequence[int], rooms: Sequence[tuple[int, int, int]]
    ) -> Traced | None:
        """What the sizes of an op with padding become with these and capacities, and the fragment; None where it is
        not for such."""
        try:
            changed, become = with_room(op, new, rooms)
            traced = self.traced(changed, entry)
        except Exception:  # noqa: BLE001 - whatever a lowering or a rule raises
            return None
        return {letter: str(become[int(size)]) for letter, size in pattern_of(op)[1].items()}, traced

    def _holds(self, op: Op, entry: LoweringEntry, template: FragmentTemplate, new: Sequence[int]) -> bool:
        """Whether a template is right for these sizes, if it is for such."""
        found = self._resized(op, entry, new)
        if found is None:
            return not template.suits(dict(zip(pattern_of(op)[1], map(str, new), strict=False)))
        return not template.suits(found[0]) or is_right(template.filled(found[0]), found[1])

    def _resized(self, op: Op, entry: LoweringEntry, new: Sequence[int]) -> Traced | None:
        """What all sizes become with these, and the fragment; None where the op is not for such sizes."""
        _, sizes = pattern_of(op)
        try:
            given = dict(zip(map(int, sizes.values()), new, strict=False))
            ((fragment, became),) = self._tracer.resized([(op, entry, given)])
        except Exception:  # noqa: BLE001 - whatever a lowering raises
            return None
        return {letter: str(became[int(size)]) for letter, size in sizes.items()}, fragment

    def _decided_of_padding(self, op: Op, entry: LoweringEntry) -> list[list[str]] | None:
        """The pairs of sizes that do not change of which it is decided that they differ; None where anything else is
        decided by such sizes. Of those that change, the padded form decides when it runs."""
        assert op.padding is not None
        lengths = {capacity for _, _, capacity in op.padding.bounds} | {length for length, _ in _lengths(op)}
        letters = {int(size): letter for letter, size in pattern_of(op)[1].items() if int(size) not in lengths}
        unused = "abcdefgh"[len(op.padding.bounds) :]
        if len(letters) > len(unused):
            return None
        names = dict(zip(letters, unused, strict=False))
        products = {
            math.prod((times, *some)): "*".join([str(times)] * (times > 1) + [names[size] for size in some])
            for times, count in itertools.product((3, 2, 1), (3, 2, 1))
            for some in itertools.combinations_with_replacement(letters, count)
        }
        known, unknown = (self._symbolically(each, entry) for each in (op, with_names(op, names, products)))
        if known is None or unknown is None or known[1] != unknown[1]:
            return None
        symbols = Symbols([(2, 2**31 - 1, 2**31 - 1)] * 8)
        fixed = {size: (letter, symbols.size(names[size])) for size, letter in letters.items()}
        fixed |= {int(size): (size, int(size)) for size in LITERAL}
        pairs = {str(one - other): sorted((x, y)) for (x, one), (y, other) in itertools.permutations(fixed.values(), 2)}
        decided = [text for text in unknown[0] if {*re.findall(r"\b[a-h]\b", text)} <= {*names.values()}]
        return sorted(map(list, {tuple(pairs[text]) for text in decided})) if pairs.keys() >= {*decided} else None

    def _symbolically(self, op: Op, entry: LoweringEntry) -> tuple[tuple[str, ...], int] | None:
        """What tracing an op with padding takes for other than 0 without knowing, and in how many places it has another
        form than where sizes are known; None where it cannot be traced."""
        assert op.padding is not None
        trace = tracing._PaddedTrace(op, entry, self._context, self._platform, "off")
        count = len(op.padding.counts)
        given = trace.parameters[: len(trace.parameters) - count]
        reads = iter(op.padding.reads)
        parts = [next(reads) if isinstance(parameter, Operand) else None for parameter in given]
        structs = [
            tracing._struct(
                parameter if part is None else dataclasses.replace(parameter, sizes=trace._symbols.sizes(part.shape))
            )
            for parameter, part in zip(given, parts, strict=True)
        ]
        with startup.engine().client.tracing(), contextlib.suppress(Exception):
            trace._symbols.trace(functools.partial(trace._symbolic, parts), structs)
            return trace._symbols.unequal(), trace.num_unknown
        return None

    def _decided(self, op: Op, entry: LoweringEntry) -> list[list[str]] | None:
        """The pairs of sizes of which it is decided that they differ; None where anything else is decided."""
        pattern, sizes = pattern_of(op)
        if len(sizes) > len(SENTINELS):
            return None
        literal = {size: size for size in templates.without_sizes(pattern)[1] if size.isdigit()}
        # A number is no size: what is decided by it would show with those that are tried.
        symbolic = [letter for letter, size in sizes.items() if size != str(ANY)]
        return learned_templates.decided(self._tracer, op, entry, literal | sizes, symbolic)

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
        return ("another form where sizes are known",) if trace.num_unknown else symbols.unequal()


def _from_the_first(traced: Iterator[Traced | None]) -> list[Traced]:
    """What could be traced, if the first could, which has sizes that no text has."""
    first = next(traced)
    return [] if first is None else [first, *filter(None, traced)]


def _parts(op: Op, found: Sequence[Mapping[str, str]]) -> list[templates.Part] | None:
    """What part the lengths in memory of quotients are of others, with all of these sizes; None where one is none."""
    letters = {int(size): letter for letter, size in pattern_of(op)[1].items()}
    assert op.padding is not None
    wholes = [letters[capacity] for _, _, capacity in op.padding.bounds]
    made: list[templates.Part] = []
    for part in dict.fromkeys(letters[length] for length, size in _lengths(op) if "floordiv" in size):
        known = (
            (part, whole, divisor, behind)
            for divisor, behind, whole in itertools.product(range(1, 17), (0, 1, -1, 2, -2), wholes)
            if all((int(sizes[part]) - behind) * divisor == int(sizes[whole]) for sizes in found)
        )
        first = next(known, None)
        if first is None:
            return None
        made.append(first)
    return made


def _right_for_all(
    pattern: str,
    entry: LoweringEntry,
    found: Sequence[tuple[Mapping[str, str], tracing.Fragment]],
    apart: Any,
    parts: Sequence[templates.Part] = (),
) -> Made | None:
    """The template of the first, which has sizes that no text has, if it is right for all that it is for."""
    # What is the same in all, as the 2 of a stack of two, is no size.
    varying = {letter: size for letter, size in found[0][0].items() if len({s[letter] for s, _ in found}) > 1}
    template = templates.template_of(entry.name, found[0][1], varying, apart, parts)
    if template is None or not all(is_right(template.filled(s), one) for s, one in found if template.suits(s)):
        return None
    return pattern, template


def is_right(filled: tracing.Fragment | None, traced: tracing.Fragment) -> bool:
    """Whether a template gives what tracing does, if anything; it may ask for more, as where bounds are wider."""
    if filled is None:
        return True
    return filled._replace(unequal=()) == traced._replace(unequal=()) and {*filled.unequal} >= {*traced.unequal}


def make(found: Sequence[Op]) -> dict[str, str]:
    """What the files hold, by op."""
    makers = {platform: Maker(platform) for platform in PLATFORMS}
    general: dict[str, list[str]] = {}  # lines for all platforms
    special: dict[str, list[str]] = {}
    sources: dict[str, dict[str, str]] = {}
    # An op with more sizes of its own makes a template for others, too.
    for count, op in enumerate(sorted(found, key=lambda op: -len(pattern_of(op)[1]))):
        print(f"\r{count + 1} of {len(found)} ops ", end="", file=sys.stderr)
        if any(templates.OfAnOp({}, general.get(op.name, ()), PLATFORMS[0]).matching(described(small(op)))):
            continue
        rows: dict[str, list[str]] = {}
        first: Made | None = None
        for platform, maker in makers.items():
            entry = startup.lowerings().entry(op.name, platform)
            is_first = first is not None and maker.agrees(op, entry, first)
            template = first if is_first else maker.make(op, entry)
            if template is None:
                continue
            first = first or template
            home = inspect.unwrap(entry.function).__module__
            sources.setdefault(op.name, {})[home] = templates.digest_of_sources(home)
            rows.setdefault(json.dumps(template), []).append(platform)
        for text, platforms in rows.items():
            pattern, fields = json.loads(text)
            line = templates.line_of(platforms, pattern, FragmentTemplate(*fields))
            (general if platforms == [*PLATFORMS] else special).setdefault(op.name, []).append(line)
    heads = {name: json.dumps({"jax": jax.__version__, "sources": of_op}) for name, of_op in sources.items()}
    lines = {name: sorted(general.get(name, []) + special.get(name, [])) for name in sources}
    return {name: "\n".join([heads[name], *lines[name]]) + "\n" for name in sources}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--renew", action="store_true")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="of the calls whose ops are checked")
    options = parser.parse_args()
    if options.renew:
        renew()
        return
    first, step = map(int, options.part.split("/"))
    found = ordinary_ops(first, step) + padded_ops(first, step)
    if options.check:
        check(found)
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    for name, text in make(found).items():
        templates.file_of(FOLDER, name).write_text(text)


def check(found: Sequence[Op]) -> None:
    """Exits with a message where an op that can have a template has none in the files, or one that is not right."""
    for platform in PLATFORMS:
        maker, held = Maker(platform), templates.Templates(FOLDER, platform)
        for op in found:
            entry = startup.lowerings().entry(op.name, platform)
            asked = small(op)
            if asked.padding is not None and not templates.has_few_places(described(asked)):
                continue
            filled = held.find(described(asked), entry)
            if filled is not None:
                is_held = is_right(filled, maker.traced(asked, entry))
            else:
                is_held = any(held.of(op.name).matching(described(asked))) or maker.make(op, entry) is None
            if not is_held:
                what = "not in the files" if filled is None else "another one in the files"
                sys.exit(f"{described(op)} for {platform}: {what}; python {__file__} makes them anew")


def renew() -> None:
    """Of the templates of changed sources keeps those that are what tracing gives now; the others are made anew where
    the description says enough, or dropped."""
    makers = {platform: Maker(platform) for platform in PLATFORMS}
    counts = Counter[str]()
    for file in sorted(FOLDER.iterdir()):
        head, *lines = file.read_text().splitlines()
        entries = {platform: startup.lowerings().entry(file.stem, platform) for platform in PLATFORMS}
        homes = {inspect.unwrap(entry.function).__module__ for entry in entries.values()}
        sources = {home: templates.digest_of_sources(home) for home in homes}
        if sources.items() <= json.loads(head)["sources"].items():
            continue
        print(f"{file.stem}: {len(lines)}", file=sys.stderr)
        renewed: dict[str, None] = {}
        for line in lines:
            found: dict[str, list[str]] = {}
            for platform in json.loads(line)[2]:
                template = makers[platform].renewed(line, entries[platform])
                found.setdefault(json.dumps(template), []).append(platform)
            made = [(platforms, *json.loads(text)) for text, platforms in found.items() if text != "null"]
            its = [templates.line_of(at, pattern, FragmentTemplate(*fields)) for at, pattern, fields in made]
            counts["kept" if its == [line] else "made anew" if its else "dropped"] += 1
            renewed |= dict.fromkeys(its)
        file.write_text("\n".join([json.dumps({"jax": jax.__version__, "sources": sources}), *sorted(renewed)]) + "\n")
    print(", ".join(f"{counts[word]} {word}" for word in ("kept", "made anew", "dropped")))


if __name__ == "__main__":
    main()
