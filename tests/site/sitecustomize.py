"""Python runs this as it starts in a test's process: once the client is imported, its compiler is replaced.

Nothing is imported before a script imports it, so that what tests say about imports stays true.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_CLIENT = "torchtpu.runtime.device.client"
_SUPPORT = Path(__file__).parent.parent / "compiled_before.py"


class _Installs(Loader):
    """Loads a module as `loader` does, then replaces its compiler."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        spec = importlib.util.spec_from_file_location("compiled_before", _SUPPORT)
        assert spec is not None and spec.loader is not None
        support = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(support)
        support.install(module)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _CLIENT:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Installs(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
