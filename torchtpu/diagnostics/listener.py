"""The listener: what the engine did while a block ran, noted as it happened."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from torchtpu import optimizer_steps, startup
from torchtpu.diagnostics.differences import makers
from torchtpu.runtime.telemetry.bailouts import Bailout
from torchtpu.runtime.telemetry.observers import Called, Launched


@dataclass
class CompileRecord:
    """A program that was lowered, and how its executable was come by ("compile", "disk", "memory" or "failed")."""

    at: float
    program: Any
    identity: str
    tier: str = "usual"
    source: str = "pending"
    milliseconds: float = 0.0
    finished: float = 0.0


@dataclass
class LaunchRecord:
    """A launch and when the device was done with it."""

    launch: Launched
    finished: float = 0.0


@dataclass(frozen=True)
class Read:
    """A wait for a value."""

    line: str
    started: float
    seconds: float
    nbytes: int


@dataclass(frozen=True)
class Fallback:
    """An op that ran on the CPU."""

    at: float
    name: str
    dtype: str
    line: str
    nbytes: int


@dataclass(frozen=True)
class Room:
    """What a launch had to do for want of memory."""

    action: str
    line: str
    detail: str


@dataclass(frozen=True)
class Maker:
    """What made an array."""

    name: str
    line: str


class Made(NamedTuple):
    """The arrays that a launch made, as weak references, and the op that made each. Little is done per launch."""

    ops: Sequence[Any]
    arrays: list[Any]


_UPLOAD = (Maker("upload", ""),)


class Listener:
    """The observer: it notes what it hears. Appending to a list needs no lock."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.finished = 0.0
        self.builds: list[CompileRecord] = []
        self.runs: list[LaunchRecord] = []
        self.calls: list[Called] = []
        self.reads: list[Read] = []
        self.fallbacks: list[Fallback] = []
        self.rooms: list[Room] = []
        self.bailouts: list[Bailout] = []  # known once it is closed
        self.not_padded: dict[tuple[str, str], int] = dict(startup.engine_counters().regions_not_padded)  # before it
        self.steps: dict[int, list[float]] = {}  # when each optimizer's steps were recorded
        self.made: list[Made] = []
        self._outputs: dict[str, list[Any]] = {}  # the op that made each output, by program
        self._most_made = 10_000  # before those are dropped of which nothing is alive
        self._waiting: queue.SimpleQueue[LaunchRecord | None] = queue.SimpleQueue()
        self._watcher = threading.Thread(target=self._watch, name="torchtpu-explain", daemon=True)
        self._watcher.start()
        optimizer_steps.watchers.append(self._note_step)

    def planned(self, program: Any, about: Any, flight: Future[Any]) -> None:
        build = CompileRecord(time.perf_counter(), program, about.identity, about.tier)
        self.builds.append(build)
        found = makers(program)
        self._outputs[about.identity] = [found.get(value) for value in program.outputs]
        if flight.done():
            build.source, build.finished = "memory", build.at
        else:
            flight.add_done_callback(partial(_note_built, build))

    def launched(self, launch: Launched) -> None:
        run = LaunchRecord(launch)
        self.runs.append(run)
        self._note_made(self._outputs.get(launch.about.identity, []), launch.outputs)
        self._waiting.put(run)

    def called(self, call: Called) -> None:
        self.calls.append(call)

    def uploaded(self, array: Any, device: int) -> None:
        self._note_made(_UPLOAD, (array,))

    def was_read(self, line: str, started: float, seconds: float, nbytes: int) -> None:
        self.reads.append(Read(line, started, seconds, nbytes))

    def fell_back(self, name: str, dtype: torch.dtype | None, line: str, nbytes: int) -> None:
        shown = str(dtype).removeprefix("torch.") if dtype else ""
        self.fallbacks.append(Fallback(time.perf_counter(), name, shown, line, nbytes))

    def made_room(self, action: str, line: str, detail: str) -> None:
        self.rooms.append(Room(action, line, detail))

    def close(self) -> None:
        """Waits for the launches that were noted."""
        optimizer_steps.watchers.remove(self._note_step)
        self._waiting.put(None)
        self._watcher.join()
        self.finished = time.perf_counter()
        counters, before = startup.engine_counters(), self.not_padded
        self.bailouts = [b for b in counters.bailouts.last if b.at >= self.started]
        counts = {event: n - before.get(event, 0) for event, n in counters.regions_not_padded.items()}
        self.not_padded = {event: n for event, n in counts.items() if n > 0}

    def _note_step(self, optimizer: Optimizer) -> None:
        self.steps.setdefault(id(optimizer), []).append(time.perf_counter())

    def _watch(self) -> None:
        while (run := self._waiting.get()) is not None:
            with contextlib.suppress(Exception):  # who reads the launch's outputs raises it
                run.launch.token.block_until_ready()
            run.finished = time.perf_counter()
            run.launch = _without_arrays(run.launch)

    def _note_made(self, ops: Sequence[Any], arrays: tuple[Any, ...]) -> None:
        self.made.append(Made(ops, list(map(weakref.ref, arrays))))
        if len(self.made) > self._most_made:
            self.made = [made for made in self.made if any(array() is not None for array in made.arrays)]
            self._most_made = max(self._most_made, 2 * len(self.made))


def _note_built(build: CompileRecord, done: Future[Any]) -> None:
    build.finished = time.perf_counter()
    if done.cancelled() or done.exception() is not None:
        build.source = "failed"
    else:
        build.source, build.milliseconds = done.result().source, done.result().milliseconds


def _without_arrays(launch: Launched) -> Launched:
    return Launched(
        launch.about, launch.device, launch.reason, launch.line, launch.cut_at, launch.started, launch.ended, (), None
    )
