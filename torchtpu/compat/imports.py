"""Changes other libraries as they are imported, so that they know the device.

Nothing is imported that the user's program does not import. A library that has moved on keeps its own behaviour: what
raises while it is changed is a warning.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeAlias

Change: TypeAlias = Callable[[ModuleType], None]

# The library's module, and what changes it: a function of a module of this package.
_CHANGES = {
    "torch.nested._internal.sdpa": "nested:pad_for_attention",
    "safetensors": "safetensors:take_tpu",
    "accelerate.accelerator": "accelerate:allow_float16",
    "accelerate.state": "accelerate:find_device",
    "accelerate.checkpointing": "accelerate:keep_generators",
    "accelerate.test_utils.testing": "accelerate:name_tested_device",
    "accelerate.utils.dataclasses": "accelerate:initialize_shards",
    "accelerate.utils.environment": "accelerate:name_device",
    "accelerate.utils.memory": "accelerate:empty_cache",
    "accelerate.utils.modeling": "accelerate:count_memory",
    "accelerate.commands.launch": "accelerate:count_processes",
    "accelerate.commands.config.default": "accelerate:write_config",
    "transformers.pipelines.base": "transformers:place_pipelines",
    "transformers.trainer": "transformers:keep_generators",
    **{
        f"{package}.{module}": f"lightning:{function}"
        for packages, changes in (
            (
                ("lightning.pytorch", "pytorch_lightning"),
                {
                    "trainer.connectors.accelerator_connector": "serve_trainer",
                    "trainer.setup": "log_devices",
                    "strategies.ddp": "wrap_without_streams",
                    "plugins.precision.fsdp": "cast_in_shards",
                },
            ),
            (
                ("lightning.fabric", "lightning_fabric"),
                {
                    "connector": "serve_fabric",
                    "strategies.ddp": "wrap_without_streams",
                    "plugins.precision.fsdp": "cast_in_shards",
                    "utilities.seed": "keep_generators",
                },
            ),
        )
        for package in packages
        for module, function in changes.items()
    },
}


def install() -> None:
    """Watches this process's imports; modules that are there already are changed at once. Called once."""
    for name, where in _CHANGES.items():
        after(name, _named(where))


def after(name: str, change: Change) -> None:
    """Calls `change` with the module `name` when it has been imported."""
    _finder.changes[name].append(change)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    module = sys.modules.get(name)
    if module is None:
        return
    spec: Any = module.__spec__
    if spec is not None and getattr(spec, "_initializing", False):  # it imports torch for the first time
        spec.__class__ = _Unfinished
        spec.changes = [*getattr(spec, "changes", ()), change]
    else:
        attempt(change, module)


class _Finder(importlib.abc.MetaPathFinder):
    """Leaves finding to the other finders, and changes a module once its own code has run."""

    def __init__(self) -> None:
        self.changes: defaultdict[str, list[Change]] = defaultdict(list)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.changes:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._change_after(spec.loader, name)
        return spec

    def _change_after(self, loader: Any, name: str) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == name:  # modules of an archive have one loader
                for change in self.changes[name]:
                    attempt(change, module)

        loader.exec_module = exec_module


class _Unfinished(ModuleSpec):
    """The spec of a module whose code is running: changes it when the import system says that the code has ended."""

    changes: list[Change]

    @property
    def _initializing(self) -> bool:
        return True

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        if value:
            return
        spec: Any = self
        spec.__class__ = ModuleSpec
        spec._initializing = False
        for change in self.changes:
            if self.name in sys.modules:  # else its code raised
                attempt(change, sys.modules[self.name])


def _named(where: str) -> Change:
    """The function that `where` names, whose module is imported when it is called."""
    module, _, function = where.partition(":")

    def change(changed: ModuleType) -> None:
        getattr(importlib.import_module(f"torchtpu.compat.{module}"), function)(changed)

    return change


def attempt(change: Change, module: ModuleType) -> None:
    """Changes a module; what is raised is a warning."""
    try:
        change(module)
    except Exception as error:  # noqa: BLE001 -- whatever it is, the library works as it does without a tpu
        warnings.warn(
            f"torchtpu does not know this version of {module.__name__}, which may not find the tpu by itself: "
            f"{type(error).__name__}: {error}. `torchtpu doctor` lists the versions that were tested.",
            RuntimeWarning,
            stacklevel=2,
        )


_finder = _Finder()
