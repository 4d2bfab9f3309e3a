"""Reads tensors without waiting."""

from __future__ import annotations

import functools
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from torchtpu.runtime import _C
from torchtpu.runtime.compile.failing import failing

__all__ = ["async_read"]


def async_read(tensor: Tensor) -> Future[Tensor]:
    """A future of a CPU tensor with the values that `tensor` has now, whatever is written to it afterwards.

    It is a read like `tensor.cpu()`, at this place of the program, but nothing here waits for it. The future raises
    what `tensor.cpu()` would raise; its callbacks run in a thread of the runtime.
    """
    if tensor.device.type != "tpu":
        done: Future[Tensor] = Future()
        done.set_result(tensor.detach().cpu().clone())
        return done
    read = _Read()
    _readers().submit(_fulfil, read, _C.Reading(tensor.detach()))
    return read


class _Read(Future[Tensor]):
    """Whoever learns here that a region has failed is told of it, as by a read of its own."""

    def result(self, timeout: float | None = None) -> Tensor:
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        if error is not None:
            _C.end_raised_transactions()
        return error


def _fulfil(read: _Read, reading: _C.Reading) -> None:
    if read.set_running_or_notify_cancel():
        with failing(read.set_exception):
            read.set_result(reading.wait())


@functools.cache
def _readers() -> ThreadPoolExecutor:
    """One thread: values are read in the order in which they were asked for, which is that of their launches."""
    return ThreadPoolExecutor(1, thread_name_prefix="torchtpu-read")
