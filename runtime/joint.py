"""Joint regions: in comes a region with collectives, out go launches that all ranks make together, or, where they are
not all about to make the same ones, its parts in turn: the ops between collectives, and each collective alone.

Where the ranks' programs differ in numbers these become run-time numbers; where they differ in ops, what is common is
launched together in stages (`stages`).
"""

from __future__ import annotations

import collections.abc
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch

from .alike import IsStructural, Lifting, Numbers, given
from .fleet import Homes
from .host_calls import number_of
from .parts import Part
from .region import Op, Program
from .sequence import Sequence
from .stages import find_stages
from .views import Digit, fits

if TYPE_CHECKING:
    from .executor import Executable

T = TypeVar("T")

_MAX_SPLITS = 3  # of one program, each because other ranks came with other programs


class Verdict(Enum):
    """What the ranks are about to launch."""

    SAME = "the same program"
    ALIKE = "programs that differ in numbers"
    SPLIT = "programs with the same collectives, which all would split"
    OTHER = "different ones"


class Ballot(NamedTuple):
    """What a rank is about to launch: a program of this identity, `alike` whatever the numbers in it ("" where they
    will not be lifted), and whether it would be split."""

    identity: str
    alike: str
    may_split: bool


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

    def agree(self, tickets: collections.abc.Sequence[float], ballot: Ballot) -> Verdict:
        """What the other ranks are about to launch, who say so too: a program with these calls in it."""

    def tell(self, tickets: collections.abc.Sequence[float], numbers: collections.abc.Sequence[int]) -> list[list[int]]:
        """The numbers of each rank, all of which tell some at once."""

    def launch(self, tickets: collections.abc.Sequence[float], launch: Callable[[], T]) -> T:
        """Launches what was agreed on, and returns when it has run."""


class Form(NamedTuple):
    """A program as text, for all ranks; `build` compiles it. `offsets` are what it takes for granted."""

    identity: str
    offsets: Mapping[int, frozenset[Digit]]
    build: Callable[[], Executable]


MakeForm = Callable[[Program, bool], Form]  # lowers a program, without taking anything for granted where asked


class Core:
    """A program that all ranks launch together: a whole region, or a common part of one."""

    def __init__(
        self, program: Program, collectives: Collectives, is_structural: IsStructural, make_form: MakeForm
    ) -> None:
        self._tickets = [op.args[1] for op in program.ops if op.name == collectives.op]
        self._collectives = collectives
        self._make_form = make_form
        self.numbers = Numbers(program, is_structural)
        self._lifting = Lifting(program, (), ())
        self._forms: dict[bool, Form] = {}
        self._executables: dict[bool, Executable] = {}
        self._is_flat = False  # which of them is launched next

    def choose(self, ints: list[int]) -> str:
        """Chooses the program that takes these run-time ints; its identity."""
        ints = [*ints, *self._lifting.ints]
        for is_flat in (False, True):
            form = self._forms.get(is_flat)
            if form is None:
                form = self._forms[is_flat] = self._make_form(self._lifting.program, is_flat)
            if is_flat or not form.offsets or fits(form.offsets, ints):
                self._is_flat = is_flat
                return form.identity
        raise AssertionError("the second form takes any offset")

    def lift(self, places: list[int]) -> None:
        """Takes the numbers at these places at run time from now on."""
        self._lifting = self.numbers.lifted(places)
        self._forms, self._executables = {}, {}

    def ready(self) -> Executable:
        """The executable of the chosen program."""
        if self._is_flat not in self._executables:
            self._executables[self._is_flat] = self._forms[self._is_flat].build()
        return self._executables[self._is_flat]

    def given(self, work: Any) -> Any:
        """The work with this rank's numbers."""
        lifting = self._lifting
        return Work(work, lifting.floats, lifting.ints) if lifting.floats or lifting.ints else work

    def launch(self, work: Any, launch: Callable[[], T]) -> T:
        """Launches the program with the other ranks."""
        return self._collectives.launch(self.tickets(work), launch)

    def skip(self, error: BaseException, work: Any) -> None:
        """This rank has failed before the launch."""
        for ticket in self.tickets(work):
            self._collectives.skip(error, None, ticket)

    def tickets(self, work: Any) -> list[float]:
        return [number_of(ticket, work) for ticket in self._tickets]


