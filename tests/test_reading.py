"""What reads of every kind wait for, what they cost, and what they say when they take long."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchtpu
from torchtpu import config, metrics, startup
from torchtpu.runtime import _C


@pytest.fixture
def hold_builds(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Makes builds wait for an event."""
    real = startup.engine().compiler._load_or_compile

    def hold(released: Any) -> None:
        def build(*args: Any) -> Any:
            assert released.wait(30)
            return real(*args)

        monkeypatch.setattr(startup.engine().compiler, "_load_or_compile", build)

    return hold


def test_a_read_waits_only_for_its_own_value(hold_builds: Callable[[Any], None]) -> None:
    x = torch.ones(3, device="tpu")
    ready = x + 1
    assert ready.tolist() == [2.0, 2.0, 2.0]
    released = threading.Event()
    hold_builds(released)
    slow = x.rsqrt().tan()
    _C.cut("test")
    assert ready.cpu().tolist() == [2.0, 2.0, 2.0]  # a deadlock where it waited for what is queued
    assert metrics.snapshot()["queue"] > 0
    released.set()
    assert slow.shape == slow.cpu().shape


def test_other_threads_run_while_one_waits(hold_builds: Callable[[Any], None]) -> None:
    x = torch.ones(3, device="tpu")
    x.cpu()
    released = threading.Event()
    hold_builds(released)
    timer = threading.Timer(0.2, released.set)  # never runs where the waiting thread holds the GIL
    timer.start()
    assert x.log2().tolist() == [0.0, 0.0, 0.0]
    timer.join()


def test_item_twice_downloads_once() -> None:
    x = torch.ones(3, device="tpu").sum()
    assert x.item() == 3
    before = metrics.snapshot()["downloads"]
    assert (x.item(), float(x), x.tolist(), bool(x == x)) == (3.0, 3.0, 3.0, True)
    assert metrics.snapshot()["downloads"] == before + 1  # of x == x


def test_printing_reads_once_and_records_nothing() -> None:
    x = torch.arange(6.0, device="tpu").view(2, 3)
    before = metrics.snapshot()
    assert repr(x) == "tensor([[0., 1., 2.],\n        [3., 4., 5.]], device='tpu:0')"
    assert f"{x[0, 1]:.2f}" == "1.00"
    after = metrics.snapshot()
    assert after["ops_recorded"] == before["ops_recorded"]
    assert after["downloads"] == before["downloads"] + 1


def test_copies_both_ways_and_without_blocking() -> None:
    host = torch.arange(4.0)
    x = torch.empty(4, device="tpu")
    x.copy_(host)
    host.zero_()  # what was copied stays
    assert x.to("cpu", non_blocking=True).tolist() == [0.0, 1.0, 2.0, 3.0]
    back = torch.empty(2, 2, dtype=torch.float64)
    back.copy_(x.view(2, 2).t() * 2, non_blocking=True)
    assert back.tolist() == [[0.0, 4.0], [2.0, 6.0]]
    x[1:3].copy_(torch.tensor([7, 8]), non_blocking=True)
    assert x.tolist() == [0.0, 7.0, 8.0, 3.0]
    y = torch.arange(4.0).to("tpu", non_blocking=True)
    assert (x - y).tolist() == [0.0, 6.0, 6.0, 0.0]


def test_what_is_read_later_is_the_value_of_the_read(hold_builds: Callable[[Any], None]) -> None:
    x = torch.ones(3, device="tpu")
    before = x.cpu()
    x.add_(1)
    after = x.cpu()
    x.mul_(5)
    assert (before.tolist(), after.tolist(), x.tolist()) == ([1.0] * 3, [2.0] * 3, [10.0] * 3)


def test_an_async_read_waits_for_nothing_and_keeps_the_value_of_its_place(
    hold_builds: Callable[[Any], None],
) -> None:
    x = torch.ones(2, 3, device="tpu")
    x.cpu()
    released, called = threading.Event(), threading.Event()
    hold_builds(released)
    y = x.exp2() + 2
    future = torchtpu.async_read(y.t()[1:])
    future.add_done_callback(lambda _: called.set())
    y.zero_()
    assert not future.done()
    released.set()
    assert future.result(60).tolist() == [[4.0, 4.0]] * 2
    assert future.done()
    assert called.wait(60)
    assert y.tolist() == [[0.0] * 3] * 2
    assert torchtpu.async_read(torch.arange(3)).result().tolist() == [0, 1, 2]


def test_an_async_read_raises_what_a_read_raises() -> None:
    x = torch.ones(3, device="tpu")
    future = torchtpu.async_read(x[torch.tensor([5], device="tpu")])
    with pytest.raises(IndexError):
        future.result(60)


def test_a_long_wait_logs_one_line_that_names_the_region(
    hold_builds: Callable[[Any], None], capfd: pytest.CaptureFixture[str]
) -> None:
    x = torch.ones(3, device="tpu")
    x.cpu()
    released = threading.Event()
    hold_builds(released)
    y = x.sinc() + 2
    timer = threading.Timer(4.2, released.set)
    timer.start()
    started = time.monotonic()
    assert y.tolist() == [2.0, 2.0, 2.0]
    assert time.monotonic() - started > 3
    timer.join()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    for part in ("waiting for 3 s", "region of 2 ops", "cut: read", __file__ + ":", "being compiled"):
        assert part in lines[0]


