"""`torch.tpu.Stream` and `Event`: CUDA's calls, as tokens in the order of launches.

Ops run in program order whatever the stream, so waiting for another stream's work is never needed and never blocks.
An event made with `enable_timing=True` reads the clock when the device reaches the place where it was recorded.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch

from torchtpu.api.rng import device_index
from torchtpu.runtime import _C

__all__ = ["Event", "Stream", "StreamContext", "current_stream", "default_stream", "set_stream", "stream"]


class Stream(torch.Stream):
    """A stream of a tpu device."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Self:
        if kwargs:  # stream_id=, device_index=, device_type=: a stream that exists
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, torch.device("tpu", device_index(device)), priority=priority)

    def __repr__(self) -> str:
        return f"<torch.tpu.Stream device={self.device} id={self.stream_id}>"


class _EventKind(type):
    def __call__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
        if interprocess:
            raise NotImplementedError("torch.tpu.Event(interprocess=True): tpu events are not shared between processes")
        return torch.Event("tpu", enable_timing=enable_timing, blocking=blocking)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Event) and instance.device.type == "tpu"


class Event(metaclass=_EventKind):
    """A place in a device's program order: makes a torch.Event, for torch takes no subclass of it everywhere."""


class StreamContext:
    """What `torch.tpu.stream(s)` returns: makes `s` the current stream, and its device the current device."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self._device = _C.exchange_device(self.stream.device.index)
            self._previous = current_stream()
            set_stream(self.stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stream is not None:
            set_stream(self._previous)
            _C.set_device(self._device)


def stream(stream: torch.Stream | None) -> StreamContext:
    """A context in which `stream` is the current one; None changes nothing."""
    return StreamContext(stream)


def set_stream(stream: torch.Stream | None) -> None:
    """Makes `stream` the current stream of its device, and its device the current device."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


def current_stream(device: Any = None) -> Stream:
    """The current stream of a device."""
    return _wrap(torch.accelerator.current_stream(device_index(device)))


def default_stream(device: Any = None) -> Stream:
    """The stream that is current until another one is set."""
    index = device_index(device)
    return Stream(stream_id=0, device_index=index, device_type=current_stream(index).device_type)


def _wrap(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)
