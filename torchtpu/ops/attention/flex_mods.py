"""Turns traced score and mask functions of FlexAttention into functions of whole tiles of scores.

The text is JSON: `steps`, each an op's name, its positional arguments, its others and its results, and `outputs`.
A value is {"value": n}, counted through the function's inputs and then the results of the steps.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from torchtpu.ops.linalg import matmul
from torchtpu.ops.math import logic, pointwise, reduce
from torchtpu.ops.nn import activation, loss_pointwise, softmax
from torchtpu.ops.registry import (
    LOWERINGS,
    PLATFORM_LOWERINGS,
    Context,
    Lowering,
    as_dtype,
    jax,
    jax_dtype,
    jnp,
    lax,
    opmath,
)
from torchtpu.ops.shape import copies, index, scatter, shape
from torchtpu.ops.special import bessel, special

AXES = ("batch", "head", "row", "column")
SCATTER = "flex_lib::zeros_and_scatter"

# Whose lowerings a function may use: they are part of this module's fingerprint.
_FAMILIES: tuple[ModuleType, ...] = (
    activation, bessel, copies, index, logic, loss_pointwise, matmul, pointwise, reduce, scatter, shape, softmax,
    special,
)  # fmt: skip
_Aval = tuple[tuple[int, ...], torch.dtype]
_SAME = ("clone", "_to_copy", "lift_fresh", "contiguous")  # but for the dtype
_NUMBERS = {"ones": 1, "ones_like": 1, "new_ones": 1, "zeros": 0, "zeros_like": 0, "new_zeros": 0}
_FILLS = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}  # and which argument they fill with


def knows(name: str) -> bool:
    """Whether functions may have this op, as `add.Tensor` or `namespace::op`."""
    entry = _lowering(name, "cpu")
    is_known = entry is not None and not entry.random and _home(entry) in {m.__name__ for m in _FAMILIES}
    return is_known or name == SCATTER or any(name in names for names in (_SAME, _NUMBERS, _FILLS))


def differentiated(text: str) -> list[int]:
    """The buffers that outputs belong to: those behind the first output and the indices' ones."""
    outputs = _parse(text)["outputs"][1 + len(AXES) :]
    return [i for i, output in enumerate(outputs) if output is not None]


def _lowering(name: str, platform: str) -> Lowering | None:
    """An op's lowering; that of a view is its copy's."""
    copied = ".".join([f"{name.partition('.')[0]}_copy", *name.split(".")[1:]])
    for candidate in (name, copied):
        found = PLATFORM_LOWERINGS.get((candidate, platform)) or LOWERINGS.get(candidate)
        if found is not None:
            return found
    return None


def _home(entry: Lowering) -> str:
    return inspect.unwrap(entry.function).__module__


