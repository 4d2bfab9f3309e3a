"""Dimensions of padded tensors: in come sizes of traced tensors, out go their factors.

A dimension is a tuple of factors, slowest first: numbers, and symbols for the sizes that change. A symbol's factor has
as many valid indices as its size, then a surplus with any contents, NaN included. A dimension of one element is ().
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

Factor = Any  # int or sympy.Symbol
Dim = tuple[Factor, ...]
Dims = tuple[Dim, ...]
NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Unsafe(Exception):
    """Padding might change what the node computes."""


@dataclass
class Plan:
    """What becomes of one node: the dimensions of its tensors (None for what is no tensor), and the surplus of which
    arguments is replaced by which value before, by the argument's name."""

    dims: Sequence[Dims | None]
    masks: dict[str, float] = field(default_factory=dict)
    averages: tuple[int, ...] | None = None  # a mean over these dimensions divides by the true count
    hides_keys: bool = False  # attention gets a bias that hides the surplus keys


@dataclass(frozen=True)
class Call:
    """A node with its arguments by name."""

    node: Node
    arguments: dict[str, Any]
    dims_of: Callable[[Node], Dims]

    def dims(self, name: str) -> Dims:
        """The dimensions of the tensor argument."""
        argument = self.arguments.get(name)
        if not isinstance(argument, Node):
            raise Unsafe(f"no {name}")
        return self.dims_of(argument)

    def axis(self, name: str, rank: int) -> int:
        """The dimension that the argument names, 0 where it is not given."""
        value = self.arguments.get(name, 0)
        if not isinstance(value, int):
            raise Unsafe(f"{name} is no number")
        return value % max(rank, 1)

    def shape(self, index: int | None = None) -> tuple[Any, ...]:
        """The sizes of the result, as expressions."""
        value = self.node.meta["val"]
        value = value if index is None else value[index]
        return tuple(size.node.expr if isinstance(size, torch.SymInt) else int(size) for size in value.shape)

    def tensors(self) -> list[str]:
        """The names of the tensor arguments."""
        return [name for name, a in self.arguments.items() if isinstance(a, Node) and is_tensor(a)]


def is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def simple(size: Any) -> Dim:
    """The dimension of a tensor from outside: a number or one symbol."""
    if isinstance(size, torch.SymInt):
        size = size.node.expr
    if getattr(size, "is_Symbol", False):
        return (size,)
    if getattr(size, "is_Integer", True):
        return (int(size),) if int(size) != 1 else ()
    raise Unsafe(f"a size is {size}")


def is_ragged(dim: Dim) -> bool:
    return any(not isinstance(f, int) for f in dim)


def any_ragged(dims: Dims) -> bool:
    return any(map(is_ragged, dims))


def product(dim: Dim) -> Any:
    return math.prod(dim)


def merged(dim: Dim) -> Dim:
    """Numbers side by side are one number."""
    made: list[Factor] = []
    for factor in dim:
        if isinstance(factor, int) and made and isinstance(made[-1], int):
            made[-1] *= factor
        elif factor != 1:
            made.append(factor)
    return tuple(made)


def regrouped(dims: Dims, shape: Sequence[Any]) -> Dims:
    """The dimensions of a view with this shape; a symbol's factor stays whole."""
    import sympy  # type: ignore[import-untyped]

    waiting = [f for dim in dims for f in dim]
    made = []
    for size in shape:
        taken: list[Factor] = []
        rest = sympy.sympify(size)
        while rest != 1:
            number = rest.as_coeff_Mul()[0]
            if not waiting or not (number.is_Integer and number > 0):
                raise Unsafe("a view takes symbols apart")
            factor, number = waiting.pop(0), int(number)
            if isinstance(factor, int):
                part = math.gcd(factor, number)
                if part not in (factor, number) or part == 1:
                    raise Unsafe("a view takes symbols apart")
                if part != factor:
                    waiting.insert(0, factor // part)
                factor = part
            elif factor not in rest.free_symbols:
                raise Unsafe("a view takes symbols apart")
            rest = rest / factor
            taken.append(factor)
        made.append(merged(tuple(taken)))
    if waiting:
        raise Unsafe("a view takes symbols apart")
    return tuple(made)


def broadcast(all_dims: Sequence[Dims]) -> Dims:
    rank = max(map(len, all_dims), default=0)
    made = []
    for i in range(rank):
        found = {dims[i - rank] for dims in all_dims if len(dims) >= rank - i} - {()}
        if len(found) > 1:
            raise Unsafe("sizes that are equal by chance")
        made.append(found.pop() if found else ())
    return tuple(made)


def numbers(value: Any) -> list[int]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def results(node: Node) -> list[Any]:
    value = node.meta["val"]
    return list(value) if isinstance(value, (list, tuple)) else [value]
