"""The store: returns the bytes that some process built for a key, or builds them.

No method raises for what the disk or another user does: an unusable directory is a store that keeps nothing.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, final

from . import catalog
from .entry import CacheEntry, DamagedEntry, Note, encode
from .files import UNREADABLE, cause_of, read_entry
from .flight import Flights, KeyLock, Lease
from .key import Key
from .trust import make_private

MAX_BYTES = 10 * 2**30
MAX_ENTRIES = 100_000
_TOUCH_SECONDS = 60.0
_WAIT_LOG_SECONDS = 10.0
_WAIT_LIMIT_SECONDS = 3600.0
_NAMED_DAMAGES = 3

T = TypeVar("T")

_log = logging.getLogger("torchtpu.compiler_cache")


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts since the store was opened; `saved_ms` is what the entries that were hit once took to build."""

    hits: int = 0
    misses: int = 0
    waits: int = 0
    builds: int = 0
    stored: int = 0
    damaged: int = 0
    discarded: int = 0
    evicted: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    saved_ms: float = 0.0


class Store(ABC):
    """What every store does; `get_or_build` runs one build per key at a time, whether or not anything is kept."""

    def __init__(self) -> None:
        self._flights = Flights()
        self._counting = threading.Lock()
        self._stats = Stats()  # guarded by _counting

    @property
    @abstractmethod
    def keeps(self) -> bool:
        """Whether anything may be found here; where not, a caller may spare making keys and payloads."""

    @abstractmethod
    def get(self, key: Key) -> bytes | None:
        """The payload stored under `key`, unchanged, or None."""

    @abstractmethod
    def has(self, key: Key) -> bool:
        """Whether a payload is stored under `key`, as far as can be said without reading it."""

    @abstractmethod
    def put(self, key: Key, payload: bytes, note: Note | None = None) -> bool:
        """Stores `payload`; whether it is now on disk.  `note` is shown to people and is no part of the key."""

    @abstractmethod
    def discard(self, key: Key, reason: str) -> None:
        """Forgets an entry that was read unchanged but that its user could not load; logged and counted."""

    @final
    def load(self, key: Key, decode: Callable[[bytes], T]) -> T | None:
        """What `decode` makes of the payload stored under `key`.

        None where there is none, or where `decode` raises ValueError: the entry is then forgotten.
        """
        payload = self.get(key)
        if payload is None:
            return None
        try:
            return decode(payload)
        except (ValueError, RecursionError, MemoryError) as error:
            self.discard(key, f"{type(error).__name__}: {error}")
            return None

    @final
    def get_or_build(self, key: Key, build: Callable[[], bytes], note: Note | None = None) -> bytes:
        """The stored payload, or what `build` returns, which is then stored.

        Of all threads and processes that ask for one key, one builds and the others wait for it.  Raises what `build`
        raises; whoever waited for a failed or killed build then builds.  `build` may itself use this store, and add to
        `note`.
        """
        payload = self.get(key)
        if payload is not None:
            return payload
        payload, is_own = self._flights.build(key.digest, lambda: self._build(key, build, {} if note is None else note))
        if not is_own:
            self._count(waits=1)
        return payload

    def stats(self) -> Stats:
        """What this process did with the store so far."""
        with self._counting:
            return self._stats

    def _build(self, key: Key, build: Callable[[], bytes], note: Note) -> bytes:
        self._count(builds=1)
        return build()

    def _count(self, **more: float) -> None:
        with self._counting:
            self._stats = replace(self._stats, **{name: getattr(self._stats, name) + n for name, n in more.items()})


@final
class NullStore(Store):
    """Keeps nothing; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason

    @property
    def keeps(self) -> bool:
        return False

    def get(self, key: Key) -> bytes | None:
        self._count(misses=1)
        return None

    def has(self, key: Key) -> bool:
        return False

    def put(self, key: Key, payload: bytes, note: Note | None = None) -> bool:
        return False

    def discard(self, key: Key, reason: str) -> None:
        self._count(discarded=1)


class _Damages:
    """What a process found damaged: a log line about each of the first few, the others in one about them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the count
        self._count = 0
        self._process = os.getpid()

    def note(self, message: str) -> None:
        with self._lock:
            self._count += 1
            is_named = self._count <= _NAMED_DAMAGES
        _log.log(logging.WARNING if is_named else logging.DEBUG, "cache: %s", message)

    def sum_up(self) -> None:
        if self._count > _NAMED_DAMAGES and os.getpid() == self._process:
            _log.warning(
                "cache: %d entries were damaged or did not load; the first %d were named", self._count, _NAMED_DAMAGES
            )


