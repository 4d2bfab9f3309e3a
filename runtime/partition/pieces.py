"""Pieces: divides a recorded program into parts of few ops, by what the ops are and nothing else.

A stream is cut where an op's hash is the largest of the next four. Equal stretches of different streams, at any place
of them, are so divided alike, and a piece does not know where it stood: where a view begins, or its gradient, is a
run-time number, lists are taken apart, and what nobody needs is left out. List elements that lie in their arrays in
another way than others of their sizes are copied, by pieces of a copy each; where streams keep differing, tensors of
different sizes are put together by pieces that write one each, and lists that grow in blocks of 1, 2, 4, 8 ... Ops with
the hashes 3 1 4 1 5 9 2 6 are cut behind 4, 9 and 6. All that consecutive ops do to an element of their lists is a
piece, as an optimizer's step of one parameter; so are many ops in a row that read nothing, as where its states are
made. Where that is, and which pieces are equal, is found in C++ (`csrc/region/pieces.cpp`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torchtpu.runtime import _C
from torchtpu.runtime.ir.calls import written
from torchtpu.runtime.ir.list_ops import element_of, with_lists_apart
from torchtpu.runtime.ir.program import Lifted, Op, Operand, Program, Scalar, Write
from torchtpu.runtime.ir.values import is_part, operands, rewrite
from torchtpu.runtime.lowering.fragments import Fragments

from .dead_ops import without_values
from .split import PartNumbers

_WRITES_A_PROGRAM = 1000  # cost what a program costs: it compiles for some 20 ms, a launch takes some 20 us
_MOST_JOINS = 1 << 14  # lists of sizes that are remembered
# Lengths in which a list came before it is taken apart; and the fewest elements, above which two lengths suffice, and
# the most that a piece has: XLA compiles so many reads of one array in a time that grows with their square.
_MANY_LENGTHS, _LONG_LIST, _LONGEST_LIST = 8, 128, 1024


class Piece:
    """A part of a region. Equal ones have one `identity`: all but `lines`, that of the region and those of the ops.

    Its program is written when somebody asks for it; a launch of a known one does not. It has `num_ops` of the
    region's ops, none where it copies or writes an element of a list. Who divides says how many of its sizes,
    `most_variables`, may change where it is padded: 0 where it is not to be. Once it `is_settled`, its identity and
    `offsets` stay: what was compiled under the one takes the other.
    """

    __slots__ = (
        "_calls", "_donated", "_made", "_program", "_region",
        "floats", "identity", "inputs", "ints", "is_settled", "lines", "most_variables", "num_ops", "offsets",
        "outputs",
    )  # fmt: skip

    def __init__(
        self,
        region: Program,
        identity: int,
        lines: tuple[str, ...],
        calls: tuple[tuple[int, int, tuple[int, ...], tuple[int, ...]], ...],
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        made: tuple[int, ...],
        donated: tuple[int, ...],
        floats: tuple[int, ...],
        ints: tuple[int, ...],
        offsets: tuple[int, ...],
    ) -> None:
        self.most_variables = 0
        self.is_settled = False
        self.num_ops = len(calls)
        self.identity = identity
        self.lines = lines
        self.inputs = inputs
        self.outputs = outputs
        self.floats = floats
        self.ints = ints
        self.offsets = offsets
        self._region = region
        # The ops, with an element of their lists, the values of which only the shape is taken, and the arguments that
        # are ints and become run-time numbers.
        self._calls = calls
        self._made = made
        self._donated = donated
        self._program: Program | None = None

    @property
    def place(self) -> int:
        """That of its first op in the region."""
        return self._calls[0][0]

    @property
    def places(self) -> list[int]:
        """Those of its ops."""
        return [place for place, *_ in self._calls]

    @property
    def is_of_an_element(self) -> bool:
        """Whether it is what ops do to an element of their lists."""
        return any(element >= 0 for _, element, *_ in self._calls)

    @property
    def names(self) -> tuple[str, ...]:
        """Those of its ops."""
        return tuple(self._region.ops[place].name for place, *_ in self._calls)

    @property
    def program(self) -> Program:
        """The piece as a program of its own; after the region's run-time ints it takes the `offsets`."""
        if self._program is None:
            self._program = self._written(self.offsets)
        return self._program

    @property
    def placed_program(self) -> Program:
        """The same with constants for the `offsets`."""
        return self._written(())

    @property
    def placed_identity(self) -> int:
        """The `identity` of those that begin where this one does."""
        return hash((self.identity, self.offsets))

    def fix_offsets(self) -> None:
        """Makes constants of the `offsets`: the piece is another one then."""
        self.identity = self.placed_identity
        self.offsets = ()
        self._program = None

    def _written(self, offsets: tuple[int, ...]) -> Program:
        numbers = PartNumbers()
        places = _Places(len(self.ints)) if offsets else None
        taken = [self._taken(place, element, unread) for place, element, unread, _ in self._calls]
        bases = {operand.value: operand.base for op in taken for operand in operands(op)}
        rewritten = [rewrite(op, numbers.read, numbers.make, numbers.lift) for op in taken]
        ops = tuple(rewritten)
        if places is not None:
            ops = tuple(_placed(op, ints, places) for op, (*_, ints) in zip(rewritten, self._calls, strict=True))
        if places is not None and places.offsets != list(offsets):
            raise AssertionError("a piece whose views begin elsewhere")
        return Program(
            ops=ops,
            inputs=tuple(bases[value] for value in self.inputs),
            outputs=self._made,
            donated=self._donated,
            floats=len(self.floats),
            ints=len(self.ints) + len(offsets),
            line=self._region.line,
        )

    def _taken(self, place: int, element: int, unread: tuple[int, ...]) -> Op:
        op = self._region.ops[place]
        return without_values(op if element < 0 else element_of(op, element), unread)


