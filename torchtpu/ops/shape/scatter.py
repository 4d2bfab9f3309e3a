"""Stores, adds or reduces a source into an array along a dimension.  Sums of bfloat16 accumulate in float32; of several
stores to one place the last one wins."""

from __future__ import annotations

from typing import Any

import torch

from torchtpu.ops.registry import Context, jnp, lax, like, lowering, opmath
from torchtpu.ops.shape.index import DROPPED, checked, filling, out_of_bounds, wrapped


@lowering("scatter.src", "scatter.value")
def scatter(x, dim, index, source, *, ctx):
    return _scattered(ctx, "set", x, dim, index, source)


@lowering("scatter_add")
def scatter_add(x, dim, index, source, *, ctx):
    return _scattered(ctx, "sum", x, dim, index, source)


@lowering("scatter.reduce", "scatter.value_reduce")
def scatter_reduce_legacy(x, dim, index, source, *, reduce, ctx):
    return _scattered(ctx, {"add": "sum", "multiply": "prod"}[reduce], x, dim, index, source)


@lowering("scatter_reduce.two")
def scatter_reduce(x, dim, index, source, reduce, *, include_self=True, ctx):
    return _scattered(ctx, reduce, x, dim, index, source, include_self)


def _scattered(ctx: Context, how: str, x: Any, dim: int, index: Any, source: Any, include_self: bool = True) -> Any:
    if index.size == 0:
        return x
    rows, index = (x.reshape(1), index.reshape(-1)) if x.ndim == 0 else (x, index)
    dim %= rows.ndim
    checked(ctx, index, rows.shape[dim], out_of_bounds(dim, rows.shape[dim]), RuntimeError)
    source = jnp.asarray(source).astype(x.dtype)
    source = source.reshape(-1) if source.ndim and x.ndim == 0 else source
    source = source[tuple(map(slice, index.shape))] if source.ndim else jnp.broadcast_to(source, index.shape)
    where = tuple(index if d == dim else _iota(index, d) for d in range(rows.ndim))
    return _reduced(how, rows, where, source, include_self).reshape(x.shape)


def _iota(index: Any, dim: int) -> Any:
    """0, 1, 2, ... along `dim`, for an index that leaves this dimension in place."""
    return lax.broadcasted_iota(index.dtype, tuple(n if d == dim else 1 for d, n in enumerate(index.shape)), dim)


def _reduced(how: str, x: Any, where: tuple[Any, ...], source: Any, include_self: bool = True) -> Any:
    """`x` with `source` stored ("set") or reduced into it at `where`, whose positions count from 0."""
    if how == "set":
        return x.at[where].set(source, **DROPPED)
    if not include_self:
        x = x.at[where].set(_identity(how, x.dtype), **DROPPED)
    if how == "amax":
        return x.at[where].max(source, **DROPPED)
    if how == "amin":
        return x.at[where].min(source, **DROPPED)
    if x.dtype == bool and how == "prod":
        return x.at[where].min(source, **DROPPED)
    if how == "prod":
        return opmath(x).at[where].multiply(source, **DROPPED)
    if x.dtype == bool:
        return x.at[where].max(source, **DROPPED)
    total = opmath(x).at[where].add(source, **DROPPED)
    if how == "sum":
        return total
    ones = jnp.full(x.shape, int(include_self), total.dtype).at[where].add(1, **DROPPED)
    count = jnp.maximum(ones.real, 1).astype(total.dtype)
    return total // count if jnp.issubdtype(x.dtype, jnp.integer) else total / count


def _identity(how: str, dtype: Any) -> Any:
    if how in ("amax", "amin"):
        if dtype.kind == "b":
            return how == "amin"
        is_float = jnp.issubdtype(dtype, jnp.floating)
        low, high = (-jnp.inf, jnp.inf) if is_float else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
        return low if how == "amax" else high
    return 1 if how == "prod" else 0


# One index for whole slices


@lowering("index_add", structural={"alpha": (1,)})
def index_add(x, dim, index, source, *, alpha=1, ctx):
    if not isinstance(alpha, int) or alpha != 1:  # a number of the dtype
        source = (opmath(source) * opmath(jnp.asarray(alpha).astype(source.dtype))).astype(source.dtype)
    if x.ndim < 2:
        return _into_slices(ctx, "sum", x, dim, index, source, "index out of range in self")
    return _into_slices(ctx, "sum", x, dim, index, source, out_of_bounds(dim % x.ndim, x.shape[dim]), RuntimeError)


@lowering("index_copy")
def index_copy(x, dim, index, source, *, ctx):
    message = "index_copy_(): " + out_of_bounds(dim % max(x.ndim, 1), x.shape[dim] if x.ndim else 1)
    return _into_slices(ctx, "set", x, dim, index, source, message)


@lowering("index_reduce")
def index_reduce(x, dim, index, source, reduce, *, include_self=True, ctx):
    return _into_slices(ctx, reduce, x, dim, index, source, "index out of range in self", include_self=include_self)


def _into_slices(
    ctx: Context,
    how: str,
    x: Any,
    dim: int,
    index: Any,
    source: Any,
    message: str,
    error: type[Exception] = IndexError,
    include_self: bool = True,
) -> Any:
    rows = x.reshape(1) if x.ndim == 0 else x
    dim %= rows.ndim
    index = checked(ctx, index.reshape(-1), rows.shape[dim], message, error)
    source = source.reshape(rows.shape[:dim] + index.shape + rows.shape[dim + 1 :]).astype(x.dtype)
    if how == "set" and index.size == 1 <= rows.shape[dim]:  # as into a cache: unlike a scatter it reads nothing
        return lax.dynamic_update_slice_in_dim(rows, source, index[0], dim).reshape(x.shape)
    return _reduced(how, rows, (slice(None),) * dim + (index,), source, include_self).reshape(x.shape)


def _infer_index_fill(self: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> torch.Tensor:
    """As `self`. The value, and an index of no dimensions, may lie on the host, which PyTorch does not expect here."""
    if isinstance(value, torch.Tensor) and value.dim():
        raise RuntimeError(f"index_fill_ only supports a 0-dimensional value tensor, not {value.dim()} dimensions")
    if not self.is_complex() and (isinstance(value, complex) or getattr(value, "dtype", self.dtype).is_complex):
        raise RuntimeError("index_fill_(): Converting complex Scalar to non-complex type is not supported")
    self.index_fill(dim, index if index.dim() else index.to(self.device), 0)
    return like(self)


@lowering("index_fill.int_Scalar", "index_fill.int_Tensor", lifts=True, infer=_infer_index_fill)
def index_fill(x, dim, index, value, *, ctx):
    rows = x.reshape(1) if x.ndim == 0 else x
    dim %= rows.ndim
    index = wrapped(ctx, jnp.asarray(index).reshape(-1), rows.shape[dim], out_of_bounds(dim, rows.shape[dim]))
    value = filling(ctx, value, x.dtype)
    return rows.at[(slice(None),) * dim + (index,)].set(value, **DROPPED).reshape(x.shape)
