"""Eigenvalues and eigenvectors of (batches of) general square arrays.

XLA has no algorithm of its own for them: platform cpu calls LAPACK, elsewhere the op runs on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from torchtpu.ops.registry import Context, jnp, lax, like, lowering


def _infer_eig(self: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, vectors = torch.ops.aten.linalg_eig(self)
    return values, like(vectors, memory_format=torch.contiguous_format).mT


@lowering("linalg_eig", platform="cpu", infer=_infer_eig)
def linalg_eig(self, *, ctx):
    values, vectors = _eig(ctx, self, vectors=True)
    return values, vectors


@lowering("_linalg_eigvals", platform="cpu")
def linalg_eigvals(self, *, ctx):
    return _eig(ctx, self, vectors=False)[0]


def _eig(ctx: Context, a: Any, *, vectors: bool) -> list[Any]:
    if not a.size:
        return [jnp.zeros(shape, jnp.complex64) for shape, _ in ctx.results]
    is_endless = jnp.isinf(a)
    ok = ~jnp.isnan(a) & ~(is_endless & vectors)  # without eigenvectors, those of infinity are NaN
    ctx.check(ok, "torch.linalg.eig: input tensor should not contain infs or NaNs.", RuntimeError)
    finite = jnp.where(is_endless, 0, a)
    values, *found = lax.linalg.eig(finite, compute_left_eigenvectors=False, compute_right_eigenvectors=vectors)
    return [jnp.where(is_endless.any((-2, -1))[..., None], jnp.nan, values), *found]
