"""Running: in comes a recorder's `work`, out go its output arrays, enqueued in program order."""

from __future__ import annotations

import functools
import operator
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchtpu.runtime.device.client import Client
from torchtpu.runtime.device.loaded import About, Loaded
from torchtpu.runtime.device.sizes import nbytes_of, show_bytes
from torchtpu.runtime.ir.calls import full_name
from torchtpu.runtime.ir.values import roots_of
from torchtpu.runtime.lowering.emit import failed_aval
from torchtpu.runtime.lowering.views import fits
from torchtpu.runtime.padding.arrays import PaddedArray, PaddedExecutable, PaddedWork, without_surplus
from torchtpu.runtime.padding.check import SecondLaunch
from torchtpu.runtime.spmd.groups import Pieces
from torchtpu.runtime.spmd.host_calls import HostCall
from torchtpu.runtime.spmd.regions import Core, Joint
from torchtpu.runtime.telemetry.counters import Counters
from torchtpu.runtime.telemetry.log import write
from torchtpu.runtime.telemetry.observers import Called, Launched, Observer

from .autotuner import Ladder
from .checks import Guard, Outcome, first_of, recorded_at, unsettled
from .fitting import Fitting
from .memory import Flight, Memory
from .recovery import OpFailedError, Recovery, first_too_large
from .sequence import Sequence as Parts

if TYPE_CHECKING:
    from torchtpu.runtime.compile.plan_cache import Plan


class Executable:
    """What a plan is given: a loaded program with all that a launch needs of it."""

    __slots__ = (
        "__weakref__", "_flat", "_make_flat", "about", "checks", "common", "fitted", "floats", "handlers",
        "has_one_own", "inputs", "ints", "is_fresh", "kind_of", "kinds", "loaded", "offsets", "run",
    )  # fmt: skip

    def __init__(
        self,
        client: Client,
        plan: Plan,
        loaded: Loaded,
        device: int,
        about: About,
        make_flat: Callable[[], Executable],
    ) -> None:
        outputs = list(plan.outputs) + ([failed_aval(len(plan.checks))] if plan.checks else [])
        self.inputs = plan.inputs
        self.offsets = plan.offsets
        self.loaded = loaded
        self.about = about
        self.run = loaded.executable
        self.handlers = client.handlers(outputs, device)
        self.checks = plan.checks
        self.kinds = tuple(dict.fromkeys(plan.sources))  # the different sets of inputs and checks outputs depend on
        self.common = functools.reduce(operator.and_, self.kinds, -1)  # what all outputs depend on
        self.has_one_own = len({kind >> len(self.inputs) for kind in self.kinds}) == 1  # and on the same checks
        numbers = {sources: kind for kind, sources in enumerate(self.kinds)}
        self.kind_of = [numbers[sources] for sources in plan.sources]
        self.is_fresh = True  # until a launch has checked its arguments and logged where the program came from
        self.floats, self.ints = _Numbers(), _Numbers()
        self.fitted: dict[int, Parts] = {}  # what is launched instead, by memory limit
        self._make_flat = make_flat
        self._flat: Executable | None = None

    def at(self, ints: list[int]) -> Executable:
        """The program for these run-time ints: this one, or the one that takes nothing for granted of offsets."""
        if fits(self.offsets, ints):
            return self
        self._flat = self._flat or self._make_flat()
        return self._flat

    @property
    def is_prompt(self) -> bool:
        """Whether `at` makes nothing."""
        return not self.offsets or self._flat is not None

    @property
    def argument_bytes(self) -> int:
        """What a launch is given."""
        return self.loaded.argument_bytes

    @property
    def needed_bytes(self) -> int:
        """What a launch takes beyond its arguments."""
        return self.loaded.output_bytes - self.loaded.aliased_bytes + self.loaded.temporary_bytes

    def hidden_bytes(self, arguments: Sequence[Any]) -> int:
        """What a launch takes beside arguments and outputs: temporaries, and donated memory that no output reuses."""
        donated = sum(nbytes_of(argument) for argument in arguments if argument.is_deleted())
        return self.loaded.temporary_bytes + max(0, donated - self.loaded.aliased_bytes)


Settle = Callable[[Any, Exception, int | None], None]


