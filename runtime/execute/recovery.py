"""Computes, after a failed launch, what eager PyTorch would have computed before the op that failed.

Nothing of a failed launch has run, so its inputs are as they were; where a check fails on the device, the program has
kept the storages as they were right before the op that checks. A region that failed for another reason than want of
memory is run in halves, and these in halves again: only an op that fails alone, not padded, fails. What the storages
held right before that op is computed by the ops before it; what comes after it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torchtpu.runtime.ir.calls import results_of, written
from torchtpu.runtime.ir.liveness import find_live, live_bytes, made_by
from torchtpu.runtime.ir.program import Op, Program, Random, Result, Write
from torchtpu.runtime.ir.values import bases_of, operands, rewrite, size_of
from torchtpu.runtime.lowering.fragments import Fragments
from torchtpu.runtime.padding.check import SecondLaunch
from torchtpu.runtime.partition.dead_ops import values_read
from torchtpu.runtime.partition.split import Part, split
from torchtpu.runtime.telemetry import log
from torchtpu.runtime.telemetry.counters import Counters

from .sequence import PartWork, Sequence, State, Unbuilt


class OpFailedError(Exception):
    """`error` is what is raised for the program's op number `place`."""

    def __init__(self, error: Exception, place: int) -> None:
        super().__init__(str(error))
        self.error = error
        self.place = place


