"""Scaled dot product attention as one op, forward and backward.

The probabilities are made again in the backward pass from the saved log-sum-exp, and so is the dropout mask from the
saved (seed, offset): a kernel that never stores them can take this place.  With grouped queries the heads that share a
key head lie beside each other, so a dot sees them as more rows of one head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchtpu.ops.linalg.matmul import contract, scaled
from torchtpu.ops.random import uniform
from torchtpu.ops.registry import jnp, lax, like, lowering, opmath

_DROPOUT = {"dropout_p": (0.0, 1.0)}


def _rows(x: Any, key: Any) -> Any:
    """(batch, heads, L, …) as (batch, key heads, L of all heads of the group, …)."""
    return x.reshape(x.shape[0], key.shape[1], -1, x.shape[3])


def _batched(x: Any) -> Any:
    return x[None] if x.ndim == 3 else x


def _dot(x: Any, y: Any, over: tuple[int, int], ctx: Any) -> Any:
    return contract(x, y, ((over[0],), (over[1],)), ((0, 1), (0, 1)), ctx)


def _scores(query: Any, key: Any, bias: Any, is_causal: bool, scale: Any, ctx: Any, first: Any) -> Any:
    """The scaled and masked scores (batch, heads, L, S), in float32 or wider, of the rows from `first` on."""
    made = _dot(_rows(query, key), key, (3, 3), ctx).reshape(*query.shape[:3], key.shape[2])
    made = scaled(made, _scale(query, scale))
    if bias is not None:
        made = made + bias.astype(made.dtype)
    if is_causal:
        length, width = made.shape[-2:]
        made = jnp.where(first + jnp.arange(length)[:, None] >= jnp.arange(width), made, -jnp.inf)
    return made


def _reduced(x: Any, start: Any, by: Any) -> Any:
    first = jnp.asarray(start, x.dtype)
    if x.shape[3] == 1:  # XLA takes the only element, whatever a reduction starts from
        return by(x, jnp.broadcast_to(first, x.shape))
    return lax.reduce(x, first, by, (3,))[..., None]


def _scale(query: Any, scale: Any) -> Any:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _keep(philox: Any, shape: tuple[int, ...], dropout_p: Any) -> Any:
    """What an attention weight is multiplied by: 0 where dropped, else what keeps the mean."""
    chance = jnp.asarray(dropout_p, jnp.float32)
    kept = uniform(philox, shape, jnp.float32) >= chance
    return jnp.where(kept, jnp.where(chance < 1, 1 / (1 - chance), 0), 0)


def _drops(dropout_p: Any) -> bool:
    return not (isinstance(dropout_p, (int, float)) and dropout_p == 0)


def attend(
    query: Any, key: Any, value: Any, bias: Any, dropout_p: Any, is_causal: bool, *, scale: Any, generator: Any,
    ctx: Any, first: Any = 0,
) -> tuple[Any, Any]:  # fmt: skip
    """Output and log-sum-exp of the query rows from `first` on, of (batch, heads, rows, width)."""
    scores = _scores(query, key, bias, is_causal, scale, ctx, first)
    # A row whose every score is -inf attends to nothing: its output is zero. So the largest score starts from a number,
    # and the sum, which is at least 1 in every other row, from the least one; both cost less than a comparison.
    top = _reduced(scores, jnp.finfo(scores.dtype).min, lax.max)
    weight = jnp.exp(scores - top)
    total = _reduced(weight, jnp.finfo(scores.dtype).tiny, lax.add)
    if _drops(dropout_p):
        weight = weight * _keep(generator, weight.shape, dropout_p).astype(weight.dtype)
    made = _dot(_rows(weight.astype(value.dtype), key), value, (3, 2), ctx).reshape(*scores.shape[:3], value.shape[3])
    made = made / total
    return made, (jnp.log(total) + top)[..., 0]


def _infer(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Any, ...]:
    """Laid out as the query is, or as by PyTorch's composite form where its kernels cannot serve."""
    if query.dim() not in (3, 4):
        raise RuntimeError("query must be 3D or 4D")
    if rest[0] is not None:
        _refuse_larger((*query.shape[:-1], key.shape[-2]), rest[0].shape)
    if not 0 <= rest[1] <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {rest[1]:g}")
    shape = (*query.shape[:-1], value.shape[-1])
    made = like(query)
    if shape != query.shape:
        order = sorted(range(query.dim()), key=query.stride().__getitem__, reverse=True)
        inverse = sorted(range(query.dim()), key=order.__getitem__)
        made = query.new_empty([shape[d] for d in order]).permute(inverse)
    is_composite = rest[1] > 0 or any(x.stride(-1) != 1 for x in (query, key, value))
    batch, heads, rows = query.shape[:-1] if query.dim() == 4 else (1, *query.shape[:-1])
    numbers = [query.new_empty((), dtype=torch.int64) for _ in range(2)]  # the seed and the offset
    wide = query.dtype if query.dtype is torch.float64 else torch.float32
    logsumexp = query.new_empty((batch, heads, rows), dtype=wide)
    return _contiguous(made) if is_composite else made, logsumexp, None, None, rows, key.shape[-2], *numbers, None


