"""FlexAttention: records PyTorch's higher-order ops with their score and mask functions.

The functions are traced for 0-dim values and become text, an argument of the op like others, so that programs with them
are cached and shared as all are. What a text cannot say runs in PyTorch's dense form.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchtpu.ops.attention import flex_attention, flex_mods
from torchtpu.ops.registry import LOWERINGS, Lowering
from torchtpu.runtime import _C

_FORWARD = "torchtpu::flex_attention"
_BACKWARD = "torchtpu::flex_attention_backward"
_SCHEMAS = {
    _FORWARD: "(Tensor query, Tensor key, Tensor value, Tensor[] score_buffers, Tensor[] mask_buffers, Tensor[] blocks,"
    " str score, str mask, float scale, int[] block_size) -> (Tensor, Tensor, Tensor)",
    _BACKWARD: "(Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor? grad_out,"
    " Tensor? grad_logsumexp, Tensor[] score_buffers, Tensor[] mask_buffers, Tensor[] blocks, str score, str joint,"
    " str mask, float scale, int[] block_size) -> Tensor[]",
}
_MOST_CONSTANTS = 64  # elements of a constant that a text may have
_NO_BLOCKS = 1 << 30  # PyTorch's block size where there is no block mask

_libraries: list[Any] = []  # an op lives as long as its library


def install() -> None:
    """Makes the ops known to PyTorch and to the recorder. Called once."""
    kind: Any = torch.library.Library
    library = kind("torchtpu", "FRAGMENT")
    _libraries.append(library)
    for name, lower, infer in (
        (_FORWARD, flex_attention.forward, _infer_forward),
        (_BACKWARD, flex_attention.backward, _infer_backward),
    ):
        library.define(name.partition("::")[2] + _SCHEMAS[name])
        LOWERINGS[name] = Lowering(name, lower, infer=infer, multiplies=True)
        _C.register_op(LOWERINGS[name].row())


def serve(theirs: Any) -> None:
    """From now on these ops serve PyTorch's higher-order ones, which that module has, on tpu tensors. Called once."""
    dispatch_key: Any = torch._C.DispatchKey

    @theirs.flex_attention.py_impl(dispatch_key.PrivateUse1)
    def forward(*args: Any) -> Any:
        try:
            arguments = _forward_arguments(*args)
        except _Unsayable:
            return theirs.sdpa_dense(*args)
        return torch.ops.torchtpu.flex_attention(*arguments)

    @theirs.flex_attention_backward.py_impl(dispatch_key.PrivateUse1)
    def backward(*args: Any) -> Any:
        try:
            arguments, places = _backward_arguments(*args)
        except _Unsayable:
            return theirs.sdpa_dense_backward(*args)
        query, key, value, *of_buffers = torch.ops.torchtpu.flex_attention_backward(*arguments)
        found = dict(zip(places, of_buffers, strict=True))
        return query, key, value, tuple(found.get(i) for i in range(len(args[-2])))

    @theirs.flex_attention.py_impl(dispatch_key.AutocastPrivateUse1)
    def autocast(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
        cast = torch.amp.autocast_mode._cast((query, key, value), "tpu", torch.get_autocast_dtype("tpu"))
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(dispatch_key.AutocastPrivateUse1)):
            return theirs.flex_attention(*cast, *rest)

    theirs.flex_attention_backward.fallthrough(dispatch_key.AutocastPrivateUse1)


def _theirs() -> Any:
    return importlib.import_module("torch._higher_order_ops.flex_attention")  # its package has an op of this name


# ---- graphs


def replace(graph: GraphModule) -> None:
    """Puts the recorded ops into a graph of ATen ops, in place of PyTorch's; what they cannot say stays."""
    theirs = _theirs()
    nodes = graph.graph
    found = [node for node in nodes.nodes if node.target in (theirs.flex_attention, theirs.flex_attention_backward)]
    for node in found:
        given = [tuple(_module(graph, v) for v in a) if type(a) is tuple else _module(graph, a) for a in node.args]
        with nodes.inserting_before(node), contextlib.suppress(_Unsayable):
            if node.target is theirs.flex_attention:
                _put_forward(node, _forward_arguments(*given))
            else:
                _put_backward(node, *_backward_arguments(*given))
    for node in reversed(list(nodes.nodes)):
        if found and node.op == "get_attr" and not node.users:
            nodes.erase_node(node)


def _module(graph: GraphModule, value: Any) -> Any:
    if isinstance(value, Node) and value.op == "get_attr":
        held = getattr(graph, str(value.target))
        return held if isinstance(held, GraphModule) else value
    return value


def _put_forward(node: Node, arguments: tuple[Any, ...]) -> None:
    made = node.graph.call_function(torch.ops.torchtpu.flex_attention.default, arguments)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)


