"""In: one line of a script, in a fresh process. Out: its CPU time and its peak memory beyond those of `import torch`.

The line prints `torch.ones(2, device="tpu") + 1`; peers are torch on the CPU, which prints the same, and jax, beyond
`import jax`.  Cold is an empty cache of compiled programs, warm the one that the run before has filled.

    python benchmarks/first_result.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from typing import NamedTuple

import peers


class Script(NamedTuple):
    """A script, and what it is measured beyond."""

    text: str
    base: str
    is_on_tpu: bool = False


SCRIPTS = {
    "tpu": Script("import torch; print(torch.ones(2, device='tpu') + 1)", "import torch", True),
    "cpu": Script("import torch; print(torch.ones(2) + 1)", "import torch"),
    "jax": Script("import jax.numpy as jnp; print(jnp.ones(2) + 1)", "import jax.numpy"),
}
LIMITS = {"cold": 0.6, "warm": 0.25}  # CPU seconds
MOST_MEGABYTES = 90.0


class Taken(NamedTuple):
    """What a process took."""

    seconds: float
    megabytes: float

    def __sub__(self, base: Taken) -> Taken:
        return Taken(self.seconds - base.seconds, self.megabytes - base.megabytes)


def run(text: str, cache: str, *, is_on_tpu: bool) -> Taken:
    environment = {**os.environ, **peers.ONE_THREAD, "JAX_PLATFORMS": "cpu", "TORCHTPU_PLATFORM": "cpu"}
    environment |= {"TORCHTPU_CACHE_DIR": cache, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if is_on_tpu else "0"}
    process = subprocess.Popen([sys.executable, "-c", text], env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{text} failed")
    return Taken(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    found: dict[str, list[Taken]] = defaultdict(list)
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            for name, script in SCRIPTS.items():
                base = run(script.base, cache, is_on_tpu=False)
                for state in ("cold", "warm") if script.is_on_tpu else ("",):
                    taken = run(script.text, cache, is_on_tpu=script.is_on_tpu)
                    found[f"{name}, {state}" if state else name].append(taken - base)
    rows = [["process", "CPU s beyond the import", "limit", "peak MB beyond the import", "limit"]]
    for name, taken in found.items():
        state = name.rpartition(" ")[2]
        seconds = statistics.median(t.seconds for t in taken)
        megabytes = statistics.median(t.megabytes for t in taken)
        most = f"{MOST_MEGABYTES:.0f}" if state == "warm" else ""
        rows.append([name, f"{seconds:.2f}", str(LIMITS.get(state, "")), f"{megabytes:.0f}", most])
    print(peers.table(rows))


if __name__ == "__main__":
    main()