class _Numbers:
    """A program's run-time numbers on its device: uploaded where they are not those of its last launch."""

    __slots__ = ("_array", "_data")

    def __init__(self) -> None:
        self._data: bytes | None = None
        self._array: Any = None

    def array(self, client: Client, numbers: torch.Tensor, device: int) -> Any:
        data = numbers.numpy().tobytes()
        if data != self._data:
            self._data, self._array = data, client.upload(numbers, device)
        return self._array


class Executor:
    """Launches. What does not fit in `memory` runs in the parts of `fitting`."""

    def __init__(
        self,
        client: Client,
        counters: Counters,
        knob: Callable[[str], Any],
        memory: Memory,
        fitting: Fitting,
        recovery: Callable[[Callable[[Any], None]], Recovery],
        observers: Sequence[Observer] = (),
    ) -> None:
        self._observers = observers
        self._client = client
        self._counters = counters
        self._knob = knob
        self._memory = memory
        self._fitting = fitting
        self._recovery = recovery(self.launch)
        self._lock = threading.Lock()  # guards what follows; nothing waits under it
        self._outcomes: list[deque[Outcome]] = [deque() for _ in client.devices]  # not known when last looked at
        self._failed: list[list[Outcome]] = [[] for _ in client.devices]  # not raised when last looked at

    def is_prompt(self, work: Any) -> bool:
        """Whether launching the work takes no time but the program's: no other rank, no memory and no compile is waited
        for, and nothing has to be made."""
        executable = work.executable
        if isinstance(executable, PaddedExecutable) and self._knob("check") != "off":
            return False
        while isinstance(executable, PaddedExecutable):
            executable = executable.executable
        if isinstance(executable, Ladder):
            executable = executable.prompt_form()
        is_alone = isinstance(executable, (Executable, Parts))
        return is_alone and executable.is_prompt and not self._memory.limit(work.device)

    def launch(self, work: Any, executable: Any = None) -> None:
        """Enqueues the work's program, or one that does the same; tells the work what came of it and never raises."""
        if work.build_error is not None:
            self._recover(work, work.build_error, None)
            return
        executable = executable or work.executable
        if work.stopped_by is not None and not isinstance(executable, (HostCall, Joint, Pieces, Core)):
            self._roll_back(work, work.stopped_by)
            return
        if isinstance(executable, PaddedExecutable):
            with _Caught(work, self._recover):
                padded = executable.work(work)
                if self._knob("check") == "padding" and not work.errors():
                    self._check(padded, executable.executable)
                self.launch(padded, executable.executable)
            return
        if PaddedArray.exist:
            work = without_surplus(self._client, self._counters, work)
        if isinstance(executable, HostCall):
            self._call(work)
        elif isinstance(executable, (Joint, Pieces)):
            self._meet(work, executable)
        elif isinstance(executable, Core):
            self._together(work, executable)
        else:
            self._run_alone(work, executable)

    def _check(self, work: PaddedWork, executable: Any) -> None:
        """Launches a padded program with another surplus; the launch proper compares what it makes."""
        work.second = SecondLaunch(self._client, work)
        self._run_alone(work.second, executable)
        if work.second.error is not None:
            self._counters.bailouts.note("check", work.second.error, work.program.line)

    def _recover(self, work: Any, error: Exception, place: int | None) -> None:
        if isinstance(work, PaddedWork) and not isinstance(error, torch.OutOfMemoryError):
            self._counters.bailouts.note("padding", error.__cause__ or error, work.program.line)
        self._recovery.settle(self._as_recorded(work), error, place)

    def _roll_back(self, work: Any, error: BaseException) -> None:
        """Fails a work that eager PyTorch would not have come to."""
        with _Caught(work):
            self._recovery.roll_back(self._as_recorded(work), error, 0)

    def _as_recorded(self, work: Any) -> Any:
        work = getattr(work, "recorded", work)
        return without_surplus(self._client, self._counters, work) if PaddedArray.exist else work

    def _run_alone(self, work: Any, executable: Any) -> None:
        """Launches a program that no other rank takes part in, whole or in parts."""
        if isinstance(executable, Ladder):
            with _Caught(work, self._recover):
                executable.run(work, self._run_alone, self._memory.wait_until_idle)
            return
        with _Caught(work, self._recover, executable.about):
            parts = self._in_parts(work, executable) if self._memory.limit(work.device) else None
            if parts is not None:
                parts.run(work, self.launch)
            elif isinstance(executable, Parts):
                executable.run(work, self.launch)
            else:
                self._run_where_whole(work, executable.at(work.ints.tolist()) if executable.offsets else executable)

    def _call(self, work: Any) -> None:
        """Runs a host call, whose outputs depend on all its inputs."""
        with _Caught(work):
            self._counters.host_calls += 1
            started = time.perf_counter()
            outputs = work.executable.run(work)
            for observer in self._observers:
                op = work.executable.op
                observer.called(Called(op.name, work.device, op.line, started, time.perf_counter()))
            doubts = unsettled(work.guards())
            work.done(outputs, [Guard(None, 0, doubts)] * len(outputs) if doubts else [])

    def _meet(self, work: Any, joint: Joint | Pieces) -> None:
        """Launches a region together with the other ranks, or its parts in turn."""
        with _Caught(work):
            if isinstance(joint, Pieces):
                joint.run(work, self._try_to_meet, self.launch)
            elif not self._try_to_meet(work, joint):
                joint.parts.run(work, self.launch)

    def _try_to_meet(self, work: Any, joint: Joint) -> bool:
        """Launches what the ranks of a joint region agree on; whether they do. What fails is the work's."""
        with _Caught(work):
            agreed = joint.agreed(work)
            if isinstance(agreed, Core):
                self._together(work, agreed)
            elif agreed is not None:
                agreed.run(work, self.launch)
            return agreed is not None
        return True  # to fail

    def _together(self, work: Any, core: Core) -> None:
        """Launches a program as all other ranks do."""
        with _Caught(work):
            errors = work.errors()
            if errors:
                core.skip(errors[0][0], work)
                work.failed(errors[0][0])
            else:
                self._run(core.given(work), core.ready(), 0, functools.partial(core.launch, work))

    def _run_where_whole(self, work: Any, executable: Executable) -> None:
        """Runs what does not depend on failed inputs."""
        errors = work.errors()
        spoiled = functools.reduce(operator.or_, (inputs for _, inputs in errors), 0)
        if not errors or self._spoil(work, executable, errors, spoiled):
            self._run(work, executable, spoiled)

    def _spoil(self, work: Any, executable: Executable, errors: list[tuple[Any, int]], spoiled: int) -> bool:
        """Fails the outputs that depend on failed inputs; whether there is anything else to compute."""
        first = [next((error for error, inputs in errors if inputs & kind), None) for kind in executable.kinds]
        for k, kind in enumerate(executable.kind_of):
            if first[kind] is not None:
                work.spoil(k, first[kind])
        return None in first or any(not check.sources & spoiled for check in executable.checks)

    def _run(
        self,
        work: Any,
        executable: Executable,
        spoiled: int,
        together: Callable[[Callable[[], tuple[list[Any], Any]]], tuple[list[Any], Any]] | None = None,
    ) -> None:
        client, device = self._client, work.device
        arguments = work.inputs()
        if spoiled:
            self._stand_in(work, executable, arguments, spoiled)
        for known, numbers in ((executable.floats, work.floats), (executable.ints, work.ints)):
            if numbers is not None:
                arguments.append(known.array(client, numbers, device))
        if executable.is_fresh:
            _check_arguments(client, executable, arguments)
        doubts = unsettled(work.guards())
        started = time.perf_counter()
        if together is None:
            outputs, token = client.execute(executable.run, arguments, executable.handlers)
        else:
            execute = functools.partial(client.execute_together, executable.run, arguments, executable.handlers)
            outputs, token = together(execute)
        if not client.runs_at_once:
            self._track(device, executable, token, arguments, outputs)
        self._counters.launches += 1
        outcome = failed = None
        if executable.checks:
            outcome = Outcome(client, outputs.pop(), executable.checks, doubts, spoiled, lambda: work.run)
            self._settle(device)
            if outcome.is_known():
                failed = outcome if outcome.failed() else None
                outcome = None
            elif not work.is_slice:  # its checks are the region's too
                with self._lock:
                    self._outcomes[device].append(outcome)
        guards = _guards(executable, outcome, doubts) if outcome or doubts else []
        for observer in self._observers:
            region, ended = work.region, time.perf_counter()
            place = (region["reason"], region["line"], region["cut_at"])
            observer.launched(Launched(executable.about, device, *place, started, ended, tuple(outputs), token))
        if "launch" in self._knob("log"):
            self._log(work, executable, len(arguments), outputs, started)
        executable.is_fresh = False
        if failed is None:
            work.done(outputs, guards)
        else:
            self._fail_check(work, executable, failed, outputs, guards, spoiled)

    def _fail_check(
        self,
        work: Any,
        executable: Executable,
        outcome: Outcome,
        outputs: list[Any],
        guards: list[Guard | None],
        spoiled: int,
    ) -> None:
        """Fails a work of which a check did not pass: what eager PyTorch would have raised at its op."""
        failed = outcome.failed()
        check = first_of(failed, executable.checks)
        error = next((error for error, inputs in work.errors() if inputs & check.sources), None)
        sound = {
            k: (outputs[k], guards[k] if guards else None)
            for k, kind in enumerate(executable.kinds[number] for number in executable.kind_of)
            if not kind & (failed << len(executable.inputs) | spoiled)
        }
        self._recovery.fail_at(work, check.place, error or outcome.error_of(check), sound)

    def _stand_in(self, work: Any, executable: Executable, arguments: list[Any], spoiled: int) -> None:
        """Gives a launch zeros for inputs that failed: nothing that is left to compute depends on them. Of inputs that
        outputs which are not computed are versions of, it gives copies: their storages get these inputs back."""
        client, device, program = self._client, work.device, work.program
        roots = roots_of(program)
        kinds = zip(program.outputs, (executable.kinds[kind] for kind in executable.kind_of), strict=True)
        kept = {roots.get(value) for value, kind in kinds if kind & spoiled}
        for i, (shape, dtype) in enumerate(executable.inputs):
            if spoiled >> i & 1:
                arguments[i] = client.upload(torch.zeros(shape, dtype=dtype), device)
            elif ~i in kept and i in program.donated:
                arguments[i] = client.upload(client.download(arguments[i]).clone(), device)

    def _track(
        self, device: int, executable: Executable, token: Any, arguments: Sequence[Any], outputs: Sequence[Any]
    ) -> None:
        """Notes a launch that may not have run, with what it holds where somebody counts that."""
        if self._memory.limit(device):
            output = weakref.ref(outputs[0]) if outputs else lambda: None
            self._memory.track(device, Flight(token, executable.hidden_bytes(arguments), arguments, output))
        else:
            self._memory.track(device, Flight(token, 0, (), lambda: None))

    def _in_parts(self, work: Any, form: Executable | Parts) -> Parts | None:
        """What is launched instead of a program, or of parts, that do not fit; None where they do."""
        memory, device, needed = self._memory, work.device, form.needed_bytes
        limit = memory.limit(device)
        parts = form.fitted.get(limit)
        if parts is None and needed:
            arguments = work.inputs()  # counted from now on, where they were on the host
            about = form.about
            if form.argument_bytes + needed <= limit and memory.has_room(device, needed, about.line):
                return None
            room = memory.room_for(device, arguments)
            found: Any = None
            with self._counters.bailouts.attempt("fitting", about.line):
                found = self._fitting.fit(work.program, device, room)
            if found is None:
                return None
            parts, tried = found
            if parts is None:
                program = work.program
                place = first_too_large(program, memory.free_for(device, arguments))
                op = program.ops[place]
                where = f"{full_name(op.name)} at {op.line}"
                what = f"the region recorded at {about.line} (from {where} on; its largest result: {about.largest})"
                raise OpFailedError(torch.OutOfMemoryError(memory.explain(device, what, needed, tried)), place)
            form.fitted[limit] = parts
            memory.note("split", about.line, f"{about.ops} ops now run in {tried}")
        return parts

    def await_launches(self, device: int) -> None:
        """Waits until everything launched so far on the device has run."""
        self._memory.finish(device)
        with self._lock:
            outcomes = list(self._outcomes[device])
        for outcome in outcomes:
            outcome.failed()

    def finish(self, device: int) -> None:
        """Raises what no read has raised of what has run on the device. Never waits."""
        self._settle(device)
        with self._lock:
            failed, self._failed[device] = self._failed[device], []
        for outcome in failed:
            outcome.raise_unread()

    def _settle(self, device: int) -> None:
        """Closes the outcomes that have become known: launches of a device run in order."""
        with self._lock:
            outcomes = self._outcomes[device]
            while outcomes and outcomes[0].is_known():
                outcome = outcomes.popleft()
                if outcome.close():
                    self._failed[device] = [o for o in (*self._failed[device], outcome) if not o.is_settled()]

    def _log(self, work: Any, executable: Executable, inputs: int, outputs: list[Any], started: float) -> None:
        """Writes the launch's line, once it has run."""
        for output in outputs:
            self._client.wait(output)
        run_ms = (time.perf_counter() - started) * 1e3
        about, loaded, region = executable.about, executable.loaded, work.region
        found = "hit (trie)"
        if executable.is_fresh:
            found = "hit (disk) load" if loaded.source == "disk" else "miss compile"
            found += f" {loaded.milliseconds:.0f} ms"
        write(
            f"tpu:{work.device} region {about.identity[:8]} | "
            f"{about.ops} ops {inputs} in {len(outputs)} out {about.donated} donated | "
            f"cut: {region['reason']} ({region['line']}) | {found} | run {run_ms:.{1 if run_ms > 100 else 3}f} ms | "
            f"peak {show_bytes(loaded.argument_bytes + executable.needed_bytes)}"
        )


