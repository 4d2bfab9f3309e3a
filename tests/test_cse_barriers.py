"""What a program computes again on purpose is not merged by XLA."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import pytest
import torch
from engine_support import TABLE, make_engine, run_recorded
from record_support import Record

from torchtpu.runtime.engine import Engine
from torchtpu.runtime.ir.program import Program
from torchtpu.runtime.lowering.emit import lower


@pytest.fixture(params=[True, False])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """In whose programs `neg` stands for a gather, or for nothing but itself."""
    engine = make_engine(lowerings={**TABLE, "neg": dataclasses.replace(TABLE["neg"], repeats=request.param)})
    yield engine
    engine.close()


def sharded_step(*, is_overwritten: bool = False) -> tuple[Record, Program, list[torch.Tensor]]:
    """Two layers whose weights are made of shards, forward, and made again for what stands for backward."""
    with Record() as record:
        x, *shards = (record.input(torch.rand(4, 4)) for _ in range(3))
        for shard in (*shards, *shards[::-1]):
            x = torch.mm(x, torch.neg(shard * 1.0))
            if is_overwritten:
                shard.mul_(0.5)
    return record, record.program(x), record.expected(x)


def test_a_repeated_op_waits_for_the_newest_result_where_it_is_meant(engine: Engine) -> None:
    record, program, expected = sharded_step()
    text = lower(program, engine.fragments).text
    found = re.findall(r"(%r\d+):2 = stablehlo.optimization_barrier %r\d+, (\S+) :", text)
    if not engine.fragments.repeats(program.ops[1]):
        assert not found
    else:
        (first, result), (_, later) = found
        assert re.search(rf"{result} = call @mm_", text)
        assert f"{first}#1" != later and re.search(rf"{later} = call @mm_", text)
    torch.testing.assert_close(run_recorded(engine, program, record), expected)


def test_an_op_on_other_values_is_no_repetition(engine: Engine) -> None:
    record, program, expected = sharded_step(is_overwritten=True)
    assert "optimization_barrier" not in lower(program, engine.fragments).text
    torch.testing.assert_close(run_recorded(engine, program, record), expected)
