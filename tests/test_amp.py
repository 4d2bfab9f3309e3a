"""Autocast and GradScaler on tpu have CUDA's dtypes op by op, and scaled training equals plain training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn


def square():
    return torch.rand(4, 4, device="tpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_ops_run_in_cudas_dtypes(dtype):
    x = square()
    low = x.to(dtype)
    with torch.autocast("tpu", dtype=dtype):
        assert (x @ x).dtype == dtype
        assert F.linear(x, x).dtype == dtype
        assert torch.exp(low).dtype == torch.float32
        assert F.layer_norm(low, (4,)).dtype == torch.float32
        assert F.softmax(low, -1).dtype == torch.float32
        assert low.sum().dtype == torch.float32
        assert torch.norm(low).dtype == torch.float32
        assert torch.addcmul(low, x, low).dtype == torch.float32
        assert (low + low).dtype == dtype
        assert F.mse_loss(low, low).dtype == torch.float32
        assert (x.double() @ x.double()).dtype == torch.float64
        with torch.autocast("tpu", enabled=False):
            assert (x @ x).dtype == torch.float32
    assert (x @ x).dtype == torch.float32


def test_the_default_dtype_is_cudas():
    assert torch.get_autocast_dtype("tpu") == torch.float16
    assert torch.tpu.amp.autocast().fast_dtype == torch.float16
    assert torch.amp.is_autocast_available("tpu")


def test_binary_cross_entropy_is_banned():
    x = square()
    with torch.autocast("tpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(x, x)


def test_an_unsupported_dtype_disables_with_a_warning():
    with pytest.warns(UserWarning, match="In tpu autocast, but the target dtype is not supported"):
        assert not torch.autocast("tpu", dtype=torch.float64)._enabled


def train(scaler, steps=3):
    torch.manual_seed(0)
    model = nn.Linear(4, 1).to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.linspace(-1, 1, 32).reshape(8, 4).to("tpu")
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(data) - 1).square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return model.weight.detach().cpu(), loss.item()


def test_scaled_training_equals_plain_training():
    scaler = torch.tpu.amp.GradScaler(init_scale=2.0**10)
    (weight, loss), (plain_weight, plain_loss) = train(scaler), train(None)
    assert torch.allclose(weight, plain_weight)
    assert abs(loss - plain_loss) < 1e-6
    assert scaler.get_scale() == 2.0**10


def test_an_infinite_gradient_skips_the_step_and_halves_the_scale():
    model = nn.Linear(1, 1).to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("tpu", init_scale=4.0)
    before = model.weight.detach().cpu().clone()
    scaler.scale(model(torch.full((1, 1), float("inf"), device="tpu")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight.detach().cpu(), before)
    assert scaler.get_scale() == 2.0
