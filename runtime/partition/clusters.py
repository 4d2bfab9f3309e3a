"""Clusters: divides a recorded program into parts of which those that repeat are one program.

The layers of a network, forward, backward and in the optimizer, and the steps of an unrolled recurrence are compiled
once this way. Whether it pays is judged from the ops and the constants of the platform alone.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torchtpu.runtime.ir.calls import results_of
from torchtpu.runtime.ir.program import Lifted, Op, Operand, Program, Write
from torchtpu.runtime.ir.values import bases_of, operands, size_of, without_lines
from torchtpu.runtime.lowering.fragments import Fragments
from torchtpu.runtime.lowering.materialization import STORED
from torchtpu.runtime.lowering.tracing import Fragment

from .dead_ops import needed, reading
from .repeats import Repetition, find_runs
from .split import Part, split

_SHORTEST = 8  # ops that a run repeats at least
# Estimates, which no script measures.
_HOT = 100  # launches after which a region is worth compiling whole, at least
MS_A_LAUNCH = 40.0  # milliseconds of compiling that each launch so far is worth


class ClusterCosts(NamedTuple):
    """What compiling costs on one platform, in milliseconds per line of a program and per square of its lines.

    A cluster has `least_lines` at least. A run becomes clusters where that saves `least_saving_ms`, and where what they
    hand on from one to the next, which is stored between them, is at most `most_carried` of what they store anyway.
    """

    line_ms: float
    square_ms: float
    least_lines: int
    least_saving_ms: float
    most_carried: float

    def compile_ms(self, lines: int) -> float:
        """The estimated time that a program of so many lines compiles."""
        return self.line_ms * lines + self.square_ms * lines * lines


# Version 2. For cpu: jaxlib 0.10.2 on two cores with AVX-512; `line_ms` and `square_ms` were measured by no script that
# is kept, the others are estimates. What they lead to is measured by benchmarks/repeated_parts.py: first steps and warm
# ones, in clusters and whole. For tpu: estimates from GPT-2's step (benchmarks/tpu_tiers.py). For cuda: estimates from
# what regions compiled on an H200 (benchmarks/compile_price.py).
COSTS: Mapping[str, ClusterCosts] = {
    "cpu": ClusterCosts(line_ms=0.6, square_ms=1.6e-4, least_lines=150, least_saving_ms=200.0, most_carried=0.25),
    "tpu": ClusterCosts(line_ms=20.0, square_ms=0.0, least_lines=150, least_saving_ms=5000.0, most_carried=0.25),
    "cuda": ClusterCosts(line_ms=3.0, square_ms=0.0, least_lines=150, least_saving_ms=1000.0, most_carried=0.25),
}


class Clusters(NamedTuple):
    """A program's parts, of which equal ones have one program; after `hot` launches the whole is worth compiling."""

    parts: list[Part]
    hot: int


class Places(NamedTuple):
    """Where a program's clusters lie, in numbers alone.

    `kept` are the ops that are needed, of the program's with its lists taken apart; `unread` are the values that one of
    these takes for their shape only, by its place among them; `runs` is where the parts of each run begin.
    """

    kept: Sequence[int]
    unread: Mapping[int, Sequence[int]]
    runs: Sequence[range]
    hot: int


def may_have_clusters(ops: Sequence[Op], platform: str) -> bool:
    """Whether so many ops may hold a run, on a platform whose costs are known."""
    return platform in COSTS and len(ops) >= 2 * _SHORTEST


def search(program: Program, ops: Sequence[Op], fragments: Fragments) -> Places | None:
    """Looks for the clusters of a program with these `ops`, its lists taken apart; None where it is better compiled
    whole."""
    costs = COSTS[fragments.platform]
    kept, unread, found = needed(program, ops, fragments)
    finder = _ClusterFinder(replace(program, ops=reading(ops, kept, unread)), found)
    runs = finder.runs(costs)
    return Places(kept, unread, runs, max(_HOT, round(finder.compile_ms(costs) / MS_A_LAUNCH))) if runs else None


