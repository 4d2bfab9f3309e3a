"""Executables: what a plan is given, and what a launch asks of them and they of it.

One is a loaded program. The others are made of executables, which they launch in turn, one of several, or together with
the other ranks; who launches one knows of none what it is made of.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torchtpu.runtime._C import DirectLaunch
from torchtpu.runtime.device.client import Aval, Client
from torchtpu.runtime.device.loaded import About, Loaded
from torchtpu.runtime.device.sizes import nbytes_of
from torchtpu.runtime.ir.strided_access import Digit, fits
from torchtpu.runtime.lowering.emit import Check, failed_aval
from torchtpu.runtime.telemetry.counters import Counters
from torchtpu.runtime.telemetry.observers import Observer

from .direct import ALWAYS, Step, StepNumbers
from .sequence import Sequence as Parts

Enqueued = tuple[list[Any], Any]  # the arrays of a launch, and what is waited for


class Launchable(Protocol):
    """What every executable does.

    One that `meets_others` is launched even where the work was stopped, for ranks or hosts that wait for it; one that
    `takes_padding` is given padded arrays as they are.
    """

    @property
    def meets_others(self) -> bool: ...
    @property
    def takes_padding(self) -> bool: ...
    def launch(self, work: Any, context: LaunchContext) -> None:
        """Enqueues what computes the work's outputs; tells the work what came of it and never raises."""


class DirectlyLaunchable(Launchable, Protocol):
    """An executable whose next launches may do what the last one did, without it."""

    def direct(self, work: Any, context: LaunchContext) -> DirectLaunch | None:
        """What does that; None where this launch is not like the next one. It has been launched before."""

    def resume(self, work: Any, context: LaunchContext, stopped: Stopped) -> None:
        """Goes on with a launch that was begun so; tells the work what came of it and never raises."""


class Stopped(NamedTuple):
    """A direct launch that has come to this step: the arrays made so far, inputs first, and why the step's program was
    not launched, or what its launch returned, where a check has failed."""

    step: int
    arrays: list[Any]
    error: BaseException | None
    launched: Enqueued | None


class Fitted(Protocol):
    """An executable that may be launched in parts, where memory is limited: `fitted` are those known, by limit."""

    fitted: dict[int, Parts]

    @property
    def about(self) -> About: ...
    @property
    def argument_bytes(self) -> int: ...
    @property
    def needed_bytes(self) -> int: ...


class LaunchContext(Protocol):
    """What a launch goes through."""

    counters: Counters
    observers: Sequence[Observer]

    def launch(self, work: Any) -> None:
        """Launches the executable of a work."""

    def catching(self, work: Any) -> AbstractContextManager[None, bool]:
        """Within it the work is given what is raised."""

    def recovering(self, work: Any, executable: Any = None) -> AbstractContextManager[None, bool]:
        """Within it the work is given what is raised, explained for the executable, once what eager PyTorch would have
        computed before it is there."""

    def check_padding(self, work: Any) -> None:
        """Launches a padded program with another surplus, where that is asked for."""

    def parts_that_fit(self, work: Any, executable: Fitted) -> Parts | None:
        """What to launch instead of what does not fit into memory; None where it does."""

    def may_launch_directly(self, work: Any) -> bool:
        """Whether nobody but `admit` hears of the work's launches."""

    def is_accounted(self, device: int) -> bool:
        """Whether it hears of each."""

    def admit(self, device: int, nbytes: int) -> bool:
        """Whether a launch that takes so many bytes surely has room; it has taken them then."""

    def launch_directly(
        self, executable: Executable, arrays: list[Any], floats: list[float], ints: list[int], device: int
    ) -> list[Any]:
        """The outputs of a plain program whose inputs are all there, and that was admitted; raises what the launch
        raises."""

    def run_alone(self, work: Any, executable: Executable) -> None:
        """Runs what does not depend on failed inputs of a program that no other rank takes part in."""

    def run(
        self,
        work: Any,
        executable: Executable,
        *,
        failed: int = 0,
        together: Callable[[Callable[[], Enqueued]], Enqueued] | None = None,
    ) -> None:
        """Runs a program, with zeros for inputs that `failed`; `together` runs its launch as all ranks do."""

    def conclude(self, work: Any, executable: Executable, launched: Enqueued) -> None:
        """Tells the work what came of a launch on inputs that are sound."""

    def repeating(
        self, steps: Sequence[Step], outputs: Sequence[int], num_arrays: int, device: int
    ) -> DirectLaunch | None:
        """What launches these steps, without the engine: `outputs` are the places of the work's own arrays. None where
        that is not possible."""

    def wait_until_idle(self, device: int) -> None:
        """Waits until everything launched so far has run, whatever came of it."""


