"""New streams are made of small programs that they share, and errors name their own lines."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_support import make_engine
from record_support import Record
from torch import Tensor

import torchtpu
from torchtpu import config, metrics, startup
from torchtpu.runtime import _C
from torchtpu.runtime.compile.stock import Stock
from torchtpu.runtime.engine import Engine
from torchtpu.runtime.ir import list_ops
from torchtpu.runtime.ir.program import Op, Program
from torchtpu.runtime.partition import pieces
from torchtpu.runtime.partition.pieces import Divider


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


@pytest.fixture
def identities(engine: Engine) -> Callable[[Program], list[int]]:
    """Which pieces a program is made of."""
    divider = Divider(engine.fragments)
    return lambda program: [piece.identity for piece in divider.divide(program)]


def test_pieces_have_one_to_four_ops() -> None:
    rng = random.Random(0)
    ends = [0, *_C.ends_of([rng.randrange(1 << 64) for _ in range(1000)]), 1000]
    assert {b - a for a, b in itertools.pairwise(ends)} == {1, 2, 3, 4}
    assert _C.ends_of([3, 1, 4, 1, 5, 9, 2, 6]) == [3, 6]


def test_streams_that_differ_at_their_beginning_are_soon_divided_alike() -> None:
    rng = random.Random(1)
    tail = [rng.randrange(1 << 64) for _ in range(500)]
    for count in range(1, 12):
        head = [rng.randrange(1 << 64) for _ in range(count)]
        places = {end - count for end in _C.ends_of(head + tail)}
        missed = [end for end in _C.ends_of(tail) if end not in places]
        assert all(end < 100 for end in missed if end < 490)


def test_equal_bodies_are_the_same_pieces_however_many(identities: Callable[[Program], list[int]]) -> None:
    def different(count: int) -> set[int]:
        with Record() as record:
            x, w = record.input(torch.zeros(4, 4)), record.input(torch.zeros(4, 4))
            for _ in range(count):
                x = torch.relu(torch.mm(x, w) + x)
                x = torch.mm(x * w, w)
        return set(identities(record.program(x)))

    assert len(different(100)) == len(different(50)) <= len(different(3)) + 4


def test_where_a_view_begins_is_no_part_of_a_piece(identities: Callable[[Program], list[int]]) -> None:
    def pieces(place: int) -> list[int]:
        with Record() as record:
            x, y = record.input(torch.zeros(9, 4)), record.input(torch.zeros(4))
            y = torch.relu(torch.mul(x[place], y))
        return identities(record.program(y))

    assert pieces(2) == pieces(7)


def test_views_that_begin_at_the_same_place_by_chance_are_no_other_piece(
    identities: Callable[[Program], list[int]],
) -> None:
    def stream(places: list[int]) -> list[int]:
        with Record() as record:
            x, rows = record.input(torch.zeros(9, 4)), record.input(torch.zeros(9, 4))
            for place in places:
                x[place] += rows[place // 2]
        return identities(record.program(x))

    assert stream([1, 3, 5, 7, 2, 4, 6, 8]) == stream([1, 1, 5, 1, 2, 2, 6, 6])


def test_where_the_gradient_of_a_view_lies_is_no_part_of_a_piece() -> None:
    divider = Divider(startup.engine().fragments)

    def stream(start: int, index: int) -> list[int]:
        with Record() as record:
            rows, row = record.input(torch.zeros(2, 4)), record.input(torch.zeros(4))
            x = torch.ops.aten.slice_backward(rows, [9, 4], 0, start, start + 2, 1)
            x = x + torch.ops.aten.select_backward(row, [9, 4], 0, index)
        return [piece.identity for piece in divider.divide(record.program(x))]

    assert stream(1, 3) == stream(6, 6) == stream(-3, -9)


@pytest.mark.parametrize("start", [0, 3, -2, -9])
def test_gradients_of_views_lie_where_the_views_do(start: int, in_pieces: None) -> None:
    def loop(device: str) -> torch.Tensor:
        x = torch.arange(24.0).view(6, 4).to(device).requires_grad_()
        (x[start:].square().sum() + x[start : start + 3 : 2].sin().sum() + x[max(start, -6)].exp().sum()).backward()
        assert x.grad is not None
        return x.grad.cpu()

    torch.testing.assert_close(loop("tpu"), loop("cpu"))


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_are_added_to_others_by_chance_the_same_keep_their_order(seed: int, in_pieces: None) -> None:
    def loop(device: str) -> torch.Tensor:
        rng, x = random.Random(seed), torch.arange(24.0).view(6, 4).to(device)
        for _ in range(30):
            i, j, k = (rng.randrange(6) for _ in range(3))
            x[i] += x[j] * 0.5
            x[k].copy_(torch.cat([x[j][:2], x[i][2:]]) / 2)
        return x.cpu()

    assert torch.equal(loop("tpu"), loop("cpu"))


def test_numbers_that_only_compare_equal_are_not_the_same() -> None:
    divider = _C.Divider(lambda op: False, lambda calls: [(False, [0])] * len(calls), lambda op: [])

    def program(number: object) -> Program:
        with Record() as record:
            y = torch.neg(record.input(torch.zeros(4)))
        (op,) = record.program(y).ops
        return replace(record.program(y), ops=(replace(op, args=(*op.args, number)),))

    numbers = (0.0, -0.0, 0, False, 1.0, 1, True, 1 << 62, 1 << 64, -(1 << 64), "1", None)
    assert len({divider.divide(program(number), [], [], False)[0][0] for number in numbers}) == len(numbers)


def test_signs_of_zero_reach_the_device(in_pieces: None) -> None:
    for zero in (0.0, -0.0):
        x = torch.ones(3, device="tpu")
        for _ in range(6):
            x = torch.copysign(x + 1, zero).abs()
        assert torch.copysign(x, zero).tolist() == [math.copysign(7.0, zero)] * 3


def test_what_happens_to_an_element_of_a_list_is_in_no_piece_with_the_next_one() -> None:
    """So that parameters in another order, or others between them, are the same pieces."""
    divider = Divider(startup.engine().fragments)

    def step(*shapes: tuple[int, ...]) -> set[int]:
        with Record() as record:
            weights = [record.input(torch.ones(shape)) for shape in shapes]
            gradients = [record.input(torch.ones(shape)) for shape in shapes]
            torch._foreach_mul_(weights, 0.5)
            torch._foreach_add_(weights, gradients, alpha=-0.25)
            torch._foreach_clamp_min_(weights, 0.0)
        program = record.program(*weights, donated=tuple(range(len(shapes))))
        return {piece.identity for piece in divider.divide(program)}

    one, other, both = step((3,), (3,)), step((4, 2), (4, 2)), step((3,), (4, 2), (3,))
    assert len(one) == len(other) == 1
    assert both == step((4, 2), (3,), (4, 2), (4, 2)) == one | other


def test_many_fills_in_a_row_are_one_piece(in_pieces: None) -> None:
    """As where the states of an optimizer are made."""
    x = torch.ones(1, 2, device="tpu")
    x.tolist()
    before = metrics.snapshot()["programs_compiled"]
    states = [torch.zeros(k // 2 + 1, 2, device="tpu") for k in range(20)]
    y = (x + states[1]).relu() - 1.0
    assert y.tolist() == [[0.0, 0.0]]
    assert metrics.snapshot()["programs_compiled"] - before == 2
    assert all(state.add(1.0).sum().item() == 2.0 * len(state) for state in states)


def test_what_nobody_needs_is_in_no_piece(engine: Engine) -> None:
    with Record() as record:
        x = record.input(torch.zeros(4))
        y = torch.neg(x)
        for _ in range(20):
            torch.relu(x)
    pieces = Divider(engine.fragments).divide(record.program(y))
    assert [len(piece.program.ops) for piece in pieces] == [piece.num_ops for piece in pieces] == [1]


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


@pytest.mark.parametrize("most", [12, 24])
@pytest.mark.parametrize("put", [torch.stack, torch.cat])
def test_a_list_in_which_ever_other_tensors_are_the_same_compiles_nothing_in_the_end(
    put: Callable[..., Any], most: int
) -> None:
    """As where batches are filled up with one tensor, or words are drawn from a list of vectors."""
    dice, programs = random.Random(0), []
    pad, weight = torch.zeros(1, 4), torch.randn(4, 3)
    sent, weight_sent = pad.to("tpu"), weight.to("tpu")
    for _ in range(50):
        rows = [pad if dice.random() < 0.3 else torch.randn(1, 4) for _ in range(dice.randint(12, most))]
        on_tpu = [sent if row is pad else row.to("tpu") for row in rows]
        found = (put(on_tpu).view(-1, 4) @ weight_sent).sum(0)
        torch.testing.assert_close(found.cpu(), (put(rows).view(-1, 4) @ weight).sum(0), rtol=1e-4, atol=1e-5)
        programs.append(metrics.snapshot()["programs_compiled"])
    assert programs[-1] == programs[30], programs


def test_long_lists_are_taken_apart_before_their_reads_are_one_program() -> None:
    """XLA compiles so many reads of one array in a time that grows with their square."""
    dice, programs = random.Random(0), []
    for _ in range(24):
        x = torch.randn(dice.randint(1100, 1300))
        found = torch.stack(list(x.to("tpu"))).mean()
        torch.testing.assert_close(found.cpu(), x.mean(), rtol=1e-4, atol=1e-5)
        programs.append(metrics.snapshot()["programs_compiled"])
    assert programs[-1] <= programs[16] + 4, programs
    assert metrics.snapshot()["regions_in_pieces"] > 8


@pytest.mark.parametrize("steps", [1, 12])
def test_a_list_of_views_and_others_in_any_order_compiles_nothing_in_the_end(steps: int) -> None:
    """As samples of a replay buffer are: which elements are views changes from lap to lap."""
    dice = random.Random(0)
    kept = [torch.full((1, 1), float(i)) if i % 3 else torch.full((2,), float(i))[1:].view(1, 1) for i in range(30)]
    on_tpu = [x._base.to("tpu")[1:].view(1, 1) if x._base is not None else x.to("tpu") for x in kept]
    programs = []
    for _ in range(40):
        chosen = dice.sample(range(len(kept)), 8)
        found, expected = torch.cat([on_tpu[i] for i in chosen]), torch.cat([kept[i] for i in chosen])
        for _ in range(steps):
            found, expected = found.mul(0.5).add(1), expected.mul(0.5).add(1)
        assert found.cpu().equal(expected)
        programs.append(metrics.snapshot()["programs_compiled"])
    assert programs[-1] <= programs[20] + 2


def test_where_any_op_may_follow_any_other_few_programs_serve() -> None:
    draw = random.Random(0)
    ops: list[Callable[..., torch.Tensor]] = [torch.sin, torch.cos, torch.tanh, torch.abs, torch.exp, torch.square]
    pairs: list[Callable[..., torch.Tensor]] = [torch.add, torch.sub, torch.mul, torch.maximum]
    on_cpu = torch.linspace(-2, 2, 50, dtype=torch.float64)

    def expression(x: torch.Tensor, depth: int, source: random.Random) -> torch.Tensor:
        kind = source.random()
        if depth == 0 or kind < 0.2:
            return x
        made = expression(x, depth - 1, source)
        return source.choice(ops)(made) if kind < 0.5 else source.choice(pairs)(made, expression(x, depth - 1, source))

    x, compiled = on_cpu.to("tpu"), []
    for _ in range(100):
        seed = draw.random()
        found = expression(x, 4, random.Random(seed)).sin().mean()
        torch.testing.assert_close(found.cpu(), expression(on_cpu, 4, random.Random(seed)).sin().mean())
        compiled.append(metrics.snapshot()["programs_compiled"])
    assert compiled[-1] - compiled[70] <= 1, compiled


def test_lists_of_ever_other_lengths_and_sizes_are_put_together_by_few_programs() -> None:
    """As ragged batches are: any number of tensors of any sizes, some of them views."""
    dice = random.Random(0)
    programs = []
    for lap in range(60):
        kept = [torch.arange(6.0 * dice.randint(1, 9)).view(-1, 3) + lap for _ in range(dice.randint(3, 9))]
        sent = [x.to("tpu") for x in kept]
        found = torch.cat([x[:, :2] if i % 2 else x[1:, :2] for i, x in enumerate(sent)])
        expected = torch.cat([x[:, :2] if i % 2 else x[1:, :2] for i, x in enumerate(kept)])
        for _ in range(6):
            found, expected = found.mul(0.5).add(1), expected.mul(0.5).add(1)
        assert found.cpu().equal(expected)
        programs.append(metrics.snapshot()["programs_compiled"])
    assert programs[-1] <= programs[30] + 8, "one program a lap, as one op, or two"


@pytest.mark.parametrize("name", ["stack", "cat", "stack of rows", "cat of columns"])
def test_an_average_over_all_that_was_so_far_compiles_nothing_in_the_end(name: str) -> None:
    averages: dict[str, Callable[[list[Tensor]], Tensor]] = {
        "stack": lambda kept: torch.stack(kept).mean(),
        "cat": lambda kept: torch.cat([loss.view(1) for loss in kept]).mean(),
        "stack of rows": lambda kept: torch.stack([loss.expand(3) * 2 for loss in kept], 1).mean(1).sum() / 6,
        "cat of columns": lambda kept: torch.cat([loss.view(1, 1).t() for loss in kept], -1).mean(1).sum(),
    }
    losses: list[Tensor] = []
    programs = []
    for step in range(70):
        losses.append(torch.full((), 0.5, device="tpu") * step)
        assert math.isclose(averages[name](losses).item(), 0.25 * step, rel_tol=1e-5)
        programs.append(metrics.snapshot()["programs_compiled"])
    assert programs[-1] - programs[39] <= 6, "where there are more than 64"


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_lists_of_many_lengths_keep_their_values(dtype: torch.dtype, dim: int) -> None:
    """With an element twice, some in another order in memory, and whatever is written to the parts afterwards."""

    def lap(device: str, seed: int) -> torch.Tensor:
        dice = random.Random(seed)
        parts = [(torch.arange(6.0) * i % 5).view(2, 3).to(dtype).to(device) for i in range(dice.randint(1, 20))]
        if seed % 3 == 0:
            parts = [part.t().contiguous().t() if i % 2 else part for i, part in enumerate(parts)]
        made = torch.stack([*parts, parts[0]], dim)
        parts[0].zero_()
        again = torch.cat([made[0], *parts, parts[0]], min(dim, 0)) if dim == 0 else torch.cat(parts, dim)
        made.zero_()
        for _ in range(5):
            again = torch.where(again == again, again, again)
        return again

    for seed in range(30):
        assert lap("tpu", seed).cpu().equal(lap("cpu", seed)), seed


def test_lists_are_put_together_in_blocks_once_they_came_in_many_lengths() -> None:
    divider = Divider(startup.engine().fragments)

    def names(count: int, *, is_often_new: bool = True) -> list[str]:
        with Record() as record:
            y = torch.stack([record.input(torch.zeros(3)) for _ in range(count)])
        pieces = divider.divide(record.program(y), is_often_new=is_often_new)
        return [f"{op.name} {len(op.args[0])}" for piece in pieces for op in piece.program.ops if op.name == "stack"]

    for count in range(3, 10):
        assert names(count) == [f"stack {count}"]
    assert names(21) == ["stack 16", "stack 4", "stack 1"]
    assert names(16) == ["stack 16"]
    assert names(600) == ["stack 256", "stack 256", "stack 64", "stack 16", "stack 8"]
    assert names(21, is_often_new=False) == ["stack 21"]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_put_together_by_writes_keeps_its_values(dtype: torch.dtype, dim: int) -> None:
    """In either dimension, of any dtype, with an element twice, and whatever is written to the parts afterwards."""

    def lap(device: str, seed: int) -> torch.Tensor:
        dice, parts = random.Random(seed), []
        for _ in range(dice.randint(3, 9)):
            count = dice.randint(1, 9)
            part = (torch.arange(4.0 * count) % 7).reshape((count, 4) if dim == 0 else (4, count))
            parts.append(part.to(dtype).to(device))
        made = torch.cat([*parts, parts[0], parts[1].t().contiguous().t()], dim)
        parts[0].zero_()
        again = torch.cat([made, parts[0], made[1:] if dim == 0 else made[:, 1:]], dim)
        made.zero_()
        for _ in range(5):
            again = torch.where(again == again, again, again)
        return again

    for seed in range(16):
        assert lap("tpu", seed).cpu().equal(lap("cpu", seed))


def test_tensors_are_put_together_by_a_write_each_until_one_program_is_cheaper() -> None:
    divider = Divider(startup.engine().fragments)
    with Record() as record:
        parts = [record.input(torch.zeros(count, 4)) for count in (2, 1, 3)]
        y = torch.cat(parts, 0)
    program = record.program(y)
    assert [[op.name for op in piece.program.ops] for piece in divider.divide(program)] == [["cat"]]
    pieces = divider.divide(program, is_often_new=True)
    assert [[op.name for op in piece.program.ops] for piece in pieces] == [["constant_pad_nd"], ["copy_"], ["copy_"]]
    assert [piece.program.donated for piece in pieces] == [(), (0,), (0,)]
    for _ in range(1000):
        pieces = divider.divide(program, is_often_new=True)
    assert len(pieces) == 1


def test_a_copied_element_keeps_what_is_written_later(in_pieces: None) -> None:
    x, y = torch.ones(4, device="tpu"), torch.ones(2, 2, device="tpu")
    made = torch.stack([x.view(2, 2), y, x.view(2, 2).T])
    x.mul_(5)
    again = torch.cat([x.view(2, 2), y])
    assert made.cpu().eq(1).all() and again.tolist() == [[5, 5], [5, 5], [1, 1], [1, 1]]


def test_programs_and_launches_are_counted_by_tier(in_pieces: None) -> None:
    before = metrics.snapshot()
    with torchtpu.explain() as explanation:
        for i in range(6):
            x = torch.full((7, 13), 1.5 + i, device="tpu")
            ((x.tanh() * 3).cumsum(1) - 2).softmax(1).sum(0).tolist()
    after = metrics.snapshot()

    def made(tier: str, what: str) -> float:
        return after["tiers"].get(tier, {}).get(what, 0) - before["tiers"].get(tier, {}).get(what, 0)

    for what, total in (("programs", "programs_compiled"), ("launches", "launches")):
        assert sum(made(tier, what) for tier in after["tiers"]) == after[total] - before[total] > 0
    assert made("pieces", "launches") >= 12
    (row,) = (row for row in explanation.data["tiers"] if row["tier"] == "pieces")
    assert row["launches"] == made("pieces", "launches")
    assert {region["tier"] for region in explanation.data["regions"]} == {"pieces"}
    assert f"pieces: {row['programs']} programs" in str(explanation)


def test_a_new_piece_of_a_known_stream_is_a_recompilation(in_pieces: None) -> None:
    def lap(columns: int) -> None:
        x = torch.ones(3, columns, device="tpu")
        for _ in range(8):
            x = x.cumsum(0) * 2
        x.logsumexp(0).tolist()

    _C.forget_streams()
    with config.using(padding=False):
        for columns in (21, 22, 23):
            lap(columns)
        metrics.reset()
        lap(24)
    assert metrics.snapshot()["tiers"]["pieces"]["programs"] > 0
    counts = metrics.snapshot()["recompilations"]
    assert any("dimension 1" in reason and "test_division.py" in reason for reason in counts), counts


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


def test_pieces_that_come_with_other_sizes_serve_all_that_have_the_same_capacity() -> None:
    def episode(length: int, device: str) -> torch.Tensor:
        returns = torch.linspace(1, 0, length).to(device)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        terms = [torch.tanh(returns[i] * (i + 1.0)) for i in range(length)]
        return torch.stack([term * 2 + 1 for term in terms[:5]]).sum() + returns[length // 2]

    _C.forget_streams()
    lengths = [40, 41, 45, 37, 52, 50, 43, 60, 39, 57, 48, 36, 55, 47, 59, 62]
    for number, length in enumerate(lengths):
        if number == 10:
            before = metrics.snapshot()["programs_compiled"]
        torch.testing.assert_close(episode(length, "tpu").cpu(), episode(length, "cpu"), rtol=1e-5, atol=1e-5)
    assert metrics.snapshot()["programs_compiled"] == before


def test_places_of_an_array_whose_size_changes_share_programs() -> None:
    """A table that is filled cell by cell: a program for all cells serves, not one for each."""
    dice = random.Random(0)
    programs = []
    for _ in range(24):
        rows, columns = dice.randint(3, 10), dice.randint(3, 10)
        found, expected = torch.zeros(rows, columns, device="tpu"), torch.zeros(rows, columns)
        for table in (found, expected):
            for i in range(1, rows):
                for k in range(1, columns):
                    table[i, k] = torch.minimum(table[i - 1, k], table[i, k - 1]) * 2 + 1
        assert found.cpu().equal(expected)
        programs.append(metrics.snapshot()["programs_compiled"])
    assert max(b - a for a, b in itertools.pairwise(programs)) <= 24


def test_rows_of_an_array_whose_length_changes_are_read_by_one_program(in_pieces: None) -> None:
    def rows(length: int) -> None:
        x = torch.arange(3.0 * length).view(length, 3)
        on_device = x.to("tpu")
        y = torch.zeros(3, device="tpu")
        for i in range(0, length, 2):
            y = torch.relu(y * 0.5 + on_device[i])
        expected = torch.zeros(3)
        for i in range(0, length, 2):
            expected = torch.relu(expected * 0.5 + x[i])
        torch.testing.assert_close(y.cpu(), expected)

    for length in (17, 18, 19, 20, 21, 22, 23):
        rows(length)
    before = metrics.snapshot()["programs_compiled"]
    for length in (24, 26, 28, 30):
        rows(length)
    assert metrics.snapshot()["programs_compiled"] == before


def test_streams_whose_lengths_change_compute_what_the_cpu_computes(in_pieces: None) -> None:
    def run(length: int, device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(length)
        x, w = (torch.rand(n, 3, generator=generator).to(device) for n in (length, 3))
        written, kept = torch.zeros(length, 3, device=device), []
        h = (x - x.mean(0)) / (x.std(0) + 1e-3)
        for i in range(0, length, 3):
            written[i] += torch.tanh(h[i] @ w) * 2
            kept.append(h[i : i + 2].sum())
            h = torch.softmax(h, 0) * 3 if i % 4 == 0 else h
        part = written.t().contiguous().flatten()[1:-1]
        return [written.cpu(), torch.stack(kept).sum().cpu(), (part * 2).sum().cpu(), written.argmax().cpu()]

    for length in (9, 10, 12, 13, 17, 16, 21, 11):
        for found, expected in zip(run(length, "tpu"), run(length, "cpu"), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


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


def test_errors_of_places_that_share_a_piece_name_each_its_own_line(
    monkeypatch: pytest.MonkeyPatch, in_pieces: None
) -> None:
    x, good = torch.arange(12.0, device="tpu").view(4, 3), torch.tensor([3], device="tpu")
    bad = torch.tensor([9], device="tpu")

    def first(places: torch.Tensor) -> torch.Tensor:
        return torch.relu(x - 1).index_select(0, places) * 2

    def second(places: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x - 1).index_select(0, places) * 2).sum()

    def line_of(f: Callable[..., torch.Tensor]) -> str:
        return f"test_division.py:{f.__code__.co_firstlineno + 1}"

    assert first(good).tolist() == [[16.0, 18.0, 20.0]]  # makes the programs
    assert second(good).item() == 54.0
    for f in (second, first, second):
        _C.forget_streams()  # whose ops keep their lines
        with pytest.raises(IndexError, match=line_of(f)):
            f(bad).tolist()
    assert metrics.snapshot()["regions_in_pieces"] >= 2
    run = startup.engine()._executor.run

    def refuse(work: Any, executable: Any, **rest: Any) -> None:
        if any("relu" in op.name for op in work.program.ops):
            raise ValueError("no such machine")
        run(work, executable, **rest)

    monkeypatch.setattr(startup.engine()._executor, "run", refuse)
    for f, other in ((second, first), (first, second)):
        _C.forget_streams()
        with pytest.raises(RuntimeError, match="no such machine") as raised:
            f(good).tolist()
        assert line_of(f) in str(raised.value)
        assert line_of(other) not in str(raised.value)


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
    def refuse(*_: object) -> None:
        raise RuntimeError("no pieces today")

    monkeypatch.setattr(Divider, "divide", refuse)
    x = torch.ones(3, device="tpu")
    for _ in range(9):
        x = torch.relu(x + 1)
    assert x.tolist() == [10.0] * 3
    assert startup.engine_counters().bailouts.counts()


def test_a_piece_that_is_forgotten_while_it_is_compiled_is_launched_as_it_was_compiled(
    in_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = Stock.submit

    def forgetful(stock: Stock, pieces: Any, device: int) -> Any:
        made = submit(stock, pieces, device)
        stock._known.clear()
        stock._forms.clear()
        return made

    monkeypatch.setattr(Stock, "submit", forgetful)
    monkeypatch.setattr(Stock, "visit", lambda stock, line: 1000)  # sizes may change from here on
    rows = [torch.arange(5.0 * n).reshape(5, n).div(7) for n in (4, 23, 31, 3)]

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = (x * 1.01).sin().cumsum(0).neg()
        return x

    found = [chain(x.to("tpu")) for x in rows]
    for made, x in zip(found, rows, strict=True):
        torch.testing.assert_close(made.cpu(), chain(x))


def test_equal_pieces_that_are_forgotten_before_they_are_compiled_are_each_what_its_launch_takes(
    in_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each begins may be made a constant of the one program, and be a number that the other is given."""
    loss_ms = Stock.loss_ms

    def forgetful(stock: Stock, pieces: Any) -> float:
        loss = loss_ms(stock, pieces)
        stock._known.clear()
        stock._forms.clear()
        stock._padded.clear()
        return loss

    monkeypatch.setattr(Stock, "loss_ms", forgetful)
    monkeypatch.setattr(Stock, "visits", lambda stock, line: 1000)  # sizes may change from here on

    def scaled(x: torch.Tensor, both: torch.Tensor) -> list[torch.Tensor]:
        a, b = both[:, :, None, None].chunk(2, 1)
        return [(x * x.mean() * p + q).softmax(1) for p, q in ((a, b), (b, a), (a, a), (b, b))]

    images = [(torch.rand(1, c, n, n), torch.rand(1, 2 * c)) for c, n in ((8, 8), (16, 4), (8, 4), (16, 8), (4, 4))]
    found = [scaled(x.to("tpu"), both.to("tpu")) for x, both in images]  # all of them are one region
    for made, (x, both) in zip(found, images, strict=True):
        for part, expected in zip(made, scaled(x, both), strict=True):
            torch.testing.assert_close(part.cpu(), expected)


