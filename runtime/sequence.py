"""Sequences: in comes a work, out go its outputs, computed by several programs in turn.

What lies between two programs lives until its last use, in no longer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .parts import Part
from .region import Program


class _Value(NamedTuple):
    """A value between programs: an array with its guard, or what went wrong with it."""

    array: Any = None
    guard: Any = None
    error: BaseException | None = None


class Sequence:
    """Parts of one program; `executable_of` gives what each is launched with, asked at each launch."""

    def __init__(self, program: Program, parts: list[Part], executable_of: Callable[[int], Any]) -> None:
        self.parts = parts
        self._executable_of = executable_of
        self._outputs = program.outputs
        last = {value: number for number, part in enumerate(parts) for value in (*part.inputs, *part.outputs)}
        kept = set(program.outputs)
        self._dying: list[list[int]] = [[] for _ in parts]
        for value, number in last.items():
            if value not in kept:
                self._dying[number].append(value)

    def run(self, work: Any, launch: Callable[[Any], None]) -> None:
        """Launches the parts in order; tells the work what came of it."""
        values = _inputs_of(work)
        lost: list[BaseException] = []
        for number, part in enumerate(self.parts):
            launch(PartWork(work, part, self._executable_of(number), values, lost))
            for value in self._dying[number]:
                values.pop(value, None)
        made = [values[value] for value in self._outputs]
        for k, value in enumerate(made):
            if value.error is not None:
                work.spoil(k, value.error)
        unseen = [error for error in lost if all(value.error is not error for value in made)]
        if unseen:
            work.failed(unseen[0])
        else:
            has_guards = any(value.guard is not None for value in made)
            work.done([value.array for value in made], [value.guard for value in made] if has_guards else [])


class PartWork:
    """What a launch asks of a work, for one part of it."""

    def __init__(
        self, work: Any, part: Part, executable: Any, values: dict[int, _Value], lost: list[BaseException]
    ) -> None:
        self.executable = executable
        self.device = work.device
        self.region = work.region
        self.program = part.program
        self._work = work
        self._part = part
        self._values = values
        self._lost = lost
        self._spoiled: set[int] = set()

    @property
    def run(self) -> str:
        run: str = self._work.run
        return run

    @functools.cached_property
    def floats(self) -> torch.Tensor | None:
        return self._work.floats[list(self._part.floats)] if self._part.floats else None

    @functools.cached_property
    def ints(self) -> torch.Tensor | None:
        return self._work.ints[list(self._part.ints)] if self._part.ints else None

    def inputs(self) -> list[Any]:
        return [self._values[value].array for value in self._part.inputs]

    def errors(self) -> list[tuple[BaseException, int]]:
        return self._by_input(lambda value: value.error)

    def guards(self) -> list[tuple[Any, int]]:
        return self._by_input(lambda value: value.guard)

    def spoil(self, output: int, error: BaseException) -> None:
        self._spoiled.add(output)
        self._values[self._part.outputs[output]] = _Value(error=error)

    def done(self, objects: list[Any], guards: list[Any]) -> None:
        for k, value in enumerate(self._part.outputs):
            if k not in self._spoiled:
                self._values[value] = _Value(objects[k], guards[k] if guards else None)

    def failed(self, error: BaseException) -> None:
        self._lost.append(error)
        for k in range(len(self._part.outputs)):
            if k not in self._spoiled:
                self.spoil(k, error)

    def _by_input(self, get: Callable[[_Value], Any]) -> list[tuple[Any, int]]:
        found: dict[int, tuple[Any, int]] = {}
        for i, value in enumerate(self._part.inputs):
            thing = get(self._values[value])
            if thing is not None:
                found[id(thing)] = thing, found.get(id(thing), (thing, 0))[1] | 1 << i
        return list(found.values())


def _inputs_of(work: Any) -> dict[int, _Value]:
    arrays = work.inputs()
    guards, errors = (
        {i: thing for thing, inputs in found for i in _bits(inputs)} for found in (work.guards(), work.errors())
    )
    return {~i: _Value(array, guards.get(i), errors.get(i)) for i, array in enumerate(arrays)}


def _bits(number: int) -> list[int]:
    return [i for i in range(number.bit_length()) if number >> i & 1]
