"""Starting the device: in come the knobs and the table of lowerings, out come a working recorder and, later, an engine.

The recorder works from `import torch` on. The engine (jax, PJRT, the compile threads) starts at the first region or
upload, in the thread that needs it, so that importing torch stays fast and DataLoader workers never start it.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchtpu import config, fallback
from torchtpu.ops import composed
from torchtpu.runtime import _C
from torchtpu.runtime.counters import Counters

_GOOGLE = "0x1ae0"


class Chip(NamedTuple):
    """A kind of TPU chip, as one device of it."""

    name: str
    nbytes: int
    version: tuple[int, int]


_CHIPS = {  # by PCI device id
    "0x0027": Chip("TPU v3", 16 << 30, (3, 0)),
    "0x005e": Chip("TPU v4", 32 << 30, (4, 0)),
    "0x0063": Chip("TPU v5 lite", 16 << 30, (5, 0)),
    "0x0062": Chip("TPU v5", 95 << 30, (5, 1)),
    "0x006f": Chip("TPU v6 lite", 32 << 30, (6, 0)),
    "0x0076": Chip("TPU7x", 96 << 30, (7, 0)),
}


class LazyEngine:
    """What the recorder calls: answers what needs no engine itself and starts the engine for the rest."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.served: dict[str, str] = {}  # every op name registered -> the op whose lowering serves it
        self._lock = threading.Lock()
        self._engine: Any = None  # guarded by _lock until it is set; set once

    def start(self) -> Any:
        """The engine; the first call imports jax and creates the client."""
        if self._engine is None:
            with self._lock:
                if self._engine is None:
                    engine = _make_engine(self)
                    for name in ("plan", "launch", "upload", "download", "resolve", "finish", "waiting"):
                        setattr(self, name, getattr(engine, name))  # from now on the recorder calls it directly
                    self._engine = engine
        return self._engine

    def close(self) -> None:
        """Stops the engine's threads, if it ever started."""
        if self._engine is not None:
            self._engine.close()

    def infer(self, name: str, args: Any) -> Any:
        from torchtpu.ops.registry import find

        infer = find(self.served.get(name, name)).infer
        assert infer is not None, f"{name} has no shape inference"
        return infer(*args)

    def fallback(self, name: str, dtype: torch.dtype | None, line: str, nbytes: int) -> None:
        fallback.report(name, dtype, line, nbytes)

    def plan(self, plan: Any) -> None:
        try:
            engine = self.start()
        except BaseException as error:  # noqa: BLE001 - whoever reads the region's values raises it
            plan.failed(error)
        else:
            engine.plan(plan)

    def launch(self, work: Any) -> None:
        self.start().launch(work)

    def upload(self, tensor: torch.Tensor, device: int) -> Any:
        return self.start().upload(tensor, device)

    def download(self, obj: Any) -> Any:
        return self.start().download(obj)

    def resolve(self, guard: Any) -> None:
        self.start().resolve(guard)

    def finish(self, device: int) -> None:
        """Waits for the device; nothing runs there before the engine starts."""

    def waiting(self, info: str, seconds: float) -> None:
        """Logged by the engine; before it starts, the wait is for its start."""


class _Process:
    """This process's relation to the device; written by the fork handlers only."""

    was_in_use_at_fork = False
    is_in_bad_fork = False


_lazy = LazyEngine()
_process = _Process()


def engine() -> Any:
    """The engine, started if need be."""
    if _process.is_in_bad_fork:
        raise RuntimeError(
            "Cannot re-initialize tpu in forked subprocess. To use tpu with multiprocessing, "
            "you must use the 'spawn' start method"
        )
    return _lazy.start()


def engine_counters() -> Counters:
    """The engine's counters; all zero before it starts."""
    return _lazy.counters


def is_in_use() -> bool:
    """Whether this process has recorded an op or made a tensor on the device."""
    return bool(_C.stats()["ops_recorded"]) or any(
        _C.memory_stats(i)["total_allocated"] for i in range(_C.device_count())
    )


def is_in_bad_fork() -> bool:
    """Whether this process was forked from one that used the device."""
    return _process.is_in_bad_fork


