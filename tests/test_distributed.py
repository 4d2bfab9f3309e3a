"""torch.distributed on the device: in come stock scripts under torchrun, out come equal values, or errors that help."""

from __future__ import annotations

import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from script import Ended, is_gone

HERE = Path(__file__).resolve().parent

pytestmark = pytest.mark.timeout(600)

_TEXT = """
import datetime, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("tpu", timeout=datetime.timedelta(seconds={timeout}))
rank = dist.get_rank()
x = torch.ones(4, device="tpu")
dist.all_reduce(x)
assert x.tolist() == [2.0] * 4
"""


def torchrun(script: str, *arguments: str, ranks: int = 2, restarts: int = 0, seconds: float = 500) -> Ended:
    """Runs a script beside this file or elsewhere, or Python code; no process may outlive it."""
    with tempfile.TemporaryDirectory() as folder:
        path = HERE / script if script.endswith(".py") else Path(folder, "script.py")
        if not script.endswith(".py"):
            path.write_text(script)
        command = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
        process = subprocess.Popen(
            [sys.executable, *command, str(path), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        assert is_gone(process.pid), "a process outlives torchrun"
        return Ended(process.returncode, out, err)


def start_ranks(code: str, *, timeout: float, waits_for: int) -> list[Ended]:
    """Two processes without torchrun, which would end the second when the first ends. Rank `waits_for` is waited for;
    the other is killed where it does not end soon after."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(_TEXT.format(timeout=timeout) + textwrap.dedent(code))
        processes = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", str(path)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={
                    **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                },
            )
            for rank in range(2)
        ]  # fmt: skip
        ended = {}
        for rank in (waits_for, 1 - waits_for):
            try:
                out, err = processes[rank].communicate(timeout=120 if rank == waits_for else 10)
            except subprocess.TimeoutExpired:
                processes[rank].kill()
                out, err = processes[rank].communicate()
            ended[rank] = Ended(processes[rank].returncode, out, err)
        return [ended[0], ended[1]]


def line_of(code: str, what: str) -> int:
    """The line of the script on which the text stands last."""
    lines = (_TEXT + textwrap.dedent(code)).splitlines()
    return max(n for n, line in enumerate(lines, 1) if what in line)


@pytest.mark.parametrize("backend", [None, "cpu:gloo,tpu:tpu"])
def test_every_collective_leaves_what_gloo_leaves(backend: str | None) -> None:
    ended = torchrun("distributed_collectives.py", *([backend] if backend else []))
    assert ended.status == 0, ended.err


def test_collectives_are_parts_of_programs_and_ranks_may_differ() -> None:
    ended = torchrun("distributed_fusion.py", "20")
    assert ended.status == 0, ended.err


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_may_differ_a_thousand_times(ranks: int) -> None:
    ended = torchrun("distributed_fusion.py", "1000", ranks=ranks)
    assert ended.status == 0, ended.err


@pytest.mark.full
def test_four_ranks_leave_what_gloo_leaves() -> None:
    ended = torchrun("distributed_collectives.py", ranks=4)
    assert ended.status == 0, ended.err


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_stock_training_on_several_ranks_is_that_of_one_process(ranks: int, tmp_path: Path) -> None:
    """DDP, FSDP, DTensor, tensor and pipeline parallel, functional collectives; their checkpoint is read by one."""
    ended = torchrun("distributed_clients.py", str(tmp_path / "checkpoint"), ranks=ranks)
    assert ended.status == 0, ended.err
    assert ended.out.count("is equal") == ranks * 10
    alone = subprocess.run(
        [sys.executable, "-W", "ignore", HERE / "distributed_clients.py", tmp_path / "checkpoint", "load_alone"],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert alone.returncode == 0, alone.stderr


def test_compiled_training_on_two_ranks_is_that_of_one_process() -> None:
    """FSDP2, DDP and tensor parallel under torch.compile; a compiled FSDP2 step has its collectives in its program."""
    ended = torchrun("distributed_compiled.py")
    assert ended.status == 0, ended.err
    assert ended.out.count("is equal") == 2 * 5


def test_a_killed_rank_ends_the_others_with_an_error_that_names_it() -> None:
    code = """
    if rank == 1:
        os.kill(os.getpid(), 9)
    dist.all_reduce(x)
    print(x.tolist())
    """
    survivor, killed = start_ranks(code, timeout=60, waits_for=0)
    assert killed.status == -signal.SIGKILL
    assert survivor.status == 1
    message = survivor.err.strip().splitlines()[-1]
    line = line_of(code, "dist.all_reduce(x)")
    assert re.search(rf"rank 0: all_reduce SUM float32\[4\] \(number 2, at \S+script\.py:{line}\)", message)
    assert "rank 1 did not answer: its process has ended" in message


def test_a_rank_that_hangs_is_named_when_the_timeout_has_passed() -> None:
    code = """
    if rank == 1:
        time.sleep(100)
    y = x * 2
    dist.broadcast(y, 1)
    print(y.tolist())
    """
    started = time.monotonic()
    waiting, hung = start_ranks(code, timeout=5, waits_for=0)
    assert hung.status == -signal.SIGKILL
    assert waiting.status == 1, waiting.err
    message = waiting.err.strip().splitlines()[-1]
    assert re.search(r"broadcast float32\[4\] root 1 \(number 2, at \S+script\.py:\d+\) of group 0 failed", message)
    sleeping = line_of(code, "time.sleep(100)")
    assert re.search(rf"rank 1 is at \S+script\.py:{sleeping}, after all_reduce SUM", message)
    assert time.monotonic() - started < 100


def test_ranks_at_different_collectives_are_told_so() -> None:
    code = """
    if rank == 0:
        dist.all_reduce(x)
    else:
        dist.broadcast(x, 0)
    print(x.tolist())
    """
    both = start_ranks(code, timeout=30, waits_for=0)
    for ended in both:
        assert ended.status == 1
        message = ended.err.strip().splitlines()[-1]
        assert "the ranks of group 0 are at different collectives" in message
        assert "rank 0: all_reduce SUM float32[4] (number 2, at " in message
        assert "rank 1: broadcast float32[4] root 0 (number 2, at " in message


def test_the_flight_recorder_tells_pytorchs_tool_who_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "trace_rank_"))
    code = """
    if rank == 0:
        dist.all_reduce(x)
    else:
        dist.broadcast(x, 0)
    print(x.tolist())
    """
    start_ranks(code, timeout=30, waits_for=0)
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", "--prefix", "trace_rank_", tmp_path]
    read = subprocess.run(command, capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr
    assert "COLLECTIVE_TYPE_MISMATCH" in read.stdout + read.stderr, read.stdout + read.stderr
    with (tmp_path / "trace_rank_1").open("rb") as file:
        first, last = pickle.load(file)["entries"]
    assert (first["profiling_name"], first["state"]) == ("gloo:all_reduce", "completed")
    assert (last["profiling_name"], last["collective_seq_id"], last["state"]) == ("gloo:broadcast", 2, "started")
    assert last["frames"][0]["line"] == line_of(code, "dist.broadcast(x, 0)")


def test_a_rank_that_raises_ends_torchrun() -> None:
    code = _TEXT.format(timeout=60) + textwrap.dedent("""
    if rank == 1:
        raise ValueError("a mistake")
    while True:
        dist.all_reduce(x)
        x.tolist()
    """)
    started = time.monotonic()
    ended = torchrun(code)
    assert ended.status == 1
    assert "ValueError: a mistake" in ended.err
    assert time.monotonic() - started < 60
