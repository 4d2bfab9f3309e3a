"""Dry run: answers the recorder and writes a journal of programs; nothing is compiled or run.

Stands in for the engine where a program is to be collected without a device. Values are shapes without memory; a read
is answered with zeros, or refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchtpu.runtime.ir.calls import results_of
from torchtpu.runtime.ir.manifest import Journal, ProgramOutcome
from torchtpu.runtime.ir.program import Base, Program
from torchtpu.runtime.ir.scalar_lifting import IsStructural
from torchtpu.runtime.lowering.fragments import Fragments
from torchtpu.runtime.padding.layout import Layouts
from torchtpu.runtime.partition.split import split
from torchtpu.runtime.spmd.groups import ordered, split_by_group
from torchtpu.runtime.spmd.host_calls import number_of
from torchtpu.runtime.spmd.regions import Collectives, ends_around
from torchtpu.runtime.telemetry.counters import Counters

_KEPT_BYTES = 1 << 20  # an upload this small is kept: reading it back is no guess


class DryExecutable(NamedTuple):
    """What a plan is given: the arrays that its program would make, and the tickets of its collectives."""

    outputs: list[Base]
    tickets: list[Any]


class FakeValue:
    """A device array that is only described; `value` where it is known."""

    __slots__ = ("base", "value")

    def __init__(self, base: Base, value: torch.Tensor | None = None) -> None:
        self.base = base
        self.value = value


class DryRun:
    """What the recorder calls instead of an engine. With `answers` reads get zeros, without they raise; `fragments`
    makes what traces the ops of padded programs."""

    def __init__(
        self,
        journal: Journal,
        counters: Counters,
        line: Any,
        collectives: Collectives,
        is_special: IsStructural,
        fragments: Callable[[], Fragments],
        *,
        answers: bool,
    ) -> None:
        self._fragments = functools.cache(fragments)
        self._layouts = Layouts(is_special)
        self._collectives = collectives
        self.counters = counters
        self._journal = journal
        self._line = line
        self._answers = answers

    def close(self) -> bool:
        """Nothing runs here."""
        return True

    def plan(self, plan: Any) -> None:
        """Notes the plan's program; its executable is what it would return."""
        program, name = plan.program, self._collectives.op
        calls = [call for call in program.ops if call.name == name]
        homes = {self._collectives.homes(call) for call in calls}
        self.counters.regions_planned += 1
        if len(homes) > 1 and () not in homes:
            pieces = split_by_group(program, lambda op: self._collectives.homes(op) if op.name == name else None)
            for part in split(*ordered(program, pieces)):
                self._note(part.program)
        elif calls and () in homes:  # these run on the hosts, between programs
            for part in split(program, ends_around(program, name)):
                if part.program.ops[0].name != name:
                    self._note(part.program)
        else:
            for made in self._made_of(program, plan.before):
                self._note(made)
        plan.ready(DryExecutable(_outputs(program), [call.args[1] for call in calls]))

    def _made_of(self, program: Program, before: Any) -> list[Program]:
        """What an engine would make of a program: a padded one, where sizes keep changing."""
        if before is None:
            self._layouts.note(program)
            return [program]
        try:
            find = self._fragments().conditions
            return [self._layouts.pad(program, [before.program], find).program]
        except Exception:  # noqa: BLE001 -- an engine would compile it as it is, too
            self._layouts.note(program)
            return [program]

    def _note(self, program: Program) -> None:
        identity = self._journal.program(program)
        self._journal.outcome(ProgramOutcome(identity, "recorded"))

    def launch(self, work: Any) -> None:
        """Describes the program's outputs."""
        self.counters.launched.add("usual")
        dry: DryExecutable = work.executable
        if dry.tickets:
            self._collectives.launch([number_of(ticket, work) for ticket in dry.tickets], lambda: None)
        work.done([FakeValue(base) for base in dry.outputs], [])

    def upload(self, tensor: torch.Tensor, device: int) -> Any:
        """Describes the tensor; a small one is kept."""
        self.counters.uploads += 1
        base = Base(tuple(tensor.shape), tensor.dtype)
        return FakeValue(base, tensor if tensor.nbytes <= _KEPT_BYTES else None)

    def download(self, array: FakeValue) -> torch.Tensor:
        """The value where it is known, else zeros; RuntimeError where reads are refused."""
        self.counters.downloads += 1
        if array.value is not None:
            return array.value
        line = self._line()
        if not self._answers:
            raise RuntimeError(
                f"a result of the device is read at {line}, and nothing runs here (--reads=error). "
                "Let programs run on this machine's CPU with --reads=run, or answer with zeros with --reads=standin."
            )
        self._journal.guessed(line)
        return torch.zeros(array.base.shape, dtype=array.base.dtype)

    def resolve(self, guard: Any) -> None:
        """Nothing ran, so nothing failed."""

    def await_launches(self, device: int) -> None:
        """Nothing runs here."""

    def finish(self, device: int) -> None:
        """Nothing runs."""

    def waiting(self, info: str, seconds: float) -> None:
        """Nothing is waited for."""

    def waited(self) -> None:
        """Nothing was."""

    def memory_bytes(self, device: int) -> int:
        """Unknown."""
        return 0

    def device_name(self, device: int) -> str:
        """Nothing is there."""
        return "none"


def _outputs(program: Program) -> list[Base]:
    """The array of each of the program's outputs."""
    bases = {~i: base for i, base in enumerate(program.inputs)}
    for op in program.ops:
        for made in results_of(op):
            bases[made.value] = made.base
    return [bases[value] for value in program.outputs]
