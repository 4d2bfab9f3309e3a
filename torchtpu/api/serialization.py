"""Sends tpu tensors to other processes through torch.multiprocessing, as copies.

torch.save, torch.load, pickle and copy need nothing from here: torch tags our storages "tpu:0" and moves bytes through
the device's own copies. A tensor sent to another process travels by value, for tpu memory is not shared; what shares a
storage within one message shares one where it arrives.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions


def install() -> None:
    """Teaches torch.multiprocessing to send tpu tensors, and says so where they would be shared."""
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, _reduce_tensor)
    ForkingPickler.register(torch.UntypedStorage, _reduce_storage)
    storage: Any = torch.UntypedStorage
    storage.share_memory_ = _warning(storage.share_memory_)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    if tensor.device.type == "tpu" and (tensor.is_conj() or tensor.is_neg()):  # what torch sends has no such bits
        tensor = tensor.detach().resolve_conj().resolve_neg().requires_grad_(tensor.requires_grad)
    reduce: Any = reductions.reduce_tensor
    return reduce(tensor)


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    if storage.device.type != "tpu":
        reduce: Any = reductions.reduce_storage
        return reduce(storage)
    copied: Any = storage
    host = torch.empty(0, dtype=torch.uint8).set_(copied.cpu())
    return _rebuild_storage, (host.numpy().tobytes(), storage.device)


def _rebuild_storage(data: bytes, device: torch.device) -> torch.UntypedStorage:
    host = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return host.to(device).untyped_storage()


def _warning(share_memory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(share_memory)
    def share(self: torch.UntypedStorage, *arguments: Any, **options: Any) -> Any:
        if self.device.type == "tpu":
            warnings.warn(
                "tpu memory is not shared between processes: a process that is sent this tensor gets a copy of its "
                "own, and share_memory_() does nothing",
                stacklevel=2,
            )
        return share_memory(self, *arguments, **options)

    return share
