"""Builds what a plan launches for a program with collectives."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torchtpu.compiler_cache import Note
from torchtpu.runtime.compile.builder import Builder, about_of
from torchtpu.runtime.compile.compiler import Compiler
from torchtpu.runtime.compile.plan_cache import Plans
from torchtpu.runtime.device.client import Client
from torchtpu.runtime.device.process_group import Homes
from torchtpu.runtime.execute.executable import Executable
from torchtpu.runtime.execute.sequence import Sequence as Parts
from torchtpu.runtime.ir.program import Op, Program
from torchtpu.runtime.ir.scalar_lifting import IsStructural
from torchtpu.runtime.partition.split import split
from torchtpu.runtime.telemetry.observers import Observer

from .groups import MultiGroupRegion
from .host_calls import HostCall
from .regions import Collectives, LoweredVariant, SpmdRegion, ends_around


class SpmdBuilder:
    """`collectives` is the op that ranks run together, `is_structural` says which numbers change what an op means;
    `builder` makes the executable of a program for one device."""

    def __init__(
        self,
        client: Client,
        plans: Plans,
        compiler: Compiler,
        collectives: Collectives,
        is_structural: IsStructural,
        builder: Builder,
        observers: Sequence[Observer],
    ) -> None:
        self._client = client
        self._plans = plans
        self._compiler = compiler
        self._collectives = collectives
        self._is_structural = is_structural
        self._builder = builder
        self._observers = observers

    def concern(self, program: Program) -> bool:
        """Whether the program has collectives."""
        return any(op.name == self._collectives.op for op in program.ops)

    def executable(self, program: Program, device: int) -> SpmdRegion | MultiGroupRegion | HostCall | None:
        """What runs a program with collectives, as a whole where the ranks agree, else in parts; None without any."""
        collectives = self._collectives
        if not self.concern(program):
            return None
        found = {collectives.homes(op) for op in program.ops if op.name == collectives.op}
        if len(found) > 1 and () not in found:
            region_of = functools.partial(self._region, device=device, may_stop=False)
            run_alone = functools.partial(self._alone, device=device)
            return MultiGroupRegion(program, collectives.op, self.group_of, region_of, run_alone)
        if () in found and len(program.ops) == 1:
            return self._call(program, device)
        return self._region(program, device, may_stop=True)

    def group_of(self, op: Op) -> Homes | None:
        """The devices that launch an op together, where it is a collective."""
        return self._collectives.homes(op) if op.name == self._collectives.op else None

    def _region(self, program: Program, device: int, *, may_stop: bool) -> SpmdRegion:
        collectives = self._collectives
        found = {homes for op in program.ops if (homes := self.group_of(op)) is not None}
        homes = found.pop() if len(found) == 1 else ()
        make_variant = functools.partial(self._variant, device, homes) if homes else None

        def build(part: Program) -> SpmdRegion | Executable:
            if self.concern(part):
                return self._region(part, device, may_stop=True)
            return self._builder.executable_of(part, device)

        return SpmdRegion(
            program,
            collectives,
            self._is_structural,
            make_variant,
            build,
            self._parts(program, device),
            may_stop=may_stop,
        )

    def _call(self, program: Program, device: int) -> HostCall:
        return HostCall(self._client, program, device, self._collectives.perform, self._collectives.skip)

    def _parts(self, program: Program, device: int) -> Parts:
        parts = split(program, ends_around(program, self._collectives.op))

        @functools.cache
        def executable_of(number: int) -> Any:
            return self._alone(parts[number].program, device)

        return Parts(program, parts, executable_of)

    def _alone(self, program: Program, device: int) -> Any:
        is_call = program.ops[0].name == self._collectives.op
        return self._call(program, device) if is_call else self._builder.executable_of(program, device)

    def _variant(self, device: int, homes: Homes, program: Program, is_flat: bool) -> LoweredVariant:
        plan = self._plans.find(program, is_flat=is_flat, homes=homes)
        about = about_of(program, plan)

        def build() -> Executable:
            note: Note = {"line": program.line, "ops": len(program.ops)}
            flight = self._compiler.submit(plan, device, note)
            for observer in self._observers:
                observer.planned(program, about, flight)
            return Executable(self._client, plan, flight.result(), device, about)

        return LoweredVariant(about.identity, plan.offsets, build)
