"""Regions with collectives of several groups: divides them into launches with the ranks of one group each.

A piece begins with the first collective that is left and takes all others of its group, and all ops, that do not wait
for what is left out. A rank waits for others only at the first collective that it has left, so ranks that agree and
ranks that do not, whose collectives run alone and in order, never wait for each other in a circle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torchtpu.runtime.device.process_group import Homes
from torchtpu.runtime.execute.executable import LaunchContext
from torchtpu.runtime.execute.sequence import Sequence
from torchtpu.runtime.ir.calls import results_of
from torchtpu.runtime.ir.program import Op, Program
from torchtpu.runtime.ir.values import operands
from torchtpu.runtime.partition.split import split

from .regions import SpmdRegion, ends_around

GroupOf = Callable[[Op], Homes | None]  # the devices that launch a collective together; None for any other op


def split_by_group(program: Program, group_of: GroupOf) -> list[list[int]]:
    """The places of each piece's ops."""
    groups = [group_of(op) for op in program.ops]
    makers: dict[int | None, int] = {}
    sources: list[set[int]] = []
    for place, op in enumerate(program.ops):
        sources.append({makers[o.value] for o in operands(op) if o.value in makers})
        makers.update((made.value, place) for made in results_of(op))
    pieces, left = [], list(range(len(program.ops)))
    while left:
        group = next((groups[place] for place in left if groups[place] is not None), None)
        taken: list[int] = []
        waiting: set[int] = set()
        for place in left:
            if groups[place] not in (None, group) or not waiting.isdisjoint(sources[place]):
                waiting.add(place)
            else:
                taken.append(place)
        pieces.append(taken)
        left = sorted(waiting)
    return pieces


def ordered(program: Program, pieces: list[list[int]]) -> tuple[Program, list[int]]:
    """The program with its pieces one after the other, and where they end."""
    ops = tuple(program.ops[place] for piece in pieces for place in piece)
    ends, end = [], 0
    for piece in pieces[:-1]:
        end += len(piece)
        ends.append(end)
    return replace(program, ops=ops), ends


class MultiGroupRegion:
    """What a plan is given whose program has collectives of several groups.

    `region_of` makes what a piece runs with, `run_alone` the executable of one op or of the ops between collectives.
    """

    meets_others = True
    takes_padding = False

    def __init__(
        self,
        program: Program,
        collective: str,
        group_of: GroupOf,
        region_of: Callable[[Program], SpmdRegion],
        run_alone: Callable[[Program], Any],
    ) -> None:
        self._program = program
        self._collective = collective
        self._run_alone = run_alone
        self._pieces = split_by_group(program, group_of)
        parts = split(*ordered(program, self._pieces))
        self._region = functools.cache(lambda number: region_of(parts[number].program))
        self._sequence = Sequence(program, parts, self._region)
        self._rest = functools.cache(self._alone_from)

    def launch(self, work: Any, context: LaunchContext) -> None:
        """Launches the pieces while all ranks of each are at it, then what is left of the program in order."""
        with context.catching(work):
            sequence, state = self._sequence, self._sequence.begin(work)
            for number in range(len(self._pieces)):
                part_work = sequence.part_work(state, number)
                if not self._region(number).meet(part_work, context):
                    self._rest(number).go_on(state, number, context.launch)
                    return
                sequence.forget(state, number)
            sequence.finish(state)

    def _alone_from(self, number: int) -> Sequence:
        """The program with some pieces, and then each collective alone."""
        done = self._pieces[:number]
        left = sorted(place for piece in self._pieces[number:] for place in piece)
        program, ends = ordered(self._program, [*done, left] if done else [left])
        begin = len(program.ops) - len(left)
        rest = replace(program, ops=program.ops[begin:])
        parts = split(program, [*ends, *(begin + end for end in ends_around(rest, self._collective))])
        return Sequence(self._program, parts, functools.cache(lambda n: self._run_alone(parts[n].program)))
