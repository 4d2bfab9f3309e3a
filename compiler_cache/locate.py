"""Finds the store that the environment variables ask for."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from .store import MAX_BYTES, DirectoryStore, NullStore, Store
from .trust import make_private, untrusted

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

_log = logging.getLogger("torchtpu.compiler_cache")


def open_store(environment: Mapping[str, str] = os.environ) -> Store:
    """The store that TORCHTPU_CACHE, _CACHE_DIR, _CACHE_MAX_BYTES and _CACHE_TRUSTED_DIRS ask for.

    Logs one line and keeps nothing where the directory cannot be used safely; never raises.
    """
    mode = environment.get("TORCHTPU_CACHE", "").lower() or "on"
    if mode == "off":
        return NullStore("TORCHTPU_CACHE=off")
    if mode not in ("on", "read"):
        _log.warning("cache: TORCHTPU_CACHE=%s is none of on, read, off; taken as on", mode)
    directory = default_directory(environment)
    problem = "there is no home directory" if directory is None else _problem(directory, makes=mode != "read")
    if problem is not None:
        _log.warning("cache: not used: %s (TORCHTPU_CACHE_DIR names another directory)", problem)
        directory = None
    layers = tuple(_layers(environment.get("TORCHTPU_CACHE_TRUSTED_DIRS", "")))
    if directory is None and not layers:
        return NullStore(problem or "")
    max_bytes = _nbytes(environment.get("TORCHTPU_CACHE_MAX_BYTES", ""))
    return DirectoryStore(directory, layers=layers, writes=mode != "read", max_bytes=max_bytes)


def default_directory(environment: Mapping[str, str] = os.environ) -> Path | None:
    """$TORCHTPU_CACHE_DIR, else torchtpu in the user's XDG cache directory; None where there is no home."""
    try:
        if environment.get("TORCHTPU_CACHE_DIR"):
            return Path(environment["TORCHTPU_CACHE_DIR"]).expanduser().absolute()
        base = Path(environment.get("XDG_CACHE_HOME", ""))
        # XDG's rule: a relative path counts as none.
        return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "torchtpu"
    except RuntimeError:
        return None


def _problem(directory: Path, *, makes: bool) -> str | None:
    """Why `directory` cannot be used, or None; it is there afterwards where it `makes` one."""
    try:
        if makes:
            make_private(directory)
    except OSError as error:
        return f"{directory} cannot be made ({error.strerror})"
    return untrusted(directory)


def _layers(listed: str) -> Iterator[Path]:
    for directory in filter(None, listed.split(os.pathsep)):
        problem = untrusted(Path(directory), named_by_user=True)
        if problem is None:
            yield Path(directory)
        else:
            _log.warning("cache: trusted directory not used: %s", problem)


def parse_nbytes(text: str) -> int | None:
    """The bytes that "512M" or "2G" are; None where the text is no size."""
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in _UNITS else ""
    try:
        return max(0, int(float(number.removesuffix(unit)) * _UNITS[unit]))
    except (ValueError, OverflowError):
        return None


def _nbytes(text: str) -> int:
    if not text.strip():
        return MAX_BYTES
    found = parse_nbytes(text)
    if found is None:
        _log.warning("cache: TORCHTPU_CACHE_MAX_BYTES=%s is not a size such as 20G; taken as %d", text, MAX_BYTES)
        return MAX_BYTES
    return found
