"""Makes Lightning's CUDA accelerator take tpu devices under `torchtpu run`.

Lightning asks a device for its type, which stays "tpu" here; everything else it does goes through torch.cuda's names.
"""

from __future__ import annotations

from collections import Counter
from types import ModuleType
from typing import Any

import torch

from torchtpu.compat import imports

_PACKAGES = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")


def install(mapped: Counter[str]) -> None:
    """Watches the imports of this process for Lightning's accelerator."""

    def take_tpu(module: ModuleType) -> None:
        def setup_device(accelerator: Any, device: Any) -> None:
            mapped["CUDAAccelerator.setup_device()"] += 1
            torch.tpu.set_device(device)  # type: ignore[attr-defined]

        module.CUDAAccelerator.setup_device = setup_device

    for package in _PACKAGES:
        imports.after(f"{package}.accelerators.cuda", take_tpu)
