"""Reductions over dimensions: sums, norms, moments and extremes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from torchtpu.ops.registry import as_dtype, jnp, lax, lowering, opmath


def axes(dim: int | Iterable[int] | None, rank: int) -> tuple[int, ...]:
    """The non-negative dimensions that `dim` names; None and an empty list name all of them."""
    dims = (dim,) if isinstance(dim, int) else tuple(dim or ())
    return tuple(sorted(d % rank for d in dims)) if rank and dims else tuple(range(rank))


def _integral(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.integer)) or x.dtype == bool


def summand(x: Any, ctx: Any) -> Any:
    """`x` in the dtype of the result, or of the tensor written to; half precision accumulates in float32."""
    return opmath(as_dtype(x, ctx.results[0][1]))


def _count(x: Any, dims: tuple[int, ...]) -> int:
    return math.prod(x.shape[d] for d in dims)


@lowering("sum", "sum.dim_IntList")
def sum_dim(x, dim=None, keepdim=False, *, dtype=None, ctx):
    return jnp.sum(summand(x, ctx), axes(dim, x.ndim), keepdims=keepdim)


@lowering("nansum")
def nansum(x, dim=None, keepdim=False, *, dtype=None, ctx):
    return jnp.sum(summand(jnp.where(jnp.isnan(x), 0, x), ctx), axes(dim, x.ndim), keepdims=keepdim)


def _infer_mean(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    dtype = dtype or x.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError("mean of integers")
    return x.new_empty((), dtype=dtype)


@lowering("mean", infer=_infer_mean)
@lowering("mean.dim")
def mean(x, dim=None, keepdim=False, *, dtype=None, ctx):
    return _average(summand(x, ctx), axes(dim, x.ndim), keepdim)


def _average(x: Any, dims: tuple[int, ...], keepdim: bool) -> Any:
    return jnp.sum(x, dims, keepdims=keepdim) / jnp.asarray(_count(x, dims), x.real.dtype)


@lowering("prod", "prod.dim_int")
def prod(x, dim=None, keepdim=False, *, dtype=None, ctx):
    return jnp.prod(summand(x, ctx), axes(dim, x.ndim), keepdims=keepdim)


@lowering("count_nonzero", "count_nonzero.dim_IntList")
def count_nonzero(x, dim=None):
    return jnp.sum(x != 0, axes(dim, x.ndim), dtype=jnp.int64)


@lowering("any", "any.dim", "any.dims")
def any_dim(x, dim=None, keepdim=False):
    return _logical(jnp.any, x, dim, keepdim)


@lowering("all", "all.dim", "all.dims")
def all_dim(x, dim=None, keepdim=False):
    return _logical(jnp.all, x, dim, keepdim)


def _logical(function: Any, x: Any, dim: Any, keepdim: bool) -> Any:
    # an empty list reduces nothing here, unlike in every other reduction
    dims = () if isinstance(dim, (tuple, list)) and not dim else axes(dim, x.ndim)
    return function(x != 0, dims, keepdims=keepdim)


@lowering("hash_tensor")
def hash_tensor(x, dim=(), *, keepdim=False, mode=0):
    dims = axes(dim, x.ndim)
    wide = x.astype(jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int64)
    bits = lax.bitcast_convert_type(wide, jnp.uint64)
    hashed = lax.reduce(bits, jnp.uint64(0), lax.bitwise_xor, dims)
    return jnp.expand_dims(hashed, dims) if keepdim else hashed


@lowering("trace")
def trace(x, *, ctx):
    return jnp.sum(summand(jnp.diagonal(x), ctx))


# Extremes.  NaN is larger and smaller than everything; the index of an extreme is that of its first occurrence.


def extreme(function: Any, x: Any, dims: Any, ctx: Any, **given: Any) -> Any:
    """`jnp.max` or `jnp.min`, where NaN stays: YNNPACK, by which XLA:CPU of jaxlib 0.10 reduces larger arrays, takes
    any number for more than it."""
    found = function(x, dims, **given)
    if ctx.platform != "cpu" or not jnp.issubdtype(x.dtype, jnp.floating):
        return found
    is_nan = jnp.any(x != x, dims, keepdims=given.get("keepdims", False))
    return jnp.where(is_nan, jnp.asarray(jnp.nan, x.dtype), found)


@lowering("amax", "max")
def amax(x, dim=None, keepdim=False, *, ctx):
    return extreme(jnp.max, x, axes(dim, x.ndim), ctx, keepdims=keepdim)


@lowering("amin", "min")
def amin(x, dim=None, keepdim=False, *, ctx):
    return extreme(jnp.min, x, axes(dim, x.ndim), ctx, keepdims=keepdim)


def _infer_aminmax(self: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    return torch.aminmax(self, dim=dim, keepdim=keepdim)


@lowering("aminmax", "_aminmax", "_aminmax.dim", infer=_infer_aminmax)
def aminmax(x, dim=None, keepdim=False, *, ctx):
    return amin(x, dim, keepdim, ctx=ctx), amax(x, dim, keepdim, ctx=ctx)


@lowering("max.dim")
def max_dim(x, dim, keepdim=False, *, ctx):
    return amax(x, dim, keepdim, ctx=ctx), argmax(x, dim, keepdim)


@lowering("min.dim")
def min_dim(x, dim, keepdim=False, *, ctx):
    return amin(x, dim, keepdim, ctx=ctx), argmin(x, dim, keepdim)


@lowering("argmax")
def argmax(x, dim=None, keepdim=False):
    return _position(lax.argmax, x, dim, keepdim)


@lowering("argmin")
def argmin(x, dim=None, keepdim=False):
    return _position(lax.argmin, x, dim, keepdim)


def _position(function: Any, x: Any, dim: int | None, keepdim: bool) -> Any:
    x = x.astype(jnp.uint8) if x.dtype == bool else x
    if dim is None or x.ndim == 0:
        found = function(x.reshape(-1), 0, jnp.int64)
        return found.reshape((1,) * x.ndim) if keepdim else found
    found = function(x, dim % x.ndim, jnp.int64)
    return jnp.expand_dims(found, dim) if keepdim else found


# Moments


def _spread(op: Any) -> Any:
    """The op's own inference, which takes integers as the op itself does not."""

    def infer(self: torch.Tensor, dim: Any = None, correction: float | None = None, keepdim: bool = False) -> Any:
        if not (self.is_floating_point() or self.is_complex()):
            raise RuntimeError("std and var only support floating point and complex dtypes")
        return op(self, dim, correction=correction, keepdim=keepdim)

    return infer


