"""A recorded region as frozen data classes, as the recorder hands it over.

`Program` is everything that decides a program's text.  Values are numbered: a value >= 0 is made by an op of the
program, a value < 0 is its input `~value`, and `None` stands for a storage that was never written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Base(NamedTuple):
    """The n-d array, contiguous in memory order, that holds one version of a storage."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Lifted:
    """A number that the program takes at run time: `floats[index]` (float64) or `ints[index]` (int64)."""

    kind: str  # "f" or "i"
    index: int


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument: a strided view, counted in elements of `dtype`, into a value that is laid out as `base`."""

    value: int | None
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int | Lifted
    dtype: torch.dtype
    base: Base


@dataclass(frozen=True, slots=True)
class Scalar:
    """A 0-dim CPU tensor argument; `wrapped` where it was a Python number, which type promotion tells apart."""

    value: bool | int | float | complex | Lifted
    dtype: torch.dtype
    wrapped: bool


@dataclass(frozen=True, slots=True)
class Random:
    """A generator argument: the (seed, offset) that this op draws from."""

    seed: Lifted
    offset: Lifted


@dataclass(frozen=True, slots=True)
class Result:
    """A new tensor: its value number, its geometry at offset 0, and the array that holds it."""

    value: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    base: Base


@dataclass(frozen=True, slots=True)
class Write:
    """A write of an op's next unaliased result into argument `arg` (element `element` where that is a list).

    The geometry is the argument's after the call (an out= argument may have been resized).  Where `replaces`, the
    write covers the whole storage and the old value is not needed; the new value is laid out as `base`.
    """

    arg: int
    element: int | None
    value: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int | Lifted
    dtype: torch.dtype
    base: Base
    replaces: bool


@dataclass(frozen=True, slots=True)
class Symbolic:
    """An int argument that is an expression of the variables of the op's `Padding`."""

    text: str


@dataclass(frozen=True, slots=True)
class PaddedExtent:
    """What a tensor of `sizes` takes of an array of `shape`, which is longer in memory: all of it where `dims` is None.

    Else the array is reshaped to `factors`, `ranges[k]` (start, count, step) is taken of factor k, and `dims[d]` are
    the factors that dimension d runs over (see `StridedAccess`). With `order`, what is taken is a run of the one
    factor, in which the dimensions follow each other in this order. With `places`, it lies anywhere in the array: an
    element at the first of these, and as far from it, for each dimension, as the others say, as overlapping windows
    do. An int that changes is an expression, as text.
    """

    sizes: tuple[int | str, ...]
    shape: tuple[int | str, ...]
    factors: tuple[int | str, ...] = ()
    ranges: tuple[tuple[int | str, int | str, int], ...] = ()
    dims: tuple[tuple[int, ...], ...] | None = None
    order: tuple[int, ...] = ()
    places: tuple[int | str, ...] = ()


@dataclass(frozen=True, slots=True)
class Padding:
    """How an op computes on arrays that are longer than what counts of them.

    Variables a, b, ... of its sizes are the run-time ints `counts`, between the (least, most) of their `bounds`, whose
    third number is how long a dimension of that size is in memory. `reads` has a part for each tensor argument in
    turn, `made` for each array that the op makes; None where that is as it is recorded.
    """

    counts: tuple[Lifted, ...]
    bounds: tuple[tuple[int, int, int], ...]
    reads: tuple[PaddedExtent | None, ...]
    made: tuple[PaddedExtent | None, ...]


@dataclass(frozen=True, slots=True)
class Op:
    """One recorded op.

    `name` is ATen's name without the namespace (`add_.Tensor`).  `args` follow the schema (with one `Random` appended
    for a random op whose schema has no generator).  An argument is None, a plain Python value, a torch.dtype, a
    `Lifted`, `Scalar`, `Random` or `Operand`, or a tuple of these.  `results` follow the returns: None where a return
    aliases an argument, is undefined or is no tensor; a tuple for a list of tensors.  `settings` are words for
    what holds at the call: of `torch.set_float32_matmul_precision`, for an op whose result depends on it, and the
    default dtype where that is not float32.  With `padding`, arrays are
    longer than what counts of them; ints that change are `Symbolic`.
    """

    name: str
    args: tuple[Any, ...]
    results: tuple[Result | tuple[Result | None, ...] | None, ...]
    writes: tuple[Write, ...]
    line: str
    settings: str | None = None
    padding: Padding | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """A region with its live set and donation mask: what is compiled.

    `inputs[i]` is the layout of input i, `outputs` are the values still alive at the cut in ascending order,
    `donated` are the inputs nobody else holds, `floats` and `ints` count the lifted numbers.
    """

    ops: tuple[Op, ...]
    inputs: tuple[Base, ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...]
    floats: int
    ints: int
    line: str

    def __str__(self) -> str:
        return "\n".join([f"region from {self.line}", *map(_show_op, self.ops), f"return {_show_values(self.outputs)}"])


def _show_values(values: tuple[int, ...]) -> str:
    return ", ".join(f"%{v}" if v >= 0 else f"in{~v}" for v in values)


def _show_op(op: Op) -> str:
    made = [r for result in op.results for r in (result if isinstance(result, tuple) else (result,)) if r is not None]
    left = ", ".join(
        [_show_tensor(r.value, r) for r in made] + [f"{_show_tensor(w.value, w)} in {w.arg}" for w in op.writes]
    )
    return f"  {left} = {op.name}({', '.join(map(_show_arg, op.args))})  # {op.line}"


def _show_tensor(value: int | None, geometry: Operand | Result | Write) -> str:
    name = "undefined" if value is None else f"%{value}" if value >= 0 else f"in{~value}"
    dtype = str(geometry.dtype).removeprefix("torch.")
    return f"{name}: {dtype}{list(geometry.sizes)}"


def _show_arg(arg: Any) -> str:
    match arg:
        case Operand():
            return _show_tensor(arg.value, arg)
        case Lifted():
            return f"{'float' if arg.kind == 'f' else 'int'}{arg.index}"
        case Scalar():
            return _show_arg(arg.value)
        case Random():
            return "rng"
        case tuple():
            return f"[{', '.join(map(_show_arg, arg))}]"
        case _:
            return str(arg)
