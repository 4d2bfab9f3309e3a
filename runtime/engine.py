"""The engine: answers the recorder's callbacks by compiling plans, launching regions and moving arrays.

Made at the first region or upload; imports jaxlib, makes the client and owns the compile threads.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import torch

from torchtpu.compiler_cache import NullStore, Store
from torchtpu.runtime.device.loaded import Loaded
from torchtpu.runtime.device.sizes import nbytes_of

from .compile.builder import Builder
from .compile.capacity import Capacity
from .compile.compiler import Compiler, NotCompiledError
from .compile.failing import failing
from .compile.plan_cache import Plans
from .compile.tiers import DETERMINISTIC, FIRST_TIERS, SWEEPS
from .compile.variants import NotBuiltError, Postponed, RegionVariants, VariantBuilder
from .device.client import Client
from .device.process_group import ProcessGroup
from .execute.checks import PendingCheck, recorded_at, region_error
from .execute.executor import Executor
from .execute.fitting import Fitting
from .execute.memory import Memory
from .execute.recovery import Recovery
from .ir.calls import Lowerings
from .ir.manifest import Journal, ProgramOutcome, RecordedProgram
from .ir.program import Program
from .ir.scalar_lifting import IsStructural
from .ir.weak_values import WeakValues
from .lowering.fragments import Fragments
from .padding.arrays import Copies, download
from .padding.layout import Layouts, Outline, PaddedForm, PaddedProgram
from .partition.clusters import Clusters
from .partition.pieces import Piece
from .spmd.builder import SpmdBuilder
from .spmd.regions import Collectives
from .telemetry import log
from .telemetry.counters import Counters
from .telemetry.observers import Observer
from .telemetry.waiting import Waits

Way = tuple[str, Callable[[], Future[Any]]]  # what is optimised, "" where nothing is, and what begins to make it


class Engine:
    """Compiles and runs what the recorder hands over. All methods may be called from any thread.

    `knob` gives the settings clusters, log, check, memory_limit, debug_nans, policy and num_compile_threads; `release`
    lets go of arrays that nobody holds any more, `live_tensors` lists a device's tensors (see `Memory`),
    `programs_held` says how many programs op streams lead to, and `limit_programs` hears how many may stay, where that
    is less than the setting max_programs. A `journal` hears of every program and of what became of it; `observers`, a
    list that may change, hear of each program and launch, `planned` of each region's program, but for those that are
    made of known ones. `collectives` is the op that ranks run together, `is_structural` says which numbers change what
    an op means, `is_special` which of them do so as single values.
    """

    def __init__(
        self,
        *,
        platform: str,
        num_devices: int,
        lowerings: Lowerings,
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
        is_special: IsStructural = lambda *_: False,
        process_group: ProcessGroup | None = None,
        programs_held: Callable[[], int] = lambda: sys.maxsize,
        limit_programs: Callable[[int], Any] = lambda most: None,
    ) -> None:
        self._observers = observers
        self._planned = planned
        self.counters = counters
        self.client = Client(
            platform, num_devices, excess_precision=knob("excess_precision"), process_group=process_group
        )
        self._knob = knob
        self._reports = Waits()
        self.store = store = NullStore("none was given") if store is None else store
        self.fragments = Fragments(
            lowerings,
            self.client,
            store,
            counters,
            watch=lambda: knob("debug_nans"),
            capacity=lambda: knob("max_fragments"),
        )
        self.plans = Plans(self.fragments, self.client, store, counters)
        threads = knob("num_compile_threads") or max(1, len(os.sched_getaffinity(0)) // 2)
        capacity = Capacity(lambda: knob("max_programs"), programs_held, limit_programs, counters)
        self.compiler = Compiler(
            self.client,
            store,
            counters,
            threads,
            capacity,
            may_compile=lambda: knob("policy") != "frozen",
        )
        self._journal = journal
        copies = Copies(self.client, counters)
        self._builder = Builder(self.client, self.plans, self.compiler, copies, counters, knob, journal, observers)
        self._spmd = collectives and SpmdBuilder(
            self.client, self.plans, self.compiler, collectives, is_structural, self._builder, observers
        )
        # What is collected for other machines is what they start with: what was faster here does not count.
        sweep, choices = (None, NullStore("programs are collected")) if journal else (SWEEPS.get(platform), store)
        # Ranks compute the same bits, each in its own time.
        first = None if journal or process_group else FIRST_TIERS.get(platform)
        self._variants = VariantBuilder(
            self._builder,
            self.plans,
            self.compiler,
            choices,
            counters,
            knob,
            sweep,
            first,
            DETERMINISTIC.get(platform, ()),
            capacity,
            _PaddedPieces(Layouts(is_special), self.fragments, knob),
            planned,
        )
        self._waits = threading.local()  # the tens of seconds that this thread's wait has lasted
        memory = Memory(self.client, counters, knob, release, self.compiler.forget, live_tensors, observers)
        fitting = Fitting(self.fragments, counters, self._builder.executables, self.compiler.forget)

        def may_run_again(program: Program, error: Exception) -> bool:
            is_alone = not (self._spmd and self._spmd.concern(program))  # else other ranks may have run it
            return is_alone and not isinstance(error, NotCompiledError)

        def recovery(launch: Callable[[Any], None]) -> Recovery:
            return Recovery(self.fragments, counters, self._builder.executables, launch, may_run_again)

        self._executor = Executor(self.client, copies, counters, knob, memory, fitting, recovery, observers)
        self._layouts = Layouts(is_special)
        # What runs a padded program, while some size of it is known.
        self._padded: WeakValues[tuple[Program, int], Any] = WeakValues()
        self.launch = self._executor.start
        self.resume = self._executor.resume

    def close(self) -> bool:
        """Ends the compile threads: what is queued is dropped, what is compiling is waited for, about a second. Whether
        none is left."""
        have_ended = self.compiler.close()
        self.client.close()
        return have_ended

    def plan(self, plan: Any) -> None:
        """Lowers the plan's program here and compiles it in a worker, which then tells the plan."""
        program = None
        try:
            program, device = plan.program, plan.device
            if "cluster" in self._knob("log"):
                log.write(str(program))
            spmd = self._spmd.executable(program, device) if self._spmd else None
            if spmd is not None:
                plan.ready(spmd)
            else:
                failed: list[tuple[str, Exception]] = []  # optimisations
                self._make(plan, self._ways(plan, program, failed), failed)
        except Exception as error:  # noqa: BLE001 -- whoever reads the region's values raises it
            if self._journal is not None and program is not None:
                identity = self._journal.program(program)
                self._journal.outcome(ProgramOutcome(identity, "failed", error=f"{type(error).__name__}: {error}"))
            plan.failed(_unlowered(error, plan.line, plan.run))

    def _make(self, plan: Any, ways: Iterator[Way], failed: list[tuple[str, Exception]]) -> None:
        """Makes what runs a region, in the first of these ways that works; `failed` are the optimisations that did not.
        Raises what the plain way raises."""
        for what, start in ways:
            try:
                ready = start()
            except Exception as error:
                if not what:
                    raise
                failed.append((what, error))
                continue
            ready.add_done_callback(functools.partial(self._settle, [(plan, ways, failed, what)]))
            return

    def _settle(
        self, waiting: list[tuple[Any, Iterator[Way], list[tuple[str, Exception]], str]], made: Future[Any]
    ) -> None:
        """Tells the plan that waits what was made, or goes on to the next way; whatever is raised meanwhile fails the
        plan. What was made may serve many regions, and is kept: nothing of them is kept with it."""
        plan, ways, failed, what = waiting.pop()
        with failing(lambda error: plan.failed(_unlowered(error, plan.line, plan.run))):
            self._made(plan, ways, failed, what, made)

    def _made(
        self, plan: Any, ways: Iterator[Way], failed: list[tuple[str, Exception]], what: str, made: Future[Any]
    ) -> None:
        """Hands over what was made; where that failed, goes on to the next way, if there may be one."""
        error = made.exception()
        if error is None:
            for optimisation, cause in failed:
                self.counters.bailouts.note(optimisation, cause, plan.line)
            plan.ready(made.result())
            return
        failure, reason = _not_compiled(error, plan), error.__cause__ or error
        is_absent = isinstance(reason, NotCompiledError)
        if not isinstance(reason, Exception) or isinstance(reason, CancelledError) or not (what or is_absent):
            plan.failed(failure)
            return
        if not is_absent:
            failed.append((what, reason))
        following = next(ways, None)
        if following is None:
            plan.failed(failure)
        else:
            self._make(plan, itertools.chain([following], ways), failed)

    def _ways(self, plan: Any, program: Program, failed: list[tuple[str, Exception]]) -> Iterator[Way]:
        """The ways to run a region, best first: padded (see `padding`), in parts, and plain. Where nothing may be
        compiled, what another process padded, or did not, serves too."""
        device, before = plan.device, plan.before
        padded = None if before is None else self._pad(program, (each.program for each in [before]))
        if padded is not None:
            if self._known(padded, device) is None:
                pieces = []
                with self.counters.bailouts.attempt("pieces", program.line):
                    programs = functools.partial(self._parts_of, padded.program)
                    pieces = self._variants.pieces_instead(program, programs, device, plan.regions)
                if pieces:
                    clusters = functools.partial(self._clusters, program)
                    yield "pieces", functools.partial(self._begin, program, clusters, device, pieces, padded)
                if device not in padded.form.making:  # else whoever began that has noted them
                    with self.counters.bailouts.attempt("note of sizes", program.line):
                        self.plans.note_samples(padded.samples)
            yield "padding", functools.partial(self._with_padding, padded, device)
        with self.counters.bailouts.attempt("note of sizes", program.line):
            self._layouts.note(program)
        try:
            pieces = self._variants.known_pieces(program, device, plan.regions, is_loop=plan.is_loop)
        except Exception as error:  # noqa: BLE001 -- as below
            pieces = []
            failed.append(("pieces", error))
        if pieces:
            yield "pieces", functools.partial(self._begin, program, lambda: self._clusters(program), device, pieces)
        try:
            parts = self._clusters(program)
        except Exception as error:  # noqa: BLE001 -- the plain form serves as well
            parts = None
            failed.append(("clusters", error))
        if parts is not None:
            yield "clusters", functools.partial(self._form, program, parts, device)
        yield "", functools.partial(self._form, program, None, device)
        if self._knob("policy") == "frozen":
            for samples in self.plans.samples(program):
                padded = self._pad(program, samples, alone=True)
                if padded is not None:
                    yield "padding", functools.partial(self._with_padding, padded, device)

    def _form(self, program: Program, clusters: Clusters | None, device: int) -> Future[Any]:
        """A program as it is."""
        if clusters and self._journal is not None:
            self._journal.outcome(ProgramOutcome(self._journal.program(program), "recorded"))
        ready = self._begin(program, lambda: clusters, device, [])
        self.counters.regions_clustered += bool(clusters)
        return ready

    def _begin(
        self,
        program: Program,
        clusters: Callable[[], Clusters | None],
        device: int,
        pieces: list[Piece],
        padded: PaddedProgram | None = None,
    ) -> Future[Any]:
        postponed = None
        if padded is not None:
            make = functools.partial(self._with_padding, padded, device)
            postponed = Postponed(make, self._variants.losses(padded.form))
        ready = RegionVariants(self._variants, program, clusters, device, pieces, postponed).start()
        self.counters.regions_planned += 1
        if not pieces:
            self._planned(program)
        return ready

    def _with_padding(self, padded: PaddedProgram, device: int) -> Future[Any]:
        """What runs a padded program."""
        made, known = Future[Any](), self._known(padded, device)
        if known is not None:
            made.set_result(self._builder.padded(padded, known))
            return made

        def tell(ready: Future[Any]) -> None:
            with failing(made.set_exception):
                made.set_result(self._builder.padded(padded, ready.result()))

        self._in_making(padded.form, device).add_done_callback(tell)
        return made

    def _in_making(self, form: PaddedForm, device: int) -> Future[Any]:
        """What is to run a padded form, which other sizes may wait for already."""
        ready = form.making.get(device)
        if ready is not None:
            return ready
        ready = form.making[device] = self._form(form.program, self._clusters(form.program), device)

        def landed(ready: Future[Any]) -> None:
            if not ready.cancelled() and ready.exception() is None:
                self._padded.set((form.program, device), ready.result())
            form.making.pop(device, None)

        ready.add_done_callback(landed)
        return ready

    def _known(self, padded: PaddedProgram, device: int) -> Any:
        """What runs a padded program, if something did lately."""
        known = padded.form.executables.get(device)
        if known is None:
            known = self._padded.get((padded.program, device))
            if known is not None:
                padded.form.executables.set(device, known)
        return known

    def _clusters(self, program: Program) -> Clusters | None:
        return self.plans.clusters(program) if self._knob("clusters") else None

    def _parts_of(self, program: Program) -> list[Program]:
        """What a program is compiled as."""
        clusters = self._clusters(program)
        return [part.program for part in clusters.parts] if clusters else [program]

    def _pad(self, program: Program, others: Iterable[Program], *, alone: bool = False) -> PaddedProgram | None:
        """The program padded, with other sizes of it in view, or as those alone made it elsewhere; None where it is
        better left as it is."""
        if self._knob("debug_nans") != "off":  # what does not count may be NaN
            return None

        try:
            pad = self._layouts.pad_as if alone else self._layouts.pad
            padded = pad(program, others, self.fragments.conditions)
        except Exception as error:  # noqa: BLE001 -- what only saves programs must not fail one
            self._refuse(program, error)
            return None
        self.counters.regions_padded += 1
        return padded

    def _refuse(self, program: Program, error: BaseException) -> None:
        """Notes why a program is not padded."""
        self.counters.not_padded(str(error), program.line)
        if "cluster" in self._knob("log"):
            log.write(f"tpu: not padded: {error} (the region at {program.line})")

    def load(self, recorded: Iterable[RecordedProgram], device: int = 0) -> list[Future[Loaded]]:
        """Asks for the programs of a manifest before anything needs them."""
        alone = [r for r in recorded if not (self._spmd and self._spmd.concern(r.program))]
        found = [(r, self._builder.find(r.program, is_flat=r.is_flat)) for r in alone]
        return [self._builder.submit(r.program, plan, device, is_flat=r.is_flat).flight for r, plan in found]

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

    def resolve(self, guard: PendingCheck) -> None:
        """Waits for a guard's device-side checks and raises the error of the first that failed."""
        guard.resolve()

    def await_launches(self, device: int) -> None:
        """Waits until everything launched on the device has run."""
        self._executor.await_launches(device)

    def finish(self, device: int) -> None:
        """Raises what no read has raised of that. Never waits."""
        self._executor.finish(device)

    def waiting(self, info: str, seconds: float) -> None:
        """A wait of this thread has lasted another second."""
        compiling = self.compiler.describe()
        self._reports.report(info + (f" (compiling {compiling})" if compiling else ""), seconds)

    def waited(self) -> None:
        """A wait that was told of is over."""
        self._reports.end()

    def memory_bytes(self, device: int) -> int:
        """The bytes a device has; 0 where the platform does not say."""
        return self.client.memory_bytes(device)

    def device_name(self, device: int) -> str:
        """What the platform calls the device."""
        return self.client.device_name(device)


