"""Determinants of (batches of) square tensors, and the factors that backward uses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchtpu.ops.composed import raise_as_cpu
from torchtpu.ops.registry import composed

aten: Any = torch.ops.aten

FACTORED = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def _factors(A: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """U's diagonal, the sign of the permutation, LU and its pivots."""
    # The autograd formulas test the strides in the same way to know which matrix was factored.
    is_turned = A.is_contiguous() and not A.is_complex()
    lu, pivots, _ = aten.linalg_lu_factor_ex(A.mT if is_turned else A)
    places = torch.arange(1, A.shape[-1] + 1, dtype=pivots.dtype, device=A.device)
    sign = 1 - 2 * ((pivots != places).sum(-1) % 2)
    return lu.diagonal(dim1=-2, dim2=-1), sign.to(A.dtype), lu, pivots


@composed("_linalg_det")
def linalg_det(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    diagonal, sign, lu, pivots = _factors(_checked(A, aten._linalg_det))
    return sign * diagonal.prod(-1), lu, pivots


@composed("_linalg_slogdet")
def linalg_slogdet(A: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    diagonal, sign, lu, pivots = _factors(_checked(A, aten._linalg_slogdet))
    return sign * diagonal.sgn().prod(-1), diagonal.abs().log().sum(-1), lu, pivots


def _checked(A: Tensor, op: Any) -> Tensor:
    """`A`; raises, as `op` does, where it is no batch of square matrices of numbers that are factored."""
    if A.dim() < 2 or A.shape[-1] != A.shape[-2] or A.dtype not in FACTORED:
        raise_as_cpu(op, A)
    return A
