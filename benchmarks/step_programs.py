"""How many programs of a whole step a training script makes for a TPU, by how often it reads the loss.

The script trains GPT-2-small on a new batch each step; nothing is compiled and no TPU is needed. Programs are told
apart by what their executables are kept under in the cache.

    python benchmarks/step_programs.py
    python benchmarks/step_programs.py every third --chip v6e --layers 4
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import peers
import torch
import torch_steps
from torch.nn import functional as F

STEPS = 12
READS: dict[str, Callable[[int], bool]] = {
    "never": lambda i: False,
    "every": lambda i: True,
    "second": lambda i: i % 2 == 1,
    "third": lambda i: i % 3 == 2,
    "first every, then third": lambda i: i < 4 or i % 3 == 0,
}
_LARGE = 0.25  # of the ops of the largest program: the first step makes the state of the optimizer, too


def train(reads: str, layers: int) -> None:
    """Records the steps."""
    model = torch_steps.GPT(50304, 768, 12, layers, 1024).to(torch.bfloat16).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    for i in range(STEPS):
        tokens = torch.randint(50304, (4, 1024)).to("tpu")
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if READS[reads](i):
            loss.item()
    torch.tpu.synchronize()


def programs(folder: str, target: str) -> list[int]:
    """The ops of each different program that was recorded."""
    from torchtpu.cli.worker import WarmWorker
    from torchtpu.compiler_cache import NullStore
    from torchtpu.runtime.ir.manifest import decode_recorded

    worker = WarmWorker(target, NullStore("nothing is compiled"))
    lines = [json.loads(line) for file in Path(folder).iterdir() for line in file.read_text().splitlines()]
    found = [decode_recorded(line["program"]).program for line in lines if "program" in line]
    return list({worker.plan(program).key.digest: len(program.ops) for program in found}.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reads", nargs="*", choices=[[], *READS])
    parser.add_argument("--chip", default="v5e")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--record", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.record:
        train(given.record, given.layers)
        return
    rows = [["the loss is read", "programs of a whole step", "all programs"]]
    for reads in given.reads or READS:
        with tempfile.TemporaryDirectory() as folder:
            knobs = {"TORCHTPU_TARGET": given.chip, "TORCHTPU_READS": "standin", "TORCHTPU_JOURNAL": folder}
            words = [__file__, "--record", reads, "--layers", str(given.layers)]
            subprocess.run([sys.executable, *words], env={**os.environ, **knobs}, check=True)
            found = programs(folder, given.chip)
        rows.append([reads, str(sum(ops >= _LARGE * max(found) for ops in found)), str(len(found))])
    print(peers.table(rows))


if __name__ == "__main__":
    main()
