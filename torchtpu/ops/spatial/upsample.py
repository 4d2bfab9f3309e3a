"""Resizes images (batch, channels, *space) to an output size, and the gradients.

Every mode is separable: a table of (input index, weight) per output position for each dimension, known when tracing
unless the sizes change. A gradient uses the transposed table, so it gathers too; of sizes that change it scatters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtpu.ops.registry import jnp, lax, lowering, opmath
from torchtpu.ops.sizes import as_number, is_known

_NAMES = ("1d", "2d", "3d")
_SCALES = {"scales": None, "scales_d": None, "scales_h": None, "scales_w": None}
Array = np.ndarray[Any, Any]
_RATIO_BITS = 45  # of a ratio that 2^16 positions are multiples of, in 64 bits


@dataclass(frozen=True)
class _Table:
    """For each output position the inputs it reads and their weights; a `weight` of NaN marks an unused entry."""

    index: Array
    weight: Array

    def repeats(self, length: int) -> int:
        """How often each of `length` inputs is repeated in place, if that is all the table does; else 0."""
        count = len(self.index)
        repeated = self.index.shape[1] == 1 and count % length == 0
        return count // length if repeated and (self.index[:, 0] == np.arange(count) * length // count).all() else 0

    def transposed(self, length: int) -> _Table:
        rows: list[dict[int, float]] = [{} for _ in range(length)]
        for place, (index, weight) in enumerate(zip(self.index, self.weight, strict=True)):
            for i, w in zip(index, weight, strict=True):
                if not math.isnan(w):
                    rows[i][place] = rows[i].get(place, 0.0) + w
        width = max(map(len, rows), default=0)
        index, weights = np.zeros((length, width), np.int32), np.full((length, width), np.nan)
        for i, row in enumerate(rows):
            index[i, : len(row)], weights[i, : len(row)] = list(row), list(row.values())
        return _Table(index, weights)


def _apply(x: Any, axis: int, table: _Table) -> Any:
    shape = [-1 if i == axis else 1 for i in range(x.ndim)]
    made: Any = 0
    for index, weight in zip(table.index.T, table.weight.T, strict=True):
        part = jnp.take(x, jnp.asarray(index), axis)
        unused = np.isnan(weight)
        if not (weight == 1).all():
            part = part * np.where(unused, 0, weight).reshape(shape).astype(x.dtype)
        made = made + (jnp.where(unused.reshape(shape), 0, part) if unused.any() else part)
    return made


def _columns(table: _Table, x: Any, axis: int) -> list[tuple[Any, Any]]:
    """The columns of a table that is known at run time only, and their weights, shaped to be multiplied with `x`."""
    shape = [-1 if i == axis else 1 for i in range(x.ndim)]
    weights = (column.reshape(shape).astype(x.dtype) for column in table.weight.T)
    return list(zip(table.index.T, weights, strict=True))


def _apply_at_run_time(x: Any, axis: int, table: _Table) -> Any:
    if table.index.shape[1] == 1:
        return jnp.take(x, table.index[:, 0], axis)
    if x.dtype == jnp.uint8:
        raise NotImplementedError("bytes of sizes that change")
    x = opmath(x)
    return sum(jnp.take(x, index, axis) * weight for index, weight in _columns(table, x, axis))


def _transposed_at_run_time(grad: Any, axis: int, table: _Table, length: Any) -> Any:
    made = jnp.zeros((*grad.shape[:axis], length, *grad.shape[axis + 1 :]), grad.dtype)
    for index, weight in _columns(table, grad, axis):
        made = made.at[(*[slice(None)] * axis, index)].add(grad * weight)
    return made


def _apply_to_bytes(x: Any, axis: int, table: _Table) -> Any:
    """In the fixed point of PyTorch, which resizes uint8 images only: 16-bit weights, a byte after each dimension."""
    merged = table.transposed(x.shape[axis]).transposed(len(table.index))
    weights = np.nan_to_num(merged.weight)
    bits = 0
    while bits < 22 and int(0.5 + weights.max() * (2 << bits)) < 1 << 15:
        bits += 1
    fixed = np.trunc(weights * (1 << bits) + np.copysign(0.5, weights)).astype(np.int32)
    shape = [-1 if i == axis else 1 for i in range(x.ndim)]
    made: Any = 1 << (bits - 1)
    for index, weight in zip(merged.index.T, fixed.T, strict=True):
        made = made + jnp.take(x, jnp.asarray(index), axis).astype(jnp.int32) * weight.reshape(shape)
    return jnp.clip(made >> bits, 0, 255).astype(jnp.uint8)


# PyTorch computes positions in `real`, float64 for float64 and bytes; the nearest pixels always in float32.


def _ratio(length: int, count: int, scale: Any, real: Any = np.float32) -> Any:
    return real(1 / scale) if scale is not None and scale > 0 else as_number(length, real) / as_number(count, real)


def _nearest(shift: float, length: int, count: int, align_corners: bool, scale: Any, real: Any) -> _Table:
    """The nearest pixels as PyTorch's kernel for images finds them, and those of all gradients."""
    xp = np if is_known(length, count) else jnp
    out = xp.arange(count, dtype=np.int32)
    source = xp.floor((out.astype(np.float32) + np.float32(shift)) * _ratio(length, count, scale))
    index = xp.minimum(source, as_number(length - 1, np.float32)).astype(np.int32)
    if scale is not None and shift == 0:  # PyTorch takes its two usual cases from the sizes
        lengths, counts = as_number(length, np.int32), as_number(count, np.int32)
        index = xp.where(counts == lengths, out, xp.where(counts == 2 * lengths, out >> 1, index))
    return _Table(index[:, None], xp.ones((count, 1)))


