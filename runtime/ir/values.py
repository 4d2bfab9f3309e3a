"""What a program's ops read and make, and the same ops with other value numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from .calls import results_of, written
from .program import Base, Lifted, Op, Operand, Program, Random, Result, Scalar, Write


def bases_of(program: Program) -> dict[int, Base]:
    """The array that holds each value."""
    bases = {~i: base for i, base in enumerate(program.inputs)}
    bases.update((made.value, made.base) for op in program.ops for made in results_of(op))
    return bases


def without_lines(program: Program) -> Program:
    """The program without the places in the user's code: the same for all that do the same."""
    return replace(program, ops=tuple(replace(op, line="") for op in program.ops), line="")


def size_of(base: Base) -> int:
    """The bytes of an array."""
    return math.prod(base.shape) * base.dtype.itemsize


def is_part(given: Operand | Write) -> bool:
    """Whether a tensor has elements, but fewer than its array."""
    taken = math.prod(given.sizes) * given.dtype.itemsize
    return 0 < taken < size_of(given.base)


def roots_of(program: Program) -> dict[int, int | None]:
    """For values that are newer versions of a storage: the oldest, an input or what an op of the program made."""
    roots: dict[int, int | None] = {}
    for op in program.ops:
        for write in op.writes:
            before = written(op, write).value
            roots[write.value] = before if before is None else roots.get(before, before)
    return roots


def operands(op: Op) -> Iterator[Operand]:
    """The tensors among an op's arguments."""
    for argument in op.args:
        for item in argument if isinstance(argument, (tuple, list)) else (argument,):
            if isinstance(item, Operand):
                yield item


def rewrite(
    op: Op,
    read: Callable[[int], int | None],
    make: Callable[[int], int],
    lift: Callable[[Lifted], Lifted] = lambda lifted: lifted,
) -> Op:
    """The op with other numbers: for the values it reads, for those it makes, and for its run-time numbers."""

    def offset(given: int | Lifted) -> int | Lifted:
        return lift(given) if isinstance(given, Lifted) else given

    def argument(given: Any) -> Any:
        match given:
            case Operand():
                value = None if given.value is None else read(given.value)
                return replace(given, value=value, offset=offset(given.offset))
            case Lifted():
                return lift(given)
            case Scalar(value=Lifted() as lifted):
                return replace(given, value=lift(lifted))
            case Random():
                return Random(lift(given.seed), lift(given.offset))
            case tuple() | list():
                return type(given)(map(argument, given))
            case _:
                return given

    def result(given: Result | tuple[Result | None, ...] | None) -> Any:
        if isinstance(given, tuple):
            return tuple(map(result, given))
        return given and replace(given, value=make(given.value))

    args = tuple(map(argument, op.args))
    results = tuple(map(result, op.results))
    writes = tuple(replace(w, value=make(w.value), offset=offset(w.offset)) for w in op.writes)
    padding = op.padding and replace(op.padding, counts=tuple(map(lift, op.padding.counts)))
    return replace(op, args=args, results=results, writes=writes, padding=padding)
