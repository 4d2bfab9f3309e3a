"""Records collectives as ops.

A collective is a functional op of the device and runs in the launch order: the thread that records it does not wait.
What the op carries is a ticket, the number under which its call is found when it runs. A collective that programs have
stands among the other ops of its region, which all ranks launch as one program where they agree; else, and where it
is for the hosts only, it runs alone, through the hosts' memories.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
import torch.library

from torchtpu.ops.registry import LOWERINGS, Lowering
from torchtpu.runtime import _C
from torchtpu.runtime.spmd.regions import Proposal, VoteResult

from . import lowering
from .call import CollectiveCall, Owner
from .flight import recorder

T = TypeVar("T")

OP = "torchtpu::collective"


class _Totals:
    """What snapshot() tells; increments may be lost when threads race."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.nbytes = 0
        self.milliseconds = 0.0
        self.votes = 0
        self.fused = 0
        self.alone = 0


class _CollectiveJob(Generic[T]):
    """What the worker is to do for a call, and the one answer to it."""

    def __init__(self, call: CollectiveCall, work: Callable[[], T], *, may_outlast_partners: bool) -> None:
        self.call = call
        self.may_outlast_partners = may_outlast_partners
        self._work = work
        self._lock = threading.Lock()  # guards what follows
        self._is_answered = False
        self.answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run(self) -> None:
        try:
            made: tuple[T | None, BaseException | None] = self._work(), None
        except BaseException as error:  # noqa: BLE001 -- the waiting thread raises it
            made = None, error
        self.settle(*made)

    def settle(self, made: T | None, error: BaseException | None) -> bool:
        """Whether there was no answer yet."""
        with self._lock:
            is_first, self._is_answered = not self._is_answered, True
        if is_first:
            self.answer.put((made, error))
        return is_first


class _Worker:
    """The one thread that talks to other ranks: what waits for it can be interrupted, and can stop waiting, after which
    another thread takes its place."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._jobs: queue.SimpleQueue[_CollectiveJob[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._current: _CollectiveJob[Any] | None = None

    def run(
        self,
        call: CollectiveCall,
        work: Callable[[], T],
        seconds: float | None = None,
        *,
        may_outlast_partners: bool = False,
    ) -> T:
        """What the work returns; TimeoutError where it does not return in time."""
        job = _CollectiveJob(call, work, may_outlast_partners=may_outlast_partners)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, args=(self._jobs,), name="torchtpu-collectives", daemon=True
                )
                self._thread.start()
            self._current = job
            self._jobs.put(job)
        try:
            made, error = job.answer.get(timeout=seconds)
        except queue.Empty:
            self._give_up(job, TimeoutError(f"it has not returned within {seconds:.0f} s"))
            made, error = job.answer.get()
        finally:
            with self._lock:
                self._current = None
        if error is not None:
            raise error
        return cast("T", made)

    def stop_waiting(self, owner: Owner, rank: int | None) -> None:
        """What runs for the group fails where it waits for this rank, or for any."""
        with self._lock:
            job = self._current
        if job is None or job.call.owner is not owner:
            return
        if rank is None:
            self._give_up(job, ConnectionError("another rank has failed"))
        elif job.call.partner in (None, rank) and not job.may_outlast_partners:
            self._give_up(job, ConnectionError("a rank has ended"))

    def close(self, seconds: float) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
            self._jobs.put(None)
            self._jobs = queue.SimpleQueue()
        if thread is not None:
            thread.join(seconds)

    def _give_up(self, job: _CollectiveJob[Any], error: BaseException) -> None:
        if job.settle(None, error):
            self.close(0)  # the thread ends when what it waits for does

    def _work(self, jobs: queue.SimpleQueue[_CollectiveJob[Any] | None]) -> None:
        while (job := jobs.get()) is not None:
            job.run()


def stop_waiting(owner: Owner, rank: int | None) -> None:
    """A rank of the group will not come any more, or (None) the group has failed. What runs for it fails."""
    _worker.stop_waiting(owner, rank)


_tickets = itertools.count(3)  # smaller numbers stay in a program's text
_waiting: dict[int, CollectiveCall] = {}
_order = threading.RLock()  # tickets are recorded in the order of their numbers
_worker = _Worker()
_totals = _Totals()
_library: list[Any] = []


def install() -> None:
    """Makes the op known to PyTorch and to the recorder. Called once."""
    make_library: Any = torch.library.Library
    library = make_library("torchtpu", "FRAGMENT")
    library.define("collective(Tensor input, float ticket, str kind, int[] homes, int[] sizes) -> Tensor")
    library.impl("collective", lambda input, ticket, kind, homes, sizes: input.new_empty(sizes), "Meta")
    _library.append(library)  # which unregisters the op when it dies
    LOWERINGS[OP] = Lowering(OP, lowering.collective, lifts=True, repeats=True)
    _C.register_op(LOWERINGS[OP].row(runs_once=True))


def record(call: CollectiveCall, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The call's result of these sizes, computed when its turn comes; `tensor` is all of a storage."""
    call.owner.begin(call)
    recorder.record(call, call.owner.name, tensor, sizes)
    _totals.counts[call.name] += 1
    _totals.nbytes += tensor.nbytes
    with torch.no_grad(), _order:
        if not call.homes:
            _C.cut("collective")
        ticket = next(_tickets)
        _waiting[ticket] = call
        result: torch.Tensor = torch.ops.torchtpu.collective(tensor, float(ticket), call.kind, call.homes, sizes)
        if not call.homes:
            _C.cut("collective")
    _progress.watch()
    return result


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as all of a storage, its elements in order; at least one."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return tensor.new_empty(1)
    if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor if tensor.ndim else tensor.view(1)


