"""One collective of this rank, and what the group that it belongs to does for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from torchtpu.runtime.spmd.regions import Proposal, VoteResult


class Owner(Protocol):
    """The group that a call belongs to."""

    name: str

    def begin(self, call: CollectiveCall) -> None: ...
    def vote(self, calls: Sequence[CollectiveCall], proposal: Proposal) -> VoteResult: ...
    def tell(self, numbers: Sequence[int]) -> list[list[int]]: ...
    def explain(self, call: CollectiveCall, error: BaseException) -> BaseException: ...
    def timeout(self) -> float: ...


@dataclass(eq=False)
class CollectiveCall:
    """One collective of this rank.

    `what` is what all ranks must agree on, "" where they need not; `run` moves the bytes, from a flat CPU tensor to
    another one; `homes` are the devices whose program may have it, which knows it as `kind`. `error` is set before
    `finished`.
    """

    owner: Owner
    name: str
    what: str
    sequence: int
    line: str
    run: Callable[[torch.Tensor], torch.Tensor]
    kind: str = ""
    homes: tuple[int, ...] = ()
    partner: int | None = None  # the only other rank that it needs
    route: str = ""  # " 0->1" where rank 0 sends to rank 1
    is_started: bool = False
    is_agreed: bool = False  # by a vote that found the others at this call, though not at this program
    finished: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def __str__(self) -> str:
        return f"{self.what or self.name} (number {self.sequence}, at {self.line})"
