"""Loads executables from memory or the store, or has XLA compile them.

Worker threads compile; XLA releases the GIL meanwhile. A program is compiled once, however many ask for it. One worker
more than may compile at once is kept for small programs, so that what compiles for a minute holds up no print. What is
compiled at leisure and is no small program is compiled in a process of its own, where that is possible.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import Any, NamedTuple

from torchtpu.compiler_cache import Note, Store
from torchtpu.runtime import _C
from torchtpu.runtime.device.client import Client
from torchtpu.runtime.device.loaded import Loaded
from torchtpu.runtime.telemetry.counters import Counters

from .capacity import Capacity
from .plan_cache import Plan

_JOIN_SECONDS = 1.0
_LATER_NICENESS = 10
_SMALL = 32  # ops: what compiles in a fraction of a second


IsWanted = Callable[[], bool]
_Task = Callable[[], None]


class _CompileJob(NamedTuple):
    """A program to be compiled, of a digest for a device, at leisure where it is given what says whether it is still
    wanted; `ops` and `line` are for people and for the order, 0 where nobody said."""

    key: tuple[str, int]
    flight: Future[Loaded]
    run: Callable[[IsWanted | None], None]
    ops: int
    line: str

    @property
    def is_small(self) -> bool:
        return 0 < self.ops <= _SMALL


class _Wish(NamedTuple):
    """A job for when nothing else is to be done, while one of those lives for whom it is done."""

    job: _CompileJob
    askers: list[weakref.ref[Any]]

    @property
    def is_wanted(self) -> bool:
        return any(asker() is not None for asker in self.askers)


def _cancel(flight: Future[Loaded]) -> None:
    flight.cancel()


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
        capacity: Capacity,
        *,
        may_compile: Callable[[], bool] = lambda: True,
    ) -> None:
        self._client = client
        self._store = store
        self._counters = counters
        self._capacity = capacity
        self._may_compile = may_compile
        self._bell = _C.Bell()  # rung where a worker may have something to do
        self._lock = threading.RLock()  # guards what follows
        self._flights: OrderedDict[tuple[str, int], Future[Loaded]] = OrderedDict()
        self._jobs: deque[_CompileJob] = deque()
        self._wishes: OrderedDict[tuple[str, int], _Wish] = OrderedDict()
        self._fulfilled: _Wish | None = None  # the one that is being compiled
        self._submitted: set[str] = set()  # the keys of all programs that were asked for
        self._needed: set[tuple[str, int]] = set()  # those that something had to run
        self._running: dict[_CompileJob, float] = {}  # since when each has been compiling
        self._is_closed = False
        self._idle = 0
        self._max_threads = max(1, threads)
        self._threads: list[threading.Thread] = []
        self._small_thread: threading.Thread | None = None
        self._late_thread: threading.Thread | None = None

    def submit(self, plan: Plan, device: int, note: Note | None = None, *, wisher: object = None) -> Future[Loaded]:
        """The executable of a plan's program on `device`. What only a `wisher` asks for is compiled when nothing else
        is, or not at all, where by then none of them is alive.

        A build that failed is forgotten: who asks again builds again. `note` is kept beside what is stored.
        """
        flight_key = plan.key.digest, device
        with self._lock:
            self._submitted.add(plan.key.digest)
            if wisher is None:
                self._needed.add(flight_key)
            flight = self._flights.get(flight_key)
            if flight is not None:
                self._counters.cache_hits_memory += 1
                self._flights.move_to_end(flight_key)
                wish = self._wishes.get(flight_key)
                if wish is None and self._fulfilled is not None and self._fulfilled.job.key == flight_key:
                    self._fulfilled.askers.append(weakref.ref(flight if wisher is None else wisher))
                elif wish is not None and wisher is not None:
                    wish.askers.append(weakref.ref(wisher))
                elif wish is not None:
                    del self._wishes[flight_key]
                    self._enqueue(wish.job)
                    self._bell.ring()
                return flight
            if self._is_closed:
                raise RuntimeError("the compiler is shut down")
            flight = self._flights[flight_key] = Future()
            ops, line = (note or {}).get("ops"), (note or {}).get("line")
            job = _CompileJob(
                flight_key,
                flight,
                lambda is_wanted: self._build(flight, plan, device, note, is_wanted),
                ops if isinstance(ops, int) else 0,
                line if isinstance(line, str) else "an unknown line",
            )
            if wisher is not None:
                self._wishes[flight_key] = _Wish(job, [weakref.ref(wisher)])
                if self._late_thread is None:
                    self._late_thread = self._start(self._work_later, "torchtpu-compile-later")
            else:
                self._enqueue(job)
            self._bell.ring()
        return flight

    def _enqueue(self, job: _CompileJob) -> None:
        """Has a job done by the first worker that is free. Under the lock."""
        self._jobs.append(job)
        if self._idle == 0 and len(self._threads) < self._max_threads:
            self._threads.append(self._start(self._work, f"torchtpu-compile-{len(self._threads)}"))
        self._hand_on()

    def _hand_on(self) -> None:
        """Small jobs that all workers are too busy for have a worker of their own. Under the lock."""
        if self._idle == 0 and any(job.is_small for job in self._jobs):
            if self._small_thread is None:
                self._small_thread = self._start(self._work_small, "torchtpu-compile-small")
            self._bell.ring()

    def has(self, plan: Plan, device: int) -> bool:
        """Whether a plan's program is being compiled, or is there, in memory or, by the look of it, in the store."""
        with self._lock:
            if (plan.key.digest, device) in self._flights:
                return True
        return self._is_stored(plan)

    def is_loaded(self, plan: Plan, device: int) -> bool:
        """Whether a plan's program is there, in memory."""
        with self._lock:
            flight = self._flights.get((plan.key.digest, device))
        return flight is not None and flight.done() and not flight.cancelled() and flight.exception() is None

    def was_needed(self, plan: Plan, device: int) -> bool:
        """Whether something that had to run has asked for a plan's program before, here or in an earlier process: what
        is compiled may hang on that. On what has been compiled, or promoted, by now it may not, as that is a matter
        of the clock."""
        with self._lock:
            if (plan.key.digest, device) in self._needed:
                return True
        return self.was_stored(plan)

    def was_stored(self, plan: Plan) -> bool:
        """Whether a plan's program is, by the look of it, in the store, and not by this process's doing."""
        with self._lock:
            if plan.key.digest in self._submitted:
                return False
        return self._is_stored(plan)

    def _is_stored(self, plan: Plan) -> bool:
        return self._store.keeps and self._store.has(plan.key)

    def submitted(self) -> list[str]:
        """The keys of all programs that were ever asked for."""
        with self._lock:
            return sorted(self._submitted)

    def digests(self) -> list[str]:
        """The keys of the programs in memory."""
        with self._lock:
            return sorted({digest for (digest, _), flight in self._flights.items() if flight.done()})

    def outstanding(self) -> list[Future[Loaded]]:
        """The programs asked for that are not there yet."""
        with self._lock:
            return [flight for flight in self._flights.values() if not flight.done()]

    def describe(self) -> str:
        """What is being compiled, for how long, and how many programs wait for that: for people."""
        now = time.perf_counter()
        with self._lock:
            running = [
                f"{job.ops} ops of {job.line} for {max(now - since, 0):.0f} s"
                for job, since in self._running.items()
                if not job.flight.done()  # its worker may be about to say so
            ]
            waiting = len(self._jobs)
        return ", ".join(running) + (f"; {waiting} more wait" if waiting else "")

    def forget(self, digests: Collection[str] | None = None) -> None:
        """Lets go of the executables, or of those with these keys, that only this keeps."""
        with self._lock:
            for key in [k for k, flight in self._flights.items() if flight.done()]:
                if digests is None or key[0] in digests:
                    del self._flights[key]

    def close(self) -> bool:
        """Drops what waits, finishes what is being compiled (for a while), ends the threads; whether all have."""
        with self._lock:
            self._is_closed = True
            self._jobs.clear()
            self._wishes.clear()
            self._bell.ring()
            threads = [*self._threads, *(t for t in (self._small_thread, self._late_thread) if t is not None)]
        others = [thread for thread in threads if thread is not threading.current_thread()]
        _join(others, _JOIN_SECONDS)
        with self._lock:
            flights = list(self._flights.values())
            self._flights.clear()
        for flight in flights:
            flight.cancel()
        return not any(thread.is_alive() for thread in others)

    def _start(self, work: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    def _serve(self, find: Callable[[], _Task | None]) -> None:
        """The life of a worker: does what `find` finds, which is called under the lock, until the compiler is closed. A
        finalizer that reads a tensor may wait for what is compiled here: none runs but while nothing is to be done."""
        with _C.CollectionDeferred():
            while True:
                seen = self._bell.count
                with self._lock:
                    if self._is_closed:
                        return
                    task = find()
                if task is None:
                    self._bell.wait(seen)
                else:
                    task()

    def _work(self) -> None:
        is_idle = False

        def find() -> _Task | None:
            nonlocal is_idle
            is_idle = self._note_idle(is_idle, not self._jobs)
            if is_idle:
                return None
            job = self._jobs.popleft()
            self._hand_on()
            return functools.partial(self._run, job, None)

        self._serve(find)

    def _note_idle(self, was: bool, now: bool) -> bool:
        """A worker has something to do, or nothing any more. Under the lock."""
        self._idle += now - was
        if now and not was:
            self._bell.ring()
        return now

    def _work_small(self) -> None:
        """Compiles small programs while all other workers are at something else."""

        def find() -> _Task | None:
            job = next((job for job in self._jobs if job.is_small), None) if self._idle == 0 else None
            if job is None:
                return None
            self._jobs.remove(job)
            return functools.partial(self._run, job, None)

        self._serve(find)

    def _run(self, job: _CompileJob, is_wanted: IsWanted | None) -> None:
        with self._lock:
            self._running[job] = time.perf_counter()
        try:
            job.run(is_wanted)
        finally:
            with self._lock:
                del self._running[job]

    def _work_later(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # no such system, or not allowed
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LATER_NICENESS)
        self._serve(self._find_wish)

    def _find_wish(self) -> _Task | None:
        if self._jobs or self._idle < len(self._threads) or not self._wishes:
            return None
        key, wish = self._wishes.popitem(last=False)
        if wish.is_wanted:
            self._fulfilled = wish
            return functools.partial(self._fulfil, wish)
        self._counters.compiles_abandoned += 1
        return functools.partial(_cancel, self._flights.pop(key))

    def _fulfil(self, wish: _Wish) -> None:
        self._run(wish.job, functools.partial(self._is_still_wanted, wish))
        self._fulfilled = None

    def _is_still_wanted(self, wish: _Wish) -> bool:
        return wish.is_wanted and not self._is_closed

    def _is_abandoned(self, key: tuple[str, int], is_wanted: IsWanted | None) -> bool:
        """Forgets a program whose compile was stopped, unless somebody has come to want it meanwhile."""
        with self._lock:
            if is_wanted is not None and is_wanted():
                return False
            self._flights.pop(key, None)
            self._counters.compiles_abandoned += 1
            return True

    def _build(
        self, flight: Future[Loaded], plan: Plan, device: int, note: Note | None, is_wanted: IsWanted | None
    ) -> None:
        try:
            try:
                loaded = self._load_or_compile(plan, device, note, is_wanted)
            except CancelledError:
                if self._is_abandoned((plan.key.digest, device), is_wanted):
                    flight.cancel()
                    return
                loaded = self._load_or_compile(plan, device, note)
        except BaseException as error:  # noqa: BLE001 -- whatever it is, the waiters have to hear of it
            with self._lock:
                self._flights.pop((plan.key.digest, device), None)
            with contextlib.suppress(InvalidStateError):  # cancelled meanwhile: the compiler is closed
                flight.set_exception(error)
            return
        with contextlib.suppress(InvalidStateError):
            flight.set_result(loaded)
        kept: Future[Loaded] = Future()  # the callbacks of the first hold programs and plans
        kept.set_result(loaded)
        with self._lock:
            if (plan.key.digest, device) in self._flights:
                self._flights[plan.key.digest, device] = kept
            done = [k for k, f in self._flights.items() if f.done()]
            for old in done[: max(0, len(self._flights) - self._capacity())]:
                del self._flights[old]
        self._capacity.note_loaded()

    def _load_or_compile(self, plan: Plan, device: int, note: Note | None, is_wanted: IsWanted | None = None) -> Loaded:
        if plan.calls_lapack:
            self._client.load_lapack()
        if not self._store.keeps:
            self._counters.cache_misses += 1
            return self._compile(plan, device, note, is_wanted)[0]
        built: list[Loaded] = []

        def build() -> bytes:
            loaded, data = self._compile(plan, device, note, is_wanted)
            built.append(loaded)
            return self._client.serialize(loaded.executable) if data is None else data

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
            return built[0] if built else self._compile(plan, device, note, is_wanted)[0]
        self._counters.cache_hits_disk += 1
        milliseconds = (time.perf_counter() - started) * 1e3
        self._counters.load_ms += milliseconds
        return Loaded(executable, *self._client.memory(executable), "disk", milliseconds)

    def _compile(
        self, plan: Plan, device: int, note: Note | None, is_wanted: IsWanted | None
    ) -> tuple[Loaded, bytes | None]:
        """The executable, and its bytes where it was loaded from them: XLA writes none of what it has loaded."""
        if not self._may_compile():
            raise NotCompiledError("the program is not compiled, and the policy is frozen")
        started = time.perf_counter()
        data = self._compile_apart(plan, device, note, is_wanted)
        executable = data and self._client.deserialize(data, device, plan.homes, plan.options)
        if executable is None or self._client.is_miscompiled(plan.text(), executable):
            executable, data = self._client.compile(plan.text(), device, plan.homes, plan.options), None
        milliseconds = (time.perf_counter() - started) * 1e3
        self._counters.compiled(str((note or {}).get("tier", "usual")), milliseconds)
        return Loaded(executable, *self._client.memory(executable), "compile", milliseconds), data

    def _compile_apart(self, plan: Plan, device: int, note: Note | None, is_wanted: IsWanted | None) -> bytes | None:
        """What a process of its own has compiled; None where that is not worth a process, or not possible."""
        ops = (note or {}).get("ops")
        if is_wanted is None or plan.homes or plan.calls_lapack or not isinstance(ops, int) or ops <= _SMALL:
            return None
        return self._client.compile_apart(plan.text(), device, plan.options, is_wanted=is_wanted)


def _join(threads: Iterable[threading.Thread], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
