"""CPU time of a warm step of `tpu`, everything included, beside `jax` (jit) and torch CPU.

Run it from anywhere:

    python benchmarks/steady_state.py                  # w2 w3 w8, 3 repeats
    python benchmarks/steady_state.py w3 --repeats 5
    python benchmarks/steady_state.py w2 --reads       # the loss of each step is read
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import data
import peers

# Ratios that each workload may have to a peer: CPU time per step, and peak bytes to jax.
LIMITS: dict[str, dict[str, float]] = {
    "w2": {"cpu": 0.9}, "w3": {"jax": 1.10, "peak": 1.1}, "w4": {}, "w8": {"cpu": 0.9},
}  # fmt: skip


def measure(backend: str, workload: str, seconds: float = 4.0, *, reads: bool = False) -> dict[str, Any]:
    """Medians over rounds of up to 50 steps whose loss is read at the end of the round, or of each step where it
    `reads`, once the step has settled."""
    step, read = peers.build_step(backend, workload)
    at_start = peers.programs_compiled(backend)
    losses = [read(step(i)) for i in range(5)]
    early = peers.programs_compiled(backend)
    took = time.process_time()
    losses += [read(step(i)) for i in range(5, 8)]
    took = (time.process_time() - took) / 3
    warm = peers.programs_compiled(backend)
    count = max(2, min(50, int(seconds / 10 / max(took, 1e-5))))
    i = settle(backend, step, read, 8, 15 * seconds, 1 if reads else 20)
    total, main = [], []
    stop = time.perf_counter() + 2 * seconds
    while len(total) < 9 and (time.perf_counter() < stop or len(total) < 3):
        process, thread = time.process_time(), 0.0
        for _ in range(count):
            begun = time.thread_time()
            loss = step(i)
            thread += time.thread_time() - begun
            i += 1
            if reads:
                read(loss)
        last = read(loss)
        total.append((time.process_time() - process) / count)
        main.append(thread / count)
    return {
        "step_ms": statistics.median(total) * 1e3,
        "main_thread_ms": statistics.median(main) * 1e3,
        "compiled": early - at_start,
        "compiled_later": warm - early,
        "compiled_unread": peers.programs_compiled(backend) - warm,
        "losses": losses,
        "last_loss": last,
        **launched(backend, step, read, i),
    }


def settle(
    backend: str, step: Callable[[int], Any], read: Callable[[Any], float], i: int, most: float, each: int
) -> int:
    """Runs steps, for so many seconds at most, until some have launched nothing of the first tier; the next step. The
    loss of each of so many is read."""
    stop, quick = time.perf_counter() + most, -1
    while peers.quick_launches(backend) != quick and time.perf_counter() < stop:
        quick = peers.quick_launches(backend)
        for _ in range(20):
            loss = step(i)
            i += 1
            if i % each == 0:
                read(loss)
        read(loss)
    return i


def launched(backend: str, step: Callable[[int], Any], read: Callable[[Any], float], i: int) -> dict[str, Any]:
    """Of 7 steps that are each read: ops, launches, wall time that the programs ran (ms, the least), their bytes."""
    if backend == "cpu":
        return {"ops": 0, "launches": 0, "program_ms": 0.0, "peak_mb": 0.0}
    if backend == "jax":
        times = []
        for turn in range(7):
            begun = time.perf_counter()
            read(step(i + turn))
            times.append(time.perf_counter() - begun)
        import jax_steps

        return {
            "ops": 0, "launches": 1, "program_ms": min(times) * 1e3, "peak_mb": jax_steps.peak_bytes(step) / 1e6,
        }  # fmt: skip
    from torchtpu import config, metrics

    times, peaks = [], []
    for turn in range(7):
        metrics.reset()
        with config.using(log=("launch",)), contextlib.redirect_stderr(io.StringIO()) as log:
            read(step(i + turn))
        launches = re.findall(r"run ([\d.]+) ms \| peak ([\d.]+) (\w+)", log.getvalue())
        times.append(sum(float(ms) for ms, _, _ in launches))
        peaks += [float(size) * {"B": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}[unit] for _, size, unit in launches]
    counts = metrics.snapshot()
    return {
        "ops": counts["ops_recorded"], "launches": counts["launches"], "program_ms": min(times), "peak_mb": max(peaks),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=[])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--reads", action="store_true", help="the loss of each step")
    parser.add_argument("--worker", choices=peers.BACKENDS, help=argparse.SUPPRESS)
    a = parser.parse_args()
    workloads = a.workloads or list(data.WORKLOADS)
    if a.worker:
        print(json.dumps(measure(a.worker, workloads[0], reads=a.reads)))
        return
    heads = ["CPU / jax", "CPU / torch cpu", "programs' run time / jax", "peak bytes / jax", "main thread ms"]
    rows = [["workload", *heads, "compiled, after step 4, where unread", "loss error"]]
    for workload in workloads:
        words = ["--reads"] if a.reads else []
        found = peers.run_interleaved(__file__, workload, peers.BACKENDS, a.repeats, *words)
        tpu, jax, cpu = (found[backend] for backend in ("tpu", "jax", "cpu"))
        limits = LIMITS[workload]
        error = max(abs(t / j - 1) for t, j in zip(tpu["losses"], jax["losses"], strict=True))
        rows.append(
            [
                f"{workload} ({data.WORKLOADS[workload]})",
                peers.verdict(tpu["step_ms"] / jax["step_ms"], limits.get("jax")),
                peers.verdict(tpu["step_ms"] / cpu["step_ms"], limits.get("cpu")),
                peers.verdict(tpu["program_ms"] / jax["program_ms"], 1.05),
                peers.verdict(tpu["peak_mb"] / jax["peak_mb"], limits.get("peak")),
                f"{tpu['main_thread_ms']:.2f}",
                f"{tpu['compiled']:.0f}, {tpu['compiled_later']:.0f}, {tpu['compiled_unread']:.0f}",
                f"{error:.1e}",
            ]
        )
        print(json.dumps({workload: found}), file=sys.stderr)
    print(peers.table(rows))


if __name__ == "__main__":
    main()