@functools.cache
def chips() -> tuple[Chip, ...]:
    """The TPU chips of this machine."""
    root = Path("/sys/bus/pci/devices")
    found = []
    for entry in sorted(root.iterdir()) if root.exists() else ():
        try:
            vendor, kind = ((entry / name).read_text().strip() for name in ("vendor", "device"))
        except OSError:  # a device that is being removed
            continue
        if vendor == _GOOGLE and kind in _CHIPS:
            found.append(_CHIPS[kind])
    return tuple(found)


def chip(device: int) -> Chip:
    """The chip of a device; one without a name where the platform is tpu and no chip is on the PCI bus."""
    found = chips()
    return found[device % len(found)] if found else Chip("TPU", 0, (0, 0))


@functools.cache
def platform() -> str:
    """Where programs run: "cpu", "tpu" or "gpu"."""
    choice: str = config.get("platform")
    return choice if choice != "auto" else "tpu" if chips() else "cpu"


def start() -> None:
    """Prepares the recorder: devices, ops, limits, boundaries, fork and exit. Called once, at import."""
    _C.set_device_count(_count_devices())
    config.on_change(_apply)
    _lazy.served = _C.register_ops(_ops())
    composed.install()
    _C.set_engine(_lazy)
    register_optimizer_step_post_hook(_mark_step)
    # Backward runs in the thread that calls it: 10 % faster, and one recorder sees the whole step.
    torch._C._set_multithreading_enabled(False)
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
    atexit.register(_shut_down)


def _count_devices() -> int:
    where = platform()
    if where == "cpu":
        return max(1, config.get("num_devices"))
    if where == "tpu":
        visible = os.environ.get("TPU_VISIBLE_CHIPS") or os.environ.get("TPU_VISIBLE_DEVICES")
        return len(visible.split(",")) if visible else max(1, len(chips()))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(visible.split(",")) if visible else max(1, len(list(Path("/dev").glob("nvidia[0-9]*"))))


def _ops() -> list[tuple[str, dict[str, Any], bool, bool, tuple[str, ...], bool]]:
    from torchtpu import ops

    ops.load()
    where = {"gpu": "cuda"}.get(platform(), platform())
    only = {name: entry for (name, place), entry in ops.PLATFORM_LOWERINGS.items() if place == where}
    table = {**only, **ops.LOWERINGS}
    return [
        (name, dict(entry.structural), entry.lifts, entry.random, entry.mutates, entry.infer is not None)
        for name, entry in table.items()
    ]


def _apply(name: str, value: Any) -> None:
    if name == "sync":
        _C.set_sync(value)
    elif name in ("max_region_ops", "max_region_bytes", "max_in_flight"):
        _C.set_limits(*(config.get(knob) for knob in ("max_region_ops", "max_region_bytes", "max_in_flight")))


def _mark_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _C.mark_boundary("optimizer.step")


def _make_engine(lazy: LazyEngine) -> Any:
    from torchtpu import ops
    from torchtpu.compiler_cache import open_store
    from torchtpu.runtime.engine import Engine

    # What code set counts too, so the store reads the knobs rather than the environment.
    knobs = ("cache", "cache_dir", "cache_max_bytes", "cache_trusted_dirs")
    environment = {**os.environ, **{config.KNOBS[name].variable: str(config.get(name)) for name in knobs}}
    return Engine(
        platform=platform(),
        num_devices=_C.device_count(),
        lowerings=ops.LOWERINGS,
        platform_lowerings=ops.PLATFORM_LOWERINGS,
        served=lazy.served,
        context=ops.Context,
        counters=lazy.counters,
        knob=config.get,
        store=open_store(environment),
        release=_C.drain,
    )


def _before_fork() -> None:
    _process.was_in_use_at_fork = is_in_use()


def _after_fork_in_child() -> None:
    _process.is_in_bad_fork = _process.is_in_bad_fork or _process.was_in_use_at_fork


def _shut_down() -> None:
    if not _process.is_in_bad_fork:
        _C.shutdown()
        _lazy.close()
