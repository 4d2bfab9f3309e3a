"""Takes arrays apart: flips, windows and diagonals.

A gradient of a view is a pad with zeros, a write into a view is a select or an update of a slice: never a scatter
where the positions are known.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from torchtpu.ops.registry import as_dtype, jax, jnp, lax, lowering, opmath, without_kernels
from torchtpu.ops.sizes import is_at_most, transpose

from .written import Kind, Shape, padded, placed

UNROLLED_WINDOWS = 32  # overlaps up to which windows are summed by pads instead of a scatter


@lowering("_chunk_cat")
def chunk_cat(tensors, dim, num_chunks, *, ctx):
    dtype, parts = ctx.results[0][1], []
    for t in tensors:
        size = -(-t.shape[dim] // num_chunks)
        rows = _padded(as_dtype(t, dtype), dim, 0, size * num_chunks - t.shape[dim])
        parts.append(rows.reshape(*t.shape[:dim], num_chunks, -1))
    return jnp.concatenate(parts, -1)


@lowering("repeat")
def repeat(x, repeats):
    return jnp.tile(x, repeats)


@lowering("flip")
def flip(x, dims):
    return jnp.flip(x, tuple(dims)) if x.ndim else x


@lowering("rot90")
def rot90(x, k=1, dims=(0, 1)):
    return jnp.rot90(x, operator.index(k), tuple(dims))  # of one that changes jax would take every quarter for the last


@lowering("roll", ints=("shifts",))
def roll(x, shifts, dims=()):
    if x.size == 0 or x.ndim == 0:
        return x
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])


@lowering("pixel_shuffle")
def pixel_shuffle(x, upscale_factor):
    r, (*batch, c, h, w) = upscale_factor, x.shape
    blocks = x.reshape(*batch, c // (r * r), r, r, h, w)
    n = len(batch)
    return blocks.transpose(*range(n), n, n + 3, n + 1, n + 4, n + 2).reshape(*batch, c // (r * r), h * r, w * r)


@lowering("pixel_unshuffle")
def pixel_unshuffle(x, downscale_factor):
    r, (*batch, c, h, w) = downscale_factor, x.shape
    blocks = x.reshape(*batch, c, h // r, r, w // r, r)
    n = len(batch)
    return blocks.transpose(*range(n), n, n + 2, n + 4, n + 1, n + 3).reshape(*batch, c * r * r, h // r, w // r)


@lowering("channel_shuffle")
def channel_shuffle(x, groups):
    batch, channels, *rest = x.shape
    return x.reshape(batch, groups, channels // groups, *rest).swapaxes(1, 2).reshape(x.shape)


# Slices


def _padded(x: Any, dim: int, low: int, high: int, interior: int = 0) -> Any:
    """`x` with zeros before, behind and between its elements along `dim`."""
    edges = [(low, high, interior) if d == dim % x.ndim else (0, 0, 0) for d in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), edges)


def _bounds(size: int, start: int | None, end: int | None, step: int) -> tuple[int, int, int]:
    """(start, count, step) of a slice whose ends are counted and clamped as Python does."""
    span = range(size)[slice(start, end, step)]
    return span.start, len(span), step


def _write_slice_backward(
    given: Sequence[Kind], made: Kind, sizes: Shape, dim: int, start: Any, end: Any, step: int
) -> list[str] | None:
    ((shape, _),) = given
    count, size = shape[dim], sizes[dim]
    if isinstance(start, str):
        return placed(given[0], made, dim % len(sizes), start, is_row=False) if step == 1 and count else None
    if not isinstance(end, int) or math.prod(shape) == 0:
        return None
    first = _bounds(size, start, size, step)[0]
    edges = [(0, 0, 0)] * len(shape)
    edges[dim] = first, size - first - (count - 1) * step - 1, step - 1
    return padded(given[0], made[0], edges)


@lowering("slice_backward", ints=("start", "end"), write=_write_slice_backward)
def slice_backward(grad, input_sizes, dim, start, end, step):
    size, count = input_sizes[dim], grad.shape[dim]
    if count == 0:
        return jnp.zeros(input_sizes, grad.dtype)
    if isinstance(start, jax.Array):
        return _placed(grad if step == 1 else _padded(grad, dim, 0, 0, step - 1), input_sizes, dim, start)
    is_symbolic = not (isinstance(start, int) and isinstance(size, int))  # and so inside
    first = start if is_symbolic and start >= 0 else _bounds(size, start, size, step)[0]
    return _padded(grad, dim, first, size - first - (count - 1) * step - 1, step - 1)


def _write_select_backward(given: Sequence[Kind], made: Kind, sizes: Shape, dim: int, index: Any) -> list[str] | None:
    return placed(given[0], made, dim % len(sizes), index, is_row=True) if isinstance(index, str) else None


@lowering("select_backward", ints=("index",), write=_write_select_backward)
def select_backward(grad, input_sizes, dim, index):
    dim %= len(input_sizes)
    size = input_sizes[dim]
    grad = jnp.expand_dims(grad, dim)
    if isinstance(index, jax.Array):
        return _placed(grad, input_sizes, dim, index)
    first = index if index >= 0 else size + index
    return _padded(grad, dim, first, size - 1 - first)


def _placed(x: Any, sizes: Any, dim: int, start: Any) -> Any:
    """Zeros with `x` from `start` on, a number known at run time which counts from the end where it is negative."""
    dim %= len(sizes)
    size, count = sizes[dim], x.shape[dim]
    is_part = is_at_most(count, size)
    shape = list(sizes)
    if not is_part:  # that is known of what has so many elements more
        shape[dim] = size + count
    starts = [jnp.zeros((), start.dtype)] * len(shape)
    starts[dim] = lax.select(start < 0, start + size, start)
    made = lax.dynamic_update_slice(jnp.zeros(shape, x.dtype), x, starts, allow_negative_indices=False)
    return made if is_part else lax.slice_in_dim(made, 0, size, axis=dim)


@lowering("slice_scatter", infer=partial(without_kernels, torch.ops.aten.slice_scatter.default))
def slice_scatter(x, source, dim=0, start=None, end=None, step=1):
    size = x.shape[dim]
    if step == 1 and not all(isinstance(n, int) for n in (size, start or 0, end or 0)):  # symbolic, and so inside
        first = 0 if start is None else size + start if isinstance(start, int) and start < 0 else start
        return lax.dynamic_update_slice_in_dim(x, source.astype(x.dtype), first, dim % x.ndim)
    first, count, step = _bounds(size, start, end, step)
    where = (slice(None),) * (dim % x.ndim) + (slice(first, first + count * step, step),)
    return x.at[where].set(source.astype(x.dtype)) if count else x


@lowering("select_scatter", infer=partial(without_kernels, torch.ops.aten.select_scatter.default))
def select_scatter(x, source, dim, index):
    at = jnp.expand_dims(source.astype(x.dtype), dim % x.ndim)
    return lax.dynamic_update_slice_in_dim(x, at, index % x.shape[dim], dim % x.ndim)


# Diagonals


def _spread_diagonal(values: Any, rows: int, columns: int, offset: int) -> tuple[Any, Any]:
    """([..., rows, columns] with `values` wherever the diagonal is, the mask of the diagonal)."""
    above = max(-offset, 0)
    column = _padded(values, -1, above, rows - above - values.shape[-1])[..., None]
    row, col = (lax.broadcasted_iota(jnp.int32, (rows, columns), d) for d in (0, 1))
    return jnp.broadcast_to(column, (*column.shape[:-1], columns)), col - row == offset


@lowering("diag_embed")
def diag_embed(x, offset=0, dim1=-2, dim2=-1):
    size = x.shape[-1] + abs(offset)
    spread, mask = _spread_diagonal(x, size, size, offset)
    return jnp.moveaxis(jnp.where(mask, spread, 0), (-2, -1), (dim1, dim2))


@lowering("diagonal_backward")
def diagonal_backward(grad, input_sizes, offset, dim1, dim2):
    if grad.shape[-1] == 0:
        return jnp.zeros(input_sizes, grad.dtype)
    spread, mask = _spread_diagonal(grad, input_sizes[dim1], input_sizes[dim2], offset)
    return jnp.moveaxis(jnp.where(mask, spread, 0), (-2, -1), (dim1, dim2))


@lowering("diagonal_scatter", infer=partial(without_kernels, torch.ops.aten.diagonal_scatter.default))
def diagonal_scatter(x, source, offset=0, dim1=0, dim2=1):
    if source.shape[-1] == 0:
        return x
    spread, mask = _spread_diagonal(source.astype(x.dtype), x.shape[dim1], x.shape[dim2], offset)
    return jnp.moveaxis(jnp.where(mask, spread, jnp.moveaxis(x, (dim1, dim2), (-2, -1))), (-2, -1), (dim1, dim2))


# Windows


def windows(x: Any, dim: int, size: int, step: int, dilation: int = 1) -> Any:
    """The windows of one dimension: [..., count, size, ...] in its place."""
    count = (x.shape[dim] - dilation * (size - 1) - 1) // step + 1
    last = (count - 1) * step + 1
    taken = [lax.slice_in_dim(x, k * dilation, k * dilation + last, step, dim) for k in range(size)]
    return jnp.stack(taken, dim + 1)


@lowering("unfold_backward")
def unfold_backward(grad, input_sizes, dim, size, step):
    if not input_sizes:
        return grad.reshape(())
    dim %= len(input_sizes)
    grad, width = opmath(grad), input_sizes[dim]
    count, chunks = grad.shape[dim], -(-size // step)
    if chunks > UNROLLED_WINDOWS:
        position = jnp.arange(count)[:, None] * step + jnp.arange(size)
        rows = jnp.moveaxis(grad, (dim, -1), (0, 1))
        summed = jnp.zeros((width, *rows.shape[2:]), grad.dtype).at[position].add(rows)
        return jnp.moveaxis(summed, 0, dim)
    # pieces of `step` elements tile the line: one pad for each piece of a window
    rows = jnp.moveaxis(_padded(grad, -1, 0, chunks * step - size), -1, dim + 1)
    length = max(width, (count + chunks - 1) * step)
    total = jnp.zeros((*input_sizes[:dim], length, *input_sizes[dim + 1 :]), grad.dtype)
    for c in range(chunks):
        piece = lax.slice_in_dim(rows, c * step, (c + 1) * step, axis=dim + 1)
        line = piece.reshape(*piece.shape[:dim], count * step, *piece.shape[dim + 2 :])
        total += _padded(line, dim, c * step, length - (c + count) * step)
    return lax.slice_in_dim(total, 0, width, axis=dim)


@lowering("im2col")
def im2col(x, kernel_size, dilation, padding, stride):
    batched = x if x.ndim == 4 else x[None]
    columns = _columns(batched, kernel_size, dilation, padding, stride)
    return columns if x.ndim == 4 else columns[0]


@lowering("col2im")
def col2im(x, output_size, kernel_size, dilation, padding, stride):
    batched = opmath(x if x.ndim == 3 else x[None])
    channels = batched.shape[1] // (kernel_size[0] * kernel_size[1])
    image = jax.ShapeDtypeStruct((batched.shape[0], channels, *output_size), batched.dtype)
    summed = transpose(lambda i: _columns(i, kernel_size, dilation, padding, stride), image, batched)
    return summed if x.ndim == 3 else summed[0]


def _columns(x: Any, kernel: Iterable[int], dilation: Any, padding: Any, stride: Any) -> Any:
    (kh, kw), (ph, pw) = kernel, padding
    n, c = x.shape[:2]
    x = _padded(_padded(x, 2, ph, ph), 3, pw, pw)
    patches = windows(windows(x, 3, kw, stride[1], dilation[1]), 2, kh, stride[0], dilation[0])  # n c oh kh ow kw
    oh, ow = patches.shape[2], patches.shape[4]
    return patches.transpose(0, 1, 3, 5, 2, 4).reshape(n, c * kh * kw, oh * ow)
