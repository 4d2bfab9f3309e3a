"""Starts the device: a working recorder from the knobs and the table of lowerings and, later, an engine.

The recorder works from `import torch` on. The engine (jax, PJRT, the compile threads) starts at the first region or
upload, in the thread that needs it, so that importing torch stays fast and DataLoader workers never start it.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch._prims_common.wrappers import _maybe_resize_out, _safe_copy_out
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchtpu import config, distributed, optimizer_steps
from torchtpu.api import fallback
from torchtpu.compile import flex
from torchtpu.distributed.chips import rank_environment
from torchtpu.ops import composed
from torchtpu.ops.registry import Row
from torchtpu.runtime import _C
from torchtpu.runtime.device import jax_modules
from torchtpu.runtime.device.chips import CHIPS, Chip, devices_of_host, find_chip
from torchtpu.runtime.device.process_group import ProcessGroup
from torchtpu.runtime.ir.calls import Lowerings
from torchtpu.runtime.telemetry.bailouts import Bailouts
from torchtpu.runtime.telemetry.counters import Counters
from torchtpu.runtime.telemetry.observers import Observer

_GOOGLE = "0x1ae0"
_CHIPS = {chip.pci_id: chip for chip in CHIPS.values()}


_CALLED = ("plan", "launch", "upload", "download", "resolve", "await_launches", "finish", "waiting", "waited")


class LazyEngine:
    """What the recorder calls: answers what needs no engine itself and starts the engine for the rest."""

    def __init__(self) -> None:
        self.counters = Counters(bailouts=Bailouts(lambda: "cluster" in config.get("log")))
        self.observers: list[Observer] = []  # explain's
        self.recompilations: Any = None  # what has varied, once the engine has started
        self.most_programs: int | None = None  # that may stay, where memory maps run short
        self.served: dict[str, str] = {}  # every op name registered -> the op whose lowering serves it
        self._lock = threading.Lock()
        self._engine: Any = None  # guarded by _lock until it is set; set once

    @property
    def is_started(self) -> bool:
        """Whether there is an engine."""
        return self._engine is not None

    def start(self, process_group: ProcessGroup | None = None) -> Any:
        """The engine; the first call imports jax and creates the client, which spans the process group."""
        if self._engine is None:
            with self._lock:
                if self._engine is None:
                    engine = _make_engine(self, process_group)
                    for name in _CALLED:
                        setattr(self, name, getattr(engine, name))  # from now on the recorder calls it directly
                    self._engine = engine
        return self._engine

    def close(self) -> bool:
        """Stops the engine's threads, if it ever started; whether none is left."""
        return self._engine is None or bool(self._engine.close())

    def infer(self, name: str, args: Any) -> Any:
        from torchtpu.ops.registry import find
        from torchtpu.runtime.ir.calls import schema_of

        entry = find(self.served.get(name, name))
        assert entry.infer is not None, f"{name} has no shape inference"
        taken = len(schema_of(entry.name).arguments)
        made = entry.infer(*args[:taken])
        return _resized(made, args[taken:], name.startswith("_fft_")) if args[taken:] else made

    def fallback(self, name: str, dtype: torch.dtype | None, line: str, nbytes: int) -> None:
        fallback.report(name, dtype, line, nbytes)
        for observer in self.observers:
            observer.fell_back(name, dtype, line, nbytes)

    def was_read(self, line: str, started: float, seconds: float, nbytes: int) -> None:
        for observer in self.observers:
            observer.was_read(line, started, seconds, nbytes)

    def plan(self, plan: Any) -> None:
        try:
            engine = self.start()
        except BaseException as error:  # noqa: BLE001 - whoever reads the region's values raises it
            plan.failed(error)
        else:
            engine.plan(plan)

    def launch(self, work: Any) -> None:
        self.start().launch(work)

    def resume(self, work: Any, step: int, arrays: list[Any], error: BaseException | None, launched: Any) -> None:
        self.start().resume(work, step, arrays, error, launched)

    def upload(self, tensor: torch.Tensor, device: int) -> Any:
        return self.start().upload(tensor, device)

    def download(self, obj: Any) -> Any:
        return self.start().download(obj)

    def resolve(self, guard: Any) -> None:
        self.start().resolve(guard)

    def await_launches(self, device: int) -> None:
        """Waits for the device; nothing runs there before the engine starts."""

    def finish(self, device: int) -> None:
        """Raises what failed on the device; nothing runs there before the engine starts."""

    def waiting(self, info: str, seconds: float) -> None:
        """Logged by the engine; before it starts, the wait is for its start."""

    def waited(self) -> None:
        """Nothing was shown of that wait."""


class _Process:
    """This process's relation to the device; written by the fork handlers only."""

    was_in_use_at_fork = False
    is_in_bad_fork = False


