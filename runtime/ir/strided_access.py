"""Strided access: expresses a strided view of a row-major array as ranges of a reshaped array.

An access reshapes the array to mixed-radix `factors` and takes a range of each, so that a view is a reshape, a slice, a
transpose, a reshape and a broadcast, and a write is their inverse. Almost every view PyTorch makes is one.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

Shape = tuple[int, ...]


class Range(NamedTuple):
    """The indices `start, start + step, ...`, `taken` of them."""

    start: int
    taken: int
    step: int

    @property
    def extent(self) -> int:
        """How many indices lie between the first and the last, both included."""
        return (self.taken - 1) * self.step + 1


class StridedAccess(NamedTuple):
    """`factors` reshape the array, `ranges[k]` is taken of factor k, and `dims[d]` are the factors that view dimension
    d runs over, coarse to fine (empty where its size is 1 or its stride 0).

    `weights[k]` is the distance in elements between neighbours along factor k.
    """

    factors: Shape
    weights: Shape
    ranges: tuple[Range, ...]
    dims: tuple[Shape, ...]

    @property
    def is_whole(self) -> bool:
        """Whether every element of the array is taken."""
        return all(r.taken == f for r, f in zip(self.ranges, self.factors, strict=True))

    def window(self, shape: Shape) -> Window | None:
        """The access in two steps for an array of `shape`; None where a factor runs over two of its dimensions.

        Slicing whole rows before the array is reshaped keeps compilers from moving the rows that nobody takes.
        """
        ranges, factors, inner = [], list(self.factors), list(self.ranges)
        first = 0
        for size in shape:
            last, left = first, size
            while left > 1 and last < len(factors):
                if left % self.factors[last]:
                    return None
                left //= self.factors[last]
                last += 1
            if left > 1:
                return None
            ranges.append(self._narrow(range(first, last), factors, inner))
            first = last
        return Window(tuple(ranges), self._replace(factors=tuple(factors), ranges=tuple(inner)))

    def _narrow(self, group: range, factors: list[int], inner: list[Range]) -> Range:
        """What is taken of the dimension that a group of factors makes up; they become those of what is taken."""
        start, row = 0, math.prod(factors[k] for k in group)
        for k in group:
            row //= factors[k]
            at = self.ranges[k]
            start += at.start * row
            step = at.step if row == 1 else 1
            factors[k], inner[k] = (at.taken, Range(0, at.taken, 1)) if row == 1 else (at.extent, at._replace(start=0))
            if at.taken != 1:
                return Range(start, factors[k] * row, step)
        return Range(start, 1, 1)


class Window(NamedTuple):
    """`ranges[d]` is taken of dimension d of an array; `access` is what is left to do with that part of it."""

    ranges: tuple[Range, ...]
    access: StridedAccess


@functools.lru_cache(maxsize=8192)
def row_major(shape: Shape) -> Shape:
    """The strides of a contiguous array."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


class _Dim(NamedTuple):
    stride: int
    size: int
    position: int


@functools.lru_cache(maxsize=8192)
def find_access(shape: Shape, sizes: Shape, strides: Shape, offset: int) -> StridedAccess | None:
    """The access that is this view of a row-major array of `shape`; None where there is none (or none was found).

    All sizes are positive and the view is in bounds. An access that is returned is exact: its digits never carry.
    """
    total = math.prod(shape)
    dims = [_Dim(st, n, i) for i, (n, st) in enumerate(zip(sizes, strides, strict=True)) if n != 1 and st != 0]
    dims.sort(reverse=True)
    for cuts in _chains(shape, dims, total):
        access = _fit(cuts, dims, len(sizes), offset, total)
        if access is not None:
            return access
    return None


def _chains(shape: Shape, dims: list[_Dim], total: int) -> Iterator[list[int]]:
    """Candidate radices, best first: the array's own dimensions, these split, then dimensions merged."""
    own = list(itertools.accumulate(reversed(shape), lambda a, b: a * b, initial=1))
    wanted = [c for d in reversed(dims) for c in (d.stride, d.stride * d.size)]
    strides = [d.stride for d in dims]
    seen: set[tuple[int, ...]] = set()
    orders: list[Iterable[int]] = [own, own + wanted, own + strides, [*wanted, *own], [*strides, *own], strides]
    if len(dims) <= 3:
        orders += [c for k in range(len(wanted), -1, -1) for c in itertools.combinations(wanted, k)]
    for order in orders:
        chain = _chain(order, total)
        if tuple(chain) not in seen:
            seen.add(tuple(chain))
            yield chain


def _chain(cuts: Iterable[int], total: int) -> list[int]:
    """The cuts, first come first served, that divide one another, between 1 and `total`."""
    chain = [1, total] if total != 1 else [1]
    for cut in cuts:
        if cut not in chain and total % cut == 0 and all(cut % c == 0 or c % cut == 0 for c in chain):
            chain.append(cut)
    return sorted(chain)


def _fit(cuts: list[int], dims: list[_Dim], rank: int, offset: int, total: int) -> StridedAccess | None:
    weights = cuts[-2::-1]
    factors = [b // a for a, b in itertools.pairwise(cuts)][::-1]
    starts = [offset // w % f for w, f in zip(weights, factors, strict=True)]
    ranges = [Range(start, 1, 1) for start in starts]
    is_used = [False] * len(factors)
    merged: list[Shape] = [()] * rank
    for dim in dims:
        found = next((k for k, w in enumerate(weights) if w <= dim.stride), None)
        if found is None or dim.stride % weights[found]:
            return None
        k, left, step, digits = found, dim.size, dim.stride // weights[found], []
        while left > 1:
            if k < 0 or is_used[k]:
                return None
            count = left
            if starts[k] + (left - 1) * step >= factors[k]:
                # The dimension carries into the next factor, so each of its rounds has to use the same digits here.
                count = factors[k] // step
                if factors[k] % step or starts[k] >= step or left % count:
                    return None
            ranges[k] = Range(starts[k], count, step)
            is_used[k] = True
            digits.append(k)
            left //= count
            k, step = k - 1, 1
        merged[dim.position] = tuple(reversed(digits))
    return StridedAccess(tuple(factors), tuple(weights), tuple(ranges), tuple(merged))


class Digit(NamedTuple):
    """A condition on a run-time offset: `offset // weight % size <= limit`."""

    weight: int
    size: int
    limit: int


def fits(offsets: Mapping[int, frozenset[Digit]], ints: Sequence[int]) -> bool:
    """Whether run-time ints are as a program with these digits of them takes for granted."""
    return all(ints[i] // weight % size <= limit for i, known in offsets.items() for weight, size, limit in known)
