"""What repeats in a region becomes one program."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engine_support import TABLE, Plan, Work, make_engine, run_recorded
from record_support import Record

import torchtpu
from torchtpu.runtime.engine import Engine
from torchtpu.runtime.ir.program import Program
from torchtpu.runtime.partition import clusters
from torchtpu.runtime.partition.clusters import COSTS
from torchtpu.runtime.partition.repeats import Repetition, find_runs
from torchtpu.runtime.partition.split import Part


@pytest.fixture
def engine() -> Iterator[Engine]:
    in_step = dataclasses.replace(TABLE["_foreach_add.List"], maps=True)
    engine = make_engine(lowerings={**TABLE, "_foreach_add.List": in_step})
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def cheap_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small programs repeat themselves too."""
    small = COSTS["cpu"]._replace(least_lines=1, least_saving_ms=0.0)
    monkeypatch.setattr(clusters, "COSTS", {"cpu": small})
    monkeypatch.setattr(clusters, "_SHORTEST", 4)


def layers(record: Record, count: int) -> torch.Tensor:
    x = record.input(torch.randn(4, 8))
    for _ in range(count):
        w, b = record.input(torch.randn(8, 8)), record.input(torch.randn(8))
        x = torch.relu(torch.mm(x, w) + b) * 0.5
    return x


def parts_of(engine: Engine, program: Program) -> list[Part]:
    found = engine.plans.clusters(program)
    assert found is not None
    return found.parts


def programs(parts: list[Part]) -> list[int]:
    """For each part the number of its program, in the order of their first launch."""
    known: dict[int, int] = {}
    return [known.setdefault(id(part.program), len(known)) for part in parts]


@pytest.mark.parametrize(
    ("letters", "shortest", "runs"),
    [
        ("xabcabcabcaby", 3, [Repetition(1, 11, 3)]),
        ("aaaaaaaa", 2, [Repetition(0, 8, 1)]),
        ("abababcdcdcd", 4, [Repetition(0, 6, 2), Repetition(6, 6, 2)]),
        ("abcdefgh", 1, []),
        ("ababxababx", 4, [Repetition(0, 10, 5)]),
        ("abab", 3, []),
        ("", 1, []),
    ],
)
def test_runs_are_what_repeats_itself(letters: str, shortest: int, runs: list[Repetition]) -> None:
    assert find_runs([ord(letter) for letter in letters], shortest) == runs


def test_runs_do_not_overlap_and_do_repeat() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        sequence = random.integers(0, 3, random.integers(1, 60)).tolist()
        end = 0
        for start, length, period in find_runs(sequence, 3):
            assert start >= end and length >= 2 * period
            assert sequence[start + period : start + length] == sequence[start : start + length - period]
            end = start + length
        assert end <= len(sequence)


def test_layers_are_one_program(engine: Engine) -> None:
    with Record() as record:
        y = layers(record, 6)
    parts = parts_of(engine, record.program(y))
    assert programs(parts) == [0] * 6
    assert len(parts[0].program.ops) == 4


def test_layers_compute_what_the_whole_computes(engine: Engine) -> None:
    with Record() as record:
        y = layers(record, 6)
    (made,) = run_recorded(engine, record.program(y), record)
    torch.testing.assert_close(made, *record.expected(y))
    assert engine.counters.programs_compiled == 1
    assert engine.counters.launches == 6


def test_what_only_one_layer_puts_out_is_no_other_program(engine: Engine) -> None:
    with Record() as record:
        x = layers(record, 3)
        y = layers(record, 3)
    program = record.program(x, y)
    assert len(set(programs(parts_of(engine, program)))) == 1
    for made, expected in zip(run_recorded(engine, program, record), record.expected(x, y), strict=True):
        torch.testing.assert_close(made, expected)


def test_steps_that_read_at_other_places_are_one_program(engine: Engine) -> None:
    with Record() as record:
        x, w = record.input(torch.randn(4, 6, 8)), record.input(torch.randn(8, 8))
        h = record.input(torch.zeros(4, 8))
        for step in range(6):
            h = torch.relu(torch.mm(h, w) + x[:, step]) * 0.5
    program = record.program(h)
    parts = parts_of(engine, program)
    assert programs(parts) == [0] * 6
    assert [part.offsets for part in parts] == [(8 * step,) for step in range(6)]
    (made,) = run_recorded(engine, program, record)
    torch.testing.assert_close(made, *record.expected(h))


def test_a_part_takes_the_memory_of_nothing_that_is_read_later(engine: Engine) -> None:
    with Record() as record:
        y = layers(record, 4)
        z = y + record._kept[0]
    program = record.program(z, donated=tuple(range(len(record.inputs))))
    for part in parts_of(engine, program):
        later = [value for value in part.inputs if value == ~0]
        assert not later or part.inputs.index(~0) not in part.program.donated or part.outputs == program.outputs
    (made,) = run_recorded(engine, program, record)
    torch.testing.assert_close(made, *record.expected(z))


