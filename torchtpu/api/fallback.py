"""Counts the ops that run on the CPU, and warns once per op or raises."""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter

import torch

from torchtpu import config

__all__ = ["cpu_fallback_counts"]

_lock = threading.Lock()
_counts: Counter[str] = Counter()  # guarded by _lock
_moved: Counter[str] = Counter()  # bytes; guarded by _lock


def report(name: str, dtype: torch.dtype | None, line: str, nbytes: int) -> None:
    """Counts a call of op `name` on `dtype` at `line` that moves `nbytes` between host and device.

    Warns at the first call of an op, or raises NotImplementedError, as TORCHTPU_FALLBACK says.
    """
    choice = config.get("fallback")
    name = name if "::" in name else f"aten::{name}"
    shown = f"{name} ({str(dtype).removeprefix('torch.')})" if dtype else name
    file, _, number = line.rpartition(":")
    place = f"{os.path.relpath(file)}:{number}" if file.startswith(os.getcwd() + os.sep) else line
    if choice == "error":
        raise NotImplementedError(f"{shown}: no lowering, at {place}. TORCHTPU_FALLBACK=warn runs it on the CPU.")
    with _lock:
        is_first = name not in _counts
        _counts[name] += 1
        _moved[name] += nbytes
    if is_first and choice == "warn":
        warnings.warn_explicit(
            f"{shown}: no lowering; ran on CPU ({_size(nbytes)} moved) at {place}. "
            "TORCHTPU_FALLBACK=error turns this into an error.",
            UserWarning,
            file or "<unknown>",
            int(number) if number.isdigit() else 0,
        )


def cpu_fallback_counts() -> dict[str, int]:
    """How often each op ran on the CPU for want of a lowering."""
    with _lock:
        return dict(_counts)


def bytes_moved() -> int:
    """The bytes that fallbacks moved between device and host."""
    with _lock:
        return sum(_moved.values())


def reset() -> None:
    """Forgets all counts; each op warns again."""
    with _lock:
        _counts.clear()
        _moved.clear()


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
