"""Sorted values, ranks, medians, positions in sequences and histograms.

NaN sorts last in ascending order, as in PyTorch.  Every sort here is stable.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._prims_common import canonicalize_dim

from torchtpu.ops.registry import jnp, lax, lowering, opmath
from torchtpu.ops.shape.index import PROMISED
from torchtpu.ops.sizes import is_at_most, is_known

_MOST_BITS = 31  # of a size
COMPARE_ALL_LIMIT = 1 << 20  # comparisons up to which all pairs are compared
MOST_UNROLLED = 16  # elements up to which the choices of a binary search beat its gathers


def _infer_sort(self: torch.Tensor, *options: Any) -> Any:
    """The functional form: PyTorch's meta kernel of the out= form forgets the strides of what is written."""
    if self.is_complex():
        raise RuntimeError("Sort does not support complex dtypes")
    canonicalize_dim(self.dim(), options[-2] if len(options) > 1 else -1)  # the meta kernel does not look at it
    if len(options) == 3:
        return torch.ops.aten.sort(self, stable=options[0], dim=options[1], descending=options[2])
    return torch.ops.aten.sort(self, *options)


@lowering("sort", infer=_infer_sort)
def sort(x, dim=-1, descending=False):
    return sort_stable(x, stable=True, dim=dim, descending=descending)


@lowering("sort.stable", infer=_infer_sort)
def sort_stable(x, *, stable=None, dim=-1, descending=False):
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    position = lax.broadcasted_iota(jnp.int64, x.shape, dim)
    if not descending:
        return tuple(lax.sort((x, position), dimension=dim, num_keys=1, is_stable=True))
    # the reverse of an ascending sort of the reverse: NaN first, and equal values keep their order
    backwards = [jnp.flip(a, dim) for a in (x, position)]
    return tuple(jnp.flip(a, dim) for a in lax.sort(backwards, dimension=dim, num_keys=1, is_stable=True))


@lowering("sort", infer=_infer_sort, platform="cpu")
def sort_on_cpu(x, dim=-1, descending=False):
    return sort_stable_on_cpu(x, stable=True, dim=dim, descending=descending)


@lowering("sort.stable", infer=_infer_sort, platform="cpu")
def sort_stable_on_cpu(x, *, stable=None, dim=-1, descending=False):
    # XLA:CPU sorts single integers four times as fast as pairs: value and position share one.
    if x.ndim == 0 or x.dtype.itemsize > 4 or x.dtype == jnp.uint32:
        return sort_stable(x, stable=stable, dim=dim, descending=descending)
    dim %= x.ndim
    rank = _rank(x)
    high = (~rank if descending else rank).astype(jnp.int64) << 32
    position = lax.sort(high | lax.broadcasted_iota(jnp.int64, x.shape, dim), dimension=dim) & 0xFFFFFFFF
    return _pick(x, position, dim), position


def _rank(x: Any) -> Any:
    """int32 in the order of `x`, whose NaNs are equal and last."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.int32)
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    magnitude = bits & 0x7FFFFFFF  # integers, as comparisons of floats take subnormal ones for zero
    rank = jnp.where(bits < 0, -magnitude, magnitude)
    return jnp.where(magnitude > 0x7F800000, 0x7FFFFFFF, rank)


@lowering("topk")
def topk(x, k, dim=-1, largest=True, sorted=True):
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    key = jnp.moveaxis(x, dim, -1)
    if jnp.issubdtype(key.dtype, jnp.floating):
        # top_k orders by bits, where a negative NaN is the least of all and a positive one the greatest
        nan = jnp.asarray(math.nan, key.dtype)
        key = jnp.where(jnp.isnan(key), nan if largest else lax.neg(lax.abs(nan)), key if largest else -key)
    else:
        key = key.astype(jnp.int32) if key.dtype == bool else key
        key = key if largest else ~key
    if not is_at_most(k, key.shape[-1]):  # it is: none of what is put behind the last one is taken
        is_float = jnp.issubdtype(key.dtype, jnp.floating)
        least = -math.nan if is_float else jnp.iinfo(key.dtype).min
        key = lax.pad(key, jnp.asarray(least, key.dtype), [(0, 0, 0)] * (key.ndim - 1) + [(0, k, 0)])
    _, index = lax.top_k(key, k)
    index = jnp.moveaxis(index, -1, dim)
    return _pick(x, index, dim), index


@lowering("kthvalue", ints=("k",))
def kthvalue(x, k, dim=-1, keepdim=False, *, ctx):
    if not isinstance(k, int):
        is_there = (k >= 1) & (k <= (x.shape[dim] if x.ndim else 1))
        ctx.check(is_there, f"kthvalue(): selected number k out of range for dimension {dim}", RuntimeError)
    return _ranked(x, dim, keepdim, lambda valid, size: k - 1)


@lowering("median.dim")
def median_dim(x, dim, keepdim=False):
    return _ranked(x, dim, keepdim, lambda valid, size: jnp.where(valid < size, valid, (size - 1) // 2))


@lowering("nanmedian.dim")
def nanmedian_dim(x, dim, keepdim=False):
    return _ranked(x, dim, keepdim, lambda valid, size: jnp.maximum(valid - 1, 0) // 2)


@lowering("median")
def median(x):
    return median_dim(x.reshape(-1), 0)[0] if x.size else _no_median(x)


@lowering("nanmedian")
def nanmedian(x):
    return nanmedian_dim(x.reshape(-1), 0)[0] if x.size else _no_median(x)


def _no_median(x: Any) -> Any:
    return jnp.asarray(math.nan if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min, x.dtype)


def _ranked(x: Any, dim: int, keepdim: bool, rank: Any) -> tuple[Any, Any]:
    """The element at position rank(count of non-NaN, size) of each sorted row, and where it was."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    values, index = sort_stable(x, dim=dim)
    valid = jnp.sum(~jnp.isnan(values), dim, keepdims=True)
    return _pick_both(values, index, jnp.broadcast_to(rank(valid, x.shape[dim]), valid.shape), dim, keepdim)


