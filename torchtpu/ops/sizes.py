"""Sizes that are ints, or are known when a program runs: see `torchtpu.runtime.padding`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchtpu.ops.registry import jax, jnp, lax, note_unknown


def is_known(*sizes: Any) -> bool:
    """Whether all of them are ints; what hangs on that is another text for some sizes."""
    known = all(isinstance(size, int) for size in sizes)
    if not known:
        note_unknown()
    return known


def is_at_most(size: Any, limit: Any) -> bool:
    """Whether it is, as far as is known."""
    try:
        return bool(size <= limit)
    except jax.errors.InconclusiveDimensionOperation:
        note_unknown()
        return False


def as_number(size: Any, dtype: Any) -> Any:
    """A size to compute with, rounded to the dtype."""
    return dtype(size) if isinstance(size, int) else jnp.asarray(size).astype(dtype)


def transpose(function: Callable[[Any], Any], like: Any, grad: Any) -> Any:
    """The linear transpose of a function of an array like this one, of what is as large as its result.

    Sizes that are not known may be equal and have other words for it: they are made to have the same.
    """
    made = jax.eval_shape(function, like).shape
    if not is_known(*made, *grad.shape):
        around = [(0, size - given, 0) for size, given in zip(made, grad.shape, strict=True)]
        grad = lax.pad(grad, jnp.zeros((), grad.dtype), around)
    (found,) = jax.linear_transpose(function, like)(grad)
    return found
