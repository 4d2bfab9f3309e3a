"""Puts arrays together: `cat` and `stack`, whose StableHLO is also written without jax.

What they are lowered to hangs on how many arrays there are, so that no template has it, and scripts that join lists of
ever other lengths would trace each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from torchtpu.ops.registry import as_dtype, jnp, lowering, suggest_memory_format

from .written import Kind, Shape, type_of

_WIDTH = 16  # of a concatenation: jax.numpy makes wider ones of several


def _write_cat(given: Sequence[Kind], made: Kind, dim: int = 0) -> list[str] | None:
    if len(given) < 2 or any(kind != made[1] or len(shape) != len(made[0]) for shape, kind in given):
        return None
    return _joined([(f"%arg{k}", shape) for k, (shape, _) in enumerate(given)], made[1], dim % len(made[0]), [])


def _write_stack(given: Sequence[Kind], made: Kind, dim: int = 0) -> list[str] | None:
    if len(given) < 2 or any(kind != made[1] for _, kind in given):
        return None
    place = dim % len(made[0])
    dims = [axis for axis in range(len(made[0])) if axis != place]
    lines, parts = [], []
    for k, (shape, element) in enumerate(given):
        longer = (*shape[:place], 1, *shape[place:])
        types = f"({type_of(shape, element)}) -> {type_of(longer, element)}"
        lines.append(f"%{k} = stablehlo.broadcast_in_dim %arg{k}, dims = {dims} : {types}")
        parts.append((f"%{k}", longer))
    return _joined(parts, made[1], place, lines)


def _joined(parts: Sequence[tuple[str, Shape]], element: str, dim: int, lines: list[str]) -> list[str] | None:
    """The lines, with those that join values along a dimension, the result last; None where one of them is empty."""
    if any(math.prod(shape) == 0 for _, shape in parts):
        return None
    while len(parts) > 1:
        groups, parts = [parts[k : k + _WIDTH] for k in range(0, len(parts), _WIDTH)], []
        for group in groups:
            (_, first), *_ = group
            shape = (*first[:dim], sum(each[dim] for _, each in group), *first[dim + 1 :])
            names = ", ".join(name for name, _ in group)
            types = ", ".join(type_of(each, element) for _, each in group)
            parts.append((f"%{len(lines)}", shape))
            made = type_of(shape, element)
            lines.append(f"{parts[-1][0]} = stablehlo.concatenate {names}, dim = {dim} : ({types}) -> {made}")
    return lines


@lowering("cat", write=_write_cat)
def cat(tensors, dim=0, *, ctx):
    # an empty vector is left out, whatever the shape of the others
    kept = [t for t in tensors if t.shape != (0,)]
    dtype = ctx.results[0][1]
    return jnp.concatenate([as_dtype(t, dtype) for t in kept or tensors], dim if kept else 0)


def _infer_stack(tensors: Any, dim: int = 0) -> torch.Tensor:
    first = tensors[0]
    place = dim % (first.dim() + 1)

    def is_usual(t: torch.Tensor) -> bool:
        is_alike = t.shape == first.shape and t.dtype == first.dtype
        keeps_no_layout = suggest_memory_format(t) is torch.contiguous_format
        return is_alike and keeps_no_layout and (place < t.dim() or t.is_contiguous())

    if not -first.dim() - 1 <= dim <= first.dim() or not all(map(is_usual, tensors)):
        return torch.stack(tensors, dim)
    return first.new_empty((*first.shape[:place], len(tensors), *first.shape[place:]))


@lowering("stack", "_stack", infer=_infer_stack, write=_write_stack)
def stack(tensors, dim=0, *, ctx):
    dtype = ctx.results[0][1]
    return jnp.stack([as_dtype(t, dtype) for t in tensors], dim)
