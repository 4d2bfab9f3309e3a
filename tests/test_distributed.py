"""torch.distributed on the device: stock scripts under torchrun give equal values, or errors that help."""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from script import Ended, torchrun
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

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


def start_ranks(code: str, *, timeout: float, waits_for: int, seconds: float = 120) -> list[Ended]:
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
                out, err = processes[rank].communicate(timeout=seconds if rank == waits_for else 10)
            except subprocess.TimeoutExpired:
                processes[rank].kill()
                out, err = processes[rank].communicate()
            ended[rank] = Ended(processes[rank].returncode, out, err)
        return [ended[0], ended[1]]


def line_of(code: str, what: str) -> int:
    """The line of the script on which the text stands last."""
    lines = (_TEXT + textwrap.dedent(code)).splitlines()
    return max(n for n, line in enumerate(lines, 1) if what in line)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    """What several tests look at: two ranks that check one thing after the other, and their folder."""
    folder = tmp_path_factory.mktemp("world")
    return torchrun("distributed_session.py", str(folder), "collectives", "fusion", "clients"), folder


def passed(ended: Ended, part: str, ranks: int = 2) -> None:
    found = [f"rank {rank}: {part} passed" in ended.out for rank in range(ranks)]
    assert all(found), ended.err


def load_alone(folder: Path) -> None:
    """One process reads the checkpoint of several ranks."""
    command = [sys.executable, "-W", "ignore", HERE / "distributed_session.py", folder, "load_alone"]
    alone = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert alone.returncode == 0, alone.stderr


def contents(checkpoint: Path) -> dict[str, Any]:
    """All that a distributed checkpoint holds, its tensors whole."""
    whole = checkpoint / "whole.pt"
    dcp_to_torch_save(checkpoint, whole)
    found: dict[str, Any] = torch.load(whole, weights_only=False)
    return found


def test_every_collective_leaves_what_gloo_leaves(world: tuple[Ended, Path]) -> None:
    passed(world[0], "collectives")


def test_collectives_are_parts_of_programs_and_ranks_may_differ(world: tuple[Ended, Path]) -> None:
    passed(world[0], "fusion")


def test_ranks_that_do_as_they_like_learn_what_ranks_in_step_learn(tmp_path: Path) -> None:
    """They print, sleep, keep values, compute more or log less than others, and let others wait."""
    passed(torchrun("distributed_session.py", str(tmp_path), "divergence"), "divergence")


def test_attention_of_sharded_heads_batches_and_sequences_is_that_of_one_process(tmp_path: Path) -> None:
    """DTensors and context parallel, in programs of all ranks."""
    passed(torchrun("distributed_session.py", str(tmp_path), "attention"), "attention")


def test_stock_training_on_several_ranks_is_that_of_one_process(world: tuple[Ended, Path]) -> None:
    """DDP, FSDP, DTensor, tensor and pipeline parallel, functional collectives; their checkpoint is read by one."""
    ended, folder = world
    passed(ended, "clients")
    assert ended.status == 0, ended.err
    load_alone(folder)


def test_compiled_training_on_two_ranks_is_that_of_one_process() -> None:
    """FSDP2, DDP and tensor parallel under torch.compile; a compiled FSDP2 step has its collectives in its program."""
    ended = torchrun("distributed_compiled.py")
    assert ended.status == 0, ended.err
    assert ended.out.count("is equal") == 2 * 5


def test_a_backend_named_by_device_serves_both_kinds_of_tensors(tmp_path: Path) -> None:
    ended = torchrun("distributed_session.py", str(tmp_path), "short")
    passed(ended, "short")
    assert ended.status == 0, ended.err


@pytest.mark.parametrize("part", ["interrupts", pytest.param("five hundred interrupts", marks=pytest.mark.full)])
def test_interrupts_of_both_ranks_lose_no_step(part: str, tmp_path: Path) -> None:
    passed(torchrun("distributed_session.py", str(tmp_path), part), part)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_may_differ_a_thousand_times(ranks: int, tmp_path: Path) -> None:
    ended = torchrun("distributed_session.py", str(tmp_path), "thousand", ranks=ranks)
    passed(ended, "thousand", ranks)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_real_vocabulary_in_unequal_shards_runs_in_programs_of_all_ranks(ranks: int, tmp_path: Path) -> None:
    passed(torchrun("distributed_session.py", str(tmp_path), "vocabulary", ranks=ranks), "vocabulary", ranks)


