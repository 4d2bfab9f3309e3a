"""A script of streams that vary, for test_purity.py: in comes a seed of disturbances, out go the keys of all programs
that were asked for.

python purity_script.py SEED: sleeps before ops and compiles, collections of garbage and another thread's ops are drawn
from the seed, and what is computed is not.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import threading
import time
from concurrent.futures import wait
from typing import Any

import torch

from torchtpu import metrics, startup

source = random.Random(int(sys.argv[1]))


def disturb(most: float = 2e-3) -> None:
    """The clock's share in a run."""
    drawn = source.random()
    if drawn < 0.2:
        time.sleep(source.random() * most)
    elif drawn < 0.22:
        gc.collect()


def delay_compiles() -> None:
    compiler = startup.engine().compiler
    real = compiler._load_or_compile

    def build(*args: Any) -> Any:
        time.sleep(source.random() * 2e-2)
        return real(*args)

    compiler._load_or_compile = build  # type: ignore[method-assign]


def other_thread() -> None:
    """Records ops that no other thread does: of its own dtype and sizes."""
    x = torch.ones(5, 7, dtype=torch.float64, device="tpu")
    for _ in range(6):
        x = (x * 0.5).cos() + 1
        disturb(1e-2)
        x.sum().item()


def growing_list() -> None:
    kept: list[torch.Tensor] = []
    for i in range(8):
        kept.append(torch.full((3,), float(i), device="tpu"))
        kept = [k.clone() for k in kept]
        disturb()
        kept[-1].sum().item()


def episodes() -> None:
    torch.manual_seed(0)
    policy = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).to("tpu")
    optimizer = torch.optim.SGD(policy.parameters(), 0.1)
    for length in (3, 5, 4, 7, 6, 9):
        state, losses = torch.zeros(1, 4, device="tpu"), []
        for step in range(length):
            logits = policy(state)
            losses.append(torch.log_softmax(logits, -1)[0, step % 2])
            state = state.roll(1, 1) + logits.sum()
            disturb()
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()


def sizes() -> None:
    w = torch.ones(6, 3, device="tpu", requires_grad=True)
    for rows in (2, 3, 5, 4, 7, 6):
        loss = torch.relu(torch.ones(rows, 6, device="tpu") @ w).pow(2).mean()
        loss.backward()
        disturb()
        loss.item()


def hot_loop() -> None:
    """Is promoted before it ends, and reads what it makes now and then."""
    x = torch.zeros(200_000, device="tpu")
    for i in range(150):
        x = torch.sin(x * 0.5 + 1) * x.cos() + 0.1
        disturb()
        if i % 3 == 2:
            x[0].item()


def main() -> None:
    torch.ones(1, device="tpu").cpu()
    delay_compiles()
    thread = threading.Thread(target=other_thread)
    thread.start()
    for part in (growing_list, episodes, sizes, hot_loop, growing_list, episodes):
        part()
    thread.join()
    torch.tpu.synchronize()
    compiler = startup.engine().compiler
    wait(compiler.outstanding())
    counts = metrics.snapshot()
    names = ("regions_in_first_tier", "regions_in_pieces", "regions_promoted", "launched_ahead")
    print(json.dumps({"keys": compiler.submitted(), "counts": {name: counts[name] for name in names}}))


if __name__ == "__main__":
    main()
