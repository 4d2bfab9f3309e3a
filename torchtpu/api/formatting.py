"""Prints tpu tensors as torch prints CUDA tensors, from one copy on the host.

torch's own formatter adds `device='tpu:0'`, dtype, grad_fn and the like; only the numbers come from here. Formatting
them on the device would record dozens of ops. Of a large tensor, only the part that is printed is copied.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from torchtpu.api.interop import host_copy, is_recorded

# Below this, copying all of a tensor is cheaper than the program that takes out its edges.
_MANY_BYTES = 4 << 20


def install() -> None:
    """Makes torch's formatter read tpu tensors to the host first."""
    torch._tensor_str._tensor_str = _on_host(torch._tensor_str._tensor_str)


def _on_host(original: Any) -> Any:
    @functools.wraps(original)
    def _tensor_str(self: torch.Tensor, indent: int) -> str:
        text: str = original(host_copy(_shown(self)) if is_recorded(self) else self, indent)
        return text

    return _tensor_str


def _shown(x: torch.Tensor) -> torch.Tensor:
    """A tensor that prints as `x` does: `x`, or what is left without most of the elements that dots stand for."""
    options = torch._tensor_str.PRINT_OPTS
    edge, threshold = options.edgeitems, options.threshold
    if x.nbytes < _MANY_BYTES or x.numel() <= threshold:
        return x
    sizes = [min(n, 2 * edge + 1) for n in x.shape]
    for d, n in enumerate(x.shape):  # torch still has to find it worth a summary
        others = math.prod(sizes) // sizes[d]
        sizes[d] = min(n, max(sizes[d], int(threshold) // others + 1))
    x = x.detach()
    for d, size in enumerate(sizes):
        if size < x.shape[d]:
            x = torch.cat([x.narrow(d, 0, size - edge), x.narrow(d, x.shape[d] - edge, edge)], d)
    return x
