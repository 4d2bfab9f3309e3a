"""Op streams that are new under dispatch modes, hooks and transforms give what the CPU gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from torchtpu import metrics


class Count(TorchDispatchMode):
    """Counts the ops that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def gradients(device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    x = torch.randn(4, 5)
    model.to(device)
    model(x.to(device)).square().mean().backward()
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def test_a_miss_under_the_flop_counter_counts_the_users_ops_only() -> None:
    with FlopCounterMode(display=False) as expected:
        reference = gradients("cpu")
    with FlopCounterMode(display=False) as counted:
        made = gradients("tpu")
    assert metrics.snapshot()["trie_misses"] > 0
    assert counted.get_total_flops() == expected.get_total_flops() > 0
    torch.testing.assert_close(made, reference)


def test_a_miss_under_two_nested_modes_is_seen_once_by_each() -> None:
    x = torch.ones(3, device="tpu")
    with Count() as outer, Count() as inner:
        y = x.asin().acosh()
    assert (outer.count, inner.count) == (2, 2)
    torch.testing.assert_close(y.cpu(), torch.ones(3).asin().acosh())


def test_fake_tensors_in_mid_region_record_nothing() -> None:
    x = torch.full((3,), 2.0, device="tpu")
    y = x * 3
    before = metrics.snapshot()["ops_recorded"]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        made = (fake * 5).sum()
        new = torch.empty(2, 2, device="tpu") @ torch.ones(2, 2, device="tpu")
    assert (made.device.type, tuple(new.shape)) == ("tpu", (2, 2))
    assert metrics.snapshot()["ops_recorded"] == before
    assert (y + 1).tolist() == [7.0] * 3


def test_save_on_cpu_keeps_the_gradients() -> None:
    reference = gradients("cpu")
    with torch.autograd.graph.save_on_cpu():
        made = gradients("tpu")
    torch.testing.assert_close(made, reference)


def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ w) * x.sum(1, keepdim=True).sigmoid()).sum()


def inputs(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    pair = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((2, 3), (3, 2))]
    return tuple(t.to(device).requires_grad_() for t in pair)  # type: ignore[return-value]


def test_gradgradcheck_passes() -> None:
    assert torch.autograd.gradgradcheck(function, inputs("tpu"), fast_mode=True)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "jvp": lambda x, w: torch.func.jvp(function, (x, w), (torch.ones_like(x), torch.ones_like(w)))[1],
    "hessian": torch.func.hessian(function),
    "vmap": lambda x, w: torch.func.vmap(lambda row: torch.func.grad(function)(row[None], w))(x),
    "autograd hessian": lambda x, w: torch.autograd.functional.hessian(lambda a: function(a, w), x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_gives_what_it_gives_on_the_cpu(name: str) -> None:
    made = TRANSFORMS[name](*inputs("tpu")).detach().cpu()
    torch.testing.assert_close(made, TRANSFORMS[name](*inputs("cpu")).detach())


def test_a_gradient_penalty_steps_as_on_the_cpu() -> None:
    def step(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        critic = nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(0.2), nn.Linear(6, 1))
        real, fake, mix = torch.randn(5, 4), torch.randn(5, 4), torch.rand(5, 1)
        critic.to(device)
        real, fake, mix = real.to(device), fake.to(device), mix.to(device)
        optimizer = torch.optim.Adam(critic.parameters(), 1e-2, betas=(0.0, 0.9))
        for _ in range(3):
            between = (mix * real + (1 - mix) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = (slope.norm(2, dim=1) - 1).square().mean()
            loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [p.detach().cpu() for p in critic.parameters()]

    torch.testing.assert_close(step("tpu"), step("cpu"), rtol=1e-4, atol=1e-5)


def promoted(device: str) -> list[torch.Tensor]:
    """What hangs on the default dtype: 2^24 + 1 is no float32."""
    x = torch.tensor([2**24 + 1, 3]).to(device)
    return [x > 16777216.5, x * 1.0, x / 2, x.sqrt(), torch.where(x > 3, 1.5, 0.25)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_default_dtype_holds_for_the_calls_that_it_is_set_at(dtype: torch.dtype) -> None:
    made: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    try:
        for now in (torch.float32, dtype, torch.float32):
            torch.set_default_dtype(now)
            made.append((promoted("tpu"), promoted("cpu")))  # what is recorded is lowered when another one is set
    finally:
        torch.set_default_dtype(torch.float32)
    for on_tpu, on_cpu in made:
        for one, other in zip(on_tpu, on_cpu, strict=True):
            torch.testing.assert_close(one.cpu(), other)