def _refuse_larger(scores: tuple[int, ...], mask: torch.Size) -> None:
    """Raises what adding a mask to the scores in place does."""
    wide = max(len(scores), len(mask))
    a, b = ((1,) * (wide - len(shape)) + tuple(shape) for shape in (scores, mask))
    for dim in reversed(range(wide)):
        if a[dim] != b[dim] and 1 not in (a[dim], b[dim]):
            raise RuntimeError(
                f"The size of tensor a ({a[dim]}) must match the size of tensor b ({b[dim]}) at non-singleton "
                f"dimension {dim}"
            )
    made = [n if m == 1 else m for m, n in zip(a, b, strict=True)]
    if made != list(scores):
        raise RuntimeError(f"output with shape {list(scores)} doesn't match the broadcast shape {made}")


def _contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.new_empty(x.shape)


@lowering(
    "_scaled_dot_product_fused_attention_overrideable",
    random=True,
    structural=_DROPOUT,
    infer=_infer,
    multiplies=True,
)
def attention(
    query,
    key,
    value,
    attn_bias=None,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
    generator,
    ctx,
):
    shape = query.shape[:-1] + value.shape[-1:]
    query, key, value = map(_batched, (query, key, value))
    made, logsumexp = attend(
        query, key, value, attn_bias, dropout_p, is_causal, scale=scale, generator=generator, ctx=ctx
    )
    return with_philox(made.reshape(shape), logsumexp, generator)


def with_philox(made: Any, logsumexp: Any, generator: Any) -> tuple[Any, ...]:
    """The op's results: what has no use here is None."""
    seed, offset = (word.astype(jnp.int64) for word in generator)
    return made, logsumexp, None, None, None, None, seed, offset, None


def _infer_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Any, grad_input_mask: list[bool], *rest: Any
) -> tuple[Tensor | None, ...]:
    """Laid out as by PyTorch's kernels, rows before heads, or as by its composite form where those cannot serve."""
    grads = list(map(like, (query, key, value)))
    bias = None if attn_bias is None else like(attn_bias)
    dropout_p = rest[6]
    if query.dim() == 4:
        is_composite = dropout_p > 0 or grad_input_mask[3]
        turns = ((2, 2), (2, 3), (2, 2)) if is_composite else ((1, 2),) * 3
        grads = [_contiguous(g.transpose(*t)).transpose(*t) for g, t in zip(grads, turns, strict=True)]
    return *grads, bias


@lowering(
    "_scaled_dot_product_fused_attention_overrideable_backward",
    structural=_DROPOUT,
    infer=_infer_backward,
    multiplies=True,
)
def attention_backward(
    grad_out, query, key, value, attn_bias, grad_input_mask, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
    dropout_p, is_causal, philox_seed, philox_offset, *, scale=None, ctx,
):  # fmt: skip
    shapes = query.shape, key.shape, value.shape
    query, key, value, grad, out = map(_batched, (query, key, value, grad_out, out))
    *grads, slope = slopes(
        query, key, value, attn_bias, grad, out, logsumexp, dropout_p, is_causal, scale=scale,
        generator=(philox_seed, philox_offset), ctx=ctx,
    )  # fmt: skip
    grad_bias = None if attn_bias is None else _sum_to(slope, attn_bias.shape)
    return *(g.reshape(shape) for g, shape in zip(grads, shapes, strict=True)), grad_bias


def slopes(
    query: Any, key: Any, value: Any, bias: Any, grad: Any, out: Any, logsumexp: Any, dropout_p: Any, is_causal: bool,
    *, scale: Any, generator: Any, ctx: Any, first: Any = 0,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """The gradients of query, key, value and scores that the query rows from `first` on have."""
    scores = _scores(query, key, bias, is_causal, scale, ctx, first)
    logsumexp = logsumexp[..., None]
    weight = jnp.exp(scores - jnp.where(logsumexp == -jnp.inf, 0, logsumexp).astype(scores.dtype))
    slope = _dot(_rows(grad, key), value, (3, 3), ctx).reshape(weight.shape)
    dropped = weight
    if _drops(dropout_p):
        keep = _keep(generator, weight.shape, dropout_p).astype(weight.dtype)
        dropped, slope = weight * keep, slope * keep
    slope = weight * (slope - (opmath(grad) * opmath(out)).sum(-1, keepdims=True))
    steep = _rows(scaled(slope, _scale(query, scale)).astype(query.dtype), key)
    grad_query = _dot(steep, key, (3, 2), ctx).reshape(query.shape)
    # Transposed products: on XLA:CPU the other order takes twice as long.
    grad_key = _dot(_rows(query, key), steep, (2, 2), ctx).swapaxes(2, 3)
    grad_value = _dot(_rows(grad, key), _rows(dropped.astype(grad.dtype), key), (2, 2), ctx).swapaxes(2, 3)
    return grad_query, grad_key, grad_value, slope


def _sum_to(slope: Any, shape: tuple[int, ...]) -> Any:
    wanted = (1,) * (slope.ndim - len(shape)) + tuple(shape)
    axes = tuple(i for i, n in enumerate(wanted) if n == 1 and slope.shape[i] != 1)
    return slope.sum(axes, keepdims=True).reshape(shape)
