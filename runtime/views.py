"""Views: in comes a strided geometry over an n-d array, out go the StableHLO lines that read it or write into it.

Lines are cached as a `Snippet` per geometry; a program pastes it under names of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .box import Box, Shape, find_box
from .hlo import Lines, Value, tensor_type
from .region import Base

_ARRAY, _NEW, _OFFSET = "%X", "%Y", "%I"


class View(NamedTuple):
    """A strided view in elements of `dtype` over an array's bytes; `offset` is None where it is a run-time input."""

    sizes: Shape
    strides: Shape
    offset: int | None
    dtype: torch.dtype


class Snippet(NamedTuple):
    """Lines over `%X` (the array), `%Y` (what is written) and `%I` (the run-time offset), and their result's name."""

    text: str
    result: str

    def paste(self, prefix: str, array: str = "", new: str = "", offset: str = "") -> tuple[str, str]:
        """The lines and the result's name, with `prefix` before each name made here."""
        text, result = self
        if text:
            text = text.replace("%t", prefix).replace(_ARRAY, array).replace(_NEW, new).replace(_OFFSET, offset)
        return text, result.replace("%t", prefix).replace(_ARRAY, array).replace(_NEW, new)


@functools.lru_cache(maxsize=65536)
def read(base: Base | None, view: View) -> Snippet:
    """The lines that read `view` of an array laid out as `base`, or zeros where the array was never written."""
    lines = Lines()
    if base is None or 0 in view.sizes:
        return _snippet(lines, lines.constant(0, view.sizes, view.dtype))
    array = _cast(lines, Value(_ARRAY, base.shape, base.dtype), view.dtype)
    if view.offset is None:
        flat = _flatten(lines, array)
        span = _span(view)
        array = lines.dynamic_slice(flat, [_offset()], (span,))
    return _snippet(lines, _read(lines, array, view.sizes, view.strides, view.offset or 0))


@functools.lru_cache(maxsize=65536)
def write(base: Base, view: View, is_fresh: bool) -> Snippet:
    """The lines that put `%Y`, of shape `view.sizes`, into `view` of an array laid out as `base`.

    Where `is_fresh` there is no old array: elements outside the view are zero.
    """
    lines = Lines()
    new = Value(_NEW, view.sizes, view.dtype)
    is_covered = covers(base, view)
    old = lines.constant(0, base.shape, base.dtype) if is_fresh and not is_covered else Value(_ARRAY, *base)
    if 0 in view.sizes:
        return _snippet(lines, old)
    array = _as_dtype(old, view.dtype) if is_covered else _cast(lines, old, view.dtype)
    if view.offset is None:
        flat = _flatten(lines, array)
        span = lines.dynamic_slice(flat, [_offset()], (_span(view),))
        span = _write(lines, span, new, view.sizes, view.strides, 0)
        flat = lines.dynamic_update_slice(flat, span, [_offset()])
        result = lines.reshape(flat, array.shape)
    else:
        result = _write(lines, array, new, view.sizes, view.strides, view.offset)
    return _snippet(lines, _cast_back(lines, result, old))


@functools.lru_cache(maxsize=65536)
def covers(base: Base, view: View) -> bool:
    """Whether the view takes every element of the array, so that a write into it needs no old array."""
    if view.offset is None or 0 in view.sizes:
        return 0 in base.shape
    total = math.prod(base.shape) * base.dtype.itemsize
    if math.prod(view.sizes) * view.dtype.itemsize != total:
        return False
    box = find_box(_as_dtype(Value("", *base), view.dtype).shape, view.sizes, view.strides, view.offset)
    return box is not None and box.is_whole


def _snippet(lines: Lines, result: Value) -> Snippet:
    return Snippet("\n".join(lines.lines), result.name)


def _offset() -> Value:
    return Value(_OFFSET, (), torch.int64)


def _span(view: View) -> int:
    return 1 + sum((n - 1) * st for n, st in zip(view.sizes, view.strides, strict=True))


def _flatten(lines: Lines, array: Value) -> Value:
    return lines.reshape(array, (math.prod(array.shape),))