class Recovery:
    """`build` gives the executables of programs on a device, `launch` runs a part of a work, and `may_run_again` says
    whether ops of a program that failed with an error may be run after all."""

    def __init__(
        self,
        fragments: Fragments,
        counters: Counters,
        build: Callable[[list[Program], int], list[Any]],
        launch: Callable[[Any], None],
        may_run_again: Callable[[Program, Exception], bool],
    ) -> None:
        self._fragments = fragments
        self._counters = counters
        self._build = build
        self._launch = launch
        self._may_run_again = may_run_again

    def settle(self, work: Any, error: Exception, place: int | None = None) -> None:
        """Tells the work what came of it after all. `place` is the op that failed, where that is known."""
        error = getattr(work, "blamed", None) or error
        try:
            if isinstance(work, SecondLaunch) or not self._may_run_again(work.program, error):
                work.failed(error)
            else:
                self._settle(work, error, place)
        except Exception as other:  # noqa: BLE001 -- the first error is raised, and everything rolled back
            log.write(f"tpu: a region that failed could not be taken apart: {other}")
            work.failed(error)

    def _settle(self, work: Any, error: Exception, place: int | None) -> None:
        program: Program = work.program
        if place is None:
            place = self._find_unlowered(program)
        if place is None and (len(program.ops) > 1 or not isinstance(work, PartWork)):
            self._run_halves(work, program, error)
        else:
            self.roll_back(work, error, place or 0)

    def _find_unlowered(self, program: Program) -> int | None:
        """The first op that has no lowering."""
        for place, op in enumerate(program.ops):
            try:
                self._fragments.find([op])
            except Exception:  # noqa: BLE001 -- the error in hand is raised
                return place
        return None

    def _run_halves(self, work: Any, program: Program, error: Exception) -> None:
        parts = split(replace(program, donated=()), [len(program.ops) // 2] if len(program.ops) > 1 else [])
        if not isinstance(work, PartWork):
            self._counters.regions_taken_apart += not work.is_subgraph
            if work.is_subgraph:
                self._counters.bailouts.note("subgraph", error.__cause__ or error, program.line)
        Sequence(program, parts, self._executable_of(parts, work.device)).run(work, self._launch, blamed=error)

    def roll_back(self, work: Any, error: BaseException, place: int) -> None:
        """Fails a work whose op number `place` failed: computes what is there before it, but for a subgraph, which
        changes no storage."""
        if work.is_subgraph:
            work.failed(error)
            return
        program: Program = work.program
        _take_back(work, place)
        kept, restored = versions_at(program, place, self._is_constant)
        wanted = sorted({*kept.values(), *restored.values()})
        if wanted:
            part = self._prefix(program, place, wanted)
            state = State(work)
            prefix = replace(part.program, outputs=part.outputs)
            self._launch(Sequence(prefix, [part], self._executable_of([part], work.device)).part_work(state, 0))
            bases = bases_of(program)
            for k, value in kept.items():
                if value in state.arrays:
                    work.keep(k, state.arrays[value], state.guards.get(value))
            for k, value in restored.items():
                if value in state.arrays:
                    work.restore(k, bases[value], state.arrays[value], state.guards.get(value))
                elif value in state.restored:
                    work.restore(k, *state.restored[value])
        work.failed(error)

    def fail_at(self, work: Any, place: int, error: BaseException, sound: Mapping[int, tuple[Any, Any]]) -> None:
        """Fails a work that has run, at its op number `place`. The outputs that are `sound`, each an array and its
        guard, are what they were meant to be, or what their storages held right before that op."""
        program: Program = work.program
        _take_back(work, place)
        bases = bases_of(program)
        changed = {made.value for op in program.ops[place:] for made in results_of(op) if _has_older(op, made)}
        for k, (array, guard) in sound.items():
            if program.outputs[k] in changed:
                work.restore(k, bases[program.outputs[k]], array, guard)
            else:
                work.keep(k, array, guard)
        work.failed(error)

    def _executable_of(self, parts: list[Part], device: int) -> Callable[[int], Any]:
        def find(number: int) -> Any:
            try:
                return self._build([parts[number].program], device)[0]
            except Exception as error:  # noqa: BLE001 -- the part fails with it
                return Unbuilt(error)

        return find

    def _prefix(self, program: Program, place: int, wanted: Iterable[int]) -> Part:
        """What computes these values, of the ops before `place` and of later ones that take no tensor."""
        before = [op for n, op in enumerate(program.ops) if n < place or (n > place and self._is_constant(op))]
        live = [before[n] for n in find_live(before, wanted, made_by, self._read)]
        ops = [rewrite(op, {value: value for value in self._read(op)}.get, lambda value: value) for op in live]
        prefix = replace(program, ops=tuple(ops), outputs=tuple(wanted), donated=())
        return split(prefix, [])[0]

    def _read(self, op: Op) -> set[int]:
        """The values that an op takes, those that it writes into included."""
        return values_read(op, *self._fragments.find([op])[0])

    def _is_constant(self, op: Op) -> bool:
        """Whether an op makes tensors of nothing, as `zeros_like` does; random numbers are made of the generator."""
        if any(isinstance(argument, Random) for argument in op.args):
            return False
        try:
            return not self._read(op)
        except Exception:  # noqa: BLE001 -- it has no lowering, which may be what failed
            return False


def _has_older(op: Op, made: Result | Write) -> bool:
    """Whether what an op makes is a later version of a storage."""
    return isinstance(made, Write) and written(op, made).value is not None


def _take_back(work: Any, place: int) -> None:
    """The random numbers of op number `place` and those after it were not drawn."""
    for op in work.program.ops[place:]:
        for argument in op.args:
            if isinstance(argument, Random):
                work.take_back(int(work.ints[argument.seed.index]), int(work.ints[argument.offset.index]))
                return


def versions_at(
    program: Program, place: int, is_constant: Callable[[Op], bool]
) -> tuple[dict[int, int], dict[int, int]]:
    """What each output is, by its number, where the program ends before op number `place`: the outputs that are there
    as they are; and of the others the versions, made in the program, that their storages hold then.

    An op after `place` counts as one before it if it `is_constant`: the program that records goes on as if all were
    well, and what it makes ready for later, as an optimizer does in its first step, stays.
    """
    maker: dict[int, int] = {}
    before: dict[int, int] = {}
    for number, op in enumerate(program.ops):
        for made in results_of(op):
            maker[made.value] = number
            old = written(op, made).value if isinstance(made, Write) else None
            if old is not None:
                before[made.value] = old
    kept: dict[int, int] = {}
    restored: dict[int, int] = {}
    for k, output in enumerate(program.outputs):
        value = output
        while value in before and maker[value] >= place:
            value = before[value]
        if value < 0:
            continue
        number = maker[value]
        if number < place or (number > place and is_constant(program.ops[number])):
            (kept if value == output else restored)[k] = value
    return kept, restored


def first_too_large(program: Program, room: int, uploads: Iterable[int] = ()) -> int:
    """The first op that eager PyTorch could not run in so many bytes, inputs included; else the one that takes most.
    The inputs at the places `uploads` take memory from the first op on that reads them."""
    held = [sum(map(size_of, program.inputs)), *live_bytes(program)]
    for place in uploads:
        readers = (n for n, op in enumerate(program.ops) if any(o.value == ~place for o in operands(op)))
        for n in range(next(readers, len(held))):
            held[n] -= size_of(program.inputs[place])
    needed = [before + _made_bytes(op) for before, op in zip(held, program.ops, strict=False)]
    return next((place for place, n in enumerate(needed) if n > room), needed.index(max(needed)))


def _made_bytes(op: Op) -> int:
    """What an op takes beyond what is there: a write takes nothing where something was written before."""
    return sum(
        size_of(made.base) for made in results_of(op) if not isinstance(made, Write) or written(op, made).value is None
    )
