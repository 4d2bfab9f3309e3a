"""What torch.nn.DataParallel is made of, for tpu: the copies that PyTorch builds for CUDA only.

`torch.nn.parallel.comm` looks these functions up in `torch._C`, where a build without CUDA has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.cuda import nccl

Tensors = Sequence[torch.Tensor]


def install() -> None:
    """Adds the functions, unless CUDA devices are what torch.nn.DataParallel takes. Called once."""
    if torch.cuda.is_available():
        return
    bindings: Any = torch._C
    for function in (_broadcast, _broadcast_out, _broadcast_coalesced, _scatter, _scatter_out, _gather, _gather_out):
        setattr(bindings, function.__name__, function)
    library: Any = nccl
    library.is_available = lambda tensors: False  # else it warns that there is none


def _broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    return [tensor.to(_device(index)) for index in devices]


def _broadcast_out(tensor: torch.Tensor, outs: Tensors) -> Tensors:
    for number, out in enumerate(outs):
        _check_device(out, f"output tensors to be tpu tensors, but output tensor at index {number}")
        if out.shape != tensor.shape:
            raise RuntimeError(
                f"Expected all output tensors to have same shape as the source tensor {list(tensor.shape)}, but output "
                f"tensor at index {number} has shape {list(out.shape)}"
            )
        out.copy_(tensor)
    return outs


def _broadcast_coalesced(tensors: Tensors, devices: Sequence[int], _: int) -> list[list[torch.Tensor]]:
    for tensor in tensors:
        if tensor.device != _device(devices[0]):
            raise RuntimeError(f"all tensors must be on devices[0]: {devices[0]}")
    return [list(tensors), *([tensor.to(_device(index)) for tensor in tensors] for index in devices[1:])]


def _scatter(
    tensor: torch.Tensor, devices: Sequence[int], sizes: Sequence[int] | None, dim: int, streams: Any
) -> list[torch.Tensor]:
    if not devices:
        raise RuntimeError("Expected at least one device to scatter to")
    if sizes is not None and len(sizes) != len(devices):
        raise RuntimeError(
            f"Expected devices and chunk_sizes to be of same length, but got len(devices) = {len(devices)} and "
            f"len(chunk_sizes) = {len(sizes)}"
        )
    chunks = tensor.chunk(len(devices), dim) if sizes is None else tensor.split_with_sizes(sizes, dim)
    return [chunk.to(_device(index)) for chunk, index in zip(chunks, devices, strict=False)]


def _scatter_out(tensor: torch.Tensor, outs: Tensors, dim: int, streams: Any) -> Tensors:
    if not outs:
        raise RuntimeError("Expected at least one output tensor to scatter to")
    for number, out in enumerate(outs):
        _check_device(out, f"output tensors to be tpu tensors, but output tensor at index {number}")
    for out, chunk in zip(outs, tensor.split_with_sizes([out.size(dim) for out in outs], dim), strict=True):
        out.copy_(chunk)
    return outs


def _gather(tensors: Tensors, dim: int, destination: int | None) -> torch.Tensor:
    _check_parts(tensors, dim)
    where = _device(torch.accelerator.current_device_index() if destination is None else destination)
    return torch.cat([tensor.to(where, tensors[0].dtype) for tensor in tensors], dim)


def _gather_out(tensors: Tensors, out: torch.Tensor, dim: int) -> torch.Tensor:
    _check_parts(tensors, dim)
    expected = list(tensors[0].shape)
    expected[dim] = sum(tensor.size(dim) for tensor in tensors)
    if list(out.shape) != expected:
        raise RuntimeError(f"Expected out tensor to have shape {expected}, but got {list(out.shape)}")
    return out.copy_(_gather(tensors, dim, -1 if out.is_cpu else out.get_device()))


def _check_parts(tensors: Tensors, dim: int) -> None:
    if not tensors:
        raise RuntimeError("Expected at least one tensor to gather from")
    expected = list(tensors[0].shape)
    for number, tensor in enumerate(tensors):
        _check_device(tensor, f"input tensors to be tpu tensors, but tensor at index {number}")
        if tensor.ndim != len(expected):
            raise RuntimeError(
                f"Expected all input tensors to have the same number of dimensions, but tensor at index {number} has "
                f"{tensor.ndim} dimensions, (expected {len(expected)})"
            )
        expected[dim] = tensor.size(dim)
        if list(tensor.shape) != expected:
            raise RuntimeError(
                f"Input tensor at index {number} has invalid shape {list(tensor.shape)}, but expected {expected}"
            )


def _check_device(tensor: torch.Tensor, what: str) -> None:
    if tensor.device.type != "tpu":
        raise RuntimeError(f"Expected all {what} has device '{tensor.device}'")


def _device(index: int) -> torch.device:
    """-1 is the CPU."""
    return torch.device("cpu") if index < 0 else torch.device("tpu", index)
