"""Reading without waiting: in comes a tensor, out comes a future of its values on the host."""

from __future__ import annotations

import functools
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from torchtpu.runtime import _C

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
    return _readers().submit(_C.Reading(tensor.detach()).wait)


@functools.cache
def _readers() -> ThreadPoolExecutor:
    """One thread: values are read in the order in which they were asked for, which is that of their launches."""
    return ThreadPoolExecutor(1, thread_name_prefix="torchtpu-read")
