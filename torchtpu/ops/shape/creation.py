"""Tensors from nothing or from one value: ranges, fills, triangles and copies.

`empty` is the recorder's own; `ones`, `full`, `zeros_like` and their like are made of `empty` and a fill.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from torchtpu.ops.registry import composed, jax_dtype, jnp, lax, lowering
from torchtpu.ops.sizes import as_number


@lowering("fill.Scalar", "fill.Tensor", lifts=True, elementwise=True)
def fill(self, value):
    with np.errstate(over="ignore"):  # one element of half precision takes numbers beyond it as infinity
        return jnp.broadcast_to(jnp.asarray(value).astype(self.dtype), self.shape)


@lowering("zero", elementwise=True)
def zero(self):
    return jnp.zeros_like(self)


@lowering("copy", elementwise=True)
def copy(self, src, non_blocking=False, *, ctx):
    return jnp.broadcast_to(src, ctx.results[0][0])


# The tangents of constants. Elsewhere these zeros are lazy; here they are zeros like others.
@lowering("_efficientzerotensor")
def efficientzerotensor(size, *, dtype=None, layout=None, device=None, pin_memory=None, ctx):
    shape, dtype = ctx.results[0]
    return jnp.zeros(shape, jax_dtype(dtype))


# The length follows from the numbers, so they are compared and not lifted.
@lowering("arange.start_out", "range.out", structural={"start": None, "end": None, "step": None})
def arange(start, end, step=1, *, ctx):
    shape, dtype = ctx.results[0]
    # The CPU counts in double and in int64.
    count = jnp.float64 if dtype.is_floating_point else jnp.int64
    start, step = (jnp.asarray(v).astype(count) for v in (start, step))
    return (start + step * lax.iota(count, math.prod(shape))).reshape(shape)


@composed("kaiser_window", "kaiser_window.periodic", "kaiser_window.beta")
def kaiser_window(
    window_length: int,
    periodic: bool = True,
    beta: float = 12.0,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """PyTorch's own makes the places and hands them to a kernel that only CPU and CUDA have."""
    dtype = dtype or torch.get_default_dtype()
    if not dtype.is_floating_point:
        raise RuntimeError(f"kaiser_window expects floating point dtypes, got: {dtype}")
    if window_length < 0:
        raise RuntimeError(f"kaiser_window requires non-negative window_length, got window_length={window_length}")
    if window_length < 2:
        return torch.ones(window_length, dtype=dtype, device=device)
    middle = (window_length - 1 + periodic) / 2
    place = torch.arange(window_length, dtype=dtype, device=device) / middle - 1
    height = torch.special.i0(torch.tensor(beta, dtype=dtype, device=device))
    return torch.special.i0(beta * (1 - place * place).clamp(min=0).sqrt()) / height


@lowering("linspace.out", "linspace.Tensor_Tensor", "linspace.Tensor_Scalar", "linspace.Scalar_Tensor", lifts=True)
def linspace(start, end, steps, *, ctx, **_):
    return _spaced(start, end, steps, ctx)


@lowering("logspace.out", "logspace.Tensor_Tensor", "logspace.Tensor_Scalar", "logspace.Scalar_Tensor", lifts=True)
def logspace(start, end, steps, base=10.0, *, ctx, **_):
    points = _spaced(start, end, steps, ctx)
    return jnp.power(jnp.asarray(base).astype(points.dtype), points)


def _spaced(start, end, steps, ctx):
    """`steps` points counted from the nearer end, as PyTorch does."""
    shape, dtype = ctx.results[0]
    ends = [jnp.asarray(v) for v in (start, end)]
    if not (dtype.is_floating_point or dtype.is_complex):
        ends = [v.astype(jax_dtype(dtype)) for v in ends]
        compute = jnp.float64
    else:
        compute = jnp.float32 if dtype.itemsize == 1 else jnp.promote_types(jax_dtype(dtype), jnp.float32)
    start, end = (v.astype(compute) for v in ends)
    place = lax.iota(jnp.int64, steps)
    i = place.astype(compute)
    step = (end - start) / max(steps - 1, 1)
    points = start + step * i
    if steps > 1:
        points = jnp.where(2 * place + 2 <= steps, points, end - step * (steps - 1 - i))
    return points.reshape(shape)


@lowering("eye.out", "eye.m_out")
def eye(n, m=None, *, ctx):
    (rows, columns), dtype = ctx.results[0]
    return jnp.eye(rows, columns, dtype=jax_dtype(dtype))


@lowering("tril", ints=("diagonal",))
def tril(self, diagonal=0):
    return jnp.where(_is_below(self, diagonal), self, jnp.zeros_like(self))


@lowering("triu", ints=("diagonal",))
def triu(self, diagonal=0):
    return jnp.where(_is_below(self, diagonal - 1), jnp.zeros_like(self), self)


def _is_below(x: Any, diagonal: Any) -> Any:
    """Where elements of matrices are on a diagonal, which may be an input of the program, or below it."""
    rows, columns = (lax.broadcasted_iota(jnp.int32, x.shape[-2:], axis) for axis in (0, 1))
    return columns - rows <= jnp.clip(diagonal, -(1 << 30), 1 << 30).astype(jnp.int32)


@lowering("tril_indices")
def tril_indices(row, col, offset=0, *, ctx, **_):
    columns = as_number(col, jnp.int64)
    return _positions(ctx, row, lambda number: (0 * number, jnp.clip(number + offset + 1, 0, columns)))


@lowering("triu_indices")
def triu_indices(row, col, offset=0, *, ctx, **_):
    columns = as_number(col, jnp.int64)
    return _positions(ctx, row, lambda number: (jnp.clip(number + offset, 0, columns), columns))


def _positions(ctx, row, ends):
    """(row, column) of the elements of rows, each of which begins and ends at the columns that its number has."""
    ((_, count), _), number = ctx.results[0], jnp.arange(row, dtype=jnp.int64)
    first, end = ends(number)
    before = jnp.cumsum(end - first) - (end - first)
    rows = jnp.cumsum(jnp.zeros(count, jnp.int64).at[before].add(1, mode="drop")) - 1
    return jnp.stack([rows, jnp.arange(count, dtype=jnp.int64) - (before - first)[rows]])
