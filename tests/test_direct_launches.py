"""Launches that the recorder repeats without the engine: in come loops, out comes what the engine would have done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchtpu
from torchtpu import config, metrics, startup


class Calls:
    """Counts the launches that the engine makes, and those of the device."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.by_engine = self.by_device = 0
        self.fails_at: int | None = None  # a launch of the device's from now on
        self.runs_first = False  # the launch that fails has run
        lazy, client = startup._lazy, startup.engine().client
        launch, execute = lazy.launch, client.execute

        def counted(work: Any) -> None:
            self.by_engine += 1
            launch(work)

        def executed(*arguments: Any) -> Any:
            self.by_device += 1
            is_failing = self.fails_at == 0
            if self.fails_at is not None:
                self.fails_at -= 1
            if is_failing and not self.runs_first:
                raise ValueError("refused by the test")
            made = execute(*arguments)
            if is_failing:
                raise ValueError("refused by the test")
            return made

        patch.setattr(lazy, "launch", counted)
        patch.setattr(client, "execute", executed)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def during(calls: Calls, act: Callable[[], Any]) -> tuple[int, int]:
    """How many launches the engine made meanwhile, and the device."""
    before = calls.by_engine, calls.by_device
    act()
    torch.tpu.synchronize()
    return calls.by_engine - before[0], calls.by_device - before[1]


@pytest.fixture
def one_tier() -> Iterator[None]:
    with config.using(tiers="off", sweep=False, padding=False):  # whatever other tests' sizes at the place
        yield


def adder(size: int) -> tuple[torch.Tensor, Callable[[], None]]:
    x = torch.zeros(size, device="tpu")

    def step() -> None:
        x.add_(1)
        torch.tpu.synchronize()

    for _ in range(4):
        step()
    return x, step


@pytest.mark.usefixtures("one_tier")
def test_the_engine_makes_no_launch_that_is_like_the_last_one(calls: Calls) -> None:
    x, step = adder(71)
    before = metrics.snapshot()["launches"]
    assert during(calls, lambda: [step() for _ in range(5)]) == (0, 5)
    assert metrics.snapshot()["launches"] == before + 5
    assert x.tolist() == [9.0] * 71


@pytest.mark.usefixtures("one_tier")
def test_numbers_that_change_are_those_of_each_launch() -> None:
    x = torch.zeros(73, device="tpu")
    expected = 0.0
    for i in range(12):
        x.add_(x, alpha=0.5).add_(i * 0.25)
        expected = expected * 1.5 + i * 0.25
        torch.tpu.synchronize()
    assert x[0].item() == expected


@pytest.mark.usefixtures("one_tier")
def test_host_tensors_reach_a_repeated_launch(calls: Calls) -> None:
    x = torch.zeros(3, 7, device="tpu")
    for i in range(8):
        x += torch.full((3, 7), float(i)).to("tpu")
        torch.tpu.synchronize()
    assert x[0, 0].item() == sum(range(8))
    assert calls.by_engine < calls.by_device


@pytest.mark.usefixtures("one_tier")
def test_what_watches_launches_is_told_of_each_one(calls: Calls, capfd: pytest.CaptureFixture[str]) -> None:
    _, step = adder(77)
    with torchtpu.explain():
        assert during(calls, lambda: (step(), step())) == (2, 2)
    assert during(calls, lambda: (step(), step())) == (1, 2)
    with config.using(log="launch"):
        step()
    assert capfd.readouterr().err.count("1 ops") == 1


@pytest.mark.usefixtures("one_tier")
def test_launches_that_surely_fit_are_repeated_under_a_memory_limit_too(calls: Calls) -> None:
    x = torch.ones(1 << 18, device="tpu")

    def step() -> torch.Tensor:
        made = torch.sinh(x)
        torch.tpu.synchronize()
        return made

    with config.using(memory_limit=10 << 20):  # x and nine more
        for _ in range(4):
            step()
        by_engine, by_device = during(calls, lambda: all(step() is not None for _ in range(40)))
        with pytest.raises(torch.OutOfMemoryError):
            _ = [step() for _ in range(12)]
    assert by_device == 40 and 1 <= by_engine <= 20, "the engine counts what is alive where that might be too much"
    assert step()[0].item() == pytest.approx(1.1752012)


