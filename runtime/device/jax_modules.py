"""jax, imported when something of it is first used: that takes ten times as long as to launch a cached program.

Its private modules are touched in this folder alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from .garbage import not_collected


class LazyModule:
    """A module that is imported at its first attribute access."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # who only looks what this is does not want the module
            raise AttributeError(attribute)
        load()
        value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)
        return value


def forget_threads() -> None:
    """Keeps what jax's threads belong to, in a process that was forked and has none of them: letting go of it at the
    end would wait for them, and crash."""
    module = sys.modules.get("jax._src.interpreters.mlir")
    pool = getattr(module, "global_thread_pool", None)
    if pool is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))


def load() -> None:
    """Imports jax, if nobody has."""
    if "jax" not in sys.modules:
        with not_collected(), _drawn_apart():
            importlib.import_module("jax")


@contextlib.contextmanager
def _drawn_apart() -> Iterator[None]:
    """Within it what this thread draws with `numpy.random.rand` is not drawn from NumPy's generator, which is the
    user's: jax draws five numbers as it is imported, whenever that is."""
    draw, thread, is_over = np.random.rand, threading.get_ident(), False

    def rand(*shape: int) -> Any:
        is_here = not is_over and threading.get_ident() == thread
        return np.random.default_rng().random(shape) if is_here else draw(*shape)

    np.random.rand = rand
    try:
        yield
    finally:
        is_over = True
        if np.random.rand is rand:
            np.random.rand = draw


def import_all() -> None:
    """Imports jax now, with all that is used of it."""
    load()
    for module in [m for m in globals().values() if isinstance(m, LazyModule)]:
        importlib.import_module(module._name)


jax: Any = LazyModule("jax")
jnp: Any = LazyModule("jax.numpy")
lax: Any = LazyModule("jax.lax")
export: Any = LazyModule("jax.export")
core: Any = LazyModule("jax._src.core")
shape_poly: Any = LazyModule("jax._src.export.shape_poly")
shape_poly_decision: Any = LazyModule("jax._src.export.shape_poly_decision")
prng: Any = LazyModule("jax._src.random")
mlir: Any = LazyModule("jax._src.interpreters.mlir")
xla_bridge: Any = LazyModule("jax._src.xla_bridge")
