"""Run by tests in a process of its own: trains under a memory limit, or records random ops; prints one line of JSON.

python memory_script.py train LIMIT STEPS
python memory_script.py stream SECONDS SEED
python memory_script.py record SECONDS SEED
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from reference_engine import IdleEngine, reference_engine
from torch import nn
from torch.nn import functional as F

import torchtpu
from torchtpu import metrics, startup
from torchtpu.runtime import _C

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from resident import Largest, Peak, resident_bytes

ROWS, WIDTH, LAYERS = 8192, 128, 6


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
        x = random_op(rng, x)
    x.sum().item()


def random_op(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    """Of a matrix another matrix."""
    rows, columns = x.shape
    match rng.randrange(12):
        case 0:
            return x * rng.random() + 1
        case 1:
            return torch.relu(x.t())
        case 2:
            return torch.cat([x, x[: rng.randint(1, rows)]])
        case 3:
            return x - x.mean(rng.randrange(2), keepdim=True)
        case 4:
            return x @ torch.full((columns, rng.randint(1, 400)), 0.5, device="tpu")
        case 5:
            return x.softmax(rng.randrange(2))
        case 6:
            x[rng.randrange(rows) :, : rng.randint(1, columns)].add_(1)
            return x
        case 7:
            return F.pad(x, [rng.randint(0, 3) for _ in range(4)])
        case 8:
            return torch.rand_like(x) + x
        case 9:
            return x.index_select(0, torch.arange(rng.randint(1, rows), device="tpu"))
        case 10:
            return torch._foreach_mul([x, x[:1]], [0.5, 0.75])[0]
        case _:
            return x[rng.randrange(rows) :]


def known_ops() -> None:
    """A stream of ops that is the same each time."""
    x = torch.ones(4, device="tpu")
    for _ in range(100):
        x = x.mul(2).add(1)
    x.sum().item()


class Meter:
    """The CPU seconds that this thread spends on an op it records, and how many ops that were."""

    def __init__(self) -> None:
        self.seconds, self.ops = 0.0, 0

    def run(self, call: Callable[[], object]) -> None:
        ops, started = _C.stats()["ops_recorded"], time.thread_time()
        call()
        self.seconds += time.thread_time() - started
        self.ops += _C.stats()["ops_recorded"] - ops


def stream(seconds: float, seed: int) -> dict[str, Any]:
    """What is resident, and what an op costs that is new or known, in each of twenty stretches; the most nodes at any
    time, and at the end of a stretch, where nothing is in use."""
    rng, settled = random.Random(seed), 0
    resident, new_us, known_us, most = [], [], [], dict.fromkeys(("trie_nodes", "trie_plans", "array_shapes"), 0)
    started = time.monotonic()
    while len(resident) < 20:
        new, known = Meter(), Meter()
        while time.monotonic() - started < seconds * (len(resident) + 1) / 20 or not known.ops:
            for _ in range(4):
                new.run(lambda: random_ops(rng))
            known_ops()
            known.run(known_ops)
            now = _C.stats()
            most = {name: max(count, now[name]) for name, count in most.items()}
        gc.collect()
        torch.tpu.synchronize()
        known_ops()  # its cut forgets what was in use until now
        settled = max(settled, _C.stats()["trie_nodes"])
        resident.append(resident_bytes())
        new_us.append(new.seconds / new.ops * 1e6)
        known_us.append(known.seconds / known.ops * 1e6)
    counts = metrics.snapshot()
    kept = ("regions", "ops_recorded", "streams_forgotten", "programs_compiled")
    costs = {"new_us": new_us, "known_us": known_us}
    return {"resident": resident, **costs, **most, "settled_nodes": settled, **{n: counts[n] for n in kept}}


def record(seconds: float, seed: int) -> dict[str, Any]:
    """The same without a compiler: a hundred times as many regions."""
    with reference_engine(IdleEngine()):
        return stream(seconds, seed)


if __name__ == "__main__":
    kind, first, second = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps({"train": train, "stream": stream, "record": record}[kind](first, second)))
