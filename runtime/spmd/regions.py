"""SPMD regions: launched by all ranks together or, where they are not all about to launch the same program, in parts:
the ops between collectives, and each collective alone.

Where the ranks' programs differ in numbers these become run-time numbers; where they differ in ops, what is common is
launched together in stages (`stages`).
"""

from __future__ import annotations

import collections.abc
import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from torchtpu.runtime.device.process_group import Homes, hash_of
from torchtpu.runtime.execute.executable import Enqueued, Executable, Launchable, LaunchContext
from torchtpu.runtime.execute.sequence import Sequence
from torchtpu.runtime.ir.program import Op, Program
from torchtpu.runtime.ir.scalar_lifting import IsStructural, Lifting, Numbers, given
from torchtpu.runtime.ir.strided_access import Digit, fits
from torchtpu.runtime.partition.ranks import Tell, find_stages
from torchtpu.runtime.partition.split import Part

from .host_calls import number_of

T = TypeVar("T")

_MOST_KEPT = 8  # of one program
_MAX_SEEN = 64
_UNWANTED, _WANTED, _KNOWN = range(3)  # what ranks have found out about their programs


class VoteResult(NamedTuple):
    """Whether all ranks named the same program. If not: how many collectives all their programs begin with, 0 where
    there is nothing to find out about them, and a number for all these programs."""

    is_same: bool
    shared: int
    programs: int


class Proposal(NamedTuple):
    """What a rank is about to launch: a program of this identity, with its first `calls` calls ("" for none); and the
    identity of the program that it comes with, "" where it would launch nothing else."""

    identity: str
    calls: int
    program: str


class Collectives(Protocol):
    """The op that ranks run together, handed in from above. Each call of it has a ticket, its second argument."""

    @property
    def op(self) -> str:
        """Its name."""

    def homes(self, op: Op) -> Homes:
        """The devices that launch a program with this op together; () where it runs on the hosts only."""

    def perform(self, tensor: torch.Tensor, ticket: float, *arguments: Any) -> torch.Tensor:
        """Runs a call on the host: tensors are on the CPU."""

    def skip(self, error: BaseException, tensor: None, ticket: float, *arguments: Any) -> None:
        """A call will not run, because its tensor has failed."""

    def vote(self, tickets: collections.abc.Sequence[float], proposal: Proposal) -> VoteResult:
        """What the other ranks are about to launch, who say so too: all with these calls, or the first of them."""

    def tell(self, tickets: collections.abc.Sequence[float], numbers: collections.abc.Sequence[int]) -> list[list[int]]:
        """The numbers of each rank, all of which tell some at once."""

    def launch(self, tickets: collections.abc.Sequence[float], launch: Callable[[], T]) -> T:
        """Launches what was agreed on, and returns when it has run."""


class LoweredVariant(NamedTuple):
    """A program as text, for all ranks; `build` compiles it. `offsets` are what it takes for granted."""

    identity: str
    offsets: Mapping[int, frozenset[Digit]]
    build: Callable[[], Executable]


MakeVariant = Callable[
    [Program, bool], LoweredVariant
]  # lowers a program, without taking anything for granted where asked


class SpmdProgram:
    """A program that all ranks launch together: a whole region, or a common part of one."""

    meets_others = True
    takes_padding = False

    def __init__(
        self, program: Program, collectives: Collectives, is_structural: IsStructural, make_variant: MakeVariant
    ) -> None:
        self._tickets = [op.args[1] for op in program.ops if op.name == collectives.op]
        self._collectives = collectives
        self._program = program
        self._is_structural = is_structural
        self._make_variant = make_variant
        self._lifting = Lifting(program, (), ())
        self._variants: dict[bool, LoweredVariant] = {}
        self._executables: dict[bool, Executable] = {}
        self._is_flat = False  # which of them is launched next

    @functools.cached_property
    def numbers(self) -> Numbers:
        """Those in the program."""
        return Numbers(self._program, self._is_structural)

    @property
    def identity(self) -> str:
        """That of the program as it is, whatever is chosen."""
        return self._variant(is_flat=False).identity

    def choose(self, ints: list[int]) -> str:
        """Chooses the program that takes these run-time ints; its identity."""
        ints = [*ints, *self._lifting.ints]
        for is_flat in (False, True):
            variant = self._variant(is_flat)
            if is_flat or not variant.offsets or fits(variant.offsets, ints):
                self._is_flat = is_flat
                return variant.identity
        raise AssertionError("the second variant takes any offset")

    def _variant(self, is_flat: bool) -> LoweredVariant:
        if is_flat not in self._variants:
            self._variants[is_flat] = self._make_variant(self._lifting.program, is_flat)
        return self._variants[is_flat]

    def lift(self, places: list[int]) -> None:
        """Takes the numbers at these places at run time from now on."""
        self._lifting = self.numbers.lifted(places)
        self._variants, self._executables = {}, {}

    def ready(self) -> Executable:
        """The executable of the chosen program."""
        if self._is_flat not in self._executables:
            self._executables[self._is_flat] = self._variants[self._is_flat].build()
        return self._executables[self._is_flat]

    def given(self, work: Any) -> Any:
        """The work with this rank's numbers."""
        lifting = self._lifting
        return LiftedWork(work, lifting.floats, lifting.ints) if lifting.floats or lifting.ints else work

    def launch(self, work: Any, context: LaunchContext) -> None:
        """Launches the program with the other ranks, who hear of it where this rank has failed before."""
        with context.catching(work):
            errors = work.errors()
            if errors:
                for ticket in self._tickets_of(work):
                    self._collectives.skip(errors[0][0], None, ticket)
                work.failed(errors[0][0])
            else:
                context.run(self.given(work), self.ready(), together=functools.partial(self._with_others, work))

    def _with_others(self, work: Any, launch: Callable[[], Enqueued]) -> Enqueued:
        return self._collectives.launch(self._tickets_of(work), launch)

    def _tickets_of(self, work: Any) -> list[float]:
        return [number_of(ticket, work) for ticket in self._tickets]


