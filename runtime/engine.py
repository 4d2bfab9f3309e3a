"""The engine: in come the recorder's callbacks, out go compiled plans, launched regions, uploads and downloads.

Made at the first region or upload; imports jaxlib, makes the client and owns the compile threads.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from torchtpu.compiler_cache import Note, NullStore, Store

from . import log
from .alike import IsStructural
from .calls import Entry, Lowerings, full_name, results_of
from .compiler import Compiler, Loaded, NotCompiledError
from .counters import Counters
from .executor import About, Executable, Executor
from .fitting import Fitting
from .fleet import Fleet
from .fragments import Fragments
from .growth import Fixed, Grown, RuleOf, grow
from .guards import Guard, recorded_at
from .joint import Collectives
from .joints import Joints
from .ladder import Ladder
from .manifest import Journal, Outcome, Recorded
from .memory import Memory, nbytes_of, show_bytes
from .observe import Observer
from .padded import Padded, download
from .pjrt import Client
from .plans import Plan, Plans
from .region import Program
from .sequence import Sequence as Parts


class _Build(NamedTuple):
    program: Program
    plan: Plan
    about: About
    flight: Future[Loaded]


class Engine:
    """Compiles and runs what the recorder hands over. All methods may be called from any thread.

    `served` maps each recorded op name to the functional one whose lowering serves it; `context` makes the object that
    lowerings ask; `knob` gives the settings clusters, log, memory_limit, debug_nans, policy and num_compile_threads;
    `release` lets go of arrays that nobody holds any more, `live_tensors` lists a device's tensors (see `Memory`). A
    `journal` hears of every program and of what became of it; `observers`, a list that may change, hear of each program
    and launch, `planned` of each region's program.
    `collectives` is the op that ranks run together, `is_structural` says which numbers change what an op means,
    `rule_of` what becomes of an op where sizes grow.
    """

    def __init__(
        self,
        *,
        platform: str,
        num_devices: int,
        lowerings: Mapping[str, Entry],
        platform_lowerings: Mapping[tuple[str, str], Entry],
        served: Mapping[str, str],
        context: Callable[..., Any],
        counters: Counters,
        knob: Callable[[str], Any],
        store: Store | None = None,
        release: Callable[[], Any] = lambda: None,
        live_tensors: Callable[[int], Iterable[Mapping[str, Any]]] = lambda device: (),
        journal: Journal | None = None,
        observers: Sequence[Observer] = (),
        planned: Callable[[Program], Any] = lambda program: None,
        collectives: Collectives | None = None,
        is_structural: IsStructural = lambda *_: False,
        rule_of: RuleOf = lambda name: None,
        fleet: Fleet | None = None,
    ) -> None:
        self._observers = observers
        self._planned = planned
        self.counters = counters
        self.client = Client(platform, num_devices, excess_precision=knob("excess_precision"), fleet=fleet)
        self._knob = knob
        self.store = store = NullStore("none was given") if store is None else store
        table = Lowerings(lowerings, platform_lowerings, lambda name: served.get(name, name), context)
        self._rule_of = rule_of
        self.fragments = Fragments(
            table,
            self.client,
            store,
            counters,
            watch=lambda: knob("debug_nans"),
            capacity=lambda: knob("max_fragments"),
        )
        self.plans = Plans(self.fragments, self.client, store, counters)
        threads = knob("num_compile_threads") or max(1, len(os.sched_getaffinity(0)) // 2)
        self.compiler = Compiler(
            self.client,
            store,
            counters,
            threads,
            lambda: knob("max_programs"),
            may_compile=lambda: knob("policy") != "frozen",
        )
        self._journal = journal
        self._joints = collectives and Joints(
            self.client, self.plans, self.compiler, collectives, is_structural, self._built, _about, observers
        )
        self._waits = threading.local()  # the tens of seconds that this thread's wait has lasted
        memory = Memory(self.client, counters, knob, release, self.compiler.forget, live_tensors, observers)
        fitting = Fitting(self.fragments, counters, self._executables, self.compiler.forget)
        self._executor = Executor(self.client, counters, knob, memory, fitting, observers)
        # What runs a program with room, while some length of it is known.
        self._rooms: WeakValueDictionary[tuple[Program, int], Any] = WeakValueDictionary()
        self.launch = self._executor.launch

    def close(self) -> None:
        """Ends the compile threads: what is queued is dropped, what is compiling is waited for, not for ever."""
        self.compiler.close()
        self.client.close()

    def plan(self, plan: Any) -> None:
        """Lowers the plan's program here and compiles it in a worker, which then tells the plan."""
        program = None
        try:
            program, device = plan.program, plan.device
            if "cluster" in self._knob("log"):
                log.write(str(program))
            joint = self._joints.executable(program, device) if self._joints else None
            if joint is not None:
                plan.ready(joint)
            else:
                self._make(plan, program, self._forms(program, plan.before, device))
        except Exception as error:  # noqa: BLE001 -- whoever reads the region's values raises it
            if self._journal is not None and program is not None:
                identity = self._journal.program(program)
                self._journal.outcome(Outcome(identity, "failed", error=f"{type(error).__name__}: {error}"))
            plan.failed(_unlowered(error, plan.line, plan.run))

    def _make(self, plan: Any, recorded: Program, forms: Iterator[Grown | None]) -> None:
        """Makes the first form that may be compiled."""
        device, grown = plan.device, next(forms)
        program = recorded if grown is None else grown.program
        known = None if grown is None else self._rooms.get((program, device))
        if grown is not None and known is not None:
            plan.ready(Padded(self.client, self.counters, grown, known))
            return
        clusters = self.plans.clusters(program) if self._knob("clusters") else None
        if clusters and self._journal is not None:
            self._journal.outcome(Outcome(self._journal.program(program), "recorded"))
        programs = [part.program for part in clusters.parts] if clusters else [program]
        builds = {number: self._submit(p, device, is_flat=False) for number, p in {id(p): p for p in programs}.items()}
        self.counters.regions_planned += 1
        self.counters.regions_clustered += bool(clusters)
        self._planned(program)

        def tell() -> None:
            flown = dict(builds)
            builds.clear()  # the flights' callbacks, this one too, would keep the plan until the garbage is collected
            made: dict[int, Executable] = {}
            for number, build in flown.items():
                try:
                    made[number] = self._executable(build, device)
                except BaseException as error:  # noqa: BLE001 -- as above; a cancelled build counts
                    self._made_not(plan, recorded, forms, error, build.about)
                    return
            form: Any = made.get(id(program))
            if clusters:
                executables = [made[id(p)] for p in programs]
                parts = Parts(program, clusters.parts, executables.__getitem__)
                form = self._ladder(parts, program, device, clusters.hot)
            if grown is not None:
                self._rooms[program, device] = form
                form = Padded(self.client, self.counters, grown, form)
            plan.ready(form)

        _when_all([build.flight for build in builds.values()], tell)

    def _made_not(
        self, plan: Any, program: Program, forms: Iterator[Grown | None], error: BaseException, about: About
    ) -> None:
        """Goes on to the next form where one is not compiled and must not be."""
        failure = _explained(error, about, plan)
        if isinstance(error, NotCompiledError):
            try:
                self._make(plan, program, forms)
            except StopIteration:
                plan.failed(failure)
            except Exception as other:  # noqa: BLE001 -- whoever reads the region's values raises it
                plan.failed(_unlowered(other, plan.line, plan.run))
        else:
            plan.failed(failure)

    def _forms(self, program: Program, before: Any, device: int) -> Iterator[Grown | None]:
        """What may run a program, best first: with room (see `growth`), or as it is (None). Where nothing may be
        compiled, what another process gave room to, or did not, serves too."""
        grown = None
        if before is not None:
            grown = self._grow(program, before.program)
            if grown is not None and (grown.program, device) not in self._rooms:
                self.plans.note_outgrown(before.program)
        yield grown
        if self._knob("policy") == "frozen":
            if grown is not None:
                yield None
            for earlier in self.plans.outgrown(program):
                other = self._grow(program, earlier)
                if other is not None:
                    yield other

    def _grow(self, program: Program, before: Program) -> Grown | None:
        """The program with room for what has grown since another one; None where it is better left as it is."""
        try:
            grown = grow(program, before, self._rule_of)
        except Fixed as error:
            if "cluster" in self._knob("log"):
                log.write(f"tpu: the region at {program.line} gets no room: {error}")
            return None
        self.counters.regions_grown += 1
        return grown

    def _built(self, program: Program, device: int) -> Executable:
        """The program's executable, now."""
        return self._executable(self._submit(program, device, is_flat=False), device)

    def _ladder(self, parts: Parts, program: Program, device: int, hot: int) -> Ladder:
        """The region's forms: its clusters, and the whole program once it is hot."""

        def climb() -> Future[Executable]:
            self.counters.regions_climbing += 1
            whole: Future[Executable] = Future()
            build = self._submit(program, device, is_flat=False, is_needed_now=False)

            def tell(_: Future[Loaded]) -> None:
                try:
                    whole.set_result(self._executable(build, device))
                except BaseException as error:  # noqa: BLE001 -- the clusters serve as well
                    whole.set_exception(error)

            build.flight.add_done_callback(tell)
            return whole

        def chosen(is_whole: bool, seconds: tuple[float, float]) -> None:
            self.counters.regions_fused += is_whole
            if "cluster" in self._knob("log"):
                whole, clusters = (f"{s * 1e3:.2f} ms" for s in seconds)
                kept = "whole" if is_whole else f"in {len(parts.parts)} parts"
                log.write(f"tpu:{device} region at {program.line} stays {kept}: whole {whole}, in parts {clusters}")

        def is_fixed() -> bool:
            is_deterministic = self._knob("deterministic") or torch.are_deterministic_algorithms_enabled()
            return is_deterministic or self._knob("policy") != "background"

        return Ladder(parts, climb, hot, is_fixed, chosen)

    def load(self, recorded: Iterable[Recorded], device: int = 0) -> list[Future[Loaded]]:
        """Asks for the programs of a manifest before anything needs them."""
        alone = [r for r in recorded if not (self._joints and self._joints.concern(r.program))]
        return [self._submit(r.program, device, is_flat=r.is_flat).flight for r in alone]

    def _submit(self, program: Program, device: int, *, is_flat: bool, is_needed_now: bool = True) -> _Build:
        started = time.perf_counter()
        found = self.plans.find(program, is_flat=is_flat)
        self.counters.lower_ms += (time.perf_counter() - started) * 1e3
        if "stablehlo" in self._knob("log"):
            log.write(found.text())
        about = _about(program, found)
        note: Note = {"line": program.line, "ops": len(program.ops)}
        flight = self.compiler.submit(found, device, note, is_needed_now=is_needed_now)
        if self._journal is not None:
            _keep_journal(self._journal, program, is_flat, found.key.digest, flight)
        for observer in self._observers:
            observer.planned(program, about, flight)
        return _Build(program, found, about, flight)

    def _executable(self, build: _Build, device: int) -> Executable:
        def make_flat() -> Executable:
            self.counters.offset_variants += 1
            _, found, about, flight = self._submit(build.program, device, is_flat=True)
            return Executable(self.client, found, flight.result(), device, about, _refuse)

        _, found, about, flight = build
        return Executable(self.client, found, flight.result(), device, about, make_flat if found.offsets else _refuse)

    def _executables(self, programs: list[Program], device: int) -> list[Executable]:
        """The executables of programs that are compiled together."""
        builds = [self._submit(program, device, is_flat=False) for program in programs]
        return [self._executable(build, device) for build in builds]

    def upload(self, tensor: torch.Tensor, device: int) -> Any:
        """An array with the contents of a contiguous CPU tensor, which nobody changes afterwards."""
        self.counters.uploads += 1
        self.counters.bytes_uploaded += tensor.nbytes
        array = self.client.upload(tensor, device)
        for observer in self._observers:
            observer.uploaded(array, device)
        return array

    def download(self, array: Any) -> torch.Tensor:
        """A contiguous CPU tensor of the array's contents; waits for them. It may share the array's memory."""
        self.counters.downloads += 1
        self.counters.bytes_downloaded += nbytes_of(array)
        return download(self.client, array)

    def resolve(self, guard: Guard) -> None:
        """Waits for a guard's device-side checks and raises the error of the first that failed."""
        guard.resolve()

    def finish(self, device: int) -> None:
        """Waits until everything launched on the device has run."""
        self._executor.finish(device)

    def waiting(self, info: str, seconds: float) -> None:
        """A wait has lasted 3 seconds, or 10 more: one log line."""
        log.write(f"tpu: waiting for {seconds:.0f} s: {info}")

    def memory_bytes(self, device: int) -> int:
        """The bytes a device has; 0 where the platform does not say."""
        return self.client.memory_bytes(device)

    def device_name(self, device: int) -> str:
        """What the platform calls the device."""
        return self.client.device_name(device)