def _put_backward(node: Node, arguments: tuple[Any, ...], places: list[int]) -> None:
    made = node.graph.call_function(torch.ops.torchtpu.flex_attention_backward.default, arguments)
    *grads, of_buffers = node.meta["val"]
    made.meta = {**node.meta, "val": [*grads, *(of_buffers[i] for i in places)]}
    for user in list(node.users):
        index: Any = user.args[1]
        if index < len(grads):
            user.replace_input_with(node, made)
            continue
        for inner in list(user.users):
            if inner.users:
                inner.args = (made, len(grads) + places.index(inner.args[1]))  # type: ignore[arg-type]
            else:
                node.graph.erase_node(inner)
        node.graph.erase_node(user)
    node.graph.erase_node(node)


# ---- arguments


class _Unsayable(Exception):
    """The ops cannot express a call."""


def _forward_arguments(
    query: Any, key: Any, value: Any, score: Any, block_mask: Sequence[Any], scale: Any, options: Any,
    score_buffers: Sequence[Any], mask_buffers: Sequence[Any],
) -> tuple[Any, ...]:  # fmt: skip
    """Those of the recorded op, of those of PyTorch's, which may be tensors or nodes of a graph."""
    blocks, size = _blocks(block_mask)
    score_text, mask_text = _score_and_mask(query, score, block_mask[-1], score_buffers, mask_buffers)
    given = query, key, value, _tensors(score_buffers), _tensors(mask_buffers), blocks
    return *given, score_text, mask_text, scale, size


def _backward_arguments(
    query: Any, key: Any, value: Any, out: Any, logsumexp: Any, grad_out: Any, grad_logsumexp: Any, score: Any,
    joint: Any, block_mask: Sequence[Any], scale: Any, options: Any, score_buffers: Sequence[Any],
    mask_buffers: Sequence[Any],
) -> tuple[tuple[Any, ...], list[int]]:  # fmt: skip
    """As above; and which score buffers have gradients."""
    if joint is None or not _dtype(query) == _dtype(key) == _dtype(value):
        raise _Unsayable
    blocks, size = _blocks(block_mask)
    score_text, mask_text = _score_and_mask(query, score, block_mask[-1], score_buffers, mask_buffers)
    wide = _wide(query)
    joint_text = _text(joint, [(wide, ()), *_INDICES, (wide, ())], score_buffers)
    given = query, key, value, out, logsumexp, grad_out, grad_logsumexp, _tensors(score_buffers), _tensors(mask_buffers)
    tensors = [i for i, buffer in enumerate(score_buffers) if not isinstance(buffer, int)]
    places = [tensors[i] for i in flex_mods.differentiated(joint_text)]
    return (*given, blocks, score_text, joint_text, mask_text, scale, size), places


