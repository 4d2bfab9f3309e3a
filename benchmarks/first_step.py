"""CPU seconds of the very first step of `tpu`, without a cache, beside `jax`'s first call.

Run it from anywhere:

    python benchmarks/first_step.py
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import data
import peers

LIMITS = {"w3": 1.3}


def measure(backend: str, workload: str) -> dict[str, Any]:
    step, read = peers.build_step(backend, workload)
    wall, cpu = time.perf_counter(), peers.children_time()
    loss = read(step(0))
    first = {"first_cpu_s": peers.children_time() - cpu, "first_wall_s": time.perf_counter() - wall, "loss": loss}
    cpu = peers.children_time()
    read(step(1))
    return first | {"second_cpu_s": peers.children_time() - cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=[])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", choices=peers.BACKENDS, help=argparse.SUPPRESS)
    a = parser.parse_args()
    workloads = a.workloads or list(data.WORKLOADS)
    if a.worker:
        print(json.dumps(measure(a.worker, workloads[0])))
        return
    rows = [["workload", "first step, tpu / jax (CPU s)", "first two steps, tpu / jax", "tpu", "jax"]]
    for workload in workloads:
        found = peers.run_interleaved(__file__, workload, ("tpu", "jax"), a.repeats)
        tpu, jax = found["tpu"], found["jax"]
        both = [r["first_cpu_s"] + r["second_cpu_s"] for r in (tpu, jax)]
        rows.append(
            [
                f"{workload} ({data.WORKLOADS[workload]})",
                peers.verdict(tpu["first_cpu_s"] / jax["first_cpu_s"], LIMITS.get(workload)),
                f"{both[0] / both[1]:.2f}",
                f"{tpu['first_cpu_s']:.2f} s",
                f"{jax['first_cpu_s']:.2f} s",
            ]
        )
        print(json.dumps({workload: found}), file=sys.stderr)
    print(peers.table(rows))


if __name__ == "__main__":
    main()
