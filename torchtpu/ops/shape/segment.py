"""Segment reductions: a row for each segment of consecutive rows, given by lengths or offsets."""

from __future__ import annotations

from typing import Any

import torch

from torchtpu.ops.registry import jax, jnp, lowering, opmath


def _segments(lengths: Any, offsets: Any, axis: int, rows: int) -> tuple[Any, Any]:
    """(segment of each row, number of segments outside where it belongs to none; lengths), batched over `axis` dims."""
    if offsets is None:
        ends = jnp.cumsum(lengths, -1)
        starts = ends - lengths
    else:
        starts, ends = offsets[..., :-1], offsets[..., 1:]
        lengths = ends - starts

    def locate(starts: Any, ends: Any) -> Any:
        row = jnp.arange(rows)
        found = jnp.searchsorted(ends, row, side="right")
        inside = row >= jnp.append(starts, rows)[found]
        return jnp.where(inside, found, starts.shape[0])

    for _ in range(axis):
        locate = jax.vmap(locate)
    return locate(starts, ends), lengths


def _reduce(data: Any, ids: Any, axis: int, reduce: str, count: int) -> Any:
    function = getattr(jax.ops, {"mean": "segment_sum"}.get(reduce, f"segment_{reduce}"))
    reduced = lambda rows, where: function(rows, where, num_segments=count)
    for _ in range(axis):
        reduced = jax.vmap(reduced)
    return reduced(data, ids)


def _trailing(x: Any, ndim: int) -> Any:
    return x.reshape(*x.shape, *[1] * (ndim - x.ndim))


NEUTRAL = {"sum": 0, "mean": 0, "prod": 1, "max": -float("inf"), "min": float("inf")}
COMBINE = {"sum": "add", "mean": "add", "prod": "multiply", "max": "maximum", "min": "minimum"}


def _infer_reduce(data: torch.Tensor, reduce: str, *rest: Any) -> torch.Tensor:
    if reduce not in (*NEUTRAL, "amax", "amin") or not data.is_floating_point():
        raise NotImplementedError(f"segment_reduce by {reduce} of {data.dtype}")  # the CPU's kernel says it best
    names = "lengths", "indices", "offsets", "axis", "unsafe", "initial"
    return torch.segment_reduce(data, reduce, **dict(zip(names, rest, strict=False)))


@lowering("segment_reduce", structural={"initial": None}, infer=_infer_reduce)
def segment_reduce(data, reduce, *, lengths=None, indices=None, offsets=None, axis=0, unsafe=False, initial=None, ctx):
    if lengths is not None and not unsafe:
        fits = (lengths >= 0).all() & (lengths.sum(-1) == data.shape[axis]).all()
        ctx.check(
            fits, "segment_reduce(): Expected all rows of lengths along axis to sum to data.size(axis)", RuntimeError
        )
    reduce = reduce.removeprefix("a")
    rows = opmath(data)
    axis %= data.ndim
    ids, sizes = _segments(lengths, offsets, axis, data.shape[axis])
    made = _reduce(rows, ids, axis, reduce, sizes.shape[-1])
    sizes = _trailing(sizes, made.ndim)
    start = jnp.asarray(NEUTRAL[reduce] if initial is None else initial, rows.dtype)
    made = jnp.where(sizes > 0, getattr(jnp, COMBINE[reduce])(made, start), start)
    if reduce != "mean":
        return made
    return jnp.where(sizes > 0, made / jnp.maximum(sizes, 1), jnp.nan if initial is None else start)


@lowering("_segment_reduce_backward", structural={"initial": None})
def segment_reduce_backward(grad, output, data, reduce, *, lengths=None, offsets=None, axis=0, initial=None):
    reduce = reduce.removeprefix("a")
    axis %= data.ndim
    x = opmath(data)
    ids, sizes = _segments(lengths, offsets, axis, data.shape[axis])
    count = sizes.shape[-1]
    belongs = _trailing(ids < count, data.ndim)

    def spread(values: Any) -> Any:
        """Each row's value of its segment."""
        where = jnp.broadcast_to(_trailing(jnp.minimum(ids, max(count - 1, 0)), data.ndim), data.shape)
        return jnp.take_along_axis(values, where, axis)

    if not count:
        return jnp.zeros_like(x)
    row_grad, row_out = spread(opmath(grad)), spread(opmath(output))
    if reduce == "sum":
        made = row_grad
    elif reduce == "mean":
        made = row_grad / jnp.maximum(spread(jnp.broadcast_to(_trailing(sizes, data.ndim), output.shape)), 1)
    elif reduce == "prod":
        made = row_grad * _products_of_the_others(x, ids, axis, count, spread, 1 if initial is None else initial)
    else:
        hit = (x == row_out) | (jnp.isnan(x) & jnp.isnan(row_out))
        ties = spread(_reduce(hit.astype(x.dtype), ids, axis, "sum", count))
        # PyTorch shares a gradient among equal rows only where it is positive.
        made = jnp.where(hit, jnp.where(row_grad > 0, row_grad / jnp.maximum(ties, 1), row_grad), 0)
    return jnp.where(belongs, made, 0)


def _products_of_the_others(x: Any, ids: Any, axis: int, count: int, spread: Any, initial: Any) -> Any:
    """Each row's product of the other rows of its segment; what cannot be divided by, zeros and NaNs, is left out."""
    zero, invalid = x == 0, jnp.isnan(x)
    zeros, invalids = (spread(_reduce(those.astype(x.dtype), ids, axis, "sum", count)) for those in (zero, invalid))
    divisor = jnp.where(zero | invalid, 1, x)
    product = spread(_reduce(divisor, ids, axis, "prod", count)) * jnp.asarray(initial, x.dtype)
    others = jnp.where(zeros - zero > 0, 0 * product, product / divisor)
    return jnp.where(invalids - invalid > 0, jnp.nan, others)
