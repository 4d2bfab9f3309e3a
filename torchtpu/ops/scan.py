"""Running reductions along one dimension: in comes an array, out go its prefix sums, products and extremes."""

from __future__ import annotations

from typing import Any

import torch

from torchtpu.ops.reduce import summand
from torchtpu.ops.registry import jnp, lax, lowering, opmath


@lowering("cumsum")
def cumsum(x, dim, *, dtype=None, ctx):
    return _running(lax.cumsum, summand(x, ctx), dim)


@lowering("cumprod")
def cumprod(x, dim, *, dtype=None, ctx):
    return _running(lax.cumprod, summand(x, ctx), dim)


@lowering("_logcumsumexp", infer=lambda x, dim: torch.empty_like(x))
@lowering("logcumsumexp")
def logcumsumexp(x, dim):
    x = opmath(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x if x.ndim == 0 else lax.associative_scan(jnp.logaddexp, x, axis=dim % x.ndim)
    return _running(lax.cumlogsumexp, x, dim)


@lowering("cummax")
def cummax(x, dim):
    return _record(lax.cummax, x, dim)


@lowering("cummin")
def cummin(x, dim):
    return _record(lax.cummin, x, dim)


def _running(function: Any, x: Any, dim: int) -> Any:
    return function(x, axis=dim % x.ndim) if x.size and x.ndim else x


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
