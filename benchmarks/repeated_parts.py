"""What steps of networks with repeated parts cost, with each part compiled once and as one program.

`tpu` compiles parts once, `whole` is the same device with TORCHTPU_CLUSTERS=0, `cpu` torch on the CPU.
One process each, interleaved.

    python benchmarks/repeated_parts.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import peers
import torch
import torch_steps
from torch import Tensor, nn
from torch.nn import functional as F

WAYS = ("tpu", "whole", "cpu")
WARM = 30
FIRST_LIMITS = {"gpt12": 0.4}
SECONDS = {"lstm": 3.0}


class LSTM(nn.Module):
    """A cell unrolled by hand."""

    def __init__(self, inputs: int = 64, width: int = 128, outputs: int = 10) -> None:
        super().__init__()
        self.x, self.r, self.o = nn.Linear(inputs, 4 * width), nn.Linear(width, 4 * width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], self.r.in_features)
        for t in range(x.shape[1]):
            i, f, g, o = (self.x(x[:, t]) + self.r(h)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return self.o(h)


def gpt(layers: int, device: str) -> Callable[[], float]:
    model = torch_steps.GPT(width=64, layers=layers).to(device)
    ids = torch.randint(0, 1000, (2, 32)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return lambda: step(optimizer, lambda: F.cross_entropy(model(ids).view(-1, 1000), ids.view(-1)))


def lstm(device: str) -> Callable[[], float]:
    model = LSTM().to(device)
    x, y = torch.randn(16, 64, 64).to(device), torch.randint(0, 10, (16,)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return lambda: step(optimizer, lambda: F.cross_entropy(model(x), y))


WORKLOADS: dict[str, tuple[str, Callable[[str], Callable[[], float]]]] = {
    "gpt12": ("GPT of 12 layers, width 64, AdamW", lambda device: gpt(12, device)),
    "gpt24": ("the same of 24 layers", lambda device: gpt(24, device)),
    "lstm": ("LSTM of 64 steps unrolled by hand, SGD", lstm),
}


def step(optimizer: torch.optim.Optimizer, loss_of: Callable[[], Tensor]) -> float:
    optimizer.zero_grad()
    loss = loss_of()
    loss.backward()
    optimizer.step()
    return loss.item()


def measure(way: str, workload: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if way != "cpu":
        import torchtpu

        torchtpu.config.set(clusters=way == "tpu")
        torch.ones(1, device="tpu").add(1).item()
    run = WORKLOADS[workload][1]("cpu" if way == "cpu" else "tpu")
    taken, losses = [], []
    for _ in range(2 + WARM):
        started = time.process_time()
        losses.append(run())
        taken.append(time.process_time() - started)
    return {
        "first_cpu_s": taken[0],
        "second_cpu_s": taken[1],
        "warm_ms": statistics.median(taken[2:]) * 1e3,
        "loss": losses[-1],
        "programs": peers.programs_compiled("cpu" if way == "cpu" else "tpu"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.worker:
        print(json.dumps(measure(a.worker, a.workloads[0])))
        return
    heads = ["first step, tpu / whole", "second step, tpu / whole", "warm step, tpu / whole", "warm step, tpu / cpu"]
    rows = [["workload", *heads, "first step, tpu", "programs, tpu and whole"]]
    for workload in a.workloads:
        found = peers.run_interleaved(__file__, workload, WAYS, a.repeats)
        tpu, whole, cpu = (found[way] for way in WAYS)
        seconds = tpu["first_cpu_s"]
        rows.append(
            [
                f"{workload} ({WORKLOADS[workload][0]})",
                peers.verdict(seconds / whole["first_cpu_s"], FIRST_LIMITS.get(workload)),
                f"{tpu['second_cpu_s'] / whole['second_cpu_s']:.2f}",
                f"{tpu['warm_ms'] / whole['warm_ms']:.2f}",
                f"{tpu['warm_ms'] / cpu['warm_ms']:.2f}",
                f"{peers.verdict(seconds, SECONDS.get(workload))} s",
                f"{tpu['programs']:.0f}, {whole['programs']:.0f}",
            ]
        )
        print(json.dumps({workload: found}), file=sys.stderr)
    print(peers.table(rows))


if __name__ == "__main__":
    main()
