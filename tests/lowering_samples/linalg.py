"""Calls of linear algebra ops that no OpInfo makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

aten = torch.ops.aten


def samples(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    if dtype not in (torch.float32, torch.float64, torch.complex64):
        return
    a = torch.randn(2, 4, 4, dtype=dtype)
    factor = torch.linalg.cholesky(a @ a.mH + 4 * torch.eye(4, dtype=dtype))
    b = torch.randn(2, 4, 3, dtype=dtype)
    yield "cholesky_solve_lower", lambda: aten._cholesky_solve_helper(b, factor, False)
    yield "cholesky_solve_upper", lambda: aten._cholesky_solve_helper(b, factor.mH.contiguous(), True)
    yield "lu_singular", lambda: aten.linalg_lu_factor_ex(torch.ones(3, 4, 4, dtype=dtype).tril().triu())
    yield "inv", lambda: aten.linalg_inv_ex(a)
    yield "cross", lambda: aten.linalg_cross(b, b.flip(0), dim=2)