class Stages:
    """What a rank launches whose program has parts in common with those of the others: these, and those between."""

    meets_others = True
    takes_padding = False

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence

    def launch(self, work: Any, context: LaunchContext) -> None:
        """Launches the parts in turn."""
        with context.catching(work):
            self._sequence.run(work, context.launch)


class Consensus:
    """How a program runs beside certain programs of the other ranks: its common parts, or the whole as the only one,
    which have its first `count` collectives. Without common parts it runs apart."""

    def __init__(
        self,
        programs: collections.abc.Sequence[tuple[Part | None, SpmdProgram]],
        count: int,
        stages: Stages | None = None,
    ) -> None:
        self._programs = programs
        self._stages = stages
        self.count = count

    @property
    def digest(self) -> str:
        """What all ranks have in common where their common parts are the same but for numbers."""
        return " ".join(program.numbers.digest for _, program in self._programs)

    def bits(self) -> list[int]:
        """The numbers in the common parts."""
        return [bit for _, program in self._programs for bit in program.numbers.bits]

    def lift(self, places: list[int]) -> None:
        """Takes those at these places at run time from now on."""
        begin = 0
        for _, program in self._programs:
            end = begin + len(program.numbers.bits)
            program.lift([place - begin for place in places if begin <= place < end])
            begin = end

    def choose(self, work: Any) -> str:
        """The identities of what the work would launch with other ranks; "" for nothing."""
        try:
            return " ".join(program.choose(_ints(work, part)) for part, program in self._programs)
        except RuntimeError:  # the part that it comes from raises it again, where this rank runs apart
            return ""

    def ready(self) -> Launchable:
        """What runs the chosen programs, and what this rank has to itself."""
        for _, program in self._programs:
            program.ready()
        return self._stages or self._programs[0][1]


