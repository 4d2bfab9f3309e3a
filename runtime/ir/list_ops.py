"""Divides recorded ops over lists into ops on each of their elements, and puts elements together one by one.

What many tensors undergo one op after the other then stands together for each tensor.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torchtpu.runtime.ir.values import operands

from .calls import results_of
from .program import Base, Op, Operand, Program, Result, Write
from .strided_access import row_major

_LARGEST_BLOCK = 256  # tensors that one op puts together
_LARGEST_BLOCK_BYTES = 1 << 24


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
    count = _length(op)
    written = [_element(op.args[write.arg], write.element or 0).value for write in op.writes]
    kept = [value for value in written if value is not None]
    if count < 2 or len(set(kept)) < len(kept) or op.padding is not None:
        return []
    return [element_of(op, i) for i in range(count)]


def element_of(op: Op, place: int) -> Op:
    """The op for one element of its lists, which has `elements`."""
    count = _length(op)
    return dataclasses.replace(
        op,
        args=tuple([_only(argument, place, count) for argument in op.args]),
        results=tuple([_only(result, place, count) for result in op.results]),
        writes=tuple([dataclasses.replace(write, element=0) for write in op.writes if write.element == place]),
    )


def _length(op: Op) -> int:
    """How long the lists of an op are."""
    return next((len(argument) for argument in op.args if type(argument) is tuple), 0)


def with_lists_apart(
    program: Program,
    maps: Callable[[Op], bool],
    is_worth_it: Callable[[Op], bool] = lambda _: False,
    grows: Callable[[Op], bool] = lambda _: False,
    varies: Callable[[Op], bool] = lambda _: False,
) -> tuple[Program, list[int]]:
    """The program with lists made plain for ops on all of a list, and the places of the ops that this adds.

    List elements that lie in their arrays in another way than others of their sizes are copied: such an op is then the
    same whichever of its elements are views. Tensors of different sizes are put together by a write of each, where
    that `is_worth_it`: such ops have any number of elements of any sizes, and a write is the same for all. Tensors of
    equal sizes are put together in blocks of 1, 2, 4, 8 ..., and these by a write of each, where their number `grows`.
    Where it `varies` which of them are the same, those are copied that were there before.
    """
    ways = [_way(op, maps, is_worth_it, grows, varies) for op in program.ops]
    if not any(ways):
        return program, []
    ops: list[Op] = []
    added: list[int] = []
    values = itertools.count(1 + max(made.value for op in program.ops for made in results_of(op)))

    def add(op: Op) -> None:
        added.append(len(ops))
        ops.append(op)

    def plain(given: Operand, line: str, *, is_repeated: bool = False) -> Operand:
        if given.value is None or (_is_plain(given) and not is_repeated):
            return given
        base = Base(given.sizes, given.dtype)
        result = Result(next(values), given.sizes, row_major(given.sizes), given.dtype, base)
        add(Op("alias_copy", (given,), (result,), (), line))
        return Operand(result.value, result.sizes, result.strides, 0, result.dtype, base)

    def different(elements: Sequence[Operand], line: str) -> list[Operand]:
        known: set[int | None] = set()
        made = []
        for element in elements:
            made.append(plain(element, line, is_repeated=element.value in known))
            known.add(element.value)
        return made

    for op, way in zip(program.ops, ways, strict=True):
        if way == "joined":
            for write in _writes_of([plain(a, op.line) for a in op.args[0]], op, values):
                add(write)
            continue
        if way == "grown":
            elements = different(op.args[0], op.line) if varies(op) else op.args[0]
            if _is_mixed(elements) or len({type(element.offset) for element in elements}) > 1:
                elements = [plain(element, op.line) for element in elements]
            for part in _grown(elements, op, values):
                add(part)
            continue
        if way == "repeated":
            op = dataclasses.replace(op, args=(tuple(different(op.args[0], op.line)), *op.args[1:]))
        if way == "mixed":
            args = [tuple([plain(a, op.line) for a in given]) if _is_mixed(given) else given for given in op.args]
            op = dataclasses.replace(op, args=tuple(args))
        ops.append(op)
    return dataclasses.replace(program, ops=tuple(ops)), added


def _way(
    op: Op,
    maps: Callable[[Op], bool],
    is_worth_it: Callable[[Op], bool],
    grows: Callable[[Op], bool],
    varies: Callable[[Op], bool],
) -> str:
    """What becomes of an op on lists; "" where it stays."""
    if _joins(op):
        is_ragged = len({element.sizes for element in op.args[0]}) > 1
        if op.name == "cat" and is_ragged and is_worth_it(op):
            return "joined"
        if not is_ragged and grows(op):
            return "grown"
        if not is_ragged and varies(op):
            return "repeated"
    return "mixed" if any(map(_is_mixed, op.args)) and not op.writes and not maps(op) else ""


def _joins(op: Op) -> bool:
    """Whether an op puts more than two tensors together that become parts of one array."""
    if op.name not in ("cat", "stack", "_stack") or len(op.args[0]) <= 2:
        return False
    elements, (result,) = op.args[0], op.results
    return (
        isinstance(result, Result)
        and result.base == (result.sizes, result.dtype)
        and result.strides == row_major(result.sizes)
        and all(e.value is not None and e.dtype == result.dtype and 0 not in e.sizes for e in elements)
        and all(len(e.sizes) + (op.name != "cat") == len(result.sizes) for e in elements)
    )


def _grown(elements: Sequence[Operand], op: Op, values: Iterator[int]) -> Iterator[Op]:
    """Ops that put blocks of these together, each written before the next one is made."""
    blocks = list(_blocks_of(elements, op, values))
    made = [block.results[0] for block in blocks]
    if len(blocks) == 1:
        yield dataclasses.replace(op, args=blocks[0].args)
        return
    wholes = [Operand(r.value, r.sizes, r.strides, 0, r.dtype, r.base) for r in made if isinstance(r, Result)]
    for block, write in zip(blocks, _writes_of(wholes, op, values), strict=True):
        yield block
        yield write


def _blocks_of(elements: Sequence[Operand], op: Op, values: Iterator[int]) -> Iterator[Op]:
    """Ops that put 256, 128, 64 ... of these together, as `op` does all of them."""
    (result,) = op.results
    assert isinstance(result, Result)
    axis, count = _axis(op), len(elements)
    of_one = result.sizes[axis] // count
    bytes_of_one = math.prod(result.sizes) // count * result.dtype.itemsize
    largest = min(_LARGEST_BLOCK, max(1, _LARGEST_BLOCK_BYTES // bytes_of_one))
    begin = 0
    while begin < count:
        length = 1 << (min(largest, count - begin).bit_length() - 1)
        sizes = *result.sizes[:axis], of_one * length, *result.sizes[axis + 1 :]
        made = Result(next(values), sizes, row_major(sizes), result.dtype, Base(sizes, result.dtype))
        yield Op(op.name, (tuple(elements[begin : begin + length]), op.args[1]), (made,), (), op.line, op.settings)
        begin += length


def _writes_of(elements: Sequence[Operand], op: Op, values: Iterator[int]) -> Iterator[Op]:
    """Ops that write these, one after the other, into the array that `op` makes: the first one makes it."""
    (result,) = op.results
    assert isinstance(result, Result)
    axis = _axis(op)
    made = [*itertools.islice(values, len(elements) - 1), result.value]
    first = elements[0]
    behind = (0, result.sizes[axis] - first.sizes[axis])
    pad = *(0, 0) * (len(result.sizes) - 1 - axis), *behind
    yield Op("constant_pad_nd", (first, pad, 0), (dataclasses.replace(result, value=made[0]),), (), op.line)
    place = first.sizes[axis]
    for element, old, new in zip(elements[1:], made, made[1:], strict=False):
        offset = place * result.strides[axis]
        geometry = element.sizes, result.strides, offset, result.dtype, result.base
        write = Write(0, None, new, *geometry, replaces=False)
        yield Op("copy_", (Operand(old, *geometry), element, None), (None,), (write,), op.line)
        place += element.sizes[axis]


def _axis(op: Op) -> int:
    """Along which dimension of its result an op puts tensors together."""
    (result,) = op.results
    assert isinstance(result, Result)
    axis: int = op.args[1] % len(result.sizes)
    return axis


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
