"""Copies a sample's arguments to a device, with the same strides and aliasing."""

from __future__ import annotations

from typing import Any

import torch

WIDER = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


class Move:
    """Copies tensors, and whatever holds them, to `device`; with `is_wider`, in the next wider floating dtypes."""

    def __init__(self, device: str, is_wider: bool = False) -> None:
        self.device = device
        self.is_wider = is_wider
        self._bases: dict[int, torch.Tensor] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.dtype):
            return self._dtype(value)
        if isinstance(value, torch.device):
            return torch.device(self.device) if value.type == "cpu" else value
        if isinstance(value, dict):
            return {k: self.device if k == "device" and v == "cpu" else self(v) for k, v in value.items()}
        if isinstance(value, torch.Size):
            return value
        if isinstance(value, (list, tuple)):
            made = [self(v) for v in value]
            return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
        return value

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        return WIDER.get(dtype, dtype) if self.is_wider else dtype

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        source = tensor.detach()
        if tensor.layout != torch.strided or self._is_dense(source):
            moved = source.clone().to(self.device, self._dtype(source.dtype))
        else:
            moved = self._base(tensor).as_strided(source.size(), source.stride(), source.storage_offset())
        return moved.requires_grad_() if tensor.requires_grad else moved

    def _base(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of all the memory that a view looks into."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._bases:
            base = tensor._base
            covers = base is not None and base.is_contiguous() and base.nbytes == storage.nbytes()
            if base is None or not covers or base.dtype != tensor.dtype:
                base = torch.empty(0, dtype=tensor.dtype).set_(storage)
            self._bases[storage.data_ptr()] = base.detach().clone().to(self.device, self._dtype(tensor.dtype))
        return self._bases[storage.data_ptr()]

    @staticmethod
    def _is_dense(tensor: torch.Tensor) -> bool:
        return tensor.numel() == 0 or tensor.clone().stride() == tensor.stride()
