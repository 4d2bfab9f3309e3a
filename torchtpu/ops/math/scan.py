"""Prefix sums, products and extremes along one dimension."""

from __future__ import annotations

import functools
import operator
from typing import Any

from torchtpu.ops.math.reduce import summand
from torchtpu.ops.registry import jnp, lax, like, lowering, opmath


@lowering("cumsum")
def cumsum(x, dim, *, dtype=None, ctx):
    one_by_one = functools.partial(_one_by_one, operator.add, 0)
    return _running(one_by_one if ctx.platform == "cpu" else lax.cumsum, summand(x, ctx), dim)


@lowering("cumprod")
def cumprod(x, dim, *, dtype=None, ctx):
    one_by_one = functools.partial(_one_by_one, operator.mul, 1)
    return _running(one_by_one if ctx.platform == "cpu" else lax.cumprod, summand(x, ctx), dim)


@lowering("_logcumsumexp", infer=lambda x, dim: like(x))
@lowering("logcumsumexp")
def logcumsumexp(x, dim):
    x = opmath(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _running(_complex_cumlogsumexp, x, dim)
    return _running(lax.cumlogsumexp, x, dim)


@lowering("cummax")
def cummax(x, dim):
    return _record(lax.cummax, x, dim)


@lowering("cummin")
def cummin(x, dim):
    return _record(lax.cummin, x, dim)


def _running(function: Any, x: Any, dim: int) -> Any:
    return function(x, axis=dim % x.ndim) if x.size and x.ndim else x


def _one_by_one(function: Any, first: int, x: Any, axis: int) -> Any:
    """In order and in double precision, as PyTorch's CPU kernel; XLA's own form passes over x once per doubling."""
    wide = jnp.promote_types(x.dtype, jnp.float64) if jnp.issubdtype(x.dtype, jnp.inexact) else x.dtype

    def step(total: Any, element: Any) -> tuple[Any, Any]:
        total = function(total, element.astype(wide))
        return total, total.astype(x.dtype)

    elements = jnp.moveaxis(x, axis, 0)
    # Steps on single numbers cost less than their loop; those on rows are loops of their own, better compiled alone.
    _, made = lax.scan(step, jnp.full(elements.shape[1:], first, wide), elements, unroll=8 if x.ndim == 1 else 1)
    return jnp.moveaxis(made, 0, axis)


def _complex_cumlogsumexp(x: Any, axis: int) -> Any:
    """One element after the other: which multiple of 2 pi a phase has depends on the order."""

    def step(total: Any, element: Any) -> tuple[Any, Any]:
        is_larger = element.real >= total.real
        larger, smaller = jnp.where(is_larger, element, total), jnp.where(is_larger, total, element)
        phase = larger.imag + jnp.angle(1 + jnp.exp(smaller - larger))
        added = jnp.logaddexp(total, element)  # its phase lies within pi of zero
        total = lax.complex(added.real, jnp.where(jnp.isfinite(phase), phase, added.imag))
        return total, total

    elements = jnp.moveaxis(x, axis, 0)
    first = elements[0]
    _, rest = lax.scan(step, first, elements[1:])
    return jnp.moveaxis(jnp.concatenate([first[None], rest]), 0, axis)


def _record(function: Any, x: Any, dim: int) -> tuple[Any, Any]:
    """Running extremes with the index of the last element that equals them (a NaN stays, each later NaN moves it)."""
    if x.size == 0 or x.ndim == 0:
        return x, jnp.zeros(x.shape, jnp.int64)
    as_number = x.astype(jnp.uint8) if x.dtype == bool else x
    extreme = function(as_number, axis=dim % x.ndim)
    is_record = as_number == extreme
    if jnp.issubdtype(x.dtype, jnp.floating):
        is_record |= jnp.isnan(x)
    position = lax.broadcasted_iota(jnp.int64, x.shape, dim % x.ndim)
    return extreme, lax.cummax(jnp.where(is_record, position, 0), axis=dim % x.ndim)