def _blocks(block_mask: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """The tables of the blocks that count, and a block's rows and columns."""
    size = list(block_mask[-3:-1])
    if not all(isinstance(n, int) for n in size):
        raise _Unsayable
    return [] if min(size) >= _NO_BLOCKS else [table for table in block_mask[2:6] if table is not None], size


def _tensors(buffers: Sequence[Any]) -> list[Any]:
    return [buffer for buffer in buffers if not isinstance(buffer, int)]


def _dtype(value: Any) -> torch.dtype:
    dtype: torch.dtype = (value.meta["val"] if isinstance(value, Node) else value).dtype
    return dtype


def _wide(query: Any) -> torch.dtype:
    """The dtype that PyTorch's dense form computes scores in."""
    return torch.float64 if _dtype(query) == torch.float64 else torch.float32


# ---- texts

_Aval = tuple[torch.dtype, tuple[int, ...]]
_INDICES: list[_Aval] = [(torch.int32, ())] * len(flex_mods.AXES)
_texts: WeakKeyDictionary[GraphModule, dict[Any, str]] = WeakKeyDictionary()


def _score_and_mask(
    query: Any, score: Any, mask: Any, score_buffers: Sequence[Any], mask_buffers: Sequence[Any]
) -> tuple[str, str]:
    return _text(score, [(_wide(query), ()), *_INDICES], score_buffers), _text(mask, _INDICES, mask_buffers)


def _text(function: Callable[..., Any], leading: Sequence[_Aval], buffers: Sequence[Any]) -> str:
    """A function of 0-dim values and buffers, as `flex_mods.Mod` takes it."""
    if not isinstance(function, GraphModule):
        return _trace(function, leading, [_aval(b) for b in buffers])
    known = _texts.setdefault(function, {})
    key = (*leading, *map(_aval, buffers))
    if key not in known:
        known[key] = _trace(function, leading, key[len(leading) :])
    return known[key]


def _aval(buffer: Any) -> _Aval | int:
    value = buffer.meta["val"] if isinstance(buffer, Node) else buffer
    if type(value) is int:
        return value
    if not isinstance(value, Tensor) or any(not isinstance(n, int) for n in value.shape):
        raise _Unsayable  # a number that changes: it is known when the graph runs
    return value.dtype, tuple(value.shape)


def _trace(function: Callable[..., Any], leading: Sequence[_Aval], buffers: Sequence[_Aval | int]) -> str:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch._guards import tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import _disable_current_modes

    with (
        _disable_current_modes(),
        tracing(None),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
        TransformGetItemToIndex(),
    ):
        given = [a if isinstance(a, int) else torch.empty(a[1], dtype=a[0], device="tpu") for a in (*leading, *buffers)]
        graph = make_fx(function, decomposition_table=_parts())(*given)
    with _disable_current_modes():
        return _written(graph, [isinstance(a, int) for a in (*leading, *buffers)])


@functools.cache
def _parts() -> dict[Any, Callable[..., Any]]:
    """How to take apart the ops that a text cannot have."""
    from torch._decomp import core_aten_decompositions

    table: Any = core_aten_decompositions()
    return {op: function for op, function in table.items() if not flex_mods.knows(_name(op))}


def _name(op: Any) -> str:
    return str(op.name()).removeprefix("aten::").removesuffix(".default")


def _written(graph: GraphModule, is_number: list[bool]) -> str:
    given = graph.graph.find_nodes(op="placeholder")
    values = {node: i for i, node in enumerate(n for n, skipped in zip(given, is_number, strict=True) if not skipped)}
    steps: list[Any] = []
    outputs: Any = None
    for node in graph.graph.nodes:
        if node.op == "output":
            outputs = node.args[0]
        elif node.op != "placeholder":
            steps.append(_constant(graph, node) if node.op == "get_attr" else _step(node, values))
            values[node] = len(values)
    if isinstance(outputs, (tuple, list)):  # the gradients of the function's arguments, but the one of its result
        arguments = [skipped for i, skipped in enumerate(is_number) if i != 1 + len(_INDICES)]
        outputs = [o for o, skipped in zip(outputs, arguments, strict=True) if not skipped]
    else:
        outputs = [outputs]
    return json.dumps({"steps": steps, "outputs": [None if o is None else {"value": values[o]} for o in outputs]})


def _constant(graph: GraphModule, node: Node) -> list[Any]:
    value = getattr(graph, str(node.target))
    if not isinstance(value, Tensor) or value.numel() > _MOST_CONSTANTS or value.dtype.is_complex:
        raise _Unsayable
    return ["constant", [value.flatten().tolist()], {}, [_result(value)]]


def _step(node: Node, values: dict[Node, int]) -> list[Any]:
    target: Any = node.target
    if getattr(target, "__name__", "") == "getitem":
        return ["getitem", [_argument(a, values) for a in node.args], {}, []]
    if not isinstance(target, torch._ops.OpOverload) or not flex_mods.knows(_name(target)):
        raise _Unsayable
    declared = target._schema.arguments
    names = [a.name for a in declared if not a.kwarg_only]
    given = [*node.args, *(node.kwargs.get(a.name, a.default_value) for a in declared[len(node.args) : len(names)])]
    others = {key: _argument(a, values) for key, a in node.kwargs.items() if key not in names}
    made = node.meta["val"]
    results = [_result(value) for value in (made if isinstance(made, (tuple, list)) else [made])]
    return [_name(target), [_argument(a, values) for a in given], others, results]


def _result(value: Any) -> list[Any]:
    if not isinstance(value, Tensor):
        raise _Unsayable
    return [list(value.shape), _short(value.dtype)]


def _argument(value: Any, values: dict[Node, int]) -> Any:
    if isinstance(value, Node):
        return {"value": values[value]}
    if isinstance(value, (list, tuple)):
        return [_argument(item, values) for item in value]
    if isinstance(value, torch.dtype):
        return {"dtype": _short(value)}
    if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise _Unsayable


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- shapes


def _infer_forward(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    from torch._higher_order_ops.flex_attention import _permute_strides

    made = query.new_empty((*query.shape[:3], value.shape[3]))
    rows = [query.new_empty(query.shape[:3], dtype=_wide(query)) for _ in range(2)]
    return _permute_strides(made, query.stride()), rows[0], rows[1]


def _infer_backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, grad_out: Any, grad_logsumexp: Any,
    score_buffers: Sequence[Tensor], mask_buffers: Any, blocks: Any, score: str, joint: str, *_: Any,
) -> list[Tensor]:  # fmt: skip
    from torch._higher_order_ops.flex_attention import _permute_strides

    grads = []
    for given in (query, key, value):
        made = _permute_strides(given.new_empty((query.shape[0], *given.shape[1:])), given.stride())
        grads.append(made if given.shape[0] == query.shape[0] else made.sum(0, keepdim=True))
    buffers = [score_buffers[i] for i in flex_mods.differentiated(joint)]
    return [*grads, *(torch.empty_like(b, memory_format=torch.contiguous_format) for b in buffers)]
