"""Recorded collectives: in come a tensor and what is to be done with it among the ranks, out goes a recorded result.

A collective is a functional op of the device, in a region of its own, and runs in the launch order: the thread that
records it does not wait. What the op carries is a ticket, the number under which its call is found when it runs.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.library

from torchtpu.runtime import _C

OP = "torchtpu::collective"


class Owner(Protocol):
    """The group that a call belongs to."""

    def begin(self, call: Call) -> None: ...
    def explain(self, call: Call, error: BaseException) -> BaseException: ...


@dataclass(eq=False)
class Call:
    """One collective of this rank.

    `what` is what all ranks must agree on, "" where they need not; `run` moves the bytes, from a flat CPU tensor to
    another one. `error` is set before `finished`.
    """

    owner: Owner
    name: str
    what: str
    sequence: int
    line: str
    run: Callable[[torch.Tensor], torch.Tensor]
    finished: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def __str__(self) -> str:
        return f"{self.what or self.name} (number {self.sequence}, at {self.line})"


class _Totals:
    """What snapshot() tells; increments may be lost when threads race."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.nbytes = 0
        self.milliseconds = 0.0


class _Worker:
    """The one thread that talks to other ranks: what waits for it can be interrupted."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, job: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="torchtpu-collectives", daemon=True)
            self._thread.start()
        answer: queue.SimpleQueue[torch.Tensor | BaseException] = queue.SimpleQueue()

        def task() -> None:
            try:
                answer.put(job())
            except BaseException as error:  # noqa: BLE001 -- the waiting thread raises it
                answer.put(error)

        self._jobs.put(task)
        made = answer.get()
        if isinstance(made, BaseException):
            raise made
        return made

    def close(self, seconds: float) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(seconds)
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


_tickets = itertools.count(1)
_waiting: dict[int, Call] = {}
_order = threading.RLock()  # tickets are recorded in the order of their numbers
_worker = _Worker()
_totals = _Totals()
_library: list[Any] = []


def install() -> None:
    """Makes the op known to PyTorch and to the recorder. Called once."""
    make_library: Any = torch.library.Library
    library = make_library("torchtpu", "DEF")
    library.define("collective(Tensor input, int ticket, str what, int[] sizes) -> Tensor")
    library.impl("collective", lambda input, ticket, what, sizes: input.new_empty(sizes), "Meta")
    _library.append(library)  # which unregisters the op when it dies
    _C.register_op((OP, {}, False, False, (), False, (), False))


def record(call: Call, tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The call's flat result of `count` elements (of one where that is 0), computed when its turn comes."""
    call.owner.begin(call)
    _totals.counts[call.name] += 1
    _totals.nbytes += tensor.nbytes
    with torch.no_grad(), _order:
        tensor = whole(tensor)
        _C.cut("collective")
        ticket = next(_tickets)
        _waiting[ticket] = call
        result: torch.Tensor = torch.ops.torchtpu.collective(tensor, ticket, call.name, [max(1, count)])
        _C.cut("collective")
    return result


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in order as all of a storage; at least one."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return tensor.new_empty(1)
    if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(-1)


def perform(tensor: torch.Tensor, ticket: int, what: str, sizes: Sequence[int]) -> torch.Tensor:
    """Runs a recorded call: the host op of the engine."""
    call = _waiting.pop(ticket)
    started = time.perf_counter()
    try:
        return _worker.run(lambda: call.run(tensor)).view(tuple(sizes))
    except BaseException as error:  # noqa: BLE001 -- explained, and raised again
        call.error = call.owner.explain(call, error)
        raise call.error from call.error.__cause__
    finally:
        _totals.milliseconds += (time.perf_counter() - started) * 1e3
        call.finished.set()


def close(seconds: float) -> None:
    """Ends the thread that talks to other ranks."""
    _worker.close(seconds)


def snapshot() -> dict[str, Any]:
    """collectives {name: count}, their bytes, and the milliseconds that launches waited for them."""
    return {
        "collectives": dict(_totals.counts),
        "bytes_collectives": _totals.nbytes,
        "collective_ms": _totals.milliseconds,
    }


def reset() -> None:
    """Sets the totals to zero."""
    _totals.__init__()  # type: ignore[misc]
