"""Says why code from a path should not be run, if there is a reason.

An executable is native code, so a path is trusted when nobody but root and the current user can change what it names.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

_SYMLINK_LIMIT = 40
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def untrusted(directory: Path, *, named_by_user: bool = False) -> str | None:
    """Why no code may be loaded from `directory`, or None where it may.

    Every component, and every symbolic link on the way, has to belong to root or the current user and be writable by
    nobody else; a directory above it may be writable where the sticky bit keeps others from renaming (as /tmp).
    `named_by_user` is for a directory the user has declared trusted: its owner and group are the user's choice, and
    only what everybody may write to is refused.
    """
    pending = list(reversed(directory.absolute().parts[1:]))
    here, links = Path("/"), 0
    try:
        problem = _problem(here, here.lstat(), named_by_user, is_last=False)
        while pending and problem is None:
            name = pending.pop()
            if name == "..":
                here = here.parent
                continue
            component = here / name
            status = component.lstat()
            if stat.S_ISLNK(status.st_mode):
                links += 1
                if links > _SYMLINK_LIMIT:
                    return f"{directory} goes through more than {_SYMLINK_LIMIT} symbolic links"
                problem = None if named_by_user else _owner_problem(component, status)
                target = component.readlink()
                here = Path("/") if target.is_absolute() else here
                pending.extend(reversed(target.parts[1:] if target.is_absolute() else target.parts))
                continue
            here = component
            problem = _problem(here, status, named_by_user, is_last=False)
        return problem or _problem(here, here.lstat(), named_by_user, is_last=True)
    except OSError as error:
        return f"{directory} cannot be examined ({error.strerror})"


def untrusted_file(path: Path, status: os.stat_result, *, named_by_user: bool = False) -> str | None:
    """Why the opened file (or the directory directly above it) with this `status` must not be used, or None."""
    return _problem(path, status, named_by_user, is_last=True, is_directory=stat.S_ISDIR(status.st_mode))


def make_private(directory: Path) -> None:
    """Makes `directory` and what is missing above it, each for the current user alone."""
    try:
        directory.mkdir(0o700)
    except FileExistsError:
        pass
    except FileNotFoundError:
        if directory.parent == directory:
            raise
        make_private(directory.parent)
        with suppress(FileExistsError):
            directory.mkdir(0o700)


def _problem(
    path: Path, status: os.stat_result, named_by_user: bool, *, is_last: bool, is_directory: bool = True
) -> str | None:
    if is_directory and not stat.S_ISDIR(status.st_mode):
        return f"{path} is not a directory"
    if not is_directory and not stat.S_ISREG(status.st_mode):
        return f"{path} is not a regular file"
    refused = stat.S_IWOTH if named_by_user else _OTHERS_WRITE
    if status.st_mode & refused and (is_last or not status.st_mode & stat.S_ISVTX):
        return f"others may write to {path} (mode {stat.S_IMODE(status.st_mode):04o}); chmod go-w it"
    return None if named_by_user else _owner_problem(path, status)


def _owner_problem(path: Path, status: os.stat_result) -> str | None:
    if status.st_uid in (0, os.geteuid()):
        return None
    return f"{path} belongs to uid {status.st_uid}, not to root or to uid {os.geteuid()}"
