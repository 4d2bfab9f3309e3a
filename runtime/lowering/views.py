"""Views: the StableHLO lines that read a strided view of an n-d array, or write into it.

Lines are cached as a `Snippet` per geometry; a program pastes it under names of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchtpu.runtime.ir.program import Base
from torchtpu.runtime.ir.strided_access import Digit, Range, Shape, StridedAccess, find_access

from .casts import as_dtype, cast, cast_back, flatten
from .hlo import Lines, Value

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


@functools.lru_cache(maxsize=8192)
def digits(base: Base, view: View) -> tuple[Digit, ...]:
    """The conditions under which a view at a run-time offset is a box of the array; none where it is not taken as one.

    Whoever cannot show that they hold reads and writes with `is_flat`, which is right for every offset.
    """
    if 0 in view.sizes:
        return ()
    access = find_access(as_dtype(Value("", *base), view.dtype).shape, view.sizes, view.strides, 0)
    if access is None:
        return ()
    rows = zip(access.weights, access.factors, access.ranges, strict=True)
    return tuple(Digit(weight, size, size - taken.extent) for weight, size, taken in rows)


@functools.lru_cache(maxsize=8192)
def read(base: Base | None, view: View, *, is_flat: bool = False) -> Snippet:
    """The lines that read `view` of an array laid out as `base`, or zeros where the array was never written.

    A run-time offset has to meet `digits(base, view)` unless `is_flat`.
    """
    lines = Lines()
    if base is None or 0 in view.sizes:
        return _snippet(lines, lines.constant(0, view.sizes, view.dtype))
    array = cast(lines, Value(_ARRAY, base.shape, base.dtype), view.dtype)
    if view.offset is None:
        return _snippet(lines, _read_at(lines, array, view, is_flat=is_flat))
    return _snippet(lines, _read(lines, array, view.sizes, view.strides, view.offset))


@functools.lru_cache(maxsize=8192)
def write(base: Base, view: View, *, is_fresh: bool = False, is_flat: bool = False) -> Snippet:
    """The lines that put `%Y`, of shape `view.sizes`, into `view` of an array laid out as `base`.

    Where `is_fresh` there is no old array: elements outside the view are zero. A run-time offset has to meet
    `digits(base, view)` unless `is_flat`.
    """
    lines = Lines()
    new = Value(_NEW, view.sizes, view.dtype)
    if any(size > 1 and stride == 0 for size, stride in zip(view.sizes, view.strides, strict=True)):
        # An op that may write an expanded view gives all its copies of an element one value.
        sizes = tuple(1 if t == 0 and n > 1 else n for n, t in zip(view.sizes, view.strides, strict=True))
        new = lines.slice(new, [0] * len(sizes), sizes, [1] * len(sizes))
        view = view._replace(sizes=sizes)
    is_covered = covers(base, view)
    is_empty = 0 in view.sizes
    needs_zeros = is_fresh and (is_empty or not is_covered)
    old = lines.constant(0, base.shape, base.dtype) if needs_zeros else Value(_ARRAY, *base)
    if is_empty:
        return _snippet(lines, old)
    array = as_dtype(old, view.dtype) if is_covered else cast(lines, old, view.dtype)
    if view.offset is None:
        result = _write_at(lines, array, new, view, is_flat=is_flat)
    else:
        result = _write(lines, array, new, view.sizes, view.strides, view.offset)
    return _snippet(lines, cast_back(lines, result, old))


@functools.lru_cache(maxsize=8192)
def covers(base: Base, view: View) -> bool:
    """Whether the view takes every element of the array, so that a write into it needs no old array."""
    if view.offset is None or 0 in view.sizes:
        return 0 in base.shape
    total = math.prod(base.shape) * base.dtype.itemsize
    if math.prod(view.sizes) * view.dtype.itemsize != total:
        return False
    access = find_access(as_dtype(Value("", *base), view.dtype).shape, view.sizes, view.strides, view.offset)
    return access is not None and access.is_whole


def _snippet(lines: Lines, result: Value) -> Snippet:
    return Snippet("\n".join(lines.lines), result.name)


def _read_at(lines: Lines, array: Value, view: View, *, is_flat: bool) -> Value:
    """A read at the run-time offset."""
    sizes, strides = view.sizes, view.strides
    access = None if is_flat else find_access(array.shape, sizes, strides, 0)
    if access is None:
        part = lines.dynamic_slice(flatten(lines, array), [_offset()], (_span(view),))
        return _read(lines, part, sizes, strides, 0)
    extents = tuple(r.extent for r in access.ranges)
    part = lines.dynamic_slice(lines.reshape(array, access.factors), _starts(lines, access), extents)
    return _read_access(lines, part, access._replace(factors=extents), sizes)


def _write_at(lines: Lines, array: Value, new: Value, view: View, *, is_flat: bool) -> Value:
    """A write at the run-time offset: the part that the view spans is read, written to and put back."""
    sizes, strides = view.sizes, view.strides
    access = None if is_flat else find_access(array.shape, sizes, strides, 0)
    if access is None:
        flat, starts = flatten(lines, array), [_offset()]
        part = lines.dynamic_slice(flat, starts, (_span(view),))
        part = _write(lines, part, new, sizes, strides, 0)
    else:
        flat, starts = lines.reshape(array, access.factors), _starts(lines, access)
        extents = tuple(r.extent for r in access.ranges)
        inner = access._replace(factors=extents)
        # Where the view is dense, the old part is not needed.
        part = flat if inner.is_whole else lines.dynamic_slice(flat, starts, extents)
        part = _write_access(lines, part, new, inner)
    return lines.reshape(lines.dynamic_update_slice(flat, part, starts), array.shape)


def _offset() -> Value:
    return Value(_OFFSET, (), torch.int64)


def _span(view: View) -> int:
    return 1 + sum((n - 1) * st for n, st in zip(view.sizes, view.strides, strict=True))


def _starts(lines: Lines, access: StridedAccess) -> list[Value]:
    """The run-time offset's digits, of those factors that the view does not cover."""
    number = functools.cache(lambda n: lines.constant(n, (), torch.int64))
    starts = []
    for k, (weight, factor, taken) in enumerate(zip(access.weights, access.factors, access.ranges, strict=True)):
        start = number(0)
        if taken.extent < factor:
            start = _offset() if weight == 1 else lines.binary("divide", _offset(), number(weight))
            start = start if k == 0 else lines.binary("remainder", start, number(factor))
        starts.append(start)
    return starts


