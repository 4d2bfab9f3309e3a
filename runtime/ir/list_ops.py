"""Divides recorded ops over lists into ops on each of their elements, and copies elements that lie apart.

What many tensors undergo one op after the other then stands together for each tensor.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torchtpu.runtime.ir.values import operands

from .calls import results_of
from .program import Base, Op, Operand, Program, Result
from .strided_access import row_major


def take_apart(ops: Iterable[Op], maps: Callable[[Op], bool]) -> list[Op]:
    """The ops, those that `maps` says go in step through their lists as one op per element.

    Of consecutive ones all that happens to the first element comes first, where no element needs another one.
    """
    made: list[Op] = []
    rows: list[list[Op]] = []  # consecutive ops, taken apart
    homes: dict[int | None, int] = {}  # the elements to which the values belong that these make
    for op in ops:
        row = elements(op) if maps(op) else []
        if rows and (len(row) != len(rows[0]) or not _is_apart(row, homes)):
            made += _by_element(rows)
            rows, homes = [], {}
        if row:
            rows.append(row)
            homes.update((result.value, i) for i, part in enumerate(row) for result in results_of(part))
        else:
            made.append(op)
    return [*made, *_by_element(rows)]


def _by_element(rows: list[list[Op]]) -> Iterator[Op]:
    return (part for column in zip(*rows, strict=True) for part in column)


def _is_apart(row: list[Op], homes: dict[int | None, int]) -> bool:
    """Whether each element takes nothing that was made of another one."""
    return all(homes.get(o.value, i) == i for i, part in enumerate(row) for o in operands(part))


def elements(op: Op) -> list[Op]:
    """The op for each element of its lists; none where there are fewer than two, two are one storage,
    or what counts of them is not all."""
    count = next((len(argument) for argument in op.args if type(argument) is tuple), 0)
    written = [_element(op.args[write.arg], write.element or 0).value for write in op.writes]
    kept = [value for value in written if value is not None]
    if count < 2 or len(set(kept)) < len(kept) or op.padding is not None:
        return []
    return [
        dataclasses.replace(
            op,
            args=tuple(_only(argument, i, count) for argument in op.args),
            results=tuple(_only(result, i, count) for result in op.results),
            writes=tuple(dataclasses.replace(write, element=0) for write in op.writes if write.element == i),
        )
        for i in range(count)
    ]


def with_plain_elements(program: Program, maps: Callable[[Op], bool]) -> tuple[Program, list[int]]:
    """The program with copies of list elements that lie in their arrays in another way than others of their sizes, and
    the places of the copies: an op on all of a list is then the same whichever of its elements are views."""
    mixed = {
        place for place, op in enumerate(program.ops) if any(map(_is_mixed, op.args)) and not op.writes and not maps(op)
    }
    if not mixed:
        return program, []
    ops: list[Op] = []
    copies: list[int] = []
    values = itertools.count(1 + max(made.value for op in program.ops for made in results_of(op)))

    def plain(given: Operand, line: str) -> Operand:
        if given.value is None or _is_plain(given):
            return given
        base = Base(given.sizes, given.dtype)
        result = Result(next(values), given.sizes, row_major(given.sizes), given.dtype, base)
        copies.append(len(ops))
        ops.append(Op("alias_copy", (given,), (result,), (), line))
        return Operand(result.value, result.sizes, result.strides, 0, result.dtype, base)

    for place, op in enumerate(program.ops):
        args = [
            tuple([plain(a, op.line) for a in given]) if place in mixed and _is_mixed(given) else given
            for given in op.args
        ]
        ops.append(dataclasses.replace(op, args=tuple(args)) if place in mixed else op)
    return dataclasses.replace(program, ops=tuple(ops)), copies


def _is_mixed(given: Any) -> bool:
    """Whether a list has tensors of equal sizes that lie in their arrays in different ways."""
    if type(given) is not tuple or not all(isinstance(element, Operand) for element in given):
        return False
    ways: dict[Any, Any] = {}
    for element in given:
        way = element.strides, element.base
        if ways.setdefault((element.sizes, element.dtype), way) != way:
            return True
    return False


def _is_plain(given: Operand) -> bool:
    """Whether a tensor is all of its array, as this lies."""
    return given.base == (given.sizes, given.dtype) and given.strides == row_major(given.sizes)


def _only(argument: Any, element: int, count: int) -> Any:
    is_list = type(argument) is tuple and len(argument) == count
    return (argument[element],) if is_list else argument


def _element(argument: Any, element: int) -> Operand:
    found = argument[element] if type(argument) is tuple else argument
    assert isinstance(found, Operand)
    return found
