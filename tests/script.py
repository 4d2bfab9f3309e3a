"""Runs a script until it ends by itself; one that hangs prints every thread's stack."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any, NamedTuple

_PRELUDE = "import faulthandler; faulthandler.enable()\n"


class Ended(NamedTuple):
    status: int
    out: str
    err: str


def _take_interrupts() -> None:
    """SIGINT ends a script even where it does not end the tests, as in a background job of a shell."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_script(code: str, *, seconds: float = 120, **environment: str) -> Ended:
    """Runs Python code in a process of its own; what it started dies with it. Output goes through files: a forked child
    that outlives the script would keep a pipe open."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(_PRELUDE + textwrap.dedent(code))
        with Path(folder, "out").open("w") as out, Path(folder, "err").open("w") as err:
            process = subprocess.Popen(
                [sys.executable, str(path)],
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment},
                start_new_session=True,
                preexec_fn=_take_interrupts,  # noqa: PLW1509 -- the tests' other threads hold no lock that it takes
            )
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)  # faulthandler dumps the stacks
                status = process.wait(20)
        # On a slow machine any wait may be one that is reported.
        lines = Path(folder, "err").read_text().splitlines(keepends=True)
        err = "".join(line for line in lines if not line.startswith("tpu: waiting for "))
        ended = Ended(status, Path(folder, "out").read_text(), err)
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
