"""Scaled dot product attention as one op: in come queries, keys, values and a bias, out go the output and gradients.

The probabilities are made again in the backward pass from the saved log-sum-exp, and so is the dropout mask from the
saved (seed, offset): a later pass may swap in a kernel that never stores them.
"""

from __future__ import annotations

import math
from typing import Any

from torchtpu.ops.matmul import contract, scaled
from torchtpu.ops.random import uniform
from torchtpu.ops.registry import jnp, lowering, opmath

_DROPOUT = {"dropout_p": (0.0, 1.0)}


def _grouped(query: Any, key: Any) -> Any:
    """(batch, heads, L, E) as (batch, key heads, queries per key head, L, E), for grouped-query attention."""
    batch, heads, length, width = query.shape
    return query.reshape(batch, key.shape[1], heads // key.shape[1], length, width)


def _batched(x: Any) -> Any:
    return x[None] if x.ndim == 3 else x


def _bias_like(bias: Any, scores: Any) -> Any:
    """A bias that broadcasts to (batch, heads, L, S), as one that broadcasts to the grouped scores."""
    bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    heads = scores.shape[1:3] if bias.shape[1] > 1 else (1, 1)
    return bias.reshape(bias.shape[0], *heads, *bias.shape[2:])


def _scores(query: Any, key: Any, bias: Any, is_causal: bool, scale: Any, ctx: Any) -> Any:
    """The scaled and masked scores of a grouped query, (batch, key heads, group, L, S), in float32 or wider."""
    made = contract(query, key, ((4,), (3,)), ((0, 1), (0, 1)), ctx)
    made = scaled(made, 1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if bias is not None:
        made = made + _bias_like(bias, made).astype(made.dtype)
    if is_causal:
        length, width = made.shape[-2:]
        made = jnp.where(jnp.arange(length)[:, None] >= jnp.arange(width), made, -jnp.inf)
    return made


def _keep(philox: Any, shape: tuple[int, ...], dropout_p: Any) -> Any:
    """What an attention weight is multiplied by: 0 where dropped, else what keeps the mean."""
    chance = jnp.asarray(dropout_p, jnp.float32)
    kept = uniform(philox, shape, jnp.float32) >= chance
    return jnp.where(kept, jnp.where(chance < 1, 1 / (1 - chance), 0), 0)


def _drops(dropout_p: Any) -> bool:
    return not (isinstance(dropout_p, (int, float)) and dropout_p == 0)


@lowering("_scaled_dot_product_fused_attention_overrideable", random=True, structural=_DROPOUT)
def attention(
    query, key, value, attn_bias=None, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None, generator, ctx
):
    shape = query.shape[:-1] + value.shape[-1:]
    query, key, value = map(_batched, (query, key, value))
    scores = _scores(_grouped(query, key), key, attn_bias, is_causal, scale, ctx)
    # A row whose every score is -inf attends to nothing: its output is zero, its log-sum-exp -inf.
    top = scores.max(-1, keepdims=True)
    weight = jnp.exp(scores - jnp.where(top == -jnp.inf, 0, top))
    total = weight.sum(-1, keepdims=True)
    if _drops(dropout_p):
        weight = weight * _keep(generator, weight.shape, dropout_p).astype(weight.dtype)
    made = contract(weight.astype(value.dtype), value, ((4,), (2,)), ((0, 1), (0, 1)), ctx)
    made = made / jnp.where(total == 0, 1, total)
    logsumexp = (jnp.log(total) + top)[..., 0].reshape(query.shape[:-1])
    seed, offset = (word.astype(jnp.int64) for word in generator)
    return made.reshape(shape), logsumexp, None, None, None, None, seed, offset, None


@lowering("_scaled_dot_product_fused_attention_overrideable_backward", structural=_DROPOUT)
def attention_backward(
    grad_out, query, key, value, attn_bias, grad_input_mask, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
    dropout_p, is_causal, philox_seed, philox_offset, *, scale=None, ctx,
):  # fmt: skip
    shapes = query.shape, key.shape, value.shape
    query, key, value, grad_out, out = map(_batched, (query, key, value, grad_out, out))
    q, grad, made = (_grouped(x, key) for x in (query, grad_out, out))
    scores = _scores(q, key, attn_bias, is_causal, scale, ctx)
    logsumexp = logsumexp.reshape(scores.shape[:-1])[..., None]
    weight = jnp.exp(scores - jnp.where(logsumexp == -jnp.inf, 0, logsumexp).astype(scores.dtype))
    slope = contract(grad, value, ((4,), (3,)), ((0, 1), (0, 1)), ctx)
    dropped = weight
    if _drops(dropout_p):
        keep = _keep((philox_seed, philox_offset), weight.shape, dropout_p).astype(weight.dtype)
        dropped, slope = weight * keep, slope * keep
    grad_value = contract(dropped.astype(grad.dtype), grad, ((2, 3), (2, 3)), ((0, 1), (0, 1)), ctx)
    slope = weight * (slope - (opmath(grad) * opmath(made)).sum(-1, keepdims=True))
    grad_bias = None if attn_bias is None else _sum_to(slope, attn_bias)
    slope = scaled(slope, 1 / math.sqrt(query.shape[-1]) if scale is None else scale).astype(q.dtype)
    grad_query = contract(slope, key, ((4,), (2,)), ((0, 1), (0, 1)), ctx)
    grad_key = contract(slope, q, ((2, 3), (2, 3)), ((0, 1), (0, 1)), ctx)
    grads = (g.reshape(shape) for g, shape in zip((grad_query, grad_key, grad_value), shapes, strict=True))
    return *grads, grad_bias


def _sum_to(slope: Any, bias: Any) -> Any:
    wanted = _bias_like(bias, slope).shape
    axes = tuple(i for i, n in enumerate(wanted) if n == 1 and slope.shape[i] != 1)
    return slope.sum(axes, keepdims=True).reshape(bias.shape)
