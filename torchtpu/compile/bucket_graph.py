"""Padded graphs: in comes a graph whose nodes' plans are noted, out goes one that takes padded tensors.

It has masks before the nodes that must not see the surplus, true counts where numbers are operands, and results whose
true elements come first in memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torchtpu.compile.bucket_dims import NUMBERS, Dim, Dims, Unsafe, any_ragged, is_ragged, is_tensor, product
from torchtpu.compile.bucket_rules import takes_true_number

PLAN = "torchtpu_plan"  # under which a node's meta keeps its plan, and None where the graph is not padded
RETURNED = "torchtpu_returned"  # in an output node's meta: how many outputs the caller sees
aten = torch.ops.aten
_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_TORCH = os.path.dirname(torch.__file__) + os.sep


def line_of(node: Node) -> str:
    """The innermost user line that a node was traced from."""
    for file, number in reversed(_FRAME.findall(node.meta.get("stack_trace") or "")):
        if not file.startswith((_TORCH, "<")):
            return f"{file}:{number}"
    return ""


def dims_of(node: Node) -> Dims:
    plan = node.meta[PLAN]
    if not plan.dims or plan.dims[0] is None:
        raise Unsafe(f"{node} is no tensor")
    dims: Dims = plan.dims[0]
    return dims


def memory_order(value: torch.Tensor) -> list[int]:
    """The dimensions of a tensor without gaps, slowest first."""
    strides: Any = value.stride()
    strides = [s.node.hint if isinstance(s, torch.SymInt) else s for s in strides]
    order = sorted(range(value.dim()), key=lambda d: -strides[d])
    if not value.permute(order).is_contiguous():
        raise Unsafe("a result with gaps")
    return order


def function_of(expressions: Sequence[Any], symbols: Sequence[Any]) -> Callable[[Sequence[int]], list[int]]:
    """From the symbols' values to the expressions' values."""
    from torch.utils._sympy.printers import PythonPrinter

    printer = PythonPrinter()
    names = "".join(f"{printer.doprint(symbol)}, " for symbol in symbols)
    values = ", ".join(printer.doprint(e) if hasattr(e, "free_symbols") else str(e) for e in expressions)
    scope: dict[str, Any] = {"math": __import__("math"), "torch": torch}
    exec(f"def function(values):\n    {names} = values\n    return [{values}]", scope)  # noqa: S102
    function: Callable[[Sequence[int]], list[int]] = scope["function"]
    return function


# ---- outputs

Cut = Callable[[Any, list[int], list[int]], Any]


def _as_is(value: Any, sizes: list[int], buckets: list[int]) -> Any:
    return value


def _true_number(expression: Any, symbols: Sequence[Any]) -> Cut:
    number = function_of([expression], symbols)
    return lambda value, sizes, buckets: number(sizes)[0]


def _true_part(value: torch.Tensor, symbols: Sequence[Any]) -> Cut:
    """Cuts a result whose true elements come first in memory."""
    expressions = [n.node.expr if isinstance(n, torch.SymInt) else n for n in (*value.shape, *value.stride())]
    geometry, rank = function_of(expressions, symbols), value.dim()

    def cut(made: torch.Tensor, sizes: list[int], buckets: list[int]) -> torch.Tensor:
        numbers = geometry(sizes)
        return made.as_strided(numbers[:rank], numbers[rank:], 0)

    return cut


class Writer:
    """Writes the padded graph: the nodes of the given one, with masks before those that need them."""

    def __init__(self, graph: GraphModule, symbols: Sequence[Any]) -> None:
        self._module = graph
        self._symbols = list(symbols)
        self.counts: list[Any] = []  # expressions of the true sizes, the elements of one input
        self.numbers: list[Any] = []  # expressions of the buckets, an input each
        self.outputs: list[Cut] = []
        self.has_ragged_outputs = False
        self._new = Graph()
        self._copies: dict[Node, Node] = {}
        self._inputs: list[Node] = []  # of the numbers
        self._surplus: dict[Dims, Node] = {}
        self._trace = ""

    def written(self) -> GraphModule:
        """The graph; afterwards `counts` are the numbers that it takes, and `outputs` say how to cut its outputs."""
        nodes = list(self._module.graph.nodes)
        given = [n for n in nodes if n.op == "placeholder"]
        for node in given:
            self._copies[node] = self._new.node_copy(node)
        self._count_input = self._last_input = self._new.placeholder("true_counts")
        self._device = next(n.meta["val"].device for n in nodes if is_tensor(n) and n.meta["val"].device.type == "tpu")
        for node in nodes:
            if node.op == "output":
                self._write_outputs(node)
            elif node not in self._copies:
                self._write(node)
        return GraphModule(self._module, self._new)

    def _write(self, node: Node) -> None:
        plan = node.meta.get(PLAN)
        self._trace = node.meta.get("stack_trace") or ""
        if plan is None or not isinstance(node.target, torch._ops.OpOverload):
            self._copies[node] = self._new.node_copy(node, self._copies.__getitem__)
            return
        names = [a.name for a in node.target._schema.arguments]
        arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        replaced: dict[str, Node] = {}
        for name, fill in plan.masks.items():
            source = arguments.get(name)
            if isinstance(source, Node) and any_ragged(dims_of(source)):
                replaced[name] = self._masked(self._copies[source], dims_of(source), fill)
        if plan.hides_keys:
            replaced["attn_bias"] = self._bias(arguments)
        overload = node.target
        for name, value in arguments.items():
            if isinstance(value, Node) and isinstance(value.meta.get("val"), NUMBERS) and takes_true_number(node):
                tensor = self._call(aten._to_copy.default, self._count(value.meta["val"].node.expr), dtype=_dtype(node))
                replaced[name] = tensor
                overload = node.target.overloadpacket.Tensor
        new = self._new.node_copy(node, self._copies.__getitem__)
        new.target = overload
        new.args = tuple(replaced.pop(name, a) for name, a in zip(names, new.args, strict=False))
        new.kwargs = {**new.kwargs, **replaced}
        if plan.averages is not None:
            new = self._average(node, new, plan.averages)
        self._copies[node] = new

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self._new.call_function(target, args, kwargs)
        node.meta["stack_trace"] = self._trace
        return node

    def _count(self, expression: Any) -> Node:
        """The number as a tensor of one element, int64."""
        if expression not in self.counts:
            self.counts.append(expression)
        return self._call(aten.select.int, self._count_input, 0, self.counts.index(expression))

    def _number(self, expression: Any) -> Any:
        """The number with buckets for sizes."""
        if isinstance(expression, int):
            return expression
        if expression not in self.numbers:
            with self._new.inserting_after(self._last_input):
                self._last_input = self._new.placeholder(f"bucket_number_{len(self.numbers)}")
            self.numbers.append(expression)
            self._inputs.append(self._last_input)
        return self._inputs[self.numbers.index(expression)]

    def _range(self, size: Any) -> Node:
        return self._call(aten.arange.default, size, device=self._device)

    def _surplus_of(self, dims: Dims) -> Node:
        """A mask that is broadcast with tensors of these dimensions: True in the surplus."""
        key = tuple(d if is_ragged(d) else () for d in dims)
        if key not in self._surplus:
            parts = [self._surplus_in(dims, i) for i, dim in enumerate(dims) if is_ragged(dim)]
            made = parts[0]
            for part in parts[1:]:
                made = self._call(aten.logical_or.default, made, part)
            self._surplus[key] = made
        return self._surplus[key]

    def _surplus_in(self, dims: Dims, axis: int) -> Node:
        factors = dims[axis]
        sizes = [self._number(f) for f in factors]
        made: Node | None = None
        for i, factor in enumerate(factors):
            if not isinstance(factor, int):
                found = self._call(aten.ge.Tensor, self._range(sizes[i]), self._count(factor))
                found = self._call(aten.view.default, found, [-1 if j == i else 1 for j in range(len(factors))])
                made = found if made is None else self._call(aten.logical_or.default, made, found)
        if len(factors) > 1:
            made = self._call(aten.expand.default, made, sizes)
            made = self._call(aten.clone.default, made, memory_format=torch.contiguous_format)
        return self._call(aten.view.default, made, [-1 if j == axis else 1 for j in range(len(dims))])

    def _masked(self, value: Node, dims: Dims, fill: float) -> Node:
        copied = self._call(aten.clone.default, value, memory_format=torch.preserve_format)
        return self._call(aten.masked_fill_.Scalar, copied, self._surplus_of(dims), fill)

    def _bias(self, arguments: dict[str, Any]) -> Node:
        """Attention's bias, with the surplus keys hidden."""
        given, keys = arguments.get("attn_bias"), dims_of(arguments["key"])[2]
        hidden: Dims = ((), (), (), keys)
        if isinstance(given, Node):
            dims = dims_of(given)
            rows = (*dims[:-1], ())
            bias = self._copies[given]
            if any_ragged(rows):  # their scores are not read, but have to be numbers
                bias = self._masked(bias, rows, 0)
            return self._masked(bias, hidden[-len(dims) :], -float("inf"))
        dtype = arguments["query"].meta["val"].dtype
        zero = self._call(aten.zeros.default, [1, 1, 1, self._number(product(keys))], dtype=dtype, device=self._device)
        return self._masked(zero, hidden, -float("inf"))

    def _average(self, node: Node, new: Node, axes: tuple[int, ...]) -> Node:
        """A mean over these dimensions: the sum, divided by the true count."""
        source = node.args[0]
        assert isinstance(source, Node)
        keepdim = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
        total = self._call(aten.sum.dim_IntList, new.args[0], list(axes), keepdim, dtype=_dtype(node))
        self._new.erase_node(new)
        expression = product(tuple(product(dims_of(source)[axis]) for axis in axes))
        return self._call(aten.div.Tensor, total, self._count(expression))

    # ---- outputs

    def _write_outputs(self, node: Node) -> None:
        (values,) = node.args
        assert isinstance(values, (list, tuple))
        returned = node.meta.get(RETURNED, len(values))
        made = [self._output(v, is_seen=i < returned) for i, v in enumerate(values)]
        self._new.output(tuple(made))

    def _output(self, value: Any, is_seen: bool) -> Any:
        if not isinstance(value, Node):
            self.outputs.append(_as_is)
            return value
        found = value.meta.get("val")
        if isinstance(found, NUMBERS):
            self.outputs.append(_true_number(found.node.expr, self._symbols))
        elif not is_seen or not isinstance(found, torch.Tensor) or not any_ragged(dims_of(value)):
            self.outputs.append(_as_is)
        else:
            self.outputs.append(_true_part(found, self._symbols))
            self.has_ragged_outputs = True
            return self._packed(value)
        return self._copies[value]

    def _packed(self, value: Node) -> Node:
        """The result with its true elements first, in the memory order of the true result."""
        order = memory_order(value.meta["val"])
        made = self._copies[value]
        if order != sorted(order):
            made = self._call(aten.permute.default, made, order)
        made = self._call(aten.clone.default, made, memory_format=torch.contiguous_format)
        factors = [f for d in order for f in dims_of(value)[d]]
        last = max(i for i, f in enumerate(factors) if not isinstance(f, int))
        if last == 0:
            return made
        rows = self._call(aten.view.default, made, [-1, product(tuple(factors[last + 1 :]))])
        return self._call(aten.index_select.default, rows, 0, self._rows(tuple(factors[: last + 1])))

    def _rows(self, factors: Dim) -> Node:
        """For each row, in the order of the true result, where it is among the padded ones."""
        row = self._range(self._number(product(factors)))
        place: Node | None = None
        for i in range(len(factors)):
            step, digit = product(factors[i + 1 :]), row
            if step != 1:
                digit = self._call(aten.div.Tensor_mode, digit, self._count(step), rounding_mode="floor")
            if i:
                digit = self._call(aten.remainder.Tensor, digit, self._count(factors[i]))
            if step != 1:
                digit = self._call(aten.mul.Tensor, digit, self._number(step))
            place = digit if place is None else self._call(aten.add.Tensor, place, digit)
        return self._call(aten.clamp_max.default, place, self._number(product(factors) - 1))


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype
