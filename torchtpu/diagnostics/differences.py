"""Finds the first thing in which two programs differ, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from torchtpu.runtime.ir.calls import full_name, schema_of
from torchtpu.runtime.ir.program import Lifted, Op, Operand, Program, Scalar

_CANDIDATES = 64
_LEAST_LIKENESS = 0.5


@dataclass(frozen=True)
class StreamDifference:
    """Why a program is not an earlier one: `what` differs at `line`, from `before` to `after`."""

    kind: str  # dimension, scalar, dtype, layout, aliasing, path, lifetime, lifted or other
    op: str
    line: str
    argument: str
    what: str
    before: str
    after: str
    advice: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


_ADVICE = {
    "dimension": "Pad to a few sizes, drop the last batch (drop_last=True), or group inputs of one length.",
    "scalar": "The number is part of the program's text. Keep it in a tensor on the device, or use few values.",
    "dtype": "Convert once, before the loop.",
    "layout": "Call .contiguous() where the tensor is made, so that each visit has the same strides.",
    "aliasing": "Two arguments share a tensor in one call and not in the other; pass separate tensors.",
    "path": "Python took another branch or the region was cut elsewhere; a read before this line is the usual cause.",
    "lifetime": "A tensor made here outlives the region in one case only: delete it before the step ends, or keep it.",
    "lifted": "The number is a run-time input from now on: no further values compile.",
    "other": "Make the argument the same at each visit.",
}


def nearest(program: Program, earlier: Sequence[Program]) -> tuple[int, float] | None:
    """Which earlier program is most like this one, and how much (0 to 1); None where none is."""
    best: tuple[int, float] | None = None
    names = [op.name for op in program.ops]
    for i in range(len(earlier) - 1, max(-1, len(earlier) - 1 - _CANDIDATES), -1):
        others = [op.name for op in earlier[i].ops]
        shared = sum(a == b for a, b in zip(names, others, strict=False)) / max(len(names), len(others), 1)
        if shared >= _LEAST_LIKENESS and (best is None or shared > best[1]):
            best = i, shared
    return best


def first_difference(old: Program, new: Program) -> StreamDifference:
    """The first thing that differs, in program order."""
    for a, b in zip(old.ops, new.ops, strict=False):
        if a.name != b.name:
            return _difference("path", b, "", "op", f"{full_name(a.name)} at {a.line}", full_name(b.name))
        found = _compare_ops(a, b)
        if found is not None:
            return found
    if len(old.ops) != len(new.ops):
        longer = old if len(old.ops) > len(new.ops) else new
        op = longer.ops[min(len(old.ops), len(new.ops))]
        return _difference("path", op, "", "number of ops", str(len(old.ops)), str(len(new.ops)))
    return _compare_ends(old, new)


def _compare_ops(a: Op, b: Op) -> StreamDifference | None:
    declared = schema_of(b.name).arguments
    for i, (x, y) in enumerate(zip(a.args, b.args, strict=False)):
        name = declared[i].name if i < len(declared) else "generator"
        found = _compare(x, y)
        if found is not None:
            kind, what, before, after = found
            return _difference(kind, b, name, what, before, after)
    return None


def _compare(x: Any, y: Any) -> tuple[str, str, str, str] | None:
    """(kind, what, before, after) of what differs between two arguments."""
    if x == y:
        return None
    if isinstance(x, Operand) and isinstance(y, Operand):
        return _compare_operands(x, y)
    if isinstance(x, tuple) and isinstance(y, tuple) and len(x) == len(y):
        tensors = any(isinstance(item, Operand) for item in (*x, *y))
        if tensors:
            for i, (a, b) in enumerate(zip(x, y, strict=True)):
                found = _compare(a, b)
                if found is not None:
                    kind, what, before, after = found
                    return kind, f"element {i}: {what}", before, after
    x, y = (v.value if isinstance(v, Scalar) else v for v in (x, y))
    if isinstance(x, Lifted) or isinstance(y, Lifted):
        return "lifted", "value", _shown(x), _shown(y)
    numbers = (bool, int, float, complex, tuple)
    kind = "scalar" if isinstance(x, numbers) and isinstance(y, numbers) else "other"
    if isinstance(x, torch.dtype):
        kind = "dtype"
    return kind, "value", _shown(x), _shown(y)


def _compare_operands(x: Operand, y: Operand) -> tuple[str, str, str, str] | None:
    if x.dtype != y.dtype:
        return "dtype", "dtype", _shown(x.dtype), _shown(y.dtype)
    if len(x.sizes) != len(y.sizes):
        return "dimension", "shape", str(list(x.sizes)), str(list(y.sizes))
    for dim, (m, n) in enumerate(zip(x.sizes, y.sizes, strict=True)):
        if m != n:
            return "dimension", f"dimension {dim} of shape {list(y.sizes)}", str(m), str(n)
    if x.value != y.value:
        return "aliasing", "tensor", _shown_value(x), _shown_value(y)
    if x.strides != y.strides:
        return "layout", "strides", str(list(x.strides)), str(list(y.strides))
    if x.offset != y.offset:
        is_lifted = isinstance(x.offset, Lifted) or isinstance(y.offset, Lifted)
        return "lifted" if is_lifted else "layout", "storage offset", _shown(x.offset), _shown(y.offset)
    return "layout", "base", str(list(x.base.shape)), str(list(y.base.shape))


def _compare_ends(old: Program, new: Program) -> StreamDifference:
    changed = sorted(set(old.outputs) ^ set(new.outputs))
    if changed:
        op = makers(new).get(changed[0]) or new.ops[-1]
        kept = ("kept", "dead") if changed[0] in old.outputs else ("dead", "kept")
        return _difference("lifetime", op, "", f"{len(changed)} results at the region's end", *kept)
    if old.donated != new.donated:
        given = f"{len(old.donated)} inputs", f"{len(new.donated)} inputs"
        return _difference("lifetime", new.ops[0], "", "memory that may be reused", *given)
    for i, (m, n) in enumerate(zip(old.inputs, new.inputs, strict=False)):
        if m != n:
            return _difference("layout", new.ops[0], "", f"layout of input {i}", str(list(m.shape)), str(list(n.shape)))
    return _difference("other", new.ops[0], "", "text", "", "")


def makers(program: Program) -> dict[int, Op]:
    """The op that makes each value."""
    made = {}
    for op in program.ops:
        for result in op.results:
            for one in result if isinstance(result, tuple) else (result,):
                if one is not None:
                    made[one.value] = op
        for write in op.writes:
            made[write.value] = op
    return made


def _difference(kind: str, op: Op, argument: str, what: str, before: str, after: str) -> StreamDifference:
    return StreamDifference(kind, full_name(op.name), op.line, argument, what, before, after, _ADVICE[kind])


def _shown(value: Any) -> str:
    if isinstance(value, Lifted):
        return "a run-time input"
    return str(list(value) if isinstance(value, tuple) else value).removeprefix("torch.")


def _shown_value(operand: Operand) -> str:
    if operand.value is None:
        return "undefined"
    return f"result {operand.value}" if operand.value >= 0 else f"input {~operand.value}"
