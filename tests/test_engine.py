"""The engine compiles, launches and explains hand-recorded programs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_support import (
    TABLE,
    Plan,
    Work,
    check,
    compile_,
    make_engine,
    plan_of,
    run,
    text_of,
)
from record_support import Record

from torchtpu.compiler_cache import DirectoryStore
from torchtpu.ops.registry import LOWERINGS, Lowering
from torchtpu.runtime.device.client import Client
from torchtpu.runtime.engine import Engine
from torchtpu.runtime.ir.program import Base, Lifted, Op, Operand, Program, Random, Result, Scalar
from torchtpu.runtime.ir.types import ELEMENT


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = make_engine()
    yield engine
    engine.close()


def test_a_chain_of_ops_equals_torch(engine: Engine) -> None:
    with Record() as record:
        x, w = record.input(torch.randn(4, 3)), record.input(torch.randn(5, 3))
        y = torch.relu(torch.mm(x, w.t())) * 2.5
        z = torch.add(y, y, alpha=3)
    check(engine, record, y, z)


def test_views_and_in_place_writes_equal_torch(engine: Engine) -> None:
    with Record() as record:
        x = record.input(torch.arange(24.0).view(4, 6))
        v = x[1:3]
        v.add_(x[:2].clone())
        x.t()[2].mul_(x[:, 0])
        x[:, ::2].relu_()
        y = x.view(2, 12)[:, 3:7] + 1.0
        x.diagonal().zero_()
    check(engine, record, x, y)
    check(engine, record, x, y, donated=(0,))


def test_out_arguments_and_lists_are_written(engine: Engine) -> None:
    with Record() as record:
        a, b = record.input(torch.randn(3, 3)), record.input(torch.randn(2))
        out = record.input(torch.zeros(3, 3).t())
        torch.add(a, a, out=out)
        torch._foreach_add_([a, b], [out.t(), b], alpha=2)
    check(engine, record, a, b, out)


def test_writes_of_one_op_into_one_storage_all_count(engine: Engine) -> None:
    with Record() as record:
        bucket = record.input(torch.arange(6.0))
        torch._foreach_add_([bucket[:2], bucket[4:]], [bucket[2:4], bucket[2:4]], alpha=1)
    check(engine, record, bucket)


def test_results_keep_their_memory_order(engine: Engine) -> None:
    with Record() as record:
        x = record.input(torch.randn(2, 3, 4, 5))
        y = x.permute(0, 2, 3, 1).neg()
    program = check(engine, record, y)
    assert program.ops[0].results[0].strides == (60, 5, 1, 20)


def test_several_results_and_unused_ones(engine: Engine) -> None:
    with Record() as record:
        x = record.input(torch.randn(4, 8))
        y, _, rstd = torch.native_layer_norm(x, [8], torch.ones(8), torch.zeros(8), 1e-5)
        z = y * rstd
    check(engine, record, z)


def test_a_copy_costs_nothing(engine: Engine) -> None:
    with Record() as record:
        x = record.input(torch.randn(4))
        y = record.input(torch.zeros(4))
        y.copy_(x)
        z = y.clone() * x
    program = check(engine, record, z)
    text = text_of(engine, program)
    assert text.count(" call @") == 1
    assert text.count("%in1") == 1  # as a parameter


def test_dead_ops_are_dropped(engine: Engine) -> None:
    with Record() as record:
        x = record.input(torch.randn(4))
        torch.relu(x) * 3.0
        y = x * 2.0
    program = check(engine, record, y)
    assert text_of(engine, program).count(" call @") == 1


def test_lifted_numbers_share_one_program(engine: Engine) -> None:
    programs = []
    for factor in (0.5, 3.25):
        with Record(lifts=True) as record:
            x = record.input(torch.randn(4))
            y = x * factor + x * 7.0
        programs.append(check(engine, record, y))
    assert programs[0] == programs[1]
    assert engine.counters.programs_compiled == 1


def test_a_lifted_float_is_weakly_typed_and_a_tensor_number_is_not(engine: Engine) -> None:
    base = Base((2,), torch.bfloat16)
    x = Operand(~0, (2,), (1,), 0, torch.bfloat16, base)
    for scalar, dtype in (
        (Scalar(Lifted("f", 0), torch.float64, True), torch.bfloat16),
        (Scalar(Lifted("f", 0), torch.float32, False), torch.float32),
    ):
        result = Result(0, (2,), (1,), dtype, Base((2,), dtype))
        op = Op("mul.Tensor", (x, scalar), (result,), (), "train.py:3")
        program = Program((op,), (base,), (0,), (), 1, 0, "train.py:3")
        (got,) = run(engine, program, [torch.ones(2, dtype=torch.bfloat16)], [1.5])
        assert torch.equal(got, torch.full((2,), 1.5, dtype=dtype))


def lift_offsets(record: Record, output: torch.Tensor) -> Program:
    """The program of one in-place op with the offsets of its two arguments as run-time inputs."""
    (op,) = record.ops
    written, read = (replace(a, offset=Lifted("i", i)) for i, a in enumerate(op.args[:2]))
    write = replace(op.writes[0], offset=written.offset)
    return replace(record.program(output), ops=(replace(op, args=(written, read), writes=(write,)),), ints=2)


def test_a_lifted_offset_reads_and_writes_at_run_time(engine: Engine) -> None:
    with Record() as record:
        x = record.input(torch.arange(12.0).view(4, 3))
        x[2].mul_(x[1])
    program = lift_offsets(record, x)
    for source, target in ((1, 2), (3, 0)):
        base = torch.arange(12.0).view(4, 3)
        want = base.clone()
        want[target] *= base[source]
        (got,) = run(engine, program, [base], ints=[target * 3, source * 3])
        assert torch.equal(got, want)
    assert engine.counters.programs_compiled == 1


def test_a_lifted_offset_across_rows_takes_another_program(engine: Engine) -> None:
    with Record() as record:
        x = record.input(torch.arange(12.0).view(4, 3))
        x[2].mul_(x[1])
    program = lift_offsets(record, x)
    base = torch.arange(12.0).view(4, 3)
    want = base.clone().view(-1)
    want[7:10] *= base.view(-1)[1:4]
    for _ in range(2):
        (got,) = run(engine, program, [base], ints=[7, 1])
        assert torch.equal(got.view(-1), want)
    assert engine.counters.offset_variants == 2  # one per plan
    assert engine.counters.programs_compiled == 2


def test_a_cache_write_at_a_lifted_position_is_one_update_of_its_box(engine: Engine) -> None:
    with Record() as record:
        cache = record.input(torch.zeros(2, 3, 8, 4))
        key = record.input(torch.ones(2, 3, 1, 4))
        cache[:, :, 5:6].add_(key)
    (op,) = record.ops
    target = replace(op.args[0], offset=Lifted("i", 0))
    ops = (replace(op, args=(target, *op.args[1:]), writes=(replace(op.writes[0], offset=Lifted("i", 0)),)),)
    program = replace(record.program(cache, donated=(0,)), ops=ops, ints=1)
    for position in (0, 7):
        (got,) = run(engine, program, [t.clone() for t in record.inputs], ints=[position * 4])
        assert got[:, :, position].eq(1).all() and got.sum() == 24
    text = text_of(engine, program)
    assert "(tensor<2x3x8x4xf32>, tensor<2x3x1x4xf32>, tensor<i64>" in text
    assert "tensor<192xf32>" not in text


def test_a_random_op_gets_seed_and_offset() -> None:
    def draw(x, generator):
        seed, offset = generator
        assert (seed.dtype, offset.dtype) == ("uint64", "int64")
        return x + (seed.astype("float32") + offset)

    engine = make_engine(lowerings={"neg": Lowering("neg", draw, random=True)})
    base = Base((2,), torch.float32)
    op = Op(
        "neg",
        (Operand(~0, (2,), (1,), 0, torch.float32, base), Random(Lifted("i", 0), Lifted("i", 1))),
        (Result(0, (2,), (1,), torch.float32, base),),
        (),
        "a.py:1",
    )
    (got,) = run(engine, Program((op,), (base,), (0,), (), 0, 2, "a.py:1"), [torch.zeros(2)], ints=[40, 2])
    assert got.tolist() == [42.0, 42.0]
    engine.close()


@pytest.fixture
def a_device_that_lags(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has become of a launch is not known when it returns."""
    monkeypatch.setattr(Client, "is_ready", lambda client, array: False)


