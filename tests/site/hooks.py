"""What a test's process does to modules as it imports them.

Nothing is imported before a script imports it, so that what tests say about imports stays true.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_SUPPORT = Path(__file__).parent.parent / "compiled_before.py"

Load = Callable[[Loader, ModuleType], None]


def _support() -> Any:
    spec = importlib.util.spec_from_file_location("compiled_before", _SUPPORT)
    assert spec is not None and spec.loader is not None
    support = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(support)
    return support


def _load_client(loader: Loader, module: ModuleType) -> None:
    """Replaces its compiler."""
    loader.exec_module(module)
    _support().install(module)


def _load_aot(loader: Loader, module: ModuleType) -> None:
    """Replaces its compiler."""
    loader.exec_module(module)
    _support().install_for_tpus(module)


def _load_torchvision(loader: Loader, module: ModuleType) -> None:
    """Does without its C++ operators where they were built for another build of torch: no test calls them, but without
    their schemas torchvision, and so timm, is not imported."""
    try:
        loader.exec_module(module)
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
        import torch

        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        loader.exec_module(module)


_LOADS: dict[str, Load] = {
    "torchtpu.runtime.device.client": _load_client,
    "torchtpu.runtime.compile.aot": _load_aot,
    "torchvision": _load_torchvision,
}


class _Loads(Loader):
    """Loads a module as `loader` does, and more."""

    def __init__(self, loader: Loader, load: Load) -> None:
        self._loader = loader
        self._load = load

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._load(self._loader, module)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _LOADS:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loads(spec.loader, _LOADS[name])
        return spec


def install() -> None:
    """Does so from now on in this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
