"""The stock of pieces: executables for parts of regions, of which equal parts share a program.

A piece is lowered and compiled for the region that first has it; one that comes
with other sizes is padded, where that is possible. What names source lines, for errors and reports, is
each region's own.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from torchtpu.runtime.execute.executable import Launchable
from torchtpu.runtime.ir.program import Program
from torchtpu.runtime.ir.weak_values import WeakValues
from torchtpu.runtime.padding.layout import MOST_VARIABLES, Outline, PaddedProgram
from torchtpu.runtime.partition.pieces import Divider, Piece

from .builder import Build, Builder, about_of
from .compiler import Compiler
from .plan_cache import Plan, Plans
from .tiers import FirstTier

_MOST_PLACES = 1 << 14  # source lines that are remembered
_MOST_SIZES = 3  # programs of one piece that are remembered
_MOST_PLACED = 4  # padded programs for single places of what is one program for all places
_MOST_PIECES = 64  # that are new at one place: then ops of other pieces are launched one by one
_LAUNCHES_OF_A_PROGRAM = 1000  # cost what it costs to compile a piece: see runtime.partition.pieces
_FEWEST_NEW = 0.25  # of the regions that end on a line, where new ones keep coming
_FEWEST_SIZES = 2  # of one piece that tell that one size of it keeps changing


class PieceLayouts(Protocol):
    """How pieces are padded."""

    def outline_of(self, program: Program) -> Outline | None:
        """What pieces have in common that are samples of one another; None where this one is not to be padded."""

    def pad(self, program: Program, others: Sequence[Program], most_variables: int) -> PaddedProgram | None:
        """A piece padded, where at most so many sizes change, with others of its outline in view; None where that is
        not possible."""


class _Known(NamedTuple):
    """What equal pieces have in common: their plan, that of the padded form where there is one, and how much longer a
    launch takes than with the usual options."""

    plan: Plan
    padded: PaddedProgram | None
    loss_ms: float


class PieceBuild(NamedTuple):
    """A piece's program that is being compiled, and the padded form that it is of, if it is: what is known of the piece
    may be forgotten meanwhile."""

    build: Build
    padded: PaddedProgram | None


class Stock:
    """What is known of pieces in this process, at most `capacity` of them; none where there is no `first` tier."""

    def __init__(
        self,
        builder: Builder,
        plans: Plans,
        compiler: Compiler,
        first: FirstTier | None,
        capacity: Callable[[], int],
        layouts: PieceLayouts,
    ) -> None:
        self._builder = builder
        self._plans = plans
        self._compiler = compiler
        self._first = first
        self._capacity = capacity
        self._layouts = layouts
        self._divider = Divider(plans.fragments)
        self._lock = threading.Lock()  # guards what follows
        self._known: OrderedDict[int, _Known] = OrderedDict()
        # By identity and most variables.
        self._forms: OrderedDict[tuple[int, int], PaddedProgram | None] = OrderedDict()
        self._sizes: OrderedDict[Outline, list[Program]] = OrderedDict()  # pieces, placed ones too, the latest first
        self._placed: OrderedDict[int, set[Program]] = OrderedDict()  # by identity: the padded forms for one place each
        self._padded: OrderedDict[Program, Plan] = OrderedDict()
        self._undivided: OrderedDict[str, None] = OrderedDict()  # keys of programs
        self._visits: dict[str, int] = {}  # regions of one line that were new
        self._regions: dict[str, int] = {}  # and all of them
        self._spent: dict[str, float] = {}  # work, by lines
        self._pieces: dict[str, int] = {}  # that were new in regions that ended on a line
        self._apart: OrderedDict[int, int] = OrderedDict()  # launches more than for the whole piece, by identity
        # What is in use, by identity, device and lines.
        self._executables: WeakValues[tuple[int, int, tuple[str, ...]], Launchable] = WeakValues()

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

    def note_regions(self, line: str, regions: int) -> None:
        """So many have ended on this line, known ones too."""
        with self._lock:
            if len(self._regions) >= _MOST_PLACES:
                self._regions.clear()
            self._regions[line] = regions

    def keeps_being_new(self, line: str) -> bool:
        """Whether many of the regions that end on this line are new."""
        with self._lock:
            return self._visits.get(line, 0) >= _FEWEST_NEW * self._regions.get(line, 0)

    def spent(self, line: str) -> float:
        """The work of compiling regions whole that ended on this line."""
        with self._lock:
            return self._spent.get(line, 0.0)

    def spend(self, line: str, work: float) -> None:
        """Adds to that."""
        with self._lock:
            if len(self._spent) >= _MOST_PLACES:
                self._spent.clear()
            self._spent[line] = self._spent.get(line, 0.0) + work

    def new_undivided(self, found: Sequence[tuple[Program, Plan]]) -> tuple[list[Program], list[Program]]:
        """The programs of a region that no region of this process had before, and those of them that are not in the
        store."""
        firsts = [(program, self._under_first(plan)) for program, plan in found]
        with self._lock:
            new = [(program, plan) for program, plan in firsts if plan.key.digest not in self._undivided]
        absent = [program for program, plan in new if not self._compiler.was_stored(plan)]
        return [program for program, _ in new], absent

    def keep_undivided(self, found: Sequence[tuple[Program, Plan]]) -> None:
        """Notes that a region is made of these."""
        with self._lock:
            for _, plan in found:
                digest = self._under_first(plan).key.digest
                self._undivided[digest] = None
                self._undivided.move_to_end(digest)
            while len(self._undivided) > self._capacity():
                self._undivided.popitem(last=False)

    def divide(self, program: Program, *, is_often_new: bool) -> list[Piece]:
        """The pieces of a program, in order; none where no op of it is needed. Any may be padded where new regions keep
        coming; elsewhere those may of which one size changes, once `_FEWEST_SIZES` were seen, but for what ops do to
        the elements of their lists: parameters differ in sizes, but none of these changes."""
        if is_often_new and self._first is not None:
            pieces = self._divider.divide(
                program, is_often_new=True, is_new=self._is_new, takes_apart=partial(self._takes_apart, self._first)
            )
        else:
            pieces = self._divider.divide(program, is_often_new=is_often_new)
        for piece in pieces:
            if is_often_new:
                piece.most_variables = MOST_VARIABLES
            else:
                piece.most_variables = 0 if piece.is_of_an_element else 1
        return pieces

    def _is_new(self, piece: Piece) -> bool:
        """Whether no region of this process had a piece of those that keep being new."""
        piece.most_variables = MOST_VARIABLES
        return self._recall(piece) is None

    def _takes_apart(self, first: FirstTier, piece: Piece, ops: Sequence[Piece]) -> bool:
        """Whether a new piece is better launched op by op: those that are new compile no longer than it does, or so
        many pieces were new where it is; until that took so many launches more that the piece is worth a program."""
        new = {op.identity for op in ops if self._is_new(op)}
        with self._lock:
            launches = self._apart[piece.identity] = self._apart.pop(piece.identity, 0) + piece.num_ops - 1
            self._limit(self._apart)
            are_often_new = self._pieces.get(piece.lines[0], 0) >= _MOST_PIECES
        is_worth_it = are_often_new or first.work(1 for _ in new) <= first.work([piece.num_ops])
        return is_worth_it and launches < _LAUNCHES_OF_A_PROGRAM

    def new_among(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The different pieces among these whose programs no region of this process had before."""
        return [piece for piece in {p.identity: p for p in pieces}.values() if self._recall(piece) is None]

    def compiled_among(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Those of new pieces that are compiled if each is padded that may be: of those that differ in sizes alone the
        first few, and the others if the next one cannot be padded."""
        alike = Counter(piece.names for piece in pieces)
        samples: dict[Outline, list[Program]] = {}
        may_be_padded: dict[Outline, bool] = {}

        def is_compiled(piece: Piece) -> bool:
            most = _FEWEST_SIZES if piece.most_variables == 1 else 1
            if not piece.most_variables or alike[piece.names] <= most:
                return True
            outline = self._layouts.outline_of(piece.program)
            if outline is None:
                return True
            known = samples.setdefault(outline, [])
            if len(known) < most:
                known.append(piece.program)
                return True
            if outline not in may_be_padded:
                padded = self._layouts.pad(piece.program, known, piece.most_variables)
                may_be_padded[outline] = padded is not None
                return True
            return not may_be_padded[outline]

        return [piece for piece in pieces if is_compiled(piece)]

    def loss_ms(self, pieces: Sequence[Piece]) -> float:
        """How much longer these take, each launched once, than with the usual options; raises what lowering raises."""
        return sum(self._find(piece).loss_ms for piece in pieces)

    def text_bytes(self, pieces: Sequence[Piece]) -> int:
        """How long the texts of the different programs among these are."""
        return sum(self._find(piece).plan.text_bytes for piece in {p.identity: p for p in pieces}.values())

    def _recall(self, piece: Piece) -> _Known | None:
        """What is known of a piece, or of its padded form."""
        with self._lock:
            known = self._known.get(piece.identity)
            if known is not None:
                self._known.move_to_end(piece.identity)
                return known
        padded = self._form_of(piece)
        if padded is None:
            return None
        with self._lock:
            plan = self._padded.get(padded.program)
        return None if plan is None else self._keep(piece, plan, padded)

    def _find(self, piece: Piece) -> _Known:
        """The same; lowers a new one."""
        known = self._recall(piece)
        if known is not None:
            return known
        line = piece.lines[0]
        with self._lock:
            if len(self._pieces) >= _MOST_PLACES:
                self._pieces.clear()
            self._pieces[line] = self._pieces.get(line, 0) + 1
        return self._keep(piece, *self._planned(piece))

    def _planned(self, piece: Piece) -> tuple[Plan, PaddedProgram | None]:
        padded = self._form_of(piece)
        plan = self._builder.find(padded.program if padded else piece.program)
        if self._first is not None and not self._first.is_large(piece.program, plan.text_bytes):
            plan = self._under_first(plan)
        return plan, padded

    def _keep(self, piece: Piece, plan: Plan, padded: PaddedProgram | None) -> _Known:
        program = padded.program if padded else piece.program
        known = _Known(plan, padded, self._first.loss_ms(program) if self._first else 0.0)
        may_be_padded = padded is None and piece.most_variables > 0
        samples = [piece.program, *([piece.placed_program] if piece.offsets else ())] if may_be_padded else []
        outlined = [(sample, self._layouts.outline_of(sample)) for sample in samples]
        with self._lock:
            self._known[piece.identity] = known
            self._forms.pop((piece.identity, piece.most_variables), None)
            if padded is not None:
                self._padded[padded.program] = plan
            for sample, outline in outlined:
                if outline is not None:
                    self._sizes[outline] = [sample, *self._sizes.pop(outline, ())][:_MOST_SIZES]
            self._limit(self._known, self._padded, self._sizes)
        return known

    def _form_of(self, piece: Piece) -> PaddedProgram | None:
        """The padded form of a piece that came with other sizes before; None where there is none, or should be none.

        Where a view of a longer array begins has to be a constant: the piece is placed if it is padded in no other way.
        """
        if not piece.most_variables:
            return None
        padded = self._padded_as(piece, is_placed=False)
        if padded is not None or not piece.offsets or piece.is_settled:
            return padded
        padded = self._padded_as(piece, is_placed=True)
        if padded is None or not self._may_place(piece, padded):
            return None
        piece.fix_offsets()
        return padded

    def _may_place(self, piece: Piece, padded: PaddedProgram) -> bool:
        """Whether a piece may be padded in this form, which is for one place, where the piece as it is serves all."""
        with self._lock:
            forms = self._placed.setdefault(piece.identity, set())
            is_one_of_few = padded.program in forms or len(forms) < _MOST_PLACED
            if is_one_of_few:
                forms.add(padded.program)
            self._limit(self._placed)
        return is_one_of_few

    def _padded_as(self, piece: Piece, *, is_placed: bool) -> PaddedProgram | None:
        """The same, of the piece as it is, or as it would be placed."""
        key, most = (piece.placed_identity if is_placed else piece.identity), piece.most_variables
        with self._lock:
            if (key, most) in self._forms:
                return self._forms[key, most]
        program = piece.placed_program if is_placed else piece.program
        outline = self._layouts.outline_of(program)
        with self._lock:
            others = self._sizes.get(outline) if outline is not None else None
        if not others or (most == 1 and len(others) < _FEWEST_SIZES):
            return None
        padded = self._layouts.pad(program, others, most)
        with self._lock:
            self._forms[key, most] = padded
            self._limit(self._forms)
        return padded

    def _limit(self, *kept: OrderedDict[Any, Any]) -> None:
        """Forgets what is more than enough. Under the lock."""
        for each in kept:
            while len(each) > self._capacity():
                each.popitem(last=False)

    def _under_first(self, plan: Plan) -> Plan:
        return self._plans.under(plan, self._first.options) if self._first else plan

    def has(self, piece: Piece, device: int) -> bool:
        """Whether a piece's program is there without being compiled."""
        return self._compiler.has(self._find(piece).plan, device)

    def was_stored(self, piece: Piece) -> bool:
        """Whether a new piece's program is, by the look of it, in the store, and not by this process's doing."""
        return self._compiler.was_stored(self._planned(piece)[0])

    def in_use(self, pieces: Sequence[Piece], device: int) -> list[Launchable] | None:
        """What launches the pieces, where other regions are launching it; None where a piece is not in use."""
        found = [self._executables.get((piece.identity, device, piece.lines)) for piece in pieces]
        in_use = [executable for executable in found if executable is not None]
        if len(in_use) < len(found):
            return None
        for piece in pieces:
            piece.is_settled = True
        return in_use

    def submit(self, pieces: Sequence[Piece], device: int) -> dict[int, PieceBuild]:
        """Has the different programs of these pieces compiled, the smallest first; by identity."""
        known: dict[int, tuple[Piece, _Known]] = {}
        for piece in sorted(pieces, key=lambda piece: piece.num_ops):
            found = self._find(piece)  # of equal pieces each may be placed, and is another one then
            piece.is_settled = True
            known[piece.identity] = piece, found
        return {
            identity: PieceBuild(
                self._builder.submit(padded.program if padded else piece.program, plan, device, tier="pieces"), padded
            )
            for identity, (piece, (plan, padded, _)) in known.items()
        }

    def executable(self, piece: Piece, submitted: PieceBuild, device: int) -> Launchable:
        """What launches a piece where it stands, once its program is compiled; raises why it is not."""
        build, padded = submitted
        key = piece.identity, device, piece.lines
        known = self._executables.get(key)
        if known is None or getattr(known, "loaded", None) is not build.flight.result():
            program, plan = piece.program, build.plan
            plan = replace(plan, checks=tuple(replace(c, line=_line(program, c.place)) for c in plan.checks))
            own = Build(build.program, plan, about_of(program, plan, "pieces"), build.flight)
            made = self._builder.executable(own, device)
            known = self._executables.set(key, self._builder.padded(padded, made) if padded else made)
        return known


def _line(program: Program, place: int) -> str:
    return program.line if place < 0 else program.ops[place].line