@pytest.mark.full
@pytest.mark.timeout(5000)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_may_do_as_they_like_for_a_thousand_steps(ranks: int, tmp_path: Path) -> None:
    ended = torchrun("distributed_session.py", str(tmp_path), "long divergence", ranks=ranks, seconds=4900)
    passed(ended, "long divergence", ranks)


@pytest.mark.full
def test_four_ranks_do_what_two_do(tmp_path: Path) -> None:
    ended = torchrun("distributed_session.py", str(tmp_path), "collectives", "attention", "clients", ranks=4)
    passed(ended, "collectives", 4)
    passed(ended, "attention", 4)
    passed(ended, "clients", 4)
    load_alone(tmp_path)
    for folder, ranks in ((tmp_path, 2), (tmp_path / "2", 4)):
        passed(torchrun("distributed_session.py", str(folder), "reshard", ranks=ranks), "reshard", ranks)
    found, wanted = contents(tmp_path / "2" / "4"), contents(tmp_path)
    assert found["optimizer"]["param_groups"] == wanted["optimizer"]["param_groups"]
    for parts in (found, wanted):
        parts |= parts.pop("optimizer")["state"]
    assert len(wanted) == 1 + 8  # the model's, and a state for each of its parameters
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


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
    assert "rank 1 has ended: its connection" in message


@pytest.mark.full
def test_a_job_that_is_paused_goes_on() -> None:
    """As by a debugger, or where a virtual machine moves: for longer than a coordinator waits for heartbeats."""
    code = """
    import subprocess
    if rank == 0:
        pids = dist.distributed_c10d._get_default_store().get("pid").decode(), str(os.getpid())
        subprocess.Popen(["sh", "-c", "sleep 1; kill -STOP $0 $1; sleep 130; kill -CONT $0 $1", *pids])
    else:
        dist.distributed_c10d._get_default_store().set("pid", str(os.getpid()))
    time.sleep(5)
    dist.all_reduce(x)
    assert x.tolist() == [4.0] * 4
    dist.destroy_process_group()
    """
    for ended in start_ranks(code, timeout=300, waits_for=0, seconds=250):
        assert ended.status == 0, ended.err


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


MISMATCH = """
if rank == 0:
    dist.all_reduce(x)
else:
    dist.broadcast(x, 0)
print(x.tolist())
"""


@pytest.fixture(scope="module")
def mismatch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Ended], Path]]:
    """Two ranks at different collectives, and the folder of their flight recorders."""
    folder = tmp_path_factory.mktemp("flight")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(folder / "trace_rank_"))
        yield start_ranks(MISMATCH, timeout=30, waits_for=0), folder


def test_ranks_at_different_collectives_are_told_so(mismatch: tuple[list[Ended], Path]) -> None:
    for ended in mismatch[0]:
        assert ended.status == 1
        message = ended.err.strip().splitlines()[-1]
        assert "the ranks of group 0 are at different collectives" in message
        assert "rank 0: all_reduce SUM float32[4] (number 2, at " in message
        assert "rank 1: broadcast float32[4] root 0 (number 2, at " in message


def test_the_flight_recorder_tells_pytorchs_tool_who_is_missing(mismatch: tuple[list[Ended], Path]) -> None:
    folder = mismatch[1]
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", "--prefix", "trace_rank_", folder]
    read = subprocess.run(command, capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr
    assert "COLLECTIVE_TYPE_MISMATCH" in read.stdout + read.stderr, read.stdout + read.stderr
    with (folder / "trace_rank_1").open("rb") as file:
        first, last = pickle.load(file)["entries"]
    assert (first["profiling_name"], first["state"]) == ("gloo:all_reduce", "completed")
    assert (last["profiling_name"], last["collective_seq_id"], last["state"]) == ("gloo:broadcast", 2, "started")
    assert last["frames"][0]["line"] == line_of(MISMATCH, "dist.broadcast(x, 0)")


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