class SpmdRegion:
    """What a plan is given whose program has collectives.

    `make_variant` lowers a program; `parts` runs the program's parts one by one, `build` makes what runs a part that
    this rank has to itself, or that comes later. Where `may_stop`, a program is launched up to the last collective that
    all ranks have in theirs. What ranks find out about their programs they use when they meet with the same ones again:
    until then nobody knows that it will be compiled for anything.
    """

    meets_others = True
    takes_padding = False

    def __init__(
        self,
        program: Program,
        collectives: Collectives,
        is_structural: IsStructural,
        make_variant: MakeVariant | None,
        build: Callable[[Program], Any],
        parts: Sequence,
        *,
        may_stop: bool,
    ) -> None:
        self._program = program
        self._collectives = collectives
        self._is_structural = is_structural
        self._make_variant = make_variant
        self._build = build
        self._may_stop = may_stop
        self._calls = [op.args[1] for op in program.ops if op.name == collectives.op]
        self._identity = ""
        self._known: OrderedDict[int, Consensus] = OrderedDict()  # by the programs that ranks met with
        self._last: Consensus | None = None
        self._seen: deque[int] = deque(maxlen=_MAX_SEEN)  # what ranks met with, and nothing is known about
        self._parts = parts

    def launch(self, work: Any, context: LaunchContext) -> None:
        """Launches the region together with the other ranks, or its parts in turn."""
        with context.catching(work):
            if not self.meet(work, context):
                self._parts.run(work, context.launch)

    def meet(self, work: Any, context: LaunchContext) -> bool:
        """Launches what the ranks agree on; whether they do. What fails is the work's."""
        with context.catching(work):
            agreed = self.agreed(work)
            if agreed is not None:
                agreed.launch(work, context)
            return agreed is not None
        return True  # to fail

    def agreed(self, work: Any) -> Launchable | None:
        """What this rank launches now, as all others do; None where they launch nothing together."""
        if self._make_variant is None or work.errors():
            return None
        if self._last is None:
            whole = self._spmd_program(self._program)
            self._last = Consensus([(None, whole)], len(self._calls))
            try:
                self._identity = whole.identity
            except RuntimeError:  # the part that it comes from raises it again
                self._make_variant = None
                return None
        tickets = [number_of(ticket, work) for ticket in self._calls]
        result = self._collectives.vote(tickets, Proposal(self._last.choose(work), self._last.count, self._identity))
        found = self._last if result.is_same else self._recall(work, tickets, result) if result.shared else None
        self._last = found or self._last
        return found.ready() if found else None

    def _spmd_program(self, program: Program) -> SpmdProgram:
        assert self._make_variant is not None
        return SpmdProgram(program, self._collectives, self._is_structural, self._make_variant)

    def _recall(self, work: Any, tickets: list[float], result: VoteResult) -> Consensus | None:
        """What ranks with these programs have found out earlier, if all of them remember; else they may find it out."""
        key, shared, collectives = result.programs, result.shared, self._collectives
        found = self._known.get(key)
        is_wanted = not self._known or key in self._seen
        may_find = shared == len(self._calls) or self._may_stop
        states = collectives.tell(tickets, [_KNOWN if found else _WANTED if is_wanted and may_find else _UNWANTED])
        if found is not None:
            self._known.move_to_end(key)
        else:
            self._seen.append(key)
        if [_UNWANTED] in states:
            return None
        if found is not None and all(state == [_KNOWN] for state in states):
            proposal = Proposal(found.choose(work), found.count, "")
            return found if collectives.vote(tickets, proposal).is_same else None
        if collectives.vote(tickets, Proposal("any", shared, "")).is_same:  # the calls, that is
            self._known[key] = self._find(tickets, shared)
            if len(self._known) > _MOST_KEPT:
                self._known.popitem(last=False)
        return None

    def _find(self, tickets: list[float], shared: int) -> Consensus:
        """How this program runs beside those that the other ranks have now, and that begin with as many collectives."""
        tell = functools.partial(self._collectives.tell, tickets)
        consensus = Consensus([(None, self._spmd_program(self._program))], shared)
        if not _is_told_by_all(tell, consensus.digest if shared == len(self._calls) else ""):
            consensus = self._in_stages(shared, tell)
            if not _is_told_by_all(tell, consensus.digest):
                return Consensus([], 0)
        everyones = tell(consensus.bits())
        consensus.lift([i for i, bits in enumerate(zip(*everyones, strict=True)) if len(set(bits)) > 1])
        return consensus

    def _in_stages(self, shared: int, tell: Tell) -> Consensus:
        """This program taken apart as the other ranks take theirs."""
        found = find_stages(self._program, self._collectives.op, self._is_structural, tell, shared)
        runs: list[Any] = [self._spmd_program(stage.part.program) if stage.is_common else None for stage in found]
        programs = [(stage.part, program) for stage, program in zip(found, runs, strict=True) if program is not None]

        def executable_of(number: int) -> Any:
            if runs[number] is None:
                runs[number] = self._build(found[number].part.program)
            return runs[number]

        sequence = Sequence(self._program, [stage.part for stage in found], executable_of)
        return Consensus(programs, shared, Stages(sequence))


def _is_told_by_all(tell: Tell, text: str) -> bool:
    """Whether all ranks tell this text, which is not empty."""
    number = hash_of(text) if text else 0
    told = [found for (found,) in tell([number])]
    return number != 0 and len(set(told)) == 1


def _ints(work: Any, part: Part | None) -> list[int]:
    """The run-time ints of a part, or of the whole."""
    ints: list[int] = work.ints.tolist() if work.ints is not None else []
    return ints if part is None else [ints[i] for i in part.ints] + list(part.offsets)


class LiftedWork:
    """A launch's work with more run-time numbers."""

    def __init__(self, work: Any, floats: tuple[float, ...], ints: tuple[int, ...]) -> None:
        self._work = work
        self.floats = given(work.floats, floats, torch.float64)
        self.ints = given(work.ints, ints, torch.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def ends_around(program: Program, name: str) -> list[int]:
    """Where to split a program so that each op of this name stands alone."""
    places = [i for i, op in enumerate(program.ops) if op.name == name]
    return sorted({end for place in places for end in (place, place + 1)} - {0, len(program.ops)})
