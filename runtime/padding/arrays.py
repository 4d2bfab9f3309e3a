"""Arrays that are longer than what counts of them, and the launches that are given such.

What a padded program makes stays as long as it is, and is given to later launches as it is. Whoever needs what counts
alone, a read or another program, takes a copy through the host; so does an array that gets a surplus, or more of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchtpu.runtime.device.client import Client
from torchtpu.runtime.ir.program import Base, Program
from torchtpu.runtime.telemetry.counters import Counters

from .layout import PaddedProgram

Shape = tuple[int, ...]


class PaddedArray:
    """A device array of which only the first `shape` counts."""

    exist = False  # whether any was ever made

    __slots__ = ("array", "counting", "shape")

    def __init__(self, array: Any, shape: Shape) -> None:
        PaddedArray.exist = True
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
    if not isinstance(array, PaddedArray):
        return client.download(array)
    return client.download(array.array)[tuple(map(slice, array.shape))].contiguous()


def without_surplus(client: Client, counters: Counters, work: Any) -> Any:
    """A work whose arrays are what counts of the given one's."""
    given = work.inputs(False) if hasattr(type(work), "uploads") else work.inputs()
    return _Counting(client, counters, work) if any(isinstance(a, PaddedArray) for a in given) else work


def uploads_of(work: Any) -> list[int]:
    """The inputs of a work, by place, that lie on the host; none where it does not say."""
    return work.uploads() if hasattr(type(work), "uploads") else []


class PaddedExecutable:
    """What a plan is given whose program is padded: `executable` runs it."""

    meets_others = False
    takes_padding = True

    def __init__(self, client: Client, counters: Counters, padded: PaddedProgram, executable: Any) -> None:
        self.executable = executable
        self.program = padded.program
        self.outputs = padded.outputs
        self._client = client
        self._counters = counters
        self._inputs = padded.inputs
        self._numbers = torch.tensor(padded.numbers, dtype=torch.int64) if padded.numbers else None

    @property
    def shapes(self) -> list[Shape | None]:
        """What counts of each input that is longer."""
        return [self._inputs.get(i) for i in range(len(self.program.inputs))]

    @property
    def loaded(self) -> Any:
        return self.executable.loaded

    @property
    def about(self) -> Any:
        return self.executable.about

    @property
    def needed_bytes(self) -> int:
        """What a launch takes beyond its arguments."""
        needed: int = self.executable.needed_bytes
        return needed

    @property
    def is_prompt(self) -> bool:
        """Whether a launch now takes no time but the program's."""
        return bool(self.executable.is_prompt)

    def launch(self, work: Any, context: Any) -> None:
        """Launches the padded program; `context` is that of its executable's launch."""
        with context.recovering(work):
            padded = PaddedWork(work, self)
            context.check_padding(padded)
            context.launch(padded)

    def ints(self, given: torch.Tensor | None) -> torch.Tensor | None:
        """A launch's run-time ints, with the sizes."""
        if self._numbers is None or given is None:
            return given if self._numbers is None else self._numbers
        return torch.cat([given, self._numbers])

    def arrays(self, given: list[Any], device: int) -> list[Any]:
        """A launch's arrays, as long as the program has them."""
        made = list(given)
        for i, array in enumerate(given):
            if i in self._inputs:
                made[i] = self._padded(array, self.program.inputs[i].shape, device)
            elif isinstance(array, PaddedArray):
                made[i] = self._client.upload(download(self._client, array), device)
                self._counters.arrays_moved += 1
        return made

    def _padded(self, array: Any, shape: Shape, device: int) -> Any:
        if array is None:  # it failed
            return None
        if isinstance(array, PaddedArray) and tuple(array.array.aval.shape) == shape:
            return array.array
        values = download(self._client, array)
        padded = torch.zeros(shape, dtype=values.dtype)
        padded[tuple(map(slice, values.shape))] = values
        self._counters.arrays_moved += 1
        return self._client.upload(padded, device)


class _Counting:
    """What a launch asks of a work, without surplus."""

    def __init__(self, client: Client, counters: Counters, work: Any) -> None:
        self._client = client
        self._counters = counters
        self._work = work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def inputs(self, with_uploads: bool = True) -> list[Any]:
        given = self._work.inputs(with_uploads) if hasattr(type(self._work), "uploads") else self._work.inputs()
        return [self._counting(a) if isinstance(a, PaddedArray) else a for a in given]

    def input(self, place: int) -> Any:
        given = self._work.input(place)
        return self._counting(given) if isinstance(given, PaddedArray) else given

    def uploads(self) -> list[int]:
        return uploads_of(self._work)

    def drop_uploads(self, places: Sequence[int]) -> None:
        self._work.drop_uploads(places)

    def _counting(self, padded: PaddedArray) -> Any:
        if padded.counting is None:
            self._counters.arrays_moved += 1
            padded.counting = self._client.upload(download(self._client, padded), self._work.device)
        return padded.counting


class PaddedWork:
    """What a launch asks of a work, for a padded program."""

    def __init__(self, work: Any, executable: PaddedExecutable) -> None:
        self._work = work
        self._padded = executable
        self.executable = executable.executable
        self.program: Program = executable.program
        self.ints = executable.ints(work.ints)
        self.shapes = executable.shapes
        self.second: Any = None  # the same launch with another surplus, where that is checked
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
        self._arrays = None
        shapes = list(map(self._padded.outputs.get, range(len(arrays))))
        fault = self.second and self.second.difference(arrays, guards, shapes)
        if fault:
            self._work.failed(fault)
        else:
            self._work.done([self._made(k, array) for k, array in enumerate(arrays)], guards)

    def keep(self, output: int, array: Any, guard: Any) -> None:
        self._work.keep(output, self._made(output, array), guard)

    def restore(self, output: int, base: Base, array: Any, guard: Any) -> None:
        base = Base(self._padded.outputs.get(output, base.shape), base.dtype)
        self._work.restore(output, base, self._made(output, array), guard)

    def _made(self, output: int, array: Any) -> Any:
        shape = self._padded.outputs.get(output)
        return array if shape is None else PaddedArray(array, shape)
