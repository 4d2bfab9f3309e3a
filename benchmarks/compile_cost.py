"""In: a small model, plain and under torch.compile. Out: what one step costs the host, per way of running it.

Every tensor is tiny, so that the host is all there is.  All ways run in one process, in alternate rounds.

    OMP_NUM_THREADS=1 python benchmarks/compile_cost.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import peers
import torch
from torch import nn

WAYS = ("tpu eager", "tpu compiled", "cpu eager", "cpu compiled")
CALLS = 50


def block(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True) for _ in range(4))
    ).to(device)


def infer(way: str) -> Callable[[], object]:
    device, _, form = way.partition(" ")
    model = block(device).eval()
    run = torch.compile(model) if form == "compiled" else model
    x = torch.ones(1, 4, 8, device=device)

    @torch.no_grad()
    def call() -> object:
        return run(x)

    return call


def train(way: str) -> Callable[[], object]:
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


def measure(make: Callable[[str], Callable[[], object]], rounds: int) -> dict[str, float]:
    """Way -> median CPU seconds of the calling thread per call."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    a = parser.parse_args()
    torch.set_num_threads(1)
    rows = [["us a call of 4 encoder layers", *WAYS]]
    for name, make in (("inference", infer), ("training step", train)):
        found = measure(make, a.rounds)
        rows.append([name, *(f"{found[way] * 1e6:.0f}" for way in WAYS)])
    print(peers.table(rows))


if __name__ == "__main__":
    main()