def _keep_journal(journal: Journal, program: Program, is_flat: bool, digest: str, flight: Future[Loaded]) -> None:
    identity = journal.program(program, is_flat=is_flat)

    def note(done: Future[Loaded]) -> None:
        error = CancelledError("the engine was closed") if done.cancelled() else done.exception()
        if error is not None:
            journal.outcome(Outcome(identity, "failed", digest, error=f"{type(error).__name__}: {error}"))
        else:
            loaded = done.result()
            outcome = "hit" if loaded.source == "disk" else "compiled"
            journal.outcome(Outcome(identity, outcome, digest, loaded.milliseconds))

    flight.add_done_callback(note)


def _when_all(flights: Collection[Future[Loaded]], then: Callable[[], None]) -> None:
    """Calls `then` once, when every flight has landed."""
    left = threading.Semaphore(len(flights) - 1)

    def landed(_: Future[Loaded]) -> None:
        if not left.acquire(blocking=False):
            then()

    for flight in flights:
        flight.add_done_callback(landed)


def _refuse() -> Executable:
    raise AssertionError("a program without run-time offsets has no variant for them")


def _about(program: Program, plan: Plan) -> About:
    lines = tuple(dict.fromkeys(op.line for op in program.ops))
    return About(plan.key.digest, program.line, lines, len(program.ops), len(program.donated), _largest(program))


