"""torch.tpu.FloatTensor and its like, which make tensors as the constructors of old did, as torch.cuda has them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

DTYPES = {
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


class TensorType(type):
    """The type of these classes, of which the tensors of the dtype on the device are instances."""

    dtype: torch.dtype
    layout = torch.strided
    is_cuda = is_sparse = False

    @property
    def __name__(cls) -> str:  # type: ignore[override]
        """Without the module, which PyTorch looks for in the name that Python keeps."""
        return cls.__qualname__

    def __call__(cls, *args: Any) -> torch.Tensor:
        if len(args) == 1 and isinstance(args[0], torch.Tensor):
            given = args[0]
            if not cls.__instancecheck__(given):
                raise TypeError(f"expected {cls.__module__}.{cls.__name__} (got {given.type()})")
            return given.detach()
        if len(args) == 1 and not isinstance(args[0], int | torch.Size):
            return torch.tensor(args[0], dtype=cls.dtype, device="tpu")
        sizes = args[0] if args and isinstance(args[0], torch.Size) else args or (0,)
        return torch.empty(sizes, dtype=cls.dtype, device="tpu")

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.device.type == "tpu" and instance.dtype == cls.dtype


def make(kind: type[TensorType], module: str) -> dict[str, TensorType]:
    """The classes, as classes of this module."""
    return {
        name: kind(f"{module}.{name}", (), {"dtype": dtype, "__module__": module, "__qualname__": name})
        for name, dtype in DTYPES.items()
    }


TYPES = make(TensorType, "torch.tpu")
NAMED = {f"torch.tpu.{name}": dtype for name, dtype in DTYPES.items()}


def taking_tpu(original: Callable[..., None]) -> Callable[..., None]:
    """torch.set_default_tensor_type, which takes these classes and their names as well."""
    is_default = False

    @functools.wraps(original)
    def set_default_tensor_type(t: Any, /) -> None:
        nonlocal is_default
        name = f"{t.__module__}.{t.__name__}" if isinstance(t, TensorType) else t
        dtype = NAMED.get(name) if isinstance(name, str) else None
        if dtype is not None:
            torch.set_default_dtype(dtype)
        else:
            original(t)
        if dtype is not None or is_default:
            torch.set_default_device(None if dtype is None else "tpu")
        is_default = dtype is not None

    return set_default_tensor_type
