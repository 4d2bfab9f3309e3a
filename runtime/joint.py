"""Joint regions: in comes a region with collectives, out goes one launch that all ranks make together, or, where they
are not all about to make the same one, its parts in turn: the ops between collectives, and each collective alone.
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
from .region import Op, Program
from .views import Digit, fits

if TYPE_CHECKING:
    from .executor import Executable
    from .sequence import Sequence

T = TypeVar("T")


class Verdict(Enum):
    """What the ranks are about to launch."""

    SAME = "the same program"
    ALIKE = "programs that differ in numbers"
    OTHER = "different ones"


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

    def agree(self, tickets: collections.abc.Sequence[float], identity: str, alike: str) -> Verdict:
        """What the other ranks are about to launch, who say so too: a program with these calls in it, and by `alike`
        what it is whatever the numbers in it."""

    def compare(self, tickets: collections.abc.Sequence[float], numbers: collections.abc.Sequence[int]) -> list[int]:
        """Where these are not the same on all ranks, which have as many."""

    def launch(self, tickets: collections.abc.Sequence[float], launch: Callable[[], T]) -> T:
        """Launches what was agreed on, and returns when it has run."""


class Form(NamedTuple):
    """A program as text, for all ranks; `build` compiles it. `offsets` are what it takes for granted."""

    identity: str
    offsets: Mapping[int, frozenset[Digit]]
    build: Callable[[], Executable]


class Joint:
    """What a plan is given whose program has collectives.

    `make_form` lowers a program, without taking anything for granted where asked; `parts` runs its parts. The form is
    compiled once all ranks have agreed on it: until then nobody knows that it will ever run.
    """

    def __init__(
        self,
        program: Program,
        collectives: Collectives,
        is_structural: IsStructural,
        make_form: Callable[[Program, bool], Form] | None,
        parts: Sequence,
    ) -> None:
        self._tickets = [op.args[1] for op in program.ops if op.name == collectives.op]
        self._collectives = collectives
        self._make_form = make_form
        self._numbers = Numbers(program, is_structural) if make_form is not None else None
        self._places: list[int] = []  # of the numbers that differ from rank to rank
        self._lifting = Lifting(program, (), ())
        self._is_alike = True  # until it has been lifted, in vain
        self._forms: dict[bool, Form] = {}
        self._executables: dict[bool, Executable] = {}
        self.parts = parts

    def agreed(self, work: Any) -> tuple[Executable, Work] | None:
        """The program that all ranks launch now, and what with; None where they launch none together."""
        if self._make_form is None or self._numbers is None or work.errors():
            return None
        try:
            is_flat, form = self._form(work)
        except RuntimeError:  # the part that it comes from raises it again
            self._make_form = None
            return None
        tickets = self._values(work)
        verdict = self._collectives.agree(tickets, form.identity, self._numbers.digest if self._is_alike else "")
        if verdict is Verdict.ALIKE:
            places = self._collectives.compare(tickets, self._numbers.bits)
            self._is_alike = places != self._places
            self._places, self._lifting = places, self._numbers.lifted(places)
            self._forms, self._executables = {}, {}
        if verdict is not Verdict.SAME:
            return None
        if is_flat not in self._executables:
            self._executables[is_flat] = form.build()
        return self._executables[is_flat], self._with_numbers(work)

    def launch(self, work: Any, launch: Callable[[], T]) -> T:
        """Launches what `agreed` gave."""
        return self._collectives.launch(self._values(work), launch)

    def _form(self, work: Any) -> tuple[bool, Form]:
        """The text for the offsets of this launch; it is told whether it is the one for any."""
        assert self._make_form is not None
        for is_flat in (False, True):
            form = self._forms.get(is_flat)
            if form is None:
                form = self._forms[is_flat] = self._make_form(self._lifting.program, is_flat)
            if is_flat or not form.offsets or fits(form.offsets, self._with_numbers(work).ints.tolist()):
                return is_flat, form
        raise AssertionError("the second form takes any offset")

    def _with_numbers(self, work: Any) -> Any:
        lifting = self._lifting
        return Work(work, lifting.floats, lifting.ints) if lifting.floats or lifting.ints else work

    def _values(self, work: Any) -> list[float]:
        return [number_of(ticket, work) for ticket in self._tickets]


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
