"""Counts what made each program differ from one before.

Always on: it costs a comparison per program that is new, and nothing per launch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Any

from torchtpu.diagnostics.differences import first_difference, nearest

_MOST_OPS = 8192  # of the programs that are kept to be compared with
_MOST_REASONS = 256


class Recompilations:
    """`counts` are by reason: the op and its line, the argument, and what of it varied, such as its dimension 1."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._programs: deque[Any] = deque()
        self._num_ops = 0
        self._counts: OrderedDict[str, int] = OrderedDict()

    def note(self, program: Any) -> None:
        """Compares a program that was planned with the nearest of the last ones."""
        if not program.ops:
            return
        with self._lock:
            known = list(self._programs)
            near = nearest(program, known)
            if near is not None and known[near[0]] != program:
                self._count(first_difference(known[near[0]], program))
            self._programs.append(program)
            self._num_ops += len(program.ops)
            while self._num_ops > _MOST_OPS and len(self._programs) > 1:
                self._num_ops -= len(self._programs.popleft().ops)

    def counts(self) -> dict[str, int]:
        """The counts, the most frequent reason first."""
        with self._lock:
            return dict(sorted(self._counts.items(), key=lambda item: -item[1]))

    def reset(self) -> None:
        """Sets every count to zero."""
        with self._lock:
            self._counts.clear()

    def _count(self, found: Any) -> None:
        of = f" of argument '{found.argument}'" if found.argument else ""
        what = found.what.partition(" of shape")[0]  # the sizes differ each time
        reason = f"{found.op} at {found.line}: {what}{of}"
        self._counts[reason] = self._counts.pop(reason, 0) + 1
        if len(self._counts) > _MOST_REASONS:
            self._counts.popitem(last=False)
