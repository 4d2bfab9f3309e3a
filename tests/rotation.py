"""The seed of a run: it changes with the commit, so that each landing checks another part of what takes too long.

`pytest --rotation N` repeats the run of a commit whose number was N.
"""

from __future__ import annotations

import subprocess
import zlib
from pathlib import Path

WITHOUT_GIT = 0


def number_of_commit() -> int:
    """A number made of the name of the commit that is checked out; a constant where git knows none."""
    root = Path(__file__).parent.parent
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return WITHOUT_GIT
    return zlib.crc32(found.stdout.strip().encode()) % 1_000_000
