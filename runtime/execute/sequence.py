"""Sequences: compute a work's outputs by several programs in turn.

What lies between two programs lives until its last use, no longer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

import torch

from torchtpu.runtime._C import DirectLaunch
from torchtpu.runtime.ir.program import Base, Program
from torchtpu.runtime.ir.values import bases_of, roots_of, size_of
from torchtpu.runtime.padding.arrays import PaddedArray, uploads_of
from torchtpu.runtime.partition.pieces import Piece
from torchtpu.runtime.partition.split import Part

from .direct import ALWAYS, Step, StepNumbers

Restored = tuple[Base, Any, Any]


class Sequence:
    """Parts of one program; `executable_of` gives what each is launched with, asked at each launch."""

    meets_others = False
    takes_padding = False

    def __init__(self, program: Program, parts: Items[Part | Piece], executable_of: Callable[[int], Any]) -> None:
        self.parts = parts
        self._executable_of = executable_of
        self.fitted: dict[int, Sequence] = {}  # what is launched instead, by memory limit
        self.argument_bytes = sum(map(size_of, program.inputs))
        self._num_inputs, self._donated = len(program.inputs), program.donated
        self._outputs = program.outputs
        last = {value: number for number, part in enumerate(parts) for value in (*part.inputs, *part.outputs)}
        kept = set(program.outputs)
        self._dying: list[list[int]] = [[] for _ in parts]
        for value, number in last.items():
            if value not in kept:
                self._dying[number].append(value)
        self._floats = [_numbers(part.floats) for part in parts]
        self._ints = [_numbers(part.ints) for part in parts]
        self._offsets = [_numbers(part.offsets) for part in parts]
        self._direct: DirectLaunch | None = None

    @functools.cached_property
    def needed_bytes(self) -> int:
        """What the launches take together beyond the arguments; 0 where a part is no program."""
        sizes = {~i: 0 for i in range(self._num_inputs) if i not in self._donated}
        held = peak = 0
        for number, part in enumerate(self.parts):
            executable = self._executable_of(number)
            if not hasattr(executable, "needed_bytes"):
                return 0
            bases = bases_of(part.program)
            for value, base in zip(part.inputs, part.program.inputs, strict=True):
                sizes.setdefault(value, size_of(base))
            made = {v: size_of(bases[own]) for v, own in zip(part.outputs, part.program.outputs, strict=True)}
            sizes.update(made)
            peak = max(peak, held + executable.needed_bytes)
            held += sum(made.values()) - sum(sizes[value] for value in self._dying[number])
        return peak

    @functools.cached_property
    def about(self) -> Any:
        """What is said of the part that takes most."""
        return max((self._executable_of(i) for i in range(len(self.parts))), key=lambda e: e.needed_bytes).about

    def launch(self, work: Any, context: Any) -> None:
        """Runs the parts, or others that fit into memory; `context` is that of an executable's launch."""
        with context.recovering(work, self):
            fitting = context.parts_that_fit(work, self)
            (self if fitting is None else fitting).run(work, context.launch, context)

    def direct(self, work: Any, context: Any) -> DirectLaunch | None:
        """What repeats a launch (see `DirectlyLaunchable`); None where a part is no plain program, or which one it is
        hangs on a launch's numbers."""
        if self._direct is None or self._direct.is_accounted != context.is_accounted(work.device):
            executables = [self._executable_of(number) for number in range(len(self.parts))]
            if not all(hasattr(executable, "direct") for executable in executables):
                return None
            if any(e.offsets and part.ints for e, part in zip(executables, self.parts, strict=True)):
                return None
            self._direct = context.repeating(*self._steps(executables), work.device)
        if self._direct is not None:
            self._direct.grant(ALWAYS)
        return self._direct

    @functools.cached_property
    def _places(self) -> dict[int, int]:
        """Where among the arrays of a direct launch each value is."""
        inputs = [~i for i in range(self._num_inputs)]
        made = dict.fromkeys(value for part in self.parts for value in part.outputs)
        return {value: place for place, value in enumerate([*inputs, *made])}

    def _steps(self, executables: list[Any]) -> tuple[list[Step], list[int], int]:
        places = self._places
        steps = []
        for number, (part, executable) in enumerate(zip(self.parts, executables, strict=True)):
            inputs, outputs, dying = (
                [places[value] for value in values] for values in (part.inputs, part.outputs, self._dying[number])
            )
            floats = StepNumbers(part.floats) if part.floats else None
            ints = StepNumbers(part.ints, part.offsets) if part.ints or part.offsets else None
            program = executable.at(list(part.offsets)) if executable.offsets else executable
            steps.append(Step(program, inputs, outputs, dying, floats, ints))
        return steps, [places[value] for value in self._outputs], len(places)

    def resume(self, work: Any, context: Any, stopped: Any) -> None:
        """Goes on with a direct launch; tells the work what came of it."""
        with context.recovering(work, self):
            state = self.begin(work)
            for value, place in self._places.items():
                array = stopped.arrays[place]
                if array is not None:
                    state.arrays[value] = array
            part = self.part_work(state, stopped.step)
            executable, offsets = part.executable, self.parts[stopped.step].offsets
            (executable.at(list(offsets)) if executable.offsets else executable).resume(part, context, stopped)
            self.forget(state, stopped.step)
            self.go_on(state, stopped.step + 1, context.launch)

    def run(
        self, work: Any, launch: Callable[[Any], None], context: Any = None, blamed: Exception | None = None
    ) -> None:
        """Launches the parts in order; tells the work what came of it. A part that fails does so with the error that is
        `blamed`, where there is one. With a `context` what nothing is asked of but its outputs is launched directly."""
        direct = DirectLauncher(work, context) if context is not None and context.may_launch_directly(work) else None
        self.go_on(
            self.begin(work, blamed, is_direct=direct is not None and not direct.is_accounted), 0, launch, direct
        )

    def begin(self, work: Any, blamed: Exception | None = None, *, is_direct: bool = True) -> State:
        """What is known before the first part."""
        return State(work, blamed, is_direct=is_direct)

    def go_on(
        self, state: State, first: int, launch: Callable[[Any], None], direct: DirectLauncher | None = None
    ) -> None:
        """Launches the parts from the first of these on; tells the work what came of all."""
        for number in range(first, len(self.parts)):
            executable = self._executable_of(number)
            if direct is not None and direct.may_launch(state, self.parts[number], executable):
                try:
                    direct.launch(state, self.parts[number], executable)
                except BaseException:
                    with direct.context.recovering(self.part_work(state, number), executable):
                        raise
            else:
                launch(self.part_work(state, number))
            self.forget(state, number)
        self.finish(state)

    def part_work(self, state: State, number: int) -> PartWork:
        """What a part is launched with."""
        part, floats, ints = self.parts[number], state.work.floats, state.work.ints
        own_floats = floats.index_select(0, self._floats[number]) if part.floats else None
        own_ints = self._offsets[number] if part.offsets else None
        if part.ints:
            taken = ints.index_select(0, self._ints[number])
            own_ints = taken if own_ints is None else torch.cat([taken, own_ints])
        return PartWork(state, part, self._executable_of(number), own_floats, own_ints)

    def forget(self, state: State, number: int) -> None:
        """Lets go of what no part after this one takes."""
        if state.stopped_by is None:  # else a storage may get back what it held
            for value in self._dying[number]:
                state.forget(value)

    def finish(self, state: State) -> None:
        """Tells the work what came of it."""
        work = state.work
        for k, value in enumerate(self._outputs):
            if value in state.errors:
                if value in state.restored:
                    work.restore(k, *state.restored[value])
                if state.errors[value] is not state.stopped_by:  # else it fails with the work: who sees it, sees both
                    work.poison(k, state.errors[value])
            elif state.stopped_by is not None:
                work.keep(k, state.arrays[value], state.guards.get(value))
        if state.stopped_by is not None:
            work.failed(state.stopped_by)
        else:
            guards = [state.guards.get(value) for value in self._outputs] if state.guards else []
            work.done([state.arrays.get(value) for value in self._outputs], guards)
        state.arrays.clear()  # the outcome of a check may hold the state


