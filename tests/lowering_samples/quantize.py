"""Calls of fake quantization and segment reduction that no OpInfo makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

aten = torch.ops.aten


def samples(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    if dtype is not torch.float32:
        return
    x = torch.randn(4, 3, 5) * 3
    one, zero = torch.tensor([0.11]), torch.tensor([2.0])
    scale, zeros = torch.tensor([0.1, 0.2, 0.05]), torch.tensor([1.0, -2.0, 0.4])
    yield "fake_tensor", lambda: aten.fake_quantize_per_tensor_affine_cachemask(x, 0.13, 3, -10, 20)
    for on in (0, 1):
        yield (
            f"fake_tensor_{on}",
            lambda on=on: aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
                x, one, zero.int(), torch.tensor([on]), -10, 20
            ),
        )
    yield "fake_channel", lambda: aten.fake_quantize_per_channel_affine_cachemask(x, scale, zeros.int(), 1, -10, 20)
    yield "learn_tensor", lambda: aten._fake_quantize_learnable_per_tensor_affine(x, one, zero, -10, 20, 0.5)
    yield "learn_channel", lambda: aten._fake_quantize_learnable_per_channel_affine(x, scale, zeros, 1, -10, 20, 0.5)
    grad = torch.randn_like(x)
    yield (
        "learn_tensor_backward",
        lambda: aten._fake_quantize_learnable_per_tensor_affine_backward(grad, x, one, zero, -10, 20, 0.5),
    )
    yield (
        "learn_channel_backward",
        lambda: aten._fake_quantize_learnable_per_channel_affine_backward(grad, x, scale, zeros, 1, -10, 20, 0.5),
    )
    yield from _segments()


def _segments() -> Iterator[tuple[str, Callable[[], Any]]]:
    data = torch.randn(6, 2).round(decimals=0)
    lengths = torch.tensor([2, 0, 3, 1])
    offsets = torch.tensor([0, 2, 2, 5, 6])
    for reduce in ("sum", "mean", "prod", "max", "min"):
        for initial in (None, 2.0):
            for given in ({"lengths": lengths}, {"offsets": offsets}):
                yield (
                    f"{reduce}_{initial}_{next(iter(given))}",
                    lambda reduce=reduce, given=given, initial=initial: _both(data, reduce, initial, **given),
                )
    batched, rows = torch.randn(2, 5, 3), torch.tensor([[2, 3], [5, 0]])
    yield "batched", lambda: _both(batched, "sum", None, lengths=rows, axis=1)
    yield "batched_max", lambda: _both(batched, "max", None, lengths=rows, axis=1)


def _both(data: torch.Tensor, reduce: str, initial: float | None, **kwargs: Any) -> None:
    made = aten.segment_reduce(data, reduce, **kwargs, initial=initial)
    aten._segment_reduce_backward(torch.randn_like(made), made, data, reduce, **kwargs, initial=initial)