def _check_arguments(client: Client, executable: Executable, arguments: list[Any]) -> None:
    """XLA checks only the size in bytes: the first launch checks shapes and dtypes."""
    for i, (array, expected) in enumerate(zip(arguments, executable.inputs, strict=False)):
        actual = client.aval(array)
        assert actual == expected, (
            f"input {i} of the region recorded at {executable.about.line} is {actual}, not {expected}"
        )


def _guards(executable: Executable, outcome: Outcome | None, doubts: Mapping[Guard, int]) -> list[Guard | None]:
    """A guard for each output that depends on a check which is not known to have passed."""
    own_guards: dict[tuple[int, tuple[Guard, ...]], Guard] = {}  # outputs that depend on the same share one
    made: list[Guard | None] = []
    is_alike = executable.has_one_own and all(inputs & executable.common for inputs in doubts.values())
    for sources in executable.kinds[:1] if is_alike else executable.kinds:
        own = sources >> len(executable.inputs)
        earlier = tuple(guard for guard, inputs in doubts.items() if inputs & sources)
        if own or len(earlier) > 1:
            made.append(own_guards.setdefault((own, earlier), Guard(outcome if own else None, own, earlier)))
        else:
            made.append(earlier[0] if earlier else None)
    if outcome:
        outcome.guarded_by(own_guards.values())
    return made * len(executable.kind_of) if is_alike else [made[kind] for kind in executable.kind_of]


