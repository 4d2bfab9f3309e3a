"""Turns a program that needs too much memory into a sequence of programs that needs less.

A program's temporaries are alive together; those of its parts are not. Where the values between parts are too many
bytes, some are made again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from torchtpu.runtime.device.sizes import show_bytes
from torchtpu.runtime.ir.calls import results_of
from torchtpu.runtime.ir.liveness import live_bytes
from torchtpu.runtime.ir.program import Program
from torchtpu.runtime.ir.values import size_of
from torchtpu.runtime.lowering.fragments import Fragments
from torchtpu.runtime.partition.dead_ops import needed, reading
from torchtpu.runtime.partition.recompute import recompute
from torchtpu.runtime.partition.split import split
from torchtpu.runtime.telemetry.counters import Counters

from .sequence import Sequence

_MOST_PARTS = 96
# What is tried in turn: the bytes that a part makes and those that are held between parts (0: all), of the room.
# Estimates; benchmarks/memory_limit.py measures what they lead to.
_TRIES = ((1 / 4, 0.0), (1 / 12, 0.0), (1 / 8, 0.85), (1 / 10, 0.7), (1 / 12, 0.55), (1 / 16, 0.4))


class Fitting:
    """`build` gives the executables of programs on a device, `drop` lets go of those with these keys."""

    def __init__(
        self,
        fragments: Fragments,
        counters: Counters,
        build: Callable[[list[Program], int], list[Any]],
        drop: Callable[[Collection[str]], Any],
    ) -> None:
        self._fragments = fragments
        self._counters = counters
        self._build = build
        self._drop = drop

    def fit(self, program: Program, device: int, room: int) -> tuple[Sequence | None, str]:
        """A sequence that takes at most `room` bytes, its inputs included, and what it is; or None, and what was tried.

        The texts are a function of the program and the room.
        """
        program, is_repeatable = pruned(program, self._fragments)
        most = max(live_bytes(program), default=0)
        tried = "one op cannot be split" if len(program.ops) == 1 else "its values alone do not fit"
        refused: set[str] = set()
        for grain, target in _TRIES if len(program.ops) > 1 else ():
            repeated, fitted = 0, program
            if target:
                fitted, repeated = recompute(program, int(target * room), is_repeatable)
                if max(live_bytes(fitted)) > room:
                    continue
            elif most > room:
                continue
            parts = split(fitted, _ends(fitted, int(grain * room)))
            executables = self._build([part.program for part in parts], device)
            sequence = Sequence(fitted, parts, executables.__getitem__)
            peak = sequence.argument_bytes + sequence.needed_bytes
            repeats = f", {repeated} ops repeated" if repeated else ""
            tried = f"{len(parts)} parts{repeats}, {show_bytes(peak)}"
            keys = {executable.about.identity for executable in executables}
            if peak <= room:
                self._drop(refused - keys)
                self._counters.regions_split += 1
                self._counters.ops_repeated += repeated
                return sequence, tried
            refused |= keys
        self._drop(refused)
        return None, tried


def pruned(program: Program, fragments: Fragments) -> tuple[Program, list[bool]]:
    """The program without what no result or check of it needs, and whether each op that is left may run twice."""
    kept, unread, found = needed(program, program.ops, fragments)
    return replace(program, ops=reading(program.ops, kept, unread)), [not fragment.checks for fragment in found]


def _ends(program: Program, most: int) -> list[int]:
    """Where parts end that make at most so many bytes: where the fewest are alive, of the later half of each."""
    alive = live_bytes(program)
    made = [sum(size_of(m.base) for m in results_of(op)) for op in program.ops]
    most = max(most, sum(made) // _MOST_PARTS)
    ends, begin = [], 0
    while begin < len(made):
        held, end = 0, begin
        places = []
        while end < len(made) and (held + made[end] <= most or end == begin):
            held += made[end]
            if 2 * held >= most:
                places.append(end)
            end += 1
        if end == len(made):
            break
        begin = min(places or [end - 1], key=lambda place: (alive[place], -place)) + 1
        ends.append(begin)
    return ends
