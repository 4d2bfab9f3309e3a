"""Room: in come the geometries of arrays and of views into them, out go those where some dimensions are longer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torchtpu.runtime.ir.program import Base, Lifted, Operand, Result, Write

_LEAST = 32
_WIDEST_DOUBLING = 1024  # above it rooms are an eighth of a power of two apart

View = Operand | Write | Result
Shape = tuple[int, ...]


class Fixed(Exception):
    """What a program computes with room is not known: the message says why."""


def room_for(size: int) -> int:
    """The length of the room for so many elements."""
    doubled = 1 << (size - 1).bit_length()
    step = doubled // 8
    return max(_LEAST, doubled if doubled <= _WIDEST_DOUBLING else -(-size // step) * step)


def row_major(shape: Sequence[int]) -> Shape:
    """The strides of a contiguous array."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def with_room(base: Base, axes: Sequence[int], room: int) -> Base:
    """The array whose dimensions `axes` are as long as the room."""
    return base._replace(shape=tuple(room if a in axes else n for a, n in enumerate(base.shape)))


def axis_of(view: View, dim: int) -> int | None:
    """The array's dimension that a view's dimension runs over; None where it runs over several or none."""
    steps = row_major(view.base.shape)
    found = [a for a, n in enumerate(view.base.shape) if n > 1 and steps[a] == view.strides[dim]]
    return found[0] if found and view.sizes[dim] <= view.base.shape[found[0]] else None


def length_of(view: Operand | Write, dim: int) -> int:
    """How long a view's dimension may be; 0 where that is not known."""
    axis = axis_of(view, dim)
    if axis is None or isinstance(view.offset, Lifted) or view.dtype.itemsize != view.base.dtype.itemsize:
        return 0
    return view.base.shape[axis] - view.offset // view.strides[dim] % view.base.shape[axis]


class _Segment(NamedTuple):
    """Dimensions of an array that are `size` indices together, `unit` elements apart, and `unit_with_room` where there
    is room: one that grows, or neighbours that do not."""

    unit: int
    size: int
    unit_with_room: int
    grows: bool


class Room(NamedTuple):
    """Dimensions `axes` of an array of `shape` are as long as the room."""

    shape: Shape
    axes: Sequence[int]
    length: int

    def digits(self, offset: int) -> list[int]:
        """Where an element lies, in numbers that are the same in the array with room."""
        return [offset // s.unit % s.size for s in self._segments()]

    def offset(self, digits: Sequence[int]) -> int:
        """The offset of an element in the array with room."""
        return sum(d * s.unit_with_room for d, s in zip(digits, self._segments(), strict=True))

    def view(self, view: View, dims: Sequence[int], offset: int) -> tuple[Shape, Shape]:
        """The sizes and strides in the array with room of a view whose dimensions `dims` have grown."""
        segments, spans, strides = self._segments(), self.digits(offset), []
        for dim, (size, stride) in enumerate(zip(view.sizes, view.strides, strict=True)):
            place = next((k for k in reversed(range(len(segments))) if segments[k].unit <= stride), None)
            if place is None:  # a stride of 0
                strides.append(stride)
                continue
            segment = segments[place]
            step, rest = divmod(stride, segment.unit)
            if size > 1 and (rest or (segment.grows and dim in dims and (step != 1 or spans[place]))):
                raise Fixed("a view across what grows")
            strides.append(step * segment.unit_with_room)
            spans[place] += step * (size - 1)
        if any(span >= segment.size for span, segment in zip(spans, segments, strict=True)):
            raise Fixed("a view across what grows")
        return tuple(self.length if d in dims else n for d, n in enumerate(view.sizes)), tuple(strides)

    def _segments(self) -> list[_Segment]:
        """The innermost first."""
        made: list[_Segment] = []
        unit = unit_with_room = 1
        for axis in reversed(range(len(self.shape))):
            size, grows = self.shape[axis], axis in self.axes
            if made and not made[-1].grows and not grows:
                made[-1] = made[-1]._replace(size=made[-1].size * size)
            else:
                made.append(_Segment(unit, size, unit_with_room, grows))
            unit *= size
            unit_with_room *= self.length if grows else size
        return made
