"""FlexAttention: attention with score and mask functions given as text (`flex_mods.py`), forward and backward.

The scores are computed by tiles and never stored together: a row of tiles keeps the largest score and the sum of each
of its rows, as flash attention does. Tiles that the block mask leaves out are skipped. The numbers are those of
PyTorch's dense form, but that a block mask counts where its mask function says something else, as on GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torchtpu.ops.attention.attention import _dot, _rows
from torchtpu.ops.attention.flex_mods import Mod, differentiated
from torchtpu.ops.attention.flex_tiles import Tiles
from torchtpu.ops.linalg.matmul import scaled
from torchtpu.ops.registry import Context, jnp

_LN2 = math.log(2)


def forward(
    query: Any, key: Any, value: Any, score_buffers: Any, mask_buffers: Any, blocks: Any, score: str, mask: str,
    scale: Any, block_size: Sequence[int], *, ctx: Context,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Output, log-sum-exp and largest scores, these two in units of log 2."""
    tiles = Tiles(query, key, blocks, block_size)
    given = _Given(tiles, query, key, value, score_buffers, mask_buffers, score, mask, scale, ctx)
    lowest = jnp.finfo(given.dtype).min  # of a row whose every score is -inf: its weights are 0

    def row(carry: Any, i: Any) -> Any:
        def column(j: Any, carry: Any) -> Any:
            top, total, made, ok = carry
            tile = _Tile(given, i, j)
            reached = jnp.maximum(top, tile.kept_scores.max(-1))
            shrunk = jnp.exp(top - reached)
            weight = jnp.exp(tile.kept_scores - reached[..., None])
            seen = _dot(_rows(weight.astype(query.dtype), tile.key), tile.value, (3, 2), ctx).reshape(made.shape)
            made = made * shrunk[..., None] + seen.astype(made.dtype)
            return reached, total * shrunk + weight.sum(-1), made, ok & tile.is_in_bounds

        rows = (*query.shape[:2], tiles.rows)
        empty = jnp.full(rows, lowest, given.dtype), jnp.zeros(rows, given.dtype)
        made = jnp.zeros((*rows, value.shape[3]), given.dtype)
        top, total, made, ok = tiles.over_columns(i, column, (*empty, made, carry))
        is_empty = total == 0
        made = (made / jnp.where(is_empty, 1, total)[..., None]).astype(query.dtype)
        logsumexp = jnp.where(is_empty, -jnp.inf, jnp.log(total) + top)
        return ok, (made, logsumexp, jnp.where(is_empty, -jnp.inf, top))

    ok, (made, logsumexp, top) = tiles.over_rows(row, jnp.ones((), bool))
    ctx.check(ok, "an index in a score_mod or mask_mod is out of bounds")
    return made, logsumexp / _LN2, top / _LN2


