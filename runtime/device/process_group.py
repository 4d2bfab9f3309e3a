"""Names the devices of several processes that share one client, from what they tell each other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

Homes = tuple[int, ...]  # devices of several processes, in the order of a program's replicas; () for one's own alone


class KeyValueStore(Protocol):
    """Where the processes of a process group put up what the others have to know."""

    def put(self, key: str, value: bytes) -> None:
        """For the others to find."""

    def news(self) -> Sequence[tuple[str, bytes]]:
        """What the others have put up since the last call."""


class ProcessGroup(NamedTuple):
    """The processes that a client of platform cpu spans, one device each."""

    rank: int
    size: int
    key_values: KeyValueStore


def hash_of(text: str) -> int:
    """A number to compare a text by that ranks tell each other, an int64."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
