"""Writes whole log lines to stderr."""

from __future__ import annotations

import sys


def write(line: str) -> None:
    """Writes one line; a closed stderr loses it."""
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return
