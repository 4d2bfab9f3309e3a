"""Attention by blocks of query rows, without all scores at once.

A block sees every key, so its softmax is whole, and its numbers are those of the composite form. Dropout draws for each
block by itself.
"""

from __future__ import annotations

import math
from typing import Any

from torchtpu.ops.attention.attention import _sum_to, attend, slopes
from torchtpu.ops.registry import jnp, lax, opmath

_STORED = 32 << 20  # bytes of scores that one block may have; scores of twice as many are not stored as a whole
_LEAST_ROWS = 128  # of a block: fewer leave the matrix unit idle


def fits(query: Any, key: Any) -> bool:
    """Whether there are so many scores that blocks of them pay."""
    return query.ndim == 4 and math.prod(query.shape[:3]) * key.shape[2] * 4 >= 2 * _STORED


def forward(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    dropout_p: Any,
    is_causal: bool,
    *,
    scale: Any,
    generator: Any,
    ctx: Any,
) -> tuple[Any, Any]:
    """As `attention.attend`."""
    blocks = _Blocks(query, key)

    def block(i: Any) -> tuple[Any, Any]:
        made, logsumexp = attend(
            blocks.part(query, i), key, value, blocks.part_of_bias(bias, i), dropout_p, is_causal, scale=scale,
            generator=_draw(generator, i), ctx=ctx, first=blocks.first(i),
        )  # fmt: skip
        return made.astype(query.dtype), logsumexp

    made, logsumexp = lax.map(block, blocks.numbers())
    return blocks.joined(made, 2), blocks.joined(logsumexp, 2)


def backward(
    query: Any, key: Any, value: Any, bias: Any, grad: Any, out: Any, logsumexp: Any, dropout_p: Any, is_causal: bool,
    *, scale: Any, generator: Any, ctx: Any, wants_bias: bool,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """The gradients of query, key, value, and of the bias where it is wanted."""
    blocks = _Blocks(query, key)
    rows = blocks.rows if bias is not None and bias.shape[-2] != 1 else 1

    def block(sums: Any, i: Any) -> Any:
        part = blocks.part_of_bias(bias, i)
        of_query, of_key, of_value, slope = slopes(
            blocks.part(query, i), key, value, part, blocks.part(grad, i), blocks.part(out, i),
            blocks.part(logsumexp[..., None], i)[..., 0], dropout_p, is_causal, scale=scale,
            generator=_draw(generator, i), ctx=ctx, first=blocks.first(i),
        )  # fmt: skip
        of_bias = _sum_to(slope, part.shape) if wants_bias else ()
        summed = (of_key, of_value, () if rows > 1 else of_bias)
        return _add(sums, summed), (of_query, of_bias if rows > 1 else ())

    start = tuple(jnp.zeros_like(opmath(x)) for x in (key, value))
    start += (jnp.zeros_like(opmath(bias)) if wants_bias and rows == 1 else (),)
    (of_key, of_value, of_bias), (of_query, parts) = lax.scan(block, start, blocks.numbers())
    if wants_bias and rows > 1:
        of_bias = blocks.joined(parts, bias.ndim - 2)
    bias_grad = of_bias.astype(bias.dtype) if wants_bias else None
    return blocks.joined(of_query, 2), of_key.astype(key.dtype), of_value.astype(value.dtype), bias_grad


def _add(sums: Any, more: Any) -> Any:
    return tuple(s if isinstance(s, tuple) else s + m.astype(s.dtype) for s, m in zip(sums, more, strict=True))


def _draw(generator: Any, block: Any) -> Any:
    """A generator of the block's own: seeds that differ so far up are nobody's."""
    seed, offset = (jnp.asarray(word) for word in generator)
    return seed + (block.astype(seed.dtype) << 40), offset


class _Blocks:
    """The query rows in blocks of one length; the last one is filled up with zeros, whose results are cut off."""

    def __init__(self, query: Any, key: Any) -> None:
        self.length = query.shape[2]
        room = _STORED // (query.shape[0] * query.shape[1] * key.shape[2] * 4)
        self.rows = min(max(_LEAST_ROWS, 1 << max(0, room.bit_length() - 1)), self.length)
        self.count = -(-self.length // self.rows)

    def numbers(self) -> Any:
        return jnp.arange(self.count)

    def first(self, i: Any) -> Any:
        """The row that block `i` begins with."""
        return i * self.rows

    def part(self, x: Any, i: Any, axis: int = 2) -> Any:
        """The rows of block `i`."""
        pads = [(0, self.count * self.rows - self.length if d == axis else 0) for d in range(x.ndim)]
        return lax.dynamic_slice_in_dim(jnp.pad(x, pads), self.first(i), self.rows, axis)

    def part_of_bias(self, bias: Any, i: Any) -> Any:
        """Its rows too, where it has one for each query row."""
        return bias if bias is None or bias.shape[-2] == 1 else self.part(bias, i, bias.ndim - 2)

    def joined(self, parts: Any, axis: int) -> Any:
        """The blocks' results, stacked, as one array."""
        moved = jnp.moveaxis(parts, 0, axis)
        whole = moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])
        return lax.slice_in_dim(whole, 0, self.length, axis=axis)
