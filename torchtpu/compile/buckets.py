"""Size buckets: in comes a traced graph whose sizes change, out goes one that runs on tensors padded to a few sizes.

Each size that changes is rounded up to a bucket, so that a few programs serve all sizes. Inputs are padded, what must
not see the surplus is masked with the true size (`bucket_rules.py`), and outputs are cut to it. A graph with an op that
has no rule is left as it is, and then compiles programs for each size.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.fx import GraphModule, Node

from torchtpu import config, startup
from torchtpu.compile.bucket_dims import NUMBERS, Plan, Unsafe, any_ragged, is_tensor, product, results, simple
from torchtpu.compile.bucket_graph import PLAN, RETURNED, Writer, dims_of, function_of, line_of, memory_order
from torchtpu.compile.bucket_rules import plan_of
from torchtpu.runtime import _C

Boxed = Callable[[list[Any]], Any]
_LEAST = 8
_MOST_SURPLUS = 4


# ---- which graphs


def annotate(graph: GraphModule) -> bool:
    """Notes at each node what becomes of it; whether the graph has sizes that change and every op has a rule.

    A joint graph is annotated as a whole, before it is parted, since its halves hand each other padded tensors.
    """
    nodes, has_sizes = list(graph.graph.nodes), False
    with attempt("buckets", graph), contextlib.suppress(Unsafe):
        has_sizes = bool(config.get("buckets")) and _analyse(nodes)
    for node in nodes:
        if not has_sizes:
            node.meta[PLAN] = None
    return has_sizes


def attempt(what: str, graph: GraphModule) -> AbstractContextManager[None]:
    """In the block an optimisation of the graph is tried: see `Bailouts.attempt`."""
    lines = filter(None, map(line_of, graph.graph.nodes))
    return startup.engine_counters().bailouts.attempt(what, next(lines, "a compiled graph"))


def note_returned(graph: GraphModule, count: int) -> None:
    """Of a forward graph: the outputs after these are for its backward alone."""
    graph.graph.output_node().meta[RETURNED] = count


def is_padded(graph: GraphModule) -> bool:
    """Whether the graph, or the joint one that it is part of, may be padded."""
    first = next(iter(graph.graph.nodes))
    if PLAN in first.meta:
        return first.meta[PLAN] is not None
    return annotate(graph)


def _analyse(nodes: list[Node]) -> bool:
    found = False
    for node in nodes:
        value = node.meta.get("val")
        made = results(node) if "val" in node.meta else []
        found = found or any(isinstance(n, torch.SymInt) for v in made if isinstance(v, torch.Tensor) for n in v.shape)
        is_op = node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
        if node.op == "output":
            node.meta[PLAN] = Plan([])
            for output in node.all_input_nodes:
                if is_tensor(output) and any_ragged(dims_of(output)):
                    memory_order(output.meta["val"])
        elif isinstance(value, NUMBERS):
            if is_op and any(map(is_tensor, node.all_input_nodes)) and "sym_" not in str(node.target):
                raise Unsafe("a number that depends on data")
            node.meta[PLAN] = Plan([])
        elif node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
            source, index = node.args
            node.meta[PLAN] = Plan([source.meta[PLAN].dims[index]])  # type: ignore[union-attr]
        elif is_op:
            node.meta[PLAN] = plan_of(node, dims_of)
        elif isinstance(value, torch.Tensor):  # from outside
            node.meta[PLAN] = Plan([tuple(map(simple, value.shape))])
        elif node.op == "placeholder":
            node.meta[PLAN] = Plan([])
        else:
            raise Unsafe(f"{node.op} {node.target}")
    return found


# ---- buckets


@dataclass
class _Sizes:
    """The buckets of one symbol. A size keeps the bucket that it was given first. Guarded by `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    made: dict[int, int] = field(default_factory=dict)

    def bucket(self, size: int) -> int:
        """At least the size: the least bucket that is there, unless it is far too large, else the next power of 2."""
        with self.lock:
            if size not in self.made:
                fitting = [b for b in self.made.values() if size <= b <= _MOST_SURPLUS * size]
                self.made[size] = min(fitting, default=max(_LEAST, 1 << (size - 1).bit_length()))
            return self.made[size]


_tables: WeakKeyDictionary[Any, dict[Any, _Sizes]] = WeakKeyDictionary()  # by shape environment and symbol


# ---- the padded graph


def without_surplus(graph: GraphModule, make: Callable[[], Boxed]) -> Boxed:
    """The graph as it is, which `make` makes when it is called first; what it is given by a padded half loses its
    surplus."""
    given = [n for n in graph.graph.nodes if n.op == "placeholder"]
    symbols, environment = _symbols(given)
    table = _tables.setdefault(environment, {})
    buckets_of = [table.setdefault(symbol, _Sizes()) for symbol in symbols]
    read = [_source(symbol, given) for symbol in symbols]
    padded = {
        i: [function_of(dim, symbols) for dim in dims_of(n)]
        for i, n in enumerate(given)
        if is_tensor(n) and any_ragged(dims_of(n))
    }
    made = functools.cache(make)

    def call(inputs: list[Any]) -> Any:
        sizes = [source(inputs) for source in read]
        buckets = [each.bucket(size) for each, size in zip(buckets_of, sizes, strict=True)]
        for i, dims in padded.items():
            true, whole = [dim(sizes) for dim in dims], [dim(buckets) for dim in dims]
            if inputs[i].shape != tuple(map(math.prod, true)):
                factors = inputs[i].reshape([n for dim in whole for n in dim])
                part = factors[tuple(slice(n) for dim in true for n in dim)]
                inputs[i] = part.reshape([math.prod(dim) for dim in true])
        return made()(inputs)

    return call


class Padded:
    """The padded form of a graph that `is_padded`.

    `graph` takes the inputs padded, then the true counts that its masks need, then numbers that follow from buckets.
    """

    def __init__(self, graph: GraphModule) -> None:
        self._module = graph
        self._given = [n for n in graph.graph.nodes if n.op == "placeholder"]
        self._symbols, environment = _symbols(self._given)
        table = _tables.setdefault(environment, {})
        self._sizes = [table.setdefault(symbol, _Sizes()) for symbol in self._symbols]
        writer = Writer(graph, self._symbols)
        self.graph = writer.written()
        self._outputs = writer.outputs
        self._is_cut = writer.has_ragged_outputs
        self._counts = function_of(writer.counts, self._symbols)
        self._added = function_of(writer.numbers, self._symbols)
        self._numbers = {
            i: function_of([n.meta["val"].node.expr], self._symbols)
            for i, n in enumerate(self._given)
            if isinstance(n.meta.get("val"), torch.SymInt)
        }
        self._shapes = {
            i: function_of([product(d) for d in dims_of(n)], self._symbols)
            for i, n in enumerate(self._given)
            if is_tensor(n) and any_ragged(dims_of(n))
        }
        self._read = [_source(symbol, self._given) for symbol in self._symbols]

    def around(self, run: Boxed, exact: Boxed) -> Boxed:
        """The function of the true inputs, given that of the padded graph, and what to call where this one raises."""

        def call(inputs: list[Any]) -> Any:
            sizes = [read(inputs) for read in self._read]
            buckets = [table.bucket(size) for table, size in zip(self._sizes, sizes, strict=True)]
            outputs: Any = None
            with attempt("buckets", self._module):
                outputs = run(self._widened(inputs, sizes, buckets))
            if outputs is None:
                return exact(inputs)
            inputs.clear()
            if self._is_cut:  # what follows has the true sizes, and would make this region a program for each
                _C.cut("bucket")
            return tuple(cut(value, sizes, buckets) for cut, value in zip(self._outputs, outputs, strict=True))

        return call

    def _widened(self, inputs: list[Any], sizes: list[int], buckets: list[int]) -> list[Any]:
        given = list(inputs)
        for i, number in self._numbers.items():
            given[i] = number(buckets)[0]
        has_cut = False
        for i, shape in self._shapes.items():
            wanted = tuple(shape(buckets))
            if given[i].shape != wanted:
                given[i], is_recorded = _widen(given[i], wanted)
                has_cut = has_cut or is_recorded
        if has_cut:
            _C.cut("bucket")
        counts = torch.tensor(self._counts(sizes), dtype=torch.int64)
        device = next(x.device for x in given if isinstance(x, torch.Tensor) and x.device.type == "tpu")
        return [*given, counts.to(device), *self._added(buckets)]


def _widen(x: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, bool]:
    """The tensor with room for the surplus, and whether that took an op.

    Where its values are still on the host, they are padded there: they were not copied to the device yet.
    """
    if _C.is_on_host(x):
        values = _C.to_host(x)
        room = values.new_zeros(shape)
        room[tuple(slice(n) for n in x.shape)] = values
        return room.to(x.device), False
    pads = [n for size, wanted in zip(reversed(x.shape), reversed(shape), strict=True) for n in (0, wanted - size)]
    return torch.ops.aten.constant_pad_nd(x.detach(), pads), True


def _symbols(given: Sequence[Node]) -> tuple[list[Any], Any]:
    """The symbols of a graph's inputs, in the order of their names, and the environment that they belong to."""
    found: dict[Any, Any] = {}
    for node in given:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                found |= dict.fromkeys(size.node.expr.free_symbols, size.node.shape_env)
    return sorted(found, key=str), next(iter(found.values()))


def _source(symbol: Any, given: Sequence[Node]) -> Callable[[list[Any]], int]:
    """How the inputs tell the symbol's size."""
    for i, node in enumerate(given):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr == symbol:
            return lambda inputs: int(inputs[i])
    for i, node in enumerate(given):
        for d, dim in enumerate(dims_of(node) if is_tensor(node) else ()):
            if dim == (symbol,):
                return lambda inputs: int(inputs[i].shape[d])
    raise AssertionError(f"no input tells {symbol}")
