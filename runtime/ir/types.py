"""Element types and array types as StableHLO writes them."""

from __future__ import annotations

import functools

import torch

ELEMENT = {
    torch.bool: "i1",
    torch.uint8: "ui8",
    torch.uint16: "ui16",
    torch.uint32: "ui32",
    torch.uint64: "ui64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.complex64: "complex<f32>",
    torch.complex128: "complex<f64>",
    torch.float8_e4m3fn: "f8E4M3FN",
    torch.float8_e4m3fnuz: "f8E4M3FNUZ",
    torch.float8_e5m2: "f8E5M2",
    torch.float8_e5m2fnuz: "f8E5M2FNUZ",
    torch.float8_e8m0fnu: "f8E8M0FNU",
}

Shape = tuple[int, ...]


@functools.lru_cache(maxsize=8192)
def tensor_type(shape: Shape, dtype: torch.dtype) -> str:
    """`tensor<2x3xf32>`; a dtype that XLA does not have raises TypeError."""
    element = ELEMENT.get(dtype)
    if element is None:
        raise TypeError(f"{dtype} tensors cannot live on this device: XLA has no such element type")
    return f"tensor<{''.join(f'{n}x' for n in shape)}{element}>"
