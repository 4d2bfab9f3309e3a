"""Collectives as StableHLO: what each leaves on every rank.

A program with collectives has one replica per rank of its group, in the group's order.
"""

from __future__ import annotations

import functools
from typing import Any

from torchtpu.ops.registry import jax, jnp, lax

_REDUCTIONS = {"SUM": "add", "AVG": "add", "PRODUCT": "multiply", "MIN": "minimum", "MAX": "maximum"}
_UNSIGNED = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def collective(input: Any, ticket: Any, what: str, ranks: list[int], sizes: list[int]) -> Any:
    """The lowering of the recorded op: `what` is "all_reduce SUM", "broadcast 1", "all_gather" and the like."""
    name, *arguments = what.split()
    return _KINDS[name](input, len(ranks), *arguments)


def is_compiled(what: str, dtype_name: str) -> bool:
    """Whether programs have such a collective."""
    name, *arguments = what.split()
    if name not in _KINDS or dtype_name.startswith(("complex", "float8")):
        return False
    return name not in ("all_reduce", "reduce", "reduce_scatter") or arguments[0] in _REDUCTIONS


def _all_reduce(x: Any, size: int, op: str, *_: str) -> Any:
    return _bind("all_reduce", x, size, x.shape, op)


def _broadcast(x: Any, size: int, root: str) -> Any:
    """The sum of the root's bits and the others' zeros."""
    bits = x.astype(jnp.uint8) if x.dtype == bool else lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize])
    wide = bits.astype(jnp.uint32) if bits.dtype == jnp.uint16 else bits  # which no transport adds
    is_root = _primitive("replica").bind() == int(root)
    sent = _all_reduce(jnp.where(is_root, wide, jnp.zeros_like(wide)), size, "SUM").astype(bits.dtype)
    return sent.astype(bool) if x.dtype == bool else lax.bitcast_convert_type(sent, x.dtype)


def _all_gather(x: Any, size: int) -> Any:
    rows = _in_rows(x, 1)
    gathered = _bind("all_gather", rows, size, (size * rows.shape[0], *rows.shape[1:]))
    return gathered.reshape(size * x.shape[0], *x.shape[1:])


def _reduce_scatter(x: Any, size: int, op: str) -> Any:
    rows = _in_rows(x, size)
    scattered = _bind("reduce_scatter", rows, size, (rows.shape[0] // size, *rows.shape[1:]), op)
    return scattered.reshape(x.shape[0] // size, *x.shape[1:])


def _in_rows(x: Any, parts: int) -> Any:
    """A flat array as rows as long as a TPU's lanes, where each of its parts has whole ones: libtpu copies what it
    gathers flat several times, and reduces flat arrays everywhere before it scatters them."""
    return x.reshape(-1, _LANES) if x.ndim == 1 and x.shape[0] % (parts * _LANES) == 0 else x


_LANES = 128


def _all_to_all(x: Any, size: int) -> Any:
    return _bind("all_to_all", x.reshape(-1), size, (x.size,))


def _shift(x: Any, size: int, step: str) -> Any:
    return _bind("shift", x.reshape(-1), size, (x.size,), step=int(step))


_KINDS: dict[str, Any] = {
    "all_reduce": _all_reduce,
    "reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "shift": _shift,
}


def _bind(kind: str, x: Any, size: int, shape: tuple[int, ...], op: str = "SUM", step: int = 0) -> Any:
    return _primitive("collective").bind(x, kind=kind, size=size, shape=shape, op=_REDUCTIONS[op], step=step)


@functools.cache
def _primitive(name: str) -> Any:
    """JAX's own collectives need a mesh of all devices; these need a number of replicas."""
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    primitive = Primitive(f"torchtpu_{name}")
    if name == "replica":
        primitive.def_abstract_eval(lambda: jax.core.ShapedArray((), jnp.dtype("uint32")))
        mlir.register_lowering(primitive, _emit_replica)
    else:
        primitive.def_abstract_eval(lambda x, *, shape, **_: jax.core.ShapedArray(shape, x.dtype))
        mlir.register_lowering(primitive, _emit)
    return primitive


def _emit_replica(ctx: Any) -> Any:
    from jax.extend.mlir.dialects import stablehlo

    return stablehlo.ReplicaIdOp().results


def _emit(ctx: Any, x: Any, *, kind: str, size: int, shape: tuple[int, ...], op: str, step: int) -> Any:
    import numpy as np
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo

    groups = ir.DenseIntElementsAttr.get(np.arange(size, dtype=np.int64).reshape(1, size))
    element = ir.RankedTensorType(x.type).element_type
    result = ir.RankedTensorType.get(shape, element)
    dimension = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 0)
    if kind == "shift":
        pairs = np.array([(rank, (rank + step) % size) for rank in range(size)], dtype=np.int64)
        return stablehlo.CollectivePermuteOp(x, ir.DenseIntElementsAttr.get(pairs)).results
    if kind == "all_gather":
        return stablehlo.AllGatherOp([result], [x], dimension, groups).results
    if kind == "all_to_all":
        count = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), size)
        return stablehlo.AllToAllOp([x], dimension, dimension, count, groups).results
    if kind == "all_reduce":
        made = stablehlo.AllReduceOp([result], [x], groups)
    else:
        made = stablehlo.ReduceScatterOp(result, x, dimension, groups)
    scalar = ir.RankedTensorType.get([], element)
    block = made.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        reduced = {
            "add": stablehlo.AddOp, "multiply": stablehlo.MulOp, "minimum": stablehlo.MinOp, "maximum": stablehlo.MaxOp,
        }[op](*block.arguments)  # fmt: skip
        stablehlo.ReturnOp([reduced])
    return made.results
