"""The stock of pieces: executables for parts of regions, of which equal parts share a program.

A piece is lowered and compiled for the region that first has it. What names source lines, for errors and reports, is
each region's own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from torchtpu.runtime.execute.executable import Executable
from torchtpu.runtime.ir.program import Program
from torchtpu.runtime.partition.pieces import identity
from torchtpu.runtime.partition.split import Part

from .builder import Build, Builder, about_of
from .compiler import Compiler
from .plan_cache import Plan, Plans
from .tiers import FirstTier

_MOST_PLACES = 1 << 14  # source lines that are remembered


class Piece(NamedTuple):
    """A part of a region: the identity that it shares with others, and their plan."""

    part: Part
    identity: tuple[Any, ...]
    plan: Plan


class Stock:
    """What is known of pieces in this process, at most `capacity` of them; none where there is no `first` tier."""

    def __init__(
        self, builder: Builder, plans: Plans, compiler: Compiler, first: FirstTier | None, capacity: Callable[[], int]
    ) -> None:
        self._builder = builder
        self._plans = plans
        self._compiler = compiler
        self._first = first
        self._capacity = capacity
        self._lock = threading.Lock()  # guards what follows
        self._known: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()
        self._programs: OrderedDict[tuple[Any, ...], Program] = OrderedDict()  # those with their lines
        self._undivided: OrderedDict[str, None] = OrderedDict()  # keys of programs
        self._visits: dict[str, int] = {}  # regions of one line that were new
        self._executables: WeakValueDictionary[tuple[Any, ...], Executable] = WeakValueDictionary()

    def visits(self, line: str) -> int:
        """How many new regions have ended on this line."""
        with self._lock:
            return self._visits.get(line, 0)

    def visit(self, line: str) -> int:
        """Counts one more."""
        with self._lock:
            if len(self._visits) >= _MOST_PLACES:
                self._visits.clear()
            self._visits[line] = self._visits.get(line, 0) + 1
            return self._visits[line]

    def missing_undivided(self, found: Sequence[tuple[Program, Plan]]) -> int:
        """How many ops the programs of a region have that no region had before, in this process or in the store."""
        firsts = [(program, self._under_first(plan)) for program, plan in found]
        with self._lock:
            new = [(program, plan) for program, plan in firsts if plan.key.digest not in self._undivided]
        return sum(len(program.ops) for program, plan in new if not self._compiler.is_stored(plan))

    def keep_undivided(self, found: Sequence[tuple[Program, Plan]]) -> None:
        """Notes that a region is made of these."""
        with self._lock:
            for _, plan in found:
                digest = self._under_first(plan).key.digest
                self._undivided[digest] = None
                self._undivided.move_to_end(digest)
            while len(self._undivided) > self._capacity():
                self._undivided.popitem(last=False)

    def missing(self, parts: Sequence[Part]) -> int:
        """How many ops the different pieces among these have that no region of this process had before."""
        with self._lock:
            new = {identity(part.program): part.program for part in parts}
            new = {key: program for key, program in new.items() if key not in self._known}
        return sum(len(program.ops) for program in new.values())

    def find(self, parts: Sequence[Part]) -> list[Piece]:
        """The parts with their plans; raises what lowering raises."""
        found = []
        for part in parts:
            key = identity(part.program)
            with self._lock:
                plan = self._known.get(key)
                if plan is not None:
                    self._known.move_to_end(key)
                part = replace(part, program=self._programs.setdefault((key, lines_of(part.program)), part.program))
                while len(self._programs) > 4 * self._capacity():
                    self._programs.popitem(last=False)
            if plan is None:
                plan = self._builder.find(part.program)
                if self._first is not None and not self._first.is_large(part.program):
                    plan = self._under_first(plan)
                with self._lock:
                    self._known[key] = plan
                    while len(self._known) > self._capacity():
                        self._known.popitem(last=False)
            found.append(Piece(part, key, plan))
        return found

    def _under_first(self, plan: Plan) -> Plan:
        return self._plans.under(plan, self._first.options) if self._first else plan

    def has(self, piece: Piece, device: int) -> bool:
        """Whether a piece's program is there without being compiled."""
        return self._compiler.has(piece.plan, device)

    def submit(self, pieces: Sequence[Piece], device: int) -> dict[tuple[Any, ...], Build]:
        """Has the different programs of these pieces compiled, the smallest first."""
        different = {piece.identity: piece for piece in pieces}
        return {
            key: self._builder.submit(piece.part.program, piece.plan, device)
            for key, piece in sorted(different.items(), key=lambda entry: len(entry[1].part.program.ops))
        }

    def executable(self, piece: Piece, build: Build, device: int) -> Executable:
        """What launches a piece where it stands, once its program is compiled; raises why it is not."""
        program = piece.part.program
        key = piece.identity, device, lines_of(program)
        known = self._executables.get(key)
        if known is None or known.loaded is not build.flight.result():
            plan = replace(
                piece.plan, checks=tuple(replace(c, line=_line(program, c.place)) for c in piece.plan.checks)
            )
            own = Build(program, plan, about_of(program, plan), build.flight)
            known = self._executables[key] = self._builder.executable(own, device)
        return known


def lines_of(program: Program) -> tuple[str, ...]:
    """What equal pieces of different regions differ in."""
    return program.line, *(op.line for op in program.ops)


def _line(program: Program, place: int) -> str:
    return program.line if place < 0 else program.ops[place].line
