"""Observers: told of the engine's steps as they happen; explain is one."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torchtpu.runtime.device.loaded import About, Loaded
from torchtpu.runtime.ir.program import Program


@dataclass(frozen=True, slots=True)
class Launched:
    """One launch. Times are seconds of `time.perf_counter()`; `wait` returns when it has run."""

    about: About
    device: int
    reason: str
    line: str
    cut_at: float
    started: float
    ended: float
    outputs: tuple[Any, ...]
    token: Any


@dataclass(frozen=True, slots=True)
class Called:
    """One op that ran on the host, with the line that recorded it; times as in `Launched`."""

    op: str
    device: int
    line: str
    started: float
    ended: float


class Observer(Protocol):
    """Told from any thread; what it raises is the user's to see."""

    def planned(self, program: Program, about: About, flight: Future[Loaded]) -> None:
        """A program was lowered; `flight` is or will be its executable."""

    def launched(self, launch: Launched) -> None:
        """A program was handed to the device."""

    def called(self, call: Called) -> None:
        """A collective, or another op that runs on the host in its turn, has run."""

    def uploaded(self, array: Any, device: int) -> None:
        """A host tensor was copied to the device."""

    def was_read(self, line: str, started: float, seconds: float, nbytes: int) -> None:
        """A thread waited for a value (or, with 0 bytes, for everything)."""

    def fell_back(self, name: str, dtype: torch.dtype | None, line: str, nbytes: int) -> None:
        """An op ran on the CPU for want of a lowering."""

    def made_room(self, action: str, line: str, detail: str) -> None:
        """For want of memory a launch of the region of `line` waited, or "collect"ed garbage, or was "split"."""
