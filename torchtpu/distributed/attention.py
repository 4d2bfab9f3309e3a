"""Attention of sharded tensors: teaches PyTorch's DTensor and context parallel this device's attention op, as they know
CUDA's."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

_RULES = "torch.distributed.tensor._ops._matrix_ops"
_RING = "torch.distributed.tensor.experimental._context_parallel._attention"
_SEQUENCE = 2  # the dimension that context parallel shards


def install() -> None:
    """Patches the modules, those that are not there yet as soon as they are imported. Called once."""
    patches: dict[str, Callable[[ModuleType], None]] = {_RULES: _add_rules, _RING: _add_ring}
    for name in [*patches]:
        if name in sys.modules:
            patches.pop(name)(sys.modules[name])
    if patches:
        sys.meta_path.insert(0, _AttentionFinder(patches))


class _AttentionFinder(importlib.abc.MetaPathFinder):
    """Patches modules after their import, and goes when it has seen all of them."""

    def __init__(self, patches: dict[str, Callable[[ModuleType], None]]) -> None:
        self._patches = patches

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._patches:
            return None
        patch = self._patches.pop(name)
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            if self._patches:
                sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            _patch_after(spec.loader, patch)
        return spec


def _patch_after(loader: Any, patch: Callable[[ModuleType], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        patch(module)

    loader.exec_module = exec_module


def _ops() -> tuple[Any, Any]:
    aten = torch.ops.aten
    forward = aten._scaled_dot_product_fused_attention_overrideable.default
    return forward, aten._scaled_dot_product_fused_attention_overrideable_backward.default


def _add_rules(_: Any) -> None:
    """Batches and heads may be sharded."""
    from torch.distributed.tensor._op_schema import OpStrategy, RuntimeSchemaInfo
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy, register_op_strategy
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

    def is_tensor(argument: Any) -> bool:
        return isinstance(argument, OpStrategy)

    def placements_with_bias(bias: Any) -> list[tuple[Any, list[Any], Any]]:
        """How the tensors may be placed, the bias with them, and what its gradient is then."""
        found: list[tuple[Any, list[Any], Any]] = [(Replicate(), [Replicate()], Replicate())]
        for dim in (1, 0):
            own = dim - 4 + bias.ndim if is_tensor(bias) else -1
            is_shared = own < 0 or bias.shape[own] == 1
            bias_placed, slope = (Replicate(), Partial()) if is_shared else (Shard(own), Shard(own))
            found.append((Shard(dim), [bias_placed], slope))
        return found

    def forward_rule(op_schema: Any) -> Any:
        bias = op_schema.args_schema[3] if len(op_schema.args_schema) > 3 else None
        rules = [
            [placed, placed, *[None] * 7, placed, placed, placed, *(own if is_tensor(bias) else [])]
            for placed, own, _ in placements_with_bias(bias)
        ]
        return expand_to_full_mesh_op_strategy(op_schema.get_mesh_from_args(), op_schema, rules, input_index=9)

    def backward_rule(op_schema: Any) -> Any:
        bias = op_schema.args_schema[4]
        rest = sum(map(is_tensor, op_schema.args_schema)) - 6 - is_tensor(bias)  # the random state's words
        rules = [
            [
                placed, placed, placed, slope if is_tensor(bias) else None,
                placed, placed, placed, placed, *(own if is_tensor(bias) else []), placed, placed,
                *[Replicate()] * rest,
            ]
            for placed, own, slope in placements_with_bias(bias)
        ]  # fmt: skip
        return expand_to_full_mesh_op_strategy(
            op_schema.get_mesh_from_args(validate=False), op_schema, rules, input_index=4
        )

    forward, backward = _ops()
    register_op_strategy(forward, schema_info=RuntimeSchemaInfo(4))(forward_rule)
    register_op_strategy(backward)(backward_rule)


def _add_ring(module: Any) -> None:
    """Sequences may be sharded within `context_parallel`."""
    forward, backward = _ops()

    def attend(op: Any, given: Sequence[Any], named: dict[str, Any]) -> tuple[Any, ...]:
        arguments = _arguments(op, given, named)
        if arguments.pop("attn_bias") is not None:
            raise NotImplementedError("attn_bias is not supported yet")  # PyTorch's words: its ring takes no masks
        mesh, local = _on_one_dimension(arguments)
        made, logsumexp, *rest = module._templated_ring_attention(mesh.get_group(), _SEQUENCE, op, **local)
        return (*_sharded(mesh, made, logsumexp), *rest)

    def go_back(op: Any, given: Sequence[Any], named: dict[str, Any]) -> tuple[Any, ...]:
        mesh, local = _on_one_dimension(_arguments(op, given, named))
        *grads, bias = module._templated_ring_attention_backward(
            mesh.get_group(), _SEQUENCE, op, grad_out_name="grad_out", **local
        )
        return (*_sharded(mesh, *grads), bias)

    module.custom_ops.update({forward: attend, backward: go_back})


def _arguments(op: Any, given: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name."""
    found = {argument.name: argument.default_value for argument in op._schema.arguments}
    found.update(zip(found, given, strict=False))
    return found | named


def _on_one_dimension(arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The mesh of the sharded tensors, and the arguments with this rank's parts."""
    from torch.distributed.tensor import DTensor, Shard

    sharded = {name: value for name, value in arguments.items() if isinstance(value, DTensor)}
    for name, value in sharded.items():
        if tuple(value.placements) != (Shard(_SEQUENCE),):
            raise RuntimeError(f"context parallel: {name} is placed as {value.placements}, not as [Shard({_SEQUENCE})]")
    mesh = next(iter(sharded.values())).device_mesh
    return mesh, {name: getattr(value, "_local_tensor", value) for name, value in arguments.items()}


def _sharded(mesh: Any, *parts: torch.Tensor) -> list[Any]:
    from torch.distributed.tensor import DTensor, Shard

    make = functools.partial(DTensor.from_local, device_mesh=mesh, placements=[Shard(_SEQUENCE)], run_check=False)
    return [make(part) for part in parts]
