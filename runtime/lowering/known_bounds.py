"""The bounds that padded ops were traced for: what is right between some is right between narrower ones.

Programs bound the sizes of an op by what else follows from these: by a size that is one more, or a few less. Without
this each such program would have its ops traced anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Bounds: TypeAlias = tuple[tuple[int, int, int], ...]
"""The least and the most that each variable is, and how long a dimension of that size is in memory."""

_MOST_KINDS = 1 << 12


class KnownBounds:
    """Bounds of ops, by descriptions of these that hold their own. Used under one lock."""

    def __init__(self) -> None:
        self._known: dict[str, list[Bounds]] = {}
        self._apart: set[str] = set()

    def note(self, key: str, bounds: Bounds) -> None:
        """The op that `key` describes was traced for these bounds."""
        if len(self._known) >= _MOST_KINDS:
            self._known.clear()
            self._apart.clear()
        others = self._known.get(_kind(key, bounds), ())
        self._known[_kind(key, bounds)] = [*(other for other in others if not _hold(bounds, other)), bounds]

    def wider(self, key: str, bounds: Bounds) -> str | None:
        """The description of the op with bounds that were traced and hold these; None where none were."""
        known = self._known.get(_kind(key, bounds), ())
        found = next((other for other in known if _hold(other, bounds)), None)
        return None if found is None else with_bounds(key, bounds, found)

    def around(self, key: str, bounds: Bounds) -> Bounds | None:
        """Bounds that hold these and those that were traced; None where the op is to be traced for its own."""
        kind = _kind(key, bounds)
        known = self._known.get(kind)
        return _around([bounds, *known]) if known and kind not in self._apart else None

    def keep_apart(self, key: str, bounds: Bounds) -> None:
        """The op that `key` describes is to be traced for its own bounds from now on."""
        self._apart.add(_kind(key, bounds))


def with_bounds(key: str, bounds: Bounds, other: Bounds) -> str:
    """The description of an op with other bounds."""
    return key.replace(f" padding {bounds} ", f" padding {other} ", 1)


def _kind(key: str, bounds: Bounds) -> str:
    return with_bounds(key, bounds, tuple((0, 0, capacity) for _, _, capacity in bounds))


def _hold(bounds: Bounds, others: Bounds) -> bool:
    return all(own[0] <= other[0] and other[1] <= own[1] for own, other in zip(bounds, others, strict=True))


def _around(several: Iterable[Bounds]) -> Bounds:
    return tuple((min(b[0] for b in each), max(b[1] for b in each), each[0][2]) for each in zip(*several, strict=True))