@pytest.mark.usefixtures("one_tier")
def test_a_memory_limit_that_comes_later_is_kept(calls: Calls) -> None:
    x = torch.ones(1 << 18, device="tpu")

    def step() -> torch.Tensor:
        made = torch.cosh(x)
        torch.tpu.synchronize()
        return made

    for _ in range(4):
        step()
    assert during(calls, step)[0] == 0
    with config.using(memory_limit=3 << 19), pytest.raises(torch.OutOfMemoryError):
        step()
    assert step()[0].item() == pytest.approx(1.5430806)


@pytest.mark.parametrize("runs_first", [False, True])
@pytest.mark.usefixtures("one_tier")
def test_a_launch_that_fails_leaves_what_the_engine_leaves(calls: Calls, *, runs_first: bool) -> None:
    """Before it took its inputs it is made in parts; afterwards the error is the step's, and the next one goes on."""
    x, y = torch.zeros(79, device="tpu"), torch.ones(79, device="tpu")

    def step() -> torch.Tensor:
        z = y * 2 + x
        x.add_(1)
        torch.tpu.synchronize()
        return z

    for _ in range(4):
        step()
    assert during(calls, step)[0] == 0
    calls.fails_at, calls.runs_first = 0, runs_first
    if runs_first:
        with pytest.raises(RuntimeError, match="refused by the test"):
            step()
    else:
        step()
        assert x.tolist() == [6.0] * 79
    calls.fails_at = None
    assert (y + 1).tolist() == [2.0] * 79
    x.zero_()  # what the launch took is lost, as eager PyTorch would have written it
    assert step().tolist() == [2.0] * 79


@pytest.mark.usefixtures("one_tier")
def test_a_check_that_fails_in_a_repeated_launch_is_the_ops_error(calls: Calls) -> None:
    table, rows = nn.Embedding(5, 3).to("tpu"), torch.tensor([1, 2], device="tpu")
    total = torch.zeros(2, 3, device="tpu")

    def step() -> None:
        total.add_(F.embedding(rows, table.weight.detach()))
        torch.tpu.synchronize()

    for _ in range(4):
        step()
    assert during(calls, step)[0] == 0
    sound = total.clone().tolist()
    rows.copy_(torch.tensor([1, 9]))
    torch.tpu.synchronize()
    with pytest.raises(IndexError):
        step()
    assert total.tolist() == sound
    rows.copy_(torch.tensor([3, 4]))
    step()
    expected = torch.tensor(sound) + table.weight.detach().cpu()[[3, 4]]
    torch.testing.assert_close(total.cpu(), expected)


def layers(count: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    block = [m for _ in range(count) for m in (nn.Linear(24, 24), nn.LayerNorm(24), nn.GELU())]
    return nn.Sequential(*block), torch.randn(6, 24)


@pytest.mark.parametrize("fails_at", [None, 0, 3])
def test_programs_in_turn_are_repeated_and_go_on_after_one_that_fails(calls: Calls, fails_at: int | None) -> None:
    """A region in pieces: those before the one that fails are not run again."""
    with config.using(tiers="pieces", sweep=False):
        model, x = layers(6)
        expected, x = model(x), x.to("tpu")
        model.to("tpu")

        def step() -> torch.Tensor:
            made = model(x)
            torch.tpu.synchronize()
            return made

        for _ in range(4):
            step()
        by_engine, by_device = during(calls, step)
        assert by_engine == 0
        assert by_device > 4
        calls.fails_at = fails_at
        torch.testing.assert_close(step().cpu(), expected, rtol=1e-4, atol=1e-5)


def test_deterministic_algorithms_are_asked_for_between_launches(calls: Calls) -> None:
    x, step = adder(83)
    step()
    torch.use_deterministic_algorithms(True)
    try:
        assert during(calls, step)[0] == 1
    finally:
        torch.use_deterministic_algorithms(False)
    assert x[0].item() == 6
