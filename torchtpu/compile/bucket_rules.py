"""Which ops may run on padded tensors: in comes a node of a traced graph, out go the dimensions of its results and what
has to be masked first, so that the surplus changes nothing.

An op without a rule may still be in a graph where none of its tensors has a symbol.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from torchtpu.compile.bucket_dims import (
    NUMBERS,
    Call,
    Dim,
    Dims,
    Plan,
    Unsafe,
    any_ragged,
    broadcast,
    is_ragged,
    is_tensor,
    numbers,
    product,
    regrouped,
    results,
    simple,
)
from torchtpu.compile.bucket_rules_nn import (
    attention,
    attention_backward,
    by_sample,
    embedding,
    embedding_backward,
    layer_norm,
    nll,
    sums_rows,
)

# ---- rules: each returns the plan of a call


def _pointwise(call: Call) -> Plan:
    return Plan([broadcast([call.dims(name) for name in call.tensors()])])


def _same(call: Call) -> Plan:
    return Plan([call.dims("self")])


def _view(call: Call) -> Plan:
    return Plan([regrouped(call.dims("self"), call.shape())])


def _permute(call: Call) -> Plan:
    dims = call.dims("self")
    return Plan([tuple(dims[d] for d in call.arguments["dims"])])


def _transpose(call: Call) -> Plan:
    dims = list(call.dims("self"))
    if "dim0" in call.arguments:
        a, b = call.axis("dim0", len(dims)), call.axis("dim1", len(dims))
    else:
        a, b = 0, len(dims) - 1
    if dims:
        dims[a], dims[b] = dims[b], dims[a]
    return Plan([tuple(dims)])


def _unsqueeze(call: Call) -> Plan:
    dims = list(call.dims("self"))
    dims.insert(call.axis("dim", len(dims) + 1), ())
    return Plan([tuple(dims)])


def _squeeze(call: Call) -> Plan:
    dims = call.dims("self")
    given = call.arguments.get("dim")
    chosen = range(len(dims)) if given is None else [d % len(dims) for d in numbers(given)]
    return Plan([tuple(d for i, d in enumerate(dims) if not (i in chosen and d == ()))])


def _expand(call: Call) -> Plan:
    dims, shape = call.dims("self"), call.shape()
    dims = ((),) * (len(shape) - len(dims)) + dims
    return Plan([tuple(d if d != () else simple(size) for d, size in zip(dims, shape, strict=True))])


def _slice(call: Call) -> Plan:
    dims = list(call.dims("self"))
    axis = call.axis("dim", len(dims))
    if is_ragged(dims[axis]):
        if call.shape()[axis] != product(dims[axis]) or call.arguments.get("step", 1) != 1:
            raise Unsafe("a part of a size that changes")
    else:
        dims[axis] = _fixed(call.shape()[axis])
    return Plan([tuple(dims)])


def _fixed(size: Any) -> Dim:
    if not isinstance(size, int):
        raise Unsafe("a part of a size that changes")
    return simple(size)


def _select(call: Call) -> Plan:
    dims = list(call.dims("self"))
    axis, index = call.axis("dim", len(dims)), call.arguments["index"]
    if is_ragged(dims[axis]) and not (isinstance(index, int) and index >= 0 and len(dims[axis]) == 1):
        raise Unsafe("an index from the end")
    del dims[axis]
    return Plan([tuple(dims)])


def _along(*names: str) -> Callable[[Call], Plan]:
    """Ops that keep the shape and mix one dimension, which must not change."""

    def rule(call: Call) -> Plan:
        dims = call.dims("self")
        for name in names:
            # roll over no dimensions goes over all elements
            for axis in numbers(call.arguments[name]) or range(len(dims)):
                if is_ragged(dims[axis % len(dims)]):
                    raise Unsafe("mixes a size that changes")
        return Plan([dims] * len(results(call.node)))

    return rule


def _split(call: Call) -> Plan:
    dims = list(call.dims("self"))
    axis = call.axis("dim", len(dims))
    if is_ragged(dims[axis]):
        raise Unsafe("takes a size that changes apart")
    made: list[Dims | None] = []
    for i in range(len(call.node.meta["val"])):
        part = [*dims]
        if len(call.shape(i)) == len(dims):
            part[axis] = _fixed(call.shape(i)[axis])
        else:  # unbind
            del part[axis]
        made.append(tuple(part))
    return Plan(made)


def _cat(call: Call) -> Plan:
    all_dims = [list(call.dims_of(t)) for t in call.arguments["tensors"]]
    axis = call.axis("dim", len(all_dims[0]))
    if any(is_ragged(dims[axis]) for dims in all_dims):
        raise Unsafe("joins sizes that change")
    joined = simple(call.shape()[axis])
    for dims in all_dims:
        dims[axis] = joined
    if any(dims != all_dims[0] for dims in all_dims):
        raise Unsafe("sizes that are equal by chance")
    return Plan([tuple(all_dims[0])])


def _stack(call: Call) -> Plan:
    all_dims = [call.dims_of(t) for t in call.arguments["tensors"]]
    if any(dims != all_dims[0] for dims in all_dims):
        raise Unsafe("sizes that are equal by chance")
    made = list(all_dims[0])
    axis = call.axis("dim", len(made) + 1)
    made.insert(axis, simple(call.shape()[axis]))
    return Plan([tuple(made)])


def _back_into(call: Call) -> Plan:
    """The gradient of a part, among zeros."""
    dims = list(call.dims("grad_output"))
    axis = call.axis("dim", len(call.shape()))
    if len(dims) < len(call.shape()):
        dims.insert(axis, ())
    if is_ragged(dims[axis]):
        raise Unsafe("a part of a size that changes")
    dims[axis] = _fixed(call.shape()[axis])
    return Plan([tuple(dims)])


def _reduce(fill: float | None) -> Callable[[Call], Plan]:
    """Reductions; `fill` is what changes nothing, None: only sizes that stay are reduced."""

    def rule(call: Call) -> Plan:
        dims = call.dims("self")
        given = call.arguments.get("dim")
        axes = {d % len(dims) for d in numbers(given)} if given not in (None, []) and dims else set(range(len(dims)))
        keeps = call.arguments.get("keepdim", False)
        kept = tuple(() if i in axes else d for i, d in enumerate(dims) if keeps or i not in axes)
        plan = Plan([kept])
        if any(is_ragged(dims[i]) for i in axes):
            if fill is None or (math.isinf(fill) and not call.node.meta["val"].is_floating_point()):
                raise Unsafe("reduces a size that changes")
            plan.masks = {"self": fill}
        return plan

    return rule


def _mean(call: Call) -> Plan:
    plan = _reduce(0)(call)
    if plan.masks:
        dims, given = call.dims("self"), call.arguments.get("dim")
        plan.averages = tuple(d % len(dims) for d in numbers(given)) if given else tuple(range(len(dims)))
    return plan


def _softmax(call: Call) -> Plan:
    dims = call.dims("self")
    is_changing = is_ragged(dims[call.axis("dim", len(dims))])
    return Plan([dims], {"self": -math.inf} if is_changing else {})


def _softmax_backward(call: Call) -> Plan:
    dims = call.dims("grad_output")
    if is_ragged(dims[call.axis("dim", len(dims))]):
        raise Unsafe("mixes a size that changes")
    return Plan([dims])


def _contracted(a: Dim, b: Dim) -> bool:
    if a != b:
        raise Unsafe("sizes that are equal by chance")
    return is_ragged(a)


def _multiply(left: str, right: str, added: str | None = None) -> Callable[[Call], Plan]:
    """mm, bmm and what adds to them."""

    def rule(call: Call) -> Plan:
        a, b = call.dims(left), call.dims(right)
        masks: dict[str, float] = {left: 0, right: 0} if _contracted(a[-1], b[-2]) else {}
        made = (*broadcast([a[:-2], b[:-2]]), a[-2], b[-1])
        if added is not None:
            broadcast([made, call.dims(added)])
        return Plan([made], masks)

    return rule


def _linear(call: Call) -> Plan:
    x, weight = call.dims("input"), call.dims("weight")
    if any_ragged(weight) or _contracted(x[-1], weight[1]):
        raise Unsafe("a weight that changes")
    return Plan([(*x[:-1], weight[0])])


def _gather(call: Call) -> Plan:
    dims, index = call.dims("self"), call.dims("index")
    axis = call.axis("dim", len(dims))
    if is_ragged(dims[axis]) or any(d != i for n, (d, i) in enumerate(zip(dims, index, strict=True)) if n != axis):
        raise Unsafe("gathers from a size that changes")
    return Plan([index], {"index": 0})


def _sized(call: Call) -> Plan:
    return Plan([tuple(map(simple, call.shape()))])


def _arange(call: Call) -> Plan:
    if call.arguments.get("start", 0) != 0 or call.arguments.get("step", 1) != 1:
        raise Unsafe("a range with a start")
    return _sized(call)


_POINTWISE = [
    "_to_copy", "clone", "alias", "detach", "lift_fresh", "copy", "where", "masked_fill", "fill",
    "threshold_backward", "gelu_backward", "silu_backward", "hardtanh_backward", "leaky_relu_backward",
    "elu_backward", "softplus_backward", "sigmoid_backward", "tanh_backward", "native_dropout_backward", "zeros_like",
    "ones_like", "full_like", "empty_like",
]  # fmt: skip
_RULES: dict[str, Callable[[Call], Plan]] = {
    **dict.fromkeys(_POINTWISE, _pointwise),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), _view),
    **dict.fromkeys(("triu", "tril"), _same),
    **dict.fromkeys(("transpose", "t"), _transpose),
    **dict.fromkeys(("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"), by_sample("self")),
    **dict.fromkeys(("avg_pool2d_backward", "_adaptive_avg_pool2d_backward"), by_sample("self")),
    **dict.fromkeys(("split", "split_with_sizes", "unbind", "chunk"), _split),
    **dict.fromkeys(("full", "zeros", "ones", "new_zeros", "new_ones", "new_full", "new_empty", "empty"), _sized),
    **dict.fromkeys(("cumsum", "sort"), _along("dim")),
    **dict.fromkeys(("flip", "roll"), _along("dims")),
    **dict.fromkeys(("prod", "any", "all", "var", "std", "logsumexp", "linalg_vector_norm"), _reduce(None)),
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "slice": _slice,
    "select": _select,
    "select_backward": _back_into,
    "slice_backward": _back_into,
    "stack": _stack,
    "cat": _cat,
    "sum": _reduce(0),
    "amax": _reduce(-math.inf),
    "amin": _reduce(math.inf),
    "mean": _mean,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _softmax_backward,
    "mm": _multiply("self", "mat2"),
    "bmm": _multiply("self", "mat2"),
    "addmm": _multiply("mat1", "mat2", "self"),
    "baddbmm": _multiply("batch1", "batch2", "self"),
    "linear": _linear,
    "linear_backward": sums_rows("grad_output", "self"),
    "native_layer_norm": layer_norm,
    "native_layer_norm_backward": sums_rows("grad_out", "input", "mean", "rstd"),
    "_fused_rms_norm": layer_norm,
    "_fused_rms_norm_backward": sums_rows("grad_out", "input", "rstd"),
    "native_group_norm": by_sample("input"),
    "native_group_norm_backward": sums_rows("grad_out", "input", "mean", "rstd"),
    "_native_batch_norm_legit_no_training": by_sample("input"),
    "convolution": by_sample("input"),
    "convolution_backward": sums_rows("grad_output", "input"),
    "embedding": embedding,
    "embedding_dense_backward": embedding_backward,
    "nll_loss_forward": nll,
    "nll_loss_backward": nll,
    "gather": _gather,
    "arange": _arange,
    "_scaled_dot_product_fused_attention_overrideable": attention,
    "_scaled_dot_product_fused_attention_overrideable_backward": attention_backward,
}
# Ops whose symbolic numbers are sizes of tensors, so that padding changes them along.
_TAKE_SIZES = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "slice", "full", "zeros", "ones", "new_zeros",
    "new_ones", "new_full", "new_empty", "empty", "arange", "native_group_norm", "native_group_norm_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward", "split_with_sizes", "select_backward",
    "slice_backward",
}  # fmt: skip
# Ops that take a tensor of one element in place of a symbolic number.
_ARITHMETIC = {"add", "sub", "mul", "div"}


def takes_true_number(node: Node) -> bool:
    """Whether the op's symbolic number is an operand, where the true number has to stand."""
    target: Any = node.target
    return target._schema.name.removeprefix("aten::") in _ARITHMETIC


