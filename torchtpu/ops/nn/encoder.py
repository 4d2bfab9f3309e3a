"""The fused calls that nn.MultiheadAttention and nn.TransformerEncoder make in eval mode, in ops that have lowerings of
their own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchtpu.ops.registry import composed

aten: Any = torch.ops.aten


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """(batch, length, width) as (batch, heads, length, width of a head)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


@composed("_transform_bias_rescale_qkv")
def transform_bias_rescale_qkv(qkv: Tensor, qkv_bias: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (_heads(x, num_heads).contiguous() for x in (qkv + qkv_bias).chunk(3, -1))
    return q / math.sqrt(q.shape[-1]), k, v


@composed("_native_multi_head_attention")
def native_multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    weights, biases = qkv_weight.chunk(3), qkv_bias.chunk(3)
    projected = (functional.linear(*p) for p in zip((query, key, value), weights, biases, strict=True))
    q, k, v = (_heads(x, num_head) for x in projected)
    found = None
    if mask is None and not need_weights:
        mixed = functional.scaled_dot_product_attention(q, k, v)
    else:
        scores = q / math.sqrt(q.shape[-1]) @ k.mT
        found = scores.softmax(-1) if mask is None else torch._masked_softmax(scores, mask, 3, mask_type)
        mixed = found @ v
    made = functional.linear(mixed.transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights or found is None:
        return made, None
    return made, found.mean(1) if average_attn_weights else found


@composed("_transformer_encoder_layer_fwd")
def transformer_encoder_layer_fwd(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    def attend(x: Tensor) -> Tensor:
        projection = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return native_multi_head_attention(x, x, x, embed_dim, num_heads, *projection, mask, False, True, mask_type)[0]

    def feed(x: Tensor) -> Tensor:
        inner = functional.linear(x, ffn_weight_1, ffn_bias_1)
        return functional.linear(functional.gelu(inner) if use_gelu else inner.relu(), ffn_weight_2, ffn_bias_2)

    first = lambda x: functional.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)
    second = lambda x: functional.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)
    if norm_first:
        x = src + attend(first(src))
        return x + feed(second(x))
    x = first(src + attend(src))
    return second(x + feed(x))


@composed("_nested_tensor_from_mask_left_aligned")
def nested_tensor_from_mask_left_aligned(t: Tensor, mask: Tensor) -> bool:
    """False: nn.TransformerEncoder then stays with dense tensors, since nested ones have no storage here."""
    return False
