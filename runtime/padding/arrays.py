"""Arrays with room: in comes a launch of a program whose sizes have grown, out goes one of its form with room.

What is made with room stays so, and is given to later launches as it is. Whoever needs it as it counts, a read or a
program without room, takes a copy through the host; so does an array that gets room, or more of it. Both are counted.
"""

from __future__ import annotations

from typing import Any

import torch

from torchtpu.runtime.device.client import Client
from torchtpu.runtime.ir.program import Program
from torchtpu.runtime.telemetry.counters import Counters

from .grow import Grown

Shape = tuple[int, ...]


class RoomyArray:
    """A device array of which only the first `shape` counts."""

    exist = False  # whether any was ever made

    __slots__ = ("array", "counting", "shape")

    def __init__(self, array: Any, shape: Shape) -> None:
        RoomyArray.exist = True
        self.array = array
        self.shape = shape
        self.counting: Any = None  # an array of what counts, once somebody needed it

    @property
    def aval(self) -> Any:
        """Of all the memory that it takes."""
        return self.array.aval

    def is_deleted(self) -> bool:
        deleted: bool = self.array.is_deleted()
        return deleted


def download(client: Client, array: Any) -> torch.Tensor:
    """What counts of an array, on the host; waits for it."""
    if not isinstance(array, RoomyArray):
        return client.download(array)
    return client.download(array.array)[tuple(map(slice, array.shape))].contiguous()


def without_room(client: Client, counters: Counters, work: Any) -> Any:
    """A work whose arrays are what counts of the given one's."""
    return _Counting(client, counters, work) if any(isinstance(a, RoomyArray) for a in work.inputs()) else work


class Padded:
    """What a plan is given whose program has room: `executable` runs it."""

    def __init__(self, client: Client, counters: Counters, grown: Grown, executable: Any) -> None:
        self.executable = executable
        self.program = grown.program
        self.outputs = grown.outputs
        self._client = client
        self._counters = counters
        self._inputs = grown.inputs
        self._numbers = torch.tensor(grown.numbers, dtype=torch.int64) if grown.numbers else None

    def work(self, work: Any) -> PaddedWork:
        """What the program with room is launched with."""
        return PaddedWork(work, self)

    def ints(self, given: torch.Tensor | None) -> torch.Tensor | None:
        """A launch's run-time ints, with the sizes."""
        if self._numbers is None or given is None:
            return given if self._numbers is None else self._numbers
        return torch.cat([given, self._numbers])

    def arrays(self, given: list[Any], device: int) -> list[Any]:
        """A launch's arrays, with room where the program has it."""
        made = list(given)
        for i, array in enumerate(given):
            if i in self._inputs:
                made[i] = self._with_room(array, self.program.inputs[i].shape, device)
        return made

    def _with_room(self, array: Any, shape: Shape, device: int) -> Any:
        if array is None:  # it failed
            return None
        if isinstance(array, RoomyArray) and tuple(array.array.aval.shape) == shape:
            return array.array
        values = download(self._client, array)
        room = torch.zeros(shape, dtype=values.dtype)
        room[tuple(map(slice, values.shape))] = values
        self._counters.arrays_moved += 1
        return self._client.upload(room, device)


class _Counting:
    """What a launch asks of a work, without room."""

    def __init__(self, client: Client, counters: Counters, work: Any) -> None:
        self._client = client
        self._counters = counters
        self._work = work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def inputs(self) -> list[Any]:
        return [self._counting(a) if isinstance(a, RoomyArray) else a for a in self._work.inputs()]

    def _counting(self, roomy: RoomyArray) -> Any:
        if roomy.counting is None:
            self._counters.arrays_moved += 1
            roomy.counting = self._client.upload(download(self._client, roomy), self._work.device)
        return roomy.counting


class PaddedWork:
    """What a launch asks of a work, for the form with room."""

    def __init__(self, work: Any, padded: Padded) -> None:
        self._work = work
        self._padded = padded
        self.executable = padded.executable
        self.program: Program = padded.program
        self.ints = padded.ints(work.ints)
        self._arrays: list[Any] | None = None

    @property
    def recorded(self) -> Any:
        """The work as it was recorded."""
        return self._work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def inputs(self) -> list[Any]:
        if self._arrays is None:
            self._arrays = self._padded.arrays(self._work.inputs(), self._work.device)
        return list(self._arrays)

    def done(self, arrays: list[Any], guards: list[Any]) -> None:
        made = list(arrays)
        for k, shape in self._padded.outputs.items():
            made[k] = RoomyArray(made[k], shape)
        self._arrays = None
        self._work.done(made, guards)
