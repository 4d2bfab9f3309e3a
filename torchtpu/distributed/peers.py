"""What ranks tell each other about their calls, and errors that name ranks.

A rank whose collective fails asks the others, each of which answers with what it is doing; a rank that ends is noticed
by its connections. Whoever waits for a rank that will not come stops waiting.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from torchtpu.runtime.device.process_group import hash_of
from torchtpu.runtime.spmd.regions import Proposal, VoteResult

from .call import CollectiveCall
from .flight import recorder
from .links import Links, Notice

Meet = Callable[[Sequence[int]], list[list[int]]]  # tells all ranks some ints, as many each, and their ints

_ANSWER_SECONDS = 2.0
_FOLDERS = (torch.__path__[0], sys.modules["torchtpu.runtime"].__path__[0], Path(__file__).parents[1])
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)  # their lines are not the user's
# A process may end when its part of a collective is done, which others may not have finished yet.
_GRACE_SECONDS = 2.0


class Peers:
    """The other ranks of one group, `ranks` their global numbers. `stop_waiting(rank)` is called where a rank has ended
    and nobody waits for it in vain, `stop_waiting(None)` where the group has failed."""

    def __init__(
        self, rank: int, size: int, name: str, ranks: Sequence[int], stop_waiting: Callable[[int | None], None]
    ) -> None:
        self._rank = rank
        self._name = name
        self._ranks = list(ranks) or list(range(size))
        self._stop_waiting = stop_waiting
        self._links = Links(rank, self._hear)
        self.last: CollectiveCall | None = None
        self._news = threading.Condition()  # guards what follows, by rank
        self._ended: dict[int, str] = {}
        self._failed: dict[int, str] = {}
        self._answers: dict[int, str] = {}

    def connect(self, store: Store, timeout: timedelta) -> None:
        """Waits for the other ranks. All call it, once."""
        self._links.connect(store, len(self._ranks), timeout)
        _groups.add(self)

    def __str__(self) -> str:
        last = self.last
        if last is None:
            return f"no collective of group {self._name} so far"
        if not last.finished.is_set():
            return f"in {last} of group {self._name}"
        return f"after {last} of group {self._name}"

    def begin(self, call: CollectiveCall) -> None:
        """The call is about to run."""
        self.last = call
        call.is_started = True

    def vote(self, calls: Sequence[CollectiveCall], proposal: Proposal, meet: Meet) -> VoteResult:
        """What all ranks are about to launch, where these calls are in the program of this proposal. DistBackendError
        says what each rank is at where they are at different calls.
        """
        call = calls[0]
        words = [hash_of(text) if text else 0 for text in (proposal.identity, proposal.program)]
        everyones = meet([_word(call), _word(*calls[: proposal.calls]), *words, len(calls)])
        first, called, identities, programs, counts = zip(*everyones, strict=True)
        if len(set(first)) == 1:
            is_same = len({*called}) == len({*identities}) == 1 and identities[0] != 0
            return VoteResult(is_same, 0 if 0 in programs else min(counts), hash_of(str((programs, counts))))
        texts = (bytes(letters).decode() for letters in tell([*str(call).encode()], meet))
        told = ", ".join(f"rank {rank}: {text}" for rank, text in zip(self._ranks, texts, strict=True))
        raise dist.DistBackendError(f"the ranks of group {self._name} are at different collectives: {told}")

    def failure(self) -> str:
        """Why the group cannot be used any more, by what other ranks have told; "" where it can."""
        with self._news:
            return next((self._told(rank) for rank in self._failed if rank != self._rank), "")

    def missing(self) -> str:
        """Which ranks have ended; "" where all are there."""
        with self._news:
            return "; ".join(map(self._told, self._ended))

    def explain(self, call: CollectiveCall, error: BaseException) -> BaseException:
        """The error to raise for a call that failed. The other ranks are told."""
        if isinstance(error, dist.DistBackendError):  # of all ranks
            return error
        what = f"{call} of group {self._name} failed: {str(error).strip()}"
        self._links.tell("ask")
        others = [rank for rank in range(len(self._ranks)) if rank != self._rank]
        with self._news:
            self._news.wait_for(lambda: all(self._is_known(rank) for rank in others), _ANSWER_SECONDS)
            told = [text for text in map(self._told, others) if text not in what]
        self._links.tell("failed", f"stopped: {what}")
        also = "; ".join(sorted(told, key=lambda text: " has ended" not in text))
        failure = dist.DistBackendError(f"rank {self._ranks[self._rank]}: {what}{also and f'. {also}'}")
        failure.__cause__ = error
        return failure

    def abandon(self, why: str) -> None:
        """Tells the others that this rank will not come any more."""
        self._links.tell("failed", why)

    def close(self) -> None:
        """The group has ended."""
        _groups.discard(self)
        self._links.close()

    def _is_known(self, rank: int) -> bool:
        return rank in self._ended or rank in self._failed or rank in self._answers

    def _told(self, rank: int) -> str:
        about = self._failed.get(rank) or self._ended.get(rank) or self._answers.get(rank)
        silent = "does not answer: it hangs outside Python, or its machine is lost"
        return f"rank {self._ranks[rank]} {about or silent}"

    def _hear(self, notice: Notice) -> None:
        """In the thread of the connections."""
        kind, rank, text = notice
        with self._news:
            if kind == "gone":
                self._ended[rank] = f"has ended: {text}"
            elif kind == "left":
                self._ended.setdefault(rank, "has left the group")
            elif kind == "failed":
                self._failed[rank] = text
            elif kind == "at":
                self._answers[rank] = text
            self._news.notify_all()
        if kind == "gone":
            self._links.later(_GRACE_SECONDS, lambda: self._stop_waiting(rank))
        elif kind == "failed" and rank != self._rank:
            self._stop_waiting(None)
        elif kind == "ask":
            self._links.tell("at", f"is at {_place()}, {'; '.join(map(str, list(_groups)))}")
            recorder.dump()


def tell(numbers: Sequence[int], meet: Meet) -> list[list[int]]:
    """The numbers of each rank, of which each tells as many as it likes."""
    lengths = [length for (length,) in meet([len(numbers)])]
    padded = [*numbers, *[0] * (max(lengths) - len(numbers))]
    everyones = meet(padded) if padded else [[] for _ in lengths]
    return [found[:length] for found, length in zip(everyones, lengths, strict=True)]


def _word(*calls: CollectiveCall) -> int:
    """A number for what these calls are."""
    return hash_of("\n".join(f"{call.sequence} {call.what}" for call in calls))


def _place() -> str:
    """Where the main thread is in the user's code."""
    ident = threading.main_thread().ident
    assert ident is not None
    frame: FrameType | None = sys._current_frames().get(ident)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<", *_LIBRARIES)):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


_groups: weakref.WeakSet[Peers] = weakref.WeakSet()
