"""The ops: importing the files of this folder registers their lowerings and composed ops.

`load()` imports every file; none of them imports jax, so that this costs milliseconds.
"""

from __future__ import annotations

import importlib
import pkgutil

from torchtpu.ops.registry import COMPOSED, LOWERINGS, PLATFORM_LOWERINGS, REMOVED, Context

__all__ = ["COMPOSED", "LOWERINGS", "PLATFORM_LOWERINGS", "REMOVED", "Context", "load"]


def load() -> None:
    """Registers all lowerings."""
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        importlib.import_module(module.name)
