"""Reads in the middle of known streams give values, while regions and their programs stay."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from reference_engine import ReferenceEngine, reference_engine
from torch import Tensor, nn
from torch.nn import functional as F

import torchtpu
from torchtpu import metrics
from torchtpu.runtime import _C, engine
from torchtpu.runtime.ir.program import Program

LENGTH = 400  # ops of a lap; several pieces

Read = Callable[[int, Tensor], None]


def lap(x: Tensor, y: Tensor, read: Read) -> Tensor:
    """A long stream of ops with updates in place; `read` sees each result."""
    source = random.Random(5)
    for i in range(LENGTH):
        match source.randrange(6):
            case 0:
                x = x + y
            case 1:
                x = x.sin()
            case 2:
                y.mul_(0.75).add_(0.125)
            case 3:
                x = torch.where(x > y, x, y)
            case 4:
                x = x.view(2, 4).t().contiguous().view(8) * 0.5
            case 5:
                x[1:3].add_(y[2:4])
        read(i, x)
    return x


def nothing(i: int, x: Tensor) -> None:
    """Reads nothing."""


class Laps:
    """Laps whose values go on from one to the next; a cut that is no read ends each."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.x, self.y = torch.linspace(-1, 1, 8, device=device), torch.full((8,), 0.5, device=device)

    def run(self, count: int = 1, read: Read = nothing) -> None:
        for _ in range(count):
            self.x = lap(self.x, self.y, read)
            if self.device == "tpu":
                _C.cut("test")


def reader(at: int, found: list[Tensor]) -> Read:
    def read(i: int, x: Tensor) -> None:
        if i == at:
            found.append(x.cpu().clone())

    return read


def check(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def programs_of(engine: ReferenceEngine) -> tuple[int, int]:
    """The programs of regions, and those of subgraphs."""
    torch.tpu.synchronize()
    lap = max((len(program.ops) for program in engine.programs), default=0)
    whole = sum(len(program.ops) == lap for program in engine.programs)
    return whole, len(engine.programs) - whole


def test_a_read_in_a_known_stream_leaves_its_program_alone() -> None:
    places = random.Random(1).sample(range(LENGTH), 60)
    found: dict[str, list[Tensor]] = {"cpu": [], "tpu": []}
    for device, values in found.items():
        with reference_engine() as engine:
            laps = Laps(device)
            laps.run(3)
            before = programs_of(engine)
            for place in places:
                laps.run(1, reader(place, values))
            if device == "tpu":
                after = programs_of(engine)
                assert after[0] == before[0], "a region was compiled again"
                assert after[1] - before[1] <= 16, "subgraphs do not settle"
            values += [laps.x.cpu(), laps.y.cpu()]
    check(found["tpu"], found["cpu"])


def test_the_second_read_at_a_place_plans_nothing() -> None:
    with reference_engine() as engine:
        laps = Laps("tpu")
        laps.run(2)
        laps.run(1, reader(50, []))
        planned = len(engine.programs)
        laps.run(30)
        laps.run(1, reader(50, []))
        torch.tpu.synchronize()
        assert len(engine.programs) == planned
        assert engine.subgraphs == 2
        del laps


def test_a_read_of_every_lap_becomes_a_cut() -> None:
    with reference_engine() as engine:
        laps = Laps("tpu")
        laps.run(2)
        laps.run(8, reader(300, []))
        settled, subgraphs = len(engine.programs), engine.subgraphs
        assert 1 <= subgraphs <= 4
        laps.run(8, reader(300, []))
        torch.tpu.synchronize()
        assert (len(engine.programs), engine.subgraphs) == (settled, subgraphs)
        del laps


def test_where_most_streams_are_new_a_read_ends_one_though_it_began_as_another() -> None:
    lengths = random.Random(3).sample(range(100, 160), 60)
    found: dict[str, list[float]] = {"cpu": [], "tpu": []}
    for device, values in found.items():
        with reference_engine() as engine:
            x, y = torch.linspace(-1, 1, 8, device=device), torch.full((8,), 0.5, device=device)
            counts = []
            for length in lengths:
                z = x
                for i in range(length):
                    z = z.sin() if i % 3 else z + y
                values.append(z.sum().item())
                counts.append(engine.subgraphs)
            assert counts[-1] == counts[29]
    torch.testing.assert_close(found["tpu"], found["cpu"])


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_a_read_of_every_lap_becomes_no_cut_in_deterministic_mode(deterministic: None) -> None:
    with reference_engine() as engine:
        laps = Laps("tpu")
        laps.run(2)
        before = programs_of(engine)[0]
        laps.run(12, reader(300, []))
        assert programs_of(engine)[0] == before
        assert engine.subgraphs == 12
        del laps


def test_a_loss_read_before_gradients_are_freed_leaves_the_step_alone_in_deterministic_mode(
    deterministic: None,
) -> None:
    found: dict[str, list[float]] = {}
    for device in ("cpu", "tpu"):
        with reference_engine() as engine:
            torch.manual_seed(0)
            model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(8)]).to(device)
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            x, read, planned = torch.ones(2, 4, device=device), [], 0
            for step in range(12):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                if step == 3:
                    torch.tpu.synchronize()  # a region whose gradients stay
                if step == 6:
                    planned = len(engine.programs)
                if step > 6:
                    read.append(loss.item())
            torch.tpu.synchronize()
            if device == "tpu":
                assert engine.subgraphs == 5
                assert len(engine.programs) == planned + 1, "more than a subgraph"
            found[device] = read + model[0][0].weight.flatten().tolist()
            del model, optimizer, x, loss
    torch.testing.assert_close(found["tpu"], found["cpu"])


