"""Runs the recorder's works in program order, and returns their output arrays."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchtpu.runtime._C import DirectLaunch
from torchtpu.runtime.device.client import Client
from torchtpu.runtime.device.loaded import About
from torchtpu.runtime.device.sizes import show_bytes
from torchtpu.runtime.ir.calls import full_name
from torchtpu.runtime.ir.values import roots_of
from torchtpu.runtime.padding.arrays import Copies, PaddedArray, PaddedWork, uploads_of
from torchtpu.runtime.padding.check import SecondLaunch
from torchtpu.runtime.padding.layout import with_sizes
from torchtpu.runtime.telemetry.counters import Counters
from torchtpu.runtime.telemetry.log import write
from torchtpu.runtime.telemetry.observers import Launched, Observer

from .checks import CheckResults, PendingCheck, first_of, region_error, unsettled
from .direct import Step, make
from .executable import Enqueued, Executable, Fitted, Stopped
from .fitting import Fitting
from .memory import Memory, PendingLaunch
from .recovery import OpFailedError, Recovery, first_too_large
from .runtime_numbers import RuntimeNumbers
from .sequence import Sequence as Parts

_SMALL_BYTES = 1 << 20

Settle = Callable[[Any, Exception, int | None], None]


class Executor:
    """Launches. What does not fit in `memory` runs in the parts of `fitting`."""

    def __init__(
        self,
        client: Client,
        copies: Copies,
        counters: Counters,
        knob: Callable[[str], Any],
        memory: Memory,
        fitting: Fitting,
        recovery: Callable[[Callable[[Any], None]], Recovery],
        observers: Sequence[Observer] = (),
    ) -> None:
        self.observers = observers
        self._client = client
        self._copies = copies
        self.counters = counters
        self._knob = knob
        self._memory = memory
        self._fitting = fitting
        self._recovery = recovery(self.launch)
        self._numbers = RuntimeNumbers(client)
        self._lock = threading.Lock()  # guards what follows; nothing waits under it
        self._outcomes: list[deque[CheckResults]] = [deque() for _ in client.devices]  # not known when last looked at
        self._failed: list[list[CheckResults]] = [[] for _ in client.devices]  # not raised when last looked at

    def start(self, work: Any) -> None:
        """Launches what the recorder cut, but for a work that `is_ahead` of earlier ones where these may be the worse
        for it: other ranks launch it in its turn, or it takes memory that is limited."""
        if work.is_ahead:
            takes_memory = self._memory.limit(work.device) and work.output_bytes > _SMALL_BYTES
            if work.executable.meets_others or takes_memory:
                return
        self.launch(work)
        if not work.is_ahead:
            self._let_repeat(work)

    def launch(self, work: Any) -> None:
        """Enqueues the work's program, or one that does the same; tells the work what came of it and never raises."""
        if work.build_error is not None:
            self._recover(work, work.build_error, None)
            return
        executable = work.executable
        if work.stopped_by is not None and (executable is None or not executable.meets_others):
            self._roll_back(work, work.stopped_by)
            return
        if PaddedArray.exist and not executable.takes_padding and not isinstance(work, PaddedWork):
            work = self._copies.without_surplus(work)
        executable.launch(work, self)

    def may_launch_directly(self, work: Any) -> bool:
        """Whether nobody but `admit` and `track` hears of the work's launches."""
        return not self.observers and "launch" not in self._knob("log")

    def is_accounted(self, device: int) -> bool:
        """Whether these two hear of each."""
        return bool(self._memory.limit(device)) or not self._client.runs_at_once

    def admit(self, device: int, nbytes: int) -> bool:
        """Whether a launch that takes so many bytes surely has room; it has taken them then."""
        return self._memory.admit(device, nbytes)

    def launch_directly(
        self, executable: Executable, arrays: list[Any], floats: list[float], ints: list[int], device: int
    ) -> list[Any]:
        """The outputs of a plain program whose inputs are all there, and that was admitted; raises what the launch
        raises."""
        if executable.offsets:
            executable = executable.at(ints)
        if floats:
            arrays.append(self._numbers.of_floats(floats, device))
        if ints:
            arrays.append(self._numbers.of_ints(ints, device))
        outputs, token = self._client.execute(executable.run, arrays, executable.handlers)
        self.track(device, executable, token, arrays, outputs)
        self.counters.launched.add(executable.about.tier)
        return outputs

    def _let_repeat(self, work: Any) -> None:
        """Has the recorder repeat the next launch of the work's plan itself, where that would be as this one was."""
        if work.engine_launches == 1 or work.build_error is not None:
            return
        executable = work.executable
        if hasattr(executable, "direct") and self.may_launch_directly(work):
            with contextlib.suppress(Exception):  # the next launch comes here, too
                direct = executable.direct(work, self)
                if direct is not None:
                    work.launch_directly(direct)

    def resume(self, work: Any, step: int, arrays: list[Any], error: Any, launched: Any) -> None:
        """Goes on with a work that the recorder began to launch: see `Stopped`."""
        work.executable.resume(work, self, Stopped(step, arrays, error, launched))

    def catching(self, work: Any) -> _Caught:
        """Within it the work is given what is raised."""
        return _Caught(work)

    def recovering(self, work: Any, executable: Any = None) -> _Caught:
        """Within it the work is given what is raised, explained for the executable, once what eager PyTorch would have
        computed before it is there."""
        return _Caught(work, self._recover, executable)

    def wait_until_idle(self, device: int) -> None:
        """Waits until everything launched so far has run, whatever came of it."""
        self._memory.wait_until_idle(device)

    def check_padding(self, work: PaddedWork) -> None:
        """Launches a padded program with another surplus, where that is asked for; the launch proper compares what it
        makes."""
        if self._knob("check") != "padding" or work.errors():
            return
        work.second = SecondLaunch(self._client, work)
        work.executable.launch(work.second, self)
        if work.second.error is not None:
            self.counters.bailouts.note("check", work.second.error, work.program.line)

    def _recover(self, work: Any, error: Exception, place: int | None) -> None:
        if isinstance(work, PaddedWork) and not isinstance(error, torch.OutOfMemoryError):
            self.counters.bailouts.note("padding", error.__cause__ or error, work.program.line)
        self._recovery.settle(self._as_recorded(work), error, place)

    def _roll_back(self, work: Any, error: BaseException) -> None:
        """Fails a work that eager PyTorch would not have come to."""
        with _Caught(work):
            self._recovery.roll_back(self._as_recorded(work), error, 0)

    def _as_recorded(self, work: Any) -> Any:
        work = getattr(work, "recorded", work)
        return self._copies.without_surplus(work) if PaddedArray.exist else work

    def run_alone(self, work: Any, executable: Executable) -> None:
        """Runs what does not depend on failed inputs of a program that no other rank takes part in."""
        errors = work.errors()
        failed = functools.reduce(operator.or_, (inputs for _, inputs in errors), 0)
        if not errors or self._poison(work, executable, errors, failed):
            self.run(work, executable, failed=failed)

    def _poison(self, work: Any, executable: Executable, errors: list[tuple[Any, int]], poisoned: int) -> bool:
        """Fails the outputs that depend on failed inputs; whether there is anything else to compute."""
        first = [next((error for error, inputs in errors if inputs & kind), None) for kind in executable.kinds]
        for k, kind in enumerate(executable.kind_of):
            if first[kind] is not None:
                work.poison(k, first[kind])
        return None in first or any(not check.sources & poisoned for check in executable.checks)

    def run(
        self,
        work: Any,
        executable: Executable,
        *,
        failed: int = 0,
        together: Callable[[Callable[[], tuple[list[Any], Any]]], tuple[list[Any], Any]] | None = None,
    ) -> None:
        """Runs a program, with zeros for inputs that `failed`; `together` runs its launch as all ranks do."""
        client, device = self._client, work.device
        arguments = work.inputs()
        if failed:
            self._give_zeros(work, executable, arguments, failed)
        arguments += [self._numbers.array(n, device) for n in (work.floats, work.ints) if n is not None]
        if executable.is_fresh:
            _check_arguments(client, executable, arguments)
        pending = unsettled(work.guards())
        started = time.perf_counter()
        if together is None:
            outputs, token = client.execute(executable.run, arguments, executable.handlers)
        else:
            execute = functools.partial(client.execute_together, executable.run, arguments, executable.handlers)
            outputs, token = together(execute)
        if self._memory.limit(device):
            self._memory.note_launch(device, executable.needed_bytes)
        self.track(device, executable, token, arguments, outputs)
        self._conclude(work, executable, (outputs, token), pending, failed, started)

    def conclude(self, work: Any, executable: Executable, launched: Enqueued) -> None:
        """Tells the work what came of a launch on inputs that are sound."""
        self._conclude(work, executable, launched, {}, 0, time.perf_counter())

    def repeating(
        self, steps: Sequence[Step], outputs: Sequence[int], num_arrays: int, device: int
    ) -> DirectLaunch | None:
        """What launches these steps, without the engine: see `make`. None where checks would have to be waited for."""
        if not self._client.runs_at_once and any(step.executable.checks for step in steps):
            return None
        return make(self._client, self, steps, outputs, num_arrays, is_accounted=self.is_accounted(device))

    def has_passed(self, words: Any) -> bool:
        """Whether a launch's last output says that all its checks have passed."""
        return not any(self._client.download(words).tolist())

    def _conclude(
        self,
        work: Any,
        executable: Executable,
        launched: Enqueued,
        pending: Mapping[PendingCheck, int],
        failed: int,
        started: float,
    ) -> None:
        client, device = self._client, work.device
        outputs, token = launched
        self.counters.launched.add(executable.about.tier)
        outcome = fault = None
        if executable.checks:
            outcome = CheckResults(
                client,
                outputs.pop(),
                executable.checks,
                pending,
                failed,
                lambda: work.run,
                lambda check: with_sizes(check.message, check.place, work),
            )
            self._settle(device)
            if outcome.is_known():
                fault = outcome if outcome.failed() else None
                outcome = None
            elif not work.is_subgraph:  # its checks are the region's too
                with self._lock:
                    self._outcomes[device].append(outcome)
        guards = _guards(executable, outcome, pending) if outcome or pending else []
        for observer in self.observers:
            region, ended = work.region, time.perf_counter()
            place = (region["reason"], region["line"], region["cut_at"])
            observer.launched(Launched(executable.about, device, *place, started, ended, tuple(outputs), token))
        if "launch" in self._knob("log"):
            self._log(work, executable, outputs, started)
        executable.is_fresh = False
        if fault is None:
            work.done(outputs, guards)
        else:
            self._fail_check(work, executable, fault, outputs, guards, failed)

    def _fail_check(
        self,
        work: Any,
        executable: Executable,
        outcome: CheckResults,
        outputs: list[Any],
        guards: list[PendingCheck | None],
        poisoned: int,
    ) -> None:
        """Fails a work of which a check did not pass: what eager PyTorch would have raised at its op."""
        failed = outcome.failed()
        check = first_of(failed, executable.checks)
        error = next((error for error, inputs in work.errors() if inputs & check.sources), None)
        sound = {
            k: (outputs[k], guards[k] if guards else None)
            for k, kind in enumerate(executable.kinds[number] for number in executable.kind_of)
            if not kind & (failed << len(executable.inputs) | poisoned)
        }
        self._recovery.fail_at(work, check.place, error or outcome.error_of(check), sound)

    def _give_zeros(self, work: Any, executable: Executable, arguments: list[Any], poisoned: int) -> None:
        """Gives a launch zeros for inputs that failed: nothing that is left to compute depends on them. Of inputs that
        outputs which are not computed are versions of, it gives copies: their storages get these inputs back."""
        client, device, program = self._client, work.device, work.program
        roots = roots_of(program)
        kinds = zip(program.outputs, (executable.kinds[kind] for kind in executable.kind_of), strict=True)
        kept = {roots.get(value) for value, kind in kinds if kind & poisoned}
        for i, (shape, dtype) in enumerate(executable.inputs):
            if poisoned >> i & 1:
                arguments[i] = client.upload(torch.zeros(shape, dtype=dtype), device)
            elif ~i in kept and i in program.donated:
                arguments[i] = client.upload(client.download(arguments[i]).clone(), device)

    def track(
        self, device: int, executable: Executable, token: Any, arguments: Sequence[Any], outputs: Sequence[Any]
    ) -> None:
        """Notes a launch, unless it has run, with what it holds where somebody counts that."""
        if self._client.runs_at_once:
            return
        if self._memory.limit(device):
            output = weakref.ref(outputs[0]) if outputs else lambda: None
            self._memory.track(device, PendingLaunch(token, executable.hidden_bytes(arguments), arguments, output))
        else:
            self._memory.track(device, PendingLaunch(token, 0, (), lambda: None))

    def parts_that_fit(self, work: Any, executable: Fitted) -> Parts | None:
        """What to launch instead of what does not fit into memory; None where it does."""
        memory, device = self._memory, work.device
        limit = memory.limit(device)
        if not limit:
            return None
        needed, parts = executable.needed_bytes, executable.fitted.get(limit)
        if parts is None and needed:
            uploads = uploads_of(work)
            arguments = work.inputs()  # counted from now on, where they were on the host
            about = executable.about
            if executable.argument_bytes + needed <= limit and memory.has_room(device, needed, about.line):
                return None
            room = memory.room_for(device, arguments)
            found: Any = None
            with self.counters.bailouts.attempt("fitting", about.line):
                found = self._fitting.fit(work.program, device, room)
            if found is None:
                return None
            parts, tried = found
            if parts is None:
                program = work.program
                place = first_too_large(program, memory.free_for(device, arguments), uploads)
                op = program.ops[place]
                where = f"{full_name(op.name)} at {op.line}"
                what = f"the region recorded at {about.line} (from {where} on; its largest result: {about.largest})"
                error = torch.OutOfMemoryError(memory.explain(device, what, needed, tried))
                if uploads:  # what comes before that op does without them
                    arguments.clear()
                    work.drop_uploads(uploads)
                raise OpFailedError(error, place)
            executable.fitted[limit] = parts
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

    def _log(self, work: Any, executable: Executable, outputs: list[Any], started: float) -> None:
        """Writes the launch's line, once it has run."""
        for output in outputs:
            self._client.wait(output)
        run_ms = (time.perf_counter() - started) * 1e3
        about, loaded, region = executable.about, executable.loaded, work.region
        found = "hit (trie)"
        inputs = len(executable.inputs) + sum(numbers is not None for numbers in (work.floats, work.ints))
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


