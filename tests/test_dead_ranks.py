"""Ranks that end, hang or lose their connections are named in the errors of the others.

Groups have timeouts that are longer than any test may take: who reports has noticed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from script import Ended, start_script

from torchtpu.distributed.peers import _place

pytestmark = pytest.mark.timeout(400)

SECONDS = 240
_TEXT = """
import datetime, os, signal, sys, threading, time
import torch, torch.distributed as dist
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("tpu", timeout=datetime.timedelta(seconds={timeout}))
x = torch.ones(4, device="tpu")
for _ in range(2):
    dist.all_reduce(x)
    x.tolist()
"""
ENDS = {
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "exit": "os._exit(3)",
    "raise": "raise ValueError('a mistake')",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(100)",
}
STATUS = {"kill": -signal.SIGKILL, "exit": 3, "raise": 1, "SIGTERM": -signal.SIGTERM}


def run_ranks(code: str, size: int, *, timeout: int = 2 * SECONDS, ports: dict[int, int] | None = None) -> list[Ended]:
    """Processes that run the code, each of which is a rank. They are killed when the time is over; one that hangs on
    purpose (`time.sleep(999)`) as soon as all others have ended. `ports` are where ranks look for the store (-1: where
    it is)."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1] if ports is None else ports[-1]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(_TEXT.format(timeout=timeout) + textwrap.dedent(code))
        files = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(size)]
        processes = []
        for rank, (out, err) in enumerate(files):
            environment = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "localhost",
                "MASTER_PORT": str((ports or {}).get(rank, port)), "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            with out.open("w") as out_file, err.open("w") as err_file:
                processes.append(start_script([script], out_file, err_file, environment, ignores_warnings=True))
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and sum(p.poll() is None for p in processes) > ("time.sleep(999)" in code):
            time.sleep(0.05)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        statuses = [process.wait() for process in processes]
        return [
            Ended(status, out.read_text(), err.read_text()) for status, (out, err) in zip(statuses, files, strict=True)
        ]


THIRD = r"all_reduce SUM float32\[4\] \(number 3, at "


def names(ended: Ended, rank: int, dead: dict[int, str], what: str = THIRD) -> None:
    """Whether this rank has reported, once, the others' end."""
    assert ended.status == 1, (rank, ended)
    message = ended.err.strip().splitlines()[-1]
    assert re.search(rf"DistBackendError: rank {rank}: {what}\S+script\.py:\d+\) of group 0 failed", message), message
    for number, told in dead.items():
        assert f"rank {number} {told}" in message, message
    assert ended.err.count("DistBackendError:") == 1, ended.err


def dies(how: str, rank: int) -> str:
    return f"""
    if rank == {rank}:
        time.sleep(1)  # the others are waiting
        {ENDS[how]}
    dist.all_reduce(x)
    x.tolist()
    """


def check_end(how: str, dead: int, size: int) -> None:
    ended = run_ranks(dies(how, dead), size)
    assert ended[dead].status == STATUS[how], ended[dead]
    told = "has ended with ValueError: a mistake" if how == "raise" else "has ended: its connection"
    for rank in {*range(size)} - {dead}:
        names(ended[rank], rank, {dead: told})


@pytest.mark.parametrize(("how", "dead", "size"), [("exit", 1, 2), ("kill", 0, 3), ("raise", 2, 3)])
def test_a_rank_that_ends_is_named_by_all_others(how: str, dead: int, size: int) -> None:
    """Rank 0 has the store."""
    check_end(how, dead, size)


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.parametrize("how", ENDS)
def test_a_rank_that_ends_is_named_by_all_others_however_it_does(how: str, dead: int, size: int) -> None:
    check_end(how, dead, size)


def test_the_ranks_of_a_lost_node_are_named_by_those_of_the_other() -> None:
    """Two nodes of two ranks; the first, with the store, dies."""
    code = """
    if rank < 2:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x)
    x.tolist()
    """
    ended = run_ranks(code, 4)
    for rank in (2, 3):
        names(ended[rank], rank, {0: "has ended: its connection", 1: "has ended: its connection"})


def test_a_rank_that_ends_in_a_program_of_all_ranks_is_named() -> None:
    code = """
    w = torch.randn(300, 300, device="tpu")
    if rank == 2:
        threading.Timer(3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    started = time.monotonic()
    for step in range(1_000_000):
        for _ in range(5):
            w = torch.tanh(w @ w)
            dist.all_reduce(w, dist.ReduceOp.AVG)
        w.sum().item()
    """
    ended = run_ranks(code, 3)
    for rank in (0, 1):
        names(ended[rank], rank, {2: "has ended: its connection"}, r"all_reduce AVG float32\[90000\] \(number \d+, at ")


