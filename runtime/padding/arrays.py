"""Arrays that are longer than what counts of them, and the launches that are given such.

What a padded program makes stays as long as it is, and is given to later launches as it is. Whoever needs what counts
alone, a read or another program, takes a copy through the host; so does an array that gets a surplus, or more of it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from array import array as numbers_of
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchtpu.runtime.device.client import Client
from torchtpu.runtime.ir.program import Base, Program
from torchtpu.runtime.ir.strided_access import fits
from torchtpu.runtime.telemetry.counters import Counters

from .layout import PaddedProgram

Shape = tuple[int, ...]

_MOST_COPIES = 64  # that are kept
_MOST_BYTES = 1 << 18  # of one


class PaddedArray:
    """A device array of which only the first `shape` counts."""

    exist = False  # whether any was ever made

    __slots__ = ("__weakref__", "array", "counting", "shape")

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


class Copies:
    """Makes copies of arrays that have another surplus, or none. A few small ones are kept while what they copy lives:
    loops read an array lap by lap. Methods may be called from any thread."""

    def __init__(self, client: Client, counters: Counters) -> None:
        self._client = client
        self._counters = counters
        # By the id of what they copy; changed by single steps of the GIL, in the callbacks of weak references too.
        self._known: OrderedDict[tuple[int, Shape], tuple[weakref.ref[Any], Any]] = OrderedDict()

    def padded(self, array: Any, shape: Shape, device: int) -> Any:
        """An array of this shape that begins with what counts of the given one; None of one that failed."""
        if array is None:
            return None
        if isinstance(array, PaddedArray) and tuple(array.array.aval.shape) == shape:
            return array.array
        key = id(array), shape
        known = self._known.get(key)
        if known is not None and known[0]() is array and not known[1].is_deleted():  # a launch may have its memory
            return known[1]
        values = download(self._client, array)
        longer = torch.zeros(shape, dtype=values.dtype)
        longer[tuple(map(slice, values.shape))] = values
        made = self._upload(longer, device)
        if longer.nbytes <= _MOST_BYTES:
            self._keep(key, array, made)
        return made

    def counting(self, array: Any, device: int) -> Any:
        """An array of what counts of the given one: that itself, where nothing of it is surplus."""
        if not isinstance(array, PaddedArray):
            return array
        if array.counting is None or array.counting.is_deleted():  # as above
            array.counting = self._upload(download(self._client, array), device)
        return array.counting

    def without_surplus(self, work: Any) -> Any:
        """A work whose arrays are what counts of the given one's."""
        given = work.inputs(False) if hasattr(type(work), "uploads") else work.inputs()
        return _Counting(self, work) if any(isinstance(a, PaddedArray) for a in given) else work

    def _upload(self, values: torch.Tensor, device: int) -> Any:
        self._counters.arrays_moved += 1
        return self._client.upload(values, device)

    def _keep(self, key: tuple[int, Shape], array: Any, made: Any) -> None:
        # A callback without bytecode, of which the reference is `pop`'s default: in one of Python, what a signal's
        # handler raises would be lost.
        self._known[key] = weakref.ref(array, functools.partial(self._known.pop, key)), made
        if len(self._known) > _MOST_COPIES:
            with contextlib.suppress(KeyError):
                self._known.popitem(last=False)


def uploads_of(work: Any) -> list[int]:
    """The inputs of a work, by place, that lie on the host; none where it does not say."""
    return work.uploads() if hasattr(type(work), "uploads") else []


class PaddedExecutable:
    """What a plan is given whose program is padded: `executable` runs it. The program as it was recorded is asked of a
    launch where it is needed: plans are many, and what Python keeps of each costs time at every garbage collection."""

    meets_others = False
    takes_padding = True

    def __init__(
        self, copies: Copies, padded: PaddedProgram, executable: Any, make_exact: Callable[[Program, int], Any]
    ) -> None:
        self.executable = executable
        self._make_exact = make_exact
        self._exact: dict[int, Any] = {}  # what runs the program as it was recorded, by device
        self._limits = padded.limits
        self.program = padded.program
        self.outputs = padded.outputs
        self._copies = copies
        self._inputs = padded.inputs
        self._moves = padded.moves
        self._digits = padded.digits
        numbers = numbers_of("q", padded.numbers)
        self._numbers = torch.frombuffer(numbers, dtype=torch.int64) if numbers else None

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

    def launch(self, work: Any, context: Any) -> None:
        """Launches the padded program, or what it stands for; `context` is that of its executable's launch."""
        if self._limits and not fits(self._limits, work.ints.tolist()):
            context.counters.not_padded("a part that runs over the end of a row", work.program.line)
            with context.recovering(work):
                exact = self._exact.get(work.device)
                if exact is None:
                    exact = self._exact[work.device] = self._make_exact(work.program, work.device)
                exact.launch(self._copies.without_surplus(work), context)
            return
        with context.recovering(work):
            padded = PaddedWork(work, self)
            context.check_padding(padded)
            context.launch(padded)

    def ints(self, given: torch.Tensor | None) -> torch.Tensor | None:
        """A launch's run-time ints, with the sizes."""
        numbers = self._numbers
        if given is None:
            return numbers
        if numbers is not None and self._digits:
            numbers = numbers.clone()
            for place, (of, weight, size) in self._digits.items():
                numbers[place] = int(given[of]) // weight % size + 1
        if self._moves:
            given = given.clone()
            for place, (shape, longer) in self._moves.items():
                given[place] = _moved(int(given[place]), shape, longer)
        return given if numbers is None else torch.cat([given, numbers])

    def arrays(self, given: list[Any], device: int) -> list[Any]:
        """A launch's arrays, as long as the program has them."""
        shapes = (self.program.inputs[i].shape if i in self._inputs else None for i in range(len(given)))
        return [
            self._copies.counting(array, device) if shape is None else self._copies.padded(array, shape, device)
            for array, shape in zip(given, shapes, strict=True)
        ]


class _Counting:
    """What a launch asks of a work, without surplus."""

    def __init__(self, copies: Copies, work: Any) -> None:
        self._copies = copies
        self._work = work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def inputs(self, with_uploads: bool = True) -> list[Any]:
        given = self._work.inputs(with_uploads) if hasattr(type(self._work), "uploads") else self._work.inputs()
        return [self._copies.counting(array, self._work.device) for array in given]

    def input(self, place: int) -> Any:
        return self._copies.counting(self._work.input(place), self._work.device)

    def uploads(self) -> list[int]:
        return uploads_of(self._work)

    def drop_uploads(self, places: Sequence[int]) -> None:
        self._work.drop_uploads(places)


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
        if shape is None:
            return array
        # A piece of the program may be padded further.
        return PaddedArray(array.array if isinstance(array, PaddedArray) else array, shape)


def _moved(offset: int, shape: Shape, longer: Shape) -> int:
    """Where an element lies in an array that is longer."""
    found, step = 0, 1
    for size, capacity in zip(reversed(shape), reversed(longer), strict=True):
        offset, place = divmod(offset, size)
        found, step = found + place * step, step * capacity
    return found