def backward(
    query: Any, key: Any, value: Any, out: Any, logsumexp: Any, grad_out: Any, grad_logsumexp: Any, score_buffers: Any,
    mask_buffers: Any, blocks: Any, score: str, joint: str, mask: str, scale: Any, block_size: Sequence[int], *,
    ctx: Context,
) -> list[Any]:  # fmt: skip
    """The gradients of query, key, value and of those score buffers that the joint function has gradients of."""
    tiles = Tiles(query, key, blocks, block_size)
    given = _Given(tiles, query, key, value, score_buffers, mask_buffers, score, mask, scale, ctx)
    slope_of = Mod(joint, ctx)
    wide = given.dtype
    grad_out = jnp.zeros_like(out) if grad_out is None else grad_out
    lost = (out.astype(wide) * grad_out.astype(wide)).sum(-1)  # of each weight's slope, so that those of a row sum to 0
    if grad_logsumexp is not None:
        lost = lost - grad_logsumexp.astype(wide) / _LN2
    total = jnp.where(logsumexp == -jnp.inf, 0, logsumexp.astype(wide) * _LN2)
    in_rows = [tiles.in_rows(x) for x in (grad_out, lost, total)]

    def row(sums: Any, i: Any) -> Any:
        grad, lost, total = (tiles.row(x, i) for x in in_rows)
        grads = _rows(grad, given.key)

        def column(j: Any, carry: Any) -> Any:
            of_key, of_value, of_buffers, of_query = carry
            tile = _Tile(given, i, j)
            weight = jnp.exp(tile.kept_scores - total[..., None])
            slope = _dot(grads, tile.value, (3, 3), ctx).reshape(weight.shape).astype(wide)
            slope = weight * (slope - lost[..., None])
            steep, sums, _ = slope_of.on_tile((tile.scores, slope), tile.places, score_buffers)
            steep = _rows(jnp.where(tile.is_kept, scaled(steep, scale).astype(query.dtype), 0), tile.key)
            of_query += _dot(steep, tile.key, (3, 2), ctx).reshape(of_query.shape).astype(wide)
            # Transposed products: on XLA:CPU the other order takes twice as long.
            to_key = _dot(_rows(tile.query, tile.key), steep, (2, 2), ctx).swapaxes(2, 3)
            to_value = _dot(grads, _rows(weight.astype(grad.dtype), tile.key), (2, 2), ctx).swapaxes(2, 3)
            of_key, of_value = tiles.add(of_key, to_key, j), tiles.add(of_value, to_value, j)
            of_buffers = [s + m.astype(s.dtype) for s, m in zip(of_buffers, sums, strict=True)]
            return of_key, of_value, of_buffers, of_query

        start = jnp.zeros((*query.shape[:2], tiles.rows, query.shape[3]), wide)
        *sums, of_query = tiles.over_columns(i, column, (*sums, start))
        return tuple(sums), (of_query.astype(query.dtype),)

    start = [jnp.zeros(x.shape, wide) for x in (given.key, given.value)]
    buffers = [jnp.zeros(score_buffers[i].shape, wide) for i in differentiated(joint)]
    (of_key, of_value, of_buffers), (of_query,) = tiles.over_rows(row, (*start, buffers))
    return [of_query, tiles.as_given(of_key, key), tiles.as_given(of_value, value), *of_buffers]


class _Given:
    """The arguments of a call, with the keys as rows of tiles take them."""

    def __init__(
        self, tiles: Tiles, query: Any, key: Any, value: Any, score_buffers: Any, mask_buffers: Any, score: str,
        mask: str, scale: Any, ctx: Context,
    ) -> None:  # fmt: skip
        self.tiles = tiles
        self.dtype = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
        common = query.dtype if key.dtype == query.dtype else self.dtype
        self.query = tiles.in_rows(query.astype(common))
        self.key = tiles.in_columns(key.astype(common))
        self.value = tiles.in_columns(value.astype(query.dtype))
        self.score, self.mask = Mod(score, ctx), Mod(mask, ctx)
        self.score_buffers, self.mask_buffers = score_buffers, mask_buffers
        self.scale, self.ctx = scale, ctx


class _Tile:
    """The scores of some rows and columns: as the functions get them, and with -inf where the mask leaves them out."""

    def __init__(self, given: _Given, i: Any, j: Any) -> None:
        tiles, ctx = given.tiles, given.ctx
        self.query = tiles.row(given.query, i)
        self.key, self.value = tiles.column(given.key, j), tiles.column(given.value, j)
        self.places = tiles.places(i, j)
        scores = _dot(_rows(self.query, self.key), self.key, (3, 3), ctx).astype(given.dtype)
        scores = scores.reshape(*self.query.shape[:3], self.key.shape[2])
        self.scores = scaled(scores, given.scale)
        mask, _, is_mask_ok = given.mask.on_tile((), self.places, given.mask_buffers)
        made, _, is_score_ok = given.score.on_tile((self.scores,), self.places, given.score_buffers)
        self.is_kept = tiles.kept(i, j, mask)
        self.is_in_bounds = is_mask_ok & is_score_ok
        self.kept_scores = jnp.where(self.is_kept, made.astype(given.dtype), -jnp.inf)
