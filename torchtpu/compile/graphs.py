"""Turns a traced graph of ATen ops into a callable that records them, without Python per op.

The ops are those that eager mode would record, so views, writes, random numbers, fallbacks and errors are eager's, and
the graph's programs are found in the same trie and the same cache.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._library.fake_class_registry import FakeScriptObject
from torch.fx import GraphModule, Node

from torchtpu import startup
from torchtpu.compile import flex
from torchtpu.runtime import _C

Boxed = Callable[[list[Any]], Any]
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_TORCH = os.path.dirname(torch.__file__) + os.sep


def compile_graph(graph: GraphModule, inputs: Sequence[Any]) -> Boxed:
    """The graph as a function of the list of its inputs, which it empties; it returns the tuple of its outputs.

    A graph with something else than ops in it (a `cond`, a size that depends on data) is run node by node instead.
    """
    flex.replace(graph)
    run = _interpreted(graph)
    with _attempt(graph), contextlib.suppress(_Unreplayable):
        run = _Builder(graph).build()
    run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's mark of this calling convention
    return run


def _attempt(graph: GraphModule) -> AbstractContextManager[None]:
    """In the block the graph is readied for being recorded without Python: see `Bailouts.attempt`."""
    lines = filter(None, map(_line_of, graph.graph.nodes))
    return startup.engine_counters().bailouts.attempt("replay", next(lines, "a compiled graph"))


def _line_of(node: Node) -> str:
    """The innermost user line that a node was traced from."""
    for file, number in reversed(_FRAME.findall(node.meta.get("stack_trace") or "")):
        if not file.startswith((_TORCH, "<")):
            return f"{file}:{number}"
    return ""


def _interpreted(graph: GraphModule) -> Boxed:
    def run(inputs: list[Any]) -> Any:
        arguments = list(inputs)
        inputs.clear()
        return graph(*arguments)

    return run


class _Unreplayable(Exception):
    """A node that is not an op on tensors and numbers."""


class _Builder:
    """Numbers the graph's values and writes its ops into a `Replay`.

    The first slots are the inputs; the numbers computed from symbolic sizes follow them as inputs of their own.
    """

    def __init__(self, graph: GraphModule) -> None:
        self._graph = graph
        self._nodes = list(graph.graph.nodes)
        self._given = [n for n in self._nodes if n.op == "placeholder"]
        self._computed = [n for n in self._nodes if n.op == "call_function" and _is_number(n)]
        self._slots: dict[Node, int] = {}
        self._lists: dict[Node, list[int]] = {}  # ops with several results
        self._count = 0
        self._dying = self._last_uses()

    def build(self) -> Boxed:
        numbers = _sizes(self._given, self._computed)
        inputs = [*self._given, *self._computed]
        replay = _C.Replay(len(inputs))
        for node in inputs:
            self._slots[node] = self._new_slot()
        for node in self._nodes:
            if node.op == "get_attr":
                self._add_constant(replay, node)
            elif node.op == "call_function" and node not in self._slots:
                self._add_call(replay, node)
            elif node.op == "output":
                outputs = node.args[0]
                assert isinstance(outputs, (list, tuple))
                replay.set_outputs([self._output(o) for o in outputs])
        run: Boxed = replay.run

        def run_sized(inputs: list[Any]) -> Any:
            if numbers is not None:
                inputs += numbers(inputs)
            return run(inputs)

        return self._around_objects(run_sized)

    def _around_objects(self, run: Boxed) -> Boxed:
        """Hands on what is no tensor and no number, such as a DeviceMesh that the backward half gets."""
        passed = [i for i, node in enumerate(self._given) if _is_object(node)]
        if not passed:
            return run
        places = {self._given[i]: i for i in passed}
        returned = [(k, places[o]) for k, o in enumerate(self._nodes[-1].args[0]) if o in places]

        def run_tensors(inputs: list[Any]) -> Any:
            objects = {i: inputs[i] for i in passed}
            for i in passed:
                inputs[i] = None
            outputs = list(run(inputs))
            for k, i in returned:
                outputs[k] = objects[i]
            return tuple(outputs)

        return run_tensors

    def _add_constant(self, replay: Any, node: Node) -> None:
        value: Any = self._graph
        for name in str(node.target).split("."):
            value = getattr(value, name)
        if not isinstance(value, torch.Tensor):
            raise _Unreplayable
        self._slots[node] = self._new_slot()
        replay.set_constant(self._slots[node], value)

    def _add_call(self, replay: Any, node: Node) -> None:
        target: Any = node.target
        dying = [self._slots[n] for n in self._dying[node] if n in self._slots]
        if getattr(target, "__name__", "") == "getitem":
            source, index = node.args
            assert isinstance(source, Node) and isinstance(index, int)
            if source in self._lists:
                self._slots[node] = self._lists[source][index]
            else:
                self._slots[node] = self._new_slot()
                replay.add_getitem(self._slots[source], index, self._slots[node], dying)
            return
        if not isinstance(target, torch._ops.OpOverload):
            raise _Unreplayable
        if target is torch.ops.aten.view.default:  # meta kernels promise strides that the device's own may not have
            target = torch.ops.aten.reshape.default
        results = [self._new_slot() for _ in target._schema.returns]
        if len(results) == 1:
            self._slots[node] = results[0]
            dying += [] if node.users else results
        else:
            self._lists[node] = results
            used = {user.args[1] for user in node.users if user.users}
            dying += [slot for i, slot in enumerate(results) if i not in used]
        arguments = [self._argument(a) for a in _positional(target, node)]
        if target is torch.ops.aten.native_group_norm.default and _is_contiguous(node.args[0]):
            dense = self._new_slot()  # it refuses the strides that the device may have instead of the promised ones
            replay.add_op("aten::contiguous", "", arguments[:1], [dense], [], _line_of(node))
            arguments[0] = _C.Slot(dense)
            dying.append(dense)
        name, overload = target._schema.name, target._schema.overload_name
        replay.add_op(name, overload, arguments, results, dying, _line_of(node))

    def _output(self, value: Any) -> int:
        """The slot of an output; -1 for none, and for what is handed on."""
        if isinstance(value, Node):
            return -1 if _is_object(value) else self._slots[value]
        if value is not None:
            raise _Unreplayable
        return -1

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Node):
            if value not in self._slots or _is_object(value):
                raise _Unreplayable
            return _C.Slot(self._slots[value])
        if isinstance(value, (list, tuple)):
            return [self._argument(item) for item in value]
        if isinstance(value, _NUMBERS):
            raise _Unreplayable
        return value

    def _last_uses(self) -> dict[Node, list[Node]]:
        """By node, the values that nobody reads after it; the output reads its own."""
        last: dict[Node, Node] = {}
        for node in self._nodes:
            for used in node.all_input_nodes:
                last[used] = node
        dying = defaultdict(list)
        for used, node in last.items():
            dying[node].append(used)
        return dying

    def _new_slot(self) -> int:
        self._count += 1
        return self._count - 1


def _is_object(node: Node) -> bool:
    """Whether a node is no tensor and no number; the length of a jagged dimension is only a name for its offsets."""
    value = node.meta.get("val")
    return isinstance(value, FakeScriptObject) or (isinstance(value, torch.SymInt) and value.node.is_nested_int())


def _is_contiguous(value: Any) -> bool:
    """Whether a node's tensor was contiguous when it was traced."""
    contiguous: bool = value.meta["val"].is_contiguous()
    return contiguous


