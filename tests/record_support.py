"""A tiny recorder for the engine's tests: turns torch calls on CPU tensors into the `Program` they record.

Every storage holds a value; ops on views of it are recorded with their geometry, as the C++ recorder records them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtpu.runtime.ir.program import Base, Op, Operand, Program, Result, Write


class Record(TorchDispatchMode):
    """Runs ops on the CPU and records those that compute; views only change geometry."""

    def __init__(self, lifts: bool = False) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.inputs: list[torch.Tensor] = []
        self.lifts = lifts
        self.floats: list[float] = []
        self._bases: dict[int, Base] = {}
        self._values: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []
        self._count = 0

    def input(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes the tensor an input of the program; its contents are copied now."""
        self._kept.append(tensor)
        with no_dispatch():
            flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            shape = (
                tuple(tensor.shape) if tensor.is_contiguous() and tensor.numel() == flat.numel() else (flat.numel(),)
            )
            self._bases[_key(tensor)] = Base(shape, tensor.dtype)
            self._values[_key(tensor)] = ~len(self.inputs)
            self.inputs.append(flat.clone().view(shape))
        return tensor

    def program(self, *outputs: torch.Tensor, donated: Sequence[int] = ()) -> Program:
        """The program whose outputs are the storages of these tensors (in the order of their values)."""
        inputs = tuple(Base(tuple(t.shape), t.dtype) for t in self.inputs)
        values = tuple(sorted({self._values[_key(t)] for t in outputs}))
        return Program(tuple(self.ops), inputs, values, tuple(donated), len(self.floats), 0, "test.py:1")

    def expected(self, *outputs: torch.Tensor) -> list[torch.Tensor]:
        """What the program's outputs hold, as arrays of their bases."""
        found = {self._values[_key(t)]: t for t in outputs}
        return [_whole(found[v], self._bases[_key(found[v])]) for v in sorted(found)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        returned = schema.returns
        is_view = bool(returned) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if is_view or not any(_key(t) in self._values for t in tensors):
            return func(*args, **kwargs)
        given = [
            args[i] if i < len(args) else kwargs.get(a.name, a.default_value) for i, a in enumerate(schema.arguments)
        ]
        encoded = tuple(self._argument(v, a.name) for v, a in zip(given, schema.arguments, strict=True))
        made = func(*args, **kwargs)
        items = made if isinstance(made, tuple) else (made,) if returned else ()
        results = tuple(self._result(m) if r.alias_info is None else None for m, r in zip(items, returned, strict=True))
        writes = []
        for i, (value, argument) in enumerate(zip(given, schema.arguments, strict=True)):
            if argument.alias_info is not None and argument.alias_info.is_write:
                tensors = list(enumerate(value)) if isinstance(value, (list, tuple)) else [(None, value)]
                writes += [self._write(i, element, tensor) for element, tensor in tensors]
        name = schema.name.removeprefix("aten::") + (f".{schema.overload_name}" if schema.overload_name else "")
        self.ops.append(Op(name, encoded, results, tuple(writes), f"test.py:{len(self.ops) + 2}"))
        return made

    def _argument(self, value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            if _key(value) not in self._values:
                self.input(value)
            key = _key(value)
            number = self._values[key]
            sizes, strides = tuple(value.shape), tuple(value.stride())
            return Operand(number, sizes, strides, value.storage_offset(), value.dtype, self._bases[key])
        if isinstance(value, (list, tuple)):
            return tuple(self._argument(v, name) for v in value)
        if isinstance(value, float) and self.lifts:
            from torchtpu.runtime.ir.program import Lifted

            self.floats.append(value)
            return Lifted("f", len(self.floats) - 1)
        return value

    def _result(self, made: Any) -> Any:
        if isinstance(made, (list, tuple)):
            return tuple(self._result(m) for m in made)
        if not isinstance(made, torch.Tensor):
            return None
        order = sorted(range(made.dim()), key=lambda d: -made.stride(d))
        dense = made.permute(order).is_contiguous()
        shape = tuple(made.shape[d] for d in order) if dense else (math.prod(made.shape),)
        self._kept.append(made)
        self._bases[_key(made)] = Base(shape, made.dtype)
        self._values[_key(made)] = self._next()
        return Result(
            self._values[_key(made)], tuple(made.shape), tuple(made.stride()), made.dtype, self._bases[_key(made)]
        )

    def _write(self, arg: int, element: int | None, tensor: torch.Tensor) -> Write:
        key = _key(tensor)
        base = self._bases[key]
        replaces = tensor.is_contiguous() and tensor.numel() == math.prod(base.shape) and tensor.dtype == base.dtype
        self._values[key] = self._next()
        sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
        return Write(
            arg, element, self._values[key], sizes, strides, tensor.storage_offset(), tensor.dtype, base, replaces
        )

    def _next(self) -> int:
        self._count += 1
        return self._count - 1


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _whole(tensor: torch.Tensor, base: Base) -> torch.Tensor:
    return (
        torch.empty(0, dtype=base.dtype)
        .set_(tensor.untyped_storage())[: math.prod(base.shape)]
        .view(base.shape)
        .clone()
    )
