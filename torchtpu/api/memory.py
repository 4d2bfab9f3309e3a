"""`torch.tpu`'s memory functions: byte counts of the buffers that are alive.

Buffers are counted from the moment they are promised, so a count covers work that is recorded but has not run.
Nothing is cached: reserved and allocated bytes are the same number.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from torchtpu import config, startup
from torchtpu.api.rng import device_index
from torchtpu.diagnostics.memory_history import _dump_snapshot, _record_memory_history, _snapshot  # noqa: F401
from torchtpu.runtime import _C

__all__ = [
    "device_memory_used",
    "empty_cache",
    "empty_host_cache",
    "get_memory_info",
    "host_memory_stats",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "memory_usage",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
]


def install() -> None:
    """Gives torch.accelerator the same answers: its own come from an allocator in C++, which this device has not."""
    for name in (
        "empty_cache",
        "empty_host_cache",
        "get_memory_info",
        "max_memory_allocated",
        "max_memory_reserved",
        "memory_allocated",
        "memory_reserved",
        "memory_stats",
        "reset_accumulated_memory_stats",
        "reset_peak_memory_stats",
    ):
        setattr(torch.accelerator, name, globals()[name])
        setattr(torch.accelerator.memory, name, globals()[name])


def memory_allocated(device: Any = None) -> int:
    """Bytes of the device's live buffers."""
    return int(_C.memory_stats(device_index(device))["allocated"])


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes that were alive at once since the start or `reset_peak_memory_stats`."""
    return int(_C.memory_stats(device_index(device))["peak"])


def memory_reserved(device: Any = None) -> int:
    """Bytes taken from the device; equal to `memory_allocated`."""
    return int(_C.memory_stats(device_index(device))["reserved"])


def max_memory_reserved(device: Any = None) -> int:
    """The most bytes taken from the device at once."""
    return int(_C.memory_stats(device_index(device))["peak_reserved"])


memory_cached = memory_reserved
max_memory_cached = max_memory_reserved
device_memory_used = memory_allocated


def reset_peak_memory_stats(device: Any = None) -> None:
    """Makes the present number of live bytes the peak."""
    _C.reset_peak_memory(device_index(device))


reset_max_memory_allocated = reset_peak_memory_stats
reset_max_memory_cached = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Resets the peaks; the running totals are never reset."""
    reset_peak_memory_stats(device)


def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
    """`memory_stats` as dicts inside dicts."""
    stats = _C.memory_stats(device_index(device))
    total, now = int(stats["total_allocated"]), int(stats["allocated"])
    allocated = {"current": now, "peak": int(stats["peak"]), "allocated": total, "freed": total - now}
    reserved = {**allocated, "current": int(stats["reserved"]), "peak": int(stats["peak_reserved"])}
    return {
        "allocated_bytes": {"all": allocated},
        "active_bytes": {"all": allocated},
        "requested_bytes": {"all": allocated},
        "reserved_bytes": {"all": reserved},
        "allocation": {"all": {"current": int(stats["num_buffers"])}},
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def memory_stats(device: Any = None) -> dict[str, Any]:
    """Counts under the names of torch.cuda.memory_stats, such as `allocated_bytes.all.current` and `...peak`."""
    flat: dict[str, Any] = {}

    def flatten(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                flatten(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat[prefix] = value

    flatten("", memory_stats_as_nested_dict(device))
    return dict(sorted(flat.items()))


def host_memory_stats() -> dict[str, Any]:
    """Empty: pinned host memory is ordinary memory."""
    return {}


def total_memory(device: int) -> int:
    """The bytes a device has: the memory limit, else what the platform says."""
    limit = config.get("memory_limit")
    if limit:
        return int(limit)
    chip = startup.chip(device)
    if chip is not None:
        return chip.nbytes
    if startup.platform() == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // int(_C.device_count())
    return int(startup.engine().memory_bytes(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(free, total) bytes of the device."""
    index = device_index(device)
    total = total_memory(index)
    return max(0, total - memory_allocated(index)), total


get_memory_info = mem_get_info


def memory_usage(device: Any = None) -> int:
    """The share of the device's memory that live buffers take, in percent."""
    free, total = mem_get_info(device)
    return round(100 * (total - free) / total) if total else 0


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Limits buffers to a share of the memory, 0 < fraction <= 1; the limit holds for every device."""
    if not 0 < fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    with config.using(memory_limit=0):
        total = total_memory(device_index(device))
    config.set(memory_limit=int(fraction * total))


def empty_cache() -> None:
    """Does nothing: memory goes back to the device as soon as its last tensor dies."""


def empty_host_cache() -> None:
    """Does nothing: pinned memory is not cached either."""


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """A table of the byte counts."""
    index = device_index(device)
    nested = memory_stats_as_nested_dict(index)
    rows = [f"memory of tpu:{index}", f"{'':22}{'now':>14}{'peak':>14}{'allocated':>14}{'freed':>14}"]
    for key, label in (("allocated_bytes", "allocated"), ("reserved_bytes", "reserved")):
        counts = nested[key]["all"]
        cells = "".join(f"{_size(counts[c]):>14}" for c in ("current", "peak", "allocated", "freed"))
        rows.append(f"{label:22}{cells}")
    free, total = mem_get_info(index)
    rows.append(f"{nested['allocation']['all']['current']} buffers; {_size(free)} of {_size(total)} free")
    return "\n".join(rows) + "\n"


def _size(nbytes: int) -> str:
    size, units = float(nbytes), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    for larger in units:
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}" if unit != "B" else f"{nbytes} B"
