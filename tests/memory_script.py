"""Run by tests in a process of its own: trains under a memory limit, or records random ops; prints one line of JSON.

python memory_script.py train LIMIT STEPS
python memory_script.py stream SECONDS SEED
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import torchtpu
from torchtpu import metrics, startup

ROWS, WIDTH, LAYERS = 8192, 128, 6


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The most resident bytes since it was made or reset, looked at every two milliseconds."""

    def __init__(self) -> None:
        self.bytes = resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.bytes = max(self.bytes, resident_bytes())


class Largest:
    """An observer that keeps the most bytes a program of its needs."""

    def __init__(self) -> None:
        self.bytes = 0

    def planned(self, program: Any, about: Any, flight: Any) -> None:
        flight.add_done_callback(self._note)

    def _note(self, flight: Any) -> None:
        f = flight.result()
        self.bytes = max(self.bytes, f.argument_bytes + f.output_bytes - f.aliased_bytes + f.temporary_bytes)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


class Mixer(nn.Module):
    """A block of a transformer without the attention: most of what its step needs are activations."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


def steps() -> Iterator[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Mixer() for _ in range(LAYERS)]).to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    x = torch.randn(ROWS, WIDTH).to("tpu")
    while True:
        optimizer.zero_grad(set_to_none=True)
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item()


def train(limit: int, count: int) -> dict[str, Any]:
    (torch.ones(4, device="tpu") + 1).sum().item()
    largest = Largest()
    startup.observe(largest)
    if limit:
        torchtpu.config.set(memory_limit=limit)
    training = steps()
    losses = [next(training) for _ in range(3)]  # compiles
    peak = Peak()
    losses += [next(training) for _ in range(count)]
    peak.close()
    training.close()
    del training
    gc.collect()
    torch.tpu.synchronize()
    gc.collect()
    # What is left are the interpreter, its libraries and the compiled programs.
    return {"losses": losses, "needed": largest.bytes, "held": peak.bytes - resident_bytes(), **metrics.snapshot()}


def random_ops(rng: random.Random) -> None:
    """A few ops of random kinds on tensors of random shapes, and a read."""
    rows, columns = rng.randint(1, 400), rng.randint(1, 400)
    x = torch.ones(rows, columns, device="tpu")
    for _ in range(rng.randint(1, 6)):
        match rng.randrange(5):
            case 0:
                x = x * rng.random() + 1
            case 1:
                x = torch.relu(x.t())
            case 2:
                x = torch.cat([x, x[: rng.randint(1, x.shape[0])]])
            case 3:
                x = x - x.mean(rng.randrange(2), keepdim=True)
            case _:
                x = x[rng.randrange(x.shape[0]) :]
    x.sum().item()


def stream(seconds: float, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    samples = []
    started = time.monotonic()
    regions = 0
    while time.monotonic() - started < seconds:
        random_ops(rng)
        regions += 1
        if regions % 25 == 0:
            gc.collect()
            samples.append(resident_bytes())
    return {"samples": samples, "regions": regions, **metrics.snapshot()}


if __name__ == "__main__":
    kind, first, second = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    made = train(first, second) if kind == "train" else stream(first, second)
    print(json.dumps(made))
