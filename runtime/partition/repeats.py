"""Repeats: finds the runs in a sequence of integers that say the same thing several times over.

A run is a piece that follows itself: in `x a b c a b c a y` three letters are repeated from the second place on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Repetition(NamedTuple):
    """`sequence[start : start + length]` repeats itself every `period` places, at least twice."""

    start: int
    length: int
    period: int

    @property
    def repeated(self) -> int:
        """The places that are repetitions of what came before."""
        return (self.length // self.period - 1) * self.period


def find_runs(sequence: Sequence[int], shortest: int) -> list[Repetition]:
    """Disjoint runs in order, each the one that repeats most of what the others left.

    Of two that repeat as much the one of shorter period counts. A run repeats at least `shortest` places.
    """
    found: list[Repetition] = []
    waiting = [(0, np.asarray(sequence, dtype=np.int64))]
    while waiting:
        start, places = waiting.pop()
        best = _best(places, shortest)
        if best is None:
            continue
        end = best.start + best.length
        found.append(best._replace(start=start + best.start))
        waiting += [(start, places[: best.start]), (start + end, places[end:])]
    return sorted(found)


def _best(places: np.ndarray, shortest: int) -> Repetition | None:
    best: Repetition | None = None
    for period in range(1, len(places) // 2 + 1):
        most = len(places) // period * period - period
        if most < shortest or (best is not None and most <= best.repeated):
            continue
        same = places[period:] == places[:-period]
        if np.count_nonzero(same) < max(period, best.repeated if best else shortest):
            continue
        edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False]))))
        starts, ends = edges[::2], edges[1::2]
        longest = int(np.argmax((ends - starts) // period))
        run = Repetition(int(starts[longest]), int(ends[longest] - starts[longest]) + period, period)
        if run.repeated >= max(shortest, best.repeated + 1 if best else 0):
            best = run
    return best
