"""Programs of ranks whose shards are unequal are divided into stages that fit together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from record_support import Record

from torchtpu.runtime.ir.program import Program
from torchtpu.runtime.partition.ranks import Stage, find_stages

GATHER = "neg"  # stands for a collective


class Ranks:
    """Threads that tell each other ints."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._told: list[list[int]] = [[] for _ in range(size)]

    def stages(self, rank: int, program: Program, shared: int) -> list[Stage]:
        def tell(numbers: Sequence[int]) -> list[list[int]]:
            self._told[rank] = list(numbers)
            self._barrier.wait(60)
            found = [list(each) for each in self._told]
            self._barrier.wait(60)
            return found

        return find_stages(program, GATHER, lambda *_: False, tell, shared)


def stages_of(*programs: Program) -> list[list[Stage]]:
    ranks = Ranks(len(programs))
    shared = min([op.name for op in program.ops].count(GATHER) for program in programs)
    with ThreadPoolExecutor(len(programs)) as pool:
        return list(pool.map(lambda rank: ranks.stages(rank, programs[rank], shared), range(len(programs))))


def step(rows: int, *, is_clipped: bool = False, is_odd: bool = False) -> Program:
    """A shard of some rows in a padded buffer, a product of what is gathered, and an update by the padded gradient."""
    with Record() as record:
        shard, x = record.input(torch.rand(rows, 4)), record.input(torch.rand(4, 4))
        padded = record.input(torch.zeros(4, 4))
        if rows:
            padded[:rows].copy_(shard)
        product = torch.mm(x, torch.neg(padded))
        if is_odd:
            product = torch.sin(product)
        gradient = torch.neg(product)[:rows]
        outputs = [product]
        if is_clipped:
            gradient = gradient * torch.neg(gradient.norm())
        if rows:
            shard.sub_(gradient)
            outputs.append(shard)
    return record.program(*outputs, donated=(0,) if rows else ())


def common(found: list[Stage]) -> list[Program]:
    programs = [stage.part.program for stage in found if stage.is_common]
    return [replace(p, ops=tuple(replace(op, line="") for op in p.ops)) for p in programs]


def kinds(found: list[Stage]) -> list[bool]:
    return [stage.is_common for stage in found]


def test_what_ranks_have_to_themselves_stands_before_and_after_what_they_share() -> None:
    first, second = stages_of(step(3), step(1))
    assert kinds(first) == kinds(second) == [False, True, False]
    assert common(first) == common(second)


def test_a_rank_without_rows_shares_the_same_program() -> None:
    first, second = stages_of(step(4), step(0))
    assert common(first) == common(second)
    assert [op.name for op in common(second)[0].ops].count(GATHER) == 2


def test_own_work_between_collectives_is_a_stage_of_its_own() -> None:
    first, second, third = stages_of(*(step(rows, is_clipped=True) for rows in (3, 3, 2)))
    assert kinds(first) == kinds(second) == kinds(third) == [False, True, False, True, False]
    assert common(first) == common(second) == common(third)


def test_what_is_computed_on_one_rank_alone_is_not_shared() -> None:
    first, second = stages_of(step(2, is_odd=True), step(2))
    assert common(first) == common(second)
    assert (kinds(first), kinds(second)) == ([True, False, True], [True, True])


def test_what_follows_the_collectives_that_all_ranks_have_is_the_last_stage() -> None:
    first, second = stages_of(step(2), step(2, is_clipped=True))
    assert common(first) == common(second) != []
    assert not any(op.name == GATHER for stage in first if not stage.is_common for op in stage.part.program.ops)
    *_, last = second
    assert not last.is_common
    assert [op.name for op in last.part.program.ops].count(GATHER) == 1


def test_every_value_is_made_before_it_is_taken() -> None:
    for found in stages_of(step(3, is_clipped=True), step(1, is_clipped=True)):
        known = {~0, ~1, ~2}
        for stage in found:
            assert known.issuperset(stage.part.inputs)
            known.update(stage.part.outputs)