class _PaddedPieces:
    """The layouts of the pieces of regions."""

    def __init__(self, layouts: Layouts, fragments: Fragments, knob: Callable[[str], Any]) -> None:
        self._layouts = layouts
        self._fragments = fragments
        self._knob = knob

    def outline_of(self, program: Program) -> Outline | None:
        """What pieces have in common that are samples of one another; None where this one is not to be padded."""
        if not self._knob("padding") or self._knob("debug_nans") != "off":  # what does not count may be NaN
            return None
        try:
            return self._layouts.outline_of(program)
        except Exception as error:  # noqa: BLE001 -- as in `Engine._pad`
            self._refuse(program, error)
            return None

    def pad(self, program: Program, others: Sequence[Program], most_variables: int) -> PaddedProgram | None:
        """A piece padded, with other sizes of it in view; None where that is not possible."""
        try:
            return self._layouts.pad(program, others, self._fragments.conditions, most_variables)
        except Exception as error:  # noqa: BLE001 -- as above
            self._refuse(program, error)
            return None

    def _refuse(self, program: Program, error: Exception) -> None:
        if "cluster" in self._knob("log"):
            log.write(f"tpu: not padded: {error} (a piece of the region at {program.line})")


def _unlowered(error: BaseException, line: str, run: str) -> BaseException:
    """The error of a region that was not lowered; a RuntimeError names its op, and where that was first recorded."""
    if isinstance(error, RuntimeError) and not run:
        return error
    what = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
    text = f"the region {recorded_at(line, run)} could not be lowered: {what}{error}"
    failure = (NotImplementedError if isinstance(error, NotImplementedError) else RuntimeError)(text)
    failure.__cause__ = error
    return failure


def _not_compiled(error: BaseException, plan: Any) -> BaseException:
    """The error of a region that was not compiled."""
    if not isinstance(error, NotBuiltError):
        return error
    about, error = error.about, error.__cause__ or error
    place = recorded_at(about.line, plan.run)
    if isinstance(error, NotCompiledError):
        return NotCompiledError(
            f"the region {place} ({about.ops} ops) is not compiled, and the policy is frozen; {plan.nearest}"
        )
    if isinstance(error, CancelledError):
        return RuntimeError(f"the region {place} was not compiled: the engine is closed")
    return region_error(error, about, plan.run, "compiled")