def _read(lines: Lines, array: Value, sizes: Shape, strides: Shape, offset: int) -> Value:
    box = find_box(array.shape, sizes, strides, offset)
    if box is None:
        inner, padded = _padded(array.shape, sizes, strides, offset)
        if padded is None:
            flat = _flatten(lines, array)
            taken = lines.take(flat, lines.strided_indices(sizes, strides, offset, _index_dtype(flat)))
            return lines.reshape(taken, sizes)
        flat = lines.slice(_flatten(lines, array), (offset,), (offset + inner,), (1,))
        zero = lines.constant(0, (), array.dtype)
        array, box = lines.pad(flat, zero, (0,), (math.prod(padded.factors) - inner,), (0,)), padded
    return _read_box(lines, array, box, sizes)


def _read_box(lines: Lines, array: Value, box: Box, sizes: Shape) -> Value:
    value = lines.reshape(array, box.factors)
    ranges = box.ranges
    value = lines.slice(
        value, [r.start for r in ranges], [r.start + r.extent for r in ranges], [r.step for r in ranges]
    )
    order = [k for dim in box.dims for k in dim]
    if order != sorted(order):
        used = sorted(order)
        value = lines.reshape(value, tuple(ranges[k].taken for k in used))
        value = lines.transpose(value, [used.index(k) for k in order])
    value = lines.reshape(value, tuple(math.prod(ranges[k].taken for k in dim) for dim in box.dims))
    return lines.broadcast(value, sizes)


def _write(lines: Lines, array: Value, new: Value, sizes: Shape, strides: Shape, offset: int) -> Value:
    box = find_box(array.shape, sizes, strides, offset)
    if box is not None:
        return lines.reshape(_write_box(lines, array, new, box), array.shape)
    flat = _flatten(lines, array)
    inner, padded = _padded(array.shape, sizes, strides, offset)
    if padded is None:
        indices = lines.strided_indices(sizes, strides, offset, _index_dtype(flat))
        result = lines.put(flat, indices, lines.reshape(new, (math.prod(sizes),)))
    else:
        total = math.prod(padded.factors)
        part = lines.slice(flat, (offset,), (offset + inner,), (1,))
        part = lines.pad(part, lines.constant(0, (), array.dtype), (0,), (total - inner,), (0,))
        part = lines.reshape(_write_box(lines, part, new, padded), (total,))
        part = lines.slice(part, (0,), (inner,), (1,))
        result = lines.dynamic_update_slice(flat, part, _constants(lines, [offset], flat.shape))
    return lines.reshape(result, array.shape)


def _write_box(lines: Lines, array: Value, new: Value, box: Box) -> Value:
    """The array, reshaped to the box's factors, with `new` in the box."""
    ranges = box.ranges
    order = [k for dim in box.dims for k in dim]
    used = sorted(order)
    if order != used:
        new = lines.reshape(new, tuple(ranges[k].taken for k in order))
        new = lines.transpose(new, [order.index(k) for k in used])
    new = lines.reshape(new, tuple(r.taken for r in ranges))
    if box.is_whole:
        return new
    old = lines.reshape(array, box.factors)
    if all(r.step == 1 for r in ranges):
        return lines.dynamic_update_slice(old, new, _constants(lines, [r.start for r in ranges], old.shape))
    low = [r.start for r in ranges]
    high = [f - r.start - r.extent for f, r in zip(box.factors, ranges, strict=True)]
    gaps = [r.step - 1 for r in ranges]
    spread = lines.pad(new, lines.constant(0, (), new.dtype), low, high, gaps)
    inside = lines.constant(1, new.shape, torch.bool)
    mask = lines.pad(inside, lines.constant(0, (), torch.bool), low, high, gaps)
    return lines.select(mask, spread, old)


def _padded(shape: Shape, sizes: Shape, strides: Shape, offset: int) -> tuple[int, Box | None]:
    """The view's span, and the view as a box of that span padded to a whole number of outermost rows."""
    span = 1 + sum((n - 1) * st for n, st in zip(sizes, strides, strict=True))
    stride, size = max((st, n) for n, st in zip(sizes, strides, strict=True) if n != 1)
    if stride * size < span or offset + span > math.prod(shape):
        return span, None
    return span, find_box((stride * size,), sizes, strides, 0)


def _constants(lines: Lines, numbers: Sequence[int], shape: Shape) -> list[Value]:
    dtype = torch.int32 if max(shape, default=0) < 2**31 else torch.int64
    made: dict[int, Value] = {}
    for n in numbers:
        if n not in made:
            made[n] = lines.constant(n, (), dtype)
    return [made[n] for n in numbers]


