"""An executable that is ready to be launched, and what is said of its program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

# What a program is: a piece that regions share, a region compiled quickly, the usual form of one (or of a part of it),
# a region of repeated parts compiled whole, or one compiled with other options.
Tier = Literal["pieces", "quick", "usual", "whole", "swept"]


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
    """What is said of a program: its key, its line, all lines of its ops, its size, its largest result and its tier."""

    identity: str
    line: str
    lines: tuple[str, ...]
    ops: int
    donated: int
    largest: str
    tier: Tier = "usual"