def _nearest_position(shift: float, length: int, count: int, align_corners: bool, scale: Any, real: Any) -> _Table:
    """The nearest elements as PyTorch's kernel for signals and volumes finds them, by the position between elements."""
    xp = np if is_known(length, count) else jnp
    out = xp.arange(count, dtype=np.int32).astype(np.float64) + shift
    position = (out * _ratio(length, count, scale, real) - shift).astype(real)  # rounded once
    source = xp.floor((xp.maximum(position, real(0)) + real(shift)).astype(np.float32))
    index = xp.minimum(source, as_number(length - 1, np.float32)).astype(np.int32)
    return _Table(index[:, None], xp.ones((count, 1)))


def _positions(length: int, count: int, align_corners: bool, scale: Any, real: Any) -> Array:
    xp = np if is_known(length, count) else jnp
    out = xp.arange(count, dtype=real)
    if align_corners:
        steps = as_number(count - 1, real)
        return out * xp.where(steps > 0, as_number(length - 1, real) / xp.maximum(steps, 1), real(0))
    made: Array = _ratio(length, count, scale, real) * (out + real(0.5)) - real(0.5)
    return made


def _floors(length: int, count: int, align_corners: bool, scale: Any, real: Any) -> Array:
    """The whole parts of the positions.

    Of sizes that change they are found with integers: XLA computes a position anew for what reads at it and for its
    weight, and rounds it in two ways, so that one of them would stand for another place. What is next to a whole number
    may be on its other side: a weight of it is as good as 0 or 1.
    """
    if is_known(length, count):
        return np.floor(_positions(length, count, align_corners, scale, real)).astype(np.int32)
    out = jnp.arange(count, dtype=np.int64)
    lengths, counts = as_number(length, np.int64), as_number(count, np.int64)
    if align_corners:
        made = lax.div(out * (lengths - 1), jnp.maximum(counts - 1, 1))
    elif scale is not None and scale > 0:
        ratio = float(real(1 / scale))
        bits = min(_RATIO_BITS - math.frexp(ratio)[1], 60)
        made = ((2 * out + 1) * int(math.ldexp(ratio, bits)) - (1 << bits)) >> (bits + 1)
    else:
        made = lax.div((2 * out + 1) * lengths + counts, 2 * counts) - 1
    return made.astype(np.int32)


