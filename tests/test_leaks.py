"""In long loops, counters stay exactly constant and the resident set does not grow."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchtpu import metrics

CONSTANT = ("live_buffers", "live_nodes", "trie_nodes")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def slope(values: list[int]) -> float:
    """Of the least-squares line through (0, values[0]), (1, values[1]), ..."""
    middle = (len(values) - 1) / 2
    mean = sum(values) / len(values)
    rise = sum((i - middle) * (v - mean) for i, v in enumerate(values))
    return rise / sum((i - middle) ** 2 for i in range(len(values)))


def counters() -> dict[str, int]:
    torch.tpu.synchronize()
    gc.collect()
    now = metrics.snapshot()
    return {name: now[name] for name in CONSTANT}


def training_step() -> Callable[[int], None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 16), nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.1), nn.Linear(32, 5))
    model.tpu()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    x, y = (torch.arange(32).view(8, 4) % 20).tpu(), (torch.arange(8) % 5).tpu()

    def step(i: int) -> None:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if i % 10 == 0:
            loss.item()

    return step


def counting_step() -> Callable[[int], None]:
    x = torch.zeros(4, device="tpu")

    def step(i: int) -> None:
        nonlocal x
        x = x + 1
        if i % 100 == 0:
            x[0].item()

    return step


@pytest.mark.parametrize(("make", "warm", "steps"), [(training_step, 50, 200), (counting_step, 1000, 4000)])
def test_counters_stay_constant(make: Callable[[], Callable[[int], None]], warm: int, steps: int) -> None:
    step = make()
    for _ in range(2):  # counting ends a region, and the first read after it stands at a place of its own
        for i in range(warm):
            step(i)
        before = counters()
    for i in range(steps):
        step(i)
    assert counters() == before


@pytest.mark.compiles
@pytest.mark.parametrize(("make", "steps"), [(training_step, 2000), (counting_step, 100_000)])
def test_the_resident_set_does_not_grow(make: Callable[[], Callable[[int], None]], steps: int) -> None:
    """Below 1 KB a step in some third of the last nine tenths: what leaks does so in each, and where a program is
    compiled that replaces another one, which happens once, XLA keeps some megabytes."""
    step, warm = make(), steps // 10
    for i in range(warm):
        step(i)
    before = counters()
    sizes = [0] * (steps - warm)  # allocated before it is measured
    for i in range(warm, steps):
        step(i)
        sizes[i - warm] = resident_bytes()
    assert counters() == before
    third = len(sizes) // 3
    assert min(slope(sizes[k * third : (k + 1) * third]) for k in range(3)) < 1024