def test_a_logging_read_does_not_double_the_programs() -> None:
    counts = []
    for is_logging in (False, True):
        with reference_engine() as engine:
            laps = Laps("tpu")
            for step in range(40):
                laps.run(1, reader(LENGTH // 2, []) if is_logging and step % 10 == 9 else nothing)
            torch.tpu.synchronize()
            counts.append(len(engine.programs))
            del laps
    assert counts[1] <= counts[0] + 1


def printer(place: int, unused: Tensor, found: list[float]) -> Read:
    def show(i: int, x: Tensor) -> None:
        if i == place:
            found.append((x.abs().max() * 2).item())
            kept = x.mean() + unused.sum()
            found.append(kept.item())
            found.append((kept + 1).item())

    return show


def test_ops_recorded_for_a_print_leave_no_trace() -> None:
    found: dict[str, list[float]] = {"cpu": [], "tpu": []}
    for device, values in found.items():
        with reference_engine() as engine:
            laps, unused = Laps(device), torch.ones(4, device=device)
            laps.run(3)
            before = programs_of(engine)
            for place in range(7, LENGTH, 40):
                laps.run(1, printer(place, unused, values))
            if device == "tpu":
                assert programs_of(engine)[0] == before[0], "a region was compiled again"
            values += laps.x.tolist()
            del laps, unused
    torch.testing.assert_close(found["tpu"], found["cpu"])


def test_what_was_read_once_costs_nothing_and_stays() -> None:
    laps = Laps("tpu")
    laps.run(2)
    kept: list[Tensor] = []

    def read(i: int, x: Tensor) -> None:
        if i == 100:
            kept.append(x)
            kept.append(x.cpu())

    laps.run(1, read)
    before = metrics.snapshot()
    assert kept[0].tolist() == kept[1].tolist()
    after = metrics.snapshot()
    assert (after["subgraphs"], after["downloads"]) == (before["subgraphs"], before["downloads"])
    kept.clear()


def test_random_numbers_are_the_same_in_a_subgraph_and_in_its_region() -> None:
    def step(x: Tensor, is_read: bool) -> tuple[list[float], Tensor]:
        shown: list[float] = []
        for i in range(40):
            x = F.dropout(x, 0.5) + torch.rand(8, device="tpu")
            if is_read and i == 20:
                shown = x.tolist()
                kept = x
        _C.cut("test")
        return shown, kept * 1 if is_read else x

    x = torch.ones(8, device="tpu")
    step(x, False)
    step(x, False)
    before = metrics.snapshot()["subgraphs"]
    shown, again = step(x, True)
    assert metrics.snapshot()["subgraphs"] == before + 1
    assert shown == again.tolist()


def test_an_index_error_in_a_subgraph_is_raised_once() -> None:
    index = torch.tensor([1, 2], device="tpu")
    x = torch.ones(4, device="tpu")

    def step(place: int) -> None:
        y = x
        for i in range(40):
            y = y * 1.5 + y.sum()
            if i == 10:
                y = torch.cat([y.index_select(0, index), y[:2]])
            if i == place:
                y.tolist()
        _C.cut("test")

    for _ in range(3):
        step(-1)
    before = metrics.snapshot()["subgraphs"]
    step(20)
    assert metrics.snapshot()["subgraphs"] == before + 1
    index.fill_(9)
    with pytest.raises(IndexError):
        step(20)
    torch.tpu.synchronize()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    def __init__(self, words: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.words(tokens) + self.places)))


