"""Weights of 4 bits, packed for CUDA's kernels: their tiles, and products with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchtpu.ops.linalg.matmul import contract
from torchtpu.ops.registry import jnp, lowering, opmath

# A tile is 8 rows of 32 columns.  An int32 holds eight columns of a row, those of the bytes that are 4 apart: their
# high nibbles, which are the even columns, then their low ones.
ROWS, COLUMNS = 8, 32
HIGH, LOW = range(0, 16, 4), range(16, 32, 4)


def _infer_packed(self: Tensor, innerKTiles: int) -> Tensor:
    torch._check(self.dim() == 2 and self.dtype is torch.uint8, lambda: "the weight must be a matrix of uint8")
    torch._check(innerKTiles in (2, 4, 8), lambda: f"innerKTiles must be 2, 4 or 8, got {innerKTiles}")
    rows, columns = self.shape[0], 2 * self.shape[1]
    depth = 16 * innerKTiles
    torch._check(
        rows % ROWS == 0 and columns % depth == 0,
        lambda: f"the weight must have multiples of {ROWS} rows and {depth} columns, got {rows} and {columns}",
    )
    return self.new_empty((rows // ROWS, columns // depth, 32, innerKTiles // 2), dtype=torch.int32)


@lowering("_convert_weight_to_int4pack", infer=_infer_packed)
def convert_weight_to_int4pack(self, innerKTiles):
    tiles = self.reshape(self.shape[0] // ROWS, ROWS, -1, innerKTiles // 2, 4, 4).astype(jnp.uint32)
    words: Any = 0
    for i, (high, low) in enumerate(zip(HIGH, LOW, strict=True)):
        words = words | (tiles[..., i, :] >> 4) << high | (tiles[..., i, :] & 15) << low
    return words.transpose(0, 2, 1, 4, 3).reshape(words.shape[0], -1, 32, innerKTiles // 2).view(jnp.int32)


def _infer_product(self: Tensor, mat2: Tensor, qGroupSize: int, qScaleAndZeros: Tensor) -> Tensor:
    torch._check(
        self.dim() == 2 and self.dtype in (torch.bfloat16, torch.float16, torch.float32),
        lambda: f"the input must be a matrix of bfloat16, float16 or float32, got {self.dim()}-d {self.dtype}",
    )
    torch._check(
        mat2.dim() == 4 and mat2.dtype is torch.int32 and mat2.shape[2] == 32,
        lambda: f"the weight must be packed by _convert_weight_to_int4pack, got {mat2.dtype} {tuple(mat2.shape)}",
    )
    rows, columns = ROWS * mat2.shape[0], COLUMNS * mat2.shape[1] * mat2.shape[3]
    torch._check(self.shape[1] == columns, lambda: f"the input has {self.shape[1]} columns, the weight {columns}")
    torch._check(
        qGroupSize in (32, 64, 128, 256) and columns % qGroupSize == 0,
        lambda: f"a group must be 32, 64, 128 or 256 of {columns} columns, got {qGroupSize}",
    )
    expected = (columns // qGroupSize, rows, 2)
    torch._check(
        qScaleAndZeros.shape == expected,
        lambda: f"scales and zeros must have shape {expected}, got {tuple(qScaleAndZeros.shape)}",
    )
    return self.new_empty((self.shape[0], rows))


@lowering("_weight_int4pack_mm", infer=_infer_product, multiplies=True)
def weight_int4pack_mm(self, mat2, qGroupSize, qScaleAndZeros, *, ctx):
    outer, inner = mat2.shape[1], mat2.shape[3]
    words = mat2.reshape(-1, outer, ROWS, 4, inner).transpose(0, 2, 1, 4, 3)
    pairs = [jnp.stack([words >> high & 15, words >> low & 15], -1) for high, low in zip(HIGH, LOW, strict=True)]
    groups = jnp.stack(pairs, -3).reshape(ROWS * mat2.shape[0], -1, qGroupSize)
    scale, zero = (opmath(qScaleAndZeros[..., i]).T[..., None] for i in (0, 1))
    # CUDA multiplies weights in the input's dtype.
    weight = ((groups - 8).astype(scale.dtype) * scale + zero).astype(self.dtype)
    return contract(self, weight.reshape(weight.shape[0], -1), ((1,), (1,)), ((), ()), ctx)
