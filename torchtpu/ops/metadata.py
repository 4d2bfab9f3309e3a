"""Questions about tensors whose answers are Python numbers and need no value."""

from __future__ import annotations

from torch import Tensor

from torchtpu.ops.registry import composed


@composed("is_set_to")
def is_set_to(self: Tensor, tensor: Tensor) -> bool:
    is_shared = self.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    place, other = ((t.storage_offset(), t.shape, t.stride()) for t in (self, tensor))
    return is_shared and place == other
