"""Padded layouts: makes one program on longer arrays out of programs with the same ops and other sizes.

Every int of a program that may be a size, or follow from one, is a *slot*: the dimensions of arrays, what a view takes
of its array, ints among the arguments. The slots of several programs of the same outline are compared: one that does
not change is a constant, one that does is a variable, or an expression of the variables found before it. Each program
that is to run in this form has *all* its slots compared with their expressions: that they were guessed from a few
programs decides how often the form is of use, never whether it is right.

    x: f32[5, 4] ... f32[9, 4]      the slots of x are a, 4
    x[1:]                           takes a - 1 of a, from 1 on
    x.reshape(-1)                   4*a elements
    a is 9, its capacity 32         x lies in f32[32, 4], and 9 is a run-time number

What an op makes of longer arrays is the business of `evaluate`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import itertools
import math
import operator
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from torchtpu.runtime import _C
from torchtpu.runtime.ir.calls import results_of, schema_of, written
from torchtpu.runtime.ir.program import (
    Base,
    Lifted,
    Op,
    Operand,
    PaddedExtent,
    Padding,
    Program,
    Result,
    Scalar,
    Symbolic,
    Write,
)
from torchtpu.runtime.ir.scalar_lifting import IsStructural
from torchtpu.runtime.ir.strided_access import Digit, find_access, row_major
from torchtpu.runtime.ir.values import bases_of, operands
from torchtpu.runtime.ir.weak_values import WeakValues

from .ask import Askable
from .refusals import Refusals, Refused, RefusedAgain

# The shortest dimension in memory: one that saves programs, one that saves work where the largest array would have so
# many elements, or fewer if a size seems to stay so small, and one where it would still have so many.
_LEAST_CAPACITY, _SHORT_CAPACITY, _SHORTEST_CAPACITY = 32, 8, 4
_MANY_ELEMENTS, _FEW_ELEMENTS = 1 << 18, 1 << 12
# Where the largest array has so few elements, computing what does not count costs less than a program of its own, and
# these capacities are left out.
_FEWEST_PROGRAMS, _LEFT_OUT = 1 << 14, (16, 64)
# The shortest dimension of a size where no array or tensor that depends on it then has more elements than so many.
_ROOMY_CAPACITY, _MOST_ROOMY = 128, 1 << 13
# Above it capacities are an eighth of a power of two apart, where arrays are not few elements.
_WIDEST_DOUBLING = 1024
# How many times as large as its own a form may be that a program is given, and for how many programs if more than a
# little larger.
_MOST_WASTE, _LITTLE_WASTE, _MOST_LENT = 4, 2, 16
_LEAST_SIZE = 2  # a dimension of one element is broadcast, and may have any stride
_MOST_SIZE = 2**31 - 1
_LEAST_BUCKET = 8  # whoever rounds sizes up to powers of two from here on pads already
MOST_VARIABLES = 7
_NAMES = "abcdefghijklmnopqrstuvwxyz"  # of these and of places
_FEW_VARIABLES = 4  # of which two programs tell enough
_MOST_BEHIND = 16  # elements by which a size may be longer than its variable in the same capacity
_MOST_COMPARED = 64  # programs of which the most different ones are found
_MOST_SAMPLES = 8  # programs whose slots are compared, and the fewest that tell more than that they differ
_FEWEST_SAMPLES = 3
_FEWEST_EQUAL = 4  # programs in which sizes that a lowering has other words for are equal
_FEWEST_SURE = 3  # different values that are no chance, where they follow from others
_MOST_CHANCE = 8  # what sizes of fewer different values may be longer by
_MOST_RECENT_OPS = 20_000  # of programs that are kept, and the fewest and most of those
_FEWEST_RECENT = 4
_MOST_RECENT = 256
_MOST_OUTLINES = 256
_MOST_TEMPLATES = 4  # of one outline
_FEWEST_REFUSED = 16  # programs of one outline, before ever fewer are tried
_TIMES_TOO_MANY = 4  # that one counts for which has too many sizes
_FEWEST_OF_SIZES = 2  # and of those that a lowering refuses of about these sizes
_MOST_OF_OUTLINE = 16  # of such sizes
_NUMBERS = ("number", "Optional[number]")  # what is no size, by its type in a schema
_ZERO = "max(1 - ("
_INCONCLUSIVE = "InconclusiveDimensionOperation"  # jax's: what a lowering asks hangs on how small sizes may be
_MARKED = re.compile("⟨(.*?)⟩")
_DIVISORS = (2, 3, 4, 5, 6, 8, 16, 32)


class _NoSize(Refused):
    """Nothing that could be padded changes."""


class _TooManySizes(Refused):
    """More sizes change than are padded; others of these ops will hardly have fewer."""


class Bound(NamedTuple):
    """A variable's least and largest value, and how long a dimension of its size is in memory."""

    least: int
    most: int
    capacity: int


