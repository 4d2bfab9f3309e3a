"""The autotuner: launches a region in the variant that has been the fastest so far.

What is quickly there runs first: in the first tier, until its launches have paid for compiling the usual variant, which
then takes its place. A region that is launched often is compiled in other variants too, one at a time and when nothing
else is; then such a variant and the one in use take turns a few times, each with the device to itself, and the faster
one stays.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol, cast

from torchtpu.runtime import _C

from .direct import ALWAYS
from .executable import DirectlyLaunchable, Launchable, LaunchContext

Config = tuple[str, ...]  # what is unusual about a variant; () names the usual one
FIRST: Config = ("first",)  # the usual one in the first tier

_BETWEEN_LOOKS = 256  # launches, should nobody say that what is being compiled is there
_MOST_DIRECT = 1 << 12
_FIRST = 32  # launches before the variant in use is timed
_TURNS = 7  # timed launches of each variant, after one that warms caches up
_WINS = 6  # turns in which a variant has to be faster than the one in use: a busy machine decides a few by chance
_LEAST_GAIN = 0.03  # what it has to save of the least time of the one in use


class Variants(Protocol):
    """The variants of one region, each something that can be launched."""

    def make(self, config: Config, *, is_needed_now: bool) -> Future[Any]:
        """The variant of this name, once it is compiled."""

    def is_paid(self, launches: int) -> bool:
        """Whether so many launches in the first tier make the usual variant worth compiling: not a question of time."""

    def may_be_paid(self, launches: int) -> bool:
        """The same, or true where that has to be found out first."""

    def promoted(self) -> list[str]:
        """Hears that the usual variant takes the place of the first tier's; the untried after it."""

    def is_due(self, config: Config, launches: int, seconds: float) -> bool:
        """Whether so many launches of so many seconds each (0: unknown) make this variant worth compiling."""

    def has_to_be_usual(self) -> bool:
        """Whether only the usual variant may be launched."""

    def is_fixed(self) -> bool:
        """Whether the variant in use stays for now."""

    def is_quiet(self) -> bool:
        """Whether nothing is being compiled, which would disturb the clock."""

    def compared(self, own: tuple[Config, float], candidate: tuple[Config, float], *, is_kept: bool) -> None:
        """Hears the seconds of the variant in use and of a candidate, and whether this one is kept in its stead."""

    def settled(self, config: Config) -> None:
        """Hears which variant stays."""

    def bailed_out(self, error: Exception) -> None:
        """Hears that choosing a variant failed: the one in use stays."""


