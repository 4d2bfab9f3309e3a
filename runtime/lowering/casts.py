"""Bit casts: the same row-major bytes as an array of another element type.

Complex numbers are taken apart and bools widened first: XLA's bitcast refuses both.
"""

from __future__ import annotations

import math

import torch

from .hlo import Lines, Value


def as_dtype(array: Value, dtype: torch.dtype) -> Value:
    """The name and shape `array` has as another element type (without lines)."""
    if array.dtype == dtype:
        return array
    return cast(Lines(), array, dtype)._replace(name=array.name)


def cast(lines: Lines, array: Value, dtype: torch.dtype) -> Value:
    """The row-major bytes of `array` as an array of `dtype`; bytes after the last whole element are dropped."""
    if array.dtype == dtype:
        return array
    array = _to_plain(lines, array)
    array = _bitcast(lines, array, _plain(dtype))
    return _from_plain(lines, array, dtype)


def cast_back(lines: Lines, changed: Value, old: Value) -> Value:
    """`changed`, which is `old` cast to another element type and written to, as `old`'s element type and shape."""
    if changed.dtype == old.dtype:
        return changed
    count, total = math.prod(changed.shape) * changed.dtype.itemsize, math.prod(old.shape) * old.dtype.itemsize
    value = cast(lines, changed, old.dtype)
    if count != total:
        tail = flatten(lines, _to_plain(lines, old))
        value = flatten(lines, _to_plain(lines, value))
        tail = lines.slice(tail, value.shape, tail.shape, (1,))
        value = _from_plain(lines, lines.concatenate([value, tail], 0), old.dtype)
    return lines.reshape(value, old.shape)


def flatten(lines: Lines, array: Value) -> Value:
    """The array's elements in one dimension."""
    return lines.reshape(array, (math.prod(array.shape),))


def _plain(dtype: torch.dtype) -> torch.dtype:
    """The element type whose bits XLA can reinterpret: the parts of complex numbers, bytes for bool."""
    return torch.uint8 if dtype == torch.bool else dtype.to_real() if dtype.is_complex else dtype


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
    flat = flatten(lines, array)
    count = flat.shape[0] // ratio
    flat = lines.slice(flat, (0,), (count * ratio,), (1,))
    return lines.reshape(flat, (count, ratio))