def indexing(engine: Engine, index: list[int]) -> tuple[Work, Any]:
    with Record() as record:
        x = record.input(torch.arange(6.0).view(3, 2))
        i = record.input(torch.tensor([0, 1]))
        y = torch.index_select(x, 0, i)
    program = record.program(y)
    arrays = [engine.upload(x, 0), engine.upload(torch.tensor(index), 0)]
    work = Work(compile_(engine, program), arrays, program=program)
    engine.launch(work)
    return work, y


def test_a_check_that_is_known_to_have_passed_costs_nothing_later(engine: Engine) -> None:
    work, y = indexing(engine, [0, 1])
    assert torch.equal(engine.download(work.outputs[0]), y)
    assert work.guards_made == []


def test_a_check_that_is_known_to_have_failed_fails_the_work(engine: Engine) -> None:
    work, _ = indexing(engine, [0, 7])
    assert isinstance(work.error, IndexError)
    assert str(work.error) == "index out of range in self (aten::index_select recorded at test.py:2)"
    engine.finish(0)


@pytest.mark.usefixtures("a_device_that_lags")
def test_a_check_that_passes_gives_a_guard_that_settles(engine: Engine) -> None:
    work, y = indexing(engine, [0, 1])
    assert torch.equal(engine.download(work.outputs[0]), y)
    (guard,) = work.guards_made
    engine.resolve(guard)
    assert guard.pending() == []