def test_a_piece_of_an_element_is_made_of_that_element(monkeypatch: pytest.MonkeyPatch, in_pieces: None) -> None:
    made = []
    element_of = list_ops.element_of

    def counted(op: Op, place: int) -> Op:
        made.append(place)
        return element_of(op, place)

    for module in (list_ops, pieces):
        monkeypatch.setattr(module, "element_of", counted)
    weights = [torch.zeros(3, n, device="tpu") for n in range(1, 65)]
    torch._foreach_add_(weights, 1.0)
    torch._foreach_mul_(weights, 3.0)
    assert all(torch.equal(w.cpu(), torch.full(w.shape, 3.0)) for w in weights)
    assert len(made) <= 16 * len(weights)


def test_steps_of_parameters_of_many_sizes_pad_none_of_them(in_pieces: None) -> None:
    weights = [torch.ones(3, n, device="tpu", requires_grad=True) for n in range(2, 40, 3)]
    optimizer = torch.optim.SGD(weights, 0.5, momentum=0.9)
    metrics.reset()
    for _ in range(2):
        for weight in weights:
            weight.grad = weight.detach() * 2
        optimizer.step()
    for weight in weights:
        torch.testing.assert_close(weight.detach().cpu(), torch.full(weight.shape, -0.9))
    assert metrics.snapshot()["arrays_moved"] == 0


