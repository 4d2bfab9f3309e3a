"""New streams are made of small programs that they share: in come streams that vary, out go pieces and their errors."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from record_support import Record
from test_engine import make_engine

from torchtpu import config, metrics, startup
from torchtpu.runtime import _C
from torchtpu.runtime.engine import Engine
from torchtpu.runtime.ir.program import Program
from torchtpu.runtime.partition.pieces import divide, ends_of, identity


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = make_engine()
    yield engine
    engine.close()


@pytest.fixture
def in_pieces() -> Iterator[None]:
    """What is recorded is not known, and runs from pieces."""
    _C.forget_streams()
    with config.using(tiers="pieces"):
        yield
    _C.forget_streams()


def in_whole(f: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What f computes in programs that are not divided."""
    _C.forget_streams()
    with config.using(tiers="off"):
        found = f()
    _C.forget_streams()
    return found


def pieces_of(engine: Engine, program: Program) -> list[tuple[object, ...]]:
    return [identity(part.program) for part in divide(program, engine.fragments)]


def test_pieces_have_one_to_four_ops() -> None:
    rng = random.Random(0)
    ends = [0, *ends_of([rng.randrange(1 << 64) for _ in range(1000)]), 1000]
    assert {b - a for a, b in itertools.pairwise(ends)} == {1, 2, 3, 4}
    assert ends_of([3, 1, 4, 1, 5, 9, 2, 6]) == [3, 6]


def test_streams_that_differ_at_their_beginning_are_soon_divided_alike() -> None:
    rng = random.Random(1)
    tail = [rng.randrange(1 << 64) for _ in range(500)]
    for count in range(1, 12):
        head = [rng.randrange(1 << 64) for _ in range(count)]
        places = {end - count for end in ends_of(head + tail)}
        missed = [end for end in ends_of(tail) if end not in places]
        assert all(end < 100 for end in missed if end < 490)


def test_equal_bodies_are_the_same_pieces_however_many(engine: Engine) -> None:
    def different(count: int) -> set[object]:
        with Record() as record:
            x, w = record.input(torch.zeros(4, 4)), record.input(torch.zeros(4, 4))
            for _ in range(count):
                x = torch.relu(torch.mm(x, w) + x)
                x = torch.mm(x * w, w)
        return set(pieces_of(engine, record.program(x)))

    assert len(different(100)) == len(different(50)) <= len(different(3)) + 4


def test_where_a_view_begins_is_no_part_of_a_piece(engine: Engine) -> None:
    def pieces(place: int) -> list[tuple[object, ...]]:
        with Record() as record:
            x, y = record.input(torch.zeros(9, 4)), record.input(torch.zeros(4))
            y = torch.relu(torch.mul(x[place], y))
        return pieces_of(engine, record.program(y))

    assert pieces(2) == pieces(7)


def test_numbers_that_only_compare_equal_are_not_the_same(engine: Engine) -> None:
    def program(number: object) -> Program:
        with Record() as record:
            y = torch.neg(record.input(torch.zeros(4)))
        (op,) = record.program(y).ops
        return replace(record.program(y), ops=(replace(op, args=(*op.args, number)),))

    numbers = (0.0, -0.0, 0, False, 1.0, 1, True)
    assert len({identity(program(number)) for number in numbers}) == len(numbers)


def test_signs_of_zero_reach_the_device(in_pieces: None) -> None:
    for zero in (0.0, -0.0):
        x = torch.ones(3, device="tpu")
        for _ in range(6):
            x = torch.copysign(x + 1, zero).abs()
        assert torch.copysign(x, zero).tolist() == [math.copysign(7.0, zero)] * 3


def test_what_nobody_needs_is_in_no_piece(engine: Engine) -> None:
    with Record() as record:
        x = record.input(torch.zeros(4))
        y = torch.neg(x)
        for _ in range(20):
            torch.relu(x)
    assert sum(len(part.program.ops) for part in divide(record.program(y), engine.fragments)) == 1


