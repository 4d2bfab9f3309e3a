"""In: a training step of tiny tensors. Out: what `torchtpu.explain` costs the host while it is on, and once it was on.

OMP_NUM_THREADS=1 python benchmarks/explain_cost.py
OMP_NUM_THREADS=1 python benchmarks/explain_cost.py --instructions     # per recorded op; needs valgrind
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import peers
import torch
from torch import nn

import torchtpu

OVERHEAD = 1.05  # with it on
CHANGE = 1.01  # of the instructions per recorded op, once it was on
STEPS = 50
OPS = 2000


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


def chain(blocks: int, ops: int) -> None:
    """Records ops, known ones, after `blocks` of explain; no launch is in what two of these differ by."""
    x = torch.ones(1, device="tpu")
    for _ in range(blocks):
        with torchtpu.explain():
            x.relu()
    for count in (64, 64, 64, ops):
        with torch.no_grad():
            for _ in range(count):
                x.relu()
        torch.tpu.synchronize()


def instructions(blocks: int, ops: int) -> int:
    """What a process of its own executes in the extension's code."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "callgrind")
        valgrind = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", "--quiet"]
        command = [sys.executable, __file__, "--chain", str(blocks), str(ops)]
        subprocess.run([*valgrind, *command], check=True, stdout=subprocess.DEVNULL)
        command = [shutil.which("callgrind_annotate") or "", "--threshold=100", "--show-percs=no", str(out)]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line for line in shown.splitlines() if "_C.cpython" in line]
    return sum(int(found[1].replace(",", "")) for line in lines if (found := re.match(r"\s*([\d,]+)", line)))


def per_op(blocks: int) -> float:
    return (instructions(blocks, 2 * OPS) - instructions(blocks, OPS)) / OPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--instructions", action="store_true")
    parser.add_argument("--chain", nargs=2, type=int, help=argparse.SUPPRESS)
    a = parser.parse_args()
    torch.set_num_threads(1)
    if a.chain:
        chain(*a.chain)
    elif a.instructions:
        before, after = per_op(0), per_op(1)
        rows = [["instructions of the recorder per op", "never on", "once on", "ratio"]]
        print(peers.table([*rows, ["relu", f"{before:.0f}", f"{after:.0f}", peers.verdict(after / before, CHANGE)]]))
    else:
        print(peers.table([["what", "ratio"], overhead(a.rounds)]))


if __name__ == "__main__":
    main()
