"""Scalar lifting: makes inputs of the numbers in which the programs of several ranks differ.

Such numbers are a rank's place in a shared buffer, or the first word of its part of a vocabulary.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from .calls import schema_of
from .program import Lifted, Op, Operand, Program, Scalar
from .values import without_lines

Number = int | float
IsStructural = Callable[[str, str, Number], bool]  # (op, argument, value): it changes what the op means


@dataclass(frozen=True, slots=True)
class Lifting:
    """A program that takes some numbers at run time, after its own: those of this rank."""

    program: Program
    floats: tuple[float, ...]
    ints: tuple[int, ...]


class Numbers:
    """The numbers in a program's ops, in order; `blank` is the program with zeros, and has the `digest`."""

    def __init__(self, program: Program, is_structural: IsStructural) -> None:
        self._program = program
        self._is_structural = is_structural
        found: list[Number] = []

        def see(number: Number) -> Number:
            found.append(number)
            return type(number)(0)

        self.blank = blank = self._rewritten(see)
        self.digest = hashlib.sha256(repr(without_lines(blank)).encode()).hexdigest()
        self.bits = [n if isinstance(n, int) else struct.unpack("<q", struct.pack("<d", n))[0] for n in found]

    def lifted(self, places: Collection[int]) -> Lifting:
        """The program that takes the numbers at these places at run time."""
        program, wanted = self._program, set(places)
        given: dict[type, list[Any]] = {int: [], float: []}
        count = iter(range(len(self.bits)))

        def lift(number: Number) -> Number | Lifted:
            if next(count) not in wanted:
                return number
            numbers, kind, first = (
                (given[int], "i", program.ints) if isinstance(number, int) else (given[float], "f", program.floats)
            )
            numbers.append(number)
            return Lifted(kind, first + len(numbers) - 1)

        made = self._rewritten(lift)
        floats, ints = tuple(given[float]), tuple(given[int])
        made = replace(made, floats=program.floats + len(floats), ints=program.ints + len(ints))
        return Lifting(made, floats, ints)

    def _rewritten(self, change: Callable[[Number], Any]) -> Program:
        return replace(self._program, ops=tuple(self._op(op, change) for op in self._program.ops))

    def _op(self, op: Op, change: Callable[[Number], Any]) -> Op:
        declared = schema_of(op.name).arguments
        args = []
        for i, value in enumerate(op.args):
            argument = declared[i] if i < len(declared) else None
            name = argument.name if argument is not None else ""
            takes_number = argument is not None and str(argument.type).removeprefix("Optional[") in _NUMBERS

            def changed(value: Any, name: str = name, takes_number: bool = takes_number) -> Any:
                match value:
                    case Operand(offset=int(offset)):
                        return replace(value, offset=change(offset))
                    case Scalar(value=int(number) | float(number)) if self._is_free(op, name, number):
                        return replace(value, value=change(number))
                    case tuple():
                        return tuple(changed(item) for item in value)
                    case int() | float() if takes_number and self._is_free(op, name, value):
                        return change(value)
                    case _:
                        return value

            args.append(changed(value))
        writes = tuple(replace(w, offset=change(w.offset)) if isinstance(w.offset, int) else w for w in op.writes)
        return replace(op, args=tuple(args), writes=writes)

    def _is_free(self, op: Op, name: str, value: Number) -> bool:
        return not isinstance(value, bool) and not self._is_structural(op.name, name, value)


_NUMBERS = {"number", "float", "number]", "float]", "List[number]", "List[float]"}


def given(numbers: torch.Tensor | None, more: tuple[Number, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """A launch's run-time numbers with those of a `Lifting` behind them."""
    if not more:
        return numbers
    own = torch.tensor(more, dtype=dtype)
    return own if numbers is None else torch.cat([numbers, own])
