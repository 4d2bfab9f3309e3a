"""Regions with collectives of several groups are divided into pieces of one group each."""

from __future__ import annotations

import torch
from record_support import Record

from torchtpu.runtime.ir.program import Op, Program
from torchtpu.runtime.ir.values import operands
from torchtpu.runtime.partition.split import split
from torchtpu.runtime.spmd.groups import ordered, split_by_group

GROUPS = {"neg": (0, 1), "abs": (0, 2)}  # what stands for the collectives of two groups


def group_of(op: Op) -> tuple[int, ...] | None:
    return GROUPS.get(op.name)


def hybrid(layers: int, *, is_clipped: bool) -> Program:
    """Each layer's gradient is reduced in the one group, then in the other; all norms may be reduced at the end."""
    with Record() as record:
        x = record.input(torch.rand(4))
        gradients = []
        for _ in range(layers):
            x = torch.neg(x * 2)
            gradients.append(torch.abs(x + 1))
        if is_clipped:
            gradients.append(torch.neg(torch.stack(gradients).sum()))
    return record.program(x, *gradients)


def names(program: Program, pieces: list[list[int]]) -> list[list[str]]:
    found = [[program.ops[place].name for place in piece] for piece in pieces]
    return [[name for name in piece if name in GROUPS] for piece in found]


def test_collectives_that_do_not_wait_for_another_group_are_one_piece() -> None:
    program = hybrid(5, is_clipped=False)
    assert names(program, split_by_group(program, group_of)) == [["neg"] * 5, ["abs"] * 5]


def test_one_that_waits_for_another_group_stands_behind_it() -> None:
    program = hybrid(3, is_clipped=True)
    assert names(program, split_by_group(program, group_of)) == [["neg"] * 3, ["abs"] * 3, ["neg"]]


def test_a_piece_begins_with_the_first_collective_that_is_left() -> None:
    program = hybrid(4, is_clipped=True)
    left = [place for place, op in enumerate(program.ops) if group_of(op)]
    for piece in split_by_group(program, group_of):
        assert next(place for place in piece if group_of(program.ops[place])) == left[0]
        left = [place for place in left if place not in piece]
    assert not left


def test_pieces_compute_what_is_taken_before_it_is_taken() -> None:
    program = hybrid(3, is_clipped=True)
    whole, ends = ordered(program, split_by_group(program, group_of))
    known: set[int | None] = {~0}
    for part in split(whole, ends):
        assert known.issuperset(part.inputs)
        known.update(part.outputs)
    assert sorted(map(str, whole.ops)) == sorted(map(str, program.ops))
    assert all(o.value is not None for op in program.ops for o in operands(op))