def test_layers_that_differ_are_not_divided_and_regions_that_keep_differing_are() -> None:
    def lap(widths: list[int]) -> None:
        x = torch.ones(2, widths[0], device="tpu")
        for a, b in itertools.pairwise(widths):
            x = torch.nn.functional.gelu(x @ torch.full((a, b), 0.01, device="tpu"), approximate="tanh").softmax(1)
        x.sum().item()

    _C.forget_streams()
    metrics.reset()
    lap([3, 5, 7, 9, 11, 13, 15])
    assert metrics.snapshot()["regions_in_pieces"] == 0
    rng = random.Random(0)
    for _ in range(8):
        lap([rng.choice((3, 5, 7)) for _ in range(rng.randint(5, 9))])
    assert metrics.snapshot()["regions_in_pieces"] > 0


FUNCTIONS = [torch.sin, torch.cos, torch.tanh, torch.sigmoid, torch.erf, torch.atan, torch.asinh, torch.neg]


def chained(first: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.ones(3, 4, device="tpu", dtype=dtype)
    for function in FUNCTIONS[first:] + FUNCTIONS[:first]:
        x = function(x)
    return x.sum()


def test_regions_of_a_line_are_not_divided_where_few_are_new() -> None:
    _C.forget_streams()
    metrics.reset()
    for first in range(len(FUNCTIONS)):
        for _ in range(12):
            chained(first, torch.float64).item()
    assert metrics.snapshot()["regions_in_pieces"] == 0


def test_regions_of_a_line_are_divided_where_all_are_new() -> None:
    _C.forget_streams()
    metrics.reset()
    for first in range(len(FUNCTIONS)):
        chained(first, torch.float32).item()
    assert metrics.snapshot()["regions_in_pieces"] > 0


def decoded(steps: int, length: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    x = torch.linspace(-1, 1, 4 * length, dtype=dtype).view(length, 4).to(device)
    state = x.mean(0)
    for step in range(steps):
        state = torch.tanh(state * 0.5 + (x * state).sum(0)) - step
    return state.cpu()


@pytest.fixture
def cheap_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few launches of pieces pay for another program."""
    variants = startup.engine()._variants
    assert variants.first is not None
    cheap = variants.first._replace(program_ms=1.0, kilobyte_ms=0.0)
    monkeypatch.setattr(variants, "first", cheap)
    monkeypatch.setattr(variants.stock, "_first", cheap)
    _C.forget_streams()


def launches_of_pieces() -> int:
    return int(metrics.snapshot()["tiers"]["pieces"]["launches"])


def check_decoding(steps: int, length: int, dtype: torch.dtype) -> None:
    torch.testing.assert_close(decoded(steps, length, dtype, "tpu"), decoded(steps, length, dtype, "cpu"))


def decode_in_pieces(dtype: torch.dtype) -> None:
    """Streams of ever other lengths, of which most came in two sizes: no form is made for all sizes of one."""
    for length, steps in itertools.product((5, 7), range(3, 12)):
        check_decoding(steps, length, dtype)
    compiled, pieces = metrics.snapshot()["programs_compiled"], launches_of_pieces()
    check_decoding(8, 9, dtype)
    assert metrics.snapshot()["programs_compiled"] == compiled
    assert launches_of_pieces() > pieces


def laps_until_whole(length: int, dtype: torch.dtype, most: int = 500) -> int:
    """How often the stream is launched in pieces, until it has a program of its own or shares one."""
    for lap in range(most):
        before = launches_of_pieces()
        check_decoding(8, length, dtype)
        if launches_of_pieces() == before:
            return lap
        for flight in startup.engine().compiler.outstanding():
            flight.result()
    raise AssertionError("the stream stays in pieces")


def test_sizes_of_a_stream_share_a_form_once_their_pieces_have_paid_for_it(cheap_programs: None) -> None:
    decode_in_pieces(torch.float32)
    assert laps_until_whole(10, torch.float32) > 0
    before = metrics.snapshot()["tiers"]["quick"]["programs"]
    assert [laps_until_whole(length, torch.float32) for length in (11, 12, 13, 14, 15, 16)] == [0] * 6
    assert metrics.snapshot()["tiers"]["quick"]["programs"] == before


@pytest.mark.bailouts("padding", "variants")
def test_where_that_form_fails_each_size_has_its_own(cheap_programs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ZeroDivisionError("planted")

    decode_in_pieces(torch.float64)
    monkeypatch.setattr(Engine, "_with_padding", fails)
    assert laps_until_whole(17, torch.float64) > 0
    assert metrics.snapshot()["regions_promoted"] == 1
    assert metrics.snapshot()["bailouts"] == {"variants: ZeroDivisionError": 1}


EXPANDED: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda x: x.view(-1)[:6].unsqueeze(-1).expand(6, 3),
    "row": lambda x: x[1, :4].unsqueeze(-1).expand(4, 3),
}


@pytest.mark.parametrize("name", EXPANDED)
def test_what_is_expanded_of_ever_other_arrays(name: str) -> None:
    """Determinants are compiled for each size, so that what is beside them is padded in pieces."""
    for n in range(5, 12):
        x = torch.arange(n * n, dtype=torch.float64).view(n, n)
        sent = x.to("tpu")
        determinant, made = torch.linalg.det(sent), EXPANDED[name](sent) * 2
        determinant.cpu()
        torch.testing.assert_close(made.cpu(), EXPANDED[name](x) * 2)
