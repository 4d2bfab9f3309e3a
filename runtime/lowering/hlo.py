"""StableHLO as text: collects lines of values and attributes.

Only the structural ops that views and programs need; what an ATen op computes comes from its traced fragment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchtpu.runtime.ir.types import Shape, tensor_type


class Value(NamedTuple):
    """An SSA value: its name in the text and the array it holds."""

    name: str
    shape: Shape
    dtype: torch.dtype

    @property
    def type(self) -> str:
        """The value's type as text."""
        return tensor_type(self.shape, self.dtype)


class Lines:
    """Collects the lines of a function body; a value made here is named `prefix` plus a running number."""

    def __init__(self, prefix: str = "%t") -> None:
        self.lines: list[str] = []
        self._prefix = prefix

    def emit(self, text: str, shape: Shape, dtype: torch.dtype) -> Value:
        """Adds `text`, whose one result is an array of `shape` and `dtype`."""
        value = Value(f"{self._prefix}{len(self.lines)}", shape, dtype)
        self.lines.append(f"    {value.name} = {text}")
        return value

    def constant(self, number: int, shape: Shape, dtype: torch.dtype) -> Value:
        """An array filled with one integer (0 or 1 for bool)."""
        literal: str
        if dtype == torch.bool:
            literal = "true" if number else "false"
        elif dtype.is_complex:
            literal = f"({number}.0, 0.0)"
        else:
            literal = f"{number}.0" if dtype.is_floating_point else str(number)
        return self.emit(f"stablehlo.constant dense<{literal}> : {tensor_type(shape, dtype)}", shape, dtype)

    def reshape(self, x: Value, shape: Shape) -> Value:
        """The same elements in row-major order under another shape."""
        if shape == x.shape:
            return x
        return self.emit(f"stablehlo.reshape {x.name} : ({x.type}) -> {tensor_type(shape, x.dtype)}", shape, x.dtype)

    def slice(self, x: Value, starts: Sequence[int], limits: Sequence[int], steps: Sequence[int]) -> Value:
        """`x[starts:limits:steps]` in every dimension."""
        shape = tuple(-(-(b - a) // s) for a, b, s in zip(starts, limits, steps, strict=True))
        if shape == x.shape:
            return x
        ranges = ", ".join(
            f"{a}:{b}:{s}" if s != 1 else f"{a}:{b}" for a, b, s in zip(starts, limits, steps, strict=True)
        )
        return self.emit(
            f"stablehlo.slice {x.name} [{ranges}] : ({x.type}) -> {tensor_type(shape, x.dtype)}", shape, x.dtype
        )

    def transpose(self, x: Value, order: Sequence[int]) -> Value:
        """Dimension i of the result is dimension `order[i]` of `x`."""
        if list(order) == list(range(len(order))):
            return x
        shape = tuple(x.shape[i] for i in order)
        dims = ", ".join(map(str, order))
        text = f"stablehlo.transpose {x.name}, dims = [{dims}] : ({x.type}) -> {tensor_type(shape, x.dtype)}"
        return self.emit(text, shape, x.dtype)

    def broadcast(self, x: Value, shape: Shape, dims: Sequence[int] | None = None) -> Value:
        """Repeats `x`: dimension i of `x` becomes `dims[i]` of the result, where a size 1 repeats."""
        dims = range(len(shape)) if dims is None else dims
        if shape == x.shape and list(dims) == list(range(len(shape))):
            return x
        where = ", ".join(map(str, dims))
        text = f"stablehlo.broadcast_in_dim {x.name}, dims = [{where}] : ({x.type}) -> {tensor_type(shape, x.dtype)}"
        return self.emit(text, shape, x.dtype)

    def pad(self, x: Value, fill: Value, low: Sequence[int], high: Sequence[int], interior: Sequence[int]) -> Value:
        """Puts `fill` before, after and between the elements of each dimension."""
        rows = list(zip(x.shape, low, high, interior, strict=True))
        shape = tuple(lo + n + max(n - 1, 0) * gap + hi for n, lo, hi, gap in rows)
        if shape == x.shape:
            return x
        lists = ", ".join(
            f"{name} = [{', '.join(map(str, v))}]" for name, v in (("low", low), ("high", high), ("interior", interior))
        )
        text = (
            f"stablehlo.pad {x.name}, {fill.name}, {lists} : ({x.type}, {fill.type}) -> {tensor_type(shape, x.dtype)}"
        )
        return self.emit(text, shape, x.dtype)

    def concatenate(self, parts: Sequence[Value], dim: int) -> Value:
        """The parts one after the other along `dim`."""
        shape = list(parts[0].shape)
        shape[dim] = sum(p.shape[dim] for p in parts)
        names, types = ", ".join(p.name for p in parts), ", ".join(p.type for p in parts)
        text = f"stablehlo.concatenate {names}, dim = {dim} : ({types}) -> {tensor_type(tuple(shape), parts[0].dtype)}"
        return self.emit(text, tuple(shape), parts[0].dtype)

    def unary(self, op: str, x: Value, dtype: torch.dtype) -> Value:
        """`stablehlo.<op>` from x's element type to `dtype` (convert, real, imag, a same-width bitcast_convert)."""
        return self.emit(f"stablehlo.{op} {x.name} : ({x.type}) -> {tensor_type(x.shape, dtype)}", x.shape, dtype)

    def binary(self, op: str, x: Value, y: Value) -> Value:
        """An elementwise `stablehlo.<op>` of two values of one type."""
        return self.emit(f"stablehlo.{op} {x.name}, {y.name} : {x.type}", x.shape, x.dtype)

    def select(self, mask: Value, x: Value, y: Value) -> Value:
        """`x` where `mask` holds, else `y`."""
        return self.emit(f"stablehlo.select {mask.name}, {x.name}, {y.name} : {mask.type}, {x.type}", x.shape, x.dtype)

    def complex(self, real: Value, imag: Value, dtype: torch.dtype) -> Value:
        """A complex array from its two parts."""
        types = f"({real.type}, {imag.type}) -> {tensor_type(real.shape, dtype)}"
        return self.emit(f"stablehlo.complex {real.name}, {imag.name} : {types}", real.shape, dtype)

    def is_nonzero(self, x: Value) -> Value:
        """The bool array `x != 0` of an unsigned integer array."""
        zero = self.constant(0, x.shape, x.dtype)
        result = tensor_type(x.shape, torch.bool)
        return self.emit(
            f"stablehlo.compare NE, {x.name}, {zero.name}, UNSIGNED : ({x.type}, {x.type}) -> {result}",
            x.shape,
            torch.bool,
        )

    def bitcast(self, x: Value, shape: Shape, dtype: torch.dtype) -> Value:
        """The bits of `x` as another element type; `shape` has one dimension more or less where the widths differ."""
        text = f"stablehlo.bitcast_convert {x.name} : ({x.type}) -> {tensor_type(shape, dtype)}"
        return self.emit(text, shape, dtype)

    def dynamic_slice(self, x: Value, starts: Sequence[Value], sizes: Shape) -> Value:
        """The box of `sizes` at run-time `starts`; XLA clamps starts into range."""
        if sizes == x.shape:
            return x
        names, types = ", ".join(s.name for s in (x, *starts)), ", ".join(s.type for s in (x, *starts))
        box = f"sizes = [{', '.join(map(str, sizes))}]"
        text = f"stablehlo.dynamic_slice {names}, {box} : ({types}) -> {tensor_type(sizes, x.dtype)}"
        return self.emit(text, sizes, x.dtype)

    def dynamic_update_slice(self, x: Value, update: Value, starts: Sequence[Value]) -> Value:
        """`x` with the box at `starts` replaced by `update`."""
        if update.shape == x.shape:
            return update
        operands = (x, update, *starts)
        names, types = ", ".join(v.name for v in operands), ", ".join(v.type for v in operands)
        return self.emit(f"stablehlo.dynamic_update_slice {names} : ({types}) -> {x.type}", x.shape, x.dtype)

    def strided_indices(self, sizes: Shape, strides: Shape, offset: int, dtype: torch.dtype) -> Value:
        """The flat positions of a strided view as an integer array of shape [numel, 1]."""
        total = self.constant(offset, sizes, dtype)
        for dim, stride in enumerate(strides):
            if stride == 0 or sizes[dim] == 1:
                continue
            steps = self.emit(f"stablehlo.iota dim = {dim} : {total.type}", sizes, dtype)
            if stride != 1:
                steps = self.binary("multiply", steps, self.constant(stride, sizes, dtype))
            total = self.binary("add", total, steps)
        return self.reshape(total, (math.prod(sizes), 1))

    def take(self, flat: Value, indices: Value) -> Value:
        """`flat[indices[:, 0]]`."""
        shape = (indices.shape[0],)
        attributes = (
            "dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0], start_index_map = [0], "
            "index_vector_dim = 1>, indices_are_sorted = false, slice_sizes = array<i64: 1>"
        )
        text = f'"stablehlo.gather"({flat.name}, {indices.name}) <{{{attributes}}}> : ({flat.type}, {indices.type}) -> '
        return self.emit(text + tensor_type(shape, flat.dtype), shape, flat.dtype)

    def put(self, flat: Value, indices: Value, update: Value) -> Value:
        """`flat` with `flat[indices[:, 0]] = update`."""
        attributes = (
            "indices_are_sorted = false, scatter_dimension_numbers = #stablehlo.scatter<inserted_window_dims = [0], "
            "scatter_dims_to_operand_dims = [0], index_vector_dim = 1>, unique_indices = false"
        )
        element = tensor_type((), flat.dtype)
        body = f"({{ ^bb0(%old: {element}, %new: {element}): stablehlo.return %new : {element} }})"
        types = f"({flat.type}, {indices.type}, {update.type}) -> {flat.type}"
        text = f'"stablehlo.scatter"({flat.name}, {indices.name}, {update.name}) <{{{attributes}}}> {body} : {types}'
        return self.emit(text, flat.shape, flat.dtype)
