"""Pending checks: raise the op's error at the next read of what depends on a failed check.

Sets of inputs and of checks are ints: bit n stands for number n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from torchtpu.runtime.device.client import Client
from torchtpu.runtime.device.loaded import About
from torchtpu.runtime.ir.calls import full_name
from torchtpu.runtime.lowering.emit import CHECKS_PER_WORD, Check


class CheckResults:
    """Which of one launch's checks failed. Threads may race in it: each of them finds the same answer.

    `failed` is the array of `lower.failed_aval`; `pending` are the guards of the launch's inputs; `poisoned` are the
    inputs that had failed and were zeros instead. `run` tells which run of the program this was, once somebody asks,
    and `message_of` what a check says of it.
    """

    def __init__(
        self,
        client: Client,
        failed: Any,
        checks: Sequence[Check],
        pending: Mapping[PendingCheck, int],
        poisoned: int,
        run: Callable[[], str],
        message_of: Callable[[Check], str],
    ) -> None:
        self._client = client
        self._words = failed  # None once read
        self._checks = checks
        self._pending = pending
        self._poisoned = poisoned
        self._run = run
        self._message_of = message_of
        self._failed = 0
        self._raised = 0
        self._guards: list[PendingCheck] = []

    def guarded_by(self, guards: Iterable[PendingCheck]) -> None:
        """The guards that hang on this outcome; until it is known, they keep those before them."""
        self._guards = list(guards)

    def close(self) -> bool:
        """Once the outcome is known: its guards let go of what has passed. Whether a check has failed."""
        guards, self._guards = self._guards, []
        for guard in guards:
            guard.let_go()
        return bool(self.failed())

    def is_known(self) -> bool:
        """Whether `failed` answers without waiting."""
        return self._words is None or self._client.is_ready(self._words)

    def is_settled(self) -> bool:
        """Whether every check is known to have passed, or its error was raised. Never waits."""
        return self.is_known() and not self.failed() & ~self._raised

    def failed(self) -> int:
        """The checks that failed; waits for them."""
        array = self._words
        if array is not None:
            words = self._client.download(array).tolist()
            self._failed = sum(word << i * CHECKS_PER_WORD for i, word in enumerate(words))
            self._words = None
            if not self._failed:
                self._pending, self._run, self._message_of = {}, str, str
        return self._failed

    def raise_first(self, checks: int) -> None:
        """Raises the error of the first of these checks that failed, in program order."""
        failed = self.failed() & checks
        if failed:
            self._raised |= failed
            raise self.error_of(first_of(failed, self._checks))

    def error_of(self, check: Check) -> Exception:
        """What to raise for a check that failed."""
        run = self._run()
        place = recorded_at(check.line, "" if run == f"entered from {check.line}" else run)
        return check.error(f"{self._message_of(check)} ({full_name(check.op)} {place})")

    def raise_unread(self) -> None:
        """Raises what no read has raised, unless an earlier failure, which has an error of its own, led to it."""
        failed = self.failed() & ~self._raised
        bad = self._poisoned
        if failed:
            bad |= sum(inputs for guard, inputs in self._pending.items() if guard.has_failed())
        led = sum(1 << i for i, check in enumerate(self._checks) if check.sources & bad)
        self.raise_first(failed & ~led)


class PendingCheck:
    """Hangs on a buffer that depends on checks which are not known to have passed. Threads may race in it."""

    __slots__ = ("_checks", "_earlier", "_outcome")

    def __init__(self, outcome: CheckResults | None, checks: int, earlier: Iterable[PendingCheck]) -> None:
        self._outcome = outcome
        self._checks = checks
        self._earlier = list(earlier)

    def pending(self) -> list[PendingCheck]:
        """The guards that stand for this one now: none where all checks have passed. Never waits."""
        outcome = self._outcome
        if outcome is not None:
            if not outcome.is_known() or outcome.failed() & self._checks:
                return [self]
            self._outcome = None
        self.let_go()
        return self._earlier

    def let_go(self) -> None:
        """Forgets earlier guards whose checks have passed."""
        if self._earlier:
            self._earlier = list(dict.fromkeys(g for guard in self._earlier for g in guard.pending()))

    def has_failed(self) -> bool:
        """Whether a check has failed; waits for all of them."""
        return any(guard._outcome.failed() & guard._checks for guard in self._in_order() if guard._outcome)

    def resolve(self) -> None:
        """Waits for the checks and raises the error of the first that failed, in program order."""
        for guard in self._in_order():
            if guard._outcome:
                guard._outcome.raise_first(guard._checks)

    def _in_order(self) -> Iterable[PendingCheck]:
        """This guard and all before it, each once, what a guard depends on before it."""
        found: dict[PendingCheck, None] = {}
        waiting = [(self, False)]
        while waiting:
            guard, is_done = waiting.pop()
            if is_done:
                found[guard] = None
            elif guard not in found:
                waiting.append((guard, True))
                waiting += [(earlier, False) for earlier in reversed(guard._earlier)]
        return found


def first_of(failed: int, checks: Sequence[Check]) -> Check:
    """The first of these checks, in program order."""
    return checks[(failed & -failed).bit_length() - 1]


def unsettled(guards: Iterable[tuple[PendingCheck, int]]) -> dict[PendingCheck, int]:
    """The guards that these stand for now, with the inputs that each of them hangs on."""
    given: dict[PendingCheck, int] = {}
    for guard, inputs in guards:
        given[guard] = given.get(guard, 0) | inputs
    found: dict[PendingCheck, int] = {}
    for guard, inputs in given.items():
        for waiting in guard.pending():
            found[waiting] = found.get(waiting, 0) | inputs
    return found


def recorded_at(line: str, run: str) -> str:
    """Where an op stream was recorded, and how a run of it that came from elsewhere differs."""
    return f"first recorded at {line}; this run {run}" if run else f"recorded at {line}"


def region_error(error: BaseException, about: About, run: str, done: str) -> BaseException:
    """The error of a region that could not be `done`; it says how large it was."""
    text = f"the region {recorded_at(about.line, run)} ({about.ops} ops) could not be {done}: {error}"
    kind = torch.OutOfMemoryError if "RESOURCE_EXHAUSTED" in str(error) else RuntimeError
    failure = kind(f"{text} (its largest result: {about.largest})")
    failure.__cause__ = error
    return failure