def descent(record: Record, count: int) -> torch.Tensor:
    """Steps of a least-squares fit, which hand on their weights and little else."""
    x, y, w = (record.input(torch.randn(size)) for size in ((8, 64), (8, 64), (64, 64)))
    for _ in range(count):
        error = torch.relu(torch.mm(x, w)) + y
        w = w + torch.mm(x.t(), error * 0.5) * 1e-3
    return w


def test_steps_that_hand_on_weights_are_one_program(engine: Engine) -> None:
    with Record() as record:
        w = descent(record, 8)
    assert len(set(programs(parts_of(engine, record.program(w))))) == 1
    (made,) = run_recorded(engine, record.program(w), record)
    torch.testing.assert_close(made, *record.expected(w), rtol=1e-5, atol=1e-5)


def test_long_chains_of_elementwise_ops_stay_whole(engine: Engine) -> None:
    with Record() as record:
        x = record.input(torch.randn(4096))
        for _ in range(40):
            x = torch.relu(x) * 0.5
    assert engine.plans.clusters(record.program(x)) is None


def test_lists_are_taken_apart_where_their_elements_are_apart(engine: Engine) -> None:
    with Record() as record:
        tensors = [record.input(torch.randn(n)) for n in (4, 8, 4, 8, 4, 8)]
        made = torch._foreach_add(torch._foreach_add(tensors, tensors), tensors)
        crossed = torch._foreach_add(made, [*made[2:], *made[:2]])
    program = record.program(*made, *crossed)
    for array, expected in zip(run_recorded(engine, program, record), record.expected(*made, *crossed), strict=True):
        torch.testing.assert_close(array, expected)
    assert engine.counters.fragment_traces == 2


def hot_engine(monkeypatch: pytest.MonkeyPatch, logged: list[str]) -> tuple[Engine, Program, Record]:
    monkeypatch.setattr(clusters, "_HOT", 3)
    monkeypatch.setattr(clusters, "MS_A_LAUNCH", 1e9)
    monkeypatch.setattr("torchtpu.runtime.telemetry.log.write", logged.append)
    engine = make_engine(knobs={"log": ("cluster",)})
    with Record() as record:
        y = layers(record, 6)
    return engine, record.program(y), record


def launches(engine: Engine, plan: Plan, record: Record, count: int) -> list[int]:
    """The launches of programs that each work took; what it computes is right."""
    made = []
    for _ in range(count):
        before = engine.counters.launches
        work: Any = Work(plan.executable, [engine.upload(tensor.clone(), 0) for tensor in record.inputs])
        engine.launch(work)
        assert work.error is None, work.error
        made.append(engine.counters.launches - before)
    return made


def test_a_hot_region_climbs_to_the_form_that_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    engine, program, record = hot_engine(monkeypatch, logged)
    plan = Plan(program)
    engine.plan(plan)
    plan.wait()
    assert launches(engine, plan, record, 3) == [6, 6, 6]
    assert engine.counters.programs_compiled == 1
    assert launches(engine, plan, record, 1) == [6]
    assert engine.counters.regions_climbing == 1
    plan.executable._candidate.result(60)
    assert sorted(launches(engine, plan, record, 16)) == [1] * 8 + [6] * 8
    (line,) = [line for line in logged if "stays" in line]
    stays = 1 if "stays whole" in line else 6
    assert launches(engine, plan, record, 3) == [stays] * 3
    assert engine.counters.regions_fused == (stays == 1)
    engine.close()


def test_a_region_stays_as_it_is_in_deterministic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, program, record = hot_engine(monkeypatch, [])
    plan = Plan(program)
    engine.plan(plan)
    plan.wait()
    torch.use_deterministic_algorithms(True)
    try:
        assert launches(engine, plan, record, 10) == [6] * 10
    finally:
        torch.use_deterministic_algorithms(False)
    assert engine.counters.programs_compiled == 1
    engine.close()


def test_a_network_trains_in_clusters_as_on_the_cpu() -> None:
    def train(device: str) -> list[float]:
        torch.manual_seed(0)
        block = [torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU()]
        model = torch.nn.Sequential(*[m for _ in range(4) for m in (torch.nn.Linear(8, 8), *block[1:])]).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        x = torch.ones(4, 8, device=device)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    torchtpu.metrics.reset()
    trained = train("tpu")
    counts = torchtpu.metrics.snapshot()
    assert trained == pytest.approx(train("cpu"), rel=1e-4)
    assert counts["launches"] > 3 * counts["regions_planned"]
    assert counts["programs_compiled"] < counts["launches"] / 2
