"""Converts rows of different lengths between one after the other and padded to one length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchtpu.ops.counts import read, size_for
from torchtpu.ops.registry import composed, jnp, lowering


def _infer_padded(values: Tensor, offsets: list[Tensor], max_lengths: list[int], *_: Any) -> Tensor:
    (ends,), (length,) = offsets, max_lengths
    return values.new_empty((ends.shape[0] - 1, length, *values.shape[1:]))


@lowering("_jagged_to_padded_dense_forward", infer=_infer_padded)
def jagged_to_padded_dense(values, offsets, max_lengths, padding_value=0.0):
    (ends,), (length,) = offsets, max_lengths
    at = ends[:-1, None] + jnp.arange(length)
    at = jnp.where(at < ends[1:, None], at, values.shape[0])
    padding = jnp.asarray(padding_value).astype(values.dtype)
    return jnp.concatenate([values, jnp.broadcast_to(padding, (1, *values.shape[1:]))]).at[at].get(mode="clip")


@composed("_padded_dense_to_jagged_forward")
def padded_dense_to_jagged(dense: Tensor, offsets: list[Tensor], total_L: int | None = None) -> Tensor:
    (ends,) = offsets
    (count,) = read("_padded_dense_to_jagged_forward", ends[-1]) if total_L is None else (total_L,)
    place = torch.arange(size_for(count), device=dense.device)
    row = (torch.searchsorted(ends, place, right=True) - 1).clamp(0, dense.shape[0] - 1)
    column = place - ends[row]
    inside = (column < dense.shape[1]).view(-1, *[1] * (dense.dim() - 2))
    found: Tensor = torch.ops.aten._unsafe_masked_index(dense, inside, [row, column], 0)
    return found[:count]