def _linear(length: int, count: int, align_corners: bool, scale: Any, real: Any) -> _Table:
    xp = np if is_known(length, count) else jnp
    source = xp.maximum(_positions(length, count, align_corners, scale, real), real(0))
    last = as_number(length - 1, np.int32)
    low = xp.clip(_floors(length, count, align_corners, scale, real), 0, last)
    part = xp.clip(source - low.astype(real), 0, 1)
    if scale is not None and not align_corners:  # PyTorch copies where the sizes are the same
        is_copied = as_number(count, np.int32) == as_number(length, np.int32)
        low = xp.where(is_copied, xp.arange(count, dtype=np.int32), low)
        part = xp.where(is_copied, real(0), part)
    return _Table(xp.stack([low, xp.minimum(low + 1, last)], 1), xp.stack([1 - part, part], 1))


def _cubic_weight(distance: Array, a: float) -> Array:
    xp = np if isinstance(distance, np.ndarray) else jnp
    d = xp.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return xp.where(d <= 1, near, xp.where(d < 2, far, 0))


def _cubic(length: int, count: int, align_corners: bool, scale: Any, real: Any) -> _Table:
    xp = np if is_known(length, count) else jnp
    source = _positions(length, count, align_corners, scale, real)
    low = _floors(length, count, align_corners, scale, real)
    taps = low[:, None] + np.arange(-1, 3)
    weight = _cubic_weight(source.astype(np.float64)[:, None] - taps, -0.75)
    return _Table(xp.clip(taps, 0, as_number(length - 1, np.int32)), weight)


def _copying(table: _Table, is_copied: Any, count: int) -> _Table:
    """What reads each place as it is where that is so."""
    xp = np if isinstance(table.index, np.ndarray) else jnp
    alone = np.eye(1, table.index.shape[1])
    index = xp.where(is_copied, xp.arange(count, dtype=np.int32)[:, None], table.index)
    return _Table(index, xp.where(is_copied, alone, table.weight))


def _antialiased(
    kernel: Callable[[Array], Array], reach: float, length: int, count: int, align_corners: bool, scale: Any, real: Any
) -> _Table:
    ratio = (
        float((length - 1) / (count - 1) if count > 1 else 0.0)
        if align_corners
        else float(_ratio(length, count, scale, real))
    )
    stretch = max(ratio, 1.0)
    centre = ratio * (np.arange(count) + 0.5)
    first = np.maximum((centre - reach * stretch + 0.5).astype(np.int64), 0)
    last = np.minimum((centre + reach * stretch + 0.5).astype(np.int64), length)
    taps = first[:, None] + np.arange(max(int((last - first).max(initial=0)), 1))
    weight = np.where(taps < last[:, None], kernel((taps - centre[:, None] + 0.5) / stretch), 0.0)
    weight = weight / weight.sum(1, keepdims=True)
    weight[taps >= last[:, None]] = np.nan
    return _Table(np.minimum(taps, length - 1).astype(np.int32), weight)


def _triangle(distance: Array) -> Array:
    return np.maximum(1 - np.abs(distance), 0)


def _lanczos(distance: Array) -> Array:
    return np.where(np.abs(distance) < 3, np.sinc(distance) * np.sinc(distance / 3), 0)


_position, _position_exact = (functools.partial(_nearest_position, shift) for shift in (0.0, 0.5))
_pixel, _pixel_exact = (functools.partial(_nearest, shift) for shift in (0.0, 0.5))
_bilinear_aa = functools.partial(_antialiased, _triangle, 1.0)
_bicubic_aa = functools.partial(_antialiased, lambda d: _cubic_weight(d, -0.5), 2.0)
_lanczos_aa = functools.partial(_antialiased, _lanczos, 3.0)

