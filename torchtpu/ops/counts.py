"""Ops whose results have shapes that depend on data: in come their kernels, out go counted reads.

Such a kernel reads a count, which ends the region there, and then records ops of a size that many counts share: a loop
whose counts change compiles a bounded number of programs for the op itself.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from torchtpu.ops.registry import COUNTED, LOWERINGS

__all__ = ["count_reads"]

_lock = threading.Lock()
_reads: Counter[str] = Counter()  # guarded by _lock
_libraries: list[Any] = []  # registrations last as long as these; written at import

# Where an op has a lowering too, the recorder hands over the calls that it cannot record, under this namespace.
_UNRECORDED = "torchtpu_counted"
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
    """The least of 16, 24, 32, 48, 64, 96, ... that holds `count` elements, `most` at most."""
    power = 1 << max(count - 1, 0).bit_length()
    size = max(power if 4 * count > 3 * power else 3 * power // 4, _FEWEST)
    return size if most is None else min(size, most)


def install() -> None:
    """Registers the kernels with PyTorch's dispatcher. Called once, at import."""
    library: Any = torch.library.Library
    aten, unrecorded = library("aten", "IMPL"), library(_UNRECORDED, "FRAGMENT")
    _libraries.extend((aten, unrecorded))
    for name, function in COUNTED.items():
        for variant, kernel in _variants(name, function):
            if name in LOWERINGS:
                schema = str(_overload(variant)._schema)
                unrecorded.define(schema.removeprefix("aten::"))
                unrecorded.impl(variant, kernel, "PrivateUse1")
            else:
                aten.impl(variant, kernel, "PrivateUse1")


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _variants(name: str, function: Callable[..., Any]) -> list[tuple[str, Callable[..., Any]]]:
    """The op and, unless PyTorch makes that out of the op, its out= form."""
    found = [(name, _plain(function))]
    base, _, overload = name.partition(".")
    out = f"{overload}_out" if overload else "out"
    is_known = out in getattr(torch.ops.aten, base).overloads()
    if is_known and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{base}.{out}", "CPU"):
        found.append((f"{base}.{out}", _plain(functools.partial(_into, _overload(f"{base}.{out}"), function))))
    return found


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` outside of the user's torch function modes."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return kernel


def _into(op: Any, function: Callable[..., Any], *args: Any, out: torch.Tensor) -> torch.Tensor:
    """Calls `function` and stores its result in `out`, resized where it does not fit."""
    from torch._prims_common.wrappers import _maybe_resize_out

    made = function(*args)
    if made.dtype != out.dtype or made.device != out.device:
        raise_as_cpu(op, *args, out=out)
    if made.shape != out.shape:
        _maybe_resize_out(out, made.shape)
        out.as_strided_(made.shape, made.stride())
    return out.copy_(made)


def raise_as_cpu(op: Any, *args: Any, **kwargs: Any) -> None:
    """Raises what the CPU says to a call with arguments like these, if it refuses it."""

    def on_host(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [on_host(v) for v in value]
        return value.new_zeros(value.shape, device="cpu") if isinstance(value, torch.Tensor) else value

    op(*map(on_host, args), **{k: on_host(v) for k, v in kwargs.items()})