class Divider:
    """Divides the programs of one platform; knows what it was asked before."""

    def __init__(self, fragments: Fragments) -> None:
        self._fragments = fragments
        self._dividers: dict[str, _C.Divider] = {}  # by what is watched: it decides what is checked
        self._writes: dict[tuple[Any, ...], int] = {}  # that put tensors of these sizes together
        self._lengths: dict[tuple[Any, ...], set[int]] = {}  # of lists that were put together alike
        self._patterns: dict[tuple[Any, ...], set[tuple[int, ...]]] = {}  # which tensors of lists were the same

    def divide(
        self,
        program: Program,
        *,
        is_often_new: bool = False,
        is_new: Callable[[Piece], bool] = lambda _: False,
        takes_apart: Callable[[Piece, list[Piece]], bool] = lambda *_: False,
    ) -> list[Piece]:
        """The pieces of a program, in order; none where no op of it is needed. New programs keep coming where it
        `is_often_new`. Ops are pieces of their own where somebody `takes_apart` a piece that `is_new`."""
        watched = self._fragments.watch()
        divider = self._dividers.get(watched)
        if divider is None:
            divider = self._dividers[watched] = _C.Divider(self._fragments.maps, self._facts, self._fragments.ints)
        choices = (self._is_worth_writes, self._grows, self._varies) if is_often_new else ()
        plain, added = with_lists_apart(program, self._fragments.maps, *choices)
        filling = [place for place, op in enumerate(plain.ops) if is_often_new and _copies_a_part(op)]
        apart = sorted({*added, *filling})

        def divided(*taken_apart: Piece) -> list[Piece]:
            alone = [place for piece in taken_apart for place in piece.places]
            return [Piece(plain, *row) for row in divider.divide(plain, apart, alone, is_often_new)]

        pieces = divided()
        new = [piece for piece in pieces if piece.num_ops > 1 and not piece.is_of_an_element and is_new(piece)]
        if new:
            ops = {piece.place: piece for piece in divided(*new)}
            taken_apart = [piece for piece in new if takes_apart(piece, [ops[place] for place in piece.places])]
            pieces = divided(*taken_apart) if taken_apart else pieces
        places = set(added)
        for piece in pieces if places else ():
            if piece.place in places:
                piece.num_ops = 0
        return pieces

    def _is_worth_writes(self, op: Op) -> bool:
        """Whether an op that puts tensors together is still cheaper as a write of each than as a program of its own."""
        sizes = op.args[1], *(element.sizes for element in op.args[0])
        if len(self._writes) >= _MOST_JOINS:
            self._writes.clear()
        self._writes[sizes] = count = self._writes.get(sizes, 0) + len(op.args[0])
        return count <= _WRITES_A_PROGRAM

    def _grows(self, op: Op) -> bool:
        """Whether lists like an op's have come in many lengths, or are long."""
        first, length = op.args[0][0], len(op.args[0])
        known = self._lengths.setdefault((op.name, op.args[1], first.dtype, len(first.sizes)), set())
        if len(known) < _MANY_LENGTHS:
            known.add(length)
        return length > _LONGEST_LIST or len(known) >= (_MANY_LENGTHS if length < _LONG_LIST else 2)

    def _varies(self, op: Op) -> bool:
        """Whether it changed from list to list like an op's which of its tensors are the same."""
        values = [element.value for element in op.args[0]]
        key = op.name, op.args[1], op.args[0][0].dtype, op.args[0][0].sizes
        if len(self._patterns) >= _MOST_JOINS:
            self._patterns.clear()
        known = self._patterns.setdefault(key, set())
        if len(known) < _MANY_LENGTHS and len(set(values)) < len(values):
            places: dict[int | None, int] = {}
            known.add(tuple([places.setdefault(value, i) for i, value in enumerate(values)]))
        return len(known) == _MANY_LENGTHS

    def _facts(self, calls: Sequence[tuple[Op, int]]) -> list[tuple[bool, list[int]]]:
        """Of ops, or of what they do to an element of their lists: whether they have checks, and what they read."""
        apart = (op if element < 0 else element_of(op, element) for op, element in calls)
        found = self._fragments.find([_with_ints(op, self._fragments.ints(op)) for op in apart])
        return [
            (bool(fragment.checks), [*fragment.used, *(n for n in fragment.forwards if n is not None)])
            for fragment, _ in found
        ]


