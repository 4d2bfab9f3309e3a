"""Makes sure that one thread of one process builds a key while the others wait for its result.

Threads of one process meet in `Flights`, processes in `KeyLock`.  A lock is a flock, which the kernel drops when its
holder dies, so nobody waits for a killed builder; for one that is stopped, nobody waits longer than a lease.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

RENEW_SECONDS = 1.0
LEASE_SECONDS = 10.0
_STEP_NANOSECONDS = 2 * 10**9  # some file systems keep every other second

# What our thread is inside while it holds a mutex: an embedder whose finalizers may wait for a build keeps them off.
undisturbed: Callable[[], AbstractContextManager[object]] = nullcontext


class Flight:
    """One build in progress: the thread that builds, and the payload once there is one."""

    def __init__(self) -> None:
        self.builder = threading.get_ident()
        self.payload: bytes | None = None
        self._landed = threading.Event()

    def wait(self) -> bytes | None:
        """What the builder built; None where it failed and somebody else has to build."""
        self._landed.wait()
        return self.payload

    def land(self, payload: bytes | None) -> None:
        self.payload = payload
        self._landed.set()


class Flights:
    """The builds in progress in this process, by digest."""

    def __init__(self) -> None:
        self._reset()
        renew = weakref.WeakMethod(self._reset)
        os.register_at_fork(after_in_child=lambda: (method := renew()) and method())

    def build(self, digest: str, build: Callable[[], bytes]) -> tuple[bytes, bool]:
        """The payload, and whether this call built it.

        At most one thread runs `build` at a time.  What it raises reaches its own caller only; a waiter then builds.
        """
        while True:
            with self._mutex:
                flight = self._flights.get(digest)
                leads = flight is None
                if flight is None:
                    flight = self._flights[digest] = Flight()
            if leads:
                return self._lead(digest, flight, build), True
            if flight.builder == threading.get_ident():
                return build(), True  # a build that needs its own key: waiting for itself would never end
            payload = flight.wait()
            if payload is not None:
                return payload, False

    def _lead(self, digest: str, flight: Flight, build: Callable[[], bytes]) -> bytes:
        payload = None
        try:
            payload = build()
            return payload
        finally:
            with self._mutex:
                self._flights.pop(digest, None)
            flight.land(payload)

    def _reset(self) -> None:
        # A forked child has none of the threads that build or hold the mutex.
        self._mutex = threading.Lock()
        self._flights: dict[str, Flight] = {}


class Lease:
    """How long a lock's holder has shown no sign of life, as one who waits for it sees it.

    Counted in the waiter's own turns and not by a clock: clocks jump, and a waiter that was stopped together with the
    holder must not hold that against it.
    """

    def __init__(self) -> None:
        self._sign: tuple[int, int] | None = None
        self._silence = 0.0

    def is_over(self, sign: tuple[int, int] | None, turn_seconds: float) -> bool:
        """Whether the holder is not to be waited for, after one more turn, at whose end this `sign` was seen."""
        self._silence = self._silence + turn_seconds if sign == self._sign else 0.0
        self._sign = sign
        return self._silence >= LEASE_SECONDS


class KeyLock:
    """The lock files below one directory; a lock file exists only while it is held, or since its holder was killed.

    A thread renews the lock files that this process holds, so that others tell a builder from one that is stopped.

    Kept to flock itself rather than a lock library: the lock file is deleted at release, which is safe only with the
    inode check below, and a forked DataLoader worker has to drop its copy of a held descriptor, or it would keep the
    lock of a parent that died.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._opened: set[int] = set()
        self._begin()
        drop = weakref.WeakMethod(self._drop_inherited)
        os.register_at_fork(after_in_child=lambda: (method := drop()) and method())

    def try_lock(self, name: str) -> int | None:
        """A descriptor that holds the lock, or None where another holds it; OSError where no lock can be made."""
        path = self.directory / name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._opened.add(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between our open and our flock the last holder may have deleted this file: such a lock excludes nobody.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                self._keep_renewed(descriptor)
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError:
            self._close(descriptor)
            raise
        self._close(descriptor)
        return None

    def unlock(self, name: str, descriptor: int) -> None:
        """Gives the lock back and deletes its file."""
        with suppress(OSError):  # what stays is an empty file, and the sweep takes it
            (self.directory / name).unlink()
        self._close(descriptor)

    def sign_of_life(self, name: str) -> tuple[int, int] | None:
        """What changes from second to second while the lock's holder runs; None where nobody holds it."""
        try:
            status = (self.directory / name).stat(follow_symlinks=False)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    @contextmanager
    def held(self, name: str) -> Iterator[bool]:
        """Whether the lock was free; it is held inside the block where it was."""
        descriptor = self.try_lock(name)
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                self.unlock(name, descriptor)

    def sweep(self) -> None:
        """Deletes the lock files of killed holders."""
        for file in self.directory.iterdir():
            with suppress(OSError):  # a directory, say
                descriptor = self.try_lock(file.name)
                if descriptor is not None:
                    self.unlock(file.name, descriptor)

    def _begin(self) -> None:
        self._mutex = threading.Lock()  # guards what follows; no descriptor is closed while it is renewed
        self._renewed: set[int] = set()
        self._renewer: threading.Thread | None = None

    def _keep_renewed(self, descriptor: int) -> None:
        with self._mutex:
            self._renewed.add(descriptor)
            if self._renewer is None:
                self._renewer = threading.Thread(target=self._renew, name="torchtpu-cache-locks", daemon=True)
                self._renewer.start()

    def _renew(self) -> None:
        while True:
            time.sleep(RENEW_SECONDS)
            with undisturbed(), self._mutex:
                if not self._renewed:
                    self._renewer = None
                    return
                for descriptor in self._renewed:
                    with suppress(OSError):  # then who waits builds too
                        # Not the time of any clock: it is to change, whatever becomes of the clock.
                        status = os.fstat(descriptor)
                        os.utime(descriptor, ns=(status.st_atime_ns, status.st_mtime_ns + _STEP_NANOSECONDS))

    def _close(self, descriptor: int) -> None:
        with self._mutex:
            self._renewed.discard(descriptor)
            self._opened.discard(descriptor)
            os.close(descriptor)

    def _drop_inherited(self) -> None:
        self._begin()  # a forked child has no thread that renews, or holds the mutex
        for descriptor in list(self._opened):
            self._close(descriptor)