@functools.lru_cache(maxsize=1 << 12)
def _numbers(given: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(given, dtype=torch.int64)


class State:
    """The values between the parts of a work: their arrays, their guards, what went wrong with them, and what is
    `restored` to their storages then: a layout, an array and its guard.

    A part that failed itself, not for its inputs, sets `stopped_by`: the parts after it are not launched.
    """

    def __init__(self, work: Any, blamed: Exception | None = None, *, is_direct: bool = False) -> None:
        self.work = work
        self.blamed = blamed
        self.stopped_by: BaseException | None = None
        self.restored: dict[int, Restored] = {}
        self.device: int = work.device
        self.region: Any = work.region
        self.is_subgraph: bool = work.is_subgraph
        # Inputs that lie on the host, and take memory of the device from the first part on that reads them.
        self.uploads = set() if is_direct else {~i for i in uploads_of(work)}
        given = work.inputs(False) if self.uploads else work.inputs()
        self.arrays = {~i: array for i, array in enumerate(given)}
        self.guards = {~i: guard for guard, inputs in work.guards() for i in _bits(inputs)}
        self.errors = {~i: error for error, inputs in work.errors() for i in _bits(inputs)}

    @property
    def is_sound(self) -> bool:
        """Whether nothing has failed, or may turn out to have."""
        return not (self.errors or self.guards) and self.stopped_by is None

    def upload(self, values: Iterable[int]) -> None:
        """Puts those of these values on the device that lie on the host."""
        for value in self.uploads.intersection(values):
            self.arrays[value] = self.work.input(~value)
            self.uploads.discard(value)

    def drop_uploads(self, values: Items[int]) -> None:
        """Undoes that."""
        self.work.drop_uploads([~value for value in values])
        self.uploads.update(values)
        self.arrays.update(dict.fromkeys(values))

    def forget(self, value: int) -> None:
        """Lets go of a value."""
        self.arrays.pop(value, None)
        self.guards.pop(value, None)
        self.errors.pop(value, None)


class DirectLauncher:
    """Launches parts of which nothing is asked but their outputs; raises what a launch raises."""

    def __init__(self, work: Any, context: Any) -> None:
        self.context = context
        self.is_accounted = context.is_accounted(work.device)
        self._floats: Items[float] = work.floats.tolist() if work.floats is not None else ()
        self._ints: Items[int] = work.ints.tolist() if work.ints is not None else ()

    def may_launch(self, state: State, part: Part | Piece, executable: Any) -> bool:
        """Whether a part takes what the state has as it is, and nothing has failed."""
        if not getattr(executable, "is_plain", False) or not state.is_sound:
            return False
        if not state.uploads.isdisjoint(part.inputs):
            return False
        if PaddedArray.exist and any(isinstance(state.arrays[value], PaddedArray) for value in part.inputs):
            return False
        return not self.is_accounted or self.context.admit(state.device, executable.needed_bytes)

    def launch(self, state: State, part: Part | Piece, executable: Any) -> None:
        """Launches one, with what the state has, and gives it the outputs."""
        arrays = state.arrays
        made = self.context.launch_directly(
            executable,
            [arrays[value] for value in part.inputs],
            [self._floats[place] for place in part.floats],
            [*[self._ints[place] for place in part.ints], *part.offsets],
            state.device,
        )
        arrays.update(zip(part.outputs, made, strict=True))


class Unbuilt(NamedTuple):
    """Stands for the executable of a part that is not compiled."""

    error: Exception


class PartWork:
    """What a launch asks of a work, for one part of it."""

    __slots__ = (
        "_part",
        "_poisoned",
        "_restored",
        "_state",
        "device",
        "executable",
        "floats",
        "ints",
        "is_subgraph",
        "region",
    )  # fmt: skip

    def __init__(
        self,
        state: State,
        part: Part | Piece,
        executable: Any,
        floats: torch.Tensor | None,
        ints: torch.Tensor | None,
    ) -> None:
        self.executable = executable
        self.device = state.device
        self.region = state.region
        self.is_subgraph = state.is_subgraph
        self.floats = floats
        self.ints = ints
        self._state = state
        self._part = part
        self._poisoned: set[int] = set()
        self._restored: dict[int, Restored] = {}

    @property
    def build_error(self) -> Exception | None:
        return self.executable.error if isinstance(self.executable, Unbuilt) else None

    @property
    def blamed(self) -> Exception | None:
        """What is raised in place of what the part fails with."""
        return self._state.blamed

    @property
    def stopped_by(self) -> BaseException | None:
        return self._state.stopped_by

    @property
    def program(self) -> Program:
        return self._part.program

    @property
    def run(self) -> str:
        run: str = self._state.work.run
        return run

    def inputs(self, with_uploads: bool = True) -> list[Any]:
        if with_uploads and self._state.uploads:
            self._state.upload(self._part.inputs)
        arrays = self._state.arrays
        return [arrays.get(value) for value in self._part.inputs]

    def input(self, place: int) -> Any:
        self._state.upload([self._part.inputs[place]])
        return self._state.arrays.get(self._part.inputs[place])

    def uploads(self) -> list[int]:
        return [i for i, value in enumerate(self._part.inputs) if value in self._state.uploads]

    def drop_uploads(self, places: Iterable[int]) -> None:
        self._state.drop_uploads([self._part.inputs[place] for place in places])

    def errors(self) -> list[tuple[BaseException, int]]:
        return self._by_input(self._state.errors)

    def guards(self) -> list[tuple[Any, int]]:
        return self._by_input(self._state.guards)

    def poison(self, output: int, error: BaseException) -> None:
        self._poisoned.add(output)
        value = self._part.outputs[output]
        self._state.errors[value] = error
        restored = self._restored.get(output) or self._before(output)
        if restored is not None:
            self._state.restored[value] = restored

    def keep(self, output: int, array: Any, guard: Any) -> None:
        self._poisoned.add(output)
        value = self._part.outputs[output]
        self._state.arrays[value] = array
        if guard is not None:
            self._state.guards[value] = guard

    def take_back(self, seed: int, offset: int) -> None:
        self._state.work.take_back(seed, offset)

    def restore(self, output: int, base: Base, array: Any, guard: Any) -> None:
        self._restored[output] = base, array, guard

    def _before(self, output: int) -> Restored | None:
        """What the storage of an output held before the part; None where that is an input of the work, which knows."""
        state, program = self._state, self._part.program
        root = roots_of(program).get(program.outputs[output])
        if root is None or root >= 0:
            return None
        value = self._part.inputs[~root]
        if value < 0 or value in state.errors:
            return state.restored.get(value)
        array = state.arrays.get(value)
        if array is None or array.is_deleted():
            return None
        return program.inputs[~root], array, state.guards.get(value)

    def done(self, arrays: list[Any], guards: list[Any]) -> None:
        state, poisoned = self._state, self._poisoned
        for k, value in enumerate(self._part.outputs):
            if k not in poisoned:
                state.arrays[value] = arrays[k]
                if guards and guards[k] is not None:
                    state.guards[value] = guards[k]

    def failed(self, error: BaseException) -> None:
        state = self._state
        if state.stopped_by is None:
            state.stopped_by = state.blamed or error
        for k in range(len(self._part.outputs)):
            if k not in self._poisoned:
                self.poison(k, state.stopped_by)

    def _by_input(self, things: dict[int, Any]) -> list[tuple[Any, int]]:
        if not things:
            return []
        found: dict[int, tuple[Any, int]] = {}
        for i, value in enumerate(self._part.inputs):
            thing = things.get(value)
            if thing is not None:
                found[id(thing)] = thing, found.get(id(thing), (thing, 0))[1] | 1 << i
        return list(found.values())


def _bits(number: int) -> list[int]:
    return [i for i in range(number.bit_length()) if number >> i & 1]
