"""Embedding tables: rows, bags of rows, and the gradients of the weights."""

from __future__ import annotations

from typing import Any

import torch

from torchtpu.ops.math.reduce import linalg_vector_norm
from torchtpu.ops.registry import jnp, lax, lowering, opmath
from torchtpu.ops.shape.index import DROPPED, PROMISED, checked

SUM, MEAN, MAX = range(3)  # the modes of an embedding bag


def _infer_embedding(weight: torch.Tensor, indices: torch.Tensor, *options: Any) -> torch.Tensor:
    if weight.dim() != 2 or indices.dtype not in (torch.int32, torch.int64):
        raise RuntimeError("embedding takes rows of a matrix")
    return weight.new_empty((*indices.shape, weight.shape[1]))


@lowering("embedding", infer=_infer_embedding)
def embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False, *, ctx):
    index = checked(ctx, indices, weight.shape[0], "index out of range in self")
    return weight.at[index].get(**PROMISED)


@lowering("embedding_dense_backward")
def embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq):
    index = indices.reshape(-1)
    rows = opmath(grad).reshape(index.shape + grad.shape[indices.ndim :])
    return _into_table(rows, index, num_weights, padding_idx, scale_grad_by_freq)


def _into_table(rows: Any, index: Any, size: int, padding_idx: int, by_frequency: bool) -> Any:
    """Adds row i to row index[i] of a new table; rows of the padding index and out of range are dropped."""
    if by_frequency:
        count = jnp.zeros(size, rows.dtype).at[index].add(1, **DROPPED)
        rows = rows / count.at[index].get(**PROMISED)[:, None]
    if padding_idx >= 0:
        index = jnp.where(index == padding_idx, size, index)
    return jnp.zeros((size, *rows.shape[1:]), rows.dtype).at[index].add(rows, **DROPPED)


@lowering("embedding_renorm", structural={"norm_type": None})
def embedding_renorm(weight, indices, max_norm, norm_type, *, ctx):
    index = checked(ctx, indices.reshape(-1), weight.shape[0], "index out of range in self")
    rows = opmath(weight.at[index].get(**PROMISED))
    norm = linalg_vector_norm(rows, norm_type, 1, keepdim=True, ctx=ctx)
    scaled = jnp.where(norm > max_norm, rows * (max_norm / (norm + 1e-7)), rows)
    return weight.at[index].set(scaled.astype(weight.dtype), **DROPPED)


# Bags.  Like PyTorch on the CPU, a plain sum has no use for the bag of each row and the length of each bag.


def _bag_shapes(weight, indices, offsets, scale_grad_by_freq=False, mode=SUM, sparse=False, per_sample_weights=None,
                include_last_offset=False, padding_idx=-1):  # fmt: skip
    options = scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset, padding_idx
    torch.ops.aten._embedding_bag(weight, indices, offsets, *options)  # refuses other dtypes, and weights of a mean
    for name, tensor, rank in (("weight", weight, 2), ("offsets", offsets, 1)):
        if tensor.dim() != rank:
            raise RuntimeError(f"{name} has to be a {rank}D Tensor, but got Tensor of dimension {tensor.dim()}")
    if per_sample_weights is not None and per_sample_weights.dtype != weight.dtype:
        raise RuntimeError(
            f"expected weights of the samples as the table's, {weight.dtype}, got {per_sample_weights.dtype}"
        )
    bags = offsets.shape[0] - include_last_offset
    bag = 0 if mode == SUM and padding_idx < 0 else indices.shape[0]
    maximum = (bags, weight.shape[1]) if mode == MAX else (bags,)
    dtype = torch.promote_types(indices.dtype, offsets.dtype)
    made = [offsets.new_empty(shape, dtype=dtype) for shape in (bag, bags, maximum)]
    return weight.new_empty(bags, weight.shape[1]), *made


@lowering("_embedding_bag", "_embedding_bag_forward_only", infer=_bag_shapes)
def embedding_bag(weight, indices, offsets, scale_grad_by_freq=False, mode=SUM, sparse=False, per_sample_weights=None,
                  include_last_offset=False, padding_idx=-1, *, ctx):  # fmt: skip
    size = weight.shape[0]
    ok = (indices >= 0) & (indices < size)
    ctx.check(ok, f"Index of input takes a value which is not in the valid range [0, {size})", RuntimeError)
    _check_offsets(ctx, offsets, indices.shape[0], mode)
    offsets = offsets[:-1] if include_last_offset else offsets
    bags = offsets.shape[0]
    bag = _bag_of(offsets, indices.shape[0])
    used_bag = jnp.where(indices == padding_idx, bags, bag) if padding_idx >= 0 else bag
    rows = opmath(weight.at[indices].get(**PROMISED))
    length = jnp.zeros(bags, offsets.dtype).at[used_bag].add(1, **DROPPED)
    if mode == MAX:
        out, position = _greatest(rows, used_bag, bags, indices)
        return out, bag, length, position
    rows = rows if per_sample_weights is None else rows * opmath(per_sample_weights)[:, None]
    out = jnp.zeros((bags, rows.shape[1]), rows.dtype).at[used_bag].add(rows, **DROPPED)
    if mode == SUM:
        return out, bag if padding_idx >= 0 else bag[:0], jnp.zeros_like(length), jnp.zeros_like(length)
    if mode == MEAN:
        out = out / jnp.maximum(length, 1).astype(out.dtype)[:, None]
    return out, bag, length, length


