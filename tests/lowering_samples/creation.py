"""Samples for ranges, fills and triangles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

aten = torch.ops.aten


def samples(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    empty = torch.empty(0, dtype=dtype)
    if dtype != torch.bool and not dtype.is_complex:
        for start, end, step in ((0, 7, 1), (3, -9, -2), (0, 1, 1), (5, 5, 1), (-7, 100, 9)):
            yield "creation", lambda a=start, b=end, c=step: aten.arange.start_out(a, b, c, out=empty.clone())
            yield "creation", lambda a=start, b=end, c=step: aten.range.out(a, b, c, out=empty.clone())
        if dtype.is_floating_point:
            yield "creation", lambda: aten.arange.start_out(0.1, 5.3, 0.7, out=empty.clone())
    if dtype != torch.bool:
        for steps in (0, 1, 2, 5, 50):
            yield "creation", lambda n=steps: aten.linspace.out(-3.5, 12.25, n, out=empty.clone())
            yield "creation", lambda n=steps: aten.linspace.out(2, 17, n, out=empty.clone())
            yield (
                "creation",
                lambda n=steps: aten.linspace.Tensor_Tensor(torch.tensor(1.5), torch.tensor(7.0), n, dtype=dtype),
            )
            yield "creation", lambda n=steps: aten.linspace.Tensor_Scalar(torch.tensor(1.5), 7.0, n, dtype=dtype)
            yield "creation", lambda n=steps: aten.linspace.Scalar_Tensor(1.5, torch.tensor(7.0), n, dtype=dtype)
            yield "creation", lambda n=steps: aten.logspace.out(0.5, 3.25, n, 3.0, out=empty.clone())
            yield (
                "creation",
                lambda n=steps: aten.logspace.Tensor_Tensor(torch.tensor(0.5), torch.tensor(2.0), n, 2.0, dtype=dtype),
            )
            yield "creation", lambda n=steps: aten.logspace.Tensor_Scalar(torch.tensor(0.5), 2.0, n, 2.5, dtype=dtype)
            yield "creation", lambda n=steps: aten.logspace.Scalar_Tensor(0.5, torch.tensor(2.0), n, 2.5, dtype=dtype)
    for n, m in ((3, 3), (2, 5), (5, 2), (0, 3)):
        yield "creation", lambda n=n, m=m: aten.eye.m_out(n, m, out=empty.clone())
        for diagonal in (-2, 0, 1, 7):
            yield "creation", lambda n=n, m=m, d=diagonal: aten.tril_indices(n, m, d, device="cpu")
            yield "creation", lambda n=n, m=m, d=diagonal: aten.triu_indices(n, m, d, device="cpu")
    yield "creation", lambda: aten.eye.out(3, out=empty.clone())
    made = torch.empty(2, 3, dtype=dtype)
    for value in (1, 2.5, True):
        yield "creation", lambda v=value: aten.fill_.Scalar(made.clone(), v)
        yield "creation", lambda v=value: aten.fill_.Tensor(made.clone(), torch.tensor(v))
        yield "creation", lambda v=value: aten.copy_(made.clone(), torch.tensor(v))
    yield "creation", lambda: aten.zero_(made.clone())
