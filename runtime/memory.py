"""Memory: in comes what a launch will need, out goes permission, or an OutOfMemoryError with sizes and a line."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_WAIT_SECONDS = 0.5
_POLL_SECONDS = 2e-3


def wait_for_room(limit: int, needed: int, live: Callable[[], int], device: int, what: str) -> None:
    """Returns when `needed` more bytes fit below `limit`; buffers may be released while it waits, briefly.

    `live` gives the bytes of the device's live buffers. Raises torch.OutOfMemoryError where they stay too many.
    """
    deadline = time.monotonic() + _WAIT_SECONDS
    while (held := live()) + needed > limit:
        if time.monotonic() >= deadline:
            raise torch.OutOfMemoryError(
                f"tpu:{device} out of memory: {what} needs {show_bytes(needed)} more, {show_bytes(held)} of "
                f"{show_bytes(limit)} are in use. Free tensors, make the batch smaller or raise TORCHTPU_MEMORY_LIMIT."
            )
        time.sleep(_POLL_SECONDS)


def show_bytes(nbytes: float) -> str:
    """`1.21 GB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{int(nbytes)} B"