class Joint:
    """What a plan is given whose program has collectives.

    `make_form` lowers a program; `parts` runs the program's parts one by one, `build` makes the executable of one that
    this rank has to itself. Forms are compiled once all ranks have agreed: until then nobody knows that they will run.
    """

    def __init__(
        self,
        program: Program,
        collectives: Collectives,
        is_structural: IsStructural,
        make_form: MakeForm | None,
        build: Callable[[Program], Executable],
        parts: Sequence,
    ) -> None:
        self._program = program
        self._collectives = collectives
        self._is_structural = is_structural
        self._make_form = make_form
        self._build = build
        self._cores: list[tuple[Part | None, Core]] = []
        self._stages: Sequence | None = None
        self._places: list[int] = []  # of the numbers that differ from rank to rank
        self._is_alike = True  # until it has been lifted, in vain
        self._splits_left = _MAX_SPLITS
        self.parts = parts

    def agreed(self, work: Any) -> Core | Sequence | None:
        """What this rank launches now, as all others do; None where they launch nothing together."""
        if self._make_form is None or work.errors():
            return None
        if not self._cores:
            self._cores = [(None, self._core(self._program))]
        try:
            identity = " ".join(core.choose(_ints(work, part)) for part, core in self._cores)
        except RuntimeError:  # the part that it comes from raises it again
            self._make_form = None
            return None
        tickets = [number_of(op.args[1], work) for op in self._program.ops if op.name == self._collectives.op]
        alike = " ".join(core.numbers.digest for _, core in self._cores) if self._is_alike else ""
        verdict = self._collectives.agree(tickets, Ballot(identity, alike, self._splits_left > 0))
        if verdict is Verdict.ALIKE:
            self._lift(tickets)
        if verdict is Verdict.SPLIT:
            self._split(tickets)
        if verdict is not Verdict.SAME:
            return None
        for _, core in self._cores:
            core.ready()
        return self._stages or self._cores[0][1]

    def _core(self, program: Program) -> Core:
        assert self._make_form is not None
        return Core(program, self._collectives, self._is_structural, self._make_form)

    def _lift(self, tickets: list[float]) -> None:
        everyones = self._collectives.tell(tickets, [bit for _, core in self._cores for bit in core.numbers.bits])
        places = [i for i, bits in enumerate(zip(*everyones, strict=True)) if len(set(bits)) > 1]
        self._is_alike = places != self._places
        self._places = places
        begin = 0
        for _, core in self._cores:
            end = begin + len(core.numbers.bits)
            core.lift([place - begin for place in places if begin <= place < end])
            begin = end

    def _split(self, tickets: list[float]) -> None:
        """Takes the program apart as the other ranks do theirs."""
        self._splits_left -= 1
        collectives = self._collectives
        found = find_stages(
            self._program, collectives.op, self._is_structural, lambda numbers: collectives.tell(tickets, numbers)
        )
        if found is None:
            self._splits_left = 0
            return
        runs: list[Any] = [self._core(part.program) if is_common else None for part, is_common in found]
        self._cores = [(part, runs[n]) for n, (part, is_common) in enumerate(found) if is_common]
        self._places, self._is_alike = [], True

        def executable_of(number: int) -> Any:
            if runs[number] is None:
                runs[number] = self._build(found[number].part.program)
            return runs[number]

        self._stages = Sequence(self._program, [stage.part for stage in found], executable_of)


def _ints(work: Any, part: Part | None) -> list[int]:
    """The run-time ints of a part, or of the whole."""
    ints: list[int] = work.ints.tolist() if work.ints is not None else []
    return ints if part is None else [ints[i] for i in part.ints] + list(part.offsets)


class Work:
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
