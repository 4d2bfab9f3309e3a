"""Turns tensors and ops as c10d gives them into those that a transport takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from .gloo import is_reducible

Tensors = list[torch.Tensor]


def kind_of(op: Any) -> tuple[Any, Any]:
    """What kind of reduction an op is, and the factor of PREMUL_SUM."""
    reduce_op: Any = ReduceOp(op) if isinstance(op, ReduceOp.RedOpType) else op
    kind, factor = reduce_op.__getstate__()
    return kind, factor


def prepared(tensor: torch.Tensor, kind: Any, factor: Any) -> tuple[torch.Tensor, Any]:
    """The tensor as a transport can reduce it, and with which op."""
    if kind == ReduceOp.PREMUL_SUM:
        tensor, kind = tensor * factor, ReduceOp.SUM
    if tensor.dtype == torch.bool:
        if kind == ReduceOp.AVG:
            raise ValueError("Cannot use ReduceOp.AVG with Boolean inputs")
        return tensor.to(torch.uint8), _BOOLEAN.get(kind, kind)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not is_reducible(tensor.dtype):
        tensor = tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)
    return tensor, ReduceOp.SUM if kind == ReduceOp.AVG else kind


_BOOLEAN = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}


def named(name: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    names = {
        "broadcast": ("root",),
        "reduce": ("root",),
        "gather": ("root",),
        "scatter": ("count", "root"),
        "all_to_all": ("received", "sent"),
        "send": ("destination", "tag"),
    }
    return dict(zip(names.get(name, ()), arguments, strict=True))


def told(name: str, arguments: tuple[Any, ...]) -> str:
    root = named(name, arguments).get("root")
    return "" if root is None else f" root {root}"


def shift(rank: int, received: Sequence[int], sent: Sequence[int]) -> int:
    """By how many ranks on an exchange moves all that a rank has, 0 where it does something else."""
    sources, targets = ([n for n, count in enumerate(counts) if count] for counts in (received, sent))
    if len(sources) != 1 or len(targets) != 1 or received[sources[0]] != sent[targets[0]]:
        return 0
    step = (targets[0] - rank) % len(sent)
    return step if step == (rank - sources[0]) % len(sent) else 0


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def is_on_host(tensors: Tensors) -> bool:
    return tensors[0].device.type == "cpu"


def joined(tensors: Tensors) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([t.detach().reshape(-1) for t in tensors])


def write(outputs: Tensors, result: torch.Tensor) -> None:
    """Writes the flat result to the outputs, one after the other. As other backends do, it tells autograd nothing."""
    at = 0
    with torch.no_grad():
        result = result.view(-1)
        for output in outputs:
            if output.numel():
                output.data.copy_(result[at : at + output.numel()].view(output.shape))
            at += output.numel()


def check_sizes(large: Tensors, small: Tensors, size: int) -> None:
    for all_parts, part in zip(large, small, strict=True):
        if all_parts.dtype != part.dtype:
            raise TypeError(f"output tensor must have the same type as input tensor: {all_parts.dtype}, {part.dtype}")
        if all_parts.numel() != part.numel() * size:
            raise ValueError(
                f"output tensor size must be equal to world_size times input tensor size: {all_parts.numel()} elements "
                f"for {size} ranks of {part.numel()}"
            )


def options(kind: Any, **values: Any) -> Any:
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    return options


def last(works: Any) -> Any:
    *earlier, last = list(works)
    for work in earlier:
        work.wait()
    return last
