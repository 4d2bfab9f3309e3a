"""The torch.backends entry point: `import torch` registers the device `tpu`, unless CUDA devices would suffer from it.

Its own module, because an entry point into the package itself would be looked up while `import torchtpu` is under way.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration

_failures: list[ImportError] = []


def autoload() -> None:
    """What torch calls at the end of its import: registers the device, unless that `stands_aside`.

    What is there by then are modules, which live as long as the process: no collection of garbage looks at them again.
    It would at every full one, and lowering alone, which makes many objects, starts dozens.
    """
    if not stands_aside():
        register()
        if _is_being_imported("torch"):
            gc.freeze()
    elif not _is_being_imported("torchtpu"):
        # A later import of the package is somebody's wish, and has to find it new.
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchtpu"]:
            del sys.modules[name]


def stands_aside() -> bool:
    """Whether nobody has asked for the device, where there are CUDA devices: PyTorch takes a device such as this for
    the only accelerator of the process, and fails in the backward of CUDA tensors."""
    return _is_being_imported("torch") and "TORCHTPU_PLATFORM" not in os.environ and _has_cuda_devices()


def _is_being_imported(name: str) -> bool:
    return bool(getattr(sys.modules[name].__spec__, "_initializing", False))


def _has_cuda_devices() -> bool:
    """Whether this torch may use a CUDA device; starts no driver."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not is_hidden and any(Path("/dev").glob("nvidia[0-9]*")) and torch.version.cuda is not None


def register() -> None:
    """Registers the device, once. Raises ImportError where the extension cannot work with this torch.

    The process of the `torchtpu` command goes on without the device instead, to say what is wrong and what helps.
    """
    try:
        _register()
    except ImportError as error:
        if not _is_command():
            raise
        _failures.append(error)


def failure() -> ImportError | None:
    """Why the `torchtpu` command has no device; None where it has."""
    return _failures[0] if _failures else None


def _is_command() -> bool:
    return Path(sys.argv[0]).name == "torchtpu" or sys.orig_argv[1:3] in (["-m", "torchtpu"], ["-m", "torchtpu.cli"])


@functools.cache
def _register() -> None:
    _refuse_rival()
    _check_build()
    from torchtpu.runtime.device.garbage import not_collected

    with not_collected():
        _install()


def _install() -> None:
    backend_registration.rename_privateuse1_backend("tpu")
    from torchtpu import config, startup
    from torchtpu.api import amp, device, formatting, interop, memory, nvtx, rng, serialization, storages, streams
    from torchtpu.compat import compiler_imports, data_parallel, imports
    from torchtpu.compile import artifacts
    from torchtpu.compile import backend as dynamo
    from torchtpu.diagnostics import profiler

    register_module: Any = torch._register_device_module
    register_module("tpu", device)
    for name, module in (("amp", amp), ("memory", memory), ("nvtx", nvtx), ("random", rng), ("streams", streams)):
        sys.modules[f"torch.tpu.{name}"] = module
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    parts = formatting, interop, memory, serialization, storages, dynamo, artifacts, profiler, data_parallel, imports
    for part in (*parts, compiler_imports):
        part.install()
    startup.start()
    config.warn_unknown()
    if config.get("explain"):
        from torchtpu.diagnostics.session import explain_process

        explain_process()


def _refuse_rival() -> None:
    name = torch._C._get_privateuse1_backend_name()
    loads_rival = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1" and importlib.util.find_spec("torch_tpu")
    if "torch_tpu" in sys.modules or loads_rival:
        raise ImportError(
            "torchtpu and torch_tpu are both installed, and both are the device 'tpu'. Uninstall one of them, or set "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 and import the one you want."
        )
    if name != "privateuseone":
        raise ImportError(
            f"torchtpu: another extension already is PyTorch's PrivateUse1 device, under the name {name!r}. "
            "A process can have one: set TORCH_DEVICE_BACKEND_AUTOLOAD=0 and import the one you want."
        )


def _check_build() -> None:
    advice = "Rebuild torchtpu for this torch: pip install --no-build-isolation --force-reinstall --no-deps <torchtpu>"
    try:
        from torchtpu.runtime import _C
    except ImportError as error:
        raise ImportError(
            f"torchtpu's extension does not load with torch {torch.__version__}: {error}. {advice}"
        ) from error
    built = _C.built_torch_version
    if built.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise ImportError(
            f"torchtpu was built against torch {built}, but torch {torch.__version__} is running. {advice}"
        )
