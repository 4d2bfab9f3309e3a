"""Programs that hold all that programs may hold, for what keeps them and reads them again."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from record_support import Record

from torchtpu.runtime.ir.program import Base, Lifted, Op, Operand, Program, Random, Result, Scalar, Write

BASE = Base((2, 3), torch.float32)
OPERAND = Operand(-1, (3, 2), (1, 3), Lifted("i", 0), torch.float32, BASE)
ARGUMENTS = (
    OPERAND,
    None,
    True,
    3,
    -0.0,
    math.inf,
    "text",
    complex(1, -2),
    torch.bfloat16,
    torch.strided,
    torch.channels_last,
    torch.device("tpu", 1),
    Scalar(Lifted("f", 2), torch.float64, wrapped=True),
    Random(Lifted("i", 1), Lifted("i", 2)),
    (OPERAND, (1, 2.5), ()),
)
RESULT = Result(0, (2,), (1,), torch.int64, Base((2,), torch.int64))
RESULTS = (RESULT, None, (replace(RESULT, value=2), None))
WRITE = Write(0, None, 1, (2, 3), (3, 1), 0, torch.float32, BASE, replaces=True)
OP = Op("add_.Tensor", ARGUMENTS, RESULTS, (WRITE,), "train.py:3")
PROGRAM = Program((OP,), (BASE,), (0, 1), (0,), 3, 3, "train.py:9")


def recorded() -> Program:
    """A program with views, writes, lists, checks, and results that are not needed."""
    with Record() as record:
        x, w = record.input(torch.randn(4, 6)), record.input(torch.randn(4, 6))
        y = torch.mm(x, w.t()) * 2.5
        z = torch.index_select(y, 0, record.input(torch.tensor([1])))
        x[1:, ::2].add_(w[:3, :3], alpha=3)
        torch._foreach_add_([x, w], [w, x], alpha=2)
        n, _, rstd = torch.native_layer_norm(x, [6], torch.ones(6), torch.zeros(6), 1e-5)
        last = n * rstd
    return record.program(x, z, last, donated=(0,))


def at_an_offset() -> Program:
    """A program that takes two numbers, and reads and writes at an offset that is known at run time."""
    base = Base((8, 4), torch.float32)
    view = Operand(~0, (2, 4), (4, 1), Lifted("i", 0), torch.float32, base)
    number = Scalar(Lifted("f", 0), torch.float64, True)
    made = Result(0, (2, 4), (4, 1), torch.float32, Base((2, 4), torch.float32))
    ops = (
        Op("mul.Tensor", (view, number), (made,), (), "test.py:2"),
        Op(
            "copy_",
            (view, Operand(0, (2, 4), (4, 1), 0, torch.float32, made.base), False),
            (None,),
            (Write(0, None, 1, (2, 4), (4, 1), Lifted("i", 0), torch.float32, base, False),),
            "test.py:3",
        ),
    )
    return Program(ops, (base,), (0, 1), (), 1, 1, "test.py:1")
