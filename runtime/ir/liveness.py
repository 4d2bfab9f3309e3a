"""Which ops of a program are needed, and how long its values live.

An op is needed where it has an effect or makes what the outputs or needed ops read: of `a = f(x); b = g(x); c = h(a)`
with the output `c` the first and the last. A value may go after the op that reads it last, or that makes it where
nothing reads it: there `a` after `h`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from .calls import results_of
from .program import Op, Program
from .values import bases_of, operands, size_of

T = TypeVar("T")


def find_live(
    ops: Sequence[T],
    outputs: Iterable[int],
    made: Callable[[T], Iterable[int]],
    read: Callable[[T], Iterable[int | None]],
    has_effect: Callable[[T], bool] = lambda op: False,
) -> list[int]:
    """The places of the ops that are needed, in order, given what each makes and reads."""
    needed: set[int | None] = set(outputs)
    places = []
    for place in reversed(range(len(ops))):
        op = ops[place]
        if has_effect(op) or not needed.isdisjoint(made(op)):
            places.append(place)
            needed.update(read(op))
    return places[::-1]


def made_by(op: Op) -> list[int]:
    """The values that an op makes."""
    return [result.value for result in results_of(op)]


def last_reads(groups: Iterable[Iterable[Op]]) -> dict[int, int]:
    """The group of ops that reads a value last, or makes it where no later one reads it."""
    last: dict[int, int] = {}
    for place, ops in enumerate(groups):
        for op in ops:
            last.update((value, place) for value in made_by(op))
            last.update((o.value, place) for o in operands(op) if o.value is not None)
    return last


def ends_of_life(program: Program) -> dict[int, int]:
    """The place of the op after which a value may go, for those that nobody outside the program holds."""
    stays = {*program.outputs, *(~i for i in range(len(program.inputs)) if i not in program.donated)}
    return {value: place for value, place in last_reads([op] for op in program.ops).items() if value not in stays}


def live_bytes(program: Program) -> list[int]:
    """The bytes that are alive after each op, of what the program makes and is given."""
    sizes = {value: size_of(base) for value, base in bases_of(program).items()}
    live = sum(map(size_of, program.inputs))
    after = []
    dying: dict[int, list[int]] = {}
    for value, place in ends_of_life(program).items():
        dying.setdefault(place, []).append(value)
    for place, op in enumerate(program.ops):
        live += sum(sizes[value] for value in made_by(op))
        live -= sum(sizes[value] for value in dying.get(place, ()))
        after.append(live)
    return after
