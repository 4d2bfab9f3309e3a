"""Tiles of FlexAttention: the rows and columns of each, from the shapes and the block mask.

Rows and columns that fill up the last tiles repeat the last one of the array: functions of scores and indices see there
what they see elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchtpu.ops.registry import jnp, lax

_STORED = 32 << 20  # bytes of scores that one tile may have; scores of twice as many are not stored as a whole
_LEAST_ROWS = 128  # of a tile: fewer leave the matrix unit idle
_COLUMNS = 512  # of a tile, about


class Tiles:
    """The tiles of a call. `blocks` are the counts and indices of the mask's blocks, of those that are partly masked
    and then of those that are not; empty where every block is of the first kind."""

    def __init__(self, query: Any, key: Any, blocks: Sequence[Any], block_size: Sequence[int]) -> None:
        self._batch, self._heads, self._length, _ = query.shape
        self._width = key.shape[2]
        most_rows, most_columns = _limits(self._batch * self._heads, self._length, self._width)
        row_block, column_block = block_size if blocks else (1, 1)
        self.rows, row_block = _tile(self._length, row_block, most_rows)
        self.columns, column_block = _tile(self._width, column_block, most_columns)
        self._row_count = -(-self._length // self.rows)
        self._column_count = -(-self._width // self.columns)
        self._states: Any = None
        if blocks:
            self._blocks = (row_block, column_block)
            self._note(blocks, block_size)

    def _note(self, blocks: Sequence[Any], block_size: Sequence[int]) -> None:
        """`states` says of each block of a tile what of it counts, `order` which columns each row of tiles needs."""
        counts = [-(-n // size) for n, size in zip((self._length, self._width), block_size, strict=True)]
        states = _dense(blocks[0], blocks[1], counts) * 1
        if len(blocks) > 2:
            states = jnp.where(_dense(blocks[2], blocks[3], counts), 2, states)
        whole = []
        for axis, (size, block, tile, count) in enumerate(
            zip(block_size, self._blocks, (self.rows, self.columns), (self._row_count, self._column_count), strict=True)
        ):
            states = jnp.repeat(states, size // block, axis=2 + axis)
            whole.append(-(-tile // block))
            missing = max(0, whole[-1] * count - states.shape[2 + axis])
            states = jnp.pad(states, [(0, missing if d == 2 + axis else 0) for d in range(4)])
            states = lax.slice_in_dim(states, 0, whole[-1] * count, axis=2 + axis)
        self._states = states.astype(jnp.int8)
        self._whole = tuple(whole)
        shape = (*states.shape[:2], self._row_count, whole[0], self._column_count, whole[1])
        is_needed = (states.reshape(shape) != 0).any((0, 1, 3, 5))
        self._order = jnp.argsort(~is_needed, axis=1, stable=True)
        self._needed = is_needed.sum(1)

    # ---- parts of arrays

    def in_rows(self, x: Any) -> Any:
        """An array with a place for each query, filled up to whole tiles."""
        return _filled(x, self._row_count * self.rows)

    def in_columns(self, x: Any) -> Any:
        """Keys or values, for every batch, filled up to whole tiles."""
        return _filled(jnp.broadcast_to(x, (self._batch, *x.shape[1:])), self._column_count * self.columns)

    def row(self, x: Any, i: Any) -> Any:
        """Of what `in_rows` returned, row `i` of tiles."""
        return lax.dynamic_slice_in_dim(x, i * self.rows, self.rows, 2)

    def column(self, x: Any, j: Any) -> Any:
        """Of what `in_columns` returned, column `j` of tiles."""
        return lax.dynamic_slice_in_dim(x, j * self.columns, self.columns, 2)

    def add(self, x: Any, more: Any, j: Any) -> Any:
        """`x`, like what `in_columns` returned, with `more` added to column `j` of tiles."""
        return lax.dynamic_update_slice_in_dim(x, self.column(x, j) + more.astype(x.dtype), j * self.columns, 2)

    def as_given(self, x: Any, given: Any) -> Any:
        """The reverse of `in_columns` for gradients of what was `given`."""
        x = lax.slice_in_dim(x, 0, self._width, axis=2)
        return (x if given.shape[0] == self._batch else x.sum(0, keepdims=True)).astype(given.dtype)

    def places(self, i: Any, j: Any) -> list[Any]:
        """The batches, heads, queries and keys of a tile."""
        rows = jnp.minimum(i * self.rows + jnp.arange(self.rows), self._length - 1)
        columns = jnp.minimum(j * self.columns + jnp.arange(self.columns), self._width - 1)
        return [x.astype(jnp.int32) for x in (jnp.arange(self._batch), jnp.arange(self._heads), rows, columns)]

    def kept(self, i: Any, j: Any, mask: Any) -> Any:
        """Which scores of a tile count, of which `mask` says what the mask function does."""
        if self._states is not None:
            state = self._spread(i, j)
            mask = (state == 2) | ((state == 1) & mask)
        if self._width % self.columns:
            mask = mask & (j * self.columns + jnp.arange(self.columns) < self._width)
        if self._length % self.rows:
            mask = mask & (i * self.rows + jnp.arange(self.rows) < self._length)[:, None]
        return mask

    def _spread(self, i: Any, j: Any) -> Any:
        """The state of each score's block."""
        (rows, columns), shape = self._whole, self._states.shape[:2]
        part = lax.dynamic_slice(self._states, (0, 0, i * rows, j * columns), (*shape, rows, columns))
        part = part[:, :, :, None, :, None]
        spread = jnp.broadcast_to(part, (*shape, rows, self._blocks[0], columns, self._blocks[1]))
        spread = spread.reshape(*shape, rows * self._blocks[0], columns * self._blocks[1])
        return spread[:, :, : self.rows, : self.columns]

    # ---- loops

    def over_columns(self, i: Any, body: Callable[[Any, Any], Any], start: Any) -> Any:
        """`body(j, carry)` for each column of tiles that row `i` needs."""
        if self._column_count == 1:
            return body(0, start)
        if self._states is None:
            return lax.fori_loop(0, self._column_count, body, start)
        order = self._order[i]
        return lax.fori_loop(0, self._needed[i], lambda t, carry: body(order[t], carry), start)

    def over_rows(self, body: Callable[[Any, Any], Any], start: Any) -> Any:
        """The last carry of `body(carry, i)` over the rows of tiles, and what it returns for each, joined."""
        if self._row_count == 1:
            carry, made = body(start, 0)
            return carry, made
        carry, made = lax.scan(body, start, jnp.arange(self._row_count))
        return carry, [self._joined(x) for x in made]

    def _joined(self, parts: Any) -> Any:
        moved = jnp.moveaxis(parts, 0, 2)
        whole = moved.reshape(*moved.shape[:2], -1, *moved.shape[4:])
        return lax.slice_in_dim(whole, 0, self._length, axis=2)