def _check_offsets(ctx: Any, offsets: Any, count: int, mode: int) -> None:
    if not offsets.size:
        return
    message = "offsets[0] has to be 0, i.e., the first sequence in the mini-batch has to start from position 0."
    ctx.check(offsets[:1] == 0, message, RuntimeError)
    message = f"offsets[-1] can not be greater than input's length {count}"
    ctx.check(offsets[-1:] <= count, message, RuntimeError)
    if mode != MAX:
        ctx.check(offsets[1:] >= offsets[:-1], "offsets must not decrease", RuntimeError)


def _bag_of(offsets: Any, count: int) -> Any:
    """The number of the bag that each of `count` positions lies in: how many later bags start at or before it."""
    starts = jnp.zeros(count, jnp.int64).at[offsets[1:]].add(1, **DROPPED)
    return lax.cumsum(starts) if count else starts


def _greatest(rows: Any, bag: Any, bags: int, indices: Any) -> tuple[Any, Any]:
    """Per bag and column the maximum and the row number of the first element that has it (0 and 0 for no element)."""
    shape = (bags, rows.shape[1])
    top = jnp.full(shape, -jnp.inf, rows.dtype).at[bag].max(rows, **DROPPED)
    count = rows.shape[0]
    order = lax.broadcasted_iota(jnp.int64, rows.shape, 0)
    wins = rows == top.at[jnp.minimum(bag, bags - 1)].get(**PROMISED)
    first = jnp.full(shape, count, jnp.int64).at[bag].min(jnp.where(wins, order, count), **DROPPED)
    is_found = first < count
    position = indices.at[jnp.minimum(first, count - 1)].get(**PROMISED) if count else 0
    return jnp.where(is_found, top, 0), jnp.where(is_found, position, 0)


@lowering("_embedding_bag_dense_backward")
def embedding_bag_dense_backward(grad, indices, bag, length, maximum, num_weights, scale_grad_by_freq, mode,
                                 per_sample_weights, padding_idx=-1):  # fmt: skip
    grad = opmath(grad)
    if mode == MAX:
        column = lax.broadcasted_iota(jnp.int64, maximum.shape, 1)
        row = jnp.where(length[:, None] == 0, num_weights, maximum)
        return jnp.zeros((num_weights, grad.shape[1]), grad.dtype).at[row, column].add(grad, **DROPPED)
    if mode == MEAN:
        grad = grad / jnp.maximum(length, 1).astype(grad.dtype)[:, None]
    rows = grad.at[bag].get(**PROMISED)
    rows = rows if per_sample_weights is None else rows * opmath(per_sample_weights)[:, None]
    return _into_table(rows, indices, num_weights, padding_idx, scale_grad_by_freq)


def _infer_bag_backward(grad: torch.Tensor, *rest: Any) -> torch.Tensor:
    num_weights, sparse = rest[5], rest[8]
    if sparse:
        raise NotImplementedError(
            "aten::_embedding_bag_sparse_backward: sparse tensors are not supported on tpu; use dense tensors, or move "
            "to the CPU first"
        )
    return grad.new_empty((num_weights, grad.shape[1]))


@lowering("_embedding_bag_backward", infer=_infer_bag_backward)
def embedding_bag_backward(grad, indices, offsets, bag, length, maximum, num_weights, scale_grad_by_freq, mode, sparse,
                           per_sample_weights, padding_idx=-1):  # fmt: skip
    bag = bag if bag.size else _bag_of(offsets, indices.shape[0])
    rest = length, maximum, num_weights, scale_grad_by_freq, mode, per_sample_weights, padding_idx
    return embedding_bag_dense_backward(grad, indices, bag, *rest)


@lowering("_embedding_bag_per_sample_weights_backward")
def embedding_bag_per_sample_weights_backward(grad, weight, indices, offsets, bag, mode, padding_idx=-1):
    bag = bag if bag.size else _bag_of(offsets, indices.shape[0])
    found = jnp.sum(opmath(grad).at[bag].get(**PROMISED) * opmath(weight).at[indices].get(**PROMISED), 1)
    return jnp.where(indices == padding_idx, 0, found) if padding_idx >= 0 else found