class Size(NamedTuple):
    """`(constant + the sum of factor * the product of (name + offset)) // divisor + after`."""

    terms: tuple[tuple[int, tuple[tuple[str, int], ...]], ...]
    constant: int = 0
    divisor: int = 1
    after: int = 0

    def value(self, values: Mapping[str, int]) -> int:
        """What it is, given what the variables are."""
        total = self.constant
        for factor, names in self.terms:
            total += factor * math.prod(values[name] + offset for name, offset in names)
        return total // self.divisor + self.after

    def bound_of_only(self, least: int) -> tuple[str, int, bool]:
        """The only variable, and the least that it is, or the most, where the size is at least so much."""
        ((factor, ((name, offset),)),) = self.terms
        wanted = (least - self.after) * self.divisor - self.constant
        return name, (-(-wanted // factor) if factor > 0 else wanted // factor) - offset, factor > 0

    def bound(self, bound: Callable[[str], Bound]) -> Bound:
        """What it may be, and how long a dimension of this size is in memory: what `evaluate.Sizes.capacity` says of
        the same size."""
        bounds = {name: bound(name) for name in sorted(self.variables)}
        least = most = self.constant
        for factor, names in self.terms:
            ends = ([bounds[n].least + offset, bounds[n].most + offset] for n, offset in names)
            products = [factor * math.prod(chosen) for chosen in itertools.product(*ends)]
            least, most = least + min(products), most + max(products)
        least, most = (end // self.divisor + self.after for end in (least, most))
        capacity = most
        if all(factor > 0 and all(offset >= 0 for _, offset in names) for factor, names in self._products()):
            capacities = {name: bound.capacity for name, bound in bounds.items()}
            constant = self.constant if self.divisor == 1 else 0
            constant += sum(f * math.prod(offset for _, offset in names) for f, names in self.terms) * (
                self.divisor == 1
            )
            capacity = max(most, self.value(capacities) - self.after - constant)
        return Bound(least, most, capacity)

    def _products(self) -> Iterator[tuple[int, tuple[tuple[str, int], ...]]]:
        """The terms; those of one variable alone may have any offset, which is a constant."""
        for factor, names in self.terms:
            yield factor, () if len(names) == 1 else names

    def text(self, name_of: Callable[[str], str]) -> str:
        """As `jax.export.symbolic_shape` reads it, which knows no parentheses."""
        monomials: dict[tuple[str, ...], int] = {}
        for factor, names in self.terms:
            for taken in itertools.product((True, False), repeat=len(names)):
                rest = math.prod(offset for (_, offset), is_name in zip(names, taken, strict=True) if not is_name)
                found = tuple([name for (name, _), is_name in zip(names, taken, strict=True) if is_name])
                monomials[found] = monomials.get(found, 0) + factor * rest
        constant = monomials.pop((), 0) + self.constant
        words = [
            "*".join(([str(factor)] if factor != 1 else []) + [name_of(name) for name in names])
            for names, factor in monomials.items()
            if factor
        ]
        text = " + ".join(words + ([str(constant)] if constant else []))
        if self.divisor != 1:
            text = f"floordiv({text}, {self.divisor})"
        return f"{text} + {self.after}" if self.after else text

    def in_terms_of(self, root: Size) -> Size | None:
        """What it is of the root, which has the name "" then; None where it does not follow from it alone."""
        itself = ((1, (("", 0),)),)
        if self == root:
            return Size(itself)
        (one, constant), (other, of_root) = self._of_one(), root._of_one()
        if one is None or one != other or self.divisor % root.divisor:
            return None
        behind, rest = divmod(constant - of_root, root.divisor)
        if rest:
            return None
        divisor = self.divisor // root.divisor
        return Size(itself, behind % divisor, divisor, behind // divisor) if divisor != 1 else Size(itself, behind)

    def _of_one(self) -> tuple[tuple[int, str] | None, int]:
        """A factor, its variable, and a constant, of which it is the sum divided by its divisor, if it is that."""
        if len(self.terms) != 1 or len(self.terms[0][1]) != 1:
            return None, 0
        ((factor, ((name, offset),)),) = self.terms
        return (factor, name), factor * offset + self.constant + self.divisor * self.after

    @property
    def variables(self) -> set[str]:
        return {name for _, names in self.terms for name, _ in names}

    @property
    def is_variable(self) -> bool:
        """Whether it is a variable, and nothing else."""
        return self.is_plain and len(self.terms[0][1]) == 1

    @property
    def is_plain(self) -> bool:
        """Whether it is a product of variables, and nothing else."""
        only = [factor == 1 and not any(offset for _, offset in names) for factor, names in self.terms]
        return only == [True] and (self.constant, self.divisor, self.after) == (0, 1, 0)


def _variable(name: str, constant: int = 0) -> Size:
    return Size(((1, ((name, 0),)),), constant)


# The padded ops of a program, each with the expressions that are not 0 where it is right; raises what lowering raises.
FindConditions = Callable[[Program], Iterable[tuple[Op, tuple[str, ...]]]]
Leaf = Any  # a slot: an int or a `Size`; None in an outline that only says what programs have in common


def padded_capacity(
    size: int, least: int = _LEAST_CAPACITY, left_out: Sequence[int] = (), widest: int = _WIDEST_DOUBLING
) -> int:
    """How long a dimension of so many elements is in memory, where it is at least so long."""
    doubled = 1 << (size - 1).bit_length()
    if doubled > widest:
        step = doubled // 8
        return max(least, -(-size // step) * step)
    return max(least, doubled * 2 if doubled in left_out else doubled)


# ---- outlines


Run = tuple[tuple[int, int], ...]  # dimensions of an array, and in which steps a dimension of a tensor runs over each


class _View(NamedTuple):
    """A tensor over an array of `shape`: all of it where `access` is None, else factors, ranges, dims and order of one
    (see `PaddedExtent`).

    Where `runs` is not None, it lies at a run-time offset, or at the beginning and is no such part as a diagonal is
    none: each of its dimensions runs over these dimensions of its array at once, in these steps, or has one element.
    Where `strides` is not None, it lies at a run-time offset, and runs over none. Where `places` is not None, it is no
    such part: these are its offset and strides. `offset` is the run-time one. Where it `is_empty`, it has no elements,
    and lies anywhere.
    """

    shape: tuple[Leaf, ...]
    sizes: tuple[Leaf, ...]
    access: tuple[Any, ...] | None = None
    strides: tuple[Leaf, ...] | None = None
    is_whole: bool = True
    places: tuple[Leaf, ...] | None = None
    runs: tuple[Run, ...] | None = None
    offset: Lifted | None = None
    is_empty: bool = False


class _PaddedCall(NamedTuple):
    """An op: a view for each tensor among its arguments, an expression for each of its numbers that is a slot, None for
    the others, and views of what it makes."""

    name: str
    args: tuple[Any, ...]
    made: tuple[_View, ...]


class _SizedProgram(NamedTuple):
    """A program with other things for its slots: the dimensions of each input, and the ops."""

    inputs: tuple[tuple[Leaf, ...], ...]
    calls: tuple[_PaddedCall, ...]


Outline = bytes  # all of a program but what its slots are; compared often


def _reader(is_special: IsStructural) -> _C.OutlineReader:
    """What reads the outlines and the slots of programs; it raises Refused where a view has none.

    A number that changes what its op means, as 2 does for `pow`, is no slot.
    """
    return _C.OutlineReader(
        _geometry_apart, lambda name, place, value: is_special(name, _argument_name(name, place), value), results_of
    )


def _with_slots(program: Program, slots: Iterable[Leaf], is_special: IsStructural) -> _SizedProgram:
    """The program with these for its slots, which stand in the order in which they are read."""
    left = iter(slots)
    slot: Callable[[int], Leaf] = lambda _: next(left)
    inputs = tuple(_dims(base.shape, slot) for base in program.inputs)
    return _SizedProgram(inputs, tuple(_call(op, slot, is_special) for op in program.ops))


def _call(op: Op, slot: Callable[[int], Leaf], is_special: IsStructural) -> _PaddedCall:
    def is_kept(place: int, value: Any) -> bool:
        return is_special(op.name, _argument_name(op.name, place), value)

    args = tuple([_argument(argument, slot, is_kept, place) for place, argument in enumerate(op.args)])
    made = tuple([_view(m.base, m.sizes, m.strides, getattr(m, "offset", 0), slot) for m in results_of(op)])
    return _PaddedCall(op.name, args, made)


def _argument_name(op_name: str, place: int) -> str:
    names = _arguments_of(op_name)
    return names[place] if place < len(names) else ""


@functools.lru_cache(maxsize=4096)
def _arguments_of(name: str) -> tuple[str, ...]:
    return tuple(argument.name for argument in schema_of(name).arguments)


def _argument(given: Any, slot: Callable[[int], Leaf], is_kept: Callable[[int, Any], bool], place: int) -> Any:
    kind = type(given)
    if kind is Operand:
        return _view(
            given.base, given.sizes, given.strides, given.offset, slot, is_zero=given.value is None, is_read=True
        )
    if kind is tuple or kind is list:
        return tuple([_argument(item, slot, is_kept, place) for item in given])
    number = given.value if kind is Scalar else given
    return slot(number) if type(number) is int and not is_kept(place, number) else None


def _view(
    base: Base,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int | Lifted,
    slot: Callable[[int], Leaf],
    *,
    is_zero: bool = False,
    is_read: bool = False,
) -> _View:
    if isinstance(offset, Lifted):
        view = _geometry(base.shape, sizes, strides, None, is_zero, is_read, slot=slot)
        return view._replace(offset=offset)
    return _geometry(base.shape, sizes, strides, offset, is_zero, is_read, slot=slot)


def _geometry(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int | None,
    is_zero: bool,
    is_read: bool,
    *,
    slot: Callable[[int], Leaf],
) -> _View:
    """The view of an array of this shape, `offset` None where that is a run-time number."""
    whole = _dims(sizes, slot)
    if is_zero:  # zeros of any shape
        return _View(whole, whole)
    dims = _dims(shape, slot)
    if 0 in sizes:
        return _View(dims, whole, is_whole=sizes == shape, is_empty=sizes != shape)
    if offset is None:
        runs = _runs_over(shape, sizes, strides)
        return _View(dims, whole, strides=tuple(map(slot, strides)) if runs is None else None, runs=runs)
    if sizes == shape and offset == 0 and _is_dense(sizes, strides):
        return _View(dims, whole)
    runs = _runs_over(shape, sizes, strides)
    is_diagonal = runs is not None and any(len(run) > 1 for run in runs)
    found = None if is_diagonal else find_access(shape, sizes, strides, offset)
    if found is None or (is_read and any(len(dim) > 1 for dim in found.dims)):  # a size that is a product is refused
        order = _order_of_run(sizes, strides)
        if order is None and found is None:
            if is_read:
                moves = (0 if size == 1 else slot(step) for size, step in zip(sizes, strides, strict=True))
                return _View(dims, whole, is_whole=False, places=(slot(offset), *moves))
            if offset or not is_diagonal:
                raise Refused("a write to what is no box of its array")
            return _View(dims, whole, is_whole=False, runs=runs)
    else:
        order = None
    if order is not None:
        run = (slot(math.prod(shape)),), ((slot(offset), slot(math.prod(sizes)), 1),), ((0,),), order
        return _View(dims, whole, run, is_whole=False)
    assert found is not None
    ranges = tuple((slot(r.start), slot(r.taken), r.step) for r in found.ranges)
    access = tuple(map(slot, found.factors)), ranges, found.dims, ()
    return _View(dims, whole, access, is_whole=found.is_whole)


def _geometry_apart(*of: Any) -> tuple[_View, tuple[int, ...]]:
    """The same without what its slots are, and these."""
    slots: list[int] = []
    return _geometry(*of, slot=slots.append), tuple(slots)


def _dims(sizes: tuple[int, ...], slot: Callable[[int], Leaf]) -> tuple[Leaf, ...]:
    """Dimensions as slots, but for those of one element, which are broadcast, and of none: these stand in programs of
    their own."""
    return tuple(size if size < _LEAST_SIZE else slot(size) for size in sizes)


def _runs_over(shape: tuple[int, ...], sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Run, ...] | None:
    """What each dimension of a tensor, wherever that begins, runs over in its array; None where some run over no whole
    dimensions, or two over the same."""
    below = row_major(shape)
    found = [
        () if size == 1 else _run_over(shape, below, size, stride) for size, stride in zip(sizes, strides, strict=True)
    ]
    dims = [dim for run in found if run is not None for dim, _ in run]
    return None if None in found or len(set(dims)) < len(dims) else tuple(run for run in found if run is not None)


def _run_over(shape: tuple[int, ...], below: tuple[int, ...], size: int, stride: int) -> Run | None:
    one: list[tuple[int, int]] = []
    several: list[tuple[int, int]] = []
    rest = stride
    for dim, (longest, step) in enumerate(zip(shape, below, strict=True)):
        if not one and stride >= step and stride % step == 0 and stride // step * (size - 1) < longest:
            one = [(dim, stride // step)]
        if rest >= step and rest // step * (size - 1) < longest:
            several.append((dim, rest // step))
            rest %= step
    return tuple(one) or (None if rest else tuple(several))


def _order_of_run(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """The order in which dimensions follow each other in a tensor whose elements lie one after the other, or None."""
    order = tuple(sorted(range(len(sizes)), key=lambda axis: (-strides[axis], axis)))
    is_run = _is_dense(tuple(sizes[axis] for axis in order), tuple(strides[axis] for axis in order))
    return order if is_run else None


@functools.lru_cache(maxsize=8192)
def _is_dense(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    return all(n == 1 or s == t for n, s, t in zip(sizes, strides, row_major(sizes), strict=True))


# ---- which expression a slot is


class _Fit:
    """Guesses what the slots of several programs are, from a column each: what it is in each of the programs. `starts`
    are columns that no dimension has: where parts of arrays begin."""

    def __init__(
        self, programs: Sequence[Program], columns: Iterable[tuple[int, ...]], starts: Collection[tuple[int, ...]]
    ) -> None:
        self._starts = starts
        self._num_places = 0
        self.variables: dict[str, tuple[int, ...]] = {}
        self._programs = programs
        self._counts = Counter(columns)
        self._known: dict[tuple[int, ...], Leaf] = {}

    @property
    def num_sizes(self) -> int:
        """How many variables are no places."""
        return len(self.variables) - self._num_places

    def of(self, column: tuple[int, ...], *, is_input: bool) -> Leaf:
        """What the slot is: an int, or a size, if need be that of a new variable."""
        if column.count(column[0]) == len(column):
            return column[0]
        if column not in self._known:
            self._known[column] = self._fit(column, is_input=is_input) or self._variable(column)
        return self._known[column]

    def known(self, column: tuple[int, ...]) -> Leaf:
        """What a slot is that `of` was asked for, or the most that another one is."""
        return self._known.get(column, max(column))

    def _variable(self, column: tuple[int, ...]) -> Size:
        is_place = column in self._starts
        if len(self.variables) == len(_NAMES) or (not is_place and self.num_sizes == MOST_VARIABLES):
            raise _TooManySizes("too many sizes change")
        if not is_place and len(column) <= self.num_sizes + 1 > _FEW_VARIABLES:
            raise Refused("more sizes change than programs tell")
        name = _NAMES[len(self.variables)]
        # Most that is made of `x[:, :-1]` is as long as that, and not as `x`.
        nearest = sorted(range(1 - _MOST_CHANCE, _MOST_CHANCE), key=abs)
        longer = {by: tuple([v + by for v in column]) for by in nearest if by == 0 or min(column) + by >= _LEAST_SIZE}
        by = max((by for by in longer if longer[by] not in self._known), key=lambda by: self._counts[longer[by]])
        if by == 0 and is_place:
            by = _LEAST_SIZE  # a part may begin at 0
            self._num_places += 1
        self.variables[name] = tuple([v + by for v in column])
        size = self._known[self.variables[name]] = _variable(name)
        return size if by == 0 else size._replace(constant=-by)

    def _fit(self, column: tuple[int, ...], *, is_input: bool) -> Size | None:
        is_sure = len(set(column)) >= _FEWEST_SURE
        for name, values in self.variables.items():
            found = _line(name, values, column)
            # That one size is so and so much longer than another may be chance.
            is_alike = found is not None and found.terms[0][0] == 1 and abs(found.constant) < _MOST_CHANCE
            if found and (is_alike or found.constant == 0 or (is_sure and not is_input)):
                return found
        if is_input:
            found = self._product(column) if is_sure else None
            return found if found is not None and found.is_plain else None
        found = self._asked(column)
        if found is not None:
            return found
        found = self._sum(column) or self._product(column) or self._quotient(column)
        is_alike = found is not None and max(abs(found.constant), abs(found.after)) < _MOST_CHANCE
        return found if is_alike or is_sure else None

    @functools.cached_property
    def _askable(self) -> Askable:
        return Askable(self._programs)

    def _asked(self, column: tuple[int, ...]) -> Size | None:
        """What the op that makes a size says that it is."""
        for name, values in self.variables.items():
            found = self._askable.quotient(column, functools.partial(self._at, name), values)
            if found is not None:
                return Size(((1, ((name, 0),)),), *found)
        return None

    def _at(self, name: str, column: tuple[int, ...], n: int) -> int:
        """What a known slot is where a variable is n, and the others are what they are in the first program."""
        if column.count(column[0]) == len(column):
            return column[0]
        leaf = self._known[column]
        values = {each: n if each == name else of[0] for each, of in self.variables.items()}
        return leaf.value(values) if isinstance(leaf, Size) else leaf

    def _sum(self, column: tuple[int, ...]) -> Size | None:
        for (x, xs), (y, ys) in itertools.combinations(self.variables.items(), 2):
            rest = {v - p - q for v, p, q in zip(column, xs, ys, strict=True)}
            if len(rest) == 1:
                return Size(((1, ((x, 0),)), (1, ((y, 0),))), rest.pop())
        return None

    def _product(self, column: tuple[int, ...]) -> Size | None:
        atoms = [(name, 0, values) for name, values in self.variables.items()]
        for size in list(self._known.values()):
            if isinstance(size, Size) and len(size.terms) == 1 and size.divisor == 1 and size.constant:
                factor, names = size.terms[0]
                if factor == 1 and len(names) == 1:
                    (name, _), values = names[0], self.variables[names[0][0]]
                    atoms.append((name, size.constant, tuple(v + size.constant for v in values)))
        for count in (2, 3):
            for chosen in itertools.combinations_with_replacement(atoms[:8], count):
                first = math.prod(values[0] for _, _, values in chosen)
                factor, rest = divmod(column[0], first) if first else (0, 1)
                products = map(math.prod, zip(*(values for _, _, values in chosen), strict=True))
                if not rest and factor and all(v == factor * p for v, p in zip(column, products, strict=True)):
                    return Size(((factor, tuple((name, offset) for name, offset, _ in chosen)),))
        return None

    def _quotient(self, column: tuple[int, ...]) -> Size | None:
        for (name, values), divisor in itertools.product(self.variables.items(), _DIVISORS):
            # What no constant can make right is left out first.
            far = values[0] - divisor * column[0]
            if any(abs(x - divisor * v - far) >= divisor for v, x in zip(column, values, strict=True)):
                continue
            for constant in range(divisor):
                rest = {v - (x + constant) // divisor for v, x in zip(column, values, strict=True)}
                if len(rest) == 1:
                    return Size(((1, ((name, 0),)),), constant, divisor, rest.pop())
        return None


def _line(name: str, values: Sequence[int], column: Sequence[int]) -> Size | None:
    """`factor * name + constant`, if that is what the column is."""
    low, high = min(range(len(values)), key=values.__getitem__), max(range(len(values)), key=values.__getitem__)
    factor, rest = divmod(column[high] - column[low], values[high] - values[low])
    constant = column[low] - factor * values[low]
    if rest or factor == 0 or any(v != factor * x + constant for v, x in zip(column, values, strict=True)):
        return None
    if factor < 0 and len(set(values)) < 3:
        return None
    return Size(((factor, ((name, 0),)),), constant)


# ---- programs of longer arrays


@dataclass(frozen=True, slots=True)
class PaddedProgram:
    """A program of longer arrays. After its own run-time ints it takes `numbers`; of the former those in `moves`, by
    place, are offsets in arrays of the first of two shapes, which are longer now, of the second. The numbers in
    `digits`, by place, are one more than `i // weight % size`, where i is the own run-time int at the place that
    precedes weight and size. Where the own run-time ints do not meet `limits`, a part runs over the end of a row, and
    the program that is padded is to run as it is. `inputs` and `outputs` are the shapes that count, by place, of the
    arrays that are longer. Its form was made for the first of the programs `samples`, and is what the others have in
    common.
    """

    program: Program
    numbers: tuple[int, ...]
    moves: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]
    digits: Mapping[int, tuple[int, int, int]]
    limits: Mapping[int, frozenset[Digit]]
    inputs: Mapping[int, tuple[int, ...]]
    outputs: Mapping[int, tuple[int, ...]]
    samples: tuple[Program, ...]
    form: PaddedForm


class PaddedForm:
    """What padded programs of the same capacities have in common: `program` with the run-time ints `numbers`, those
    of its ints that are offsets in arrays which are longer, with their dimensions and shapes, the variables that follow
    from an offset, what has to lie within a row, the inputs that are longer, and the outputs, these with what makes
    them: an op and which of its results, or -1 and an input. It was made for the program `first`. `executables` is for
    what runs it, by device, while something holds that, `making` for what will, while it is made.
    """

    def __init__(
        self,
        program: Program,
        numbers: tuple[Size, ...],
        moves: Mapping[int, tuple[tuple[Leaf, ...], tuple[int, ...]]],
        digits: Mapping[str, _Digit],
        within: Collection[tuple[_Digit, Leaf, int]],
        inputs: tuple[int, ...],
        outputs: tuple[tuple[int, int, int], ...],
        first: Program,
    ) -> None:
        self.program = program
        self._first = first
        self.executables: WeakValues[int, Any] = WeakValues()
        self.making: dict[int, Future[Any]] = {}
        self.losses: Any = None  # of regions that are made of pieces and may have this form
        self._numbers = numbers
        self._moves = moves
        self._digits = {i: found for i, n in enumerate(numbers) if (found := _digit_of(n, digits))}
        self._within = within
        self._inputs = inputs
        self._outputs = outputs
        self._conditions: list[tuple[Op, tuple[str, ...]]] | None = None

    def of(self, program: Program, values: Mapping[str, int], samples: tuple[Program, ...]) -> PaddedProgram:
        """A program in this form, given what the variables are."""
        outputs = {
            k: (program.inputs[place].shape if op < 0 else results_of(program.ops[op])[place].base.shape)
            for k, op, place in self._outputs
        }
        inputs = {i: program.inputs[i].shape for i in self._inputs}

        def known(leaf: Leaf) -> int:
            return leaf.value(values) if isinstance(leaf, Size) else leaf

        return PaddedProgram(
            self.program,
            tuple([0 if i in self._digits else n.value(values) for i, n in enumerate(self._numbers)]),
            {i: (tuple(map(known, dims)), shape) for i, (dims, shape) in self._moves.items()},
            {
                i: (place, math.prod(map(known, shape[dim + 1 :])), known(shape[dim]))
                for i, (place, shape, dim) in self._digits.items()
            },
            self._limits(known),
            inputs,
            outputs,
            (self._first, *samples),
            self,
        )

    def _limits(self, known: Callable[[Leaf], int]) -> dict[int, frozenset[Digit]]:
        limits: dict[int, frozenset[Digit]] = {}
        for (place, shape, dim), size, step in self._within:
            weight, whole = math.prod(map(known, shape[dim + 1 :])), known(shape[dim])
            digit = Digit(weight, whole, whole - 1 - step * (known(size) - 1))
            limits[place] = limits.get(place, frozenset()) | {digit}
        return limits

    def check(self, padded: PaddedProgram, find: FindConditions) -> None:
        """Raises Refused where what the ops were traced for is not so, or what `find` raises."""
        if self._conditions is None:
            self._conditions = [(op, conditions) for op, conditions in find(self.program) if conditions]
        for op, conditions in self._conditions:
            _check_sure(op, conditions, padded)
            _check_unequal(op, conditions, padded, self.program.ints - len(self._numbers))


class Template:
    """The form that programs of one outline have in common, the latest first. Raises Refused where they have none."""

    def __init__(self, is_special: IsStructural, samples: Mapping[tuple[int, ...], Program]) -> None:
        self._is_special = is_special
        self.samples = tuple(samples.values())
        if len({_shapes(program) for program in self.samples}) < 2:
            raise _NoSize("numbers change, and no size")
        columns = list(zip(*samples, strict=True))
        sized = _with_slots(self.samples[0], range(len(columns)), is_special)
        fit = _Fit(self.samples, columns, {columns[i] for i in _starts_of(sized.calls)})
        inputs = sum(len(base.shape) for base in self.samples[0].inputs)
        self._slots = [fit.of(column, is_input=i < inputs) for i, column in enumerate(columns)]
        if not fit.variables:
            raise _NoSize("no size changes")
        if all(_is_bucket(value) for values in fit.variables.values() for value in values):
            raise Refused("sizes that are buckets already")
        self._homes = {name: self._home(name) for name in fit.variables}
        self._num_sizes = fit.num_sizes
        places: dict[Leaf, list[int]] = {}
        for place, leaf in enumerate(self._slots):
            places.setdefault(leaf if isinstance(leaf, Size) else None, []).append(place)
        self._constants = _at(places.pop(None, []))
        self._expected = self._constants(self._slots)
        self._sizes = {size: _at(where) for size, where in places.items()}
        self._values = fit.variables
        self._behind = {name: self._longest(name) for name in fit.variables}
        self._shapes = self._shapes_of(fit, lambda program: [base.shape for base in bases_of(program).values()])
        self._read_shapes = self._shapes_of(fit, lambda p: [read.sizes for op in p.ops for read in operands(op)])
        elements = self._most_elements({})
        self._shortest = {name: self._capacity_of(name, values, elements) for name, values in fit.variables.items()}
        if self._most_elements(self._shortest) >= _MANY_ELEMENTS:
            self._shortest = dict.fromkeys(fit.variables, _SHORTEST_CAPACITY)
        elements = self._most_elements(self._shortest)
        self._left_out = _LEFT_OUT if elements <= _FEWEST_PROGRAMS else ()
        self._widest = _WIDEST_DOUBLING if 2 * elements > _MANY_ELEMENTS else _MOST_SIZE
        for name in self._homes:
            roomy = self._shortest | {name: _ROOMY_CAPACITY}
            if self._most_elements(roomy, of=name) <= _MOST_ROOMY:
                self._shortest = roomy
        self._is_wide = True  # a form is for all smaller sizes, too
        self._sized: _SizedProgram | None = None  # with expressions for slots
        self._limits: dict[str, tuple[int, int]] = {}
        self._wholes: dict[str, str] = {}
        self._bounded: tuple[str, ...] | None = None  # the variables that capacities follow from; the others are places
        self._programs: dict[tuple[Bound, ...], PaddedForm] = {}
        self._largest: dict[tuple[Bound, ...], int] = {}  # elements of an array
        self._lent: dict[tuple[Bound, ...], int] = {}  # programs in larger forms than theirs would be

    def pad(
        self,
        program: Program,
        slots: Sequence[int],
        find: FindConditions,
        most_variables: int = MOST_VARIABLES,
        *,
        is_new: bool = True,
    ) -> PaddedProgram:
        """The program in this form; Refused where a slot is not what it is in this form, or more sizes change, or a
        condition that the form has is not met, or it would be new and may not be, and what is raised while conditions
        are found."""
        if self._num_sizes > most_variables:
            raise Refused("more sizes change than are padded")
        values = {name: slots[place] + behind for name, (place, behind) in self._homes.items()}
        if self._constants(slots) != self._expected or any(
            {*places(slots)} != {size.value(values)} for size, places in self._sizes.items()
        ):
            sizes = ", ".join(map(str, values.values()))
            raise Refused(f"{self._misfit(slots, values)} does not follow from the sizes {sizes}")
        form = self._form(program, values, is_new=is_new)
        padded = form.of(program, values, self.samples)
        try:
            form.check(padded, find)
        except Exception as error:
            if not self._is_wide or _INCONCLUSIVE not in str(error):
                raise
            self._is_wide = False
            self._programs.clear()
            return self.pad(program, slots, find, most_variables, is_new=is_new)
        return padded

    def _home(self, name: str) -> tuple[int, int]:
        """A slot that is the variable, or less than it by so much."""
        behind = 0 if _variable(name) in self._slots else _LEAST_SIZE
        return self._slots.index(_variable(name, -behind)), behind

    def _misfit(self, slots: Sequence[int], values: Mapping[str, int]) -> int:
        """The first slot that is not what it is in this form."""
        of = (leaf.value(values) if isinstance(leaf, Size) else leaf for leaf in self._slots)
        return next(slot for slot, expected in zip(slots, of, strict=True) if slot != expected)

    @property
    def num_variables(self) -> int:
        """How many sizes and places change."""
        return len(self._homes)

    def _form(self, program: Program, values: Mapping[str, int], *, is_new: bool) -> PaddedForm:
        """The form for these values of the variables; another thread may make it, too."""
        if self._sized is None:
            sized = _with_slots(program, self._slots, self._is_special)
            self._limits, self._wholes, self._sized = _limits_of(sized.calls), _wholes_of(sized.calls), sized
        if self._bounded is not None:
            own = tuple([self._bound(name, values) for name in self._bounded])
            known = self._programs.get(own) or self._larger(own, values)
            if known is not None:
                return known
        if not is_new:
            raise Refused("sizes of other capacities")
        maker = _Maker(program, self._sized, lambda name: self._bound(name, values))
        made = maker.make()
        _check_arrays(made.program)
        self._bounded = tuple(maker.bounds)
        return self._programs.setdefault(tuple(maker.bounds.values()), made)

    def _larger(self, own: tuple[Bound, ...], values: Mapping[str, int]) -> PaddedForm | None:
        """The smallest form that has room for these values and is not much larger than their own would be, which many
        programs pay for."""
        assert self._bounded is not None
        sizes = [values[name] for name in self._bounded]
        found = [
            (self._elements(bounds), form)
            for bounds, form in list(self._programs.items())
            if all(bound.least <= size <= bound.most for size, bound in zip(sizes, bounds, strict=True))
        ]
        if not found:
            return None
        elements, form = min(found, key=lambda each: each[0])
        waste = elements / self._elements(own)
        if elements > _FEWEST_PROGRAMS and waste > _LITTLE_WASTE:
            self._lent[own] = self._lent.get(own, 0) + 1
            if waste > _MOST_WASTE or self._lent[own] > _MOST_LENT:
                return None
        return form

    def _elements(self, bounds: tuple[Bound, ...]) -> int:
        """How many the largest array has in the form for these bounds."""
        if bounds not in self._largest:
            assert self._bounded is not None
            find = dict(zip(self._bounded, bounds, strict=True)).__getitem__
            sizes = ([s.bound(find).capacity if isinstance(s, Size) else s for s in shape] for shape in self._shapes)
            self._largest[bounds] = max(map(math.prod, sizes), default=1)
        return self._largest[bounds]

    def _shapes_of(self, fit: _Fit, shapes_of: Callable[[Program], Iterable[tuple[int, ...]]]) -> set[tuple[Leaf, ...]]:
        """Of shapes that each program has as many of those that change."""
        found = set()
        for shapes in zip(*map(shapes_of, self.samples), strict=True):
            found.add(tuple(map(fit.known, zip(*shapes, strict=True))))
        return {shape for shape in found if any(isinstance(size, Size) for size in shape)}

    def _most_elements(self, shortest: Mapping[str, int], of: str = "") -> int:
        """How many the largest array has, at least, where sizes are so short in memory; or the largest array or tensor
        that depends on one of them."""
        longest = {
            name: padded_capacity(max(self._values[name]) + self._behind[name], shortest.get(name, _LEAST_CAPACITY))
            for name in self._homes
        }
        depends = lambda s: any(isinstance(d, Size) and of in d.variables for d in s)
        shapes = filter(depends, self._shapes | self._read_shapes) if of else self._shapes
        sizes = ([d.value(longest) if isinstance(d, Size) else d for d in shape] for shape in shapes)
        return max(map(math.prod, sizes), default=0)

    def _capacity_of(self, name: str, values: Sequence[int], elements: int) -> int:
        """How long a dimension of a variable's size is in memory, at least. What is longer now than ever before may go
        on growing: by one, if one size before is all that is known."""
        known = [*dict.fromkeys(values)]
        is_growing = known == sorted(known, reverse=True) and (len(known) > 2 or known[0] == known[1] + 1)
        is_short = max(values) + self._behind[name] <= _SHORT_CAPACITY and not is_growing
        is_many = elements >= (_FEW_ELEMENTS if is_short else _MANY_ELEMENTS)
        return _SHORT_CAPACITY if is_many else _LEAST_CAPACITY

    def _longest(self, name: str) -> int:
        """By how many elements a size is longer than the variable, where they share their capacity."""
        alike = [size.constant for size in self._sizes if size.terms == ((1, ((name, 0),)),) and size.divisor == 1]
        return max([0, *(constant for constant in alike if constant <= _MOST_BEHIND)])

    def _capacity(self, name: str, value: int) -> int:
        return padded_capacity(value + self._behind[name], self._shortest[name], self._left_out, self._widest)

    def _fewest(self, name: str, capacity: int) -> int:
        """The least size that has this capacity."""
        low, high = 0, capacity
        while high - low > 1:
            middle = (low + high) // 2
            longest = padded_capacity(middle, self._shortest[name], self._left_out, self._widest)
            low, high = (low, middle) if longest == capacity else (middle, high)
        return high

    def _bound(self, name: str, values: Mapping[str, int]) -> Bound:
        """What a variable may be in the form for these values. The first part of a dimension has the capacity of that,
        if its own is not much shorter: which of the two it would be makes no form of its own."""
        value, behind = values[name], self._behind[name]
        if value < _LEAST_SIZE:
            raise Refused(f"a size of {value}")
        capacity = self._capacity(name, value)
        fewest = _LEAST_SIZE if self._is_wide else self._fewest(name, capacity) - behind
        if name in self._wholes:
            whole = self._capacity(self._wholes[name], values[self._wholes[name]])
            if capacity < whole < _MOST_WASTE * capacity:
                capacity = whole
        least, most = self._limits.get(name, (0, _MOST_SIZE))
        most = min(capacity - behind, most)
        bound = Bound(max(_LEAST_SIZE, fewest, least), most, min(capacity, most + behind))
        if not bound.least <= value <= bound.most:
            raise Refused(f"a size of {value}, where it is {bound.least} to {bound.most}")
        return bound


def _limits_of(value: Any) -> dict[str, tuple[int, int]]:
    """The least and the most that variables are where views take parts of them, or they are parts of what stays, and
    where no dimension is shorter than `_LEAST_SIZE`."""
    found: dict[str, tuple[int, int]] = {}
    for view in _views_of(value):
        for size in (*view.shape, *view.sizes):
            if isinstance(size, Size) and len(size.terms) == 1 and len(size.terms[0][1]) == 1:
                name, bound, is_least = size.bound_of_only(_LEAST_SIZE)
                least, most = found.get(name, (0, _MOST_SIZE))
                found[name] = (max(least, bound), most) if is_least else (least, min(most, bound))
        factors, ranges, *_ = view.access or ((), ())
        for factor, (start, taken, step) in zip(factors, ranges, strict=True):
            begin = start if isinstance(start, int) else 0  # at least
            if isinstance(start, int) and isinstance(factor, int) and _is_shifted(taken) and step == 1:
                name, behind = taken.terms[0][1][0][0], taken.constant
                least, most = found.get(name, (0, factor))
                found[name] = least, min(most, factor - start - behind)
            elif isinstance(taken, int) and _is_shifted(factor):
                name, behind = factor.terms[0][1][0][0], factor.constant
                least, most = found.get(name, (0, _MOST_SIZE))
                found[name] = max(least, begin + (taken - 1) * step + 1 - behind), most
    return found


def _starts_of(value: Any) -> set[int]:
    """Of an outline that has numbers for its slots those that are where parts begin, and nothing else."""
    starts: set[int] = set()
    others: set[int] = set()
    for view in _views_of(value):
        factors, ranges, *_ = view.access or ((), ())
        starts |= {start for start, _, _ in ranges}
        others |= {*view.shape, *view.sizes, *factors, *(taken for _, taken, _ in ranges)}
    return starts - others


def _wholes_of(value: Any) -> dict[str, str]:
    """The variables of dimensions of which views take as many elements, from the first on, as another variable says, by
    that one."""
    found: dict[str, str] = {}
    for view in _views_of(value):
        factors, ranges, *_ = view.access or ((), ())
        for factor, (start, taken, step) in zip(factors, ranges, strict=True):
            if start == 0 and step == 1 and _is_shifted(factor) and _is_shifted(taken):
                whole, part = factor.terms[0][1][0][0], taken.terms[0][1][0][0]
                if whole != part:
                    found[part] = min(whole, found.get(part, whole))
    return found


def _is_shifted(size: Leaf) -> bool:
    """Whether it is a variable and a constant."""
    if not isinstance(size, Size) or len(size.terms) != 1 or size.divisor != 1 or size.after:
        return False
    factor, names = size.terms[0]
    return factor == 1 and len(names) == 1 and names[0][1] == 0


def _views_of(value: Any) -> Iterator[_View]:
    if isinstance(value, _View):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _views_of(item)


def _check_arrays(program: Program) -> None:
    """Raises Refused where an op takes an array as of another length than it is made with: whatever is guessed of
    sizes, it is guessed alike for both."""
    arrays = bases_of(program)
    for op in program.ops:
        if any(o.value is not None and o.base != arrays[o.value] for o in operands(op)):
            raise Refused(f"{op.name} of an array that is of two lengths")


def _is_bucket(size: int) -> bool:
    return size >= _LEAST_BUCKET and size & (size - 1) == 0


class _Sample:
    """A program, and what its slots are once somebody asks."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._slots: tuple[Outline, list[int]] | Refused | None = None

    def slots(self, reader: _C.OutlineReader) -> tuple[Outline, list[int]]:
        """Its outline and its slots; raises Refused where it has none."""
        if self._slots is None:
            try:
                self._slots = reader.read(self.program)
            except Refused as error:
                self._slots = error
        if isinstance(self._slots, Refused):
            raise Refused(str(self._slots))
        return self._slots


class Layouts:
    """The templates, and the programs that they are made of. Methods may be called from any thread."""

    def __init__(self, is_special: IsStructural) -> None:
        self._is_special = is_special
        self._reader = _reader(is_special)
        self._lock = threading.Lock()  # guards what follows
        self._recent: deque[_Sample] = deque()
        self._num_ops = 0  # of these
        self._asked: _Sample | None = None  # the latest, which may be noted next
        self._templates: dict[Outline, list[Template]] = {}
        self._refusals = Refusals(_FEWEST_REFUSED, _MOST_OUTLINES)
        self._refused_sizes = Refusals(_FEWEST_OF_SIZES, _MOST_OUTLINES * _MOST_OF_OUTLINE)  # by lowerings

    def note(self, program: Program) -> None:
        """Keeps a program for a while: others of the same ops may follow."""
        with self._lock:
            self._recent.append(self._sample(program))
            self._num_ops += len(program.ops)
            while len(self._recent) > _MOST_RECENT or (
                self._num_ops > _MOST_RECENT_OPS and len(self._recent) > _FEWEST_RECENT
            ):
                self._num_ops -= len(self._recent.popleft().program.ops)

    def outline_of(self, program: Program) -> Outline:
        """What a program has in common with those that it may share a form with; raises Refused."""
        return self._reader.read(program)[0]

    def pad(
        self,
        program: Program,
        others: Iterable[Program],
        find: FindConditions,
        most_variables: int = MOST_VARIABLES,
    ) -> PaddedProgram:
        """The padded form of a program, as programs of the same ops had it, or as these, which are asked for when they
        are needed, and those of the same ops that were noted, have it; raises what `find` raises for the last in which
        sizes change, or Refused."""
        with self._lock:
            sample = self._asked = self._sample(program)
        shared, slots = sample.slots(self._reader)
        with self._lock:
            known = list(self._templates.get(shared, ()))
        sizes = shared, tuple(map(int.bit_length, slots))  # what a lowering refuses, it refuses of about these sizes
        self._refusals.check(shared)
        self._refused_sizes.check(sizes)
        error: Exception = _NoSize("no other sizes of it are known")
        times = 1
        others = itertools.chain(others, (program for template in known for program in template.samples))
        for make, is_new in self._ways(program, shared, slots, known, others):
            try:
                template = make()
                padded = template.pad(program, slots, find, most_variables, is_new=is_new)
            except Exception as raised:  # noqa: BLE001 -- another form may do
                if isinstance(error, _NoSize) or not isinstance(raised, _NoSize):
                    error = raised
                if isinstance(raised, _TooManySizes):
                    times = _TIMES_TOO_MANY
                continue
            self._refused_sizes.forget(sizes)
            self._keep(shared, template)
            return padded
        self._refusals.note(shared, str(error), times)
        if isinstance(error, RefusedAgain) or not isinstance(error, Refused):
            self._refused_sizes.note(sizes, str(error))
        raise error

    def _keep(self, shared: Outline, template: Template) -> None:
        """Keeps a template that was of use, as the first to be tried."""
        self._refusals.forget(shared)
        with self._lock:
            others = [t for t in self._templates.get(shared, ()) if t is not template]
            self._templates[shared] = [template, *others][:_MOST_TEMPLATES]
            while len(self._templates) > _MOST_OUTLINES:
                del self._templates[next(iter(self._templates))]

    def pad_as(self, program: Program, samples: Iterable[Program], find: FindConditions) -> PaddedProgram:
        """The padded form of a program that another process made of these samples, for the first of them; raises
        Refused, or what `find` raises."""
        shared, slots = self._reader.read(program)
        first, *others = map(_Sample, samples)
        template = Template(self._is_special, self._samples(program, shared, {}, others, _MOST_SAMPLES))
        for of_first, each in self._samples(program, shared, {}, [first], 1).items():
            template.pad(each, of_first, find)
        return template.pad(program, slots, find, is_new=False)

    def _ways(
        self, program: Program, shared: Outline, slots: list[int], known: list[Template], others: Iterable[Program]
    ) -> Iterator[tuple[Callable[[], Template], bool]]:
        """What gives templates, and whether capacities may be new to them: first those that have programs of these
        capacities, then those in which most changes, then new ones of programs in which much changes, and of the latest
        few, in which less does."""
        for is_new, templates in ((False, known), (True, sorted(known, key=lambda t: -t.num_variables))):
            for template in templates:
                yield functools.partial(_same, template), is_new
        with self._lock:
            found = [*map(self._sample, others), *reversed(self._recent)]
        samples = self._samples(program, shared, {tuple(slots): program}, found, _MOST_COMPARED)
        differing = _differing(list(samples), _MOST_SAMPLES)
        latest = [list(itertools.islice(samples, count)) for count in (_FEWEST_SAMPLES, 2)]
        for chosen in dict.fromkeys(map(tuple, (differing, *latest))):
            latest_first = {slots: program for slots, program in samples.items() if slots in chosen}
            yield functools.partial(Template, self._is_special, latest_first), True

    def _sample(self, program: Program) -> _Sample:
        """A program with what was found out of it. Under the lock."""
        known = (sample for sample in (self._asked, *reversed(self._recent)) if sample and sample.program is program)
        return next(known, None) or _Sample(program)

    def _samples(
        self,
        program: Program,
        shared: Outline,
        first: Mapping[tuple[int, ...], Program],
        others: Iterable[_Sample],
        most: int,
    ) -> dict[tuple[int, ...], Program]:
        """The first ones, and others of a program's outline with other slots, each with its slots: so many at most."""
        samples, names = dict(first), [op.name for op in program.ops]
        for other in others:
            if len(samples) < most and [op.name for op in other.program.ops] == names:
                with contextlib.suppress(Refused):
                    outlined, found = other.slots(self._reader)
                    if outlined == shared:
                        samples.setdefault(tuple(found), other.program)
        return samples


def _same(template: Template) -> Template:
    return template


def _at(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What makes a tuple of a sequence's items at these places."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda items: tuple([items[place] for place in places])


def _differing(samples: Sequence[tuple[int, ...]], most: int) -> list[tuple[int, ...]]:
    """The first of these columns of slots, and those with the most values that no slot before had: a size that stayed
    through the latest samples would be taken for a constant."""
    chosen, left = [samples[0]], list(samples[1:])
    changing = [i for i, column in enumerate(zip(*samples, strict=True)) if column.count(column[0]) < len(column)]
    known = {i: {samples[0][i]} for i in changing}
    while left and len(chosen) < most:
        best = max(left, key=lambda slots: sum(slots[i] not in known[i] for i in changing))
        left.remove(best)
        chosen.append(best)
        for i in changing:
            known[i].add(best[i])
    return chosen


def _shapes(program: Program) -> tuple[tuple[int, ...], ...]:
    """The shapes of all arrays, and of what is read of them."""
    read = [operand.sizes for op in program.ops for operand in operands(op)]
    return (*read, *(base.shape for base in bases_of(program).values()))


def shape_agnostic_signature(program: Program) -> str:
    """What programs have in common that differ in sizes alone."""
    ops = [(op.name, [o.value for o in operands(op)], [made.value for made in results_of(op)]) for op in program.ops]
    return hashlib.sha256(repr(ops).encode()).hexdigest()


def _check_unequal(op: Op, expressions: Sequence[str], padded: PaddedProgram, first: int) -> None:
    """Refuses an op that was traced for sizes of which none of these expressions, as jax writes them, is 0, where one
    is, or hangs on a place; the padded program's numbers are its run-time ints from the `first` on."""
    places = () if op.padding is None else [count.index - first for count in op.padding.counts]
    found = zip("abcdefgh", places, strict=False)
    values = {name: padded.numbers[place] for name, place in found if place not in padded.digits}
    for expression in expressions:
        if value_of(expression, values) == 0:
            raise Refused(f"{op.name} where {expression} is 0")


def is_zero(expression: str) -> str:
    """An expression that is 0 unless this one is."""
    return f"{_ZERO}{expression})^2, 0)"


def _check_sure(op: Op, expressions: Sequence[str], padded: PaddedProgram) -> None:
    """Refuses an op for which sizes of few programs were taken for equal: these may be so by chance."""
    taken = [expression for expression in expressions if expression.startswith(_ZERO)]
    if taken and len(padded.samples) < _FEWEST_EQUAL:
        raise Refused(f"{op.name} where {', '.join(taken)} is not 0, in {len(padded.samples)} programs")


def marked(expression: str) -> str:
    """An expression of sizes within a message."""
    return f"⟨{expression}⟩"


def with_sizes(message: str, place: int, work: Any) -> str:
    """A message of the op at this place of a work's program, with what the expressions marked in it are there."""
    if "⟨" not in message:
        return message
    counts = work.program.ops[place].padding.counts
    values = {name: int(work.ints[count.index]) for name, count in zip("abcdefgh", counts, strict=False)}
    return _MARKED.sub(lambda found: str(value_of(found[1], values)), message)


def value_of(expression: str, values: Mapping[str, int]) -> int:
    """What an expression of sizes, as jax writes it, is; Refused where it is none."""
    return int(_value(_parsed(expression), values))


def values_of(expression: str, values: Mapping[str, npt.NDArray[np.int64]]) -> Any:
    """The same for many values of its variables at once: int64, of the variables' common shape, or one number."""
    return _value(_parsed(expression), values)


@functools.lru_cache(maxsize=1024)
def _parsed(expression: str) -> ast.expr:
    return ast.parse(expression.replace("^", "**"), mode="eval").body


_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow, ast.USub: operator.neg,
}  # fmt: skip
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "floordiv": operator.floordiv, "mod": operator.mod, "max": np.maximum, "min": np.minimum,
}  # fmt: skip


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name) and node.id in values:
        return values[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, values), _value(node.right, values))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand, values))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        return _FUNCTIONS[node.func.id](*(_value(item, values) for item in node.args))
    raise Refused(f"the size {ast.unparse(node)}")


_Place = TypeVar("_Place", Operand, Write)


class _Digit(NamedTuple):
    """Where in a dimension of an array of these dimensions the run-time int at `place`, an offset, lies."""

    place: int
    shape: tuple[Leaf, ...]
    dim: int


def _digit_of(number: Size, digits: Mapping[str, _Digit]) -> _Digit | None:
    return digits.get(number.terms[0][1][0][0]) if number.is_variable else None


class _Maker:
    """Makes the program of longer arrays out of one that has expressions for its slots."""

    def __init__(self, program: Program, sized: _SizedProgram, find: Callable[[str], Bound]) -> None:
        self._program, self._sized, self._find = program, sized, find
        self.bounds: dict[str, Bound] = {}  # of the variables that have needed some
        self._numbers: dict[Size, Lifted] = {}
        self._moves: dict[int, tuple[tuple[Leaf, ...], tuple[int, ...]]] = {}  # by run-time int, which is an offset
        self._digits: dict[str, _Digit] = {}  # by variable, which is one more
        self._within: dict[tuple[_Digit, Leaf, int], None] = {}  # each of so many elements, so far apart

    def make(self) -> PaddedForm:
        program = self._program
        ops = tuple(itertools.starmap(self._op, zip(program.ops, self._sized.calls, strict=True)))
        inputs = tuple(self.base(base, dims) for base, dims in zip(program.inputs, self._sized.inputs, strict=True))
        made = replace(program, ops=ops, inputs=inputs, ints=program.ints + len(self._numbers))
        shapes = {~i: (dims, -1, i) for i, dims in enumerate(self._sized.inputs)}
        for i, (op, call) in enumerate(zip(program.ops, self._sized.calls, strict=True)):
            both = zip(results_of(op), call.made, strict=True)
            shapes.update((m.value, (view.shape, i, place)) for place, (m, view) in enumerate(both))
        longer = tuple(i for i, dims in enumerate(self._sized.inputs) if _has_size(dims))
        found = ((k, *shapes[value]) for k, value in enumerate(program.outputs))
        outputs = tuple((k, op, place) for k, dims, op, place in found if _has_size(dims))
        return PaddedForm(
            made, tuple(self._numbers), self._moves, self._digits, tuple(self._within), longer, outputs, program
        )

    def bound(self, name: str) -> Bound:
        """What a variable may be."""
        if name in self._digits:
            _, shape, dim = self._digits[name]
            size = shape[dim]
            most = size.bound(self.bound).most if isinstance(size, Size) else size
            return Bound(1, most, most)
        if name not in self.bounds:
            self.bounds[name] = self._find(name)
        return self.bounds[name]

    def number(self, size: Size) -> Lifted:
        """The run-time int of this value."""
        if size not in self._numbers:
            self._numbers[size] = Lifted("i", self._program.ints + len(self._numbers))
        return self._numbers[size]

    def _op(self, op: Op, call: _PaddedCall) -> Op:
        if not _has_size(call):
            return op
        targets = [written(op, write).value for write in op.writes]
        if len(set(targets)) < len(targets):
            raise Refused(f"{op.name} writes twice into one array")
        views = {id(m): view for m, view in zip(results_of(op), call.made, strict=True)}
        made = _PaddedOp(self, {})
        args, parts = made.of(op, call)
        own = _own_variables(made.sizes, self.bound)
        if own:
            made = _PaddedOp(self, own)
            args, parts = made.of(op, call)
        results = tuple(self._result(result, views) for result in op.results)
        writes = tuple(self._write(write, views[id(write)]) for write in op.writes)
        if not any(made.reads) and not any(parts) and not made.names:
            return replace(op, args=args, results=results, writes=writes)
        found = [size.bound(self.bound) for size in made.names]
        bounds = tuple((bound.least, bound.most, bound.capacity) for bound in found)
        padding = Padding(tuple(map(self.number, made.names)), bounds, tuple(made.reads), parts)
        return replace(op, args=args, results=results, writes=writes, padding=padding)

    def _result(self, result: Any, views: Mapping[int, _View]) -> Any:
        if isinstance(result, tuple):
            return tuple(self._result(item, views) for item in result)
        if not isinstance(result, Result) or not _is_longer(views[id(result)]):
            return result
        if result.dtype != result.base.dtype:
            raise Refused("a result of other elements than its array")
        base = self.base(result.base, views[id(result)].shape)
        return replace(result, sizes=base.shape, strides=row_major(base.shape), base=base)

    def placed(self, view: _View) -> _View:
        """The view by what it takes of each dimension of its array, if it lies at a run-time offset, and its surplus
        may lie behind the array's; else as it is."""
        if view.runs is None or not any(
            isinstance(size, Size) and any(view.shape[dim] != size or step != 1 for dim, step in run)
            for size, run in zip(view.sizes, view.runs, strict=True)
        ):
            return view
        offset = view.offset
        if offset is None or any(len(run) > 1 for run in view.runs):
            raise Refused("a part of a diagonal")
        self._note_rows(view, offset)
        taken = {run[0][0]: (size, run[0][1]) for size, run in zip(view.sizes, view.runs, strict=True) if run}
        ranges = []
        for dim, whole in enumerate(view.shape):
            size, step = taken.get(dim, (1, 1))
            is_whole = whole == size and step == 1
            ranges.append((0 if is_whole else self._digit(_Digit(offset.index, view.shape, dim)), size, step))
        dims = tuple(tuple(dim for dim, _ in run) for run in view.runs)
        return view._replace(access=(view.shape, tuple(ranges), dims, ()), runs=None)

    def _note_rows(self, view: _View, offset: Lifted) -> None:
        """By how long it is, the view lies within rows: at another offset it may run over their ends."""
        assert view.runs is not None
        for size, run in zip(view.sizes, view.runs, strict=True):
            for dim, step in run:
                if dim and view.shape[dim] != 1:
                    self._within[_Digit(offset.index, view.shape, dim), size, step] = None

    def _digit(self, digit: _Digit) -> Size:
        name = next((name for name, known in self._digits.items() if known == digit), f"@{len(self._digits)}")
        self._digits[name] = digit
        return Size(((1, ((name, 0),)),), -1)

    def _write(self, write: Write, view: _View) -> Write:
        if view.is_empty:
            return replace(write, **self.nowhere(write, view))
        if not _is_longer(view):
            return replace(write, **self.place(write, view)) if _has_size(view) else write
        view = self.placed(view)
        if write.replaces and not view.is_whole and view.offset is None and view.access is not None:
            raise Refused("a write that leaves out elements")
        if write.dtype != write.base.dtype:
            raise Refused("a write of other elements")
        if view.runs is not None:
            return self.moved(write, view)
        if view.strides is not None:
            raise Refused("a view at a place that changes")
        base = self.base(write.base, view.shape)
        return replace(write, sizes=base.shape, strides=row_major(base.shape), offset=0, base=base, replaces=True)

    def nowhere(self, made: Operand | Write, view: _View) -> dict[str, Any]:
        """The array of a tensor without elements, which may begin anywhere in it."""
        if _has_size(view.sizes):
            raise Refused("sizes that change in a tensor without elements")
        return {"base": self.base(made.base, view.shape), "offset": 0}

    def place(self, made: Operand | Write, view: _View) -> dict[str, Any]:
        """The array and the offset of a tensor that is not longer."""
        factors, ranges, *_ = view.access or ((), ())
        base = self.base(made.base, view.shape)
        if not any(isinstance(start, Size) for start, _, _ in ranges):
            return {"base": base, "offset": made.offset}
        terms, constant = [], 0
        for i, (start, _, _) in enumerate(ranges):
            weight = math.prod(factors[i + 1 :])
            if not isinstance(start, Size):
                constant += weight * start
            elif start.divisor == 1:
                terms += [(weight * f, names) for f, names in start.terms]
                constant += weight * (start.constant + start.after)
            else:
                raise Refused("a view at a place that is a quotient")
        return {"base": base, "offset": self.number(Size(tuple(terms), constant))}

    def moved(self, given: _Place, view: _View) -> _Place:
        """A tensor that runs over dimensions of its array, in that as long as it is in memory."""
        assert view.runs is not None
        base = self.base(given.base, view.shape)
        if _has_size(view.shape[1:]) and isinstance(given.offset, Lifted):
            self._note_rows(view, given.offset)
            move = view.shape, base.shape
            if self._moves.setdefault(given.offset.index, move) != move:
                raise Refused("a view at a place that changes, in two arrays")
        below = row_major(base.shape)
        strides = tuple(sum(step * below[dim] for dim, step in run) for run in view.runs)
        return replace(given, sizes=self.shape(view.sizes), strides=strides, base=base)

    def base(self, base: Base, dims: Sequence[Leaf]) -> Base:
        """The array as long as it is in memory."""
        return base._replace(shape=self.shape(dims)) if _has_size(dims) else base

    def shape(self, dims: Sequence[Leaf]) -> tuple[int, ...]:
        """How long dimensions are in memory."""
        return tuple(dim.bound(self.bound).capacity if isinstance(dim, Size) else dim for dim in dims)


def _own_variables(sizes: Iterable[Size], bound: Callable[[str], Bound]) -> dict[Size, tuple[Size, Size]]:
    """Of the sizes of one op those that need not be known as what they are in the program, as the half of another one
    that the op does not have: each with a size that is a variable of the op, and what it is of that."""
    found: dict[Size, tuple[Size, Size]] = {}
    for group in _related(sizes):
        if not any(size.is_variable for size in group):
            for root in group:
                own = [size.in_terms_of(root) for size in group]
                if None not in own and root.bound(bound).least >= _LEAST_SIZE:
                    found |= {size: (root, of_root) for size, of_root in zip(group, own, strict=True) if of_root}
                    break
    return found


def _related(sizes: Iterable[Size]) -> list[list[Size]]:
    """Groups of sizes that have no variable in common."""
    groups: list[list[Size]] = []
    for size in sizes:
        apart = [group for group in groups if all(size.variables.isdisjoint(other.variables) for other in group)]
        joined = [other for group in groups if group not in apart for other in group]
        groups = [*apart, [*joined, size]]
    return groups


class _PaddedOp:
    """One op on longer arrays. Its variables are sizes of the program, which have names of their own, in the order in
    which they appear: those of the program, but for the sizes in `own` (see `_own_variables`)."""

    def __init__(self, maker: _Maker, own: Mapping[Size, tuple[Size, Size]]) -> None:
        self.names: dict[Size, str] = {}
        self.sizes: dict[Size, None] = {}
        self.reads: list[PaddedExtent | None] = []
        self._maker = maker
        self._own = own

    def of(self, op: Op, call: _PaddedCall) -> tuple[tuple[Any, ...], tuple[PaddedExtent | None, ...]]:
        """The op's arguments, and the parts that it makes of its arrays."""
        kinds = [str(argument.type) for argument in schema_of(op.name).arguments]
        args = tuple(
            self.argument(given, outlined, is_number=i < len(kinds) and kinds[i] in _NUMBERS)
            for i, (given, outlined) in enumerate(zip(op.args, call.args, strict=True))
        )
        return args, tuple(self.part(self._maker.placed(view)) if _is_longer(view) else None for view in call.made)

    def argument(self, given: Any, outlined: Any, *, is_number: bool) -> Any:
        """An argument of the op on longer arrays; notes what it reads of them."""
        if isinstance(given, Operand):
            return self._operand(given, outlined)
        if isinstance(given, (tuple, list)):
            items = zip(given, outlined, strict=True)
            return tuple(self.argument(item, own, is_number=is_number) for item, own in items)
        if isinstance(outlined, Size):
            if isinstance(given, Scalar):
                return replace(given, value=self._maker.number(outlined))
            if is_number:
                return self._maker.number(outlined)
            return Symbolic(str(self.text(outlined)))
        return given

    def part(self, view: _View) -> PaddedExtent:
        """A tensor over a longer array; one at a run-time offset is an array of its own."""
        if view.runs is not None:
            sizes = self._texts(view.sizes)
            return PaddedExtent(sizes, sizes)
        factors, ranges, dims, order = view.access or ((), (), None, ())
        return PaddedExtent(
            self._texts(view.sizes),
            self._texts(view.shape),
            self._texts(factors),
            tuple((self.text(start), self.text(taken), step) for start, taken, step in ranges),
            dims,
            order,
            self._texts(view.places or ()),
        )

    def text(self, leaf: Leaf) -> int | str:
        """A slot as text, or as an int where it does not change."""
        if not isinstance(leaf, Size):
            assert isinstance(leaf, int)
            return leaf
        self.sizes[leaf] = None
        if leaf in self._own:
            root, of_root = self._own[leaf]
            return of_root.text(lambda _: self._name(root))
        return leaf.text(lambda name: self._name(_variable(name)))

    def _name(self, size: Size) -> str:
        return self.names.setdefault(size, "abcdefgh"[len(self.names)])

    def _texts(self, leaves: Sequence[Leaf]) -> tuple[int | str, ...]:
        return tuple(map(self.text, leaves))

    def _operand(self, given: Operand, view: _View) -> Operand:
        if not _has_size(view):
            self.reads.append(None)
            return given
        if view.is_empty:
            self.reads.append(None)
            return replace(given, **self._maker.nowhere(given, view))
        if not _is_longer(view):
            self.reads.append(None)
            return replace(given, **self._maker.place(given, view))
        if given.dtype.itemsize != given.base.dtype.itemsize:
            raise Refused("a view of other elements")
        view = self._maker.placed(view)
        if view.runs is not None:
            self.reads.append(self.part(view))
            return self._maker.moved(given, view)
        if view.strides is not None:
            raise Refused("a view at a place that changes")
        self.reads.append(self.part(view))
        base = Base(self._maker.shape(view.shape), given.base.dtype)
        return replace(given, sizes=base.shape, strides=row_major(base.shape), offset=0, base=base)


def _is_longer(view: _View) -> bool:
    """Whether a tensor is longer in memory, or lies otherwise in its array because that is; else only where it begins
    may change: that does not depend on how many rows follow."""
    factors, ranges, *_ = view.access or ((), ())
    taken = tuple(taken for _, taken, _ in ranges)
    return _has_size((view.sizes, view.shape[1:], view.strides, view.places, factors[1:], taken))


def _has_size(value: Any) -> bool:
    if isinstance(value, Size):
        return True
    return isinstance(value, tuple) and any(map(_has_size, value))
