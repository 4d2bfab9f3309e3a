"""Builds executables from programs: lowers them here and compiles them in the compiler's threads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple

from torchtpu.compiler_cache import Note
from torchtpu.runtime.device.client import Client
from torchtpu.runtime.device.loaded import About, Loaded, Tier
from torchtpu.runtime.device.sizes import show_bytes
from torchtpu.runtime.execute.executable import Executable
from torchtpu.runtime.ir.calls import full_name, results_of
from torchtpu.runtime.ir.manifest import Journal, ProgramOutcome
from torchtpu.runtime.ir.program import Program
from torchtpu.runtime.padding.arrays import Copies, PaddedExecutable
from torchtpu.runtime.padding.layout import PaddedProgram
from torchtpu.runtime.telemetry import log
from torchtpu.runtime.telemetry.counters import Counters
from torchtpu.runtime.telemetry.observers import Observer

from .compiler import Compiler
from .plan_cache import Plan, Plans


class Build(NamedTuple):
    """A program that is being compiled."""

    program: Program
    plan: Plan
    about: About
    flight: Future[Loaded]


class Builder:
    """A `journal` and `observers` hear of every program."""

    def __init__(
        self,
        client: Client,
        plans: Plans,
        compiler: Compiler,
        copies: Copies,
        counters: Counters,
        knob: Callable[[str], Any],
        journal: Journal | None,
        observers: Sequence[Observer],
    ) -> None:
        self._client = client
        self._plans = plans
        self._compiler = compiler
        self._copies = copies
        self._counters = counters
        self._knob = knob
        self._journal = journal
        self._observers = observers

    def find(self, program: Program, *, is_flat: bool = False) -> Plan:
        """The program's plan; raises what lowering raises."""
        started = time.perf_counter()
        plan = self._plans.find(program, is_flat=is_flat)
        self._counters.lower_ms += (time.perf_counter() - started) * 1e3
        if "stablehlo" in self._knob("log"):
            log.write(plan.text())
        return plan

    def submit(
        self,
        program: Program,
        plan: Plan,
        device: int,
        *,
        is_flat: bool = False,
        wisher: object = None,
        tier: Tier = "usual",
    ) -> Build:
        """Has a program compiled that has this plan; at leisure where there is a `wisher`."""
        about = about_of(program, plan, tier)
        note: Note = {"line": program.line, "ops": len(program.ops), "tier": tier}
        flight = self._compiler.submit(plan, device, note, wisher=wisher)
        if self._journal is not None and not plan.options:
            _keep_journal(self._journal, program, is_flat, plan.key.digest, flight)
        for observer in self._observers:
            observer.planned(program, about, flight)
        return Build(program, plan, about, flight)

    def executable(self, build: Build, device: int) -> Executable:
        """What was submitted, once it is compiled; raises why it is not."""

        def make_flat() -> Executable:
            self._counters.offset_variants += 1
            plan = self._plans.under(self.find(build.program, is_flat=True), build.plan.options)
            flat = self.submit(build.program, plan, device, is_flat=True, tier=build.about.tier)
            return Executable(self._client, plan, flat.flight.result(), device, flat.about)

        _, plan, about, flight = build
        return Executable(self._client, plan, flight.result(), device, about, make_flat if plan.offsets else None)

    def padded(self, padded: PaddedProgram, executable: Executable) -> PaddedExecutable:
        """What launches a padded program, which `executable` runs, as it was recorded."""
        return PaddedExecutable(self._copies, padded, executable, self._exact)

    def _exact(self, program: Program, device: int) -> Executable:
        """What runs a program that is padded elsewhere."""
        self._counters.offset_variants += 1
        return self.executable_of(program, device)

    def executable_of(self, program: Program, device: int) -> Executable:
        """A program's executable; waits for it."""
        return self.executables([program], device)[0]

    def executables(self, programs: Sequence[Program], device: int) -> list[Executable]:
        """The executables of programs that are compiled together; waits for them."""
        builds = [self.submit(program, self.find(program), device) for program in programs]
        return [self.executable(build, device) for build in builds]


def about_of(program: Program, plan: Plan, tier: Tier = "usual") -> About:
    """What is said of a program."""
    lines = tuple(dict.fromkeys(op.line for op in program.ops))
    counts = len(program.ops), len(program.donated)
    return About(plan.key.digest, program.line, lines, *counts, _largest(program), tier)


def _largest(program: Program) -> str:
    """The largest result of the program, its op and its line."""
    made = [(math.prod(r.sizes) * r.dtype.itemsize, r, op) for op in program.ops for r in results_of(op)]
    if not made:
        return "none"
    nbytes, result, op = max(made, key=lambda m: m[0])
    shape = f"{str(result.dtype).removeprefix('torch.')}{list(result.sizes)}"
    return f"{shape}, {show_bytes(nbytes)}, of {full_name(op.name)} at {op.line}"


def _keep_journal(journal: Journal, program: Program, is_flat: bool, digest: str, flight: Future[Loaded]) -> None:
    identity = journal.program(program, is_flat=is_flat)

    def note(done: Future[Loaded]) -> None:
        error = CancelledError("the engine was closed") if done.cancelled() else done.exception()
        if error is not None:
            journal.outcome(ProgramOutcome(identity, "failed", digest, error=f"{type(error).__name__}: {error}"))
        else:
            loaded = done.result()
            outcome = "hit" if loaded.source == "disk" else "compiled"
            journal.outcome(ProgramOutcome(identity, outcome, digest, loaded.milliseconds))

    flight.add_done_callback(note)
