"""Threads that record, read, train and end get their own right values, and programs stay few."""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from thread_support import run_all
from torch import nn

from torchtpu import config, metrics, startup
from torchtpu.runtime import _C


def data(seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    weights = {"0.weight": (6, 4), "0.bias": (6,), "2.weight": (2, 6), "2.bias": (2,)}
    return torch.randn(8, 4, generator=generator), {
        name: torch.randn(shape, generator=generator) for name, shape in weights.items()
    }


def train(device: str, seed: int, steps: int = 10) -> tuple[list[float], torch.Tensor]:
    x, state = data(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    model.load_state_dict(state)
    model.to(device)
    x = x.to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses], model[0].weight.detach().cpu()


@pytest.mark.parametrize("multithreaded_backward", [False, True])
def test_four_threads_train_as_on_the_cpu(multithreaded_backward: bool) -> None:
    expected = [train("cpu", seed) for seed in range(4)]

    def work(seed: int) -> Callable[[], Any]:
        def trained() -> Any:
            with torch.autograd.set_multithreading_enabled(multithreaded_backward):
                return train("tpu", seed)

        return trained

    made = run_all(*(work(seed) for seed in range(4)))
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


def test_a_thread_reads_anothers_pending_value() -> None:
    x = torch.ones(3, device="tpu")
    x.cpu()
    recorded, read = threading.Event(), threading.Event()
    values: list[torch.Tensor] = []

    def own() -> Any:
        values.append(x * 2)
        recorded.set()
        assert read.wait(60)
        return (values[0] + 1).tolist()

    def borrow() -> Any:
        assert recorded.wait(60)
        found = values[0].tolist()
        read.set()
        return found

    assert run_all(own, borrow) == [[3.0] * 3, [2.0] * 3]
    counts = metrics.snapshot()
    assert counts["subgraphs"] == 1
    assert "other_thread" not in counts["cuts"], "a read ended another thread's region"


def test_a_thread_computes_with_anothers_pending_value() -> None:
    x = torch.ones(3, device="tpu")
    x.cpu()
    y = x * 2
    assert run_all(lambda: [v - 1 for v in (y + 6).tolist()]) == [[7.0] * 3]
    assert y.tolist() == [2.0] * 3
    assert metrics.snapshot()["cuts"]["other_thread"] == 1


def test_a_reader_beside_a_training_thread_makes_few_programs() -> None:
    x, state = data(0)
    model = nn.Linear(4, 6)
    model.load_state_dict({"weight": state["0.weight"], "bias": state["0.bias"]})
    model.to("tpu")
    x = x.to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    losses: list[torch.Tensor] = []
    is_done = threading.Event()

    def own() -> None:
        for _ in range(200):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        is_done.set()

    def watch() -> list[float]:
        seen = []
        while not is_done.wait(0.002):
            if losses:
                seen.append(losses[-1].item())
        return seen

    _, seen = run_all(own, watch)
    assert seen == sorted(seen, reverse=True)
    assert metrics.snapshot()["programs_compiled"] + metrics.snapshot()["cache_hits_disk"] <= 20
    losses.clear()


def test_threads_share_a_parameter_they_only_read() -> None:
    weight = torch.arange(12.0, device="tpu").view(3, 4).requires_grad_()

    def work(i: int) -> Callable[[], Any]:
        def compute() -> Any:
            total = 0.0
            for _ in range(20):
                total += (weight @ torch.full((4,), float(i), device="tpu")).sum().item()
            return total

        return compute

    assert run_all(*map(work, range(4))) == [i * 66.0 * 20 for i in range(4)]


def test_concurrent_writes_to_a_shared_parameter_all_arrive_or_lose_a_race() -> None:
    """As on other devices: no order among threads, but no crash, and each write is a whole one."""
    weight = torch.zeros(3, device="tpu")

    def work() -> None:
        for i in range(50):
            weight.add_(1)
            if i % 10 == 0:
                weight.tolist()

    run_all(work, work, work)
    found = weight.tolist()
    assert found[0] == found[1] == found[2]
    assert 50 <= found[0] <= 150


def test_a_value_another_thread_still_needs_is_not_taken_by_a_write() -> None:
    weight = torch.ones(3, device="tpu") * 1
    weight.cpu()
    recorded, written = threading.Event(), threading.Event()

    def reads() -> Any:
        y = weight * 2
        recorded.set()
        assert written.wait(60)
        return y.tolist()

    def writes() -> Any:
        assert recorded.wait(60)
        weight.add_(1)
        torch.tpu.synchronize()
        written.set()
        return weight.tolist()

    assert run_all(reads, writes) == [[2.0] * 3, [2.0] * 3]


def test_backward_in_autograds_threads_records_into_the_callers_region() -> None:
    x = torch.arange(3.0, device="tpu", requires_grad=True)
    threads = set()

    def see(grad: torch.Tensor) -> torch.Tensor:
        threads.add(threading.get_ident())
        return grad * 2

    with torch.autograd.set_multithreading_enabled(True):
        y = x.square()
        y.register_hook(see)
        y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 4.0, 8.0]
    assert threading.get_ident() not in threads
    assert metrics.snapshot()["cuts"] == {"read": 1}
    x.grad = None


