"""The peak resident memory of a process that runs programs, and the most that one program takes."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The most resident bytes since it was made, looked at every two milliseconds."""

    def __init__(self) -> None:
        self.bytes = resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.bytes = max(self.bytes, resident_bytes())


class Largest:
    """An observer that keeps the most bytes that a program takes."""

    def __init__(self) -> None:
        self.bytes = 0

    def planned(self, program: Any, about: Any, flight: Any) -> None:
        flight.add_done_callback(self._note)

    def _note(self, flight: Any) -> None:
        f = flight.result()
        self.bytes = max(self.bytes, f.argument_bytes + f.output_bytes - f.aliased_bytes + f.temporary_bytes)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None