@pytest.mark.usefixtures("a_device_that_lags")
def test_a_check_that_fails_is_raised_by_reads_of_it_and_of_what_follows(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, _ = indexing(engine, [0, 7])
    assert work.error is None
    monkeypatch.undo()
    with pytest.raises(IndexError):
        engine.finish(0)
    with pytest.raises(IndexError, match=r"index out of range in self \(aten::index_select recorded at test.py:2\)"):
        engine.resolve(work.guards_made[0])
    with Record() as record:
        z = record.input(torch.zeros(2, 2)) * 2.0
    later = Work(compile_(engine, record.program(z)), work.outputs, work.guards_made)
    engine.launch(later)
    with pytest.raises(IndexError):
        engine.resolve(later.guards_made[0])
    again, _ = indexing(engine, [0, 1])
    assert len(again.outputs) == 1


@pytest.mark.usefixtures("a_device_that_lags")
@pytest.mark.parametrize("bad", [0, 31, 32, 69])
def test_of_many_checks_the_one_that_failed_is_named(bad: int) -> None:
    engine = make_engine(knobs={"clusters": False})
    with Record() as record:
        x = record.input(torch.arange(6.0).view(3, 2))
        places = [record.input(torch.tensor([0, 1])) for _ in range(70)]
        outputs = [torch.index_select(x, 0, place) for place in places]
    executable = compile_(engine, record.program(*outputs))
    given = [place + 3 * (i == bad) for i, place in enumerate(record.inputs[1:])]
    work = Work(executable, [engine.upload(v, 0) for v in (x, *given)])
    engine.launch(work)
    for i, guard in enumerate(work.guards_made):
        if i == bad:
            with pytest.raises(IndexError, match=rf"recorded at test\.py:{bad + 2}\)"):
                engine.resolve(guard)
        else:
            engine.resolve(guard)
    engine.finish(0)
    engine.close()


def writes_into_a_cache(cache: Any, place: Any, row: Any, scale: Any, tail: Any) -> tuple[Any, ...]:
    cache[:, :4].copy_(tail)
    cache.index_copy_(0, place, row)
    return cache, scale.mul_(3).add_(1)


CACHE = (torch.zeros(256, 64), torch.tensor([3, 5]), torch.ones(2, 64), torch.ones(4096), torch.ones(256, 4))


def test_what_is_written_behind_a_check_is_changed_where_it_lies(engine: Engine) -> None:
    with Record() as record:
        cache, place, *others = map(record.input, CACHE)
        picked = torch.index_select(others[-1], 0, place)
        outputs = picked, *writes_into_a_cache(cache, place, *others)
    executable = compile_(engine, record.program(*outputs, donated=(0, 3)))
    assert executable.loaded.aliased_bytes == (256 * 64 + 4096) * 4
    assert executable.loaded.temporary_bytes < 4096


def test_a_change_behind_a_check_may_have_none_of_its_own() -> None:
    """What it calls is in the program, where only the branch that is taken calls it."""
    engine = make_engine(lowerings={**TABLE, "relu": Lowering("relu", lambda x: x.at[0].set(1))})
    with Record() as record:
        cache, place, tail = (record.input(CACHE[i]) for i in (0, 1, 4))
        outputs = torch.index_select(tail, 0, place), cache.relu_()
    program = record.program(*outputs, donated=(0,))
    assert "stablehlo.case" in text_of(engine, program)
    assert compile_(engine, program).loaded.aliased_bytes == 256 * 64 * 4


def test_where_nothing_is_checked_nothing_is_chosen(engine: Engine) -> None:
    with Record() as record:
        cache, _, *others = map(record.input, CACHE)
        cache[:, :4].copy_(others[-1])
        outputs = cache, others[1].mul_(3).add_(1)
    text = text_of(engine, record.program(*outputs, donated=(0, 3)))
    assert "stablehlo.select" not in text
    assert "stablehlo.case" not in text


@pytest.mark.usefixtures("a_device_that_lags")
def test_checks_and_failed_inputs_reach_only_the_outputs_that_depend_on_them(engine: Engine) -> None:
    with Record() as record:
        x = record.input(torch.arange(6.0).view(3, 2))
        i, j = record.input(torch.tensor([0, 1])), record.input(torch.tensor([1, 2]))
        outputs = torch.index_select(x, 0, i), torch.index_select(x, 0, j), x * 2.0, x.clone().copy_(x * 3.0)
        filled = j.clone()
        filled.fill_(5)
    program = record.program(*outputs, filled)
    executable = compile_(engine, program)

    def launch(*inputs: Any) -> Work:
        given = [v if isinstance(v, Exception) else engine.upload(v, 0) for v in inputs]
        work = Work(executable, given, program=program)
        engine.launch(work)
        assert work.error is None
        return work

    work = launch(record.inputs[0], torch.tensor([0, 9]), torch.tensor([1, 2]))
    first, second, *others = work.guards_made
    assert others == [None] * 3
    engine.resolve(second)
    with pytest.raises(IndexError, match=r"recorded at test\.py:2"):
        engine.resolve(first)
    work = launch(record.inputs[0], torch.tensor([0, 1]), ValueError("failed before"))
    assert list(work.poisoned) == [1]
    assert torch.equal(engine.download(work.outputs[0]), outputs[0])
    assert torch.equal(engine.download(work.outputs[-1]), filled)
    assert list(launch(ValueError("failed before"), *record.inputs[1:]).poisoned) == [0, 1, 2, 3]
    engine.finish(0)


def test_an_op_without_a_lowering_fails_the_plan_and_names_op_and_line(engine: Engine) -> None:
    with Record() as record:
        y = torch.sin(record.input(torch.zeros(2)))
    with pytest.raises(NotImplementedError, match=r"aten::sin recorded at test\.py:2"):
        compile_(engine, record.program(y))


def test_a_lowering_that_raises_names_op_and_line() -> None:
    engine = make_engine(lowerings={"neg": Lowering("neg", lambda x: x.no_such_attribute)})
    with Record() as record:
        y = torch.neg(record.input(torch.zeros(2)))
    with pytest.raises(RuntimeError, match=r"aten::neg recorded at test.py:2 cannot be lowered: AttributeError"):
        compile_(engine, record.program(y))
    engine.close()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_an_element_type_that_xla_lacks_names_op_and_line(engine: Engine) -> None:
    with Record() as record:
        y = record.input(torch.zeros(2, dtype=torch.complex32)).clone()
    with pytest.raises(RuntimeError, match=r"aten::clone recorded at test.py:2 .* torch.complex32 tensors cannot live"):
        compile_(engine, record.program(y))


def test_a_wrong_shape_of_a_lowering_is_an_error() -> None:
    engine = make_engine(lowerings={"neg": Lowering("neg", lambda x: x[None])})
    with Record() as record:
        y = torch.neg(record.input(torch.zeros(2)))
    with pytest.raises(RuntimeError, match=r"shape \(1, 2\) instead of \(2,\)"):
        compile_(engine, record.program(y))
    engine.close()


def test_a_module_that_xla_rejects_fails_the_plan_with_its_lines(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.client, "compile", lambda *_: (_ for _ in ()).throw(ValueError("no such op")))
    with Record() as record:
        y = torch.neg(record.input(torch.zeros(2)))
    with pytest.raises(RuntimeError, match=r"region recorded at test.py:1 \(1 ops\) could not be compiled: no such op"):
        compile_(engine, record.program(y))


def test_equal_programs_compile_once_per_device(engine: Engine) -> None:
    with Record() as record:
        y = torch.neg(record.input(torch.zeros(2)))
    first, second = compile_(engine, record.program(y)), compile_(engine, record.program(y))
    assert first.run is second.run
    assert engine.counters.programs_compiled == 1
    other = compile_(engine, record.program(y), device=1)
    assert other.about.identity == first.about.identity
    assert engine.counters.programs_compiled == 2


def test_a_second_process_finds_plans_and_programs_on_disk(tmp_path: Any) -> None:
    with Record() as record:
        x = record.input(torch.randn(3, 3))
        i = record.input(torch.tensor([1]))
        y = torch.index_select(x, 0, i)
    counters = []
    for _ in range(2):
        engine = make_engine(store=DirectoryStore(tmp_path))
        check(engine, record, y)
        counters.append(engine.counters)
        engine.close()
    assert (counters[0].programs_compiled, counters[0].fragment_traces) == (1, 1)
    assert (counters[1].programs_compiled, counters[1].fragment_traces) == (0, 0)
    assert (counters[1].cache_hits_disk, counters[1].plan_hits_disk) == (1, 1)


def test_an_executable_that_does_not_load_is_compiled_again(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with Record() as record:
        y = torch.neg(record.input(torch.zeros(2)))
    engine = make_engine(store=DirectoryStore(tmp_path))
    monkeypatch.setattr(engine.client, "serialize", lambda executable: b"not an executable")
    check(engine, record, y)
    engine.close()
    engine = make_engine(store=DirectoryStore(tmp_path))
    check(engine, record, y)
    assert (engine.counters.cache_load_failures, engine.counters.programs_compiled) == (1, 1)
    engine.close()


def test_a_launch_over_the_memory_limit_says_what_it_needs() -> None:
    engine = make_engine(knobs={"memory_limit": 1000})
    with Record() as record:
        y = torch.neg(record.input(torch.zeros(180)))
    largest = r"its largest result: float32\[180\], 720 B, of aten::neg at test.py:2"
    place = rf"region recorded at test.py:1 \(from aten::neg at test.py:2 on; {largest}\)"
    said = rf"{place} needs 720 B more, 720 B of 1.00 kB are in use"
    with pytest.raises(torch.OutOfMemoryError, match=said):
        run(engine, record.program(y), record.inputs)
    engine.close()


def test_a_launch_waits_for_memory_that_is_released() -> None:
    held: list[Any] = []
    engine = make_engine(knobs={"memory_limit": 1000}, release=held.clear)
    with Record() as record:
        y = torch.neg(record.input(torch.zeros(100)))
    held.append(engine.upload(torch.zeros(100), 0))
    check(engine, record, y)
    engine.close()


def test_the_launch_log_is_one_line_with_all_fields(capsys: pytest.CaptureFixture[str]) -> None:
    engine = make_engine(knobs={"log": ("launch",)})
    with Record() as record:
        y = torch.neg(record.input(torch.zeros(100)))
    executable = compile_(engine, record.program(y))
    for _ in range(2):
        engine.launch(Work(executable, [engine.upload(t, 0) for t in record.inputs]))
    first, second = capsys.readouterr().err.splitlines()
    fields = (
        r"tpu:0 region [0-9a-f]{8} \| 1 ops 1 in 1 out 0 donated \| cut: read \(test.py:9\) \| %s \| "
        r"run \d+\.\d+ ms \| peak 800 B"
    )
    assert re.fullmatch(fields % r"miss compile \d+ ms", first)
    assert re.fullmatch(fields % r"hit \(trie\)", second)
    engine.close()


def test_an_input_of_another_shape_is_refused_at_the_first_launch(engine: Engine) -> None:
    with Record() as record:
        y = torch.neg(record.input(torch.zeros(2, 3)))
    work = Work(compile_(engine, record.program(y)), [engine.upload(torch.zeros(3, 2), 0)])
    engine.launch(work)
    assert "is ((3, 2), torch.float32)" in str(work.error)


def test_the_users_jax_stays_as_it_is(engine: Engine) -> None:
    import jax
    from jax._src import xla_bridge

    backends = dict(xla_bridge._backends)  # another test may have used jax itself
    with Record() as record:
        y = torch.neg(record.input(torch.zeros(2, dtype=torch.float64)))
    check(engine, record, y)
    assert not jax.config.jax_enable_x64
    assert xla_bridge._backends == backends


def test_registry_lowerings_run_through_the_engine() -> None:
    from torchtpu.ops.math import pointwise  # noqa: F401

    engine = make_engine(lowerings=LOWERINGS)
    with Record() as record:
        x = record.input(torch.randn(3, dtype=torch.bfloat16))
        x.add_(torch.randn(3), alpha=2)
    check(engine, record, x)
    engine.close()


def test_who_holds_what_no_output_fits_makes_no_other_program(engine: Engine) -> None:
    with Record() as record:
        x, y = record.input(torch.ones(4, 6)), record.input(torch.ones(6))
        z = x[0] + y
    texts = [text_of(engine, record.program(z, donated=donated)) for donated in ((), (0,), (0, 1), (1,))]
    assert texts[0] == texts[1] != texts[2] == texts[3]


def test_donated_inputs_become_outputs(engine: Engine) -> None:
    with Record() as record:
        x, y = record.input(torch.randn(64, 64)), record.input(torch.randn(64, 64))
        x[:8].add_(y[8:16])
        z = y * 2.0
    for donated, aliased in (((), 0), ((0,), 1), ((0, 1), 2)):
        program = check(engine, record, x, z, donated=donated)
        assert compile_(engine, program).loaded.aliased_bytes == aliased * x.nbytes


@pytest.mark.parametrize("dtype", ELEMENT, ids=str)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_uploads_come_back_as_they_were(engine: Engine, monkeypatch: Any, platform: str, dtype: torch.dtype) -> None:
    """The way over numpy, which other platforms take, is tried on the CPU's client."""
    monkeypatch.setattr(engine.client, "platform", platform)
    for shape in ((3, 4), (), (0, 2), (1,)):
        tensor = torch.arange(12)[: torch.Size(shape).numel()].view(shape).to(dtype)
        array = engine.upload(tensor, 1)
        assert engine.client.aval(array) == (shape, dtype)
        back = engine.download(array)
        assert (back.dtype, back.shape) == (dtype, tensor.shape)
        assert bytes(back.view(-1).view(torch.uint8)) == bytes(tensor.view(-1).view(torch.uint8))


def test_a_tensor_that_is_not_aligned_is_copied(engine: Engine) -> None:
    whole = torch.arange(9.0)
    array = engine.upload(whole[1:], 0)
    whole.zero_()
    assert engine.download(array).tolist() == list(range(1, 9))


def test_a_transposed_tensor_is_refused(engine: Engine) -> None:
    with pytest.raises(AssertionError, match="contiguous"):
        engine.upload(torch.zeros(2, 3).t(), 0)


def test_what_is_needed_now_is_compiled_first(engine: Engine, monkeypatch: Any) -> None:
    order: list[str] = []
    started, go = threading.Event(), threading.Event()

    def compile_text(text: str, *_: Any) -> Any:
        started.set()
        assert go.wait(30)
        order.append(text)
        raise ValueError(text)

    monkeypatch.setattr(engine.client, "compile", compile_text)
    jobs = (("first", True), ("later", False), ("now", True))
    flights = []
    for text, is_needed_now in jobs:
        flights.append(engine.compiler.submit(plan_of(text), 0, wisher=None if is_needed_now else engine))
        assert started.wait(30)
    go.set()
    for flight in flights:
        assert isinstance(flight.exception(30), ValueError)
    assert order == ["first", "now", "later"]


def test_closing_drops_what_waits_to_be_compiled(engine: Engine, monkeypatch: Any) -> None:
    started, go = threading.Event(), threading.Event()

    def compile_text(text: str, *_: Any) -> Any:
        started.set()
        assert go.wait(30)
        raise ValueError(text)

    monkeypatch.setattr(engine.client, "compile", compile_text)
    monkeypatch.setattr("torchtpu.runtime.compile.compiler._SMALL", 0)  # small ones do not wait for a long one
    running = engine.compiler.submit(plan_of("a"), 0)
    assert started.wait(30)
    with Record() as record:
        y = torch.neg(record.input(torch.zeros(2)))
    waiting = Plan(record.program(y))
    engine.plan(waiting)
    threading.Timer(0.1, go.set).start()
    engine.close()
    assert isinstance(running.exception(30), ValueError)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        waiting.wait()


def test_a_read_in_the_main_thread_can_be_interrupted(engine: Engine, monkeypatch: Any) -> None:
    array = engine.upload(torch.zeros(2), 0)

    class Pending:
        aval = array.aval

        def is_ready(self) -> bool:
            os.kill(os.getpid(), signal.SIGINT)
            return False

    with pytest.raises(KeyboardInterrupt):
        engine.download(Pending())
    assert engine.download(array).tolist() == [0, 0]


def test_the_text_is_the_same_in_every_process() -> None:
    """Fragments that are traced alone, in a batch or read from disk give one text, whatever the hash seed."""
    code = (
        "import engine_support, torch\n"
        "from torchtpu.runtime.lowering.emit import lower\n"
        "engine = engine_support.make_engine()\n"
        "with engine_support.Record() as record:\n"
        "    x = record.input(torch.zeros(3, 4))\n"
        "    y = torch.index_select(x, 0, record.input(torch.tensor([1])))\n"
        "    z = torch.sort(y.t(), stable=True)[0] + torch.native_layer_norm(x, [4], None, None, 1e-5)[0].t()[:, :1]\n"
        "    x[1:].mul_(z.t())\n"
        "program = record.program(x, z, donated=(0,))\n"
        "if {alone}:\n"
        "    [engine.fragments.find([op]) for op in reversed(program.ops)]\n"
        "print(lower(program, engine.fragments).text)\n"
    )
    texts = set()
    for seed, alone in (("1", True), ("2", False)):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", code.format(alone=alone)]
        texts.add(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    assert len(texts) == 1


def test_a_square_result_in_another_memory_order_is_transposed(engine: Engine) -> None:
    with Record() as record:
        y = record.input(torch.randn(3, 3)).t().neg()
    program = check(engine, record, y)
    assert program.ops[0].results[0].strides == (1, 3)


def test_a_factorization_from_disk_finds_lapack_in_a_fresh_process(tmp_path: Any) -> None:
    code = "import torch; print(torch.linalg.cholesky(torch.eye(3).to('tpu') * 4).cpu().sum().item())"
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "TORCHTPU_CACHE_DIR": str(tmp_path), "TORCHTPU_CACHE": "on"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert (done.returncode, done.stdout.strip()) == (0, "6.0"), done.stderr


def test_an_empty_result_of_several_dimensions_is_returned() -> None:
    parts = torch.split_with_sizes_copy(torch.ones(3, 5).to("tpu"), [0, 5], 1)
    assert [tuple(p.cpu().shape) for p in parts] == [(3, 0), (3, 5)]


def test_a_fill_of_an_expanded_view_writes_each_element_once() -> None:
    x = torch.zeros(3, 1).to("tpu")
    x.expand(3, 4).fill_(2.5)
    y = torch.zeros(2, 3).to("tpu")
    y[0].expand(5, 3).zero_().add(1)
    y[1:].expand(4, 3).fill_(1)
    assert x.cpu().tolist() == [[2.5]] * 3
    assert y.cpu().tolist() == [[0.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("name", ["sum", "prod", "nansum", "mean", "cumsum", "cumprod"])
def test_a_reduction_converts_to_the_dtype_of_its_result_first(name: str) -> None:
    x = torch.tensor([[1.75, 2.5, -3.25], [4.5, 0.75, 6.5]])
    for dtype in (torch.float64, torch.bfloat16, *([] if "an" in name else [torch.int64, torch.int32])):
        expected, made = (
            getattr(torch, name)(x.to(device), 1, out=torch.empty(0, dtype=dtype, device=device))
            for device in ("cpu", "tpu")
        )
        torch.testing.assert_close(made.cpu(), expected)


def test_negative_floats_become_the_bytes_that_they_are_on_the_cpu() -> None:
    x = torch.tensor([-1.0, -200.5, 255.9, 300.0, 70000.0, -0.5])
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(x.to("tpu", dtype).to(torch.uint8).cpu(), x.to(dtype).to(torch.uint8))
