"""Accounts for device memory: admits launches, and explains what fills a device.

Counted are the arrays on a device, and what the launches take that have not run: their arguments and temporaries.
Counting takes a while. So what is added to the last count is noted, and as long as all of that fits nobody counts.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torchtpu.runtime.device.client import Client
from torchtpu.runtime.device.sizes import nbytes_of, show_bytes
from torchtpu.runtime.telemetry.counters import Counters
from torchtpu.runtime.telemetry.observers import Observer

_WAIT_SECONDS = 0.5
_POLL_SECONDS = 2e-3
_MOST_FLIGHTS = 64  # launches per device that have not run
_MOST_LISTED = 10
_EIGHTHS = 8


class PendingLaunch(NamedTuple):
    """A launch that may not have run; it holds its arguments, whose memory it uses until then.

    `hidden_bytes` are those that no array shows; `output` is a weak reference to one of its arrays, which may tell that
    it has run.
    """

    token: Any
    hidden_bytes: int
    arguments: Sequence[Any]
    output: Callable[[], Any]


class Memory:
    """The budget of each device; one per engine.

    `release` lets go of arrays whose last holder could not, `drop` of what is kept in case it is asked for again;
    `live_tensors` lists a device's tensors as mappings of shape, dtype, nbytes, age, op and line.
    """

    def __init__(
        self,
        client: Client,
        counters: Counters,
        knob: Callable[[str], Any],
        release: Callable[[], Any],
        drop: Callable[[], Any],
        live_tensors: Callable[[int], Iterable[Mapping[str, Any]]],
        observers: Sequence[Observer] = (),
    ) -> None:
        self._observers = observers
        self._client = client
        self._counters = counters
        self._knob = knob
        self._release = release
        self._drop = drop
        self._live_tensors = live_tensors
        self._totals = [client.memory_bytes(device) for device in range(len(client.devices))]
        self._is_tight = False
        self._flights: list[deque[PendingLaunch]] = [deque() for _ in client.devices]
        # As if nothing had been freed since the last count; none before the first.
        self._most_used: list[float] = [math.inf for _ in client.devices]
        self._uploaded = [0 for _ in client.devices]  # in all, when `_most_used` was last brought up to date

    def limit(self, device: int) -> int:
        """The most bytes that arrays and launches may take; 0 where nothing limits them."""
        limit: int = self._knob("memory_limit")
        if limit and not self._is_tight:
            self._is_tight = True
            self._client.keep_no_memory()
        return limit or self._totals[device]

    def track(self, device: int, flight: PendingLaunch) -> None:
        """Notes a launch; waits for the oldest where too many have not run."""
        flights = self._flights[device]
        flights.append(flight)
        if len(flights) > _MOST_FLIGHTS:
            self._land(flights)

    def note_launch(self, device: int, nbytes: int) -> None:
        """Notes that a launch takes so many bytes beyond its arguments."""
        self._most_used[device] += nbytes

    def admit(self, device: int, nbytes: int) -> bool:
        """Notes that a launch takes so many bytes, where that surely fits; whether it does."""
        is_admitted = self.has_surely(device, nbytes)
        if is_admitted:
            self.note_launch(device, nbytes)
        return is_admitted

    def has_surely(self, device: int, nbytes: int) -> bool:
        """Whether so many more bytes fit, as far as that is known without counting."""
        limit = self.limit(device)
        self._note_uploads(device)
        return not limit or self._most_used[device] + nbytes <= limit

    def finish(self, device: int) -> None:
        """Waits until everything launched so far has run, and raises what its launch raised."""
        for flight in list(self._flights[device]):
            self._client.wait_for_launch(flight.token)

    def wait_until_idle(self, device: int) -> None:
        """Waits until everything launched so far has run, whatever came of it."""
        while self._flights[device]:
            self._land(self._flights[device])

    def has_room(self, device: int, needed: int, line: str) -> bool:
        """Whether so many more bytes fit; waits for launches to end and for others to let go, and drops caches."""
        limit = self.limit(device)
        self._note_uploads(device)

        def fits() -> bool:
            self._most_used[device] = self.used(device)
            return self._most_used[device] + needed <= limit

        if self._most_used[device] + needed <= limit or fits():
            return True
        self.note("wait", line, f"{show_bytes(needed)} more were needed")
        while self._flights[device]:
            self._counters.memory_waits += 1
            self._land(self._flights[device])
            if fits():
                return True
        self._counters.memory_collections += 1
        self.note("collect", line, f"{show_bytes(needed)} more were needed")
        self._drop()
        gc.collect()
        deadline = time.monotonic() + _WAIT_SECONDS
        while not fits():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _note_uploads(self, device: int) -> None:
        uploaded = self._client.uploaded_bytes[device]
        self._most_used[device] += uploaded - self._uploaded[device]
        self._uploaded[device] = uploaded

    def used(self, device: int) -> int:
        """The bytes of a device's arrays and of the temporaries of launches that have not run."""
        self._release()
        flights = self._flights[device] = deque(f for f in self._flights[device] if not self._has_run(f))
        return self._client.live_bytes(device) + sum(flight.hidden_bytes for flight in flights)

    def room_for(self, device: int, arguments: Iterable[Any]) -> int:
        """The bytes that a program may take, its arguments included: in eighths of the limit, so that texts recur."""
        self.wait_until_idle(device)
        limit = self.limit(device)
        return max(0, self.free_for(device, arguments) * _EIGHTHS // limit) * limit // _EIGHTHS

    def free_for(self, device: int, arguments: Iterable[Any]) -> int:
        """The bytes that a program may take now, its arguments included."""
        own = {id(a): nbytes_of(a) for a in arguments if a is not None}
        return self.limit(device) - (self.used(device) - sum(own.values()))

    def note(self, action: str, line: str, detail: str) -> None:
        """Tells the observers what was done for want of memory."""
        for observer in self._observers:
            observer.made_room(action, line, detail)

    def explain(self, device: int, what: str, needed: int, tried: str) -> str:
        """The text of an OutOfMemoryError."""
        limit = self.limit(device)
        self._counters.out_of_memory += 1
        used = f"{show_bytes(self.used(device))} of {show_bytes(limit)} are in use"
        lines = [
            f"tpu:{device} out of memory: {what} needs {show_bytes(needed)} more, {used}.",
            f"Tried: waited for launches to end, dropped caches, collected garbage, splitting: {tried}.",
            *self._largest(device),
            "Free tensors, make the batch smaller or raise TORCHTPU_MEMORY_LIMIT.",
        ]
        return "\n".join(lines)

    def _largest(self, device: int) -> list[str]:
        found = sorted(self._live_tensors(device), key=lambda tensor: -tensor["nbytes"])
        rows = [
            f"  {show_bytes(t['nbytes']):>10}  {str(t['dtype']).removeprefix('torch.')}{list(t['shape'])}, "
            f"{t['age']:.1f} s old, {t['op'] or 'an upload'} at {t['line']}"
            for t in found[:_MOST_LISTED]
        ]
        return [f"The largest of {len(found)} live tensors:", *rows] if rows else []

    def _has_run(self, flight: PendingLaunch) -> bool:
        """Whether a launch is known to have run."""
        output = flight.output()
        return output is not None and not output.is_deleted() and self._client.is_ready(output)

    def _land(self, flights: deque[PendingLaunch]) -> None:
        with contextlib.suppress(RuntimeError):  # who reads the launch's outputs raises it
            self._client.wait_for_launch(flights.popleft().token)
