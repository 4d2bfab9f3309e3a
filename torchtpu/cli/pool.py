"""Worker processes that compile recorded programs, and tell what became of each.

A compiler that crashes takes its process along and no other: the program counts as failed and a new process goes on.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple


class Completed(NamedTuple):
    """What became of a program; `note` is what the cache notes of it, its cost included where the compiler says one."""

    outcome: str  # "hit", "compiled" or "failed"
    digest: str = ""
    milliseconds: float = 0.0
    nbytes: int = 0
    is_stored: bool = False
    error: str = ""
    note: dict[str, Any] = {}  # noqa: RUF012 - never changed


Answer = Callable[[str, Completed], None]
READY = "ready\n"  # a worker's first line


class Pool:
    """Up to `jobs` workers for one target ("": this machine); `answer(identity, done)` is called from their threads.

    `close` waits for what was submitted, `kill` does not.
    """

    def __init__(self, target: str, jobs: int, environment: Mapping[str, str], answer: Answer) -> None:
        self._command = [sys.executable, "-m", "torchtpu.cli.worker", *([target] if target else [])]
        self._environment = dict(environment)
        self._answer = answer
        self._jobs: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._most = jobs
        self._lock = threading.Lock()  # guards what follows
        self._processes: set[subprocess.Popen[str]] = set()
        self._problem = ""  # why no worker can be started
        self._threads: list[threading.Thread] = []

    def submit(self, identity: str, recorded: Any) -> None:
        """Hands over a program as a manifest's line holds it."""
        self._jobs.put((identity, recorded))
        if len(self._threads) < self._most:
            thread = threading.Thread(target=self._work, name=f"torchtpu-warm-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self, tick: Callable[[], None]) -> None:
        """Returns when everything submitted is answered; calls `tick` now and then meanwhile."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            while thread.is_alive():
                thread.join(0.2)  # in slices: Ctrl-C is heard
                tick()

    def kill(self) -> None:
        """Ends the workers; what is not answered counts as failed."""
        with self._lock:
            self._problem = "stopped before it was compiled"
            for process in self._processes:
                process.kill()

    def _work(self) -> None:
        with tempfile.TemporaryDirectory(prefix="torchtpu-warm-") as folder:
            log = Path(folder, "stderr")
            process: subprocess.Popen[str] | None = None
            while (job := self._jobs.get()) is not None:
                identity, recorded = job
                process = process or self._start(log)
                done = None if process is None else _ask(process, recorded)
                if done is None:
                    done = Completed("failed", error=self._problem if process is None else _why(process, log))
                    process = None
                self._answer(identity, done)
            if process is not None:
                self._end(process)

    def _start(self, log: Path) -> subprocess.Popen[str] | None:
        """A worker that is ready; None where none can be, which is not tried again."""
        with self._lock, log.open("w") as stderr:
            if self._problem:
                return None
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=self._environment,
            )
            self._processes.add(process)
        assert process.stdout is not None
        if process.stdout.readline() == READY:
            return process
        with self._lock:
            self._problem = self._problem or _why(process, log)
        return None

    def _end(self, process: subprocess.Popen[str]) -> None:
        process.communicate()
        with self._lock:
            self._processes.discard(process)


def _ask(process: subprocess.Popen[str], recorded: Any) -> Completed | None:
    """The worker's answer; None where it died."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(recorded) + "\n")
        process.stdin.flush()
        return Completed(**json.loads(process.stdout.readline()))
    except (OSError, ValueError):
        return None


def _why(process: subprocess.Popen[str], log: Path) -> str:
    """Why a worker died: the signal or status it ended with, and the last line it wrote."""
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=10)
    process.kill()
    process.communicate()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"the compiling process ended with {process.returncode}: {lines[-1] if lines else 'no message'}"
