"""Compiling: in come plans, out come loaded executables, from memory, from the store, or from XLA.

Worker threads compile; XLA releases the GIL meanwhile. A program is compiled once, however many ask for it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, InvalidStateError

from torchtpu.compiler_cache import Note, Store
from torchtpu.runtime.device.client import Client
from torchtpu.runtime.device.loaded import Loaded
from torchtpu.runtime.telemetry.counters import Counters

from .plan_cache import Plan

_JOIN_SECONDS = 1.0
_LATER_NICENESS = 10


class NotCompiledError(RuntimeError):
    """A program is neither in memory nor in the store, and none may be compiled."""


class Compiler:
    """The worker pool and the executables in memory; one per engine."""

    def __init__(
        self,
        client: Client,
        store: Store,
        counters: Counters,
        threads: int,
        capacity: Callable[[], int] = lambda: 1024,
        *,
        may_compile: Callable[[], bool] = lambda: True,
    ) -> None:
        self._client = client
        self._store = store
        self._counters = counters
        self._capacity = capacity
        self._may_compile = may_compile
        self._condition = threading.Condition()  # guards what follows
        self._flights: OrderedDict[tuple[str, int], Future[Loaded]] = OrderedDict()
        self._jobs: deque[Callable[[], None]] = deque()
        self._later: deque[Callable[[], None]] = deque()  # jobs for when nothing else is to be done
        self._is_closed = False
        self._idle = 0
        self._max_threads = max(1, threads)
        self._threads: list[threading.Thread] = []
        self._late_thread: threading.Thread | None = None

    def submit(
        self, plan: Plan, device: int, note: Note | None = None, *, is_needed_now: bool = True
    ) -> Future[Loaded]:
        """The executable of a plan's program on `device`; what is not needed now is compiled when nothing else is.

        A build that failed is forgotten: who asks again builds again. `note` is kept beside what is stored.
        """
        flight_key = plan.key.digest, device
        with self._condition:
            flight = self._flights.get(flight_key)
            if flight is not None:
                self._counters.cache_hits_memory += 1
                self._flights.move_to_end(flight_key)
                return flight
            if self._is_closed:
                raise RuntimeError("the compiler is shut down")
            flight = self._flights[flight_key] = Future()
            job = lambda: self._build(flight, plan, device, note)
            if not is_needed_now:
                self._later.append(job)
                if self._late_thread is None:
                    self._late_thread = self._start(self._work_later, "torchtpu-compile-later")
            else:
                self._jobs.append(job)
                if self._idle == 0 and len(self._threads) < self._max_threads:
                    self._threads.append(self._start(self._work, f"torchtpu-compile-{len(self._threads)}"))
            self._condition.notify_all()
        return flight

    def has(self, plan: Plan, device: int) -> bool:
        """Whether a plan's program is there without being compiled: in memory or, by the look of it, in the store."""
        with self._condition:
            flight = self._flights.get((plan.key.digest, device))
        if flight is not None:
            return flight.done() and not flight.cancelled() and flight.exception() is None
        return self._store.keeps and self._store.has(plan.key)

    def digests(self) -> list[str]:
        """The keys of the programs in memory."""
        with self._condition:
            return sorted({digest for (digest, _), flight in self._flights.items() if flight.done()})

    def outstanding(self) -> list[Future[Loaded]]:
        """The programs asked for that are not there yet."""
        with self._condition:
            return [flight for flight in self._flights.values() if not flight.done()]

    def forget(self, digests: Collection[str] | None = None) -> None:
        """Lets go of the executables, or of those with these keys, that only this keeps."""
        with self._condition:
            for key in [k for k, flight in self._flights.items() if flight.done()]:
                if digests is None or key[0] in digests:
                    del self._flights[key]

    def close(self) -> bool:
        """Drops what waits, finishes what is being compiled (for a while), ends the threads; whether all have."""
        with self._condition:
            self._is_closed = True
            self._jobs.clear()
            self._later.clear()
            self._condition.notify_all()
            threads = [*self._threads, *([self._late_thread] if self._late_thread else [])]
        others = [thread for thread in threads if thread is not threading.current_thread()]
        _join(others, _JOIN_SECONDS)
        with self._condition:
            flights = list(self._flights.values())
            self._flights.clear()
        for flight in flights:
            flight.cancel()
        return not any(thread.is_alive() for thread in others)

    def _start(self, work: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    def _work(self) -> None:
        while True:
            with self._condition:
                self._idle += 1
                self._condition.notify_all()
                while not self._jobs and not self._is_closed:
                    self._condition.wait()
                self._idle -= 1
                if self._is_closed:
                    return
                job = self._jobs.popleft()
            job()

    def _work_later(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # no such system, or not allowed
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LATER_NICENESS)
        while True:
            with self._condition:
                while not self._is_closed and (self._jobs or self._idle < len(self._threads) or not self._later):
                    self._condition.wait()
                if self._is_closed:
                    return
                job = self._later.popleft()
            job()

    def _build(self, flight: Future[Loaded], plan: Plan, device: int, note: Note | None) -> None:
        try:
            loaded = self._load_or_compile(plan, device, note)
        except BaseException as error:  # noqa: BLE001 -- whatever it is, the waiters have to hear of it
            with self._condition:
                self._flights.pop((plan.key.digest, device), None)
            with contextlib.suppress(InvalidStateError):  # cancelled meanwhile: the compiler is closed
                flight.set_exception(error)
            return
        with contextlib.suppress(InvalidStateError):
            flight.set_result(loaded)
        kept: Future[Loaded] = Future()  # the callbacks of the first hold programs and plans
        kept.set_result(loaded)
        with self._condition:
            if (plan.key.digest, device) in self._flights:
                self._flights[plan.key.digest, device] = kept
            done = [k for k, f in self._flights.items() if f.done()]
            for old in done[: max(0, len(self._flights) - self._capacity())]:
                del self._flights[old]

    def _load_or_compile(self, plan: Plan, device: int, note: Note | None) -> Loaded:
        if plan.calls_lapack:
            self._client.load_lapack()
        if not self._store.keeps:
            self._counters.cache_misses += 1
            return self._compile(plan, device)
        built: list[Loaded] = []

        def build() -> bytes:
            built.append(self._compile(plan, device))
            return self._client.serialize(built[0].executable)

        started = time.perf_counter()
        data = self._store.get_or_build(plan.key, build, note)
        if built:
            self._counters.cache_misses += 1
            return built[0]
        try:
            executable = self._client.deserialize(data, device, plan.homes, plan.options)
        except Exception as error:  # noqa: BLE001 -- whatever the loader dislikes is a miss
            self._counters.cache_load_failures += 1
            self._store.discard(plan.key, f"{type(error).__name__}: {error}")
            self._store.get_or_build(plan.key, build, note)
            return built[0] if built else self._compile(plan, device)
        self._counters.cache_hits_disk += 1
        milliseconds = (time.perf_counter() - started) * 1e3
        self._counters.load_ms += milliseconds
        return Loaded(executable, *self._client.memory(executable), "disk", milliseconds)

    def _compile(self, plan: Plan, device: int) -> Loaded:
        if not self._may_compile():
            raise NotCompiledError("the program is not compiled, and the policy is frozen")
        started = time.perf_counter()
        executable = self._client.compile(plan.text(), device, plan.homes, plan.options)
        milliseconds = (time.perf_counter() - started) * 1e3
        self._counters.programs_compiled += 1
        self._counters.compile_ms += milliseconds
        return Loaded(executable, *self._client.memory(executable), "compile", milliseconds)


def _join(threads: Iterable[threading.Thread], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
