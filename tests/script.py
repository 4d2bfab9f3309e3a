"""Runs a script until it ends by itself; one that hangs prints every thread's stack."""

from __future__ import annotations

import array
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import fork_server

_PRELUDE = "import faulthandler; faulthandler.enable()\n"
_SERVER = """
import os, socket, sys
sys.path.insert(0, {folder!r})
import fork_server
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
request = fork_server.serve(socket.socket(fileno={control}))
if request is not None:
    fork_server.run(request)
"""


class Ended(NamedTuple):
    status: int
    out: str
    err: str


class Script:
    """A process that runs a script, with what subprocess.Popen has of it."""

    def __init__(self, pid: int, told: int) -> None:
        self.pid = pid
        self._told = told  # where its status comes from
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its status; None while it runs."""
        return self._status if self._status is not None or not self._has_ended(0) else self._take()

    def wait(self, seconds: float | None = None) -> int:
        """Its status once it has ended; subprocess.TimeoutExpired where it does not in so many seconds."""
        if self._status is None and not self._has_ended(seconds):
            raise subprocess.TimeoutExpired("a script", seconds or 0.0)
        return self._take() if self._status is None else self._status

    def send_signal(self, number: int) -> None:
        """Sends it a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _has_ended(self, seconds: float | None) -> bool:
        return bool(select.select([self._told], [], [], seconds)[0])

    def _take(self) -> int:
        told = os.read(self._told, 64)
        os.close(self._told)
        assert told, "the server of the scripts has ended"
        self._status = int(told)
        return self._status


class _Server:
    """A process that has imported torch, of which scripts are forked."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            code = _SERVER.format(folder=str(Path(__file__).parent), control=its.fileno())
            command = [sys.executable, "-c", code]
            self.process = subprocess.Popen(
                command, env=environment, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )

    def start(self, request: Mapping[str, Any], out: int, err: int) -> Script:
        told, tells = os.pipe()
        with self._lock:
            socket.send_fds(self._control, [json.dumps(request).encode()], [out, err, tells])
            os.close(tells)
            answer = self._control.recv(8)
        assert answer, "the server of the scripts has ended"
        return Script(array.array("q", answer)[0], told)


@functools.cache
def _server(early: tuple[tuple[str, str], ...]) -> _Server:
    environment = {name: value for name, value in os.environ.items() if not fork_server.starts_as({name: value})}
    return _Server({**environment, **dict(early)})


def start_script(
    words: Sequence[str | Path],
    out: IO[str],
    err: IO[str],
    environment: Mapping[str, str],
    *,
    folder: Path | None = None,
    ignores_warnings: bool = False,
) -> Script:
    """Runs a script, or `-m` and a module, with arguments, in a process and a session of its own, without input."""
    request = {
        "words": [str(word) for word in words], "environment": dict(environment), "folder": str(folder or os.getcwd()),
        "ignores_warnings": ignores_warnings,
    }  # fmt: skip
    return _server(fork_server.starts_as(environment)).start(request, out.fileno(), err.fileno())


def run_python(
    *words: str | Path, folder: Path | None = None, environment: Mapping[str, str] | None = None, check: bool = False
) -> subprocess.CompletedProcess[str]:
    """What `python words` does: `-m` and a module, or a script, with arguments."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        status = start_script(words, out, err, environment or os.environ, folder=folder).wait()
        out.seek(0)
        err.seek(0)
        done = subprocess.CompletedProcess([str(word) for word in words], status, out.read(), err.read())
    if check:
        done.check_returncode()
    return done


def run_script(code: str, *, seconds: float = 120, **environment: str) -> Ended:
    """Runs Python code in a process of its own; what it started dies with it. Output goes through files: a forked child
    that outlives the script would keep a pipe open."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(_PRELUDE + textwrap.dedent(code))
        with Path(folder, "out").open("w") as out, Path(folder, "err").open("w") as err:
            process = start_script([path], out, err, {**os.environ, **environment})
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)  # faulthandler dumps the stacks
                status = process.wait(20)
        # On a slow machine any wait may be one that is reported.
        lines = Path(folder, "err").read_text().splitlines(keepends=True)
        errors = "".join(line for line in lines if not line.startswith("tpu: waiting for "))
        ended = Ended(status, Path(folder, "out").read_text(), errors)
        is_alone = is_gone(process.pid)
        return ended if is_alone else ended._replace(err=ended.err + "a process outlives the script")


def compiled_for(target: str, code: str, cases: dict[str, Any]) -> dict[str, Any]:
    """The JSON that the code prints last, run where libtpu starts without a chip; its arguments are the target and the
    cases as JSON."""
    from torchtpu.runtime.compile import aot

    command = [sys.executable, "-c", code, target, json.dumps(cases)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=aot.environment(), timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def is_gone(group: int) -> bool:
    """Whether the group ends by itself within 5 seconds, as multiprocessing's helpers do; it is dead afterwards."""
    try:
        for _ in range(50):
            os.killpg(group, 0)
            time.sleep(0.1)
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return True
    return False


def torchrun(script: str, *arguments: str, ranks: int = 2, restarts: int = 0, seconds: float = 500) -> Ended:
    """Runs a script beside this file or elsewhere, or Python code; no process may outlive it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(__file__).parent / script if script.endswith(".py") else Path(folder, "script.py")
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
