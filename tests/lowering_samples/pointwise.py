"""Samples for the elementwise ops that no OpInfo reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

aten = torch.ops.aten


def samples(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    x = torch.tensor([[-7, -3, -1, 0], [1, 2, 5, 9]]).to(dtype)
    y = torch.tensor([[2, -2, 3, 4], [-5, 1, 7, -3]]).to(dtype)
    real = not dtype.is_complex and dtype != torch.bool
    if real:
        for mode in (None, "trunc", "floor"):
            yield "pointwise", lambda mode=mode: aten.div.Scalar_mode(x, 3, rounding_mode=mode)
            yield "pointwise", lambda mode=mode: aten.div.Tensor_mode(x, y, rounding_mode=mode)
            yield "pointwise", lambda mode=mode: aten.div.Tensor_mode(x, -2.5, rounding_mode=mode)
        for divide in (aten.floor_divide, aten.fmod, aten.remainder):
            yield "pointwise", lambda divide=divide: divide.Scalar(x, 3)
            yield "pointwise", lambda divide=divide: divide.Scalar(x, -2.5)
        yield "pointwise", lambda: aten.remainder.Scalar_Tensor(7, y)
        yield "pointwise", lambda: aten.xlogy.Scalar_Self(2.5, x)
        yield "pointwise", lambda: aten.xlogy.Scalar_Other(x, 2.5)
        yield "pointwise", lambda: aten.xlogy.Scalar_Self(0, x)
        yield "pointwise", lambda: aten.masked_fill.Tensor(x, y > 1, torch.tensor(5).to(dtype))
        yield "pointwise", lambda: aten.clamp_max(x, 3)
        yield "pointwise", lambda: aten.clamp_max(x, 2.5)
        yield "pointwise", lambda: aten.clamp_min(x, 2.5)
        yield "pointwise", lambda: aten.rsub.Scalar(x, 3, 4)
        yield "pointwise", lambda: aten.sub.Scalar(x, 3, 4)
        yield "pointwise", lambda: aten.special_xlog1py.self_scalar(2.5, y)
        yield "pointwise", lambda: aten.special_zeta.other_scalar(x, 2.5)
    if dtype.is_complex:
        yield "pointwise", lambda: aten.conj_physical(x)
        yield "pointwise", lambda: aten.conj_physical_(x.clone())
        yield "pointwise", lambda: aten.conj_physical.out(x, out=x.clone())
    if not dtype.is_floating_point and not dtype.is_complex:
        yield from _bits(x, y, dtype)
    if dtype.is_floating_point:
        yield from _special_values(dtype)


def _bits(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    number = True if dtype == torch.bool else 6
    for op in (aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor):
        yield "bits", lambda op=op: op.Scalar(x, number)
        yield "bits", lambda op=op: op.Scalar_Tensor(number, x)
    if dtype == torch.bool:
        return
    shift = torch.tensor([[0, 1, 2, 3], [62, 63, 64, -1]]).to(dtype)
    for shifted in (aten.bitwise_left_shift, aten.bitwise_right_shift):
        yield "bits", lambda op=shifted: op.Tensor(x, shift)
        yield "bits", lambda op=shifted: op.Tensor_Scalar(x, 3)
        yield "bits", lambda op=shifted: op.Scalar_Tensor(1000, shift)
    for dunder in (aten.__lshift__, aten.__rshift__):
        yield "bits", lambda op=dunder: op.Tensor(x, shift)
        yield "bits", lambda op=dunder: op.Scalar(x, 3)


def _special_values(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    inf, nan = float("inf"), float("nan")
    v = torch.tensor([-inf, -2.5, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.5, inf, nan], dtype=dtype)
    w = v.flip(0).clone()
    unary = (
        "abs ceil floor trunc round sign sgn signbit relu neg isnan isinf isposinf isneginf nan_to_num sqrt rsqrt "
        "reciprocal exp log log1p tanh sigmoid silu mish erf hardswish hardsigmoid softplus angle logical_not "
        "hardshrink softshrink hardtanh log_sigmoid_forward frac digamma lgamma sinc"
    )
    for name in unary.split():
        yield "values", lambda name=name: getattr(torch.ops.aten, name)(v)
    for other in (v[:, None], w):
        for name in [
            "maximum",
            "minimum",
            "fmax",
            "fmin",
            "fmod",
            "remainder",
            "floor_divide",
            "atan2",
            "copysign",
            "heaviside",
            "hypot",
            "pow",
        ]:
            op = getattr(torch.ops.aten, name)
            yield "values", lambda op=op, other=other: op(v, other)
        yield "values", lambda other=other: torch.ops.aten.div(v, other, rounding_mode="floor")
        yield "values", lambda other=other: torch.ops.aten.eq(v, other)
        yield "values", lambda other=other: torch.ops.aten.xlogy(v, other)
    for exponent in (0, 1, 2, 3, 4, -2, 0.5, -0.5, -1, 2.5, 1 / 3):
        yield "values", lambda e=exponent: torch.ops.aten.pow(v, e)
    for number in (0.1, 1.1, 3.3):
        yield "values", lambda n=number: torch.ops.aten.eq(torch.tensor([0.1, 1.1, 3.3], dtype=dtype), n)
        yield "values", lambda n=number: torch.ops.aten.ge(torch.tensor([0.1, 1.1, 3.3], dtype=dtype), n)
        yield "values", lambda n=number: torch.ops.aten.clamp(v, max=n)
    yield "values", lambda: torch.ops.aten.threshold(v, 0.5, 7.5)
    yield "values", lambda: torch.ops.aten.nan_to_num(v, 1.5, 2.5, -2.5)
    yield "values", lambda: torch.ops.aten.glu_jvp(v[:5], v[:10], v[:10], 0)