@final
class DirectoryStore(Store):
    """A directory of entries, shared by every process of one user, and read-only layers below it.

    `directory` is None where only the layers may be read.  With `writes` False nothing on disk is changed.  Both are
    trusted as they are: `open_store` is what looks at who may write to them.
    """

    def __init__(
        self,
        directory: str | Path | None,
        *,
        layers: tuple[str | Path, ...] = (),
        writes: bool = True,
        max_bytes: int = MAX_BYTES,
        max_entries: int = MAX_ENTRIES,
    ) -> None:
        super().__init__()
        self.directory = None if directory is None else Path(directory).absolute()
        self.layers = tuple(Path(layer).absolute() for layer in layers)
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self._locks = KeyLock(Path() if self.directory is None else self.directory / catalog.LOCKS)
        self._writes = writes and directory is not None
        self._unswept: int | None = None  # bytes written since this process last swept
        self._said: set[str] = set()
        self._refused: set[str] = set()  # digests that were discarded and are not yet stored anew
        self._damages = _Damages()
        weakref.finalize(self, self._damages.sum_up)  # at the end of the process, if not before

    @property
    def keeps(self) -> bool:
        return True

    def get(self, key: Key) -> bytes | None:
        entry = self._read(key)
        if entry is None:
            self._count(misses=1)
            if _log.isEnabledFor(logging.DEBUG):
                self._log_miss(key)
            return None
        saved = entry.note.get("build_ms")
        self._count(hits=1, saved_ms=saved if isinstance(saved, int | float) else 0.0)
        return entry.payload

    def has(self, key: Key) -> bool:
        paths = (catalog.entry_path(directory, key.kind, key.digest) for directory in self._directories())
        return key.digest not in self._refused and any(path.exists() for path in paths)

    def put(self, key: Key, payload: bytes, note: Note | None = None) -> bool:
        stored = self._publish(key, encode(key, payload, note or {}), payload)
        self._sweep_if_due()
        return stored

    def discard(self, key: Key, reason: str) -> None:
        self._count(discarded=1)
        self._damages.note(f"{key.kind} {key.digest[:12]} does not load ({reason}); it will be built again")
        self._refused.add(key.digest)
        self._forget(key)

    def nearest(self, key: Key) -> catalog.Nearest | None:
        """The local entry whose key differs from `key` in the fewest parts."""
        return None if self.directory is None else catalog.nearest(self.directory, key)

    def find(self, kind: str, digest: str) -> CacheEntry | None:
        """The undamaged entry of that name, from the directory or a layer; None where there is none."""
        for directory in self._directories():
            with suppress(*UNREADABLE):
                path = catalog.entry_path(directory, kind, digest)
                return read_entry(path, named_by_user=directory is not self.directory)
        return None

    def entries(self) -> Iterator[catalog.EntryFile]:
        """Every local entry, in no order."""
        return iter(()) if self.directory is None else catalog.entries(self.directory)

    def damaged(self) -> Iterator[tuple[catalog.EntryFile, str]]:
        """Every local entry that is not whole and unchanged, and why; reads all of them."""
        return iter(()) if self.directory is None else catalog.damaged(self.directory)

    def prune(self, max_bytes: int | None = None) -> catalog.Swept:
        """Deletes the entries used longest ago until the rest fits; by default into the store's own bound."""
        if self.directory is None or not self.may_write():
            return catalog.Swept(0, 0, 0)
        swept = catalog.sweep(self.directory, self.max_bytes if max_bytes is None else max_bytes, self.max_entries)
        self._count(evicted=swept.evicted)
        return swept

    def may_write(self) -> bool:
        """Whether entries are written where the disk takes them."""
        return self._writes

    def _build(self, key: Key, build: Callable[[], bytes], note: Note) -> bytes:
        lock = self._wait_for_turn(key)
        if isinstance(lock, bytes):
            return lock
        try:
            self._count(builds=1)
            started = time.perf_counter()
            payload = build()
            timed = {"build_ms": round((time.perf_counter() - started) * 1000, 3), **note}
            self._publish(key, encode(key, payload, timed), payload)
        finally:
            if lock is not None:
                self._locks.unlock(*lock)
        self._sweep_if_due()
        return payload

    def _wait_for_turn(self, key: Key) -> tuple[str, int] | bytes | None:
        """The held lock (its name and descriptor), or the payload that another process built meanwhile, or None where
        there can be no lock."""
        started, pause, said, made = time.monotonic(), 0.002, False, False
        # A holder that shows no sign of life keeps its lock; those who waited for it go on to the next one, so that of
        # them too only one builds.
        name, lease, silent = key.digest, Lease(), 0
        while self.may_write():
            try:
                lock = self._locks.try_lock(name)
            except OSError as error:
                if isinstance(error, FileNotFoundError) and not made and self._makes(self._locks.directory):
                    made = True
                    continue
                self._cannot_write(error)
                return None
            # After the lock, not before: the last holder may have published in between.
            entry = self._read(key)
            if entry is not None:
                if lock is not None:
                    self._locks.unlock(name, lock)
                self._count(waits=1)
                return entry.payload
            if lock is not None:
                return name, lock
            waited = time.monotonic() - started
            if waited > _WAIT_LIMIT_SECONDS:
                return None
            if waited > _WAIT_LOG_SECONDS and not said:
                said = True
                _log.info("cache: waiting for another process that builds %s %s", key.kind, key.digest[:12])
            time.sleep(pause)
            if lease.is_over(self._locks.sign_of_life(name), pause):
                silent += 1
                name, lease = f"{key.digest}.{silent}", Lease()
                _log.info("cache: not waiting for a stopped process to build %s %s", key.kind, key.digest[:12])
            pause = min(pause * 1.5, 0.1)
        return None

    def _directories(self) -> tuple[Path, ...]:
        return self.layers if self.directory is None else (self.directory, *self.layers)

    def _read(self, key: Key) -> CacheEntry | None:
        if key.digest in self._refused:
            return None
        for directory in self._directories():
            is_layer = directory is not self.directory
            path = catalog.entry_path(directory, key.kind, key.digest)
            renew = _TOUCH_SECONDS if self.may_write() and not is_layer else None
            try:
                entry = read_entry(path, key, named_by_user=is_layer, renew_seconds=renew)
            except FileNotFoundError:
                continue
            except UNREADABLE as error:
                self._count(damaged=1)
                if str(path) not in self._said:
                    self._said.add(str(path))
                    self._damages.note(f"{path} is not used: {cause_of(error)}")
                if isinstance(error, DamagedEntry) and not is_layer:
                    self._forget(key)
                continue
            self._count(read_bytes=len(entry.payload))
            return entry
        return None

    def _publish(self, key: Key, head: bytes, payload: bytes) -> bool:
        if self.directory is None or not self.may_write() or len(head) + len(payload) > self.max_bytes:
            return False
        path = catalog.entry_path(self.directory, key.kind, key.digest)
        temporary = self.directory / catalog.TMP / f"{os.getpid()}-{secrets.token_hex(8)}"
        if not (self._makes(temporary.parent) and self._makes(path.parent)):
            return False
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                with os.fdopen(descriptor, "wb", buffering=0) as file:
                    for piece in (head, payload):
                        view = memoryview(piece)
                        while view:
                            view = view[file.write(view) :]
                # Without fsync: what a power cut tears, the checksum refuses.
                temporary.replace(path)
            except BaseException:
                temporary.unlink()
                raise
        except OSError as error:
            self._cannot_write(error)
            return False
        with self._counting:
            self._unswept = None if self._unswept is None else self._unswept + len(head) + len(payload)
        self._refused.discard(key.digest)
        self._count(stored=1, written_bytes=len(head) + len(payload))
        return True

    def _makes(self, directory: Path) -> bool:
        """Whether `directory` is there now."""
        try:
            make_private(directory)
        except OSError as error:
            self._cannot_write(error)
            return False
        return True

    def _forget(self, key: Key) -> None:
        if self.directory is None or not self.may_write():
            return
        try:
            catalog.entry_path(self.directory, key.kind, key.digest).unlink(missing_ok=True)
        except OSError as error:
            self._cannot_write(error)

    def _cannot_write(self, error: OSError) -> None:
        """Says once for each reason that something is not kept; what comes next is tried all the same."""
        reason = error.strerror or str(error)
        if reason not in self._said:
            self._said.add(reason)
            _log.warning("cache: not everything is stored in %s: %s", self.directory, reason)

    def _sweep_if_due(self) -> None:
        with self._counting:
            due = self.may_write() and (self._unswept is None or self._unswept > self.max_bytes // 50)
            if due:
                self._unswept = 0
        if not due:
            return
        try:
            make_private(self._locks.directory)
            with self._locks.held("sweep") as is_free:
                if is_free:
                    self.prune()
                    self._locks.sweep()
        except OSError as error:
            self._cannot_write(error)

    def _log_miss(self, key: Key) -> None:
        near = self.nearest(key)
        if near is None:
            _log.debug("cache: miss %s %s, the first of its kind", key.kind, key.digest[:12])
            return
        parts, found = ", ".join(part.name for part in near.differences), near.entry.digest[:12]
        _log.debug("cache: miss %s %s, nearest %s differs in %s", key.kind, key.digest[:12], found, parts)