def plan_of(node: Node, dims_of: Callable[[Node], Dims]) -> Plan:
    """What becomes of a node that calls an op. Raises Unsafe."""
    target: Any = node.target
    schema = target._schema
    name = schema.name.removeprefix("aten::")
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    call = Call(node, {**defaults, **dict(zip(defaults, node.args, strict=False)), **node.kwargs}, dims_of)
    changing = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), NUMBERS)]
    if changing and name not in _TAKE_SIZES:
        others = [dims_of(n) for n in node.all_input_nodes if is_tensor(n)]
        value: Any = node.meta["val"]
        if name not in _ARITHMETIC or len(changing) > 1 or not others or not value.is_floating_point():
            raise Unsafe(f"{schema.name} takes a number that changes")
    made = [v for v in results(node) if isinstance(v, torch.Tensor)]
    given = [n for n in node.all_input_nodes if is_tensor(n)]
    if not any(isinstance(size, torch.SymInt) for v in made for size in v.shape) and not any(
        any_ragged(dims_of(n)) for n in given
    ):
        return Plan([tuple(map(simple, v.shape)) if isinstance(v, torch.Tensor) else None for v in results(node)])
    rule = _RULES.get(name) or (_pointwise if torch.Tag.pointwise in target.tags else None)
    draws = torch.Tag.nondeterministic_seeded in target.tags and rule is not attention
    if draws or schema.is_mutable:
        raise Unsafe(f"{schema.name} draws or writes")
    if rule is None:
        raise Unsafe(f"{schema.name} has no rule")
    plan = rule(call)
    _check(node, plan)
    return plan


def _check(node: Node, plan: Plan) -> None:
    """The factors of each dimension make its size."""
    for value, dims in zip(results(node), plan.dims, strict=True):
        if isinstance(value, torch.Tensor):
            shape: Any = value.shape
            sizes = [size.node.expr if isinstance(size, torch.SymInt) else size for size in shape]
            if (
                dims is None
                or len(dims) != len(sizes)
                or any(product(d) != s for d, s in zip(dims, sizes, strict=True))
            ):
                raise Unsafe(f"{node.target} makes another shape")
