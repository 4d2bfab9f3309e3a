"""Counted reads, for ops whose results have shapes that depend on data.

Such a kernel reads a count, which ends the region there, and then records ops of a size that many counts share: a loop
whose counts change compiles a bounded number of programs for the op itself.
"""

from __future__ import annotations

import threading
from collections import Counter

import torch

__all__ = ["count_reads"]

_lock = threading.Lock()
_reads: Counter[str] = Counter()  # guarded by _lock

_FEWEST = 16  # no size is smaller: the smallest programs cost the same


def read(name: str, *counts: torch.Tensor) -> list[int]:
    """The values of 0-dim integer tensors, in one read for op `name`, on the line that the user called it from."""
    with _lock:
        _reads[f"aten::{name}"] += 1
    return [int(counts[0])] if len(counts) == 1 else torch.stack(counts).tolist()


def count_reads() -> dict[str, int]:
    """How often each op has read a count to know the shape of its results."""
    with _lock:
        return dict(_reads)


def reset() -> None:
    """Forgets all counts."""
    with _lock:
        _reads.clear()


def size_for(count: int, most: int | None = None) -> int:
    """The least of 16, 24, 32, 48, 64, 96, ... that holds more than `count` elements, `most` and one at most. So what
    is taken of so many is a part of them whatever the count is, and no count has programs of its own."""
    power = 1 << count.bit_length()
    size = max(power if 4 * count >= 3 * power else 3 * power // 4, _FEWEST)
    return size if most is None else min(size, most + 1)
