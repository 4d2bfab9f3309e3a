"""Rules of ops whose arrays are longer than what counts of them: in comes a call, out go the ops that make of what
counts what the call makes of it (see `torchtpu.runtime.padding.grow`).

An op without a rule keeps its region from being given room.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from torchtpu.ops.registry import LOWERINGS, Lowering
from torchtpu.ops.shape import index, shape
from torchtpu.runtime import _C
from torchtpu.runtime.ir.calls import schema_of
from torchtpu.runtime.ir.program import Base, Operand
from torchtpu.runtime.padding.grow import FIRST, Call, Changed, Roomy, Rule, plain
from torchtpu.runtime.padding.layout import Fixed

_PLACES = "torchtpu::places"  # (self, count, dim): indices of a dimension of which `count` elements count, from 0 on

_libraries: list[Any] = []  # an op lives as long as its library


def install() -> None:
    """Makes the ops that look at how much counts known to PyTorch and to the recorder. Called once."""
    kind: Any = torch.library.Library
    library = kind("torchtpu", "FRAGMENT")
    _libraries.append(library)
    for name, schema, lower in (
        (FIRST, "(Tensor self, int count, int dim, float fill) -> Tensor", shape.first),
        (_PLACES, "(Tensor self, int count, int dim) -> Tensor", index.places),
    ):
        library.define(name.partition("::")[2] + schema)
        LOWERINGS[name] = Lowering(name, lower, structural={"fill": None}, ints=("count",))
        _C.register_op(LOWERINGS[name].row())


def rule_of(name: str) -> Rule | None:
    """The rule of an op with a lowering of its own; None where it has none."""
    entry = LOWERINGS.get(name)
    if entry is None or name in _RULES or not entry.elementwise:
        return _RULES.get(name)
    return functools.partial(_elementwise, entry.structural)


# ---- rules


def _elementwise(structural: Collection[str], call: Call) -> None:
    """Numbers that change are given at run time; those of `structural` arguments change what the op means."""
    for argument in schema_of(call.op.name).arguments:
        given, name = call.get(argument.name), argument.name
        if isinstance(given, Changed) and str(argument.type) == "number" and name not in structural:
            call.put(name, call.number(given.value))
    call.keep()


def _rows(*fixed: str) -> Rule:
    """Ops that compute each row for itself; these arguments do not grow, nor do rows."""

    def rule(call: Call) -> None:
        if any(map(call.grows, fixed)):
            raise Fixed("a weight that grows")
        call.keep()

    return rule


def _reduces(fill: float | None = None) -> Rule:
    """Reductions; `fill` is what changes nothing, None: only dimensions that do not grow are reduced."""

    def rule(call: Call) -> None:
        axes = _axes(call)
        if call.grows("self") & axes:
            if fill is None or (math.isinf(fill) and not call.tensor("self").dtype.is_floating_point):
                raise Fixed(f"{call.op.name} over what grows")
            call.hide("self", fill, axes)
        call.keep()

    return rule


def _finds(fill: float) -> Rule:
    """Reductions to a place; counted over all dimensions, it depends on how long all but the first are."""

    def rule(call: Call) -> None:
        if call.constant("dim") is None and call.grows("self") - {0}:
            raise Fixed(f"{call.op.name} counts what grows")
        _reduces(fill)(call)

    return rule


def _axes(call: Call) -> set[int]:
    """The dimensions that a reduction goes over."""
    rank, given = len(call.tensor("self").sizes), call.constant("dim")
    if given is None or given == ():
        return set(range(rank))
    return {d % max(rank, 1) for d in (given if isinstance(given, tuple) else (given,))}


def _softmax(call: Call) -> None:
    call.hide("self", -math.inf, _axes(call))
    call.keep()


def _layer_norm(call: Call) -> None:
    rank, normalized = len(call.tensor("input").sizes), len(call.constant("normalized_shape"))
    if any(dim >= rank - normalized for dim in call.grows("input")):
        raise Fixed("normalises what grows")
    _rows("weight", "bias")(call)


def _multiply(left: str, right: str) -> Rule:
    """Products of matrices, or a matrix and a vector."""

    def rule(call: Call) -> None:
        inner = len(call.tensor(left).sizes) - 1, max(0, len(call.tensor(right).sizes) - 2)
        if inner[0] in call.grows(left):
            call.hide(left, 0, {inner[0]})
            call.settle(right)
        call.keep()

    return rule


def _linear(call: Call) -> None:
    if len(call.tensor("input").sizes) - 1 in call.grows("input"):
        raise Fixed("a weight that grows")
    _rows("weight", "bias")(call)


def _embedding(call: Call) -> None:
    if call.grows("weight"):
        raise Fixed("a table that grows")
    call.hide("indices", 0)
    call.keep()


def _gather(call: Call) -> None:
    """Takes from what does not grow, at as many places as there are."""
    if call.grows("self"):
        raise Fixed("takes from what grows")
    call.hide("index", 0)
    call.keep()


def _index(call: Call) -> None:
    """Indices of a dimension that grows are counted from the end of what counts."""
    given, places = call.get("self"), list(call.get("indices"))
    for dim, place in enumerate(places):
        if place is None:
            continue
        if plain(place).dtype in (torch.bool, torch.uint8):
            raise Fixed("a mask")
        for d, count in place.counts.items() if isinstance(place, Roomy) else ():
            places[dim] = call.apply(FIRST, places[dim], count, d, 0)
        if isinstance(given, Roomy) and dim in given.counts:
            places[dim] = call.apply(_PLACES, places[dim], given.counts[dim], dim)
    call.put("indices", tuple(places))
    call.keep()


def _arange(call: Call) -> None:
    """What comes after the numbers that count goes on with them; where the range only moves, so does its start."""
    start, end, step = (call.get(name) for name in ("start", "end", "step"))
    if step != 1 or not isinstance(end, Changed) or not isinstance(start, (int, Changed)):
        raise Fixed("a range of numbers that change")
    call.put("end", 0)  # the length is the result's
    if isinstance(start, Changed):
        call.put("start", call.number(start.value))
    call.keep()


def _cat(call: Call) -> None:
    """The first tensor has room for the others."""
    tensors = call.get("tensors")
    rank = len(plain(tensors[0]).sizes)
    axis = (call.constant("dim") or 0) % max(rank, 1)
    grown = [isinstance(t, Roomy) and axis in t.counts for t in tensors]
    if not any(grown):
        call.keep()
        return
    head, *rest = tensors
    made = call.only_result()
    if grown != [True] + [False] * len(rest) or any(len(plain(t).sizes) != rank for t in rest):
        raise Fixed("joins sizes that grow")
    whole, place = head.operand, head.counts[axis]
    if whole.dtype == made.dtype and whole.base == made.base and whole.strides == made.strides and whole.offset == 0:
        made = replace(made, value=whole.value)
    else:
        call.copy(whole, made)
    for tensor in rest:
        made = call.write(made, tensor, axis, place)
        place += plain(tensor).sizes[axis]
    call.stands_for(made)


def _attention(call: Call) -> None:
    """Scores of keys that do not count are hidden by a bias; a causal mask hides them too."""
    grows = {name: call.grows(name) for name in ("query", "key", "value", "attn_bias")}
    length, width = len(call.tensor("query").sizes) - 2, len(call.tensor("key").sizes) - 2
    if call.get("dropout_p") != 0.0 or grows["query"] - {length} or grows["key"] - {width} or grows["value"] - {width}:
        raise Fixed("attention whose heads grow, or with dropout")
    if call.get("is_causal") and (grows["query"] or grows["key"]) and _length(call, "query") != _length(call, "key"):
        raise Fixed("a causal mask between sizes that differ")
    if grows["key"] and not call.get("is_causal"):
        call.put("attn_bias", _hide_keys(call, call.get("key").counts[width]))
    elif grows["attn_bias"] and grows["attn_bias"] - {len(call.tensor("attn_bias").sizes) - 2}:
        raise Fixed("a bias that grows alone")
    call.settle("key")
    call.settle("value")
    call.keep()


def _length(call: Call, name: str) -> int:
    """How many queries or keys count."""
    sizes = call.tensor(name).sizes
    given = call.get(name)
    found: int = (given.counts if isinstance(given, Roomy) else {}).get(len(sizes) - 2, sizes[-2])
    return found


def _hide_keys(call: Call, count: int) -> Operand:
    """The bias with -inf for what does not count of the keys."""
    query, bias = call.tensor("query"), call.get("attn_bias")
    if bias is None:
        sizes = (1,) * (len(query.sizes) - 1) + (call.room,)
        bias = Operand(None, sizes, (0,) * len(sizes), 0, query.dtype, Base(sizes, query.dtype))
    elif plain(bias).sizes[-1] != call.room or not plain(bias).dtype.is_floating_point:
        raise Fixed("a bias for all keys together")
    hidden: Operand = plain(call.apply(FIRST, bias, count, len(plain(bias).sizes) - 1, -math.inf))
    strides = tuple(0 if n == 1 else stride for n, stride in zip(hidden.sizes, hidden.strides, strict=True))
    strides = (0,) * (len(query.sizes) - len(strides)) + strides
    return replace(hidden, sizes=(*query.sizes[:-1], call.room), strides=strides)


_KEPT = (
    "copy", "fill.Scalar", "fill.Tensor", "zero", "where.self", "masked_fill.Scalar", "masked_fill.Tensor",
    "masked_fill_.Scalar", "masked_fill_.Tensor", "tril", "triu", "stack", "_stack", "cumsum", "logical_and",
    "logical_not", "logical_or", "logical_xor", "isnan", "isinf", "div.Tensor_mode", "div.Scalar_mode",
    "pow.Tensor_Scalar", FIRST,
)  # fmt: skip
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_KEPT, Call.keep),
    **dict.fromkeys(("sum", "sum.dim_IntList"), _reduces(0)),
    **dict.fromkeys(("amax", "max"), _reduces(-math.inf)),
    **dict.fromkeys(("amin", "min"), _reduces(math.inf)),
    "argmax": _finds(-math.inf),
    "argmin": _finds(math.inf),
    **dict.fromkeys(("mean", "mean.dim"), _reduces()),
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _layer_norm),
    **dict.fromkeys(("mm", "bmm"), _multiply("self", "mat2")),
    "linear": _linear,
    "embedding": _embedding,
    "index_select": _gather,
    "index.Tensor": _index,
    "arange.start_out": _arange,
    "cat": _cat,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
}
