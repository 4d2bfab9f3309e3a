"""What XLA would compute again for each of its consumers is stored."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from engine_support import TABLE, compile_, make_engine, text_of
from record_support import Record
from torch import nn

from torchtpu import config
from torchtpu.ops.registry import Lowering
from torchtpu.runtime.engine import Engine
from torchtpu.runtime.ir.program import Program

LOWERINGS = {**TABLE, "tanh": Lowering("tanh", jnp.tanh)}


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = make_engine(lowerings=LOWERINGS)
    yield engine
    engine.close()


def mix(ops: int, elements: int) -> Program:
    """Each op reads three of four live values and takes the place of one."""
    record = Record()
    live = [record.input(torch.ones(elements)) for _ in range(4)]
    with record:
        for i in range(ops):
            a, b, c = (live[(i + k) % 4] for k in range(3))
            live[i % 4] = torch.tanh(a) * b + c
    return record.program(*live)


@pytest.mark.parametrize("elements", [64, 100_000])
def test_work_does_not_multiply_with_the_consumers(engine: Engine, elements: int) -> None:
    executable = compile_(engine, mix(30, elements))
    (module,) = executable.run.hlo_modules()
    assert 30 <= module.to_string().count(" multiply(") <= 90  # without fences 338


def test_a_value_with_one_consumer_is_fused_into_it(engine: Engine) -> None:
    record = Record()
    x = record.input(torch.ones(100_000))
    with record:
        y = torch.tanh(torch.tanh(x) * x) + x
    assert "inlineable" not in text_of(engine, record.program(y))


def test_what_is_cheap_is_computed_again(engine: Engine) -> None:
    record = Record()
    x = record.input(torch.ones(100_000))
    with record:
        y = x + x
        made = y * x, torch.relu(y)
    assert "inlineable" not in text_of(engine, record.program(*made))


def test_a_dear_value_is_stored_once(engine: Engine) -> None:
    record = Record()
    x = record.input(torch.ones(100_000))
    with record:
        y = torch.tanh(x) + x
        made = y * x, torch.relu(y)
    assert text_of(engine, record.program(*made)).count("inlineable") == 1


def test_other_platforms_store_nothing(engine: Engine) -> None:
    assert "inlineable" in text_of(engine, mix(30, 100_000))
    engine.fragments.platform = "tpu"
    assert "inlineable" not in text_of(engine, mix(30, 100_000))


@pytest.mark.parametrize(("elements", "stored"), [(64, 0), (100_000, 6)])
def test_a_long_chain_on_many_elements_is_several_loops(engine: Engine, elements: int, stored: int) -> None:
    record = Record()
    x = made = record.input(torch.ones(elements))
    with record:
        for _ in range(60):
            made = torch.tanh(made) * x
    assert text_of(engine, record.program(made)).count("inlineable") == stored


def gradients(device: str) -> list[torch.Tensor]:
    """Of a network that takes the largest and the mean of what it normalizes."""
    torch.manual_seed(0)
    layers = [nn.Conv1d(3, 6, 3, padding=1), nn.Conv1d(6, 6, 5, stride=2), nn.BatchNorm1d(6), nn.Linear(6, 2)]
    first, second, norm, last = (layer.to(device) for layer in layers)
    x = torch.randn(3, 3, 16, generator=torch.Generator().manual_seed(0)).to(device)

    def run(h: torch.Tensor) -> torch.Tensor:
        h = norm(second(F.max_pool1d(first(h), 2)))
        return last(h.mean(-1) + h.amax(-1)).square().sum()

    run(x).backward()
    return [p.grad.cpu() for layer in (first, second, norm, last) for p in layer.parameters() if p.grad is not None]


def test_what_is_compared_with_its_largest_element_has_the_same_bits() -> None:
    for found, expected in zip(gradients("tpu"), gradients("cpu"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_versions_that_stand_where_a_check_fails_are_not_multiplied(capsys: pytest.CaptureFixture[str]) -> None:
    """Each gradient that is added to a table takes the table twice: with it, and as it is where an index was bad."""
    generator = torch.Generator().manual_seed(0)
    table = torch.rand(3, 512, 2, generator=generator)
    places = [torch.randint(0, 512, (64,), generator=generator) for _ in range(12)]
    found = []
    with config.using(log=("stablehlo",)):
        for device in ("cpu", "tpu"):
            rows = table.to(device).detach().requires_grad_()
            sum(rows[i % 3][place.to(device)].square().sum() for i, place in enumerate(places)).backward()
            found.append(rows.grad.cpu())
    torch.testing.assert_close(found[1], found[0])
    assert capsys.readouterr().err.count("call @store_tensor_3x512x2xf32_") >= 4


@pytest.mark.parametrize(("elements", "barriers"), [(1 << 14, 1), (64, 0)])
def test_loops_over_many_constants_are_not_left_to_the_compiler(
    elements: int, barriers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """XLA would compute them when it compiles: a minute for 4 million weights."""
    with config.using(log=("stablehlo",)):
        drawn = torch.multinomial(torch.ones(elements, device="tpu"), 10, replacement=True)
        assert drawn.max().item() < elements
    assert capsys.readouterr().err.count("optimization_barrier") == barriers
    with config.using(log=("stablehlo",)):
        weights = torch.ones(elements).to("tpu")
        torch.multinomial(weights, 10, replacement=True).sum().item()
    assert "optimization_barrier" not in capsys.readouterr().err
