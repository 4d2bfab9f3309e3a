"""Fragments that lowerings write, without jax."""

from __future__ import annotations

import torch

from torchtpu.runtime.ir.calls import LoweringEntry, results_of
from torchtpu.runtime.ir.program import Lifted, Op, Operand
from torchtpu.runtime.ir.types import tensor_type

from .tracing import Fragment, symbol_of


def written_fragment(op: Op, entry: LoweringEntry) -> Fragment | None:
    """The fragment of an op whose lowering writes it, without jax; None where it does not."""
    if entry.write is None or op.writes or op.padding is not None:
        return None
    first, *others = op.args
    listed = (first,) if isinstance(first, Operand) else first
    if not all(type(item) is Operand for item in listed):
        return None
    (made,) = results_of(op)
    elements = [tensor_type((), item.dtype)[len("tensor<") : -1] for item in (*listed, made)]
    shapes = [item.sizes for item in (*listed, made)]
    *given, of_result = zip(shapes, elements, strict=True)
    types = [tensor_type(item.sizes, item.dtype) for item in listed]
    for place, value in enumerate(others):
        if type(value) is Lifted:
            others[place] = f"%arg{len(types)}"
            types.append(tensor_type((), torch.int64 if value.kind == "i" else torch.float64))
    lines = entry.write(given, of_result, *others)
    if lines is None:
        return None
    used = tuple(k for k in range(len(types)) if any(f"%arg{k}," in line or f"%arg{k} " in line for line in lines))
    ins = [types[k] for k in used]
    out = tensor_type(made.sizes, made.dtype)
    lines = [*lines, f"return {lines[-1].split()[0]} : {out}"]
    head = f"({', '.join(f'%arg{n}: {kind}' for n, kind in enumerate(ins))}) -> ({out}) {{"
    text = "\n".join([f"  func.func private @0{head}", *(f"    {line}" for line in lines), "  }"])
    symbol = symbol_of(entry.name, text)
    signature = f"({', '.join(ins)}) -> ({out})"
    return Fragment(symbol, text.replace("@0", f"@{symbol}"), used, (None,), signature, ())
