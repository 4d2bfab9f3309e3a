"""Pads: each side of the last dimensions grows by a number of elements (negative: shrinks), and the gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from torchtpu.ops.registry import jax, jnp, lax, lowering, opmath
from torchtpu.ops.sizes import as_number, is_known, transpose

from .written import Kind, padded


def _edges(rank: int, pad: Sequence[int]) -> list[tuple[int, int]]:
    """(before, behind) per dimension; PyTorch lists the last dimension first."""
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return [(0, 0)] * (rank - len(pairs)) + pairs[::-1]


def _write_constant_pad_nd(given: Sequence[Kind], made: Kind, pad: Sequence[int], value: Any = 0) -> list[str] | None:
    ((shape, element),) = given
    numbers = (int, float) if element.startswith(("f", "bf")) else (int,)
    if type(value) not in numbers or str(value) not in ("0", "0.0") or not shape or math.prod(shape) == 0:
        return None
    return padded(given[0], made[0], [(low, high, 0) for low, high in _edges(len(shape), pad)])


@lowering("constant_pad_nd", write=_write_constant_pad_nd)
def constant_pad_nd(x, pad, value=0):
    value = jnp.asarray(value).astype(x.dtype)
    return lax.pad(x, value, [(low, high, 0) for low, high in _edges(x.ndim, pad)])


def _reflected(x: Any, axis: int, low: int, high: int) -> Any:
    """As `jnp.pad` reflects, which does not where sizes are not known: a dimension is longer than what is added."""
    last = as_number(x.shape[axis] - 1, jnp.int32)
    place = jnp.abs(jnp.arange(x.shape[axis] + low + high, dtype=jnp.int32) - low)
    return jnp.take(x, last - jnp.abs(last - place), axis, mode="clip")


def _mirrored(x: Any, padding: Sequence[int], mode: str) -> Any:
    edges = _edges(x.ndim, padding)
    if mode == "reflect" and not is_known(*x.shape):
        grown = x
        for axis, (low, high) in enumerate(edges):
            grown = _reflected(grown, axis, max(low, 0), max(high, 0))
    else:
        grown = jnp.pad(x, [(max(low, 0), max(high, 0)) for low, high in edges], mode)
    # cut last: what is cut off one side may still be mirrored at the other
    ends = zip(grown.shape, edges, strict=True)
    return grown[tuple(slice(max(-low, 0), size - max(-high, 0)) for size, (low, high) in ends)]


def _mirrored_backward(grad: Any, x: Any, padding: Sequence[int], mode: str) -> Any:
    grad = opmath(grad)
    inner = jax.ShapeDtypeStruct(x.shape, grad.dtype)
    return transpose(lambda y: _mirrored(y, padding, mode), inner, grad)


def _infer_reflection_pad2d(x: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    if x.dim() not in (3, 4):  # PyTorch's meta function takes more
        raise RuntimeError(f"Expected 3D or 4D (batch mode) tensor for input, but got {list(x.shape)}")
    return torch.ops.aten.reflection_pad2d(x, padding)


@lowering("reflection_pad2d", infer=_infer_reflection_pad2d)
@lowering("reflection_pad1d", "reflection_pad3d")
def reflection_pad(x, padding):
    return _mirrored(x, padding, "reflect")


@lowering("reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward")
def reflection_pad_backward(grad, x, padding):
    return _mirrored_backward(grad, x, padding, "reflect")


@lowering("replication_pad1d", "replication_pad2d", "replication_pad3d")
def replication_pad(x, padding):
    return _mirrored(x, padding, "edge")


@lowering("replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward")
def replication_pad_backward(grad, x, padding):
    return _mirrored_backward(grad, x, padding, "edge")
