"""In: a training step on a doubled batch. Out: its cost under a memory limit of 60 % of what it needs as one program.

`whole` is one program without a limit, `free` has its parts compiled once, `limited` is the same under the limit.
One process each; resident memory is looked at every two milliseconds, and what is left after the training is taken off:
the interpreter, its libraries and the compiled programs.

    python benchmarks/memory_limit.py
"""

from __future__ import annotations

import argparse
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
SHARE, RESIDENT, SLOWDOWN, LOSS = 0.6, 1.1, 2.0, 1e-4  # of what is needed; limits


def measure(way: str, workload: str, limit: int) -> dict[str, Any]:
    import torchtpu
    from torchtpu import config, metrics, startup

    torch.set_num_threads(1)
    config.set(clusters=way != "whole", memory_limit=limit)
    largest = Largest()
    torch.ones(4, device="tpu").add(1).sum().item()
    startup.observe(largest)
    before = resident_bytes()
    step = torch_steps.build(workload, "tpu", copies=2)
    with torchtpu.explain() as explained:
        losses = [step(i).item() for i in range(WARM)]
    peak, taken = Peak(), []
    for i in range(WARM, STEPS):
        started = time.process_time()
        losses.append(step(i).item())
        taken.append(time.process_time() - started)
    peak.close()
    del step
    gc.collect()
    torch.tpu.synchronize()
    gc.collect()
    counts = metrics.snapshot()
    actions: dict[str, int] = {}
    for row in explained.data["room"]:
        actions[row["action"]] = actions.get(row["action"], 0) + 1
    return {
        "losses": losses,
        "step_ms": statistics.median(taken) * 1e3,
        "needed": largest.bytes,
        "held": peak.bytes - resident_bytes(),
        "held_with_code": peak.bytes - before,
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
    heads = ["way", "CPU of a step / least without a limit", "resident / limit", "loss error", "done for room"]
    least = min(found[way]["step_ms"] for way in ("whole", "free"))
    rows = [heads]
    for way, got in found.items():
        is_limited = way == "limited"
        error = max(abs(x / y - 1) for x, y in zip(got["losses"], whole["losses"], strict=True))
        rows.append(
            [
                way,
                peers.verdict(got["step_ms"] / least, SLOWDOWN if is_limited else None),
                peers.verdict(got["held"] / limit, RESIDENT if is_limited else None),
                f"{error:.1e}" + (" (OVER)" if error > LOSS else ""),
                ", ".join(f"{action} {count}" for action, count in got["actions"].items()) or "nothing",
            ]
        )
    print(peers.table(rows))


if __name__ == "__main__":
    main()
