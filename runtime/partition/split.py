"""Splits a program into smaller programs that, run in order, compute the same.

A part's text does not know where in the whole it stood: values and run-time numbers are counted anew in each.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchtpu.runtime.ir.liveness import last_reads
from torchtpu.runtime.ir.program import Lifted, Program
from torchtpu.runtime.ir.values import bases_of, rewrite


@dataclass(frozen=True, slots=True)
class Part:
    """A program, and which of the whole's values and run-time numbers its own stand for.

    After the whole's run-time ints its program takes `offsets`.
    """

    program: Program
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    floats: tuple[int, ...]
    ints: tuple[int, ...]
    offsets: tuple[int, ...] = ()


def split(program: Program, ends: Sequence[int]) -> list[Part]:
    """The parts that end before these ops, ascending places, and the rest.

    A part makes what later parts read and what the program puts out, and takes the memory of what it reads last.
    """
    bounds = [0, *ends, len(program.ops)]
    groups = [program.ops[begin:end] for begin, end in itertools.pairwise(bounds)]
    last = last_reads(groups)
    bases = bases_of(program)
    kept = set(program.outputs)

    def is_free(value: int) -> bool:
        return ~value in program.donated if value < 0 else value not in kept

    parts = []
    for number, ops in enumerate(groups):
        numbers = PartNumbers()
        rewritten = tuple(rewrite(op, numbers.read, numbers.make, numbers.lift) for op in ops)
        outputs = tuple(v for v in numbers.made if v in kept or last[v] > number)
        part = Program(
            ops=rewritten,
            inputs=tuple(bases[v] for v in numbers.inputs),
            outputs=tuple(numbers.made[v] for v in outputs),
            donated=tuple(i for i, v in enumerate(numbers.inputs) if last[v] == number and is_free(v)),
            floats=len(numbers.lifted["f"]),
            ints=len(numbers.lifted["i"]),
            line=program.line,
        )
        parts.append(Part(part, tuple(numbers.inputs), outputs, *(tuple(n) for n in numbers.lifted.values())))
    return parts


class PartNumbers:
    """Counts the values and run-time numbers of a part as they appear in it."""

    def __init__(self) -> None:
        self.inputs: list[int] = []
        self.made: dict[int, int] = {}
        self.lifted: dict[str, list[int]] = {"f": [], "i": []}
        self._known: dict[int | Lifted, Any] = {}

    def read(self, value: int) -> int:
        number = self.made.get(value, self._known.get(value))
        if number is None:
            number = self._known[value] = ~len(self.inputs)
            self.inputs.append(value)
        return number

    def make(self, value: int) -> int:
        number = self.made[value] = len(self.made)
        return number

    def lift(self, lifted: Lifted) -> Lifted:
        if lifted not in self._known:
            places = self.lifted[lifted.kind]
            self._known[lifted] = Lifted(lifted.kind, len(places))
            places.append(lifted.index)
        found: Lifted = self._known[lifted]
        return found
