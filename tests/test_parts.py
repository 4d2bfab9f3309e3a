"""Programs split into parts compute what the whole computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine_support import Work, compile_, make_engine
from record_support import Record

from torchtpu.runtime.device.client import Client
from torchtpu.runtime.engine import Engine
from torchtpu.runtime.execute.sequence import Sequence
from torchtpu.runtime.ir.liveness import live_bytes
from torchtpu.runtime.ir.program import Lifted, Program
from torchtpu.runtime.partition.recompute import recompute
from torchtpu.runtime.partition.split import Part, split


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = make_engine()
    yield engine
    engine.close()


def launched(engine: Engine, executable: Any, record: Record, inputs: Any = None) -> Work:
    given = [engine.upload(t.clone(), 0) for t in record.inputs] if inputs is None else inputs
    floats = torch.tensor(record.floats, dtype=torch.float64) if record.floats else None
    return Work(executable, given, floats=floats)


def run_in_parts(engine: Engine, program: Program, ends: list[int], work: Work) -> list[Part]:
    parts = split(program, ends)
    executables = [compile_(engine, part.program) for part in parts]
    Sequence(program, parts, executables.__getitem__).run(work, engine._executor.launch)
    return parts


def arrays(engine: Engine, work: Work) -> list[torch.Tensor]:
    assert work.error is None and not work.poisoned
    return [engine.download(array) for array in work.outputs]


def chain(record: Record) -> list[torch.Tensor]:
    x, w = record.input(torch.randn(4, 3)), record.input(torch.randn(5, 3))
    y = torch.relu(torch.mm(x, w.t())) * 2.5
    return [y, torch.add(y, y, alpha=3)]


def writes(record: Record) -> list[torch.Tensor]:
    x = record.input(torch.arange(24.0).view(4, 6))
    v = x[1:3]
    v.add_(x[:2].clone())
    x.t()[2].mul_(x[:, 0])
    x[:, ::2].relu_()
    y = x.view(2, 12)[:, 3:7] + 1.5
    x.diagonal().zero_()
    return [x, y]


def lists(record: Record) -> list[torch.Tensor]:
    a, b = record.input(torch.randn(3, 3)), record.input(torch.randn(2))
    out = record.input(torch.zeros(3, 3).t())
    torch.add(a, a, out=out)
    torch._foreach_add_([a, b], [out.t(), b], alpha=2)
    y, _, rstd = torch.native_layer_norm(a, [3], torch.ones(3), torch.zeros(3), 1e-5)
    return [a, b, out, y * rstd]


@pytest.mark.parametrize("make", [chain, writes, lists])
@pytest.mark.parametrize("is_donated", [False, True])
def test_parts_compute_what_the_whole_computes(
    engine: Engine, make: Callable[[Record], list[torch.Tensor]], is_donated: bool
) -> None:
    with Record(lifts=True) as record:
        outputs = make(record)
    program = record.program(*outputs, donated=(0,) if is_donated else ())
    expected = record.expected(*outputs)
    for ends in ([2], list(range(1, len(program.ops)))):
        work = launched(engine, None, record)
        run_in_parts(engine, program, ends, work)
        for got, want in zip(arrays(engine, work), expected, strict=True):
            torch.testing.assert_close(got, want)


def test_equal_parts_are_one_program(engine: Engine) -> None:
    with Record(lifts=True) as record:
        y = record.input(torch.randn(4))
        for factor in (0.5, 1.5, 2.5, 3.5):
            y = torch.relu(y) * factor
    before = engine.counters.programs_compiled
    parts = run_in_parts(engine, record.program(y), [2, 4, 6], launched(engine, None, record))
    assert len({part.program.ops[1].args for part in parts}) == 1
    assert [part.floats for part in parts] == [(0,), (1,), (2,), (3,)]
    assert engine.counters.programs_compiled - before == 2  # the first takes no memory of another part


def test_a_part_takes_the_memory_of_what_it_reads_last() -> None:
    with Record() as record:
        x = record.input(torch.randn(4))
        a = torch.neg(x)
        b = a * a
        y = b + x
    first, second, third = split(record.program(y, donated=(0,)), [1, 2])
    assert (first.program.donated, second.program.donated, third.program.donated) == ((), (0,), (0, 1))


def test_a_failed_input_spoils_only_what_depends_on_it(engine: Engine) -> None:
    with Record() as record:
        x, y = record.input(torch.randn(4)), record.input(torch.randn(4))
        a, b = torch.neg(x) * 2.0, torch.neg(y) * 3.0
    program = record.program(a, b)
    error = ValueError("lost")
    work = launched(engine, None, record, [error, engine.upload(record.inputs[1].clone(), 0)])
    run_in_parts(engine, program, [1, 2, 3], work)
    assert work.poisoned == {0: error}
    torch.testing.assert_close(engine.download(work.outputs[1]), record.expected(a, b)[1])


def test_a_part_that_fails_fails_what_depends_on_it(engine: Engine) -> None:
    with Record() as record:
        x = record.input(torch.randn(4))
        a = torch.neg(x)
        b = a * 2.0
    program = record.program(a, b)
    parts = split(program, [1])
    executables = [compile_(engine, part.program) for part in parts]
    executables[1].run = None
    work = launched(engine, None, record)
    Sequence(program, parts, executables.__getitem__).run(work, engine._executor.launch)
    assert list(work.kept) == [0] and "could not be launched" in str(work.error)  # what is not kept fails


def test_a_failed_check_is_raised_by_values_of_later_parts_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "is_ready", lambda client, array: False)  # what became of a launch is not known yet
    with Record() as record:
        x, index = record.input(torch.randn(4)), record.input(torch.tensor([3]))
        free = torch.neg(x)
        z = torch.index_select(x, 0, index) * 2.0
    given = [engine.upload(record.inputs[0].clone(), 0), engine.upload(torch.tensor([9]), 0)]
    work = launched(engine, None, record, given)
    run_in_parts(engine, record.program(free, z), [1, 2], work)
    first, second = work.guards_made
    assert first is None
    with pytest.raises(IndexError, match="index out of range in self"):
        engine.resolve(second)


def test_recomputing_holds_fewer_bytes_and_keeps_every_bit(engine: Engine) -> None:
    with Record() as record:
        x = record.input(torch.randn(64, 64))
        made = [x]
        for _ in range(8):
            made.append(torch.relu(made[-1]) * 0.5)
        y = made[-1]
        for value in reversed(made[:-1]):
            y = y * value + value
    program = record.program(y)
    most = max(live_bytes(program))
    smaller, repeated = recompute(program, most // 2, [True] * len(program.ops))
    assert repeated > 0 and max(live_bytes(smaller)) <= 0.6 * most
    # Op by op both times: XLA joins a product and a sum that it sees together.
    works = [launched(engine, None, record) for _ in range(2)]
    for work, made in zip(works, (program, smaller), strict=True):
        run_in_parts(engine, made, list(range(1, len(made.ops))), work)
    assert torch.equal(*(arrays(engine, work)[0] for work in works))


def test_an_op_that_may_not_run_twice_does_not() -> None:
    with Record() as record:
        x = record.input(torch.randn(64, 64))
        a = torch.relu(x)
        b = torch.neg(torch.neg(torch.neg(a)))
        y = a + b
    program = record.program(y)
    smaller, repeated = recompute(program, max(live_bytes(program)) // 2, [False] * len(program.ops))
    assert repeated == 0 and smaller == program


def test_run_time_numbers_are_counted_anew() -> None:
    with Record(lifts=True) as record:
        x = record.input(torch.randn(4))
        y = x * 0.25 + x * 0.75
    program = record.program(y)
    parts = split(program, [1])
    assert [part.program.floats for part in parts] == [1, 1]
    assert parts[1].program.ops[0].args[1] == Lifted("f", 0)
