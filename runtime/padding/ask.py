"""Asks an op itself how a size of what it makes follows from one size of what it is given.

A few programs do not tell `(n + 1) // 2` from `n // 2`; the op's shape function does, called with other sizes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchtpu.runtime.ir.calls import bind, operator_of, schema_of
from torchtpu.runtime.ir.program import Lifted, Op, Operand, Program, Result, Scalar

_FARTHER = math.lcm(*range(1, 11), 16, 25, 32)  # elements: a multiple of all divisors that are found
Column = tuple[int, ...]  # what a size is in each of several programs


class Quotient(NamedTuple):
    """A size is `(n + constant) // divisor + after`."""

    constant: int
    divisor: int
    after: int

    def of(self, n: int) -> int:
        """What the size is."""
        return (n + self.constant) // self.divisor + self.after


class Askable:
    """The sizes that the ops of several programs make, which differ in sizes alone."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self._calls = list(zip(*(program.ops for program in programs), strict=True))
        self._makers: dict[Column, tuple[int, int, int | None, int]] = {}
        for i, ops in enumerate(self._calls):
            for k, made in enumerate(zip(*(op.results for op in ops), strict=True)):
                if isinstance(made[0], Result):
                    self._note(i, k, None, made)
                elif isinstance(made[0], tuple):
                    for element, results in enumerate(zip(*made, strict=True)):
                        if results[0] is not None:
                            self._note(i, k, element, results)

    def _note(self, call: int, result: int, element: int | None, made: Sequence[Any]) -> None:
        for dim, column in enumerate(zip(*(each.sizes for each in made), strict=True)):
            self._makers.setdefault(column, (call, result, element, dim))

    def quotient(self, column: Column, at: Callable[[Column, int], int], of: Column) -> Quotient | None:
        """How a size follows from another one, which is `of` in the programs; `at` says what a third is where that is
        `n`. None where no op makes it, or it follows in another way."""
        maker = self._makers.get(column)
        if maker is None:
            return None
        call, result, element, dim = maker

        def size(n: int) -> int:
            made = _call(self._calls[call], lambda column: at(column, n))
            made = made[result] if isinstance(made, (tuple, list)) else made
            return int((made if element is None else made[element]).shape[dim])

        with contextlib.suppress(Exception):  # whatever a shape function raises, or what has none
            found = quotient_of(size, of[0])
            if found is not None and tuple(map(found.of, of)) == column:
                return found
        return None


def quotient_of(size: Callable[[int], int], n: int) -> Quotient | None:
    """The quotient that a function is, which climbs by one after as many each time; it is looked for from `n` on."""
    first = size(n)
    rise = size(n + _FARTHER) - first
    if rise <= 0 or _FARTHER % rise:
        return None
    divisor = _FARTHER // rise
    low, high = 0, divisor  # it has not climbed at n + low, and has at n + high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(n + middle) == first else (low, middle)
    constant = -(n + high) % divisor
    return Quotient(constant, divisor, first - (n + constant) // divisor)


def _call(ops: Sequence[Op], at: Callable[[Column], int]) -> Any:
    """What the op makes of arguments with other sizes, as tensors without contents."""
    schema = schema_of(ops[0].name)
    arguments = [_argument(values, at) for values in zip(*(op.args for op in ops), strict=True)]
    positional, named = bind(schema, arguments)
    if any(argument.name == "device" and argument.kwarg_only for argument in schema.arguments):
        named["device"] = torch.device("meta")  # none is recorded; what has no tensors would be filled on the CPU
    with torch.no_grad():
        return operator_of(ops[0].name)(*positional, **named)


def _argument(values: Sequence[Any], at: Callable[[Column], int]) -> Any:
    """An argument, which has these values in the programs."""
    value = values[0]
    if isinstance(value, Operand):
        sizes = [at(column) for column in zip(*(each.sizes for each in values), strict=True)]
        return torch.empty(sizes, dtype=value.dtype, device="meta")
    if isinstance(value, tuple):
        return [_argument(items, at) for items in zip(*values, strict=True)]
    if isinstance(value, Scalar):
        return 1 if isinstance(value.value, Lifted) else value.value
    if isinstance(value, Lifted):
        return 1
    if isinstance(value, torch.device):
        return torch.device("meta")
    return at(tuple(values)) if type(value) is int else value