class Autotuner:
    """What a plan is given whose region has several variants; only one thread at a time launches it.

    `variant` is the one in use, called `config`; each of `untried` is a name that may name a faster one.
    """

    meets_others = False
    takes_padding = False

    def __init__(self, variants: Variants, config: Config, variant: Launchable, untried: Iterable[str]) -> None:
        self.variant = variant
        self._variants = variants
        self._config = config
        self._untried = list(untried)
        self._usual: Future[Any] | None = None
        if not config:
            self._usual = Future()
            self._usual.set_result(variant)
        self._launches = 0
        self._seconds = 0.0  # of the variant in use; 0 until it has been timed
        self._candidate: Future[Any] | None = None
        self._given: Any = None  # what has launched the variant since, and how often it had when it was given
        self._given_at = 0
        self._times: tuple[list[float], list[float]] = [], []  # seconds of the variant in use, and of its candidate

    def launch(self, work: Any, context: LaunchContext) -> None:
        """Launches the variant in use, or the one whose turn it is."""
        with context.recovering(work):
            self._count_direct()
            self._launch(work, context)

    def direct(self, work: Any, context: LaunchContext) -> Any:
        """What repeats a launch (see `DirectlyLaunchable`), as often as there is nothing to be decided."""
        launches = self._undecided_after()
        direct = self.variant.direct(work, context) if launches and hasattr(self.variant, "direct") else None
        if direct is not None:
            direct.grant(launches)
            if launches != ALWAYS:
                self._given, self._given_at = direct, direct.taken
        return direct

    def resume(self, work: Any, context: LaunchContext, stopped: Any) -> None:
        """Goes on with a direct launch; tells the work what came of it."""
        with context.recovering(work):
            cast("DirectlyLaunchable", self.variant).resume(work, context, stopped)

    def _count_direct(self) -> None:
        """Counts the launches since the last time that were direct."""
        if self._given is not None:
            self._launches += self._given.taken - self._given_at
            self._given = None

    def _undecided_after(self) -> int:
        """How many launches from now on are to take the variant in use, whatever happens meanwhile; about, not more."""
        if self._config and self._variants.has_to_be_usual():
            return 0
        if self._config != FIRST and (not self._untried or self._variants.is_fixed()):
            return ALWAYS
        if self._config == FIRST:
            if self._usual is not None or self._variants.is_fixed():
                return 0 if self._usual is not None and self._usual.done() else _BETWEEN_LOOKS
            is_decided = self._variants.may_be_paid
        else:
            if self._candidate is not None:
                return 0 if self._candidate.done() else _BETWEEN_LOOKS
            if self._launches >= _FIRST and not self._seconds:
                return 0
            config = *self._config, self._untried[0]

            def is_decided(launches: int) -> bool:
                is_timed = launches > _FIRST and not self._seconds
                return is_timed or self._variants.is_due(config, launches, self._seconds)

        launches = _MOST_DIRECT
        while launches and is_decided(self._launches + launches + 1):
            launches //= 2
        return launches

    def _launch(self, work: Any, context: LaunchContext) -> None:
        if self._config == FIRST:
            self._try_to_promote()
        if self._config and self._variants.has_to_be_usual():
            if self._usual is None:
                self._usual = self._variants.make((), is_needed_now=True)
            self._usual.result().launch(work, context)
        elif self._config == FIRST or not self._untried or self._variants.is_fixed():
            self.variant.launch(work, context)
        else:
            self._launches += 1
            self._tune(work, context)

    def _try_to_promote(self) -> None:
        """Has the usual variant made once the launches have paid for it, and takes it once it is there."""
        if self._usual is None and not self._variants.is_fixed() and self._variants.is_paid(self._launches + 1):
            self._usual = self._made_meanwhile(())
        self._launches += 1
        if self._usual is not None and self._usual.done():
            if self._usual.cancelled() or self._usual.exception() is not None:
                self._usual, self._launches = None, 0  # until the launches have paid again
            else:  # the launches go on being counted: when a variant was compiled is a matter of the clock
                self._config, self.variant = (), self._usual.result()
                self._untried = self._variants.promoted()

    def _made_meanwhile(self, config: Config) -> Future[Any]:
        """A variant that is made while another is launched; once it is there, the next launch is no direct one."""
        made = self._variants.make(config, is_needed_now=False)
        made.add_done_callback(_ask_again)
        return made

    def _tune(self, work: Any, context: LaunchContext) -> None:
        turn = None
        with self._carefully():
            turn = self._turn_now()
        if turn is None:
            self.variant.launch(work, context)
            return
        variant, times = turn
        context.wait_until_idle(work.device)
        started = time.perf_counter()
        variant.launch(work, context)
        context.wait_until_idle(work.device)
        times.append(time.perf_counter() - started)
        with self._carefully():
            if len(self._times[0]) > _TURNS:
                self._decide()

    @contextmanager
    def _carefully(self) -> Iterator[None]:
        """Whatever is raised in the block, the variant in use stays."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 -- the variant in use serves as well
            self._candidate, self._untried, self._times = None, [], ([], [])
            self._variants.bailed_out(error)

    def _turn_now(self) -> tuple[Any, list[float]] | None:
        """As `_turn`; begins to make the next variant where that is due."""
        config = *self._config, self._untried[0]
        if self._candidate is None and self._variants.is_due(config, self._launches, self._seconds):
            self._candidate = self._made_meanwhile(config)
            self._times = [], []
        turn = self._turn()
        return turn if turn is not None and self._variants.is_quiet() else None

    def _turn(self) -> tuple[Any, list[float]] | None:
        """The variant whose turn it is, and its times; None where nothing is to be timed."""
        own, candidates = self._times
        if self._candidate is None:
            return (self.variant, own) if self._launches > _FIRST and not self._seconds else None
        if not self._candidate.done():
            return None
        if self._candidate.cancelled() or self._candidate.exception() is not None:
            self._step()
            return None
        return (self._candidate.result(), candidates) if len(candidates) <= len(own) else (self.variant, own)

    def _decide(self) -> None:
        own, candidates = (times[1:] for times in self._times)
        self._times = [], []
        self._seconds = min(own)
        if self._candidate is not None:
            config = *self._config, self._untried[0]
            wins = sum(candidate < seconds for candidate, seconds in zip(candidates, own, strict=True))
            is_kept = wins >= _WINS and min(candidates) < (1 - _LEAST_GAIN) * min(own)
            self._variants.compared((self._config, min(own)), (config, min(candidates)), is_kept=is_kept)
            if is_kept:
                self._config, self.variant, self._seconds = config, self._candidate.result(), min(candidates)
            self._step()

    def _step(self) -> None:
        """On to the next candidate."""
        self._candidate = None
        del self._untried[0]
        if not self._untried:
            self._variants.settled(self._config)


def _ask_again(_: Future[Any]) -> None:
    _C.forget_direct_launches()