def _resized(made: Any, outs: Any, is_contiguous: bool) -> Any:
    """The meta tensors `outs` as an op leaves them that writes results like `made` into them; resized ones lie as these
    do or, as those of Fourier transforms and where these have gaps, are contiguous."""
    for result, out in zip([made] if isinstance(made, torch.Tensor) else made, outs, strict=True):
        if out.shape != result.shape:
            _maybe_resize_out(out, result.shape)
            if not is_contiguous and result.untyped_storage().nbytes() == result.nbytes:
                out.as_strided_(result.shape, result.stride())
        _safe_copy_out(copy_from=result, copy_to=out, exact_dtype=True)
    return outs[0] if len(outs) == 1 else tuple(outs)


_END_SECONDS = 0.8  # for what is running when the process ends; the compiler has as long again

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


def observe(observer: Observer) -> None:
    """From now on `observer` hears what the engine does."""
    _lazy.observers.append(observer)
    _C.observe_reads(True)
    _C.forget_direct_launches()


def stop_observing(observer: Observer) -> None:
    """The reverse of `observe`."""
    _lazy.observers.remove(observer)
    _C.observe_reads(bool(_lazy.observers))


def recompilations() -> Any:
    """What made programs differ from earlier ones; None before the engine starts."""
    return _lazy.recompilations


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


def chip(device: int) -> Chip | None:
    """The TPU that a device is, or that it passes for (knob target); None where that is none or unknown."""
    target: str = config.get("target")
    if target:
        return find_chip(target)[0]
    found = chips() if platform() == "tpu" else ()
    return found[device % len(found)] if found else None


@functools.cache
def platform() -> str:
    """Where programs run: "cpu", "tpu" or "gpu"."""
    choice: str = config.get("platform")
    return choice if choice != "auto" else "tpu" if chips() else "cpu"


def start() -> None:
    """Prepares the recorder: devices, ops, limits, boundaries, fork and exit. Called once, at import."""
    if platform() == "tpu":
        os.environ.update(rank_environment(os.environ, len(chips())))
    _C.set_device_count(_count_devices())
    _C.set_device(_local_rank() % _C.device_count())
    config.on_change(_apply)
    _lazy.served = _C.register_ops(_ops())
    composed.install()
    flex.install()
    _C.set_engine(_lazy)
    optimizer_steps.install()
    if config.get("max_steps"):
        register_optimizer_step_pre_hook(_StepLimit(config.get("max_steps")))
    # Backward runs in the thread that calls it: 10 % faster, and one recorder sees the whole step.
    torch._C._set_multithreading_enabled(False)
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
    atexit.register(_shut_down)
    distributed.install(_start_in_fleet, lambda: not _lazy.is_started)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _count_devices() -> int:
    target: str = config.get("target")
    if target:
        return devices_of_host(*find_chip(target))
    where = platform()
    # A script under torchrun takes the device of its LOCAL_RANK; whichever index it takes is the rank's own chip.
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if where == "cpu":
        return max(1, config.get("num_devices"), ranks)
    if where == "tpu":
        visible = os.environ.get("TPU_VISIBLE_CHIPS") or os.environ.get("TPU_VISIBLE_DEVICES")
        return max(ranks, len(visible.split(",")) if visible else len(chips()))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(visible.split(",")) if visible else max(1, len(list(Path("/dev").glob("nvidia[0-9]*"))))


def _ops() -> list[Row]:
    from torchtpu import ops

    ops.load()
    where = "tpu" if config.get("target") else {"gpu": "cuda"}.get(platform(), platform())
    only = {name: entry for (name, place), entry in ops.PLATFORM_LOWERINGS.items() if place == where}
    table = {**only, **ops.LOWERINGS}
    gone = {name for name, version in ops.REMOVED.items() if torch.__version__ >= version}
    return [entry.row() for name, entry in table.items() if name not in gone]


_LIMITS = ("max_region_ops", "max_region_bytes", "max_in_flight", "max_trie_nodes", "max_programs")
_settings: dict[str, Any] = {}  # what the engine asks for at each launch: `config.get` looks at the environment


def _apply(name: str, value: Any) -> None:
    _settings[name] = value
    _C.forget_direct_launches()
    if name == "sync":
        _C.set_sync(value)
    elif name in ("policy", "deterministic", "padding"):
        _C.set_policy(config.get("policy") == "frozen", config.get("deterministic"), config.get("padding"))
    elif name == "debug_nans" and is_in_use():
        _C.forget_streams()  # their programs check nothing, or too much
    elif name in _LIMITS:
        _set_limits()


def _set_limits() -> None:
    limits = {knob: config.get(knob) for knob in _LIMITS}
    if _lazy.most_programs is not None:
        limits["max_programs"] = min(limits["max_programs"], _lazy.most_programs)
    _C.set_limits(*(limits[knob] for knob in _LIMITS))