def cut_out(program: Program, ops: Sequence[Op], places: Places) -> Clusters:
    """The clusters that `search` found."""
    return Clusters(_parts(replace(program, ops=reading(ops, places.kept, places.unread)), places.runs), places.hot)


class _ClusterFinder:
    """Looks for runs in a program whose ops have these fragments."""

    def __init__(self, program: Program, fragments: Sequence[Fragment]) -> None:
        self._program = program
        self._lines = [1 + fragment.text.count("\n") for fragment in fragments]
        self._is_stored = [bool(STORED.search(fragment.text)) for fragment in fragments]
        self._sizes = {value: size_of(base) for value, base in bases_of(program).items()}
        self._used_at: dict[int | None, list[int]] = {}
        for i, op in enumerate(program.ops):
            for operand in operands(op):
                self._used_at.setdefault(operand.value, []).append(i)
        known: dict[object, int] = {}
        pairs = zip(program.ops, fragments, strict=True)
        self._kinds = [known.setdefault((f.symbol, _geometry(op)), len(known)) for op, f in pairs]

    def compile_ms(self, costs: ClusterCosts) -> float:
        """The estimated time that the whole program compiles."""
        return costs.compile_ms(sum(self._lines))

    def runs(self, costs: ClusterCosts) -> list[range]:
        """Where the clusters of each run begin."""
        total = sum(self._lines)
        ranges: list[range] = []
        for run in find_runs(self._kinds, _SHORTEST):
            merged = self._merged(run, costs.least_lines)
            saved = sum(self._lines[merged.start : merged.start + max(0, merged.repeated)])
            if not saved or costs.compile_ms(total) - costs.compile_ms(total - saved) < costs.least_saving_ms:
                continue
            first = self._first(merged)
            if self._carried(first, merged.period) <= costs.most_carried * self._stored(first, merged.period):
                ranges.append(range(first, merged.start + merged.length - merged.period + 1, merged.period))
        return ranges

    def _merged(self, run: Repetition, least_lines: int) -> Repetition:
        """The run with several periods taken as one where one alone is small."""
        lines = sum(self._lines[run.start : run.start + run.period])
        return run._replace(period=run.period * max(1, -(-least_lines // lines)))

    def _first(self, run: Repetition) -> int:
        """Where in its first period a run is best taken apart: where the fewest bytes pass from part to part."""
        changes = [0] * (run.length + 1)  # of the bytes that cross, from one place to the next
        for i, op in enumerate(self._program.ops[run.start : run.start + run.length]):
            for made in results_of(op):
                uses = [at - run.start for at in self._used_at.get(made.value, ())]
                last = max((at for at in uses if at <= min(i + run.period, run.length - 1)), default=i)
                changes[i + 1] += self._sizes[made.value]
                changes[last + 1] -= self._sizes[made.value]
        crossing = list(itertools.accumulate(changes))
        shifts = range(run.length % run.period + 1)
        return run.start + min(shifts, key=lambda s: sum(crossing[s :: run.period][: run.length // run.period]))

    def _carried(self, first: int, period: int) -> int:
        """The bytes that the first part of a run makes and the second one takes, but for those that XLA stores even in
        one program: what an op makes or takes that it does not fuse."""
        ops, total = self._program.ops, 0
        second = range(first + period, first + 2 * period)
        for i in range(first, first + period):
            if self._is_stored[i]:
                continue
            for made in results_of(ops[i]):
                uses = [at for at in self._used_at.get(made.value, ()) if at in second]
                if uses and not any(self._is_stored[at] for at in uses):
                    total += self._sizes[made.value]
        return total

    def _stored(self, first: int, period: int) -> int:
        """The bytes that those ops in the first part of a run take and make which XLA does not fuse."""
        total = 0
        for i in range(first, first + period):
            if self._is_stored[i]:
                op = self._program.ops[i]
                values = [o.value for o in operands(op)] + [r.value for r in results_of(op)]
                total += sum(self._sizes[value] for value in values if value is not None)
        return total


def _geometry(op: Op) -> tuple[Any, ...]:
    """What of an op's tensors its fragment does not say: how they lie in their arrays, but for where they begin."""
    taken = [(o.value is None, o.strides, o.base, type(o.offset)) for o in operands(op)]
    made = [(r.strides, r.base, isinstance(r, Write) and (r.arg, r.replaces, type(r.offset))) for r in results_of(op)]
    return *taken, *made, op.settings


def _parts(program: Program, runs: Sequence[range]) -> list[Part]:
    """The program in parts: those of the runs, and what lies between."""
    ends = {end for found in runs for start in found for end in (start, start + found.step)}
    ends -= {0, len(program.ops)}
    parts = split(program, sorted(ends))
    numbers = {start: number for number, start in enumerate([0, *sorted(ends)])}
    for found in runs:
        place = slice(numbers[found.start], numbers[found.start] + len(found))
        made = [[r.value for op in program.ops[at : at + found.step] for r in results_of(op)] for at in found]
        parts[place] = _alike(parts[place], made)
    return parts


def _alike(parts: Sequence[Part], made: Sequence[Sequence[int]]) -> list[Part]:
    """The parts of a run, those that do the same with the same program; `made` are the values that each makes."""
    parts = _offsets_lifted(parts)
    keys = [_key(part.program) for part in parts]
    counts = Counter(keys)
    programs: dict[Any, Program] = {}
    for key in counts:
        alike = [part.program for part, own in zip(parts, keys, strict=True) if own == key]
        outputs = sorted({value for program in alike for value in program.outputs})
        donated = set(alike[0].donated).intersection(*(program.donated for program in alike))
        programs[key] = replace(alike[0], outputs=tuple(outputs), donated=tuple(sorted(donated)))
    return [
        replace(part, program=programs[key], outputs=tuple(values[n] for n in programs[key].outputs))
        for part, key, values in zip(parts, keys, made, strict=True)
    ]


def _key(program: Program) -> Program:
    return replace(without_lines(program), outputs=(), donated=())


def _offsets_lifted(parts: Sequence[Part]) -> list[Part]:
    """The parts, where the places at which tensors begin differ, as in `x[:, t]`, with run-time ints in their stead."""
    rows = [[place for op in part.program.ops for place in _offsets(op)] for part in parts]
    differing = [n for n, places in enumerate(zip(*rows, strict=True)) if len(set(places)) > 1]
    if not differing:
        return list(parts)
    made = []
    for part, row in zip(parts, rows, strict=True):
        first = part.program.ints
        lifted = {n: Lifted("i", first + k) for k, n in enumerate(differing)}
        places = (lifted.get(n) for n in range(len(row)))
        ops = tuple(_placed(op, places) for op in part.program.ops)
        program = replace(part.program, ops=ops, ints=first + len(differing))
        made.append(replace(part, program=program, offsets=tuple(row[n] for n in differing)))
    return made


def _offsets(op: Op) -> list[int]:
    """Where the tensors that an op takes and writes begin; 0 where that is known at run time only."""
    offsets = [*(o.offset for o in operands(op)), *(w.offset for w in op.writes)]
    return [offset if isinstance(offset, int) else 0 for offset in offsets]


def _placed(op: Op, places: Iterator[Lifted | None]) -> Op:
    """The op with other offsets where there are some, in the order of `_offsets`."""

    def placed(given: Operand | Write) -> Any:
        place = next(places)
        return given if place is None else replace(given, offset=place)

    def argument(given: Any) -> Any:
        if isinstance(given, tuple):
            return tuple(map(argument, given))
        return placed(given) if isinstance(given, Operand) else given

    args = tuple(map(argument, op.args))
    return replace(op, args=args, writes=tuple(map(placed, op.writes)))