def _largest(program: Program) -> str:
    """The largest result of the program, its op and its line."""
    made = [(math.prod(r.sizes) * r.dtype.itemsize, r, op) for op in program.ops for r in results_of(op)]
    if not made:
        return "none"
    nbytes, result, op = max(made, key=lambda m: m[0])
    shape = f"{str(result.dtype).removeprefix('torch.')}{list(result.sizes)}"
    return f"{shape}, {show_bytes(nbytes)}, of {full_name(op.name)} at {op.line}"


def _unlowered(error: Exception, line: str, run: str) -> Exception:
    """The error of a region that was not lowered; a RuntimeError names its op, and where that was first recorded."""
    if isinstance(error, RuntimeError) and not run:
        return error
    what = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
    text = f"the region {recorded_at(line, run)} could not be lowered: {what}{error}"
    failure = (NotImplementedError if isinstance(error, NotImplementedError) else RuntimeError)(text)
    failure.__cause__ = error
    return failure


def _explained(error: BaseException, about: About, plan: Any) -> Exception:
    """The error of a failed build."""
    place = recorded_at(about.line, plan.run)
    if isinstance(error, NotCompiledError):
        return NotCompiledError(
            f"the region {place} ({about.ops} ops) is not compiled, and the policy is frozen; {plan.nearest}"
        )
    if isinstance(error, CancelledError):
        return RuntimeError(f"the region {place} was not compiled: the engine is closed")
    text = f"the region {place} ({about.ops} ops) could not be compiled: {error}"
    kind = torch.OutOfMemoryError if "RESOURCE_EXHAUSTED" in str(error) else RuntimeError
    failure = kind(f"{text} (its largest result: {about.largest})")
    failure.__cause__ = error
    return failure