def test_ops_of_autograds_threads_have_the_line_that_called_backward(capfd: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        with torch.autograd.set_multithreading_enabled(True):  # as in any thread but the main one
            x = torch.full((3, 5), 2.0, device="tpu", requires_grad=True)
            (x * 3).cumsum(0).sum().backward()
            (x * 2).sum().backward()
            torch.tpu.synchronize()

    _C.forget_streams()
    with config.using(log=("cluster",)):
        run_all(train)
        train()
    ops = [line for line in capfd.readouterr().err.splitlines() if line.startswith("  %")]
    assert len(ops) > 10
    assert [line for line in ops if f"# {__file__}:" not in line] == []


def test_a_thread_that_ends_hands_on_its_values() -> None:
    x = torch.ones(3, device="tpu")
    x.cpu()
    ((y, z),) = run_all(lambda: (x * 3, (x * 4).view(3, 1)))
    assert (y.tolist(), (z + 1).flatten().tolist()) == ([3.0] * 3, [5.0] * 3)
    assert metrics.snapshot()["cuts"]["thread_end"] == 1


def test_threads_that_come_and_go_leave_nothing_behind() -> None:
    x = torch.ones(3, device="tpu")

    def work() -> Any:
        return (x * 2 + 1).tolist()

    for _ in range(5):
        run_all(work, work)
    nodes = metrics.snapshot()["trie_nodes"]
    for _ in range(20):
        run_all(work, work)
    # A thread hands its op streams on while it ends: the next one may start before that, and record the two ops anew.
    assert metrics.snapshot()["trie_nodes"] <= nodes + 2 * 2


def test_each_thread_has_its_own_current_device_and_grad_mode() -> None:
    def work() -> Any:
        with torch.no_grad():
            return (torch.ones(2, device="tpu", requires_grad=True) * 2).requires_grad

    assert run_all(work) == [False]
    assert (torch.ones(2, device="tpu", requires_grad=True) * 2).requires_grad


def test_threads_that_finish_a_device_close_each_outcome_once(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Outcome:
        def is_known(self) -> bool:
            time.sleep(0.05)  # meanwhile the other thread looks
            return True

        def failed(self) -> int:
            return 0

        def close(self) -> bool:
            closed.append(self)
            return False

    executor = startup.engine()._executor
    monkeypatch.setattr(executor, "_outcomes", [deque([Outcome()]) for _ in executor._outcomes])
    run_all(*[lambda: executor.finish(0)] * 2)
    assert len(closed) == 1


class Meter:
    """Garbage that only the cyclic collector finds, and that reads a tensor in the end."""

    threads: ClassVar[list[str]] = []
    totals: ClassVar[list[float]] = []

    def __init__(self, value: float) -> None:
        self.itself = self
        self.total = torch.full((4,), value, device="tpu")

    def __del__(self) -> None:
        Meter.totals.append(self.total.sum().item())
        Meter.threads.append(threading.current_thread().name)


def collector_thresholds() -> tuple[int, int, int]:
    """Those of the user: the first is 0 while something is compiled."""
    while gc.get_threshold()[0] == 0:
        time.sleep(0.01)
    return gc.get_threshold()


@pytest.mark.parametrize("youngest", [5, 100, 700])
def test_finalizers_that_read_run_in_no_thread_that_they_wait_for(youngest: int) -> None:
    threshold = collector_thresholds()
    Meter.threads.clear()
    Meter.totals.clear()
    try:
        gc.set_threshold(youngest, 2, 2)
        kept = []
        for i in range(150):
            Meter(float(i))
            kept += [[] for _ in range(20)]  # what the collector counts, enough for each of the thresholds
            x = torch.ones(5 + i % 7, 1 + i % 3, device="tpu")
            for _ in range(i % 9):
                x = (x * 1.5).sin() + i % 4
            x.sum().item()
        assert Meter.totals, "garbage is collected meanwhile"
        assert collector_thresholds() == (youngest, 2, 2)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert sorted(Meter.totals) == [4.0 * i for i in range(150)]
    ours = {name for name in Meter.threads if name.startswith(("torchtpu-compile", "Dummy"))}
    assert not ours, "those that plan, compile and launch"


def test_a_threshold_set_while_the_collector_waits_stays() -> None:
    threshold = collector_thresholds()
    try:
        with _C.CollectionDeferred():
            assert gc.get_threshold()[0] == 0
            assert gc.isenabled()
            gc.set_threshold(321)
        assert gc.get_threshold()[0] == 321
    finally:
        gc.set_threshold(*threshold)
    with _C.CollectionDeferred(), _C.CollectionDeferred():
        pass
    assert collector_thresholds() == threshold


def test_deferred_collections_begin_again_whatever_thread_began_or_ended_meanwhile() -> None:
    """A finalizer lets other threads run, which may stop the collector or let it go on amid a collection."""
    threshold = collector_thresholds()

    class Slow:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            time.sleep(0.001)

    def compute(seed: int) -> None:
        for i in range(25):
            x = torch.ones(2 + (seed + i) % 5, 3 + seed, device="tpu")
            Slow()
            ((x * 1.5 + i).sin().sum() * seed).item()

    try:
        gc.set_threshold(20, 2, 2)
        run_all(*(functools.partial(compute, seed) for seed in range(4)))
        assert collector_thresholds() == (20, 2, 2)
    finally:
        gc.set_threshold(*threshold)