@dataclass(frozen=True)
class Mod:
    """A function of 0-dim values: some that a tile has for each score, four indices, then buffers."""

    text: str
    ctx: Context

    def on_tile(
        self, scores: Sequence[Any], places: Sequence[Any], buffers: Sequence[Any]
    ) -> tuple[Any, list[Any], Any]:
        """The first output for a tile of `scores` at the indices `places`; the sums over the tile of those outputs that
        belong to buffers; whether all indices are in bounds.

        The first array of `scores` comes before the indices in the function, the second one, if any, after them.
        """
        summed = [1 + len(AXES) + i for i in differentiated(self.text)]

        def function(scores: list[Any], places: list[Any]) -> tuple[Any, list[Any], Any]:
            outputs, checks = self._evaluate([*scores[:1], *places, *scores[1:], *buffers])
            held = jnp.ones((), jnp.int32)
            for ok in checks:
                held = held * lax.pmin(ok.astype(jnp.int32), AXES)
            return outputs[0], [_total()(outputs[i]) for i in summed], held

        spread: Callable[..., Any] = function
        for axis in reversed(range(len(AXES))):
            along = [0 if i == axis else None for i in range(len(AXES))]
            spread = jax.vmap(spread, in_axes=(0, along), out_axes=(0, None, None), axis_name=AXES[axis])
        made, sums, held = spread(list(scores), list(places))
        return made, sums, held > 0

    def _evaluate(self, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        """The outputs, and what has to be true."""
        parsed = _parse(self.text)
        values = list(inputs)
        checks: list[Any] = []
        for name, positional, named, results in parsed["steps"]:
            given = [_given(a, values) for a in positional]
            others = {key: _given(a, values) for key, a in named.items()}
            avals = [(tuple(shape), getattr(torch, dtype)) for shape, dtype in results]
            values.append(self._step(name, given, others, avals, checks))
        return [None if o is None else values[o["value"]] for o in parsed["outputs"]], checks

    def _step(self, name: str, given: list[Any], others: dict[str, Any], avals: list[_Aval], checks: list[Any]) -> Any:
        if name == "getitem":
            return given[0][given[1]]
        if name == "constant":
            return jnp.asarray(given[0], jax_dtype(avals[0][1])).reshape(avals[0][0])
        if name == SCATTER:
            return _scattered(*given)
        if name in _SAME:
            return as_dtype(given[0], avals[0][1])
        if name in _FILLS or name in _NUMBERS:
            filling = given[_FILLS[name]] if name in _FILLS else _NUMBERS[name]
            return jnp.broadcast_to(as_dtype(filling, avals[0][1]), avals[0][0])
        entry = _lowering(name, self.ctx.platform)
        assert entry is not None, name
        inner = Context(entry.name, self.ctx.platform, tuple(avals), self.ctx.precision)
        if entry.takes_context:
            others["ctx"] = inner
        made = entry.function(*given, **others)
        for ok, message, error in inner.checks:
            assert error is IndexError, message
            checks.append(ok)
        if isinstance(made, (tuple, list)):
            return [as_dtype(m, dtype) for m, (_, dtype) in zip(made, avals, strict=True)]
        return as_dtype(made, avals[0][1])


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def _given(argument: Any, values: list[Any]) -> Any:
    if isinstance(argument, list):
        return [_given(a, values) for a in argument]
    if not isinstance(argument, dict):
        return argument
    return values[argument["value"]] if "value" in argument else getattr(torch, argument["dtype"])


# ---- sums over the tile


@functools.cache
def _total() -> Callable[[Any], Any]:
    """A value, which along an axis of the tile that it depends on becomes its sum."""
    custom_vmap = jax.custom_batching.custom_vmap

    @custom_vmap
    def total(x: Any) -> Any:
        return x

    @total.def_vmap
    def rule(size: int, is_batched: list[bool], x: Any) -> tuple[Any, bool]:
        return total(x.sum(0) if is_batched[0] else x), False

    return total


def _scattered(shape: Sequence[int], indices: Iterable[Any], values: Any) -> Any:
    """Zeros of a shape with values added at indices; along an axis of the tile, the sum of what each place adds."""
    return _scatter(tuple(shape))(opmath(values), list(indices)).astype(values.dtype)


@functools.lru_cache(maxsize=256)
def _scatter(shape: tuple[int, ...]) -> Callable[..., Any]:
    custom_vmap = jax.custom_batching.custom_vmap

    @custom_vmap
    def scatter(values: Any, indices: list[Any]) -> Any:
        return jnp.zeros(shape, values.dtype).at[tuple(indices)].add(values)

    @scatter.def_vmap
    def rule(size: int, is_batched: list[Any], values: Any, indices: list[Any]) -> tuple[Any, bool]:
        of_values, of_indices = is_batched
        if not any(of_indices):
            return scatter(values.sum(0) if of_values else values * size, indices), False
        rest = len(shape) - len(indices)
        ranks = [i.ndim - b for i, b in zip(indices, of_indices, strict=True)]
        rank = max(*ranks, values.ndim - of_values - rest)
        widened = [_leading(i, rank) if b else i for i, b in zip(indices, of_indices, strict=True)]
        values = _leading(values, rank + rest) if of_values else jnp.broadcast_to(values, (size, *values.shape))
        return scatter(values, widened), False

    return scatter


def _leading(x: Any, rank: int) -> Any:
    """A batched array of so many dimensions behind its first one."""
    return x.reshape(x.shape[0], *(1,) * (rank + 1 - x.ndim), *x.shape[1:])
