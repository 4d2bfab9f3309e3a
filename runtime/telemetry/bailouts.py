"""Bailouts: notes an optimization that raised, so that whoever tried it goes on with the plain form.

    padded = None
    with bailouts.attempt("padding", program.line):
        padded = pad(program, before)

An optimisation may be a bad idea, never an error: an error of the program itself is raised by its plain form.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torchtpu.runtime import _C

from . import log

_MOST_KEPT = 100


class Bailout(NamedTuple):
    """An optimisation that raised, why, and the line of the region or graph that goes without it."""

    what: str
    cause: str
    line: str
    at: float  # seconds of `time.perf_counter()`

    def __str__(self) -> str:
        return f"the {self.what} of what was recorded at {self.line} failed, the plain form runs: {self.cause}"


class Bailouts:
    """Counts by cause, and the last ones themselves. Appending to a deque needs no lock."""

    def __init__(self, is_logged: Callable[[], bool] = lambda: False) -> None:
        self.last: deque[Bailout] = deque(maxlen=_MOST_KEPT)
        self._is_logged = is_logged
        self._counts: Counter[str] = Counter()

    @contextmanager
    def attempt(self, what: str, line: str) -> Iterator[None]:
        """In the block an optimisation is tried: what it raises is noted, and goes no further. Signal handlers wait."""
        with _C.SignalsDeferred():
            try:
                yield
            except Exception as error:  # noqa: BLE001 -- the plain form serves as well
                self.note(what, error, line)

    def note(self, what: str, error: BaseException, line: str) -> None:
        """Notes what an optimisation raised."""
        kind = type(error).__name__
        self._counts[f"{what}: {kind}"] += 1
        self.last.append(Bailout(what, f"{kind}: {error}", line, time.perf_counter()))
        if self._is_logged():
            log.write(f"tpu: {self.last[-1]}")

    def counts(self) -> dict[str, int]:
        """How often which error kept which optimisation from being made, since `reset`."""
        return dict(self._counts)

    def reset(self) -> None:
        """Sets every count to zero."""
        self._counts.clear()
