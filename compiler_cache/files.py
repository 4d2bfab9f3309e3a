"""Opens and reads files of the cache safely, whatever somebody may have put in their place.

Every file of a cache directory, and every bundle, is opened here.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from .entry import HEAD_BYTES, CacheEntry, DamagedEntry, Lengths, decode, read_lengths
from .key import Key
from .trust import untrusted_file

# What reading an entry may raise: it is damaged, not to be had, or larger than this machine's memory.
UNREADABLE = (DamagedEntry, OSError, MemoryError)

_PLAIN = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # O_NONBLOCK: not waiting for a pipe's writer
_HOLES_BYTES = 64 * 2**20
_MOST_HOLES = 64  # times what is there


@contextmanager
def opened(path: Path, *, follows_links: bool = False) -> Iterator[tuple[BinaryIO, os.stat_result]]:
    """The regular file at `path`; DamagedEntry where it is none, or one so full of holes that reading it takes more
    memory than there is to read."""
    descriptor = os.open(path, _PLAIN if follows_links else _PLAIN | os.O_NOFOLLOW)
    try:
        status = _readable(descriptor)
        file = os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
    with file:
        yield file, status


@contextmanager
def opened_entry(path: Path, *, named_by_user: bool = False) -> Iterator[tuple[BinaryIO, bytes, Lengths]]:
    """An entry's file behind its head, that head, and the lengths that it announces, which are those of the file.

    PermissionError where somebody else may have put it there (`named_by_user` as `untrusted` has it).
    """
    problem = untrusted_file(path.parent, path.parent.lstat(), named_by_user=named_by_user)
    with opened(path) as (file, status):
        problem = problem or untrusted_file(path, status, named_by_user=named_by_user)
        if problem is not None:
            raise PermissionError(problem)
        head = file.read(HEAD_BYTES)
        lengths = read_lengths(head)
        if status.st_size != HEAD_BYTES + sum(lengths):
            raise DamagedEntry(f"{status.st_size} bytes long, {HEAD_BYTES + sum(lengths)} announced")
        yield file, head, lengths


def read_entry(
    path: Path, expected: Key | None = None, *, named_by_user: bool = False, renew_seconds: float | None = None
) -> CacheEntry:
    """The entry at `path`; DamagedEntry or OSError where it cannot be read whole, unchanged and by nobody else's hand.

    The use is noted in its modification time where the last was more than `renew_seconds` ago.
    """
    with opened_entry(path, named_by_user=named_by_user) as (file, head, lengths):
        entry = decode(head, file.read(lengths.key + lengths.note), file.read(lengths.payload), expected)
        if renew_seconds is not None:
            with suppress(OSError):  # on a disk that has become read-only the entry is as good as before
                if abs(time.time() - os.fstat(file.fileno()).st_mtime) > renew_seconds:
                    os.utime(file.fileno())
    return entry


def cause_of(error: BaseException) -> str:
    """The error in words; some have none of their own."""
    return str(error) or type(error).__name__


def _readable(descriptor: int) -> os.stat_result:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise DamagedEntry("not a regular file")
    if _is_hollow(descriptor, status.st_size):
        raise DamagedEntry(f"{status.st_size} bytes long, and nearly all of them are holes")
    return status


def _is_hollow(descriptor: int, nbytes: int) -> bool:
    """Whether far less is in a file than it is long, as in no entry that was only copied or compressed."""
    if nbytes <= _HOLES_BYTES:
        return False
    present, at = 0, 0
    try:
        while _MOST_HOLES * present < nbytes:
            at = os.lseek(descriptor, at, os.SEEK_DATA)
            end = os.lseek(descriptor, at, os.SEEK_HOLE)
            present, at = present + end - at, end
    except OSError as error:
        return error.errno == errno.ENXIO  # there is no data behind `at`; else it cannot be told
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)
    return False
