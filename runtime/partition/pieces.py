"""Pieces: divides a recorded program into parts of one to four ops, by what the ops are and nothing else.

A stream is cut where an op's hash is the largest of the next four. Equal stretches of different streams, at any place
of them, are so divided alike, and a piece does not know where it stood: where a view begins is a run-time number, lists
are taken apart, and what nobody needs is left out. Ops with the hashes 3 1 4 1 5 9 2 6 are cut behind 4, 9 and 6.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from torchtpu.runtime.ir.list_ops import take_apart
from torchtpu.runtime.ir.program import Lifted, Op, Operand, Program, Random, Scalar, Write
from torchtpu.runtime.lowering.fragments import Fragments

from .clusters import needed, reading
from .split import Part, split

_MOST = 4  # ops of a piece


def divide(program: Program, fragments: Fragments) -> list[Part]:
    """The pieces of a program, in order; none where no op of it is needed."""
    ops = take_apart(program.ops, fragments.maps)
    kept, unread, _ = needed(program, ops, fragments)
    whole = replace(program, ops=reading(ops, kept, unread))
    return [_offsets_lifted(part) for part in split(whole, ends_of([_mark(op) for op in whole.ops]))] if kept else []


def ends_of(marks: Sequence[int]) -> list[int]:
    """The places where pieces of ops with these hashes end, but the last: of equal hashes the later one."""
    ends, start = [], 0
    while len(marks) - start > _MOST:
        start = 1 + max(range(start, start + _MOST), key=lambda place: (marks[place], place))
        ends.append(start)
    return ends


def identity(program: Program) -> tuple[Any, ...]:
    """What equal pieces have in common: all but their lines. Of their arguments 1, 1.0 and True are not equal, nor are
    0.0 and -0.0."""
    ops = tuple(replace(op, line="") for op in program.ops)
    return (
        ops,
        tuple(_sign(op.args) for op in program.ops),
        program.inputs,
        program.outputs,
        program.donated,
        program.floats,
        program.ints,
    )


def _mark(op: Op) -> int:
    """A hash of what an op does, whatever the values that it takes: the same in every process."""
    writes = tuple((write.arg, write.element, write.replaces, _shape(write)) for write in op.writes)
    return _hash((op.name, op.precision, _sign(op.args), writes, op.padding and repr(op.padding.bounds)))


@functools.lru_cache(maxsize=1 << 14)
def _hash(sign: tuple[Any, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(sign).encode("utf-8", "surrogatepass"), digest_size=8).digest())


def _sign(given: Any) -> Any:
    match given:
        case Operand():
            return given.value is None, _shape(given)
        case Lifted():
            return given.kind
        case Scalar():
            return _sign(given.value), str(given.dtype), given.wrapped
        case Random():
            return "random"
        case tuple() | list():
            return tuple(map(_sign, given))
        case torch.device():
            return given.type
        case _:
            return repr(given)


def _shape(given: Operand | Write) -> tuple[Any, ...]:
    is_lifted = isinstance(given.offset, Lifted)
    return given.sizes, given.strides, is_lifted, str(given.dtype), tuple(given.base.shape), str(given.base.dtype)


def _offsets_lifted(part: Part) -> Part:
    """The part with run-time ints for where those of its tensors begin that are not all of their arrays."""
    first = part.program.ints
    places: dict[int, Lifted] = {}

    def placed(given: Operand | Write) -> Any:
        if isinstance(given.offset, Lifted) or not _is_part(given):
            return given
        place = places.setdefault(given.offset, Lifted("i", first + len(places)))
        return replace(given, offset=place)

    def argument(given: Any) -> Any:
        if isinstance(given, tuple):
            return tuple(map(argument, given))
        return placed(given) if isinstance(given, Operand) else given

    ops = tuple(
        op
        if op.padding is not None
        else replace(op, args=tuple(map(argument, op.args)), writes=tuple(map(placed, op.writes)))
        for op in part.program.ops
    )
    if not places:
        return part
    program = replace(part.program, ops=ops, ints=first + len(places))
    return replace(part, program=program, offsets=tuple(places))


def _is_part(given: Operand | Write) -> bool:
    """Whether a tensor has elements, but fewer than its array."""
    taken = math.prod(given.sizes) * given.dtype.itemsize
    return 0 < taken < math.prod(given.base.shape) * given.base.dtype.itemsize
