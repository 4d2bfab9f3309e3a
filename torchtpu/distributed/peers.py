"""What ranks tell each other about their calls: in come a call and its failure, out goes an error that names ranks.

A rank whose collective fails asks through the store; a thread of every other rank answers with what that rank is doing.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

import torchtpu
from torchtpu.runtime.spmd.regions import Ballot, Verdict

from .flight import recorder

if TYPE_CHECKING:
    from .calls import Call

Meet = Callable[[Sequence[int]], Sequence[Sequence[int]]]  # tells all ranks some ints, and their ints

_POLL_SECONDS = 1.0
_ANSWER_SECONDS = 4.0
_STORE_SECONDS = timedelta(seconds=5)


class Peers:
    """The other ranks of one group, `ranks` their global numbers."""

    def __init__(self, store: Store, rank: int, size: int, name: str, ranks: Sequence[int]) -> None:
        self._rank = rank
        self._name = name
        self._ranks = list(ranks) or list(range(size))
        self._store = PrefixStore("calls", store)
        self.last: Call | None = None
        _reporter.serve(self, PrefixStore("reports", store), self._ranks[rank])

    def __str__(self) -> str:
        last = self.last
        if last is None:
            return f"no collective of group {self._name} so far"
        if not last.finished.is_set():
            return f"in {last} of group {self._name}"
        return f"after {last} of group {self._name}"

    def begin(self, call: Call) -> None:
        """The call is about to run."""
        self.last = call
        call.is_started = True

    def agree(self, calls: Sequence[Call], ballot: Ballot, meet: Meet) -> Verdict:
        """What all ranks are about to launch, where these calls are in the program of this ballot. DistBackendError
        says what each rank is at where they are at different calls.
        """
        call = calls[0]
        words = [_number(text) if text else 0 for text in (ballot.identity, ballot.program)]
        everyones = meet([_word(call), _word(*calls[: ballot.calls]), *words, len(calls)])
        first, called, identities, programs, counts = zip(*everyones, strict=True)
        if len(set(first)) == 1:
            is_same = len({*called}) == len({*identities}) == 1 and identities[0] != 0
            return Verdict(is_same, 0 if 0 in programs else min(counts), _number(str((programs, counts))))
        self._store.set(f"{call.sequence}/{self._rank}", str(call))
        keys = [f"{call.sequence}/{rank}" for rank in range(len(self._ranks))]
        told = ", ".join(
            f"rank {rank}: {text.decode()}" for rank, text in zip(self._ranks, self._store.multi_get(keys), strict=True)
        )
        raise dist.DistBackendError(f"the ranks of group {self._name} are at different collectives: {told}")

    def explain(self, call: Call, error: BaseException) -> BaseException:
        """The error to raise for a call that failed."""
        if isinstance(error, dist.DistBackendError):
            return error
        others = [rank for rank in self._ranks if rank != self._ranks[self._rank]]
        told = "; ".join(_reporter.ask(others))
        failure = dist.DistBackendError(
            f"rank {self._ranks[self._rank]}: {call} of group {self._name} failed: {str(error).strip()}. {told}"
        )
        failure.__cause__ = error
        return failure

    def close(self) -> None:
        """The group has ended."""
        _reporter.forget(self)


def _word(*calls: Call) -> int:
    """A number for what these calls are."""
    return _number("\n".join(f"{call.sequence} {call.what}" for call in calls))


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


class _Reporter:
    """Answers for this process. Uses the store of the first group, and lives as long as any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._groups: list[Peers] = []
        self._store: Store | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def serve(self, group: Peers, store: Store, rank: int) -> None:
        with self._lock:
            self._groups.append(group)
            if self._thread is not None:
                return
            self._store = store
            self._stop = threading.Event()
            mine = cast("Any", store).clone()
            mine.set_timeout(_STORE_SECONDS)
            self._thread = threading.Thread(
                target=self._serve, args=(mine, rank, self._stop), name="torchtpu-peers", daemon=True
            )
            self._thread.start()

    def forget(self, group: Peers) -> None:
        with self._lock:
            if group in self._groups:
                self._groups.remove(group)
            if self._groups or self._thread is None:
                return
            thread, self._thread = self._thread, None
            self._stop.set()
        thread.join(_STORE_SECONDS.total_seconds() + _POLL_SECONDS)

    def ask(self, ranks: Sequence[int]) -> list[str]:
        """What each of the ranks is doing."""
        if self._store is None:
            return []
        answers: dict[int, str] = {}
        with contextlib.suppress(RuntimeError):  # the store is gone too
            store = cast("Any", self._store).clone()
            store.set_timeout(_STORE_SECONDS)
            store.set("asked", "1")
            deadline = time.monotonic() + _ANSWER_SECONDS
            while len(answers) < len(ranks) and time.monotonic() < deadline:
                for rank in ranks:
                    if rank not in answers and store.check([str(rank)]):
                        answers[rank] = store.get(str(rank)).decode()
                time.sleep(0.1)
        silent = "did not answer: its process has ended or hangs outside Python"
        return [f"rank {rank} {answers.get(rank, silent)}" for rank in ranks]

    def _serve(self, store: Store, rank: int, stop: threading.Event) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            while not stop.wait(_POLL_SECONDS):
                if store.check(["asked"]):
                    store.set(str(rank), self._report())
                    recorder.dump()
                    return

    def _report(self) -> str:
        with self._lock:
            groups = "; ".join(map(str, self._groups))
        return f"is at {_place()}, {groups}"


def _place() -> str:
    """Where the main thread is in the user's code."""
    ident = threading.main_thread().ident
    assert ident is not None
    frame: FrameType | None = sys._current_frames().get(ident)
    roots = [module.__path__[0] for module in (torch, torchtpu, sys.modules["torchtpu.runtime"])]
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<") and not any(file.startswith(root) for root in roots):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


_reporter = _Reporter()
