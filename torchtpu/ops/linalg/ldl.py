"""Symmetric indefinite factorizations A = L D Lᵀ of (batches of) matrices, with LAPACK's pivoting.

D has blocks of one and two rows.  `pivots` counts from 1; a pair of equal negative numbers stands for a block of two.
"""

from __future__ import annotations

import math
from typing import Any

from torchtpu.ops.linalg.linalg import LinAlgError, as_new, empty
from torchtpu.ops.registry import jax, jnp, lax, lowering

ALPHA = (1 + math.sqrt(17)) / 8  # Bunch and Kaufman's bound of growth


def _batched(function: Any, batch: tuple[int, ...], *arrays: tuple[Any, int]) -> Any:
    """`function` of each element of a batch; each array comes with the number of its dimensions within."""
    spread = [jnp.broadcast_to(a, batch + a.shape[a.ndim - core :]) for a, core in arrays]
    flat = [a.reshape(-1, *a.shape[len(batch) :]) for a in spread]
    return jax.tree.map(lambda x: x.reshape(batch + x.shape[1:]), jax.vmap(function)(*flat))


def _swap(x: Any, i: Any, j: Any, axis: int) -> Any:
    place = jnp.arange(x.shape[axis])
    return jnp.take(x, jnp.where(place == i, j, jnp.where(place == j, i, place)), axis)


@lowering("linalg_ldl_factor_ex", infer=as_new("linalg_ldl_factor_ex"))
def linalg_ldl_factor_ex(self, *, hermitian=False, check_errors=False, ctx):
    batch = self.shape[:-2]
    if not self.size:
        return self, jnp.zeros(self.shape[:-1], jnp.int32), jnp.zeros(batch, jnp.int32)
    factored, pivots, info = _batched(lambda a: _factor(a, hermitian), batch, (self, 2))
    if check_errors:
        message = "torch.linalg.ldl_factor_ex: The diagonal block of D is zero, the factorization is singular"
        ctx.check(info == 0, message, LinAlgError)
    return factored, pivots, info


def _factor(a: Any, hermitian: bool) -> tuple[Any, Any, Any]:
    """(L below and D on and below the diagonal, pivots, the first block of zero or NaN counted from 1 or 0)."""
    size, conj = a.shape[-1], (jnp.conj if hermitian else lambda x: x)
    length = lambda x: jnp.abs(x.real) + jnp.abs(x.imag) if jnp.iscomplexobj(x) else jnp.abs(x)
    row = jnp.arange(size)
    lower = jnp.tril(a)
    diagonal = jnp.diagonal(a).real.astype(a.dtype) if hermitian else jnp.diagonal(a)
    full = jnp.tril(a, -1) + conj(jnp.tril(a, -1).T) + jnp.diag(diagonal)

    def largest(column: Any, where: Any) -> tuple[Any, Any]:
        found = jnp.where(where, length(column), -1)
        return jnp.argmax(found), jnp.maximum(jnp.max(found), 0)

    def choose(rest: Any, k: Any) -> tuple[Any, Any, Any]:
        """The row to exchange, whether the block has two rows, and whether there is nothing to divide by."""
        here = length(rest[k, k])
        other, column_max = largest(rest[:, k], row > k)
        _, row_max = largest(rest[:, other], (row >= k) & (row != other))
        stays = (here >= ALPHA * column_max) | (here * row_max >= ALPHA * column_max * column_max)
        alone = stays | (length(rest[other, other]) >= ALPHA * row_max)
        is_zero = (jnp.maximum(here, column_max) == 0) | jnp.isnan(here)
        return jnp.where(stays | is_zero, k, other), ~alone & ~is_zero, is_zero

    def step(state: Any) -> Any:
        k, rest, factor, pivots, info = state
        swapped, is_pair, is_zero = choose(rest, k)
        at = k + is_pair
        rest = _swap(_swap(rest, at, swapped, 0), at, swapped, 1)
        first, second = jnp.where(row >= k, rest[:, k], 0), jnp.where(row > k, rest[:, jnp.minimum(k + 1, size - 1)], 0)
        one = jnp.where((row > k) & ~is_zero, first / jnp.where(is_zero, 1, rest[k, k]), 0)
        d21 = jnp.where(is_pair, rest[jnp.minimum(k + 1, size - 1), k], 1)
        d11, d22 = rest[jnp.minimum(k + 1, size - 1), jnp.minimum(k + 1, size - 1)] / d21, rest[k, k] / conj(d21)
        scale = 1 / jnp.where(is_pair, d11 * d22 - 1, 1)
        beyond = row > k + 1
        left = jnp.where(beyond, scale * (d11 * first - second) / conj(d21), 0)
        right = jnp.where(beyond, scale * (d22 * second - first) / d21, 0)
        taken = jnp.where(
            is_pair, jnp.outer(left, conj(first)) + jnp.outer(right, conj(second)), jnp.outer(one, conj(first))
        )
        trailing = (row > k + is_pair)[:, None] & (row > k + is_pair)[None]
        rest = jnp.where(trailing, rest - taken, rest)
        column = jnp.where(is_pair, left, one) + jnp.where((row == k) | (is_pair & (row == k + 1)), first, 0)
        factor = factor.at[:, k].set(column)
        next_column = right + jnp.where(row == k + 1, second, 0)
        factor = jnp.where(is_pair & (row == k + 1)[None], next_column[:, None], factor)
        number = jnp.where(is_pair, -(swapped + 1), swapped + 1).astype(jnp.int32)
        pivots = jnp.where((row == k) | (is_pair & (row == k + 1)), number, pivots)
        info = jnp.where((info == 0) & is_zero, k + 1, info).astype(jnp.int32)
        return k + 1 + is_pair, rest, factor, pivots, info

    start = (jnp.int32(0), full, jnp.zeros_like(lower), jnp.zeros(size, jnp.int32), jnp.int32(0))
    _, _, factor, pivots, info = lax.while_loop(lambda state: state[0] < size, step, start)
    return factor, pivots, info