_MODES: tuple[tuple[str, tuple[int, ...], bool, Callable[..., _Table], Callable[..., _Table]], ...] = (
    # name without rank, ranks, whether it takes align_corners, table, table of the gradient
    ("upsample_nearest", (2,), False, _pixel, _pixel),
    ("upsample_nearest", (1, 3), False, _position, _pixel),
    ("_upsample_nearest_exact", (2,), False, _pixel_exact, _pixel_exact),
    ("_upsample_nearest_exact", (1, 3), False, _position_exact, _pixel_exact),
    ("upsample_linear", (1,), True, _linear, _linear),
    ("upsample_bilinear", (2,), True, _linear, _linear),
    ("upsample_trilinear", (3,), True, _linear, _linear),
    ("upsample_bicubic", (2,), True, _cubic, _cubic),
    ("_upsample_bilinear2d_aa", (2,), True, _bilinear_aa, _bilinear_aa),
    ("_upsample_bicubic2d_aa", (2,), True, _bicubic_aa, _bicubic_aa),
    ("_upsample_lanczos2d_aa", (2,), True, _lanczos_aa, _lanczos_aa),
)


def _tables(
    table: Callable[..., _Table], dtype: Any, input_size: Any, output_size: Any, rest: tuple[Any, ...], aligned: bool
) -> list[_Table]:
    align_corners, scales = (rest[0], rest[1:]) if aligned else (False, rest)
    sizes = zip(input_size[-len(output_size) :], output_size, scales, strict=True)
    real = np.float64 if dtype in (jnp.float64, jnp.uint8) else np.float32
    return [table(length, count, align_corners, scale, real) for length, count, scale in sizes]


def _register(name: str, table: Callable[..., _Table], gradient: Callable[..., _Table], aligned: bool) -> None:
    def forward(self: Any, output_size: Any, *rest: Any) -> Any:
        made = self
        tables = _tables(table, self.dtype, self.shape, output_size, rest, aligned)
        for axis, t in reversed(list(enumerate(tables, self.ndim - len(output_size)))):
            if not is_known(self.shape[axis], *t.index.shape):
                made = _apply_at_run_time(made, axis, t)
            elif repeats := t.repeats(self.shape[axis]):
                made = jnp.repeat(made, repeats, axis)
            elif t.index.shape[1] == 1:
                made = jnp.take(made, jnp.asarray(t.index[:, 0]), axis)
            elif made.dtype == jnp.uint8:
                made = _apply_to_bytes(made, axis, t)
            else:
                made = _apply(opmath(made), axis, t)
        return made

    def backward(grad_output: Any, output_size: Any, input_size: Any, *rest: Any) -> Any:
        made = opmath(grad_output)
        tables = _tables(gradient, grad_output.dtype, input_size, output_size, rest, aligned)
        if gradient is _cubic:  # PyTorch's gradient copies where all sizes are the same
            pairs = list(zip(input_size[-len(output_size) :], output_size, strict=True))
            is_copied = math.prod(as_number(one, np.int32) == as_number(other, np.int32) for one, other in pairs)
            tables = [_copying(t, is_copied, count) for t, count in zip(tables, output_size, strict=True)]
        for axis, t in enumerate(tables, made.ndim - len(output_size)):
            length = input_size[axis]
            if not is_known(length, *t.index.shape):
                made = _transposed_at_run_time(made, axis, t, length)
            elif repeats := t.repeats(length):
                made = made.reshape(*made.shape[:axis], length, repeats, *made.shape[axis + 1 :]).sum(axis + 1)
            else:
                made = _apply(made, axis, t.transposed(length))
        return made

    lowering(name, structural=_SCALES)(forward)
    lowering(f"{name}_backward", structural=_SCALES)(backward)


for _name, _ranks, _aligned, _table, _gradient in _MODES:
    for _rank in _ranks:
        _register(_name if _name.endswith("_aa") else f"{_name}{_NAMES[_rank - 1]}", _table, _gradient, _aligned)
