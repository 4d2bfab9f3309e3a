"""Attention on TPUs by jax's Pallas kernels, which never store the scores; the composite form where they do not fit.

The kernels keep two numbers per row, the largest score and the sum; the recorded op has one, the log-sum-exp, which
serves as the largest score of a sum of 1.
"""

from __future__ import annotations

from typing import Any

from torchtpu.ops.attention import _DROPOUT, _drops, _scale, _sum_to, attention, attention_backward
from torchtpu.ops.registry import jax, jnp, lowering

_BLOCK = 128  # what lengths have to be a multiple of
_LARGEST_BLOCK = 512
_LARGEST_HEAD = 256


def _fits(query: Any, key: Any, value: Any, dropout_p: Any) -> bool:
    lengths = (query.shape[2], key.shape[2]) if query.ndim == 4 else (0, 0)
    return (
        query.ndim == 4
        and not _drops(dropout_p)
        and query.dtype in (jnp.float32, jnp.bfloat16)
        and query.shape[3] == value.shape[3] <= _LARGEST_HEAD
        and all(n and n % _BLOCK == 0 for n in lengths)
    )


def _block(length: int) -> int:
    return next(b for b in (_LARGEST_BLOCK, 256, _BLOCK) if length % b == 0)


def _factors(query: Any, scale: Any) -> tuple[Any, float]:
    """What the query is multiplied by before the kernel and inside: the kernels take no run-time number."""
    scale = _scale(query, scale)
    return (1, float(scale)) if isinstance(scale, (int, float)) else (jnp.asarray(scale, query.dtype), 1.0)


def _spread(x: Any, query: Any) -> Any:
    """Each key head once per query head that reads it."""
    return jnp.repeat(x, query.shape[1] // x.shape[1], axis=1)


def _gather(grad: Any, heads: int) -> Any:
    """The reverse of `_spread` for gradients."""
    batch, _, length, width = grad.shape
    return grad.reshape(batch, heads, -1, length, width).sum(2)


def _bias(attn_bias: Any, query: Any, key: Any) -> tuple[Any, Any]:
    """The bias as the kernels take it, and which rows attend to nothing: the kernels would make NaN of them."""
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    if attn_bias is None:
        return None, None
    shape = (*query.shape[:3], key.shape[2])
    dead = jnp.broadcast_to(jnp.all(attn_bias == -jnp.inf, -1), shape[:3])
    return jnp.broadcast_to(jnp.maximum(attn_bias, flash.DEFAULT_MASK_VALUE), shape).astype(jnp.float32), dead


@lowering(
    "_scaled_dot_product_fused_attention_overrideable",
    platform="tpu",
    random=True,
    structural=_DROPOUT,
    multiplies=True,
)
def flash_forward(
    query, key, value, attn_bias=None, dropout_p=0.0, is_causal=False, return_debug_mask=False, *,
    scale=None, generator, ctx,
):  # fmt: skip
    if not _fits(query, key, value, dropout_p):
        return attention(
            query, key, value, attn_bias, dropout_p, is_causal, return_debug_mask, scale=scale, generator=generator,
            ctx=ctx,
        )  # fmt: skip
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    with jax.enable_x64(False):
        bias, dead = _bias(attn_bias, query, key)
        factor, fixed = _factors(query, scale)
        q, k = _block(query.shape[2]), _block(key.shape[2])
        made, total, top = flash._flash_attention_impl(
            query * factor, _spread(key, query), _spread(value, query), bias, None, True, is_causal, fixed, 1, q, k, k,
            False,
        )  # fmt: skip
        logsumexp = jnp.log(total) + top
        if dead is not None:
            made = jnp.where(dead[..., None], 0, made)
            logsumexp = jnp.where(dead, -jnp.inf, logsumexp)
    seed, offset = (word.astype(jnp.int64) for word in generator)
    return made, logsumexp, None, None, None, None, seed, offset, None


@lowering(
    "_scaled_dot_product_fused_attention_overrideable_backward",
    platform="tpu",
    structural=_DROPOUT,
    multiplies=True,
)
def flash_backward(
    grad_out, query, key, value, attn_bias, grad_input_mask, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
    dropout_p, is_causal, philox_seed, philox_offset, *, scale=None, ctx,
):  # fmt: skip
    if not _fits(query, key, value, dropout_p):
        return attention_backward(
            grad_out, query, key, value, attn_bias, grad_input_mask, out, logsumexp, cum_seq_q, cum_seq_k, max_q,
            max_k, dropout_p, is_causal, philox_seed, philox_offset, scale=scale, ctx=ctx,
        )  # fmt: skip
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    with jax.enable_x64(False):
        bias, dead = _bias(attn_bias, query, key)
        factor, fixed = _factors(query, scale)
        q, k = _block(query.shape[2]), _block(key.shape[2])
        blocks = flash.BlockSizes(q, k, k, 1, q, k, k, q, k, k, q)
        top = logsumexp.astype(jnp.float32)
        if dead is not None:
            top = jnp.where(dead, 0, top)
            grad_out = jnp.where(dead[..., None], 0, grad_out)
        keys, values = _spread(key, query), _spread(value, query)
        residuals = (query * factor, keys, values, bias, None, out, jnp.ones_like(top), top)
        grads = flash._flash_attention_bwd(False, is_causal, fixed, blocks, False, residuals, grad_out)
        heads = key.shape[1]
        grad_query = grads[0] * factor
        grad_bias = None
        if dead is not None:
            slope = jnp.where(dead[..., None], 0, grads[3] / fixed)  # the kernel scales it like the query's gradient
            grad_bias = _sum_to(slope, attn_bias.shape)
    return grad_query, _gather(grads[1], heads), _gather(grads[2], heads), grad_bias
