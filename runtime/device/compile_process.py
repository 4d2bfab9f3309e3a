"""Compiles a program in a process of its own, for platform cpu.

XLA hands the code it generates to a few threads that all compiles of a process share, first come, first served: beside
a large program a small one waits for seconds. A process of its own has its own threads, runs at a low priority and can
be stopped.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import CancelledError

_NICENESS = 10
_POLL_SECONDS = 0.2
_LENGTH_BYTES = 8
_PR_SET_PDEATHSIG = 1  # of prctl(2)


def compile_apart(text: str, device: int, num_devices: int, options: bytes, is_wanted: Callable[[], bool]) -> bytes:
    """The executable of a StableHLO module for one of so many devices, compiled with these options, both serialized.

    Raises OSError or RuntimeError where no such process can be had, or where it fails, and CancelledError as soon as
    the executable is not wanted any more.
    """
    if not sys.executable:
        raise RuntimeError("the interpreter has no program")
    command = [sys.executable, "-P", __file__, str(device), str(num_devices)]
    pipe = subprocess.PIPE
    # A session of its own: what the terminal sends is for the user's process.
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True) as child:
        given: bytes | None = len(options).to_bytes(_LENGTH_BYTES) + options + text.encode()
        try:
            while True:
                try:
                    made, _ = child.communicate(given, timeout=_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    given = None
                    if not is_wanted():
                        raise CancelledError from None
        finally:
            child.kill()
    if child.returncode or not made:
        raise RuntimeError(f"a process that compiles ended with status {child.returncode}")
    return made


def _main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(_NICENESS)
    device, num_devices = map(int, sys.argv[1:])
    given = sys.stdin.buffer.read()
    begin = _LENGTH_BYTES + int.from_bytes(given[:_LENGTH_BYTES])
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

    from jaxlib import xla_client

    client = xla_client.make_cpu_client(asynchronous=False, num_devices=num_devices)
    options = xla_client.CompileOptions.ParseFromString(given[_LENGTH_BYTES:begin])
    home = xla_client.DeviceList((client.local_devices()[device],))
    executable = client.compile_and_load(given[begin:].decode(), home, options)
    sys.stdout.buffer.write(executable.serialize())


if __name__ == "__main__":
    _main()