def _index_dtype(flat: Value) -> torch.dtype:
    return torch.int32 if flat.shape[0] < 2**31 else torch.int64


# Reading the bytes of an array as another element type: complex -> its parts, bool -> uint8, bitcast, then back up.


def _plain(dtype: torch.dtype) -> torch.dtype:
    """The element type whose bits XLA can reinterpret: the parts of complex numbers, bytes for bool."""
    return torch.uint8 if dtype == torch.bool else dtype.to_real() if dtype.is_complex else dtype


def _as_dtype(array: Value, dtype: torch.dtype) -> Value:
    """The name and shape `array` has as another element type (without lines)."""
    if array.dtype == dtype:
        return array
    return _cast(Lines(), array, dtype)._replace(name=array.name)


def _cast(lines: Lines, array: Value, dtype: torch.dtype) -> Value:
    """The row-major bytes of `array` as an array of `dtype`; bytes after the last whole element are dropped."""
    if array.dtype == dtype:
        return array
    array = _to_plain(lines, array)
    array = _bitcast(lines, array, _plain(dtype))
    return _from_plain(lines, array, dtype)


def _cast_back(lines: Lines, changed: Value, old: Value) -> Value:
    """`changed`, which is `old` cast to another element type and written to, as `old`'s element type and shape."""
    if changed.dtype == old.dtype:
        return changed
    count, total = math.prod(changed.shape) * changed.dtype.itemsize, math.prod(old.shape) * old.dtype.itemsize
    value = _cast(lines, changed, old.dtype)
    if count != total:
        tail = _flatten(lines, _to_plain(lines, old))
        value = _flatten(lines, _to_plain(lines, value))
        tail = lines.slice(tail, value.shape, tail.shape, (1,))
        value = _from_plain(lines, lines.concatenate([value, tail], 0), old.dtype)
    return lines.reshape(value, old.shape)


def _to_plain(lines: Lines, array: Value) -> Value:
    if array.dtype == torch.bool:
        return lines.unary("convert", array, torch.uint8)
    if array.dtype.is_complex:
        part = array.dtype.to_real()
        pair = [lines.reshape(lines.unary(p, array, part), (*array.shape, 1)) for p in ("real", "imag")]
        return _merge_last(lines, lines.concatenate(pair, len(array.shape)))
    return array


def _from_plain(lines: Lines, array: Value, dtype: torch.dtype) -> Value:
    if dtype == torch.bool:
        return lines.is_nonzero(array)
    if dtype.is_complex:
        pairs = _split_last(lines, array, 2)
        rank, ends = len(pairs.shape), pairs.shape[:-1]
        starts = (0,) * (rank - 1)
        real = lines.slice(pairs, (*starts, 0), (*ends, 1), (1,) * rank)
        imag = lines.slice(pairs, (*starts, 1), (*ends, 2), (1,) * rank)
        return lines.complex(lines.reshape(real, ends), lines.reshape(imag, ends), dtype)
    return array


def _bitcast(lines: Lines, array: Value, dtype: torch.dtype) -> Value:
    have, want = array.dtype.itemsize, dtype.itemsize
    if have == want:
        return array if array.dtype == dtype else lines.bitcast(array, array.shape, dtype)
    if have > want:
        return _merge_last(lines, lines.bitcast(array, (*array.shape, have // want), dtype))
    pairs = _split_last(lines, array, want // have)
    return lines.bitcast(pairs, pairs.shape[:-1], dtype)


def _merge_last(lines: Lines, array: Value) -> Value:
    """The last two dimensions as one; a 0-dim array's new dimension stays."""
    if len(array.shape) == 1:
        return array
    return lines.reshape(array, (*array.shape[:-2], array.shape[-2] * array.shape[-1]))


def _split_last(lines: Lines, array: Value, ratio: int) -> Value:
    """The last dimension as groups of `ratio`; an array whose last dimension does not divide is flattened and cut."""
    if array.shape and array.shape[-1] % ratio == 0:
        return lines.reshape(array, (*array.shape[:-1], array.shape[-1] // ratio, ratio))
    flat = _flatten(lines, array)
    count = flat.shape[0] // ratio
    flat = lines.slice(flat, (0,), (count * ratio,), (1,))
    return lines.reshape(flat, (count, ratio))


def type_of(view: View) -> str:
    """The type of what the view reads."""
    return tensor_type(view.sizes, view.dtype)
