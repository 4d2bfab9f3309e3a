"""Adaptive and fractional pooling of (…, *space) to a given size; windows are static."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchtpu.ops.registry import composed, jnp, like, lowering, opmath
from torchtpu.ops.sizes import is_known
from torchtpu.ops.spatial.pool import best_of, places


@dataclass(frozen=True)
class _PoolTable:
    """For each output a row of inputs; rows are filled up by repeating, `valid` marks what is not repeated."""

    index: np.ndarray[Any, Any]
    valid: np.ndarray[Any, Any]


def _table(starts: Any, ends: Any) -> _PoolTable:
    starts, ends = np.asarray(starts), np.asarray(ends)
    index = starts[:, None] + np.arange(max(int((ends - starts).max(initial=0)), 1))
    return _PoolTable(np.minimum(index, np.maximum(ends[:, None] - 1, 0)), index < ends[:, None])


def _windows(length: int, count: int) -> _PoolTable:
    out = np.arange(count)
    return _table(out * length // count, -(-(out + 1) * length // count))


def _holders(length: int, count: int) -> _PoolTable:
    """For each input the windows that hold it: the inverse of `_windows`."""
    at = np.arange(length)
    return _table(at * count // length, -(-(at + 1) * count // length))


def _take(x: Any, index: np.ndarray[Any, Any], axis: int) -> list[Any]:
    return [jnp.take(x, jnp.asarray(column), axis) for column in index.T]


def _shaped(values: Any, ndim: int, axis: int) -> Any:
    return values.reshape([-1 if i == axis else 1 for i in range(ndim)])


def _gather_sum(x: Any, axis: int, table: _PoolTable, weight: np.ndarray[Any, Any] | None = None) -> Any:
    if weight is not None:
        x = x * _shaped(weight, x.ndim, axis).astype(x.dtype)
    length, (count, size) = x.shape[axis], table.index.shape
    if table.valid.all() and size * count == length and (table.index.ravel() == np.arange(length)).all():
        return x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :]).sum(axis + 1)
    if (
        table.valid.all()
        and size == 1
        and count % length == 0
        and (table.index[:, 0] == np.arange(count) * length // count).all()
    ):
        return jnp.repeat(x, count // length, axis)
    parts = zip(_take(x, table.index, axis), table.valid.T, strict=True)
    return sum(jnp.where(_shaped(valid, x.ndim, axis), part, 0) for part, valid in parts)


def _is_inside(length: Any, count: Any) -> Any:
    """Whether each input is in each window, (length, count), where these sizes are known at run time only."""
    at, out = jnp.arange(length)[:, None], jnp.arange(count)[None]
    length, count = jnp.asarray(length), jnp.asarray(count)
    return (at >= out * length // count) & (at < -(-(out + 1) * length // count))


def _sum_where(x: Any, axis: int, inside: Any) -> Any:
    """For each column of `inside` the sum of what it marks along an axis."""
    parts = jnp.where(inside, jnp.moveaxis(x, axis, -1)[..., None], jnp.zeros((), x.dtype))
    return jnp.moveaxis(parts.sum(-2), -1, axis)


@lowering("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def adaptive_avg_pool(self, output_size):
    made = opmath(self)
    for axis, count in zip(range(self.ndim - len(output_size), self.ndim), output_size, strict=True):
        if not is_known(self.shape[axis], count):
            inside = _is_inside(self.shape[axis], count)
            made = _sum_where(made, axis, inside) / _shaped(inside.sum(0), self.ndim, axis).astype(made.dtype)
            continue
        table = _windows(self.shape[axis], count)
        made = _gather_sum(made, axis, table) / _shaped(table.valid.sum(1), self.ndim, axis).astype(made.dtype)
    return made


@lowering("_adaptive_avg_pool2d_backward")
def adaptive_avg_pool2d_backward(grad_output, self):
    return _adaptive_avg_backward(2, grad_output, self)


@lowering("_adaptive_avg_pool3d_backward")
def adaptive_avg_pool3d_backward(grad_output, self):
    return _adaptive_avg_backward(3, grad_output, self)


@composed("adaptive_avg_pool3d_backward.grad_input")
def adaptive_avg_pool3d_gradient(grad_output: torch.Tensor, self: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.ops.aten._adaptive_avg_pool3d_backward(grad_output, self)
    return made


def _adaptive_avg_backward(rank: int, grad: Any, x: Any) -> Any:
    made = opmath(grad)
    for axis in range(x.ndim - rank, x.ndim):
        length, count = x.shape[axis], grad.shape[axis]
        if not is_known(length, count):
            inside = _is_inside(length, count)
            made = _sum_where(made / _shaped(inside.sum(0), x.ndim, axis).astype(made.dtype), axis, inside.T)
            continue
        made = _gather_sum(made, axis, _holders(length, count), 1 / _windows(length, count).valid.sum(1))
    return made


@lowering("adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(self, output_size):
    rank = len(output_size)
    place = places(self, rank)
    for axis in range(self.ndim - 1, self.ndim - rank - 1, -1):
        index = _windows(self.shape[axis], output_size[axis - self.ndim]).index
        self, place = best_of(zip(_take(self, index, axis), _take(place, index, axis), strict=True))
    return self, place


@lowering("adaptive_max_pool2d_backward")
def adaptive_max_pool2d_backward(grad_output, self, indices):
    return _gather_chosen(2, grad_output, self, indices)


@lowering("adaptive_max_pool3d_backward")
def adaptive_max_pool3d_backward(grad_output, self, indices):
    return _gather_chosen(3, grad_output, self, indices)


def _gather_chosen(rank: int, grad: Any, x: Any, indices: Any) -> Any:
    """Each element sums the gradients of those of its windows that chose it."""
    place = places(x, rank)
    axes = range(x.ndim - rank, x.ndim)
    tables = [_holders(x.shape[axis], grad.shape[axis]) for axis in axes]
    made: Any = 0
    for column in itertools.product(*(range(t.index.shape[1]) for t in tables)):
        part, chosen, valid = opmath(grad), indices.astype(jnp.int32), np.ones((1,) * x.ndim, bool)
        for axis, table, i in zip(axes, tables, column, strict=True):
            part, chosen = (jnp.take(a, jnp.asarray(table.index[:, i]), axis) for a in (part, chosen))
            valid = valid & _shaped(table.valid[:, i], x.ndim, axis)
        made = made + jnp.where(valid & (chosen == place), part, 0)
    return made


@lowering("fractional_max_pool2d", "fractional_max_pool3d")
def fractional_max_pool(self, kernel_size, output_size, random_samples):
    rank = len(kernel_size)
    lead = self.shape[: self.ndim - rank]
    x = self.reshape(math.prod(lead), *self.shape[-rank:])
    place = jnp.zeros((1, *[1] * rank), jnp.int32)
    samples = opmath(random_samples).reshape(-1, rank)[: x.shape[0]]  # there may be more than one image needs
    flat = jnp.zeros((x.shape[0], *[1] * (2 * rank)), jnp.int32)
    for i, (kernel, count) in enumerate(zip(kernel_size, output_size, strict=True)):
        # PyTorch stores the samples of the innermost dimension first.
        column = samples[:, i if rank == 3 else rank - 1 - i]
        index = _fractional_starts(column, x.shape[1 + i], count, kernel)[:, :, None] + jnp.arange(kernel)
        shape = [x.shape[0]] + [1] * (2 * rank)
        shape[1 + i], shape[1 + rank + i] = count, kernel
        flat = flat * x.shape[1 + i] + index.reshape(shape)
    place = flat.reshape(x.shape[0], *output_size, math.prod(kernel_size))
    planes, chosen = (a.reshape(a.shape[0], math.prod(a.shape[1:])) for a in (x, place))
    values = jnp.take_along_axis(planes, chosen, 1).reshape(place.shape)
    value, where = best_of((values[..., i], place[..., i]) for i in range(math.prod(kernel_size)))
    return value.reshape(*lead, *output_size), where.reshape(*lead, *output_size)


def _fractional_starts(sample: Any, length: int, count: int, kernel: int) -> Any:
    last = jnp.full((sample.shape[0], 1), length - kernel, jnp.int32)
    if count < 2:
        return last[:, :count]
    alpha = jnp.asarray((length - kernel) / (count - 1), sample.dtype)
    steps = jnp.arange(count - 1, dtype=sample.dtype)
    moved = jnp.trunc((steps + sample[:, None]) * alpha) - jnp.trunc(sample[:, None] * alpha)
    return jnp.concatenate([moved.astype(jnp.int32), last], 1)


def _like_input(grad_output: torch.Tensor, self: torch.Tensor, *_: Any) -> torch.Tensor:
    return like(self, memory_format=torch.contiguous_format)


@lowering("fractional_max_pool2d_backward")
@lowering("fractional_max_pool3d_backward", infer=_like_input)
def fractional_max_pool_backward(grad_output, self, kernel_size, output_size, indices):
    rank = len(kernel_size)
    rows = math.prod(self.shape[:-rank])
    pooled = (rows, math.prod(output_size))
    where = (jnp.arange(rows)[:, None], indices.reshape(pooled))
    made = jnp.zeros((rows, math.prod(self.shape[-rank:])), opmath(grad_output).dtype)
    return made.at[where].add(opmath(grad_output).reshape(pooled)).reshape(self.shape)