@lowering("var.correction", structural={"correction": None}, infer=_spread(torch.var))
def var(x, dim=None, *, correction=None, keepdim=False):
    return _moments(x, dim, correction, keepdim)[0]


@lowering("std.correction", structural={"correction": None}, infer=_spread(torch.std))
def std(x, dim=None, *, correction=None, keepdim=False):
    return jnp.sqrt(_moments(x, dim, correction, keepdim)[0])


@lowering("var_mean.correction", structural={"correction": None})
def var_mean(x, dim=None, *, correction=None, keepdim=False):
    return _moments(x, dim, correction, keepdim)


@lowering("std_mean.correction", structural={"correction": None})
def std_mean(x, dim=None, *, correction=None, keepdim=False):
    variance, center = _moments(x, dim, correction, keepdim)
    return jnp.sqrt(variance), center


def _moments(x: Any, dim: Any, correction: float | None, keepdim: bool) -> tuple[Any, Any]:
    x, dims = opmath(x), axes(dim, x.ndim)
    center = _average(x, dims, keepdim=True)
    distance = x - center
    squares = jnp.sum((distance * distance.conj()).real, dims, keepdims=keepdim)
    freedom = max(_count(x, dims) - (1 if correction is None else correction), 0)
    return squares / jnp.asarray(freedom, squares.dtype), center if keepdim else jnp.squeeze(center, dims)


