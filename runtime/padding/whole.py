"""Ops on longer arrays for which it is all the same how many elements count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from torchtpu.runtime.ir.calls import results_of
from torchtpu.runtime.ir.program import Op, Operand, PaddedExtent, Result, Symbolic, Write
from torchtpu.runtime.ir.values import operands

Dimension = tuple[int | str, int]  # how many elements count, and how many there are


def on_all_elements(op: Op) -> Op:
    """An elementwise op with padding as one without, which computes all elements of its arrays: those that count are
    made of such alone. The op as it is where its tensors are parts of arrays, or not as long as its results."""
    assert op.padding is not None
    read = [*map(_dimensions, operands(op), op.padding.reads)]
    made = [*map(_dimensions, results_of(op), op.padding.made)]
    if None in read or None in made or any(map(_is_symbolic, op.args)):
        return op
    is_alike = all(dims == made[0] for dims in made) and all(_is_broadcast(dims or (), made[0] or ()) for dims in read)
    return replace(op, padding=None) if is_alike else op


def _dimensions(tensor: Operand | Result | Write, extent: PaddedExtent | None) -> tuple[Dimension, ...] | None:
    """Those of a tensor that is all of its array, else None."""
    if extent is None:
        return tuple(zip(tensor.sizes, tensor.sizes, strict=True))
    if extent.dims is not None or extent.places or extent.sizes != extent.shape:
        return None
    return tuple(zip(extent.sizes, tensor.sizes, strict=True))


def _is_broadcast(dims: Sequence[Dimension], made: Sequence[Dimension]) -> bool:
    pairs: Iterator[tuple[Dimension | None, Dimension | None]] = zip_longest(reversed(dims), reversed(made))
    return all(own is None or own in ((1, 1), result) for own, result in pairs)


def _is_symbolic(argument: Any) -> bool:
    return isinstance(argument, Symbolic) or (isinstance(argument, (tuple, list)) and any(map(_is_symbolic, argument)))