class Screen(io.StringIO):
    """A terminal, which keeps what was written to it."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What is to be seen, the cursor's line last."""
        return [re.split(r"\r\x1b\[K", line)[-1] for line in self.getvalue().split("\n")]


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_terminal_shows_what_a_read_waits_for_until_it_ends(
    hold_builds: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, *, is_interrupted: bool
) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    released = threading.Event()
    hold_builds(released)
    x = torch.ones(3, device="tpu")
    y = (x.sinh() if is_interrupted else x.cosh()) + 2  # a program that is not there yet
    seen: list[str] = []

    def watch() -> None:
        deadline = time.monotonic() + 60
        while not screen.lines()[-1] and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(screen.lines()[-1])
        if is_interrupted:
            os.kill(os.getpid(), signal.SIGUSR1)
        else:
            released.set()

    def interrupt(number: int, frame: Any) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGUSR1, interrupt)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with pytest.raises(InterruptedError) if is_interrupted else contextlib.nullcontext():
            y.cpu()
    finally:
        watcher.join()
        signal.signal(signal.SIGUSR1, before)
    assert screen.lines() == [""]
    assert seen[0].startswith("tpu: waiting for 1 s: region of ") and len(seen[0]) < shutil.get_terminal_size().columns
    released.set()
    torch.tpu.synchronize()


def test_a_read_of_what_was_never_written_waits_for_nothing() -> None:
    x = torch.empty(3, device="tpu")
    regions = metrics.snapshot()["regions"]
    assert x.cpu().shape == (3,)
    assert metrics.snapshot()["regions"] <= regions + 1
    assert _C.stats()["queue"] == 0


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[float]]:
    """The threads of the launches so far, and how many seconds each launch sleeps."""
    client, threads, seconds = startup.engine().client, [], [0.0]
    real = client.execute

    def execute(*args: Any) -> Any:
        threads.append(threading.get_ident())
        time.sleep(seconds[0])
        return real(*args)

    monkeypatch.setattr(client, "execute", execute)
    return threads, seconds


def test_a_read_launches_in_its_own_thread_sooner_or_later(launchers: tuple[list[int], list[float]]) -> None:
    """Another thread may be faster, for as long as the machine pleases."""
    x = torch.ones(3, device="tpu")
    while threading.get_ident() not in launchers[0]:
        assert (x * 5).tolist() == [5.0] * 3


def test_a_read_launches_in_another_thread_what_ctrl_c_would_have_to_wait_for(
    launchers: tuple[list[int], list[float]],
) -> None:
    launchers[1][0] = 0.1
    x = torch.ones(3, device="tpu")
    for _ in range(4):  # these show how long launches are
        assert (x * 5).tolist() == [5.0] * 3
    launchers[0].clear()
    for _ in range(4):
        assert (x * 5).tolist() == [5.0] * 3
    assert launchers[0] and threading.get_ident() not in launchers[0]


def test_numbers_that_stay_the_same_are_uploaded_once(monkeypatch: pytest.MonkeyPatch, in_one_tier: None) -> None:
    x = torch.ones(3, device="tpu")
    x.cpu()
    client, uploaded = startup.engine().client, []
    assert client.array_type  # which it finds by an upload
    real = client.upload

    def upload(tensor: torch.Tensor, device: int) -> Any:
        uploaded.append(tensor.tolist())
        return real(tensor, device)

    monkeypatch.setattr(client, "upload", upload)
    for factor in (1.625, 1.625, 2.625, 2.625, 1.625):  # as in no other test
        assert (x * factor).tolist() == [factor] * 3
    assert uploaded == [[1.625], [2.625], [1.625]]


def test_a_small_program_is_compiled_beside_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, released = startup.engine().compiler, threading.Event()
    real = compiler._load_or_compile

    def build(plan: Any, device: int, note: Any, *rest: Any) -> Any:
        assert note["ops"] < 100 or released.wait(60)
        return real(plan, device, note, *rest)

    x = torch.ones(7, device="tpu")
    x.cpu()
    monkeypatch.setattr(compiler, "_load_or_compile", build)
    deadline = time.monotonic() + 60
    planned = startup.engine_counters().regions_planned
    with config.using(tiers="off", clusters=False):
        large = x
        for _ in range(100):
            large = large.sinc() * x
        _C.cut("test")
        small = x.acos().tan().neg()
        _C.cut("test")
        while startup.engine_counters().regions_planned < planned + 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    while "00 ops" not in (said := compiler.describe()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert f"{__file__}:" in said
    while len(compiler.outstanding()) > 1:  # the small one is done
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not released.is_set()
    released.set()
    torch.testing.assert_close(small.cpu(), x.cpu().acos().tan().neg())
    large.cpu()
    assert compiler.describe() == ""