# Norms


@lowering("linalg_vector_norm", structural={"ord": None})
def linalg_vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None, ctx):
    x, dims = opmath(x if dtype is None else as_dtype(x, dtype)), axes(dim, x.ndim)
    if ord == 2:
        return jnp.sqrt(jnp.sum((x * x.conj()).real, dims, keepdims=keepdim))
    size = jnp.abs(x)
    if ord == math.inf:
        return extreme(jnp.max, size, dims, ctx, keepdims=keepdim, initial=0)
    if ord == -math.inf:
        return extreme(jnp.min, size, dims, ctx, keepdims=keepdim)
    if ord == 0:
        return jnp.sum(x != 0, dims, keepdims=keepdim, dtype=size.dtype)
    if ord == 1:
        return jnp.sum(size, dims, keepdims=keepdim)
    return jnp.sum(size**ord, dims, keepdims=keepdim) ** (1 / ord)


@lowering("linalg__powsum", structural={"ord": None})
def linalg_powsum(x, ord=2, dim=None, keepdim=False, *, dtype=None, ctx):
    x, dims = opmath(x if dtype is None else as_dtype(x, dtype)), axes(dim, x.ndim)
    if ord == 0:
        return linalg_vector_norm(x, 0, dims, keepdim, ctx=ctx)
    return jnp.sum((x * x.conj()).real if ord == 2 else jnp.abs(x) ** ord, dims, keepdims=keepdim)


@lowering("norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", structural={"p": None})
def norm(x, p, dim, keepdim=False, *, dtype=None, ctx):
    return linalg_vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype, ctx=ctx)


@lowering("norm.Scalar", "norm.ScalarOpt_dtype", structural={"p": None})
def norm_all(x, p=2, *, dtype=None, ctx):
    return linalg_vector_norm(x, 2 if p is None else p, dtype=dtype, ctx=ctx)


def _infer_renorm(self: torch.Tensor, p: Any, dim: int, maxnorm: Any) -> torch.Tensor:
    if not -self.dim() <= dim < self.dim():
        raise IndexError(f"Dimension out of range, got {dim}")
    return torch.ops.aten.renorm(self, p, dim, maxnorm)


@lowering("renorm", structural={"p": None}, infer=_infer_renorm)
def renorm(x, p, dim, maxnorm, *, ctx):
    others = [d for d in range(x.ndim) if d != dim % x.ndim]
    size = linalg_vector_norm(x, p, others, keepdim=True, ctx=ctx)
    return opmath(x) * jnp.where(size > maxnorm, maxnorm / (size + 1e-7), 1)


def _infer_logsumexp(x: torch.Tensor, dim: Any, keepdim: bool = False) -> torch.Tensor:
    """What the meta kernel says, which is many ops in Python."""
    dims, rank = (dim,) if isinstance(dim, int) else tuple(dim or ()), x.dim()
    is_usual = x.is_contiguous() and x.is_floating_point() and x.numel() > 0 and dims
    if not is_usual or not all(-rank <= d < rank for d in dims) or len({d % rank for d in dims}) < len(dims):
        return torch.ops.aten.logsumexp(x, dims, keepdim)
    gone = axes(dims, rank)
    return x.new_empty([1 if d in gone else n for d, n in enumerate(x.shape) if keepdim or d not in gone])


@lowering("logsumexp", infer=_infer_logsumexp)
def logsumexp(x, dim, keepdim=False):
    x, dims = opmath(x.astype(jnp.float32) if _integral(x) else x), axes(dim, x.ndim)
    if x.size == 0:
        return jnp.log(jnp.sum(jnp.exp(x), dims, keepdims=keepdim))
    top = jnp.max(x.real, dims, keepdims=True)
    top = lax.stop_gradient(jnp.where(jnp.isinf(top), 0, top))
    total = jnp.log(jnp.sum(jnp.exp(x - top), dims, keepdims=True)) + top
    return total if keepdim else jnp.squeeze(total, dims)
