"""Samples for fused optimizers, gradient scaling and list ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

aten = torch.ops.aten


def samples(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    if dtype in (torch.float32, torch.bfloat16):
        yield from _optimizers(dtype)
        yield from _scaling(dtype)
    if not dtype.is_complex and dtype != torch.bool:
        yield from _lists(dtype)


def _tensors(dtype: torch.dtype, positive: bool = False) -> list[torch.Tensor]:
    made = [torch.randn(3, 4), torch.randn(5), torch.randn(())]
    return [(t.abs() if positive else t).to(dtype) for t in made]


def _optimizers(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    scaled: dict[str, torch.Tensor] = {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(0.0)}
    skipped: dict[str, torch.Tensor] = {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(1.0)}
    for lr in (0.1, torch.tensor(0.05)):
        overload = "tensor_lr" if isinstance(lr, torch.Tensor) else "default"
        for extra in ({}, scaled, skipped):
            for decay, flag in ((0.0, False), (0.01, True)):
                for momentum in (0.0, 0.9):
                    yield (
                        "optim",
                        lambda lr=lr, o=overload, e=extra, d=decay, f=flag, m=momentum: getattr(aten._fused_sgd_, o)(
                            _tensors(dtype),
                            _tensors(dtype),
                            _tensors(dtype) if m else [],
                            weight_decay=d,
                            momentum=m,
                            lr=lr,
                            dampening=0.0 if f else 0.1,
                            nesterov=f,
                            maximize=f,
                            is_first_step=False,
                            **e,
                        ),
                    )
                for op in (aten._fused_adam_, aten._fused_adamw_):
                    yield (
                        "optim",
                        lambda op=op, lr=lr, o=overload, e=extra, d=decay, f=flag: getattr(op, o)(
                            _tensors(dtype),
                            _tensors(dtype),
                            _tensors(dtype),
                            _tensors(dtype, True),
                            _tensors(dtype, True) if f else [],
                            [torch.tensor(n) for n in (1.0, 3.0, 500.0)],
                            lr=lr,
                            beta1=0.9,
                            beta2=0.999,
                            weight_decay=d,
                            eps=1e-8,
                            amsgrad=f,
                            maximize=f,
                            **e,
                        ),
                    )
                yield (
                    "optim",
                    lambda lr=lr, o=overload, e=extra, d=decay, f=flag: getattr(aten._fused_adagrad_, o)(
                        _tensors(dtype),
                        _tensors(dtype),
                        _tensors(dtype, True),
                        [torch.tensor(n) for n in (1.0, 3.0, 500.0)],
                        lr=lr,
                        lr_decay=0.01,
                        weight_decay=d,
                        eps=1e-10,
                        maximize=f,
                        **e,
                    ),
                )


def _scaling(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    check = aten._amp_foreach_non_finite_check_and_unscale_
    yield "amp", lambda: check(_tensors(dtype), torch.tensor([0.0]), torch.tensor([0.25]))
    yield (
        "amp",
        lambda: check([torch.tensor([1.0, float("inf")], dtype=dtype)], torch.tensor([0.0]), torch.tensor([0.25])),
    )
    for tracker, overflow in ((0, 0.0), (0, 1.0), (3, 0.0), (3, 1.0)):
        yield (
            "amp",
            lambda t=tracker, o=overflow: aten._amp_update_scale_(
                torch.tensor([8.0]), torch.tensor([t], dtype=torch.int32), torch.tensor([o]), 2.5, 0.5, 4
            ),
        )


def _lists(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    made = [(t * 3).to(dtype) for t in _tensors(torch.float32)]
    other = [(t * 3).to(dtype) + 1 for t in _tensors(torch.float32, True)]
    for name in ["add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max"]:
        op = getattr(aten, f"_foreach_{name}")
        yield "foreach", lambda op=op: op.List(made, other)
        yield "foreach", lambda op=op: op.Scalar(made, 3)
        yield "foreach", lambda op=op: op.Scalar(made, 2.5)
        yield "foreach", lambda op=op: op.ScalarList(made, [1.5, 2, 4])
        if name in ("add", "mul", "div"):
            yield "foreach", lambda op=op: op.Tensor(made, torch.tensor(3).to(dtype))
    for name in ["addcmul", "addcdiv"] if dtype.is_floating_point else ():
        op = getattr(aten, f"_foreach_{name}")
        yield "foreach", lambda op=op: op.Scalar(made, made, other, 2.5)
        yield "foreach", lambda op=op: op.ScalarList(made, made, other, [1.5, 2.5, 3.5])
    if dtype.is_floating_point:
        yield "foreach", lambda: aten._foreach_lerp.List(made, other, made)
        yield "foreach", lambda: aten._foreach_lerp.Scalar(made, other, 0.3)
        yield "foreach", lambda: aten._foreach_lerp.ScalarList(made, other, [0.3, 0.7, 0.5])
        for order in (0, 1, 2, 3.0, float("inf")):
            yield "foreach", lambda n=order: aten._foreach_norm(made, n)
        yield "foreach", lambda: aten._foreach_powsum.Scalar(made, 3)
        for name in ["abs", "neg", "sqrt", "exp", "reciprocal", "sign", "sigmoid", "round", "trunc"]:
            yield "foreach", lambda name=name: getattr(aten, f"_foreach_{name}")(other)
    yield "foreach", lambda: aten._foreach_pow.Scalar(other, 2)
    yield "foreach", lambda: aten._foreach_pow.ScalarList(other, [2, 3, 4])
    yield "foreach", lambda: aten._foreach_pow.List(other, [t.abs() for t in other])
    yield "foreach", lambda: aten._foreach_pow.ScalarAndTensor(2, other)
    yield "foreach", lambda: aten._foreach_max(made)
    yield "foreach", lambda: aten._foreach_clone(made)
    yield "foreach", lambda: aten._foreach_zero(made)
    yield "foreach", lambda: aten._foreach_add_.List([t.clone() for t in made], other, alpha=3)
