"""What PyTorch's shape functions import from `torch.fx.experimental.symbolic_shapes`, for sizes that are numbers.

That module imports sympy, a quarter of a second of CPU time; what is symbolic, and every other name, it still serves.
The functions are those of the same names there.
"""

from __future__ import annotations

import functools
import importlib
import operator
from typing import Any

import torch
from torch.utils._ordered_set import OrderedSet


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(importlib.import_module("torch.fx.experimental.symbolic_shapes"), name)


def expect_true(a: Any, skip: int = 0) -> Any:
    """`a`, which is to be true for these sizes."""
    return a if isinstance(a, bool) else __getattr__("expect_true")(a, skip + 1)


def guard_or_false(a: Any) -> Any:
    """`a`, if it can be told; else False."""
    return a if isinstance(a, bool) else __getattr__("guard_or_false")(a)


def guard_or_true(a: Any) -> Any:
    """`a`, if it can be told; else True."""
    return a if isinstance(a, bool) else __getattr__("guard_or_true")(a)


def guard_size_oblivious(expr: Any) -> Any:
    """`expr`, for sizes that are neither 0 nor 1 if they cannot be told."""
    return expr if isinstance(expr, bool) else __getattr__("guard_size_oblivious")(expr)


def statically_known_true(x: Any) -> Any:
    """Whether `x` is true whatever the sizes."""
    return x if isinstance(x, bool) else __getattr__("statically_known_true")(x)


def sym_and(x: Any, *others: Any) -> Any:
    """Their conjunction."""
    return functools.reduce(operator.and_, others, x)


def sym_or(x: Any, *others: Any) -> Any:
    """Their disjunction."""
    return functools.reduce(operator.or_, others, x)


def sym_eq(x: Any, y: Any) -> Any:
    """Whether these sizes, or nested sequences of sizes, are equal."""
    if isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)):
        return len(x) == len(y) and functools.reduce(operator.and_, map(sym_eq, x, y), True)
    return x == y if isinstance(x, int) and isinstance(y, int) else __getattr__("sym_eq")(x, y)


def is_nested_int(s: Any) -> Any:
    """Whether this is the length of a jagged dimension."""
    return isinstance(s, torch.SymInt) and s.node.is_nested_int()


def free_unbacked_symbols(x: Any) -> Any:
    """The sizes that hang on data in a tensor's geometry, or among sizes."""
    sizes = (*x.shape, *x.stride(), x.storage_offset()) if type(x) is torch.Tensor else x
    is_plain = isinstance(sizes, int) or (isinstance(sizes, tuple) and all(isinstance(size, int) for size in sizes))
    return OrderedSet() if is_plain else __getattr__("free_unbacked_symbols")(x)


def has_guarding_hint(a: Any) -> Any:
    """Whether this number is known."""
    return isinstance(a, (bool, int, float)) or __getattr__("has_guarding_hint")(a)


def guarding_hint_or_throw(a: Any) -> Any:
    """The number."""
    return a if isinstance(a, int) else __getattr__("guarding_hint_or_throw")(a)