def _copies_a_part(op: Op) -> bool:
    """Whether an op copies a part of an array, or into one: others of other sizes may follow it there."""
    return op.name == "copy_" and any(is_part(g) for g in (*op.args[:2], *op.writes) if not isinstance(g, Scalar))


class _Places:
    """Counts where the views of a piece begin, after so many run-time ints: each has a number of its own, also where
    others begin there. That may be chance."""

    def __init__(self, ints: int) -> None:
        self.offsets: list[int] = []
        self._ints = ints

    def lifted(self, offset: int) -> Lifted:
        self.offsets.append(offset)
        return Lifted("i", self._ints + len(self.offsets) - 1)


def _with_ints(op: Op, places: Sequence[int]) -> Op:
    """The op with run-time ints for the ints among its arguments at these places."""
    lifted = {i: Lifted("i", k) for k, i in enumerate(places) if i < len(op.args) and type(op.args[i]) is int}
    return replace(op, args=tuple(lifted.get(i, given) for i, given in enumerate(op.args))) if lifted else op


def _placed(op: Op, ints: Sequence[int], places: _Places) -> Op:
    """The op with run-time ints for the arguments `ints`, and for where those of its tensors begin that are not all of
    their arrays."""
    found: dict[int, Operand] = {}  # by the ids of those of `op`

    def placed(given: Any) -> Any:
        if isinstance(given, tuple):
            return tuple(map(placed, given))
        offset = _begins_at(given) if isinstance(given, Operand) else None
        if offset is None:
            return given
        made = found[id(given)] = replace(given, offset=places.lifted(offset))
        return made

    args = tuple(places.lifted(given) if i in ints else placed(given) for i, given in enumerate(op.args))
    writes = []
    for write in op.writes:
        operand, offset = written(op, write), _begins_at(write)
        if offset is not None:
            same = _begins_at(operand) == offset
            write = replace(write, offset=found[id(operand)].offset if same else places.lifted(offset))
        writes.append(write)
    return replace(op, args=args, writes=tuple(writes))


def _begins_at(given: Operand | Write) -> int | None:
    """Where a part of an array begins; None where that is a run-time int, or it is all of the array."""
    return None if isinstance(given.offset, Lifted) or not is_part(given) else given.offset
