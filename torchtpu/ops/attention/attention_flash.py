"""Attention on TPUs by jax's Pallas kernels, which never store the scores.

They take no dropout and no odd lengths, and would have a mask stored for every head: what they do not fit goes block by
block where it has many scores, and takes the composite form else.

The kernels keep two numbers per row, the largest score and the sum; the recorded op has one, the log-sum-exp, which
serves as the largest score of a sum of 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torchtpu.ops.attention import attention_blocked
from torchtpu.ops.attention.attention import (
    _DROPOUT,
    _drops,
    _scale,
    attention,
    attention_backward,
    with_philox,
)
from torchtpu.ops.registry import jax, jnp, lowering

_BLOCK = 128  # what lengths have to be a multiple of
_LARGEST_BLOCK = 512
_LARGEST_HEAD = 256


def _fits(query: Any, key: Any, value: Any, bias: Any, dropout_p: Any) -> bool:
    lengths = (query.shape[2], key.shape[2]) if query.ndim == 4 else (0, 0)
    return (
        query.ndim == 4
        and bias is None
        and not _drops(dropout_p)
        and query.dtype in (jnp.float32, jnp.bfloat16)
        and query.shape[3] == value.shape[3] <= _LARGEST_HEAD
        and all(n and n % _BLOCK == 0 for n in lengths)
    )


@contextlib.contextmanager
def _as_kernels_take_it(query: Any, ctx: Any) -> Iterator[None]:
    """32-bit indices, and one of the precisions that Mosaic has: of bfloat16 it has no product but the plain one."""
    is_precise = query.dtype == jnp.float32 and ctx.precision != "medium"
    with jax.enable_x64(False), jax.default_matmul_precision("highest" if is_precise else "default"):
        yield


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
    given = query, key, value, attn_bias, dropout_p, is_causal
    if not _fits(query, key, value, attn_bias, dropout_p):
        if attention_blocked.fits(query, key):
            made, logsumexp = attention_blocked.forward(*given, scale=scale, generator=generator, ctx=ctx)
            return with_philox(made, logsumexp, generator)
        return attention(*given, return_debug_mask, scale=scale, generator=generator, ctx=ctx)
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    with _as_kernels_take_it(query, ctx):
        factor, fixed = _factors(query, scale)
        q, k = _block(query.shape[2]), _block(key.shape[2])
        made, total, top = flash._flash_attention_impl(
            query * factor, _spread(key, query), _spread(value, query), None, None, True, is_causal, fixed, 1, q, k, k,
            False,
        )  # fmt: skip
        logsumexp = jnp.log(total) + top
    return with_philox(made, logsumexp, generator)


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
    if not _fits(query, key, value, attn_bias, dropout_p):
        if attention_blocked.fits(query, key):
            return attention_blocked.backward(
                query, key, value, attn_bias, grad_out, out, logsumexp, dropout_p, is_causal, scale=scale,
                generator=(philox_seed, philox_offset), ctx=ctx,
                wants_bias=attn_bias is not None and grad_input_mask[3],
            )  # fmt: skip
        return attention_backward(
            grad_out, query, key, value, attn_bias, grad_input_mask, out, logsumexp, cum_seq_q, cum_seq_k, max_q,
            max_k, dropout_p, is_causal, philox_seed, philox_offset, scale=scale, ctx=ctx,
        )  # fmt: skip
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    with _as_kernels_take_it(query, ctx):
        factor, fixed = _factors(query, scale)
        q, k = _block(query.shape[2]), _block(key.shape[2])
        blocks = flash.BlockSizes(q, k, k, 1, q, k, k, q, k, k, q)
        top = logsumexp.astype(jnp.float32)
        residuals = (
            query * factor,
            _spread(key, query),
            _spread(value, query),
            None,
            None,
            out,
            jnp.ones_like(top),
            top,
        )
        grads = flash._flash_attention_bwd(False, is_causal, fixed, blocks, False, residuals, grad_out)
        heads = key.shape[1]
    return grads[0] * factor, _gather(grads[1], heads), _gather(grads[2], heads), None
