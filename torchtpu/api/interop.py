"""Exchanges tensors with other libraries, by DLPack and copies on the host.

Other libraries see a tpu tensor's value through DLPack as a host array of its own: their writes never reach the tensor.
PyTorch itself (`torch.from_dlpack(tpu_tensor)`) shares the storage, as on every device.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.dlpack import DLDeviceType

from torchtpu.api import tensor_types
from torchtpu.runtime import _C

_PYTHON = torch._C.DispatchKey.Python


def is_recorded(value: Any) -> bool:
    """Whether `value` is a tensor whose storage this device made: no FakeTensor, no wrapper subclass."""
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "tpu"
        and value.layout is torch.strided
        and not torch._C._dispatch_keys(value).has(_PYTHON)
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)
    )


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The recorded tensor's value as a CPU tensor of its own, detached, with its sizes and strides; records no op."""
    host: torch.Tensor = _C.to_host(tensor.detach())
    return host


def install() -> None:
    """Teaches torch.Tensor, torch.from_dlpack and torch.set_default_tensor_type about tpu tensors."""
    torch.Tensor.__dlpack__ = _dlpack(torch.Tensor.__dlpack__)  # type: ignore[method-assign]
    torch.Tensor.__dlpack_device__ = _dlpack_device(torch.Tensor.__dlpack_device__)  # type: ignore[method-assign]
    from_dlpack = _from_dlpack(torch.utils.dlpack.from_dlpack)
    torch.utils.dlpack.from_dlpack = from_dlpack
    torch.from_dlpack = from_dlpack  # type: ignore[attr-defined]
    torch.set_default_tensor_type = tensor_types.taking_tpu(torch.set_default_tensor_type)


def _dlpack(original: Any) -> Any:
    @functools.wraps(original)
    def __dlpack__(
        self: torch.Tensor,
        *,
        stream: Any = -1,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[Any, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if not is_recorded(self):
            return original(self, stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)
        _check_exported(self)
        if copy is False:
            raise BufferError("Can't export a tpu tensor without a copy to the host")
        if dl_device is not None and tuple(dl_device) != (DLDeviceType.kDLCPU, 0):
            raise BufferError(f"Can't export a tpu tensor to the DLPack device {tuple(dl_device)}, only to the host")
        return original(host_copy(self), stream=None, max_version=max_version)

    return __dlpack__


def _dlpack_device(original: Any) -> Any:
    @functools.wraps(original)
    def __dlpack_device__(self: torch.Tensor) -> tuple[Any, int]:
        if is_recorded(self):
            return DLDeviceType.kDLCPU, 0
        # Pinned memory is ordinary host memory here; torch would call it CUDA's.
        if self.device.type == "cpu" and not torch.cuda.is_available():
            return DLDeviceType.kDLCPU, 0
        device: tuple[Any, int] = original(self)
        return device

    return __dlpack_device__


def _check_exported(tensor: torch.Tensor) -> None:
    if tensor.requires_grad:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
    if tensor.is_conj():
        raise BufferError("Can't export tensors with the conjugate bit set")


def _from_dlpack(original: Any) -> Any:
    @functools.wraps(original)
    def from_dlpack(ext_tensor: Any, *, device: Any = None, copy: bool | None = None) -> torch.Tensor:
        target = None if device is None else torch.device(device)
        if is_recorded(ext_tensor):
            _check_exported(ext_tensor)
            source = ext_tensor.detach()
            if target is None or target in (source.device, torch.device("tpu")):
                return source.clone() if copy else source
            if copy is False:
                raise ValueError(f"cannot move DLPack tensor from device {source.device} to {target} without copying.")
            return source.to(target)
        if target is None or target.type != "tpu":
            kwargs = {} if device is None else {"device": device}
            found: torch.Tensor = original(ext_tensor, **kwargs, **({} if copy is None else {"copy": copy}))
            return found
        if copy is False:
            raise ValueError(f"cannot move a DLPack tensor to {target} without copying. Set copy=None or copy=True.")
        imported: torch.Tensor = original(ext_tensor)
        return imported.to(target)

    return from_dlpack
