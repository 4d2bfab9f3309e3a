"""A program without what nothing in it needs: ops, and the values of tensors of which an op takes the shape only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchtpu.runtime.ir.calls import Parameter, written
from torchtpu.runtime.ir.liveness import find_live, made_by
from torchtpu.runtime.ir.program import Op, Operand, Program
from torchtpu.runtime.ir.values import operands
from torchtpu.runtime.lowering.fragments import Fragments
from torchtpu.runtime.lowering.tracing import Fragment


def needed(
    program: Program, ops: Sequence[Op], fragments: Fragments
) -> tuple[list[int], dict[int, list[int]], list[Fragment]]:
    """The places of the ops whose results or checks are needed, what of theirs is not read, and their fragments."""
    found = fragments.find(ops)
    read = [values_read(op, *fragment) for op, fragment in zip(ops, found, strict=True)]
    kept = find_live(
        range(len(ops)),
        program.outputs,
        lambda place: made_by(ops[place]),
        read.__getitem__,
        lambda place: bool(found[place][0].checks),
    )
    taken = [{o.value for o in operands(ops[place]) if o.value is not None} for place in kept]
    unread = {i: sorted(values - read[kept[i]]) for i, values in enumerate(taken) if values - read[kept[i]]}
    return kept, unread, [found[place][0] for place in kept]


def values_read(op: Op, fragment: Fragment, parameters: Sequence[Parameter]) -> set[int]:
    """The values that an op reads, or writes into."""
    taken = [parameters[n] for n in fragment.used] + [written(op, write) for write in op.writes]
    return {o.value for o in taken if isinstance(o, Operand) and o.value is not None}


def reading(ops: Sequence[Op], kept: Sequence[int], unread: Mapping[int, Sequence[int]]) -> tuple[Op, ...]:
    """The ops that are needed, without the values of tensors of which they take the shape only."""
    return tuple(without_values(ops[place], unread.get(i, ())) for i, place in enumerate(kept))


def without_values(op: Op, values: Sequence[int]) -> Op:
    """The op without these values of tensors of which it takes the shape only."""

    def argument(given: Any) -> Any:
        if isinstance(given, tuple):
            return tuple(map(argument, given))
        return replace(given, value=None) if isinstance(given, Operand) and given.value in values else given

    return replace(op, args=tuple(map(argument, op.args))) if values else op
