"""`torch.tpu.nvtx`: named ranges of the profiler's trace, with the calls of torch.cuda.nvtx."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["mark", "range", "range_pop", "range_push"]

_open = threading.local()  # the thread's ranges that have not ended


def _ranges() -> list[Any]:
    if not hasattr(_open, "ranges"):
        _open.ranges = []
    ranges: list[Any] = _open.ranges
    return ranges


def range_push(msg: str) -> int:
    """Begins a range; returns its depth, counted from 0."""
    record: Any = torch.profiler.record_function
    entered = record(msg)
    entered.__enter__()
    _ranges().append(entered)
    return len(_ranges()) - 1


def range_pop() -> int:
    """Ends the range begun last; returns its depth, or -1 where none was open."""
    ranges = _ranges()
    if ranges:
        ranges.pop().__exit__(None, None, None)
        return len(ranges)
    return -1


@contextlib.contextmanager
def range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:  # noqa: A001
    """A range around a block or, as a decorator, a function; the text is formatted with the arguments."""
    range_push(msg.format(*args, **kwargs))
    try:
        yield
    finally:
        range_pop()


def mark(msg: str) -> None:
    """A moment."""
    range_push(msg)
    range_pop()
