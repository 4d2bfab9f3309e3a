"""Printing: in come tpu tensors, out comes the text torch prints for a CUDA tensor, made from one copy on the host.

torch's own formatter adds `device='tpu:0'`, dtype, grad_fn and the like; only the numbers come from here. Formatting
them on the device would record dozens of ops.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from torchtpu.interop import host_copy, is_recorded


def install() -> None:
    """Makes torch's formatter read tpu tensors to the host first."""
    torch._tensor_str._tensor_str = _on_host(torch._tensor_str._tensor_str)


def _on_host(original: Any) -> Any:
    @functools.wraps(original)
    def _tensor_str(self: torch.Tensor, indent: int) -> str:
        text: str = original(host_copy(self) if is_recorded(self) else self, indent)
        return text

    return _tensor_str
