"""Makes an op of the description that its template is found by: the inverse of `described`.

What a description leaves out, as strides and lines of code, does not decide what an op is traced into.

    sum.dim_IntList(tensor<AxBxf32>,[,int:1,],...)->(tensor<Axf32>) None    with sizes 23 and 29:
    Op("sum.dim_IntList", (Operand(sizes=(23, 29), ...), (1,), ...), (Result(sizes=(23,), ...),), ...)
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from torchtpu.ops.registry import LOWERINGS
from torchtpu.runtime.ir.calls import schema_of
from torchtpu.runtime.ir.program import (
    Base,
    Lifted,
    Op,
    Operand,
    PaddedExtent,
    Padding,
    Random,
    Result,
    Scalar,
    Symbolic,
    Write,
)
from torchtpu.runtime.ir.types import ELEMENT

_DTYPES = {element: dtype for dtype, element in ELEMENT.items()}
_NAMES = {"torch": torch, "inf": math.inf, "nan": math.nan, "Symbolic": Symbolic, "PaddedExtent": PaddedExtent}
_PADDING = ", padding "
_ROOM = re.compile(r"(\d+) of (\d+)")
_TENSOR = re.compile(r"tensor<((?:\d+x)*)(.*)>")


def filled(text: str, wanted: Sequence[str], sizes: Mapping[str, int]) -> str:
    """A line's description with sizes: `wanted` are letters, numbers and products of them, as in `2.A`."""
    numbers = iter(math.prod(sizes.get(part) or int(part) for part in each.split(".")) for each in wanted)
    return re.sub("#", lambda _: str(next(numbers)), text)


def op_of(description: str) -> Op:
    """An op with this description, whose bounds of padding are given as the room that they leave (`with_room`); raises
    ValueError where that is not all that it says."""
    name, _, rest = description.partition("(")
    given, _, rest = rest.rpartition(")->(")
    made, _, settings = rest.rpartition(") ")
    given, _, padding = given.partition(_PADDING)
    count = itertools.count()
    args = _values(iter(given.split(",") if given else []), count)
    words = iter(made.split(",") if made else [])
    writes = tuple(_writes(name, args, words, count))
    results = _results(words, count)
    known = None if settings == "None" else settings
    return Op(name, args, results, writes, "here", known, _padding(padding, count) if padding else None)


def _values(words: Iterator[str], count: Iterator[int]) -> tuple[Any, ...]:
    found: list[Any] = []
    for word in words:
        if word == "]":
            break
        found.append(_values(words, count) if word == "[" else _value(word, count))
    return tuple(found)


def _value(word: str, count: Iterator[int]) -> Any:
    if word.startswith("tensor<"):
        sizes, dtype = _type(word)
        return Operand(~next(count), sizes, _contiguous(sizes), 0, dtype, Base(sizes, dtype))
    if word in {"f", "i"}:
        return Lifted(word, next(count))
    if word == "random":
        return Random(Lifted("i", next(count)), Lifted("i", next(count)))
    parts = word.split(":")
    if len(parts) == 3:
        value = Lifted(parts[0], next(count)) if parts[0] in {"f", "i"} else _evaluated(parts[0])
        return Scalar(value, _evaluated(parts[1]), _evaluated(parts[2]))
    return _evaluated(parts[1]) if len(parts) == 2 else torch.device(word)


def _evaluated(text: str) -> Any:
    return eval(text, dict(_NAMES))  # noqa: S307 -- what `repr` gave


def _type(word: str) -> tuple[tuple[int, ...], torch.dtype]:
    found = _TENSOR.fullmatch(word)
    if found is None:
        raise ValueError(f"{word} is no array")
    return tuple(map(int, found[1].split("x")[:-1])), _DTYPES[found[2]]


def _contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[k + 1 :]) for k in range(len(sizes)))


def _writes(name: str, args: Sequence[Any], words: Iterator[str], count: Iterator[int]) -> Iterator[Write]:
    """A write into each array that the op writes, in the order of the arguments."""
    mutated = LOWERINGS[name].mutates if name in LOWERINGS else ()
    for arg, (argument, value) in enumerate(zip(schema_of(name).arguments, args, strict=False)):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if not is_written and argument.name not in mutated:
            continue
        for element, item in enumerate(value) if isinstance(value, tuple) else [(None, value)]:
            if item is not None:
                sizes, dtype = _type(next(words))
                base, strides = Base(sizes, dtype), _contiguous(sizes)
                yield Write(arg, element, next(count), sizes, strides, 0, dtype, base, replaces=True)


def _results(words: Iterator[str], count: Iterator[int]) -> tuple[Any, ...]:
    found: list[Any] = []
    for word in words:
        if word == "]":
            break
        if word == "[":
            found.append(_results(words, count))
        elif word == "-":
            found.append(None)
        else:
            sizes, dtype = _type(word)
            found.append(Result(next(count), sizes, _contiguous(sizes), dtype, Base(sizes, dtype)))
    return tuple(found)


def _padding(text: str, count: Iterator[int]) -> Padding:
    rooms, parts = text[: text.index(")")], text[text.index(")") + 2 :]
    bounds = tuple(
        (2, capacity - room, capacity) for room, capacity in (map(int, each) for each in _ROOM.findall(rooms))
    )
    depth = itertools.accumulate({"(": 1, ")": -1}.get(letter, 0) for letter in parts)
    end = list(depth).index(0) + 1
    counts = tuple(Lifted("i", next(count)) for _ in bounds)
    return Padding(counts, bounds, _evaluated(parts[:end]), _evaluated(parts[end:].strip()))