def _guards(
    executable: Executable, outcome: CheckResults | None, pending: Mapping[PendingCheck, int]
) -> list[PendingCheck | None]:
    """A guard for each output that depends on a check which is not known to have passed."""
    own_guards: dict[
        tuple[int, tuple[PendingCheck, ...]], PendingCheck
    ] = {}  # outputs that depend on the same share one
    made: list[PendingCheck | None] = []
    is_alike = executable.has_one_own and all(inputs & executable.common for inputs in pending.values())
    for sources in executable.kinds[:1] if is_alike else executable.kinds:
        own = sources >> len(executable.inputs)
        earlier = tuple(guard for guard, inputs in pending.items() if inputs & sources)
        if own or len(earlier) > 1:
            made.append(own_guards.setdefault((own, earlier), PendingCheck(outcome if own else None, own, earlier)))
        else:
            made.append(earlier[0] if earlier else None)
    if outcome:
        outcome.guarded_by(own_guards.values())
    return made * len(executable.kind_of) if is_alike else [made[kind] for kind in executable.kind_of]


class _Caught:
    """Gives the work what is raised, Ctrl-C too, explained for an executable: whoever reads an output raises it.

    `settle` computes what is there nevertheless.
    """

    __slots__ = ("_executable", "_settle", "_work")

    def __init__(self, work: Any, settle: Settle | None = None, executable: Any = None) -> None:
        self._work = work
        self._settle = settle
        self._executable = executable

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is not None:
            place = None
            if isinstance(error, OpFailedError):
                place, error = error.place, error.error
            _forget_frames(error)
            is_whole = self._executable is not None
            shown = _not_launched(error, self._executable.about, self._work.run) if is_whole else error
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


def _not_launched(error: BaseException, about: About, run: str) -> BaseException:
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, Exception):
        return error
    return region_error(error, about, run, "launched")