def _pick_both(values: Any, index: Any, at: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    picked = _pick(values, at, dim), _pick(index, at, dim)
    return picked if keepdim else (jnp.squeeze(picked[0], dim), jnp.squeeze(picked[1], dim))


def _pick(x: Any, index: Any, dim: int) -> Any:
    return jnp.take_along_axis(x, index, dim, mode="promise_in_bounds")


@lowering("mode")
def mode(x, dim=-1, keepdim=False):
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    values, index = sort_stable(x, dim=dim)
    position = lax.broadcasted_iota(jnp.int64, x.shape, dim)
    starts = (values != jnp.roll(values, 1, dim)) | (position == 0)
    length = position - lax.cummax(jnp.where(starts, position, 0), axis=dim)
    # the least of the most frequent values, at its last occurrence; each NaN is a value of its own
    return _pick_both(values, index, jnp.expand_dims(lax.argmax(length, dim, jnp.int64), dim), dim, keepdim)


# Positions in sequences


def _infer_searchsorted(
    sequence: torch.Tensor,
    x: Any,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: torch.Tensor | None = None,
) -> torch.Tensor:
    if side not in (None, "left", "right"):
        raise RuntimeError(f"torch.searchsorted(): side can only be 'left' or 'right' but got {side}")
    if right and side == "left":
        raise RuntimeError(
            "torch.searchsorted(): side and right can't be set to opposites, got side of left while right was True"
        )
    if sequence.dim() == 0:
        raise RuntimeError(
            "torch.searchsorted(): boundaries tensor should have positive dimension, but got 0 dimension"
        )
    return torch.searchsorted(sequence, x, out_int32=out_int32, right=right, side=side, sorter=sorter)


@lowering("searchsorted.Tensor", "searchsorted.Scalar", infer=_infer_searchsorted)
def searchsorted(sequence, x, *, out_int32=False, right=False, side=None, sorter=None, ctx):
    if sorter is not None:
        ok = (sorter >= 0) & (sorter < sequence.shape[-1])
        ctx.check(ok, "torch.searchsorted(): sorter index out of range", RuntimeError)
        sequence = _pick(sequence, sorter, -1)
    return _positions(sequence, x, right or side == "right")


def _infer_bucketize(x: Any, boundaries: torch.Tensor, out_int32: bool = False, right: bool = False) -> torch.Tensor:
    if boundaries.dim() != 1:
        raise RuntimeError(f"boundaries tensor must be 1 dimension, but got dim({boundaries.dim()})")
    return torch.bucketize(x, boundaries, out_int32=out_int32, right=right)


@lowering("bucketize.Tensor", "bucketize.Scalar", infer=_infer_bucketize)
def bucketize(x, boundaries, *, out_int32=False, right=False):
    return _positions(boundaries, x, right)


def _positions(sequence: Any, x: Any, right: bool) -> Any:
    """Per element of `x`, where PyTorch's binary search for it ends in the last dimension of `sequence`, which need not
    be sorted."""
    common = _common_dtype(sequence, x)
    sequence, x, size = sequence.astype(common), jnp.asarray(x, common), sequence.shape[-1]
    if not is_known(size):
        bounds = jnp.zeros(x.shape, jnp.int64), jnp.zeros(x.shape, jnp.int64) + size
        return lax.fori_loop(0, _MOST_BITS, lambda _, b: _halved(sequence, x, right, *b), bounds)[0]
    if size <= MOST_UNROLLED:
        row = sequence if sequence.ndim == 1 else sequence[..., None, :]
        goes_right = [_is_before(row[..., at], x, right) for at in range(size)]
        return jnp.broadcast_to(_branch(goes_right, 0, size), x.shape).astype(jnp.int64)
    bounds = jnp.zeros(x.shape, jnp.int32), jnp.full(x.shape, size, jnp.int32)
    for _ in range(size.bit_length()):
        bounds = _halved(sequence, x, right, *bounds)
    return bounds[0].astype(jnp.int64)


def _halved(sequence: Any, x: Any, right: bool, low: Any, high: Any) -> tuple[Any, Any]:
    """The half of each range that the search goes on in."""
    middle = (low + high) // 2
    at = jnp.minimum(middle, sequence.shape[-1] - 1)
    found = sequence.at[at].get(**PROMISED) if sequence.ndim == 1 else _pick(sequence, at, -1)
    goes_right = _is_before(found, x, right) & (low < high)
    return jnp.where(goes_right, middle + 1, low), jnp.where(goes_right, high, middle)


def _branch(goes_right: list[Any], low: int, high: int) -> Any:
    """Where a search ends that starts with this range, as choices without a gather."""
    if low == high:
        return jnp.int32(low)
    middle = (low + high) // 2
    return jnp.where(goes_right[middle], _branch(goes_right, middle + 1, high), _branch(goes_right, low, middle))


def _is_before(element: Any, x: Any, right: bool) -> Any:
    # as in PyTorch's kernels, which go behind a NaN, whatever they seek
    return ~((element > x) if right else (element >= x))


def _common_dtype(sequence: Any, x: Any) -> Any:
    """The dtype of both, where a number only decides between integer and floating point."""
    if not getattr(x, "weak_type", not hasattr(x, "dtype")):
        return jnp.promote_types(sequence.dtype, x.dtype)
    is_float = jnp.issubdtype(jnp.result_type(x), jnp.floating)
    return jnp.dtype("float32") if is_float and not jnp.issubdtype(sequence.dtype, jnp.floating) else sequence.dtype


@lowering("isin.Tensor_Tensor", "isin.Tensor_Scalar")
def isin(elements, tests, *, assume_unique=False, invert=False):
    elements, tests = jnp.asarray(elements), jnp.asarray(tests)
    common = jnp.promote_types(elements.dtype, tests.dtype)
    elements, tests = elements.astype(common), tests.astype(common).reshape(-1)
    if tests.size * elements.size <= COMPARE_ALL_LIMIT or tests.size <= 16:
        found = jnp.any(elements[..., None] == tests, -1)
    else:
        ordered = jnp.sort(tests)
        is_float = jnp.issubdtype(common, jnp.floating)
        sought = jnp.where(jnp.isnan(ordered), jnp.asarray(math.inf, common), ordered) if is_float else ordered
        at = jnp.minimum(_positions(sought, elements, right=False), tests.size - 1)
        found = ordered[at] == elements
    return ~found if invert else found


def _infer_scalar_isin(element, tests, *flags, **named):
    """One truth value; torch's own shape function leaves its shape to the kernel."""
    return tests.new_empty((), dtype=torch.bool)


@lowering("isin.Scalar_Tensor", infer=_infer_scalar_isin)
def scalar_isin(element, tests, *, assume_unique=False, invert=False):
    return isin(element, tests, assume_unique=assume_unique, invert=invert)


# Histograms


def _infer_histc(x: torch.Tensor, *options: Any) -> torch.Tensor:
    if x.dtype == torch.bool or x.is_complex():
        raise NotImplementedError(f'"histogram" not implemented for {x.dtype}')
    if not all(map(math.isfinite, options[1:])):
        raise RuntimeError("torch.histc: range of the histogram is not finite")
    return torch.ops.aten.histc(x, *options)


@lowering("histc", infer=_infer_histc)
def histc(x, bins=100, min=0, max=0, *, ctx):
    low, high = _range(x, min, max)
    ok = jnp.isfinite(low) & jnp.isfinite(high)
    ctx.check(ok, "torch.histc: the range of the histogram is not finite", RuntimeError)
    x = x.reshape(-1)
    at = jnp.clip(((x - low) * bins / (high - low)).astype(jnp.int64), 0, bins - 1)
    at = jnp.where((x >= low) & (x <= high), at, bins)
    return jnp.zeros(bins, opmath(x).dtype).at[at].add(1, mode="drop")


def _range(x: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """The edges of a histogram: those given, else those of the data; one without width grows by one on each side."""
    low, high = jnp.asarray(low, x.dtype), jnp.asarray(high, x.dtype)
    if x.size:
        is_unset = low == high
        low, high = jnp.where(is_unset, jnp.min(x), low), jnp.where(is_unset, jnp.max(x), high)
    is_point = low == high
    return jnp.where(is_point, low - 1, low), jnp.where(is_point, high + 1, high)


# PyTorch's meta kernel answers for CUDA, whose rows are not kept together.
@lowering("nonzero_static", infer=lambda x, size, *_: x.new_empty((size, x.dim()), dtype=torch.int64))
def nonzero_static(x, *, size, fill_value=-1):
    if x.ndim == 0 or x.size == 0:
        return jnp.full((size, x.ndim), fill_value, jnp.int64)
    return jnp.stack([i.astype(jnp.int64) for i in jnp.nonzero(x, size=size, fill_value=fill_value)], -1)
