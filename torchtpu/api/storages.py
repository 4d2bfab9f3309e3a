"""Does for storages of the device by copies what torch.UntypedStorage does by address, and refuses what ends the
process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def install() -> None:
    """Replaces the methods of torch.UntypedStorage that take every address for one of the host."""
    kind: Any = torch.UntypedStorage
    kind.__getitem__ = _for_device(kind.__getitem__, _getitem)
    kind.new = _for_device(kind.new, _new)
    kind._byteswap = _for_device(kind._byteswap, _byteswap)
    kind._swap_data_ptr_ = _for_device(kind._swap_data_ptr_, _swap_data_ptr_)
    kind._set_from_file = _for_device(kind._set_from_file, _with_file)
    kind._write_file = _for_device(kind._write_file, _with_file)


def _for_device(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: torch.UntypedStorage, *arguments: Any) -> Any:
        if self.device.type != "tpu":
            return original(self, *arguments)
        return replacement(functools.partial(original, self), self, *arguments)

    return call


def _getitem(original: Any, self: Any, index: Any) -> Any:
    if isinstance(index, slice):
        raise NotImplementedError(
            "A slice of a storage shares its memory, which storages on tpu cannot. To read it, take "
            "storage.cpu()[...]; to write it, storage[...] = value."
        )
    return original(index)


def _new(original: Any, self: Any) -> Any:
    return type(self)(0, device=self.device)


def _byteswap(original: Any, self: Any, elem_size: int) -> None:
    host = self.cpu()
    host._byteswap(elem_size)
    self.copy_(host)


def _swap_data_ptr_(original: Any, self: Any, other: Any) -> None:
    is_alike = isinstance(other, torch.UntypedStorage) and self.device == other.device
    if not is_alike or (self.nbytes() != other.nbytes() and self.nbytes() and other.nbytes()):
        original(other)  # it raises
    ours, theirs = self.clone(), other.clone()
    self.resize_(theirs.nbytes()).copy_(theirs)
    other.resize_(ours.nbytes()).copy_(ours)


def _with_file(original: Any, self: Any, *arguments: Any) -> Any:
    if len(arguments) < 4:  # PyTorch takes them without a look at their number
        raise TypeError(f"{original.func.__name__}() takes four arguments, of which the first is a file")
    return original(*arguments)