def _read(lines: Lines, array: Value, sizes: Shape, strides: Shape, offset: int) -> Value:
    access = find_access(array.shape, sizes, strides, offset)
    if access is None:
        inner, padded = _padded(array.shape, sizes, strides, offset)
        if padded is None:
            flat = flatten(lines, array)
            taken = lines.take(flat, lines.strided_indices(sizes, strides, offset, _index_dtype(flat)))
            return lines.reshape(taken, sizes)
        flat = lines.slice(flatten(lines, array), (offset,), (offset + inner,), (1,))
        zero = lines.constant(0, (), array.dtype)
        array, access = lines.pad(flat, zero, (0,), (math.prod(padded.factors) - inner,), (0,)), padded
    return _read_access(lines, array, access, sizes)


def _slice(lines: Lines, value: Value, ranges: Sequence[Range]) -> Value:
    return lines.slice(value, [r.start for r in ranges], [r.start + r.extent for r in ranges], [r.step for r in ranges])


def _read_access(lines: Lines, array: Value, access: StridedAccess, sizes: Shape) -> Value:
    window = access.window(array.shape)
    if window is not None:
        array, access = _slice(lines, array, window.ranges), window.access
    ranges = access.ranges
    value = _slice(lines, lines.reshape(array, access.factors), ranges)
    order = [k for dim in access.dims for k in dim]
    if order != sorted(order):
        used = sorted(order)
        value = lines.reshape(value, tuple(ranges[k].taken for k in used))
        value = lines.transpose(value, [used.index(k) for k in order])
    value = lines.reshape(value, tuple(math.prod(ranges[k].taken for k in dim) for dim in access.dims))
    return lines.broadcast(value, sizes)