def _limits(heads: int, length: int, width: int) -> tuple[int, int]:
    """The most rows and columns that a tile may have."""
    if heads * length * width * 4 < 2 * _STORED:
        return length, width
    room = _STORED // (heads * min(_COLUMNS, width) * 4)
    return max(_LEAST_ROWS, 1 << max(0, room.bit_length() - 1)), _COLUMNS


def _tile(length: int, block: int, most: int) -> tuple[int, int]:
    """The length of a tile and of its blocks: one holds whole others, unless there is but one tile."""
    if length <= most:
        return length, block
    if block <= most:
        return most // block * block, block
    part = next(n for n in range(most, 0, -1) if block % n == 0)
    return (part, part) if part >= most // 8 else (block, block)


def _filled(x: Any, length: int) -> Any:
    missing = length - x.shape[2]
    return jnp.pad(x, [(0, missing if d == 2 else 0) for d in range(x.ndim)], mode="edge") if missing else x


def _dense(count: Any, indices: Any, counts: Sequence[int]) -> Any:
    """Of each row and column of blocks, whether the first `count` of the row's `indices` name the column."""
    is_listed = jnp.arange(indices.shape[-1]) < count[..., None]
    columns = jnp.where(is_listed, indices, counts[1])  # the last one holds what is not listed
    none = jnp.zeros((*indices.shape[:-1], counts[1] + 1), bool)
    return jnp.put_along_axis(none, columns, True, axis=-1, inplace=False)[:, :, : counts[0], :-1]
