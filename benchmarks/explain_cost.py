"""In: a training step of tiny tensors. Out: what `torchtpu.explain` costs the host while it is on, and once it was on.

OMP_NUM_THREADS=1 python benchmarks/explain_cost.py
OMP_NUM_THREADS=1 python benchmarks/explain_cost.py --instructions     # per recorded op; needs valgrind
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import peers
import torch
from torch import nn

import torchtpu

OVERHEAD = 1.05  # with it on
STEPS = 50


def training_step() -> Callable[[], object]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(64, 64, device="tpu")

    def step() -> object:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def seconds(step: Callable[[], object]) -> float:
    """CPU seconds of the process per step."""
    begun = time.process_time()
    for _ in range(STEPS):
        step()
    torch.tpu.synchronize()
    return (time.process_time() - begun) / STEPS


def overhead(rounds: int) -> list[str]:
    step = training_step()
    for _ in range(3):
        seconds(step)
    off, on = [], []
    for _ in range(rounds):
        off.append(seconds(step))
        with torchtpu.explain():
            on.append(seconds(step))
    ratio = statistics.median(on) / statistics.median(off)
    return ["explain on / off, CPU of a step", peers.verdict(ratio, OVERHEAD)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    a = parser.parse_args()
    torch.set_num_threads(1)
    print(peers.table([["what", "ratio"], overhead(a.rounds)]))


if __name__ == "__main__":
    main()
