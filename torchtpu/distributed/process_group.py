"""The ranks as one client: the devices that programs may span, from the store of the first group."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, cast

from torch._C._distributed_c10d import PrefixStore, Store

from torchtpu.runtime.device.process_group import Homes, ProcessGroup

Start = Callable[[ProcessGroup], Any]  # starts the engine; its device's name among all ranks', None where it runs alone


class Ranks:
    """What the ranks of the first group have found out about each other."""

    def __init__(self, start: Start, is_free: Callable[[], bool]) -> None:
        self._start = start
        self._is_free = is_free
        self._name = ""  # of the process group that this process belongs to
        self._home: int | None = None
        self._homes: Homes = ()

    def join(self, store: Store, rank: int, size: int, *, is_wanted: bool) -> None:
        """Makes the ranks one process group, if all of them want it and none has used its device yet; waits for all of
        them."""
        store = PrefixStore("process group", store)
        state = "no" if not is_wanted else self._name or ("free" if self._is_free() else "no")
        states = _exchange(PrefixStore("states", store), rank, size, state)
        if set(states) == {"free"}:
            if rank == 0:
                store.set("name", uuid.uuid4().hex)
            self._name = store.get("name").decode()
            key_values = _StoreBoard(PrefixStore("key-value store", store), rank, size)
            self._home = self._start(ProcessGroup(rank, size, key_values))
        self._homes = ()
        if len(set(states)) > 1 or states[0] == "no":
            return
        homes = _exchange(PrefixStore("homes", store), rank, size, str(self._home))
        if "None" not in homes and len(set(homes)) == size:
            self._homes = tuple(map(int, homes))

    def homes(self, ranks: list[int]) -> Homes:
        """The devices of some ranks (of all where the list is empty); () where programs do not span them."""
        return tuple(self._homes[rank] for rank in ranks) if ranks and self._homes else self._homes


def _exchange(store: Store, rank: int, size: int, text: str) -> list[str]:
    store.set(str(rank), text)
    return [found.decode() for found in store.multi_get([str(other) for other in range(size)])]


class _StoreBoard:
    """A key-value store in a store: each rank numbers what it puts up."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store: Any = cast("Any", store).clone()  # another thread may wait in the store
        self._rank = rank
        self._num_put = 0
        self._num_read = dict.fromkeys((other for other in range(size) if other != rank), 0)

    def put(self, key: str, value: bytes) -> None:
        self._store.set(f"{self._rank}/{self._num_put}", key.encode() + b"\n" + value)
        self._num_put += 1

    def news(self) -> list[tuple[str, bytes]]:
        found = []
        for rank, number in self._num_read.items():
            while self._store.check([name := f"{rank}/{number}"]):
                key, _, value = self._store.get(name).partition(b"\n")
                found.append((key.decode(), value))
                number += 1
            self._num_read[rank] = number
        return found
