"""Pairwise p-norm distances between rows of vectors, trilinear products, and gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from torchtpu.ops.linalg.matmul import precision_of
from torchtpu.ops.registry import jnp, lax, lowering, opmath
from torchtpu.ops.sizes import as_number, is_known

# PyTorch takes the matrix product for more rows than this unless `compute_mode` says otherwise.
_MANY_ROWS = 25
_MOST_IN_BOTH = 32  # so wide rows may be compared in both ways, where their number is not known


def _norm(difference: Any, p: float) -> Any:
    size = jnp.abs(difference)
    if p == 0:
        return (size != 0).astype(size.dtype).sum(-1)
    if p == 1:
        return size.sum(-1)
    if p == 2:
        return jnp.sqrt(jnp.square(size).sum(-1))
    if p == math.inf:
        return jnp.where(size != size, 0, size).max(-1, initial=0)  # PyTorch takes no NaN for a largest difference
    return (size**p).sum(-1) ** (1 / p)


def _euclidean(x1: Any, x2: Any, ctx: Any) -> Any:
    """sqrt(|a|² + |b|² - 2ab) through one matrix product."""
    squares = [jnp.square(x).sum(-1, keepdims=True) for x in (x1, x2)]
    ones = [jnp.ones_like(s) for s in squares]
    left = jnp.concatenate([-2 * x1, squares[0], ones[0]], -1)
    right = jnp.concatenate([x2, ones[1], squares[1]], -1)
    made = jnp.matmul(left, right.swapaxes(-1, -2), precision=precision_of(x1.dtype, ctx.precision))
    return jnp.sqrt(jnp.maximum(made, 0))


@lowering("_cdist_forward", structural={"p": None, "compute_mode": None}, multiplies=True)
def cdist(x1, x2, p, compute_mode=None, *, ctx):
    a, b = opmath(x1), opmath(x2)
    rows, width = (a.shape[-2], b.shape[-2]), a.shape[-1]
    exact = lambda: _norm(a[..., :, None, :] - b[..., None, :, :], p)
    if p != 2 or width == 0 or compute_mode == 2:
        return exact()
    if compute_mode == 1:
        return _euclidean(a, b, ctx)
    if is_known(*rows) or not is_known(width) or width > _MOST_IN_BOTH:
        return _euclidean(a, b, ctx) if any(n > _MANY_ROWS for n in rows) else exact()
    many = (as_number(rows[0], jnp.int64) > _MANY_ROWS) | (as_number(rows[1], jnp.int64) > _MANY_ROWS)
    return jnp.where(many, _euclidean(a, b, ctx), exact())


def _infer_euclidean(x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    """What the meta kernel says, which is many ops in Python."""
    is_usual = x1.dtype == x2.dtype and x1.dim() == x2.dim() >= 2 and x1.shape[-1] == x2.shape[-1]
    if not is_usual or x1.shape[:-2] != x2.shape[:-2]:
        return torch.ops.aten._euclidean_dist(x1, x2)
    return x1.new_empty((*x1.shape[:-1], x2.shape[-2]))


@lowering("_euclidean_dist", infer=_infer_euclidean, multiplies=True)
def euclidean_dist(x1, x2, *, ctx):
    return _euclidean(opmath(x1), opmath(x2), ctx)


def _slope(difference: Any, distance: Any, p: float) -> Any:
    """The gradient of each distance with respect to its first row; 0 where PyTorch's is, at distance 0."""
    sign = jnp.sign(difference)
    distance = distance[..., None]
    safe = jnp.where(distance == 0, 1, distance)
    if p == 0:
        return jnp.zeros_like(difference)
    if p == 1:
        return sign
    if p == 2:
        made = difference / safe
    elif p == math.inf:
        return sign * (jnp.abs(difference) == distance)
    elif p < 1:
        size = jnp.abs(difference)
        made = jnp.where(size == 0, 0, sign * jnp.where(size == 0, 1, size) ** (p - 1) * safe ** (1 - p))
    else:
        made = sign * jnp.abs(difference) ** (p - 1) / safe ** (p - 1)
    return jnp.where(distance == 0, 0, made)


@lowering("_cdist_backward", structural={"p": None})
def cdist_backward(grad, x1, x2, p, cdist, *, ctx):
    a, b = opmath(x1), opmath(x2)
    if grad.size == 0:
        return jnp.zeros(ctx.results[0][0], a.dtype)
    if p == 2:
        # Through a product: the (rows, rows, width) differences never exist.
        ratio = jnp.where(cdist == 0, 0, opmath(grad) / jnp.where(cdist == 0, 1, cdist))
        return a * ratio.sum(-1, keepdims=True) - jnp.matmul(ratio, b, precision=lax.Precision.HIGHEST)
    difference = a[..., :, None, :] - b[..., None, :, :]
    return (opmath(grad)[..., None] * _slope(difference, opmath(cdist), p)).sum(-2)


def _pairs(rows: int) -> tuple[Any, Any]:
    first, second = np.triu_indices(rows, 1)
    return first.astype(np.int32), second.astype(np.int32)


@lowering("_pdist_forward", structural={"p": None})
def pdist(self, p=2.0):
    x = opmath(self)
    first, second = _pairs(x.shape[0])
    return _norm(x[first] - x[second], p)


@lowering("_pdist_backward", structural={"p": None})
def pdist_backward(grad, self, p, pdist):
    x = opmath(self)
    first, second = _pairs(x.shape[0])
    slope = opmath(grad)[:, None] * _slope(x[first] - x[second], opmath(pdist), p)
    return jnp.zeros_like(x).at[first].add(slope).at[second].add(-slope)


@lowering("_trilinear", multiplies=True)
def trilinear(i1, i2, i3, expand1, expand2, expand3, sumdim, unroll_dim=1, *, ctx):
    if jnp.issubdtype(i1.dtype, jnp.integer):
        i1, i2, i3 = (jnp.expand_dims(i, dims) for i, dims in ((i1, expand1), (i2, expand2), (i3, expand3)))
        return (i1 * i2 * i3).sum(tuple(sumdim))
    rank = i1.ndim + len(expand1)
    letters = "abcdefghijklmnopqrstuvwxyz"[:rank]
    missing = ["".join(letters[d] for d in dims) for dims in (expand1, expand2, expand3)]
    terms = ["".join(c for c in letters if c not in out) for out in missing]
    made = "".join(c for i, c in enumerate(letters) if i not in [d % rank for d in sumdim])
    precision = precision_of(i1.dtype, ctx.precision)
    return jnp.einsum(f"{','.join(terms)}->{made}", *map(opmath, (i1, i2, i3)), precision=precision)
