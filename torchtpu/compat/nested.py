"""Attention of jagged nested tensors on tpu, by padding them to the longest sequence.

Stands in for the choice of kernels in `torch/nested/_internal/sdpa.py`: CUDA's take sequences of different lengths,
and the only other way goes through strided nested tensors, which need kernels of their own for each op.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def pad_for_attention(sdpa: ModuleType) -> None:
    """Makes the attention of `torch.nested` pad what is on tpu. Called once, before anything else has its name."""
    attention = sdpa.jagged_scaled_dot_product_attention

    def jagged_scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        tensors: list[Any] = [query, key, value]
        if not all(isinstance(t, sdpa.NestedTensor) and t.device.type == "tpu" and t._ragged_idx == 2 for t in tensors):
            return attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        query, key, value, attn_mask = sdpa._autocast(query, key, value, attn_mask)
        sdpa._validate_sdpa_input(query, key, value, attn_mask, dropout_p, is_causal, scale)
        made = torch.nn.functional.scaled_dot_product_attention(
            _padded(query),
            _padded(key),
            _padded(value),
            attn_mask=_mask(query, key, is_causal),
            dropout_p=dropout_p,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return _jagged(made, query)

    sdpa.jagged_scaled_dot_product_attention = jagged_scaled_dot_product_attention  # type: ignore[attr-defined]


def _padded(jagged: Any) -> Tensor:
    """[batch, heads, longest, features] of [batch, heads, lengths, features]."""
    longest = jagged._get_max_seqlen()  # kept with the tensor, and a bound where it was not
    made: Tensor = torch.nested.to_padded_tensor(jagged.transpose(1, 2), 0.0)
    return made[:, :longest].transpose(1, 2)


def _mask(query: Any, key: Any, is_causal: bool) -> Tensor:
    """Which keys there are, [batch, 1, 1 or longest query, longest key]."""
    places = torch.arange(key._get_max_seqlen(), device=key.device)
    mask = (places < key.offsets().diff()[:, None])[:, None, None]
    if is_causal:
        mask = mask & (places <= torch.arange(query._get_max_seqlen(), device=key.device)[:, None])
    return mask


def _jagged(made: Tensor, query: Any) -> Tensor:
    """A dense result in the layout of the query: [batch, heads, lengths, features]."""
    from torch.nested._internal.nested_tensor import nested_from_padded

    jagged: Tensor = nested_from_padded(  # type: ignore[no-untyped-call]
        made.transpose(1, 2),
        query.offsets(),
        min_seqlen=query._maybe_min_seqlen,
        max_seqlen=query._maybe_max_seqlen,
        sum_S=query.values().shape[query._ragged_idx - 1],
    )
    return jagged.transpose(1, 2)
