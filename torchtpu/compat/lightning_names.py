"""Lightning under `torchtpu run`: in comes its CUDA accelerator as it is imported, out goes one that takes tpu devices.

Lightning asks a device for its type, which stays "tpu" here; everything else it does goes through torch.cuda's names.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

_PACKAGES = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
_MODULES = frozenset(f"{package}.accelerators.cuda" for package in _PACKAGES)


def install(mapped: Counter[str]) -> None:
    """Watches the imports of this process for Lightning's accelerator."""
    sys.meta_path.insert(0, _Finder(mapped))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mapped: Counter[str]) -> None:
        self._mapped = mapped

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _MODULES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            self._patch_after(spec.loader)
        return spec

    def _patch_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)

            def setup_device(accelerator: Any, device: Any) -> None:
                self._mapped["CUDAAccelerator.setup_device()"] += 1
                torch.tpu.set_device(device)  # type: ignore[attr-defined]

            module.CUDAAccelerator.setup_device = setup_device

        loader.exec_module = exec_module
