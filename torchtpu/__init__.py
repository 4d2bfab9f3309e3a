"""torchtpu gives PyTorch the device `tpu`.

`import torch` alone makes the device available; this package holds what goes beyond torch's own names: knobs
(`torchtpu.config`), counts (`torchtpu.metrics`) and the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch as _torch  # noqa: F401 - its autoload registers the device

from torchtpu._autoload import failure, register, stands_aside

if TYPE_CHECKING:
    from torchtpu.diagnostics.session import explain

if not stands_aside():
    register()

if failure() is None and not stands_aside():
    from torchtpu import config, kernels, metrics
    from torchtpu.api.loading import ready
    from torchtpu.api.reading import async_read
    from torchtpu.diagnostics.debugging import compare, debug_nans
    from torchtpu.diagnostics.profiler import xprof


def __getattr__(name: str) -> Any:
    if name != "explain" or failure() is not None:  # the one that takes long to import
        raise AttributeError(f"module 'torchtpu' has no attribute {name!r}")
    from torchtpu.diagnostics.session import explain

    return explain


__version__ = "0.1.0"
__all__ = [
    "__version__",
    "async_read",
    "compare",
    "config",
    "debug_nans",
    "explain",
    "kernels",
    "metrics",
    "ready",
    "xprof",
]
