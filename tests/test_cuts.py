"""In: loops that never read. Out: they settle: after a few regions no program is compiled any more."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference_engine import ReferenceEngine, reference_engine
from script import run_script
from torch import Tensor

from torchtpu import config, metrics

CAP = 64

Step = Callable[[Tensor, Tensor], Tensor]
OPS: list[Step] = [
    lambda x, y: x * 1.01,
    lambda x, y: x + y,
    lambda x, y: x.sin(),
    lambda x, y: x.tanh(),
    torch.maximum,
    lambda x, y: x.neg().add_(y),
    lambda x, y: torch.where(x > 0, x, y),
    lambda x, y: torch.stack([x, y]).sum(0).t().contiguous(),
    lambda x, y: torch._foreach_mul([x, y], [0.5, 0.75])[0],
    lambda x, y: x.clone().index_fill_(0, torch.zeros(1, dtype=torch.int64, device=x.device), 0.25),
]


class Loop:
    """`period` ops drawn by `seed`, entered anywhere; a value, a constant and a sum go from lap to lap."""

    def __init__(self, period: int, seed: int) -> None:
        source = random.Random(seed)
        self.ops = source.choices(OPS, k=period)
        self.at = source.randrange(period)

    def start(self, device: str) -> None:
        self.x, self.y = torch.ones(3, device=device), torch.full((3,), 0.5, device=device)
        self.total = torch.zeros(3, device=device)

    def run(self, count: int) -> None:
        for _ in range(count):
            self.x = self.ops[self.at % len(self.ops)](self.x, self.y)
            self.at += 1
            if self.at % len(self.ops) == 0:
                self.total.add_(self.x, alpha=0.125)

    def values(self) -> list[Tensor]:
        return [self.x.cpu(), self.y.cpu(), self.total.cpu()]


def await_launches(engine: ReferenceEngine, before: int) -> None:
    """Returns when every region cut so far has been launched; cuts none, as a synchronization would."""
    deadline = time.monotonic() + 60
    while engine.launches < metrics.snapshot()["regions"] - before:
        assert time.monotonic() < deadline
        time.sleep(1e-3)


@pytest.mark.parametrize("period", [1, 2, 3, 7, 33, 63, 64, 65, 100, 170, 333, 1000])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_loop_without_reads_settles(period: int, seed: int) -> None:
    with reference_engine() as engine, config.using(max_region_ops=CAP):
        loop = Loop(period, seed)
        loop.start("tpu")
        before = metrics.snapshot()["regions"] - engine.launches
        loop.run(4 * period + 8 * CAP)
        await_launches(engine, before)
        settled, launched = len(engine.programs), engine.launches
        loop.run(20 * period + 20 * CAP)
        await_launches(engine, before)
        assert len(engine.programs) == settled
        assert engine.launches - launched >= (20 * period + 20 * CAP) // CAP - 1


@pytest.mark.parametrize("period", [5, 90])
def test_a_loop_cut_by_caps_computes_what_the_cpu_computes(period: int) -> None:
    found = {}
    for device in ("cpu", "tpu"):
        with config.using(max_region_ops=CAP):
            loop = Loop(period, 3)
            loop.start(device)
            loop.run(5 * period + 5 * CAP)
            found[device] = loop.values()
    for expected, got in zip(found["cpu"], found["tpu"], strict=True):
        torch.testing.assert_close(got, expected)


def test_random_numbers_are_the_same_wherever_a_cap_cuts() -> None:
    found = []
    for cap in (16, 50, 2048):
        torch.manual_seed(0)
        with config.using(max_region_ops=cap):
            x = torch.zeros(8, device="tpu")
            for _ in range(60):
                x = x * 0.5 + torch.rand(8, device="tpu")
                x = torch.nn.functional.dropout(x, 0.25)
            found.append(x.cpu())
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1], found[2])


STREAM = """
    import gc, os, sys
    if os.environ.get("GC"):
        gc.set_threshold(*map(int, os.environ["GC"].split(",")))
    sys.setswitchinterval(float(os.environ.get("INTERVAL", "0.005")))
    import torch
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(8), nn.Linear(8, 2)).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(12):
        x = torch.randn(6, 4, device="tpu")
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 3:
            print(f"loss {loss.item():.6f}")
    y = torch.ones(3, device="tpu")
    for i in range(400):
        y = (y * 1.25).sin() if i % 3 else y + 0.5
    print(y.tolist())
"""


def texts(cache: Path) -> set[str]:
    return {path.name for path in cache.rglob("program/*/*")}


def test_what_is_compiled_depends_on_the_script_alone(tmp_path: Path) -> None:
    runs: dict[str, dict[str, str]] = {
        "plain": {},
        "one worker": {"TORCHTPU_NUM_COMPILE_THREADS": "1"},
        "threads that switch all the time": {"INTERVAL": "1e-6", "TORCHTPU_NUM_COMPILE_THREADS": "3"},
        "garbage collected all the time": {"GC": "1,1,1"},
        "garbage never collected": {"GC": "0,0,0"},
    }
    seen = {}
    for name, environment in runs.items():
        cache = tmp_path / name.replace(" ", "_")
        cache.mkdir()
        ended = run_script(STREAM, TORCHTPU_CACHE_DIR=str(cache), TORCHTPU_MAX_REGION_OPS="96", **environment)
        assert ended.status == 0, ended.err
        seen[name] = (texts(cache), ended.out)
    warm = run_script(STREAM, TORCHTPU_CACHE_DIR=str(tmp_path / "plain"), TORCHTPU_MAX_REGION_OPS="96")
    seen["warm"] = (texts(tmp_path / "plain"), warm.out)
    assert len(seen["plain"][0]) > 3
    for name, (programs, out) in seen.items():
        assert programs == seen["plain"][0], name
        assert out == seen["plain"][1], name