class Lowered(Protocol):
    """What an executable needs to know of how its program was lowered."""

    @property
    def inputs(self) -> tuple[Aval, ...]: ...
    @property
    def outputs(self) -> tuple[Aval, ...]: ...
    @property
    def checks(self) -> tuple[Check, ...]: ...
    @property
    def sources(self) -> tuple[int, ...]: ...
    @property
    def offsets(self) -> Mapping[int, frozenset[Digit]]: ...


class Executable:
    """A loaded program with all that a launch needs of it."""

    __slots__ = (
        "__weakref__", "_direct", "_flat", "_hidden_bytes", "_make_flat", "about", "checks", "common", "fitted",
        "handlers", "has_one_own", "inputs", "is_fresh", "kind_of", "kinds", "loaded", "offsets", "run",
    )  # fmt: skip

    meets_others = False
    takes_padding = False

    def __init__(
        self,
        client: Client,
        plan: Lowered,
        loaded: Loaded,
        device: int,
        about: About,
        make_flat: Callable[[], Executable] | None = None,
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
        self.fitted: dict[int, Parts] = {}  # what is launched instead, by memory limit
        self._make_flat = make_flat
        self._flat: Executable | None = None
        self._direct: DirectLaunch | None = None
        self._hidden_bytes = -1  # unknown

    def at(self, ints: list[int]) -> Executable:
        """The program for these run-time ints: this one, or the one that takes nothing for granted of offsets."""
        if fits(self.offsets, ints):
            return self
        if self._flat is None:
            assert self._make_flat is not None, "nothing is taken for granted of this program's offsets"
            self._flat = self._make_flat()
        return self._flat

    def launch(self, work: Any, context: LaunchContext) -> None:
        """Runs the program, or the parts of it that fit into memory."""
        with context.recovering(work, self):
            parts = context.parts_that_fit(work, self)
            if parts is None:
                context.run_alone(work, self.at(work.ints.tolist()) if self.offsets else self)
            else:
                parts.run(work, context.launch)

    def direct(self, work: Any, context: LaunchContext) -> DirectLaunch | None:
        if self.offsets:  # which program it is hangs on the launch's numbers
            return None
        if self._direct is None or self._direct.is_accounted != context.is_accounted(work.device):
            arrays = range(len(self.inputs) + len(self.kind_of))
            made = arrays[len(self.inputs) :]
            floats, ints = (None if numbers is None else StepNumbers() for numbers in (work.floats, work.ints))
            step = Step(self, arrays[: len(self.inputs)], made, (), floats, ints)
            self._direct = context.repeating([step], made, len(arrays), work.device)
        if self._direct is not None:
            self._direct.grant(ALWAYS)
        return self._direct

    def resume(self, work: Any, context: LaunchContext, stopped: Stopped) -> None:
        with context.recovering(work, self):
            if stopped.error is not None:
                raise stopped.error
            assert stopped.launched is not None
            context.conclude(work, self, stopped.launched)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is asked of a launch but its outputs, and there has been one."""
        return not self.checks and not self.is_fresh

    @property
    def argument_bytes(self) -> int:
        """What a launch is given."""
        return self.loaded.argument_bytes

    @property
    def needed_bytes(self) -> int:
        """What a launch takes beyond its arguments."""
        return self.loaded.output_bytes - self.loaded.aliased_bytes + self.loaded.temporary_bytes

    def hidden_bytes(self, arguments: Sequence[Any]) -> int:
        """What a launch takes beside arguments and outputs: temporaries, and donated memory that no output reuses. Once
        one has been given these arguments, that is known of all."""
        if self._hidden_bytes < 0:
            donated = sum(nbytes_of(argument) for argument in arguments if argument.is_deleted())
            self._hidden_bytes = self.loaded.temporary_bytes + max(0, donated - self.loaded.aliased_bytes)
        return self._hidden_bytes
