"""The transport between host memories: runs collectives on contiguous CPU tensors.

Every function waits for the other ranks and is called in one order by one thread; send alone does not wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, Store

from torchtpu import config

_MAX_SENDS = 256
_MOST_IN_A_RING = 256  # ranks
_MEETING = 2**31 - 1  # a tag


def connect(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A group of gloo; of a job that is made in a dry run one that answers at once, since nobody else is there."""
    if config.get("world_size"):
        return FakeProcessGroup._create_internal(rank, size)
    return dist.ProcessGroupGloo(store, rank, size, timeout)


class Gloo:
    """What a connected group is asked. Tensors are flat; reductions take the dtypes that gloo takes."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.group = group
        self._sends: deque[tuple[Any, torch.Tensor]] = deque()

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        result = tensor.clone()
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self.group.allreduce([result], options).wait()
        return result

    def reduce(self, tensor: torch.Tensor, op: Any, root: int) -> torch.Tensor:
        result = tensor.clone()
        options = dist.ReduceOptions()
        options.reduceOp = op
        options.rootRank = root
        self.group.reduce([result], options).wait()
        return result

    def reduce_scatter(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        result = tensor.new_empty(tensor.numel() // self.size)
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        self.group._reduce_scatter_base(result, tensor, options).wait()
        return result

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        result = tensor.clone()
        options = dist.BroadcastOptions()
        options.rootRank = root
        self.group.broadcast([_bytes(result)], options).wait()
        return result

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.new_empty(tensor.numel() * self.size)
        self.group._allgather_base(_bytes(result), _bytes(tensor)).wait()
        return result

    def gather(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """All ranks' tensors at the root; elsewhere a tensor of one element."""
        is_root = self.rank == root
        result = tensor.new_zeros(tensor.numel() * self.size if is_root else 1)
        options = dist.GatherOptions()
        options.rootRank = root
        parts = [list(_bytes(result).chunk(self.size))] if is_root else []
        self.group.gather(parts, [_bytes(tensor)], options).wait()
        return result

    def scatter(self, tensor: torch.Tensor, count: int, root: int) -> torch.Tensor:
        """`count` elements of the root's tensor."""
        result = tensor.new_empty(count)
        options = dist.ScatterOptions()
        options.rootRank = root
        parts = [list(_bytes(tensor).chunk(self.size))] if self.rank == root else []
        self.group.scatter([_bytes(result)], parts, options).wait()
        return result

    def all_to_all(self, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]) -> torch.Tensor:
        """`sent` elements to each rank and `received` from each; a tensor of one element where nothing comes."""
        width = tensor.itemsize
        result = tensor.new_zeros(max(1, sum(received)))
        self.group.alltoall_base(
            _bytes(result)[: sum(received) * width],
            _bytes(tensor)[: sum(sent) * width],
            [n * width for n in received],
            [n * width for n in sent],
        ).wait()
        return result

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> torch.Tensor:
        """Starts to send; waits for a receiver only where very many have not received."""
        while len(self._sends) >= _MAX_SENDS:
            self._sends.popleft()[0].wait()
        kept = tensor.clone()
        self._sends.append((self.group.send([_bytes(kept)], destination, tag), kept))
        return tensor.new_zeros(1)

    def start_receiving(self, count: int, dtype: torch.dtype, source: int, tag: int) -> tuple[Any, torch.Tensor]:
        """A wait handle, and the tensor that will have been received then."""
        result = torch.empty(count, dtype=dtype)
        return self.group.recv([_bytes(result)], source, tag), result

    def finish_sends(self) -> None:
        """Waits until everything sent is on its way."""
        while self._sends:
            self._sends.popleft()[0].wait()

    def meet(self, words: Sequence[int]) -> list[list[int]]:
        """Some ints of every rank."""
        mine = torch.tensor(words)
        if self.size > _MOST_IN_A_RING:
            everyones = spread(mine, self.rank, self.size, self._swap)
        else:
            everyones = mine.new_empty(self.size * len(words))
            self.group._allgather_base(everyones, mine).wait()
        found: list[list[int]] = everyones.view(self.size, len(words)).tolist()
        return found

    def _swap(self, tensor: torch.Tensor, destination: int, source: int) -> torch.Tensor:
        received = torch.empty_like(tensor)
        sent = self.group.send([tensor], destination, _MEETING)
        self.group.recv([received], source, _MEETING).wait()
        sent.wait()
        return received


def spread(
    mine: torch.Tensor, rank: int, size: int, swap: Callable[[torch.Tensor, int, int], torch.Tensor]
) -> torch.Tensor:
    """Every rank's tensor, stacked, in log2(size) rounds, rounded up, where a ring takes size - 1.

    In each round a rank learns, from the one as far on as it knows, as much again (Bruck, Ho, Kipnis, Upfal and
    Weathersby, 1997). `swap` sends a tensor to one rank and returns the one, as large, that another sent.
    """
    known = mine[None]  # of this rank and those that follow
    while (count := len(known)) < size:
        wanted = known[: size - count].contiguous()
        known = torch.cat([known, swap(wanted, (rank - count) % size, (rank + count) % size)])
    return known.roll(rank, 0)


def is_reducible(dtype: torch.dtype) -> bool:
    """Whether gloo reduces the dtype."""
    return dtype in _REDUCIBLE


_REDUCIBLE = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
}  # fmt: skip


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
