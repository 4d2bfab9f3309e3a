"""The module `torch.tpu`: what scripts call on torch.cuda, for tpu devices."""

from __future__ import annotations

import os
import platform as _machine
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from torchtpu import startup
from torchtpu.api import amp, memory, nvtx  # noqa: F401
from torchtpu.api import rng as random  # noqa: F401
from torchtpu.api.fallback import cpu_fallback_counts  # noqa: F401
from torchtpu.api.memory import *  # noqa: F403
from torchtpu.api.rng import *  # noqa: F403
from torchtpu.api.rng import _get_rng_state_offset, _set_rng_state_offset, device_index, generators  # noqa: F401
from torchtpu.api.streams import *  # noqa: F403
from torchtpu.api.tensor_types import TYPES
from torchtpu.runtime import _C


@dataclass(frozen=True)
class DeviceProperties:
    """What a device is; sizes in bytes."""

    name: str
    platform: str
    total_memory: int
    major: int
    minor: int
    multi_processor_count: int
    is_integrated: bool
    uuid: str


_SUBMODULES = ("amp", "memory", "nvtx", "random")

globals().update(TYPES)  # torch.tpu.FloatTensor and its like
OutOfMemoryError = torch.OutOfMemoryError

# ---- availability and start

_initialized = True  # torch.utils.checkpoint keeps random states of modules that say so


def is_available() -> bool:
    """True: with no accelerator at hand, programs run on the host's CPU."""
    return True


def is_initialized() -> bool:
    """Whether something was recorded or uploaded in this process, or another device than the first is current.

    PyTorch takes fake tensors without an index to be on device 0 where this is false.
    """
    return startup.is_in_use() or current_device() != 0


def init() -> None:
    """Does nothing: the device starts at its first use."""


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return startup.is_in_bad_fork()


# ---- the current device


def device_count() -> int:
    """The number of devices."""
    return int(_C.device_count())


def current_device() -> int:
    """The index of the current device of this thread."""
    return int(_C.current_device())


def set_device(device: Any) -> None:
    """Makes `device` current in this thread; a negative index changes nothing."""
    if not (isinstance(device, int) and device < 0):
        _C.set_device(device_index(device))


class device:
    """A context in which `device` (an index, a text or a torch.device; None: no change) is the current one."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None or (isinstance(device, int) and device < 0) else device_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = int(_C.exchange_device(self.idx))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _C.exchange_device(self.prev_idx)


class device_of(device):
    """A context in which the device of `obj` (a tensor or storage) is current; no change if that is no tpu."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.device.index if obj.device.type == "tpu" else None)


def _exchange_device(device: int) -> int:
    return int(_C.exchange_device(device))


_maybe_exchange_device = _exchange_device


def synchronize(device: Any = None) -> None:
    """Waits for everything recorded on the device and raises the first error nobody has seen."""
    _C.synchronize(device_index(device))


# ---- what a device is


def get_device_properties(device: Any = None) -> DeviceProperties:
    """The device's name, memory and version."""
    index = device_index(device)
    platform = startup.platform()
    chip = startup.chip(index)
    if chip is not None:
        platform, name, version = "tpu", chip.kind, chip.version
    elif platform == "cpu":
        name, version = f"XLA:CPU on {_machine.machine()}", (0, 0)
    else:
        name, version = startup.engine().device_name(index), (0, 0)
    cores = len(os.sched_getaffinity(0)) if platform == "cpu" else 1
    return DeviceProperties(
        name, platform, memory.total_memory(index), *version, cores, platform == "cpu", f"{_host()}-{platform}-{index}"
    )


def get_device_name(device: Any = None) -> str:
    """The device's name."""
    return get_device_properties(device_index(device)).name


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """The chip's generation; (0, 0) where the host's CPU stands in."""
    properties = get_device_properties(device_index(device))
    return properties.major, properties.minor


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """True."""
    return True


def is_tf32_supported() -> bool:
    """False: see torch.set_float32_matmul_precision for what float32 matmuls may use instead."""
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes torch.autocast("tpu") takes."""
    return [torch.float16, torch.bfloat16]


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    """Whether a copy between two devices needs no host; True for different devices."""
    return device_index(device) != device_index(peer_device)


def get_arch_list() -> list[str]:
    """Empty: programs are compiled for the device at hand."""
    return []


def ipc_collect() -> None:
    """Does nothing: tpu memory is not shared between processes."""


def __dir__() -> list[str]:
    """What completion offers: torch.cuda's names, without what this module imports for itself."""
    is_ours = {name: getattr(value, "__module__", value) for name, value in globals().items()}
    own = [n for n, origin in is_ours.items() if isinstance(origin, str) and origin.startswith("torchtpu.api.")]
    return sorted({*(name for name in own if not name.startswith("_")), *_SUBMODULES, "default_generators"})


def __getattr__(name: str) -> Any:
    if name == "default_generators":
        return generators()
    raise AttributeError(f"module 'torch.tpu' has no attribute {name!r}")


def _host() -> str:
    path = Path("/etc/machine-id")
    return path.read_text().strip()[:12] if path.exists() else _machine.node()
