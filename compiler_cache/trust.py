"""Who may write here: in comes a path, out goes the reason not to run code from it, or None.

An executable is native code, so a path is trusted when nobody but root and the current user can change what it names.
"""

from __future__ import annotations

import os
import stat

_SYMLINK_LIMIT = 40
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def untrusted(directory: str, *, named_by_user: bool = False) -> str | None:
    """Why no code may be loaded from `directory`, or None where it may.

    Every component, and every symbolic link on the way, has to belong to root or the current user and be writable by
    nobody else; a directory above it may be writable where the sticky bit keeps others from renaming (as /tmp).
    `named_by_user` is for a directory the user has declared trusted: its owner and group are the user's choice, and
    only what everybody may write to is refused.
    """
    pending = _parts(os.path.join(os.getcwd(), directory))
    here, links = "/", 0
    try:
        problem = _problem(here, os.lstat(here), named_by_user, is_last=False)
        while pending and problem is None:
            name = pending.pop()
            if name == "..":
                here = os.path.dirname(here)
                continue
            component = os.path.join(here, name)
            status = os.lstat(component)
            if stat.S_ISLNK(status.st_mode):
                links += 1
                if links > _SYMLINK_LIMIT:
                    return f"{directory} goes through more than {_SYMLINK_LIMIT} symbolic links"
                problem = None if named_by_user else _owner_problem(component, status)
                target = os.readlink(component)
                here = "/" if target.startswith("/") else here
                pending.extend(_parts(target))
                continue
            here = component
            problem = _problem(here, status, named_by_user, is_last=False)
        return problem or _problem(here, os.lstat(here), named_by_user, is_last=True)
    except OSError as error:
        return f"{directory} cannot be examined ({error.strerror})"


def untrusted_file(path: str, status: os.stat_result, *, named_by_user: bool = False) -> str | None:
    """Why the opened file (or the directory directly above it) with this `status` must not be used, or None."""
    return _problem(path, status, named_by_user, is_last=True, is_directory=stat.S_ISDIR(status.st_mode))


def make_private(directory: str) -> None:
    """Makes `directory` and what is missing above it, each for the current user alone."""
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        pass
    except FileNotFoundError:
        make_private(os.path.dirname(directory))
        make_private(directory)


def _parts(path: str) -> list[str]:
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _problem(
    path: str, status: os.stat_result, named_by_user: bool, *, is_last: bool, is_directory: bool = True
) -> str | None:
    if is_directory and not stat.S_ISDIR(status.st_mode):
        return f"{path} is not a directory"
    if not is_directory and not stat.S_ISREG(status.st_mode):
        return f"{path} is not a regular file"
    refused = stat.S_IWOTH if named_by_user else _OTHERS_WRITE
    if status.st_mode & refused and (is_last or not status.st_mode & stat.S_ISVTX):
        return f"others may write to {path} (mode {stat.S_IMODE(status.st_mode):04o}); chmod go-w it"
    return None if named_by_user else _owner_problem(path, status)


def _owner_problem(path: str, status: os.stat_result) -> str | None:
    if status.st_uid in (0, os.geteuid()):
        return None
    return f"{path} belongs to uid {status.st_uid}, not to root or to uid {os.geteuid()}"