def _limit_programs(most: int) -> None:
    _lazy.most_programs = most
    _set_limits()


class _StepLimit:
    """Ends the process, as sys.exit does, where an optimizer would take one step too many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: Counter[int] = Counter()

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._taken[id(optimizer)] == self._most:
            raise SystemExit(0)
        self._taken[id(optimizer)] += 1


def open_store() -> Any:
    """The cache that the knobs ask for: what code set counts too, so the environment alone does not decide."""
    from torchtpu.compiler_cache import open_store

    knobs = ("cache", "cache_dir", "cache_max_bytes", "cache_trusted_dirs")
    return open_store({**os.environ, **{config.KNOBS[name].variable: str(config.get(name)) for name in knobs}})


def lowerings() -> Lowerings:
    """The lowerings of all ops."""
    from torchtpu import ops

    served = _lazy.served
    table = ops.LOWERINGS, ops.PLATFORM_LOWERINGS
    return Lowerings(*table, lambda name: served.get(name, name), ops.Context, Path(ops.__path__[0], "templates"))


def _make_fragments() -> Any:
    """What traces lowerings where no engine does, for the target if there is one."""
    from torchtpu.runtime.device.client import Client
    from torchtpu.runtime.lowering.fragments import Fragments

    where = "tpu" if config.get("target") else platform()
    return Fragments(lowerings(), Client("cpu"), open_store(), _lazy.counters, {"gpu": "cuda"}.get(where, where))


def _make_engine(lazy: LazyEngine, process_group: ProcessGroup | None) -> Any:
    from torchtpu.compiler_cache import flight
    from torchtpu.diagnostics.recompilations import Recompilations
    from torchtpu.runtime.dry_run import DryRun
    from torchtpu.runtime.engine import Engine
    from torchtpu.runtime.ir.manifest import Journal

    flight.undisturbed = _C.CollectionDeferred
    collectives = distributed.RecordedCollectives()
    journal = Journal(config.get("journal")) if config.get("journal") else None
    if journal is not None:
        atexit.register(lambda: journal.note(fallbacks=fallback.cpu_fallback_counts()))
    if config.get("reads") != "run":
        if journal is None:
            raise RuntimeError("TORCHTPU_READS is for `torchtpu warm`, which collects programs: use its option --reads")
        answers = config.get("reads") == "standin"
        return DryRun(
            journal, lazy.counters, _C.current_line, collectives, _is_special, _make_fragments, answers=answers
        )
    lazy.recompilations = Recompilations()
    return Engine(
        platform=platform(),
        num_devices=_C.device_count(),
        lowerings=lowerings(),
        counters=lazy.counters,
        knob=_settings.__getitem__,
        store=open_store(),
        release=_C.drain,
        live_tensors=_C.live_tensors,
        journal=journal,
        observers=lazy.observers,
        planned=lazy.recompilations.note,
        collectives=collectives,
        is_structural=_is_structural,
        is_special=_is_special,
        process_group=process_group,
        programs_held=lambda: _C.stats()["trie_plans"],
        limit_programs=_limit_programs,
    )


def _is_structural(op: str, argument: str, value: float) -> bool:
    values = _structural(_lazy.served.get(op, op), argument)
    return values is None or value in values


def _is_special(op: str, argument: str, value: float) -> bool:
    return value in (_structural(_lazy.served.get(op, op), argument) or ())


@functools.lru_cache(maxsize=4096)
def _structural(op: str, argument: str) -> tuple[float, ...] | None:
    from torchtpu.ops.registry import find

    return find(op).structural.get(argument, ())


def _start_in_fleet(process_group: ProcessGroup) -> int | None:
    """Starts the engine as that of a rank; its device's name among those of all ranks, None where it runs alone."""
    if platform() == "gpu" or config.get("reads") != "run":
        return None
    home: int = _lazy.start(process_group).client.home(_C.current_device())
    return home


def _before_fork() -> None:
    _process.was_in_use_at_fork = is_in_use()


def _after_fork_in_child() -> None:
    _process.is_in_bad_fork = _process.is_in_bad_fork or _process.was_in_use_at_fork
    if _process.is_in_bad_fork:  # at its end autograd would wait ten seconds for the device's threads
        os.environ.setdefault("TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT", "0")
    jax_modules.forget_threads()
    _C.forget_deferred_collections()


def _shut_down() -> None:
    if not _process.is_in_bad_fork:
        is_prompting = sys.flags.interactive or hasattr(sys, "ps1")  # whose user is told, and goes on
        is_interrupted = not is_prompting and getattr(sys, "last_type", None) is KeyboardInterrupt
        _C.shutdown(_END_SECONDS, _lazy.close, is_interrupted)
