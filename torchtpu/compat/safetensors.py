"""Makes safetensors' `device=` accept "tpu", as the number that its Rust code hands to PyTorch unread.

Stands in for the names of devices in safetensors' `bindings/python/src/lib.rs`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


def take_tpu(safetensors: ModuleType) -> None:
    """Makes safetensors.safe_open, which safetensors.torch.load_file calls, take tpu devices."""
    opened = safetensors.safe_open

    class SafeOpen(type):
        def __call__(cls, filename: Any, framework: Any, device: Any = "cpu", **options: Any) -> Any:
            return opened(filename, framework, _number(device), **options)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, opened)

    safetensors.safe_open = SafeOpen(  # type: ignore[attr-defined]
        "safe_open", (), {"__doc__": opened.__doc__, "__module__": safetensors.__name__}
    )


def _number(device: Any) -> Any:
    """The index of a tpu device; PyTorch takes a number for a device of its accelerator."""
    if str(device).partition(":")[0] != "tpu":
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index