def train(steps: int, size: tuple[int, int, int, int, int], prints: int) -> tuple[list[float], int, int]:
    """Losses of all steps, and the programs planned before and after the steps that print at a random place."""
    words, width, layers, length, batch = size
    torch.manual_seed(0)
    model = GPT(words, width, layers, length).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    source = random.Random(3)
    at = {"op": 0, "read": -1}

    def print_here(module: nn.Module, args: object, result: object) -> None:
        shown = result[0] if isinstance(result, tuple) else result
        if at["op"] == at["read"] and isinstance(shown, Tensor):
            assert shown.detach().flatten()[0].item() is not None
        at["op"] += 1

    hooks = [h for m in model.modules() for h in (m.register_forward_hook(print_here),)]
    hooks += [m.register_full_backward_hook(print_here) for m in model.modules() if isinstance(m, nn.Linear)]
    losses, planned = [], 0
    for step in range(steps):
        if step == steps - prints:
            torch.tpu.synchronize()
            planned = metrics.snapshot()["regions_planned"]
            places = at["op"]
        at["op"], at["read"] = 0, source.randrange(places) if step >= steps - prints else -1
        tokens = torch.randint(words, (batch, length + 1), generator=torch.Generator().manual_seed(step)).to("tpu")
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        places = at["op"]
    torch.tpu.synchronize()
    for hook in hooks:
        hook.remove()
    return [loss.item() for loss in losses], planned, metrics.snapshot()["regions_planned"]


@pytest.mark.parametrize(
    ("size", "steps", "prints"),
    [
        pytest.param((50, 16, 2, 8, 2), 40, 30, id="small"),
        pytest.param((1000, 256, 4, 128, 8), 210, 200, id="w3", marks=pytest.mark.full),
    ],
)
def test_prints_at_random_places_change_no_loss_and_few_programs(
    size: tuple[int, int, int, int, int], steps: int, prints: int
) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        quiet, _, _ = train(steps, size, 0)
        loud, before, after = train(steps, size, prints)
    finally:
        torch.use_deterministic_algorithms(False)
    assert loud == quiet
    assert after - before <= 60


@pytest.mark.bailouts("subgraph")
@pytest.mark.parametrize("read_as", ["at once", "later"])
def test_a_subgraph_that_is_not_compiled_runs_in_parts(read_as: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine.Engine._form

    def form(self: Any, program: Program, clusters: Any, device: int) -> Any:
        if is_reading and len(program.ops) > 1:
            raise ZeroDivisionError("planted")
        return plain(self, program, clusters, device)

    monkeypatch.setattr(engine.Engine, "_form", form)
    is_reading, found = False, []

    def read(i: int, x: Tensor) -> None:
        nonlocal is_reading
        if i == 50:
            is_reading = True
            found.append(x.cpu() if read_as == "at once" else torchtpu.async_read(x).result())
            is_reading = False

    expected: list[Tensor] = []
    mine, theirs = Laps("tpu"), Laps("cpu")
    mine.run(2)
    theirs.run(2)
    theirs.run(1, reader(50, expected))
    subgraphs = metrics.snapshot()["subgraphs"]
    mine.run(1, read)
    check(found, expected)
    assert metrics.snapshot()["subgraphs"] == subgraphs + 1
    assert metrics.snapshot()["bailouts"] == {"subgraph: ZeroDivisionError": 1}
    check([mine.x.cpu()], [theirs.x])
