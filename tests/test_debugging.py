"""Programs that make NaN, or that differ between devices, are traced to the op and the line where it begins."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchtpu
from torchtpu.diagnostics.debugging import compare, debug_nans

SAFE: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.sin() + 2,
    lambda x: x * 0.5 + 1,
    lambda x: x.sigmoid() + 0.5,
    lambda x: x.abs() + 1,
    lambda x: x.softmax(0) + 1,
    lambda x: x.exp().clamp(max=3),
]
FAULTY: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("log", lambda x: (-x.abs() - 1).log()),
    ("sqrt", lambda x: (-x.abs() - 1).sqrt()),
    ("div", lambda x: (x - x) / (x - x)),
    ("sub", lambda x: (x / 0).abs() - (x / 0).abs()),
    ("acos", lambda x: (x.abs() + 2).acos()),
]


def run_watched(steps: list[Callable[[Tensor], Tensor]]) -> None:
    with debug_nans():
        x = torch.linspace(0.1, 1.0, 8).to("tpu")
        for step in steps:
            x = step(x)
        x.sum().item()


@pytest.mark.parametrize("seed", range(10))
def test_the_first_op_that_makes_a_nan_is_named(seed: int) -> None:
    for number in range(5):
        dice = random.Random(seed * 5 + number)
        steps = [dice.choice(SAFE) for _ in range(dice.randrange(2, 7))]
        name, faulty = dice.choice(FAULTY)
        at = dice.randrange(len(steps))
        _, first = inspect.getsourcelines(faulty)
        with pytest.raises(FloatingPointError, match=rf"a NaN appeared \(aten::{name}.* recorded at .*:{first}\)"):
            run_watched([*steps[:at], faulty, *steps[at:]])


def test_nothing_is_raised_where_there_is_no_nan() -> None:
    with debug_nans():
        x = torch.tensor([0.0, 1.0], device="tpu")
        assert (1 / x).sum().item() == float("inf")
    with pytest.raises(FloatingPointError, match="an infinity appeared"), debug_nans(infs=True):
        (1 / x).sum().item()


def test_a_given_nan_is_nobodys_fault() -> None:
    with debug_nans():
        x = torch.tensor([float("nan"), 1.0]).to("tpu")
        assert (x * 2).sum().isnan().item()


def test_outside_of_the_block_nothing_is_checked() -> None:
    x = torch.tensor([-1.0]).to("tpu")
    with debug_nans():
        pass
    assert x.log().isnan().item()
    assert torchtpu.config.debug_nans == "off"


def test_backward_is_watched() -> None:
    def forward(x: Tensor) -> Tensor:
        return x.sqrt().sum()

    x = torch.zeros(2, device="tpu", requires_grad=True)
    with pytest.raises(FloatingPointError, match="a NaN appeared"), debug_nans():
        (forward(x) * 0).backward()


class Diverging(nn.Module):
    """Adds a little on tpu only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).relu()
        y = y + (0.5 if x.device.type == "tpu" else 0.0)
        return y.tanh()


def test_compare_names_the_first_op_that_diverges() -> None:
    x = torch.randn(3, 4)
    found: Any = compare(Diverging(), x)
    assert found.op == "aten.add.Tensor"
    assert found.largest_error == pytest.approx(0.5)
    assert found.line.startswith(__file__)
    assert compare(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4)), x, backward=True) is None
