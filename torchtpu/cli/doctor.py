"""`torchtpu doctor`: examines this machine, and names the remedy for each fault."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import typer
from rich.text import Text

from torchtpu.cli.output import Json, out, print_json
from torchtpu.runtime.device.sizes import show_bytes

_LOW_DISK_BYTES = 1 << 30
_STYLES = {"ok": "green", "note": "yellow", "fault": "bold red"}
_COMPILER_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS", "TPU_LIBRARY_PATH")


class Finding(NamedTuple):
    """One thing looked at: "ok", a "note" to know, or a "fault", with what to do about it."""

    name: str
    state: str
    text: str
    remedy: str = ""


def doctor(as_json: Json = False) -> None:
    """Look at versions, devices, the cache and common mistakes; exit status 1 where something is at fault."""
    findings = list(examine())
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        for finding in findings:
            line = Text(f"{finding.state:<6}", _STYLES[finding.state]).append(f"{finding.name}: {finding.text}", "none")
            out.print(line)
            if finding.remedy:
                out.print(Text(f"      {finding.remedy}"))
    raise typer.Exit(1 if any(finding.state == "fault" for finding in findings) else 0)


def examine() -> Iterator[Finding]:
    """Everything found, in the order in which one thing needs another."""
    yield _versions()
    yield from _rivals()
    yield from _frameworks()
    loaded = _extension()
    yield loaded
    if loaded.state == "fault":
        return
    for look in (_devices, _chips_in_use, _libtpu, _variables, _cache, _disk, _run):
        yield from look()


def _versions() -> Finding:
    names = ("torchtpu", "torch", "jax", "jaxlib", "libtpu", "numpy")
    found = [f"{name} {_version(name)}" for name in names]
    text = f"Python {platform.python_version()}, {', '.join(found)}"
    if _version("jax") != _version("jaxlib"):
        return Finding("versions", "fault", text, "jax and jaxlib belong together: pip install --upgrade jax jaxlib")
    return Finding("versions", "ok", text)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _rivals() -> Iterator[Finding]:
    """Other packages that register a device with PyTorch when it is imported."""
    for point in importlib.metadata.entry_points(group="torch.backends"):
        owner = point.dist.name if point.dist else point.value
        if point.value != "torchtpu._autoload:autoload":
            text = f"{owner} registers device {point.name!r} with PyTorch at import"
            claims = point.name == "tpu" or owner.replace("-", "_") == "torch_tpu"
            remedy = f"a process has one such device: pip uninstall {owner}" if claims else ""
            yield Finding("other devices", "fault" if claims else "note", text, remedy)


def _frameworks() -> Iterator[Finding]:
    """The libraries that find the device by themselves, or were made to."""
    from torchtpu.compat import frameworks

    for name, version, is_tested in frameworks.installed():
        tested = " and ".join(frameworks.TESTED[name])
        text = f"{version}, tested" if is_tested else f"{version}, not tested; {tested} was"
        yield Finding(name, "ok" if is_tested else "note", text)


def _extension() -> Finding:
    from torchtpu._autoload import failure

    error = failure()
    if error is not None:
        text, _, remedy = str(error).partition(". ")
        return Finding("extension", "fault", text, remedy or "reinstall torchtpu")
    from torchtpu.runtime import _C

    return Finding("extension", "ok", f"built against torch {_C.built_torch_version}, from {Path(_C.__file__).parent}")


def _devices() -> Iterator[Finding]:
    from torchtpu import startup
    from torchtpu.api import device

    where, chips = startup.platform(), startup.chips()
    count = device.device_count()
    text = f"platform {where}, {count} device{'s' if count > 1 else ''}: {device.get_device_name()}"
    if where == "cpu" and chips:
        yield Finding("devices", "note", f"{text}, though {len(chips)} chips are here", "unset TORCHTPU_PLATFORM")
    elif where == "cpu":
        yield Finding("devices", "ok", f"{text}; no TPU on the PCI bus, so programs run on the CPU")
    else:
        yield Finding("devices", "ok", text)


def _chips_in_use() -> Iterator[Finding]:
    """Chips that are here but that this user cannot open."""
    for path in [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]:
        if not os.access(path, os.R_OK | os.W_OK):
            text = f"{path} cannot be opened by uid {os.geteuid()}"
            yield Finding("devices", "fault", text, f"give this user's group access: ls -l {path}")


def _libtpu() -> Iterator[Finding]:
    from torchtpu import startup

    if _version("libtpu") != "not installed":
        yield Finding("libtpu", "ok", "programs can be compiled for TPUs")
    elif startup.platform() == "tpu":
        yield Finding("libtpu", "fault", "not installed, and the platform is tpu", "pip install 'torchtpu[aot]'")
    else:
        yield Finding("libtpu", "note", "not installed: only `torchtpu warm --target` needs it")


def _variables() -> Iterator[Finding]:
    from torchtpu import config

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config.warn_unknown()
    for warning in caught:
        yield Finding("variables", "fault", str(warning.message), "nothing reads it: correct or unset it")
    known = (*(knob.variable for knob in config.KNOBS.values()), *_COMPILER_VARIABLES)
    given = [name for name in known if name in os.environ]
    if given:
        yield Finding("variables", "ok", ", ".join(f"{name}={os.environ[name]}" for name in given))


def _cache() -> Iterator[Finding]:
    from torchtpu import config
    from torchtpu.compiler_cache import default_directory, untrusted

    mode, directory = config.get("cache"), default_directory()
    if mode == "off":
        yield Finding("cache", "note", "off: every process compiles anew", "unset TORCHTPU_CACHE")
        return
    if directory is None:
        yield Finding("cache", "fault", "there is no home directory", "name a directory in TORCHTPU_CACHE_DIR")
        return
    nearest = next(path for path in (directory, *directory.parents) if path.exists())
    problem = untrusted(nearest)
    if problem is not None:
        yield Finding("cache", "fault", problem, "or name another directory in TORCHTPU_CACHE_DIR")
    elif not os.access(nearest, os.W_OK | os.X_OK) and mode == "on":
        remedy = "name another directory in TORCHTPU_CACHE_DIR, or set TORCHTPU_CACHE=read"
        yield Finding("cache", "fault", f"{nearest} cannot be written by uid {os.geteuid()}", remedy)
    else:
        yield Finding("cache", "ok", f"{mode}, {_cache_size(directory)} in {directory}")


def _cache_size(directory: Path) -> str:
    from torchtpu.compiler_cache import DirectoryStore

    files = list(DirectoryStore(directory, writes=False).entries())
    return f"{len(files)} entries, {show_bytes(sum(file.nbytes for file in files))}"


def _disk() -> Iterator[Finding]:
    from torchtpu.compiler_cache import default_directory

    directory = default_directory() or Path.home()
    nearest = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    if free < _LOW_DISK_BYTES:
        yield Finding("disk", "fault", f"{show_bytes(free)} free at {nearest}", "torchtpu cache prune --max-bytes 1G")


def _run() -> Iterator[Finding]:
    """Compiles and runs one small program."""
    import torch

    try:
        found = (torch.arange(4, device="tpu") * 2 + 1).tolist()
    except Exception as error:  # noqa: BLE001 -- whatever keeps the device from working is the finding
        yield Finding("run", "fault", f"a first program fails: {type(error).__name__}: {error}")
        return
    state = "ok" if found == [1, 3, 5, 7] else "fault"
    yield Finding("run", state, f"arange(4) * 2 + 1 is {found}")