class _Caught:
    """Gives the work what is raised, Ctrl-C too, explained by what `about` says: whoever reads an output raises it.

    `settle` computes what is there nevertheless.
    """

    __slots__ = ("_about", "_settle", "_work")

    def __init__(self, work: Any, settle: Settle | None = None, about: About | None = None) -> None:
        self._work = work
        self._settle = settle
        self._about = about

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is not None:
            place = None
            if isinstance(error, OpFailedError):
                place, error = error.place, error.error
            _forget_frames(error)
            shown = _explained(error, self._about, self._work.run) if self._about else error
            if self._settle is None or not isinstance(shown, Exception):
                self._work.failed(shown)
            else:
                self._settle(self._work, shown, place)
        return error is not None


def _forget_frames(error: BaseException) -> None:
    """A launch may run in a reading thread: a stored traceback would keep the reader's frames and tensors alive."""
    waiting, known = [error], set[int]()
    while waiting:
        found = waiting.pop()
        known.add(id(found))
        found.__traceback__ = None
        waiting += [e for e in (found.__cause__, found.__context__) if e is not None and id(e) not in known]


def _explained(error: BaseException, about: About, run: str) -> BaseException:
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, Exception):
        return error
    place = recorded_at(about.line, run)
    text = f"the region {place} ({about.ops} ops) could not be launched: {error}"
    kind = torch.OutOfMemoryError if "RESOURCE_EXHAUSTED" in str(error) else RuntimeError
    failure = kind(f"{text} (its largest result: {about.largest})")
    failure.__cause__ = error
    return failure
