"""Products of groups of rows, without a read of where the groups end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchtpu.ops.linalg.matmul import precision_of, product
from torchtpu.ops.registry import jnp, lax, lowering


def infer_grouped_mm(
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Any dtype, and dense rows: PyTorch's own inference takes bfloat16 alone, and pads rows to 16 bytes."""
    dims = self.dim(), mat2.dim()
    if not set(dims) <= {2, 3} or bias is not None or (offs is None) != (dims == (3, 3)):
        raise RuntimeError(
            f"_grouped_mm: matrices of {dims} dimensions, offs {offs is not None}, bias {bias is not None}"
        )
    if self.shape[-1] != mat2.shape[-2]:
        raise RuntimeError("contraction dimension of mat_a and mat_b must match")
    groups = () if set(dims) == {2, 3} else (offs.shape[0] if offs is not None else self.shape[0],)
    return self.new_empty((*groups, self.shape[-2], mat2.shape[-1]), dtype=out_dtype)


@lowering("_grouped_mm", infer=infer_grouped_mm, multiplies=True)
def grouped_mm(self, mat2, offs=None, bias=None, out_dtype=None, *, ctx):
    if offs is None:
        return product(self, mat2, ctx)
    sizes = jnp.diff(offs.astype(jnp.int32), prepend=0)

    def dot(x: Any, y: Any, over: tuple[int, int], ragged: int, groups: list[int]) -> Any:
        numbers = lax.RaggedDotDimensionNumbers((((over[0],), (over[1],)), ((), ())), [ragged], groups)
        kind = jnp.float32 if x.dtype in (jnp.bfloat16, jnp.float16) else x.dtype
        precision = precision_of(x.dtype, ctx.precision)
        return lax.ragged_dot_general(x, y, sizes, numbers, precision=precision, preferred_element_type=kind)

    if self.ndim == mat2.ndim:  # the groups are summed over
        return dot(self, mat2, (1, 0), 1, [])
    if self.ndim == 2:
        return dot(self, mat2, (1, 1), 0, [0])
    return dot(mat2.T, self.swapaxes(1, 2), (1, 1), 0, [0]).T
