"""Loops that never read settle: after a few regions no program is compiled any more."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_engine import IdleEngine, ReferenceEngine, reference_engine
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

    def start(self, device: str, length: int = 3) -> None:
        self.x, self.y = torch.ones(length, device=device), torch.full((length,), 0.5, device=device)
        self.total = torch.zeros(length, device=device)

    def run(self, count: int) -> None:
        for _ in range(count):
            self.x = self.ops[self.at % len(self.ops)](self.x, self.y)
            self.at += 1
            if self.at % len(self.ops) == 0:
                self.total.add_(self.x, alpha=0.125)

    def values(self) -> list[Tensor]:
        return [t.cpu().clone() for t in (self.x, self.y, self.total)]


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


@pytest.mark.parametrize(
    ("laps", "loops", "longest"),
    [
        pytest.param(120, 3, 300, id="short"),
        pytest.param(10_000, 10, 20_000, id="long", marks=[pytest.mark.full, pytest.mark.timeout(7200)]),
    ],
)
def test_loops_of_any_length_settle_within_a_hundred_laps(laps: int, loops: int, longest: int) -> None:
    """And what is recorded is launched: by then nine tenths, or all but less than a cap; later all but that."""
    seed = random.SystemRandom().randrange(2**32)
    source = random.Random(seed)
    cap = CAP if longest < 2048 else config.get("max_region_ops")
    for period in [round(longest ** source.random()) for _ in range(loops)]:
        engine = IdleEngine()
        with reference_engine(engine), config.using(max_region_ops=cap):
            before = metrics.snapshot()
            loop = Loop(period, source.randrange(2**32))
            loop.start("tpu")

            def waiting(before: dict[str, Any] = before, engine: IdleEngine = engine) -> tuple[int, int]:
                await_launches(engine, before["regions"])
                recorded = metrics.snapshot()["ops_recorded"] - before["ops_recorded"]
                return recorded, recorded - engine.ops_launched

            loop.run(max(100 * period, 4 * cap))
            recorded, lag = waiting()
            settled = engine.planned
            what = f"seed {seed}, period {period}: "
            assert lag <= max(0.1 * recorded, cap), f"{what}{lag} ops of {recorded} were not launched"
            for _ in range(10):
                loop.run(max((laps - 100) * period, 20 * cap) // 10)
                recorded, lag = waiting()
                assert lag <= cap, f"{what}{lag} ops of {recorded} were not launched"
                assert engine.planned == settled, f"{what}{engine.planned - settled} more programs"


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


@pytest.mark.usefixtures("no_room")
@pytest.mark.parametrize("seed", range(6))
def test_parts_around_what_keeps_its_shape_compute_what_the_cpu_computes(seed: int) -> None:
    found: dict[str, list[Tensor]] = {}
    for device in ("cpu", "tpu"):
        found[device] = []
        before = metrics.snapshot()["cuts"].get("shape", 0)
        with reference_engine():
            steady = Loop(42, seed)  # one lap for each length
            steady.start(device)
            for length in (3, 4, 5, 6, 7, 3, 9):
                varying = Loop(17, seed + 100)
                varying.start(device, length)
                for _ in range(3):
                    steady.run(14)
                    varying.run(4)
                    varying.y = varying.y + steady.x.sum()
                    steady.y.mul_(varying.x.mean())
                found[device] += [varying.values()[2], *steady.values()]
    assert metrics.snapshot()["cuts"]["shape"] > before
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


class Decoder(torch.nn.Module):
    """Layers that attend to all tokens so far: `keep` grows by one row at each call."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict({name: torch.nn.Linear(8, 8) for name in ("query", "value", "out", "up", "down")})
            for _ in range(layers)
        )

    def forward(self, x: Tensor, keep: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        longer = []
        for layer, old in zip(self.layers, keep, strict=True):
            new = torch.cat([old, layer["value"](x)], 0)
            longer.append(new)
            seen = (layer["query"](x) @ new.t()).softmax(-1) @ new
            x = x + layer["out"](seen).tanh()
            x = x + layer["down"](layer["up"](x).relu()).tanh()
        return x, longer


def decode(device: str, tokens: int) -> tuple[list[float], list[int]]:
    torch.manual_seed(0)
    model = Decoder(4).to(device)
    x, keep = torch.ones(1, 8, device=device), [torch.zeros(1, 8, device=device) for _ in model.layers]
    read, programs = [], []
    with torch.no_grad():
        for _ in range(tokens):
            x, keep = model(x, keep)
            read.append(x.sum().item())
            programs.append(metrics.snapshot()["regions_planned"])
    return read, programs


@pytest.fixture
def no_room() -> Iterator[None]:
    with config.using(padding=False):
        yield


@pytest.mark.usefixtures("no_room")
def test_what_does_not_grow_is_compiled_once_in_a_loop_that_grows() -> None:
    expected, _ = decode("cpu", 12)
    before = metrics.snapshot()["cuts"].get("shape", 0)
    found, programs = decode("tpu", 12)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert metrics.snapshot()["cuts"]["shape"] > before
    per_token = [b - a for a, b in itertools.pairwise(programs[5:])]
    assert max(per_token) <= 2, f"programs planned for each longer token: {per_token}"
    again, planned = decode("tpu", 12)
    torch.testing.assert_close(again, found, rtol=1e-6, atol=1e-6)
    assert planned[-1] - programs[-1] <= 3, "the same lengths were planned again"


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
    keys = torch.ones(4, 3, device="tpu")
    for i in range(40):
        keys = torch.cat([keys, (y * i)[None]])
        y = (keys @ y).softmax(0) @ keys
        if i % 7 == 6:
            print(f"{y.sum().item():.4f}")
"""


def texts(cache: Path) -> set[str]:
    return {path.name for path in cache.rglob("program/*/*")}


DECODER = """
    import random, torch
    from torchtpu import metrics
    dice = random.Random(0)
    for _ in range(24):
        x = torch.linspace(-1, 1, 4 * dice.randint(3, 10)).view(-1, 4).to("tpu")
        state = x.mean(0)
        for step in range(dice.randint(3, 10)):
            state = torch.tanh(state * 0.5 + (x * state).sum(0)) - step
        print(f"{state.sum().item():.5f}")
    assert metrics.snapshot()["regions_in_pieces"] > 3
"""


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


@pytest.mark.parametrize("policy", ["background", "frozen"])
def test_streams_of_ever_other_lengths_and_sizes_need_no_other_programs_in_the_next_process(
    tmp_path: Path, policy: str
) -> None:
    first = run_script(DECODER, TORCHTPU_CACHE_DIR=str(tmp_path))
    assert first.status == 0, first.err
    programs = texts(tmp_path)
    then = run_script(DECODER, TORCHTPU_CACHE_DIR=str(tmp_path), TORCHTPU_POLICY=policy)
    assert then.status == 0, then.err
    assert (then.out, texts(tmp_path)) == (first.out, programs)


class Descent:
    """Steps of gradient descent by hand, which nothing ends but a read of the loss."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).to(device)
        self.net, self.weights = net, list(net.parameters())
        self.x, self.y = torch.randn(8, 16).to(device), torch.randn(8, 4).to(device)

    def run(self, count: int) -> float:
        for _ in range(count):
            loss = (self.net(self.x) - self.y).square().mean()
            gradients = torch.autograd.grad(loss, self.weights)
            with torch.no_grad():
                for weight, gradient in zip(self.weights, gradients, strict=True):
                    weight.add_(gradient, alpha=-0.05)
        return loss.item()


def test_laps_that_are_read_now_and_then_are_the_same_programs_however_many_they_are() -> None:
    """A read among laps that went on the last time ends the region, whose laps have programs, and computes no lap
    twice; so does a cap, however many laps it lets pass."""
    counts = [1, 12, 5, 20, 3, 7, 40, 4, 1, 9, 30]
    expected = [Descent("cpu").run(sum(counts[: n + 1])) for n in range(len(counts))]
    loop = Descent("tpu")
    begun = metrics.snapshot()
    with config.using(max_region_ops=400):
        found = [loop.run(count) for count in counts[:5]]
        before = metrics.snapshot()
        found += [loop.run(count) for count in counts[5:]]
    now = metrics.snapshot()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert now["subgraphs"] == begun["subgraphs"]
    assert now["programs_compiled"] == before["programs_compiled"]


def test_a_step_of_an_optimizer_of_the_host_ends_no_region() -> None:
    """A temperature that is learned on the host, say."""
    x, temperature = torch.ones(3, device="tpu"), torch.nn.Parameter(torch.zeros(()))
    on_host = torch.optim.SGD([temperature], 0.1)
    on_device = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3, device="tpu"))], 0.1)
    for optimizer, expected in ((on_host, 0), (on_device, 1)):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        torch.tpu.synchronize()
        metrics.reset()
        y = x.sin().cos().exp().tanh().abs()
        optimizer.step()
        y.sum().cpu()
        assert metrics.snapshot()["cuts"].get("optimizer.step", 0) == expected
