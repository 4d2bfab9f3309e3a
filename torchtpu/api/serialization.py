"""Copies of tensors in other processes: in come tpu tensors sent through torch.multiprocessing, out come tpu tensors.

torch.save, torch.load, pickle and copy need nothing from here: torch tags our storages "tpu:0" and moves bytes through
the device's own copies. A tensor sent to another process travels by value, for tpu memory is not shared.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions


def install() -> None:
    """Teaches torch.multiprocessing to send tpu tensors."""
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, _reduce)


def _reduce(tensor: torch.Tensor) -> Any:
    if tensor.device.type != "tpu":
        reduce: Any = reductions.reduce_tensor
        return reduce(tensor)
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "Cowardly refusing to serialize non-leaf tensor which requires_grad, "
            "since autograd does not support crossing process boundaries.  "
            "If you just want to transfer the data, call detach() on the tensor "
            "before serializing (e.g., putting it on the queue)."
        )
    return _rebuild, (type(tensor), tensor.detach().cpu(), tensor.device, tensor.requires_grad)


def _rebuild(kind: Any, host: torch.Tensor, device: torch.device, requires_grad: bool) -> torch.Tensor:
    moved = host.to(device)
    if issubclass(kind, torch.nn.Parameter):
        return torch.nn.Parameter(moved, requires_grad)
    return moved.requires_grad_(requires_grad)