def test_a_rank_that_ends_is_named_while_its_forked_children_live() -> None:
    """As workers of a DataLoader do for some seconds, who hold the parent's other connections open."""
    code = """
    if rank == 1:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x)
    x.tolist()
    """
    started = time.monotonic()
    ended = run_ranks(code, 3)
    for rank in (0, 2):
        names(ended[rank], rank, {1: "has ended: its connection"})
    assert time.monotonic() - started < 60, "it is the child's end that was noticed"


def test_a_rank_that_hangs_is_named_by_all_others_when_the_timeout_has_passed() -> None:
    code = """
    if rank == 1:
        time.sleep(999)
    dist.all_reduce(x)
    x.tolist()
    """
    ended = run_ranks(code, 3, timeout=8)
    for rank in (0, 2):
        names(ended[rank], rank, {1: "is at "})


def test_a_rank_that_is_stopped_is_named_too() -> None:
    code = """
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # time.sleep(999)
    dist.all_reduce(x)
    x.tolist()
    """
    ended = run_ranks(code, 2, timeout=8)
    names(ended[0], 0, {1: "does not answer: it hangs outside Python, or its machine is lost"})


def test_ranks_that_end_as_they_should_disturb_nobody() -> None:
    """They leave at different times; the last goes on by itself, and two go on with each other."""
    code = """
    pair = dist.new_group([0, 2])
    if rank == 1:
        sys.exit(0)
    time.sleep(1.5 * rank)
    dist.all_reduce(x, group=pair)
    if rank == 0:
        dist.send(x, 2)
    if rank == 2:
        dist.recv(x, 0)
    time.sleep(3)
    assert x.sum().item() == 2 * 9 * 4
    dist.destroy_process_group()
    print("whole")
    """
    for rank, ended in enumerate(run_ranks(code, 3)):
        assert ended.status == 0 and ended.out.endswith("whole\n") == (rank != 1), ended


def test_connections_that_are_reset_are_an_error_of_both_ranks() -> None:
    code = """
    import socket
    if rank == 1:
        found = {}
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                connection = socket.socket(fileno=os.dup(fd))
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    here, there = (end[1] for end in (connection.getsockname(), connection.getpeername()))
                    found[here, there] = connection
            except OSError:  # no socket, or one that listens
                pass
        for (here, there), connection in found.items():
            if (there, here) not in found:  # else with itself, as XLA's coordinator
                connection.shutdown(socket.SHUT_RDWR)
    dist.all_reduce(x)
    x.tolist()
    """
    ended = run_ranks(code, 2)
    for rank in (0, 1):
        other = f"rank {1 - rank} "
        # The other one is alive: it may have said where it is, or that it stops, before its connection is gone.
        told = next(
            told for told in ("has ended: its connection", "is at", "stopped: ") if other + told in ended[rank].err
        )
        names(ended[rank], rank, {1 - rank: told})


def test_the_users_line_may_be_in_a_folder_named_like_a_library() -> None:
    script = f"{torch.__path__[0]}_of_mine/train.py"
    found: dict[str, str] = {}
    exec(compile("found['place'] = place()", script, "exec"), {"found": found, "place": _place})
    assert found["place"] == f"{script}:1"


@contextlib.contextmanager
def slow_way(port: int, stops: threading.Event) -> Iterator[int]:
    """A port from which all goes on to another one, slowly, and nothing once it `stops`."""

    def forward(source: socket.socket, target: socket.socket) -> None:
        with source, target:
            try:
                while data := source.recv(4096):
                    time.sleep(0.02)
                    if stops.is_set():
                        time.sleep(SECONDS)
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)
            except OSError:
                pass

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                near = listener.accept()[0]
            except OSError:
                return
            while True:
                try:
                    far = socket.create_connection(("localhost", port))
                    break
                except OSError:  # the store is not there yet
                    time.sleep(0.1)
            for ends in ((near, far), (far, near)):
                threading.Thread(target=forward, args=ends, name="torchtpu-test", daemon=True).start()

    with socket.create_server(("localhost", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), name="torchtpu-test", daemon=True).start()
        yield listener.getsockname()[1]


@pytest.mark.parametrize("gone", [False, True])
def test_a_rank_that_ends_is_named_where_the_store_is_slow_or_silent(gone: bool, tmp_path: Path) -> None:
    stops = threading.Event()
    ready = tmp_path / "ready"
    code = f"""
    if rank == 1:
        open({str(ready)!r}, "w").close()
    if rank == 0:
        time.sleep(3)
        raise ValueError("a mistake")
    dist.all_reduce(x)
    x.tolist()
    """

    def watch() -> None:
        while not ready.exists():
            time.sleep(0.05)
        stops.set()

    if gone:
        threading.Thread(target=watch, name="torchtpu-test", daemon=True).start()
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    with slow_way(port, stops) as slow:
        ended = run_ranks(code, 2, ports={-1: port, 1: slow})
    assert "ValueError: a mistake" in ended[0].err
    names(ended[1], 1, {0: "has ended with ValueError: a mistake"})
