"""Running: in comes a recorder's `work`, out go its output arrays, enqueued in program order."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .compiler import Loaded
from .counters import Counters
from .guards import Guard, unsettled
from .log import write
from .lower import Module
from .memory import show_bytes, wait_for_room

if TYPE_CHECKING:
    from .pjrt import Client

_HISTORY = 4096
_MAX_IN_FLIGHT = 64  # launches per device that have not run


class Executable:
    """What a plan is given: a loaded program with all that a launch needs of it."""

    __slots__ = (
        "checks",
        "donated",
        "handlers",
        "identity",
        "line",
        "loaded",
        "module",
        "needed",
        "ops",
        "peak",
        "run",
        "said",
    )

    def __init__(
        self,
        client: Client,
        module: Module,
        loaded: Loaded,
        device: int,
        identity: str,
        line: str,
        ops: int,
        donated: int,
    ) -> None:
        self.module = module
        self.loaded = loaded
        self.run = loaded.executable
        outputs = list(module.outputs) + ([((), torch.int32)] if module.checks else [])
        self.handlers = client.handlers(outputs, device)
        self.checks = module.checks
        self.identity = identity
        self.line = line
        self.ops = ops
        self.donated = donated
        self.needed = loaded.output_bytes - loaded.aliased_bytes + loaded.temporary_bytes
        self.peak = loaded.argument_bytes + self.needed
        self.said = False  # whether a launch has checked its arguments and logged where the program came from


class Launch(NamedTuple):
    """One line of the history."""

    identity: str
    device: int
    ops: int
    inputs: int
    outputs: int
    donated: int
    reason: str
    line: str


class Executor:
    """Launches; `history` holds the last launches."""

    def __init__(
        self, client: Client, counters: Counters, knob: Callable[[str], Any], live_bytes: Callable[[int], int] | None
    ) -> None:
        self._client = client
        self._counters = counters
        self._knob = knob
        self._live_bytes = live_bytes
        self.history: deque[Launch] = deque(maxlen=_HISTORY)
        self._in_flight: list[deque[Any]] = [deque() for _ in client.devices]

    def launch(self, work: Any) -> None:
        """Enqueues the work's program; tells the work what came of it and never raises."""
        try:
            outputs, guard = self._run(work)
        except Exception as error:  # noqa: BLE001 -- whoever reads an output raises it
            work.failed(_explained(error, work.executable))
        else:
            work.done(outputs, guard)

    def _run(self, work: Any) -> tuple[list[Any], Guard | None]:
        client, executable, device = self._client, work.executable, work.device
        arguments = work.inputs()
        for numbers in (work.floats, work.ints):
            if numbers is not None:
                arguments.append(client.upload(numbers, device))
        if not executable.said:
            _check_arguments(client, executable, arguments)
        limit = self._knob("memory_limit")
        if limit and self._live_bytes is not None:
            live = self._live_bytes
            wait_for_room(
                limit, executable.needed, lambda: live(device), device, f"the region recorded at {executable.line}"
            )
        earlier = unsettled(work.guards())
        started = time.perf_counter()
        outputs, token = client.execute(executable.run, arguments, executable.handlers)
        self._track(device, token)
        self._counters.launches += 1
        guard = None
        if executable.checks:
            guard = Guard(client, outputs.pop(), executable.checks, earlier)
        elif earlier:
            guard = earlier[0] if len(earlier) == 1 else Guard(client, None, (), earlier)
        self._record(work.region, executable, device, len(arguments), outputs, started)
        executable.said = True
        return outputs, guard

    def finish(self, device: int) -> None:
        """Waits until everything launched so far on the device has run; raises what a launch raised."""
        for token in list(self._in_flight[device]):
            self._client.wait_for_launch(token)

    def _track(self, device: int, token: Any) -> None:
        in_flight = self._in_flight[device]
        in_flight.append(token)
        if len(in_flight) > _MAX_IN_FLIGHT:
            with contextlib.suppress(RuntimeError):  # who reads the launch's outputs raises it
                self._client.wait_for_launch(in_flight.popleft())

    def _record(
        self,
        region: dict[str, Any],
        executable: Executable,
        device: int,
        inputs: int,
        outputs: list[Any],
        started: float,
    ) -> None:
        reason, line = region.get("reason", ""), region.get("line", "")
        donated = executable.donated
        self.history.append(
            Launch(executable.identity, device, executable.ops, inputs, len(outputs), donated, reason, line)
        )
        if "launch" not in self._knob("log"):
            return
        for output in outputs:
            self._client.wait(output)
        run_ms = (time.perf_counter() - started) * 1e3
        loaded = executable.loaded
        found = "hit (trie)"
        if not executable.said:
            found = (
                f"hit (disk) load {loaded.milliseconds:.0f} ms"
                if loaded.source == "disk"
                else f"miss compile {loaded.milliseconds:.0f} ms"
            )
        write(
            f"tpu:{device} region {executable.identity[:8]} | {executable.ops} ops {inputs} in {len(outputs)} out {donated} donated"
            f" | cut: {reason} ({line}) | {found} | run {run_ms:.1f} ms | peak {show_bytes(executable.peak)}"
        )


def _check_arguments(client: Client, executable: Executable, arguments: list[Any]) -> None:
    """XLA checks only the size in bytes: the first launch checks shapes and dtypes."""
    for i, (array, expected) in enumerate(zip(arguments, executable.module.inputs, strict=False)):
        actual = client.aval(array)
        assert actual == expected, f"input {i} of the region recorded at {executable.line} is {actual}, not {expected}"


def _explained(error: Exception, executable: Executable) -> Exception:
    if isinstance(error, torch.OutOfMemoryError):
        return error
    text = f"the region recorded at {executable.line} ({executable.ops} ops) could not be launched: {error}"
    if "RESOURCE_EXHAUSTED" in str(error):
        return torch.OutOfMemoryError(text)
    failure = RuntimeError(text)
    failure.__cause__ = error
    return failure
