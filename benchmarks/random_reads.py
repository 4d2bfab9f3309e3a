"""What it costs to read a value at a random place of each step, and what is left of that cost afterwards.

`tpu` reads nothing, `reads` the result of one op in each of 200 steps, drawn anew for each: it prints the tensor or
reads an element.  One process each, interleaved; compiling counts, as no programs are on disk.  A loss that is itself
read comes from a subgraph: it is not compared.

    python benchmarks/random_reads.py
    python benchmarks/random_reads.py --deterministic       # losses have to be equal bit by bit
    python benchmarks/random_reads.py --warm 0              # the very first step is read in
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import peers
import torch
import torch_steps
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WAYS = ("tpu", "reads")
STEPS = 200  # that read
CALM = 40  # before and after them, which read nothing
PROGRAMS, TOTAL, AFTERWARDS = 60, 3.0, 1.05  # limits: of programs, and of ratios of CPU time


class ReadOne(TorchDispatchMode):
    """Reads the first tensor that the op at a place makes or writes."""

    def __init__(self, place: int = sys.maxsize, is_printed: bool = False) -> None:
        super().__init__()
        self.ops = 0
        self.dims = -1  # of what was read
        self._place = place
        self._is_printed = is_printed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        found = [t for t in torch.utils._pytree.tree_leaves((made, args)) if isinstance(t, Tensor) and t.is_tpu]
        if found:
            self.ops += 1
        if found and self.ops > self._place:
            self._place = sys.maxsize
            self.dims = found[0].dim()
            if self._is_printed:
                str(found[0])
            elif found[0].numel():
                found[0][(0,) * self.dims].item()
        return made


def train(step: Callable[[int], Tensor], steps: range, source: random.Random | None) -> tuple[list[Tensor], list[int]]:
    """The losses, unread, and the steps whose loss was read; reads nothing without a source of places."""
    ops, losses, read = 400, [], []
    for i in steps:
        with ReadOne(source.randrange(ops), source.random() < 0.5) if source else ReadOne() as mode:
            losses.append(step(i))
        ops = mode.ops
        if mode.dims == 0:
            read.append(i)
    return losses, read


def calm_steps(step: Callable[[int], Tensor]) -> float:
    """The CPU seconds of a step that nothing is read in."""
    taken = []
    for i in range(CALM):
        started = time.process_time()
        train(step, range(i, i + 1), None)
        torch.tpu.synchronize()
        taken.append(time.process_time() - started)
    return statistics.median(taken)


def measure(way: str, workload: str) -> dict[str, Any]:
    from torchtpu import metrics

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms("DETERMINISTIC" in os.environ)
    step = torch_steps.build(workload, "tpu")
    warm = int(os.environ["WARM"])
    started = time.process_time()
    losses, _ = train(step, range(warm), None)
    before = calm_steps(step) if warm else 0.0
    first = metrics.snapshot()["programs_compiled"]
    more, read = train(step, range(warm, warm + STEPS), random.Random(os.environ["SEED"]) if way == "reads" else None)
    losses += more
    torch.tpu.synchronize()
    total = time.process_time() - started
    counts = metrics.snapshot()
    return {
        "total_cpu_s": total,
        "before_ms": before * 1e3,
        "after_ms": calm_steps(step) * 1e3,
        "programs_before": first,
        "programs": counts["programs_compiled"],
        "programs_later": metrics.snapshot()["programs_compiled"] - counts["programs_compiled"],
        "subgraphs": counts["subgraphs"],
        "read_cuts": counts["cuts"].get("read", 0),
        "read": read,
        "losses": [loss.item() for loss in losses],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="w3")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--warm", type=int, default=10, help="steps before the first read")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.worker:
        print(json.dumps(measure(a.worker, a.workload)))
        return
    os.environ |= {"SEED": str(a.seed), "WARM": str(a.warm)}
    if a.deterministic:
        os.environ["DETERMINISTIC"] = "1"
    found = peers.run_interleaved(__file__, a.workload, WAYS, a.repeats)
    tpu, reads = (found[way] for way in WAYS)
    print(json.dumps({a.workload: found, "seed": a.seed}), file=sys.stderr)
    heads = ["programs", "CPU of all steps, reads / tpu", "CPU of a step afterwards / before, reads", "the same, tpu"]
    losses = list(zip(tpu["losses"], reads["losses"], strict=True))
    row = [
        peers.verdict(reads["programs"], PROGRAMS),
        peers.verdict(reads["total_cpu_s"] / tpu["total_cpu_s"], TOTAL),
        *(peers.verdict(way["after_ms"] / (way["before_ms"] or tpu["after_ms"]), AFTERWARDS) for way in (reads, tpu)),
        str(all(i in reads["read"] or x == y for i, (x, y) in enumerate(losses))),
    ]
    print(peers.table([["workload", *heads, "losses bit-equal"], [a.workload, *row]]))


if __name__ == "__main__":
    main()
