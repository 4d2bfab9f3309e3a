"""Looks into a cache directory: its entries, the entry nearest to a key, and its size bound.

A directory holds `v1/<kind>/<two digits>/<digest>` (the entries), `locks/` and `tmp/` (files being written).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .entry import VERSION, CacheEntry
from .files import UNREADABLE, cause_of, opened_entry, read_entry
from .key import Key, KeyDifference, difference

LAYOUT = f"v{VERSION}"
LOCKS = "locks"
TMP = "tmp"

_STALE_SECONDS = 3600.0
_BLOCK_BYTES = 4096
_NEAREST_CANDIDATES = 512


class EntryFile(NamedTuple):
    """An entry's file as the directory lists it; `used` is when it was last hit or written, to about a minute."""

    kind: str
    digest: str
    path: Path
    nbytes: int
    used: float

    def read(self) -> CacheEntry:
        """Its key, note and payload; DamagedEntry or OSError where it cannot be read whole."""
        return read_entry(self.path)


class Nearest(NamedTuple):
    """The entry whose key has the fewest parts that differ from the wanted one."""

    entry: EntryFile
    differences: tuple[KeyDifference, ...]


class Swept(NamedTuple):
    """What a sweep took away and what it left."""

    evicted: int
    entries: int
    nbytes: int


def entry_path(directory: Path, kind: str, digest: str) -> Path:
    return directory.joinpath(LAYOUT, kind, digest[:2], digest)


def entries(directory: Path, kind: str | None = None) -> Iterator[EntryFile]:
    """Every entry file of this format version, in no order; what disappears meanwhile is left out."""
    for level in _listing(directory / LAYOUT):
        if kind is None or level.name == kind:
            yield from _below(level)


def nearest(directory: Path, key: Key) -> Nearest | None:
    """The entry of the key's kind that differs in the fewest parts, among those used last."""
    best: Nearest | None = None
    recent = sorted(entries(directory, key.kind), key=lambda file: file.used, reverse=True)[:_NEAREST_CANDIDATES]
    for file in recent:
        try:
            with opened_entry(file.path) as (opened, _, lengths):
                found = Key.decode(opened.read(lengths.key))
        except (OSError, ValueError, MemoryError):
            continue
        differences = difference(found, key)
        if differences and (best is None or len(differences) < len(best.differences)):
            best = Nearest(file, differences)
    return best


def damaged(directory: Path) -> Iterator[tuple[EntryFile, str]]:
    """Every entry that cannot be read whole and unchanged under its own name, and why."""
    for file in entries(directory):
        try:
            found = file.read().key
        except UNREADABLE as error:
            yield file, cause_of(error)
            continue
        if (found.kind, found.digest) != (file.kind, file.digest):
            yield file, f"it holds {found.kind} {found.digest}"


def sweep(directory: Path, max_bytes: int, max_entries: int) -> Swept:
    """Deletes what was used longest ago until the entries fit, and the half-written files of killed writers."""
    now = time.time()
    # An older or newer format's entries count too: one bound holds for the whole directory.
    files = [
        file
        for version in _listing(directory)
        if version.name.startswith("v") and version.name[1:].isdigit()
        for level in _listing(version.path)
        for file in _below(level)
    ]
    nbytes = sum(_disk_bytes(file) for file in files)
    left, evicted = len(files), 0
    if nbytes > max_bytes or left > max_entries:
        # To 90 %: the next sweep then has something to leave alone.  A use in the future (a clock that was set back)
        # would never be the oldest, so it counts as the oldest.
        for file in sorted(files, key=lambda file: file.used if file.used < now + _STALE_SECONDS else 0.0):
            if nbytes <= 0.9 * max_bytes and left <= 0.9 * max_entries:
                break
            if _delete(file.path):
                nbytes -= _disk_bytes(file)
                left -= 1
                evicted += 1
    for leftover in _listing(directory / TMP):
        _delete_stale(leftover, now)
    return Swept(evicted, left, nbytes)


def _below(level: os.DirEntry[str]) -> Iterator[EntryFile]:
    for shard in _listing(level.path):
        for file in _listing(shard.path):
            try:
                status = file.stat(follow_symlinks=False)
            except OSError:
                continue
            yield EntryFile(level.name, file.name, Path(file.path), status.st_size, status.st_mtime)


def _listing(path: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            return list(found)
    except OSError:
        return []


def _disk_bytes(file: EntryFile) -> int:
    return -(-file.nbytes // _BLOCK_BYTES) * _BLOCK_BYTES


def _delete(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _delete_stale(file: os.DirEntry[str], now: float) -> None:
    with suppress(OSError):  # its writer has just finished with it
        if abs(now - file.stat(follow_symlinks=False).st_mtime) > _STALE_SECONDS:
            Path(file.path).unlink()
