"""Recomputation: makes a program hold fewer bytes at a time by computing some values again.

Values are dropped greedily: the largest, longest unread and cheapest to make again first. Ops are functions of their
arguments, random ones of their recorded seed too, so a value made again has the same bits.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torchtpu.runtime.ir.calls import precision_of, results_of, written
from torchtpu.runtime.ir.liveness import ends_of_life
from torchtpu.runtime.ir.program import Op, Program
from torchtpu.runtime.ir.values import bases_of, operands, rewrite, size_of

_BYTES_PER_SECOND, _FLOPS_PER_SECOND = 1e10, 5e10  # what is cheap to make again: estimates, on any machine
_DEEPEST = 24  # ops that may be repeated for one value
_SMALL = 512  # a value of less than this part of the target is not worth dropping


def recompute(program: Program, target: int, is_repeatable: Sequence[bool]) -> tuple[Program, int]:
    """The program that holds at most about `target` bytes, as far as that goes, and how many ops it repeats.

    `is_repeatable` says of each op whether it may run twice.
    """
    schedule = _Schedule(program, target, is_repeatable)
    for place in range(len(program.ops)):
        schedule.run(place)
    outputs = tuple(schedule.names.get(value, value) for value in program.outputs)
    return replace(program, ops=tuple(schedule.ops), outputs=outputs), len(schedule.ops) - len(program.ops)


class _Schedule:
    """Runs the ops in thought, and notes what is run: `ops`, and under which number each value is known now."""

    def __init__(self, program: Program, target: int, is_repeatable: Sequence[bool]) -> None:
        self.ops: list[Op] = []
        self.names: dict[int, int] = {}
        self._program = program
        self._target = target
        self._sizes = {value: size_of(base) for value, base in bases_of(program).items()}
        self._maker = {made.value: place for place, op in enumerate(program.ops) for made in results_of(op)}
        self._reads = [list(dict.fromkeys(o.value for o in operands(op) if o.value is not None)) for op in program.ops]
        self._uses: dict[int, list[int]] = {}
        for place, values in enumerate(self._reads):
            for value in values:
                self._uses.setdefault(value, []).append(place)
        self._last = ends_of_life(program)
        self._dying: dict[int, list[int]] = {}
        for value, place in self._last.items():
            self._dying.setdefault(place, []).append(value)
        self._seconds = [self._cost(op) for op in program.ops]
        self._is_repeatable = is_repeatable
        self._next = max(self._maker, default=-1) + 1
        self._live = {~i: self._sizes[~i] for i in range(len(program.inputs))}
        self._held = sum(self._live.values())

    def run(self, place: int) -> None:
        """Runs an op, after those that make again what it reads."""
        pinned = set(self._reads[place])
        for value in self._reads[place]:
            if value not in self._live:
                self._repeat(value, place, pinned)
        self._make_room(place, pinned)
        op = self._program.ops[place]
        self.ops.append(rewrite(op, lambda v: self.names.get(v, v), lambda v: v))
        for made in results_of(op):
            self._hold(made.value)
        self._drop(self._dying.get(place, ()))

    def _repeat(self, value: int, now: int, pinned: set[int]) -> None:
        place = self._maker[value]
        reads = self._reads[place]
        pinned = pinned | set(reads)
        missing = [v for v in reads if v not in self._live]
        for v in missing:
            self._repeat(v, now, pinned)
        self._make_room(now, pinned, place)
        op = self._program.ops[place]
        numbers = {made.value: self._number() for made in results_of(op)}
        self.ops.append(rewrite(op, lambda v: self.names.get(v, v), numbers.__getitem__))
        for v, number in numbers.items():
            if v not in self._live and (v == value or self._next_use(v, now) is not None):
                self.names[v] = number
                self._hold(v)
        self._drop(v for v in missing if self._next_use(v, now) is None)

    def _make_room(self, now: int, pinned: set[int], place: int | None = None) -> None:
        """Drops values until what an op makes fits too."""
        more = self._needs(now if place is None else place, set(self._dying.get(now, ())))
        if self._held + more <= self._target:
            return
        ranked = []
        for value, size in self._live.items():
            if value < 0 or value in pinned or value not in self._last or size * _SMALL < self._target:
                continue
            following = self._next_use(value, now + 1)
            if following is None:
                continue
            seconds = self._price(value, following, _DEEPEST)
            ranked.append((size * (following - now) / seconds, value))
        for score, value in sorted(ranked, reverse=True):
            if self._held + more <= self._target or score == 0:
                return
            # What a value dropped just now was to be made of has to stay.
            if self._price(value, self._next_use(value, now + 1) or now, _DEEPEST) < math.inf:
                self._drop([value])

    def _needs(self, place: int, dying: set[int]) -> int:
        """The bytes of what an op makes, without writes into memory that is free then."""
        op = self._program.ops[place]
        reused = {w.value for w in op.writes if written(op, w).value in dying}
        return sum(self._sizes[made.value] for made in results_of(op) if made.value not in reused)

    def _price(self, value: int, when: int, deepest: int) -> float:
        """The seconds it takes to make a value again at a later place; infinite where that cannot be."""
        place = self._maker.get(value)
        if place is None or deepest == 0 or not self._is_repeatable[place]:
            return math.inf
        seconds = self._seconds[place]
        for v in self._reads[place]:
            if self._is_there(v, when):
                continue
            seconds += self._price(v, when, deepest - 1)
            if seconds == math.inf:
                return seconds
        return seconds

    def _is_there(self, value: int, when: int) -> bool:
        """Whether a value is alive now and stays so until then, or is dropped only if it can be made again."""
        return value in self._live and self._last.get(value, when) >= when

    def _next_use(self, value: int, place: int) -> int | None:
        uses = self._uses.get(value, [])
        i = bisect.bisect_left(uses, place)
        return uses[i] if i < len(uses) else None

    def _hold(self, value: int) -> None:
        self._live[value] = self._sizes[value]
        self._held += self._sizes[value]

    def _drop(self, values: Iterable[int]) -> None:
        for value in values:
            self._held -= self._live.pop(value, 0)

    def _number(self) -> int:
        self._next += 1
        return self._next - 1

    def _cost(self, op: Op) -> float:
        taken = sorted((math.prod(o.sizes) for o in operands(op)), reverse=True)
        made = [math.prod(m.sizes) for m in results_of(op)]
        nbytes = sum(math.prod(t.sizes) * t.dtype.itemsize for t in _tensors(op))
        flops = 2 * math.sqrt(math.prod(taken[:2]) * max(made, default=0)) if precision_of(op) is not None else 0
        return nbytes / _BYTES_PER_SECOND + flops / _FLOPS_PER_SECOND + 1e-6


def _tensors(op: Op) -> Iterator[Any]:
    yield from operands(op)
    yield from results_of(op)
