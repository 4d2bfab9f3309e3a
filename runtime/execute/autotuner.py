"""The ladder: in come launches of one region, out goes each in the form that runs it best by now.

What is quickly there runs first: in the first tier, until its launches have paid for compiling the usual form, which
then takes its place. A region that is launched often is compiled in other forms too, one at a time and when nothing
else is; then such a form and the one in use take turns a few times, each with the device to itself, and the faster one
stays.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol

from .executable import Launchable, LaunchContext

Words = tuple[str, ...]  # what is unusual about a form; () names the usual one
FIRST: Words = ("first",)  # the usual one in the first tier

_FIRST = 32  # launches before the form in use is timed
_TURNS = 7  # timed launches of each form, after one that warms caches up
_WINS = 6  # turns in which a form has to be faster than the one in use: a busy machine decides a few by chance
_LEAST_GAIN = 0.03  # what it has to save of the least time of the one in use


class Forms(Protocol):
    """The forms of one region, each something that can be launched."""

    def make(self, words: Words, *, is_needed_now: bool) -> Future[Any]:
        """The form of this name, once it is compiled."""

    def is_paid(self, launches: int) -> bool:
        """Whether so many launches in the first tier make the usual form worth compiling: not a question of time."""

    def promoted(self) -> list[str]:
        """Hears that the usual form takes the place of the first tier's; the rungs after it."""

    def is_due(self, words: Words, launches: int, seconds: float) -> bool:
        """Whether so many launches of so many seconds each (0: unknown) make this form worth compiling."""

    def has_to_be_usual(self) -> bool:
        """Whether only the usual form may be launched."""

    def is_fixed(self) -> bool:
        """Whether the form in use stays for now."""

    def is_quiet(self) -> bool:
        """Whether nothing is being compiled, which would disturb the clock."""

    def compared(self, own: tuple[Words, float], rival: tuple[Words, float], *, is_kept: bool) -> None:
        """Hears the seconds of the form in use and of a rival, and whether this one is kept in its stead."""

    def settled(self, words: Words) -> None:
        """Hears which form stays."""

    def bailed_out(self, error: Exception) -> None:
        """Hears that choosing a form failed: the one in use stays."""


class Ladder:
    """What a plan is given whose region has several forms; only one thread at a time launches it.

    `form` is the one in use, called `words`; each of `rungs` is a word that may name a faster one.
    """

    meets_others = False
    takes_padding = False

    def __init__(self, forms: Forms, words: Words, form: Launchable, rungs: Iterable[str]) -> None:
        self.form = form
        self._forms = forms
        self._words = words
        self._rungs = list(rungs)
        self._usual: Future[Any] | None = None
        if not words:
            self._usual = Future()
            self._usual.set_result(form)
        self._launches = 0
        self._seconds = 0.0  # of the form in use; 0 until it has been timed
        self._rival: Future[Any] | None = None
        self._times: tuple[list[float], list[float]] = [], []  # seconds of the form in use, and of its rival

    def launch(self, work: Any, context: LaunchContext) -> None:
        """Launches the form in use, or the one whose turn it is."""
        with context.recovering(work):
            self._launch(work, context)

    @property
    def is_prompt(self) -> bool:
        """Whether a launch now makes, times and awaits nothing."""
        form = self._prompt_form()
        return form is not None and bool(form.is_prompt)

    def _launch(self, work: Any, context: LaunchContext) -> None:
        if self._words == FIRST:
            self._try_to_promote()
        if self._words and self._forms.has_to_be_usual():
            if self._usual is None:
                self._usual = self._forms.make((), is_needed_now=True)
            self._usual.result().launch(work, context)
        elif self._words == FIRST or not self._rungs or self._forms.is_fixed():
            self.form.launch(work, context)
        else:
            self._launches += 1
            self._climb(work, context)

    def _prompt_form(self) -> Any:
        """What a launch now would take, where it makes, times and awaits nothing; else None."""
        if self._words and self._forms.has_to_be_usual():
            return self._usual.result() if self._usual is not None and self._usual.done() else None
        if self._words == FIRST:
            is_awaited = self._usual is not None and not self._usual.done()
            return self.form if is_awaited or not self._may_be_made() else None
        if not self._rungs or self._forms.is_fixed():
            return self.form
        if self._rival is not None or (self._launches >= _FIRST and not self._seconds):
            return None
        words = *self._words, self._rungs[0]
        return None if self._forms.is_due(words, self._launches + 1, self._seconds) else self.form

    def _may_be_made(self) -> bool:
        return not self._forms.is_fixed() and self._forms.is_paid(self._launches + 1)

    def _try_to_promote(self) -> None:
        """Has the usual form made once the launches have paid for it, and takes it once it is there."""
        if self._usual is None and self._may_be_made():
            self._usual = self._forms.make((), is_needed_now=False)
        self._launches += 1
        if self._usual is not None and self._usual.done():
            if self._usual.cancelled() or self._usual.exception() is not None:
                self._usual = None  # until the launches have paid again
            else:
                self._words, self.form = (), self._usual.result()
                self._rungs = self._forms.promoted()
            self._launches = 0

    def _climb(self, work: Any, context: LaunchContext) -> None:
        turn = None
        with self._carefully():
            turn = self._turn_now()
        if turn is None:
            self.form.launch(work, context)
            return
        form, times = turn
        context.wait_until_idle(work.device)
        started = time.perf_counter()
        form.launch(work, context)
        context.wait_until_idle(work.device)
        times.append(time.perf_counter() - started)
        with self._carefully():
            if len(self._times[0]) > _TURNS:
                self._decide()

    @contextmanager
    def _carefully(self) -> Iterator[None]:
        """Whatever is raised in the block, the form in use stays."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 -- the form in use serves as well
            self._rival, self._rungs, self._times = None, [], ([], [])
            self._forms.bailed_out(error)

    def _turn_now(self) -> tuple[Any, list[float]] | None:
        """As `_turn`; begins to make the next form where that is due."""
        words = *self._words, self._rungs[0]
        if self._rival is None and self._forms.is_due(words, self._launches, self._seconds):
            self._rival = self._forms.make(words, is_needed_now=False)
            self._times = [], []
        turn = self._turn()
        return turn if turn is not None and self._forms.is_quiet() else None

    def _turn(self) -> tuple[Any, list[float]] | None:
        """The form whose turn it is, and its times; None where nothing is to be timed."""
        own, rivals = self._times
        if self._rival is None:
            return (self.form, own) if self._launches > _FIRST and not self._seconds else None
        if not self._rival.done():
            return None
        if self._rival.cancelled() or self._rival.exception() is not None:
            self._step()
            return None
        return (self._rival.result(), rivals) if len(rivals) <= len(own) else (self.form, own)

    def _decide(self) -> None:
        own, rivals = (times[1:] for times in self._times)
        self._times = [], []
        self._seconds = min(own)
        if self._rival is not None:
            words = *self._words, self._rungs[0]
            wins = sum(rival < seconds for rival, seconds in zip(rivals, own, strict=True))
            is_kept = wins >= _WINS and min(rivals) < (1 - _LEAST_GAIN) * min(own)
            self._forms.compared((self._words, min(own)), (words, min(rivals)), is_kept=is_kept)
            if is_kept:
                self._words, self.form, self._seconds = words, self._rival.result(), min(rivals)
            self._step()

    def _step(self) -> None:
        """On to the next rung."""
        self._rival = None
        del self._rungs[0]
        if not self._rungs:
            self._forms.settled(self._words)