class RecordedCollectives:
    """What the engine asks of the op (`torchtpu.runtime.spmd.regions.Collectives`)."""

    op = OP

    def homes(self, op: Any) -> tuple[int, ...]:
        homes: tuple[int, ...] = op.args[_HOMES]
        return homes

    def perform(
        self, tensor: torch.Tensor, ticket: float, kind: str, homes: Sequence[int], sizes: Sequence[int]
    ) -> torch.Tensor:
        call = _waiting.pop(int(ticket))
        _totals.alone += 1
        with _finishing([call]):
            return _worker.run(call, lambda: call.run(tensor.view(-1))).view(tuple(sizes))

    def skip(self, error: BaseException, tensor: None, ticket: float, *_: Any) -> None:
        call = _waiting.pop(int(ticket))
        call.error = error
        call.finished.set()

    def vote(self, tickets: Sequence[float], proposal: Proposal) -> VoteResult:
        calls = [_waiting[int(ticket)] for ticket in tickets]
        _totals.votes += bool(proposal.program)
        return self._ask(tickets, lambda owner: owner.vote(calls, proposal))

    def tell(self, tickets: Sequence[float], numbers: Sequence[int]) -> list[list[int]]:
        return self._ask(tickets, lambda owner: owner.tell(numbers))

    def _ask(self, tickets: Sequence[float], ask: Callable[[Owner], T]) -> T:
        """What the ranks say of these calls. An error is that of all of them."""
        started = time.perf_counter()
        call = _waiting[int(tickets[0])]
        try:
            return _worker.run(call, lambda: ask(call.owner))
        except BaseException:
            with _finishing([_waiting.pop(int(ticket)) for ticket in tickets]):
                raise
        finally:
            _totals.milliseconds += (time.perf_counter() - started) * 1e3

    def launch(self, tickets: Sequence[float], launch: Callable[[], T]) -> T:
        calls = [_waiting.pop(int(ticket)) for ticket in tickets]
        for call in calls:
            call.is_started = True
        _totals.fused += len(calls)
        with _finishing(calls):
            return _worker.run(calls[0], launch, calls[0].owner.timeout(), may_outlast_partners=True)


_HOMES = 3  # the place of the argument


@contextlib.contextmanager
def _finishing(calls: Sequence[CollectiveCall]) -> Iterator[None]:
    """Within it the calls run. Its error is explained, and raised again."""
    started = time.perf_counter()
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:  # noqa: BLE001
        failure = calls[0].owner.explain(calls[0], error)
        raise failure from failure.__cause__
    finally:
        _totals.milliseconds += (time.perf_counter() - started) * 1e3
        for call in calls:
            call.error = failure
            call.finished.set()


def await_end(call: CollectiveCall, seconds: float | None = None) -> bool:
    """Waits until a call, whose region is cut, has run or failed; False where that takes longer."""
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    while not call.finished.wait(max(0.0, min(_IDLE_SECONDS, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            return False
        if not _C.stats()["queue"]:  # nothing is left that would run it: an op before it failed
            _drop(call)
    return True


def _drop(call: CollectiveCall) -> None:
    for ticket, waiting in list(_waiting.items()):
        if waiting is call:
            del _waiting[ticket]
            call.error = dist.DistBackendError(f"{call} did not run, since an op before it failed")
            call.finished.set()


class _Progress:
    """Cuts regions with collectives that nobody goes on recording: other ranks may wait for them, and this one's user
    for the others."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._has_work = threading.Event()
        self._is_closed = threading.Event()

    def watch(self) -> None:
        """A collective was recorded."""
        self._has_work.set()
        if self._thread is None:
            self._is_closed.clear()
            self._thread = threading.Thread(target=self._watch, name="torchtpu-progress", daemon=True)
            self._thread.start()

    def close(self, seconds: float) -> None:
        if self._thread is not None:
            self._is_closed.set()
            self._has_work.set()
            self._thread.join(seconds)
            self._thread = None

    def _watch(self) -> None:
        before = -1
        while not self._is_closed.is_set():
            self._has_work.wait()
            self._has_work.clear()
            if self._is_closed.wait(_IDLE_SECONDS):
                return
            recorded = _C.stats()["ops_recorded"]
            if _waiting and recorded == before:
                _C.cut_all()
            elif _waiting:
                self._has_work.set()
            before = recorded


_IDLE_SECONDS = 0.25
_progress = _Progress()


def close(seconds: float) -> None:
    """Ends the threads that talk to other ranks."""
    _progress.close(seconds)
    _worker.close(seconds)


def snapshot() -> dict[str, Any]:
    """collectives {name: count}, their bytes, and the milliseconds that launches waited for them; how many ran in a
    program of all ranks and how many alone; and how often the ranks were asked whether they agree on a program."""
    return {
        "collectives": dict(_totals.counts),
        "bytes_collectives": _totals.nbytes,
        "collective_ms": _totals.milliseconds,
        "collectives_fused": _totals.fused,
        "collectives_alone": _totals.alone,
        "votes": _totals.votes,
    }


def reset() -> None:
    """Sets the totals to zero."""
    _totals.__init__()  # type: ignore[misc]