def _is_number(node: Node) -> bool:
    return isinstance(node.meta.get("val"), _NUMBERS) and node.target is not torch.ops.aten._local_scalar_dense.default


def _positional(target: Any, node: Node) -> list[Any]:
    """The arguments in the schema's order, up to the last one given."""
    declared = target._schema.arguments
    given = list(node.args)
    named = dict(node.kwargs)
    for argument in declared[len(given) :]:
        if not named:
            break
        given.append(named.pop(argument.name, argument.default_value))
    return given


def _sizes(given: list[Node], computed: list[Node]) -> Callable[[list[Any]], list[Any]] | None:
    """A function from the graph's inputs to the numbers it computes from their sizes; None where there are none."""
    if not computed:
        return None
    from torch.utils._sympy.printers import PythonPrinter

    sources = {}
    for i, node in enumerate(given):
        value = node.meta.get("val")
        if isinstance(value, _NUMBERS):
            sources[value.node.expr] = f"inputs[{i}]"
        elif isinstance(value, torch.Tensor):
            shape: tuple[Any, ...] = tuple(value.shape)
            for dim, size in enumerate(shape):
                if isinstance(size, torch.SymInt):
                    sources.setdefault(size.node.expr, f"inputs[{i}].size({dim})")
    symbols = {expression: text for expression, text in sources.items() if expression.is_Symbol}
    printer = PythonPrinter()
    texts = []
    for node in computed:
        expression = node.meta["val"].node.expr
        if expression in sources:
            texts.append(sources[expression])
        elif expression.free_symbols <= symbols.keys():
            texts.append(printer.doprint(expression))
        else:
            raise _Unreplayable
    lines = [f"    {printer.doprint(symbol)} = {text}" for symbol, text in symbols.items()]
    scope: dict[str, Any] = {"math": __import__("math"), "torch": torch}
    exec("\n".join(["def numbers(inputs):", *lines, f"    return [{', '.join(texts)}]"]), scope)  # noqa: S102
    numbers: Callable[[list[Any]], list[Any]] = scope["numbers"]
    return numbers
