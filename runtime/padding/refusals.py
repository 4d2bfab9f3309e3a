"""What could not be padded, and when to try it again."""

from __future__ import annotations

import threading
from collections.abc import Hashable


class Refused(Exception):
    """What a program computes on longer arrays is not known: the message says why."""


class RefusedAgain(Refused):
    """It was refused before, and is not tried this time."""


class Refusals:
    """How often in turn things were refused, and why the last time. After the first `fewest` times, a thing is tried
    again only where that count is a power of two. Those refused first are forgotten beyond `most` things. Methods may
    be called from any thread."""

    def __init__(self, fewest: int, most: int) -> None:
        self._fewest = fewest
        self._most = most
        self._lock = threading.Lock()  # guards what follows
        self._known: dict[Hashable, tuple[int, str]] = {}

    def check(self, thing: Hashable) -> None:
        """Raises RefusedAgain where the thing is not to be tried this time."""
        with self._lock:
            count, reason = self._known.get(thing, (0, ""))
            if count >= self._fewest and count & (count - 1):
                self._known[thing] = count + 1, reason
                raise RefusedAgain(reason)

    def note(self, thing: Hashable, reason: str, times: int = 1) -> None:
        """The thing was tried and refused, which counts as so many times."""
        with self._lock:
            self._known[thing] = self._known.get(thing, (0, ""))[0] + times, reason
            if len(self._known) > self._most:
                del self._known[next(iter(self._known))]

    def forget(self, thing: Hashable) -> None:
        """The thing was not refused."""
        with self._lock:
            self._known.pop(thing, None)