@lowering("linalg_ldl_solve")
def linalg_ldl_solve(LD, pivots, B, *, hermitian=False, ctx):
    batch = ctx.results[0][0][:-2]
    if 0 in ctx.results[0][0]:
        return empty(ctx, 0)
    return _batched(lambda a, p, b: _solve(a, p, b, hermitian), batch, (LD, 2), (pivots, 1), (B, 2))


def _solve(factor: Any, pivots: Any, b: Any, hermitian: bool) -> Any:
    size, conj = factor.shape[-1], (jnp.conj if hermitian else lambda x: x)
    row = jnp.arange(size)
    below = lambda k, is_pair: jnp.where(row > k + is_pair, factor[:, jnp.minimum(k, size - 1)], 0)
    last = lambda k: jnp.minimum(k + 1, size - 1)

    def forward(state: Any) -> Any:
        k, x = state
        is_pair = pivots[k] < 0
        x = _swap(x, k + is_pair, jnp.abs(pivots[k]) - 1, 0)
        second = jnp.where(is_pair, below(last(k), 0), 0)
        x = x - jnp.outer(below(k, is_pair), x[k]) - jnp.outer(jnp.where(row > k + 1, second, 0), x[last(k)])
        d11, d21, d22 = factor[k, k], factor[last(k), k], factor[last(k), last(k)]
        determinant = jnp.where(is_pair, d11 * d22 - d21 * conj(d21), 1)
        pair = (d22 * x[k] - conj(d21) * x[last(k)]) / determinant, (d11 * x[last(k)] - d21 * x[k]) / determinant
        alone = x[k] / jnp.where(is_pair, 1, d11)
        x = jnp.where((is_pair & (row == k + 1))[:, None], pair[1], x)
        return k + 1 + is_pair, x.at[k].set(jnp.where(is_pair, pair[0], alone))

    def backward(state: Any) -> Any:
        k, x = state  # the last row of the block
        is_pair = pivots[k] < 0
        first = k - is_pair
        known = jnp.where((row > k)[:, None], x, 0)
        column = lambda j: conj(below(j, 0)) @ known
        x = jnp.where((row == k)[:, None], x - column(k), x)
        x = jnp.where((is_pair & (row == first))[:, None], x - column(first), x)
        return first - 1, _swap(x, k, jnp.abs(pivots[k]) - 1, 0)

    _, x = lax.while_loop(lambda state: state[0] < size, forward, (jnp.int32(0), b))
    _, x = lax.while_loop(lambda state: state[0] >= 0, backward, (jnp.int32(size - 1), x))
    return x