def _write(lines: Lines, array: Value, new: Value, sizes: Shape, strides: Shape, offset: int) -> Value:
    access = find_access(array.shape, sizes, strides, offset)
    if access is not None:
        return lines.reshape(_write_access(lines, array, new, access), array.shape)
    flat = flatten(lines, array)
    inner, padded = _padded(array.shape, sizes, strides, offset)
    if padded is None:
        indices = lines.strided_indices(sizes, strides, offset, _index_dtype(flat))
        result = lines.put(flat, indices, lines.reshape(new, (math.prod(sizes),)))
    else:
        total = math.prod(padded.factors)
        part = lines.slice(flat, (offset,), (offset + inner,), (1,))
        part = lines.pad(part, lines.constant(0, (), array.dtype), (0,), (total - inner,), (0,))
        part = lines.reshape(_write_access(lines, part, new, padded), (total,))
        part = lines.slice(part, (0,), (inner,), (1,))
        result = lines.dynamic_update_slice(flat, part, _constants(lines, [offset], flat.shape))
    return lines.reshape(result, array.shape)


def _write_access(lines: Lines, array: Value, new: Value, access: StridedAccess) -> Value:
    """The array with `new` in the box, in a shape that holds its rows."""
    ranges = access.ranges
    order = [k for dim in access.dims for k in dim]
    used = sorted(order)
    if order != used:
        new = lines.reshape(new, tuple(ranges[k].taken for k in order))
        new = lines.transpose(new, [order.index(k) for k in used])
    new = lines.reshape(new, tuple(r.taken for r in ranges))
    if access.is_whole:
        return new
    window = access.window(array.shape)
    if window is not None and window.access.is_whole and all(r.step == 1 for r in window.ranges):
        new = lines.reshape(new, tuple(r.taken for r in window.ranges))
        return lines.dynamic_update_slice(array, new, _constants(lines, [r.start for r in window.ranges], array.shape))
    old = lines.reshape(array, access.factors)
    if all(r.step == 1 for r in ranges):
        return lines.dynamic_update_slice(old, new, _constants(lines, [r.start for r in ranges], old.shape))
    low = [r.start for r in ranges]
    high = [f - r.start - r.extent for f, r in zip(access.factors, ranges, strict=True)]
    gaps = [r.step - 1 for r in ranges]
    spread = lines.pad(new, lines.constant(0, (), new.dtype), low, high, gaps)
    inside = lines.constant(1, new.shape, torch.bool)
    mask = lines.pad(inside, lines.constant(0, (), torch.bool), low, high, gaps)
    return lines.select(mask, spread, old)


def _padded(shape: Shape, sizes: Shape, strides: Shape, offset: int) -> tuple[int, StridedAccess | None]:
    """The view's span, and the view as a box of that span padded to a whole number of outermost rows."""
    span = 1 + sum((n - 1) * st for n, st in zip(sizes, strides, strict=True))
    stride, size = max((st, n) for n, st in zip(sizes, strides, strict=True) if n != 1)
    if stride * size < span or offset + span > math.prod(shape):
        return span, None
    return span, find_access((stride * size,), sizes, strides, 0)


def _constants(lines: Lines, numbers: Sequence[int], shape: Shape) -> list[Value]:
    dtype = torch.int32 if max(shape, default=0) < 2**31 else torch.int64
    made: dict[int, Value] = {}
    for n in numbers:
        if n not in made:
            made[n] = lines.constant(n, (), dtype)
    return [made[n] for n in numbers]


def _index_dtype(flat: Value) -> torch.dtype:
    return torch.int32 if flat.shape[0] < 2**31 else torch.int64
