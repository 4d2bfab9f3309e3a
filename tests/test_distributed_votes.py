"""Votes give each rank some ints of every rank, in few rounds."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchtpu.distributed import gloo


def on_ranks(size: int, work: Callable[[int], Any]) -> list[Any]:
    made: list[Any] = [None] * size

    def run(rank: int) -> None:
        made[rank] = work(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return made


@pytest.mark.parametrize(("size", "rounds"), [(1, 0), (2, 1), (3, 2), (8, 3), (300, 9)])
def test_all_ranks_learn_all_words_in_a_logarithm_of_rounds(size: int, rounds: int) -> None:
    mail: dict[tuple[int, int], queue.SimpleQueue[torch.Tensor]] = {}
    swaps = [0] * size

    def box(source: int, destination: int) -> queue.SimpleQueue[torch.Tensor]:
        return mail.setdefault((source, destination), queue.SimpleQueue())  # the same for both, whoever comes first

    def learn(rank: int) -> torch.Tensor:
        def swap(tensor: torch.Tensor, destination: int, source: int) -> torch.Tensor:
            swaps[rank] += 1
            box(rank, destination).put(tensor)
            return box(source, rank).get(timeout=60)

        return gloo.spread(torch.tensor([rank, rank * rank]), rank, size, swap)

    everyones = torch.tensor([[rank, rank * rank] for rank in range(size)])
    assert all(torch.equal(found, everyones) for found in on_ranks(size, learn))
    assert swaps == [rounds] * size


@pytest.mark.parametrize("most_in_a_ring", [1, 8])
def test_ranks_meet_through_gloo(most_in_a_ring: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "_MOST_IN_A_RING", most_in_a_ring)
    store = dist.HashStore()

    def meet(rank: int) -> list[list[list[int]]]:
        transport = gloo.Gloo(gloo.connect(store, rank, 5, timedelta(seconds=60)), rank, 5)
        return [transport.meet([rank, -rank, time]) for time in range(3)]

    everyones = [[[rank, -rank, time] for rank in range(5)] for time in range(3)]
    assert on_ranks(5, meet) == [everyones] * 5
