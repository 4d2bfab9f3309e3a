"""Guards: in comes the number of a launch's first failed check, out goes the op's error at the next read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .calls import full_name
from .lower import Check

if TYPE_CHECKING:
    from .pjrt import Client


class Guard:
    """Hangs on every buffer of a launch whose own checks, or whose inputs' checks, are not known to have passed.

    Threads may race in `pending` and `resolve`: each of them finds the same answer.
    """

    __slots__ = ("_checks", "_client", "_earlier", "_failed", "_first_failed", "was_raised")

    def __init__(self, client: Client, first_failed: Any, checks: Sequence[Check], earlier: Sequence[Guard]) -> None:
        self._client = client
        self._first_failed = first_failed  # None once read
        self._checks = checks
        self._earlier = earlier
        self._failed: Check | None = None
        self.was_raised = False

    def pending(self) -> list[Guard]:
        """The guards that stand for this one now: none where all checks have passed. Never waits."""
        earlier = unsettled(self._earlier) if self._earlier else []
        self._earlier = earlier
        if self._first_failed is not None and not self._client.is_ready(self._first_failed):
            return [self]
        self._read()
        if self._failed is not None:
            return [self]
        return earlier

    def resolve(self) -> None:
        """Waits for the checks and raises the error of the first that failed, in program order."""
        for guard in self._earlier:
            guard.resolve()
        self._read()
        failed = self._failed
        if failed is not None:
            self.was_raised = True
            raise failed.error(f"{failed.message} ({full_name(failed.op)} recorded at {failed.line})")

    def _read(self) -> None:
        array = self._first_failed
        if array is not None:
            number = int(self._client.download(array))
            self._failed = self._checks[number] if number >= 0 else None
            self._first_failed = None


def unsettled(guards: Iterable[Guard]) -> list[Guard]:
    """The distinct guards that these stand for now."""
    found: dict[int, Guard] = {}
    for guard in guards:
        for waiting in guard.pending():
            found[id(waiting)] = waiting
    return list(found.values())
