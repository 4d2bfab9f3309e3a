"""What a step on a doubled batch costs under a memory limit of 60 % of what it needs as one program.

`whole` is one program without a limit, `free` has its parts compiled once, `limited` is the same under the limit.
One process each. Resident memory is looked at every two milliseconds, compiling included; what was there once a small
model had been trained and let go is taken off: the interpreter, its libraries and the compiler. Loaded programs count
here, though the limit does not count them: `kept` is what is left of all when the training is over.

    python benchmarks/memory_limit.py
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import peers
import torch
import torch_steps
from resident import Largest, Peak, resident_bytes

WAYS = ("whole", "free", "limited")
STEPS, WARM = 24, 8
LAUNCHES = 100  # more than are taken to be in flight
SHARE, RESIDENT, SLOWDOWN, LOSS = 0.6, 1.1, 2.0, 1e-4  # of what is needed; limits


def resident_when_idle() -> int:
    """What is resident once everything that nobody holds any more is gone: launches that have run hold their inputs."""
    gc.collect()
    for _ in range(LAUNCHES):
        torch.ones(4, device="tpu").add(1).sum().item()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()


def measure(way: str, workload: str, limit: int) -> dict[str, Any]:
    import torchtpu
    from torchtpu import config, metrics, startup

    torch.set_num_threads(1)
    config.set(clusters=way != "whole", memory_limit=limit)
    largest = Largest()
    step = torch_steps.build("w2", "tpu")
    for i in range(WARM):
        step(i).item()
    del step
    before = resident_when_idle()
    startup.observe(largest)
    peak, taken = Peak(), []
    step = torch_steps.build(workload, "tpu", copies=2)
    with torchtpu.explain() as explained:
        losses = [step(i).item() for i in range(WARM)]
    for i in range(WARM, STEPS):
        started = time.process_time()
        losses.append(step(i).item())
        taken.append(time.process_time() - started)
    peak.close()
    counts = metrics.snapshot()
    del step
    kept = resident_when_idle() - before
    actions: dict[str, int] = {}
    for row in explained.data["room"]:
        actions[row["action"]] = actions.get(row["action"], 0) + 1
    return {
        "losses": losses,
        "step_ms": statistics.median(taken) * 1e3,
        "needed": largest.bytes,
        "held": peak.bytes - before,
        "kept": kept,
        "actions": actions,
        **{name: counts[name] for name in ("programs_compiled", "memory_waits", "memory_collections")},
        **{name: counts[name] for name in ("regions_split", "ops_repeated", "out_of_memory")},
    }


def run(way: str, workload: str, limit: int) -> dict[str, Any]:
    environment = {**os.environ, **peers.ONE_THREAD, "TORCHTPU_PLATFORM": "cpu", "TORCHTPU_CACHE": "off"}
    command = [sys.executable, __file__, "--worker", way, "--limit", str(limit), workload]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="w3")
    parser.add_argument("--limit", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.worker:
        print(json.dumps(measure(a.worker, a.workload, a.limit)))
        return
    whole = run("whole", a.workload, 0)
    limit = int(SHARE * whole["needed"])
    found = {"whole": whole, "free": run("free", a.workload, 0), "limited": run("limited", a.workload, limit)}
    print(json.dumps({a.workload: found, "limit": limit}), file=sys.stderr)
    heads = ["way", "CPU of a step / least without a limit", "resident / limit", "kept / limit", "loss error"]
    least = min(found[way]["step_ms"] for way in ("whole", "free"))
    rows = [[*heads, "done for room"]]
    for way, got in found.items():
        is_limited = way == "limited"
        error = max(abs(x / y - 1) for x, y in zip(got["losses"], whole["losses"], strict=True))
        rows.append(
            [
                way,
                peers.verdict(got["step_ms"] / least, SLOWDOWN if is_limited else None),
                peers.verdict(got["held"] / limit, RESIDENT if is_limited else None),
                f"{got['kept'] / limit:.2f}",
                f"{error:.1e}" + (" (OVER)" if error > LOSS else ""),
                ", ".join(f"{action} {count}" for action, count in got["actions"].items()) or "nothing",
            ]
        )
    print(peers.table(rows))


if __name__ == "__main__":
    main()
