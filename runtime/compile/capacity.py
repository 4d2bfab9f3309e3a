"""How many programs stay in memory: as many as the user says, and fewer where they take too many memory maps.

XLA:CPU maps the code of a small program in some eight pieces. Linux allows a process `vm.max_map_count` of them, 65 530
unless somebody has raised that; beyond, LLVM ends the process. Where three quarters are taken, half as many programs
stay from then on, those used last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torchtpu.runtime.telemetry import log
from torchtpu.runtime.telemetry.counters import Counters

_FULL = 0.75
_FEWEST = 16
_MAPS_OF_LARGE = 256  # of one program: counting takes longer than loading a small one
_MADE_MEANWHILE = 256  # programs, until those that may go have gone


class Capacity:
    """The most programs that stay in memory, per thread that records. Where this falls below what the user `allows`, it
    is half of those that are `held` then, and `lower` is told."""

    def __init__(
        self,
        allows: Callable[[], int],
        held: Callable[[], int],
        lower: Callable[[int], None],
        counters: Counters,
    ) -> None:
        self._allows = allows
        self._held = held
        self._lower = lower
        self._counters = counters
        self._lock = threading.Lock()  # guards what follows
        self._lowered: int | None = None
        self._unseen = 0  # programs that may be loaded before the maps are counted again

    def __call__(self) -> int:
        allowed = self._allows()
        return allowed if self._lowered is None else min(allowed, self._lowered)

    def note_loaded(self) -> None:
        """A program has been loaded or compiled."""
        with self._lock:
            self._unseen -= 1
            if self._unseen >= 0:
                return
            used, limit = memory_maps()
            left = int(_FULL * limit) - used
            self._unseen = max(_FEWEST, left // _MAPS_OF_LARGE) if left >= 0 else _MADE_MEANWHILE
            most = max(_FEWEST, min(self(), self._held()) // 2)
            if left >= 0 or most >= self():
                return
            self._lowered = most
        self._counters.memory_map_collections += 1
        log.write(
            f"tpu: {used} of {limit} memory maps are in use; from now on at most {most} programs stay in memory "
            "(a higher vm.max_map_count keeps more)"
        )
        self._lower(most)


def memory_maps() -> tuple[int, int]:
    """(those that the process has, those that it may have); (0, 1) where the system does not tell."""
    try:
        with open("/proc/self/maps", "rb") as maps, open("/proc/sys/vm/max_map_count", "rb") as limit:
            return sum(1 for _ in maps), int(limit.read())
    except (OSError, ValueError):
        return 0, 1
