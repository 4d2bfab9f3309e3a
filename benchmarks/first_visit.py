"""In: op streams that nobody has recorded before. Out: what they cost the thread that calls the ops.

Each is measured on `tpu` and on torch's CPU, which computes meanwhile what `tpu` only records.  What compiles in other
threads does not count here.

    OMP_NUM_THREADS=1 python benchmarks/first_visit.py
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator

import peers
import torch
import torch_steps
from torch import Tensor
from torch.nn import functional as F

COUNT = 400  # ops of a stream

OPS: list[Callable[[Tensor], Tensor]] = [
    torch.sin, torch.cos, torch.tanh, torch.exp, torch.neg, torch.abs, torch.sigmoid, torch.relu,
]  # fmt: skip

sizes: Iterator[int] = itertools.count(1000)  # each is used once
numbers = random.Random(0)


def synchronize(device: str) -> None:
    if device == "tpu":
        torch.tpu.synchronize()


def known(device: str) -> float:
    """Ops on one geometry in an order of their own, each of which has been called before."""
    x = torch.ones(8, device=device)
    for op in OPS:
        op(x)
    synchronize(device)
    order = numbers.choices(OPS, k=COUNT)
    started = time.thread_time()
    for op in order:
        x = op(x)
    return (time.thread_time() - started) / COUNT


def new(device: str) -> float:
    """Ops with a C++ shape function, each on a size of its own."""
    given = [torch.ones(next(sizes), device=device) for _ in range(COUNT)]
    synchronize(device)
    started = time.thread_time()
    made = [numbers.choice(OPS)(x) for x in given]
    taken = (time.thread_time() - started) / COUNT
    del made
    return taken


def new_in_python(device: str) -> float:
    """Ops whose shapes Python infers, each on a size of its own."""
    given = [torch.ones(2, next(sizes), device=device) for _ in range(COUNT)]
    weights = [torch.ones(x.shape[1], device=device) for x in given]
    synchronize(device)
    started = time.thread_time()
    made = [F.layer_norm(x, x.shape[1:], w, w) for x, w in zip(given, weights, strict=True)]
    taken = (time.thread_time() - started) / COUNT
    del made
    return taken


def gpt_step(device: str) -> float:
    """The first training step of a GPT of 12 layers: forward, backward, AdamW.  The width is new each time."""
    width = 256 + 8 * next(widths)
    model = torch_steps.GPT(64, width, 4, 12, 32).to(device)
    ids = torch.zeros(2, 16, dtype=torch.int64, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    synchronize(device)
    started = time.thread_time()
    F.cross_entropy(model(ids).view(-1, 64), ids.view(-1)).backward()
    optimizer.step()
    taken = time.thread_time() - started
    synchronize(device)
    return taken


widths: Iterator[int] = itertools.count(1)


def decoding(device: str) -> float:
    """One more token of a GPT of 4 layers that is given all tokens again: a length that is new."""
    model = torch_steps.GPT(64, 32, 4, 4, 128).to(device)
    ids = torch.zeros(2, 128, dtype=torch.int64, device=device)
    taken = []
    with torch.no_grad():
        for length in range(16, 80):
            started = time.thread_time()
            scores = model(ids[:, :length])[:, -1]
            ids[:, length] = scores.argmax(-1)
            taken.append(time.thread_time() - started)
    synchronize(device)
    return statistics.mean(taken[1:])


# what -> (measured, its unit in seconds, limit, rounds)
CASES: dict[str, tuple[Callable[[str], float], str, float, int]] = {
    "an op seen before, in a new stream": (known, "us", 8, 7),
    "a new size, C++ shape function": (new, "us", 30, 5),
    "a new size, Python shape function": (new_in_python, "us", 150, 5),
    "the first step of a GPT of 12 layers": (gpt_step, "ms", 80, 2),
    "a new length of a decoding GPT": (decoding, "ms", 5, 1),
}
UNITS = {"us": 1e6, "ms": 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only cases whose name has one of these words")
    words = parser.parse_args().words
    torch.set_num_threads(1)
    rows = [["new stream", "tpu", "limit", "torch cpu, computing"]]
    for name, (measured, unit, limit, rounds) in CASES.items():
        if words and not any(word in name for word in words):
            continue
        measured("tpu")  # what is imported once
        found: dict[str, list[float]] = {"tpu": [], "cpu": []}
        for _ in range(rounds):
            for device, taken in found.items():
                taken.append(measured(device) * UNITS[unit])
        tpu, cpu = (statistics.median(taken) for taken in found.values())
        rows.append([name, f"{tpu:.1f} {unit}", f"{limit} {unit}", f"{cpu:.1f} {unit}"])
    print(peers.table(rows))


if __name__ == "__main__":
    main()
