"""What training steps cost under torch.compile, beside jax and eager mode.

python benchmarks/compile_cost.py                   # w2 w3 w4, 3 repeats: warm step and first step
python benchmarks/compile_cost.py w3 --repeats 1
OMP_NUM_THREADS=1 python benchmarks/compile_cost.py host    # tiny tensors: the host is all there is
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import data
import first_step
import peers
import steady_state
import torch
from torch import nn

WORKLOADS = ("w2", "w3", "w4")
# CPU time of a warm step: at most this many times that of a peer.
LIMITS = {"w2": {"jax": 1.05}, "w3": {"jax": 1.05}, "w4": {"cpu": 1.3}}
FIRST_LIMIT = 1.3  # of jax's first call

# ---- training steps


def measure(backend: str, workload: str) -> dict[str, Any]:
    """One process: the first steps, then warm ones. Libraries are imported before, those of torch.compile too."""
    if backend == "compiled":
        torch.compile(lambda: None)  # imports dynamo
    return first_step.measure(backend, workload) | steady_state.measure(backend, workload)


def train(workloads: list[str], repeats: int) -> None:
    heads = ["step / jax", "step / torch cpu", "step / tpu eager", "launches a step", "first step / jax"]
    rows = [["workload, CPU time", *heads, "main thread ms", "loss error"]]
    for workload in workloads:
        found = peers.run_interleaved(__file__, workload, ("compiled", "tpu", "cpu", "jax"), repeats)
        made, jax = found["compiled"], found["jax"]
        limits = LIMITS[workload]
        error = max(abs(t / j - 1) for t, j in zip(made["losses"], jax["losses"], strict=True))
        rows.append(
            [
                f"{workload} ({data.WORKLOADS[workload]})",
                peers.verdict(made["step_ms"] / jax["step_ms"], limits.get("jax")),
                peers.verdict(made["step_ms"] / found["cpu"]["step_ms"], limits.get("cpu")),
                peers.verdict(made["step_ms"] / found["tpu"]["step_ms"], None),
                peers.verdict(made["launches"], 1),
                peers.verdict(made["first_cpu_s"] / jax["first_cpu_s"], FIRST_LIMIT),
                f"{made['main_thread_ms']:.2f}",
                f"{error:.1e}",
            ]
        )
        print(json.dumps({workload: found}), file=sys.stderr)
    print(peers.table(rows))


# ---- the host alone

WAYS = ("tpu eager", "tpu compiled", "cpu eager", "cpu compiled")
CALLS = 50


def block(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True) for _ in range(4))
    ).to(device)


def inference(way: str) -> Callable[[], object]:
    device, _, form = way.partition(" ")
    model = block(device).eval()
    run = torch.compile(model) if form == "compiled" else model
    x = torch.ones(1, 4, 8, device=device)

    @torch.no_grad()
    def call() -> object:
        return run(x)

    return call


def training_step(way: str) -> Callable[[], object]:
    device, _, form = way.partition(" ")
    model = block(device)
    run = torch.compile(model) if form == "compiled" else model
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x = torch.ones(1, 4, 8, device=device)

    def call() -> object:
        optimizer.zero_grad()
        loss = run(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    return call


def seconds_by_way(make: Callable[[str], Callable[[], object]], rounds: int) -> dict[str, float]:
    """Way -> median CPU seconds of the calling thread per call; all ways in this process, in alternate rounds."""
    torch._dynamo.reset()
    calls = {way: make(way) for way in WAYS}
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds + 3):
        for way, call in calls.items():
            seconds = time.thread_time()
            for _ in range(CALLS):
                call()
            seconds = time.thread_time() - seconds
            torch.tpu.synchronize()
            if turn >= 3:  # the first ones compile
                taken[way].append(seconds / CALLS)
    return {way: statistics.median(seconds) for way, seconds in taken.items()}


def host(rounds: int) -> None:
    torch.set_num_threads(1)
    rows = [["us a call of 4 encoder layers", *WAYS]]
    for make in (inference, training_step):
        found = seconds_by_way(make, rounds)
        rows.append([make.__name__.replace("_", " "), *(f"{found[way] * 1e6:.0f}" for way in WAYS)])
    print(peers.table(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=[], help="w2, w3, w4, or host")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15, help="of host")
    parser.add_argument("--worker", choices=(*peers.BACKENDS, "compiled"), help=argparse.SUPPRESS)
    a = parser.parse_args()
    workloads = a.workloads or list(WORKLOADS)
    if a.worker:
        print(json.dumps(measure(a.worker, workloads[0])))
    elif workloads == ["host"]:
        host(a.rounds)
    else:
        train(workloads, a.repeats)


if __name__ == "__main__":
    main()
