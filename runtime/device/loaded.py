"""An executable that is ready to be launched, and what is said of its program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Loaded:
    """An executable on one device. `argument_bytes` ... `temporary_bytes` are those of one launch."""

    executable: Any
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    source: str  # "compile" or "disk"
    milliseconds: float


class About(NamedTuple):
    """What is said of a program: its key, its line, all lines of its ops, its size, and its largest result."""

    identity: str
    line: str
    lines: tuple[str, ...]
    ops: int
    donated: int
    largest: str
