"""In: training workloads. Out: CPU time of a warm step of `tpu`, everything included, beside `jax` (jit) and torch CPU.

Run it from anywhere:

    python benchmarks/steady_state.py                  # w2 w3 w8, 3 repeats
    python benchmarks/steady_state.py w3 --repeats 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import data
import peers

# Ratio of CPU time per step that each workload may have to a peer.
LIMITS = {"w2": {"cpu": 0.9}, "w3": {"jax": 1.10}, "w8": {"cpu": 0.9}}


def measure(backend: str, workload: str, seconds: float = 4.0) -> dict[str, Any]:
    """Medians over rounds of up to 50 steps whose loss is read at the end of the round."""
    step, read = peers.build_step(backend, workload)
    at_start = peers.programs_compiled(backend)
    losses = [read(step(i)) for i in range(5)]
    early = peers.programs_compiled(backend)
    took = time.process_time()
    losses += [read(step(i)) for i in range(5, 8)]
    took = (time.process_time() - took) / 3
    count, i = max(2, min(50, int(seconds / 10 / max(took, 1e-5)))), 8
    total, main = [], []
    stop = time.perf_counter() + 2 * seconds
    while len(total) < 9 and (time.perf_counter() < stop or len(total) < 3):
        process, thread = time.process_time(), 0.0
        for _ in range(count):
            begun = time.thread_time()
            loss = step(i)
            thread += time.thread_time() - begun
            i += 1
        last = read(loss)
        total.append((time.process_time() - process) / count)
        main.append(thread / count)
    return {
        "step_ms": statistics.median(total) * 1e3,
        "main_thread_ms": statistics.median(main) * 1e3,
        "compiled": early - at_start,
        "compiled_later": peers.programs_compiled(backend) - early,
        "ops": ops_per_step(backend, step, read, i),
        "peak_mb": peak_megabytes(backend),
        "losses": losses,
        "last_loss": last,
    }


def ops_per_step(backend: str, step: Any, read: Any, i: int) -> int:
    if backend != "tpu":
        return 0
    from torchtpu import metrics

    metrics.reset()
    read(step(i))
    return int(metrics.snapshot()["ops_recorded"])


def peak_megabytes(backend: str) -> float:
    if backend != "tpu":
        return 0.0
    import torch

    return float(torch.tpu.max_memory_allocated()) / 1e6


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
    rows = [["workload", "tpu / jax", "tpu / cpu", "main thread us/op", "compiled, after step 4", "largest loss error"]]
    for workload in workloads:
        found = peers.run_interleaved(__file__, workload, peers.BACKENDS, a.repeats)
        tpu = found["tpu"]
        ratios = {
            p: peers.verdict(tpu["step_ms"] / found[p]["step_ms"], LIMITS[workload].get(p)) for p in ("jax", "cpu")
        }
        error = max(abs(t / j - 1) for t, j in zip(tpu["losses"], found["jax"]["losses"], strict=True))
        rows.append(
            [
                f"{workload} ({data.WORKLOADS[workload]})",
                ratios["jax"],
                ratios["cpu"],
                f"{tpu['main_thread_ms'] * 1e3 / max(tpu['ops'], 1):.2f}",
                f"{tpu['compiled']:.0f}, {tpu['compiled_later']:.0f}",
                f"{error:.1e}",
            ]
        )
        print(json.dumps({workload: found}), file=sys.stderr)
    print(peers.table(rows))


if __name__ == "__main__":
    main()