def test_a_list_that_grows_compiles_nothing_in_the_end() -> None:
    kept: list[torch.Tensor] = []
    for i in range(24):
        if i == 12:
            before = metrics.snapshot()["programs_compiled"]
        kept.append(torch.full((8,), float(i), device="tpu"))
        kept = [k.clone() for k in kept]
        assert kept[-1].sum().item() == 8.0 * i
    assert metrics.snapshot()["programs_compiled"] - before <= 2
    assert metrics.snapshot()["regions_in_pieces"] > 0
    assert [k[0].item() for k in kept] == list(range(24))


def test_a_loop_of_equal_bodies_costs_one_body() -> None:
    def add(count: int) -> int:
        before = metrics.snapshot()["programs_compiled"]
        e, source = torch.zeros(10, 4), torch.arange(4.0 * count).view(count, 4)
        places = torch.randint(10, (count,), generator=torch.Generator().manual_seed(0))
        device = e.to("tpu"), source.to("tpu"), places.to("tpu")
        for kept, values, where in ((e, source, places), device):
            for i in range(count):
                kept[where[i]] += values[i]
        torch.testing.assert_close(device[0].cpu(), e)
        return int(metrics.snapshot()["programs_compiled"]) - before

    assert add(60) <= 12
    _C.forget_streams()
    assert add(61) <= 8  # the lengths of what is read


def test_an_error_names_the_line_of_its_own_region(in_pieces: None) -> None:
    x, bad = torch.arange(12.0, device="tpu").view(4, 3), torch.tensor([9], device="tpu")

    def first(places: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + 1).index_select(0, places) * 2

    def second(places: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + 1).index_select(0, places) * 2

    for f in (first, second):
        line = f"test_division.py:{f.__code__.co_firstlineno + 1}"
        with pytest.raises(IndexError, match=line):
            f(bad).tolist()


def test_random_numbers_are_those_of_the_whole(in_pieces: None) -> None:
    def draw() -> torch.Tensor:
        torch.manual_seed(3)
        x = torch.rand(5, 7, device="tpu")
        for _ in range(4):
            x = torch.nn.functional.dropout(x + torch.rand_like(x), 0.5) - 1
            x = x + torch.randint(5, (5, 7), device="tpu")
        return x.cpu()

    found = draw()
    assert metrics.snapshot()["regions_in_pieces"] > 0
    torch.testing.assert_close(found, in_whole(draw), rtol=1e-6, atol=1e-6)


def test_writes_into_views_cross_the_borders_of_pieces(in_pieces: None) -> None:
    def write(device: str) -> torch.Tensor:
        x = torch.arange(24.0).view(4, 6).to(device)
        rows, column = list(x.unbind(0)), x[:, 2]
        for i in range(12):
            rows[i % 4].mul_(0.5).add_(column.sum())
            column.copy_(x[i % 3, ::2].sum().expand(4))
            x.t()[i % 6].neg_()
        return x.cpu()

    torch.testing.assert_close(write("tpu"), write("cpu"))
    assert metrics.snapshot()["regions_in_pieces"] > 0


def test_a_training_step_in_pieces_is_that_of_the_cpu(in_pieces: None) -> None:
    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        net.to(device)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        for i in range(4):
            optimizer.zero_grad()
            net(torch.linspace(-1, 1, 6 * (3 + i)).view(-1, 6).to(device)).square().mean().backward()
            optimizer.step()
        return [p.detach().cpu() for p in net.parameters()]

    torch.testing.assert_close(train("tpu"), train("cpu"), rtol=1e-4, atol=1e-5)


@pytest.mark.bailouts("variants", "pieces")
def test_a_piece_that_cannot_be_lowered_leaves_the_whole(monkeypatch: pytest.MonkeyPatch, in_pieces: None) -> None:
    from torchtpu.runtime.compile import variants

    def refuse(*_: object) -> None:
        raise RuntimeError("no pieces today")

    monkeypatch.setattr(variants, "divide", refuse)
    x = torch.ones(3, device="tpu")
    for _ in range(9):
        x = torch.relu(x + 1)
    assert x.tolist() == [10.0] * 3
    assert startup.engine_counters().bailouts.counts()
