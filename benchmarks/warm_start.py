"""What the first step costs in a fresh process whose programs an earlier process has compiled.

"Beyond a step" is what it costs beside the second step of the same process: being ready, without the computing.

Each repeat starts with an empty cache of its own: one process fills it (cold), the next one finds it filled (warm).
jax has its own persistent cache, made to keep everything.

    python benchmarks/warm_start.py w3 w4
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import data
import peers

BACKENDS = ("tpu", "jax")
LIMITS = {"tpu": 0.15}


def measure(backend: str, workload: str, started: float) -> dict[str, Any]:
    """One process: `started` is when it was, by the clock of `time.time()`."""
    step, read = peers.build_step(backend, workload)
    cpu = time.process_time()
    loss = read(step(0))
    found = {"first_cpu_s": time.process_time() - cpu, "start_to_result_s": time.time() - started, "loss": loss}
    cpu = time.process_time()
    read(step(1))
    found["beyond_a_step_s"] = found["first_cpu_s"] - (time.process_time() - cpu)
    if backend == "tpu":
        from torchtpu import metrics

        counts = metrics.snapshot()
        found |= {name: counts[name] for name in ("programs_compiled", "fragment_traces", "load_ms", "lower_ms")}
    return found


def run(backend: str, workload: str, folder: str) -> dict[str, Any]:
    cache = {"TORCHTPU_CACHE": "on", "TORCHTPU_CACHE_DIR": folder, "JAX_COMPILATION_CACHE_DIR": folder}
    cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    environment = {**os.environ, **peers.ONE_THREAD, **cache, "JAX_PLATFORMS": "cpu", "TORCHTPU_PLATFORM": "cpu"}
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1" if backend == "tpu" else "0"
    command = [sys.executable, __file__, "--worker", backend, workload, "--started", str(time.time())]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["w3", "w4"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", choices=BACKENDS, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.worker:
        print(json.dumps(measure(a.worker, a.workloads[0], a.started)))
        return
    heads = ["first step, warm / cold (CPU s)", "cold", "warm", "warm, beyond a step"]
    heads += ["start to result, cold", "warm", "compiled, traced"]
    rows = [["workload", "backend", *heads]]
    for workload in a.workloads:
        for backend in BACKENDS:
            runs: list[tuple[dict[str, Any], dict[str, Any]]] = []
            for _ in range(a.repeats):
                with tempfile.TemporaryDirectory() as folder:
                    runs.append((run(backend, workload, folder), run(backend, workload, folder)))
            print(json.dumps({f"{workload} {backend}": runs}), file=sys.stderr)
            rows.append([f"{workload} ({data.WORKLOADS[workload]})", backend, *_cells(backend, runs)])
    print(peers.table(rows))


def _cells(backend: str, runs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    cold, warm = ({name: statistics.median(r[i][name] for r in runs) for name in runs[0][0]} for i in (0, 1))
    return [
        peers.verdict(warm["first_cpu_s"] / cold["first_cpu_s"], LIMITS.get(backend)),
        *(f"{found['first_cpu_s']:.2f} s" for found in (cold, warm)),
        f"{warm['beyond_a_step_s']:.2f} s",
        *(f"{found['start_to_result_s']:.1f} s" for found in (cold, warm)),
        f"{warm['programs_compiled']:.0f}, {warm['fragment_traces']:.0f}" if backend == "tpu" else "-",
    ]


if __name__ == "__main__":
    main()
