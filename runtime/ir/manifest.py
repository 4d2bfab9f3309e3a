"""Manifests: recorded programs as lines of JSON, written and read.

A line is data: reading one runs no code, and whoever writes a manifest can make its reader compile something, no more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .checked import MOST_INT, MOST_RANK, boolean, expression, fields, integer, integers, items, parsed, text
from .program import Base, Lifted, Op, Operand, PaddedExtent, Padding, Program, Random, Result, Scalar, Symbolic, Write

FORMAT = "torchtpu manifest 2"
_KEPT = (Base, Lifted, Op, Operand, Padding, PaddedExtent, Program, Random, Result, Scalar, Symbolic, Write)
_CLASSES = {kept.__name__: kept for kept in _KEPT}
_FIELDS_OF = {kept: [f.name for f in dataclasses.fields(kept)] for kept in _KEPT if dataclasses.is_dataclass(kept)}
_PLAIN = frozenset((bool, int, float, str))
_NAMED = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}
_VALUES: dict[str, dict[str, Any]] = {
    name: {str(v).removeprefix("torch."): v for v in vars(torch).values() if type(v) is kind}
    for kind, name in _NAMED.items()
}
_MOST_LINE_BYTES = 2**30
_MOST_LIFTED = 2**24
_MOST_VALUE = 2**31
_MOST_VARIABLES = 8


class ManifestError(ValueError):
    """A file that is no manifest, or one of another version."""


class RecordedProgram(NamedTuple):
    """A program as it was recorded.

    `is_flat` as `lower` has it; `guessed_since` is the line of the first read that was answered with a stand-in before
    this program was recorded, or "".
    """

    program: Program
    is_flat: bool = False
    guessed_since: str = ""

    @property
    def identity(self) -> str:
        """Names what is compiled; equal programs recorded on other lines have the same."""
        return hashlib.sha256(_json(_without_lines(encode(self.program)), self.is_flat)).hexdigest()


class ProgramOutcome(NamedTuple):
    """What became of a program in one process: "recorded", "hit", "compiled" or "failed"."""

    identity: str
    outcome: str
    digest: str = ""
    milliseconds: float = 0.0
    error: str = ""


class Journal:
    """One process's lines in a directory: each program once, each outcome. May be used from any thread."""

    def __init__(self, directory: str | Path) -> None:
        self._path = Path(directory) / f"{os.getpid()}.jsonl"
        self._lock = threading.Lock()  # guards what follows
        self._known: set[str] = set()
        self._guessed_since = ""

    def program(self, program: Program, *, is_flat: bool = False) -> str:
        """Notes that a program was recorded; its identity."""
        with self._lock:
            recorded = RecordedProgram(program, is_flat, self._guessed_since)
            identity = recorded.identity
            if identity not in self._known:
                self._known.add(identity)
                self._write({"identity": identity, "program": _encode_recorded(recorded)})
        return identity

    def outcome(self, outcome: ProgramOutcome) -> None:
        """Notes what became of a program."""
        with self._lock:
            self._write({"outcome": outcome._asdict()})

    def guessed(self, line: str) -> None:
        """Notes that a read on `line` was answered with a stand-in: what follows may not be what a device would do."""
        with self._lock:
            if not self._guessed_since:
                self._guessed_since = line
                self._write({"guessed": line})

    def note(self, **facts: Any) -> None:
        """Notes facts about the process."""
        with self._lock:
            self._write({"facts": facts})

    def _write(self, fields: Mapping[str, Any]) -> None:
        # Opened per line: a fork, an exec or a kill leaves whole lines behind. Who reads them may have gone.
        with contextlib.suppress(OSError), self._path.open("ab") as file:
            file.write(_json(fields) + b"\n")


def write_lines(path: str | Path, lines: Iterable[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    """Writes a manifest of lines as journals have them; `about` is for people. Raises OSError."""
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(_json({"format": FORMAT, "torch": torch.__version__, "about": about}) + b"\n")
            for line in lines:
                file.write(_json({"identity": line["identity"], "program": line["program"]}) + b"\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """A manifest's lines, each with a program that `decode_recorded` takes; ManifestError where it is none."""
    with Path(path).open("rb") as file:
        found = _line(path, 1, file.readline(_MOST_LINE_BYTES)).get("format")
        if not isinstance(found, str) or not found.startswith(FORMAT.rstrip("0123456789")):
            raise ManifestError(f"{path} is not a manifest")
        if found != FORMAT:
            raise ManifestError(f"{path} is of another version ({found[:80]}, this is {FORMAT})")
        for number in itertools.count(2):
            content = file.readline(_MOST_LINE_BYTES)
            if not content:
                return
            line = _line(path, number, content)
            try:
                # Lines written by hand or by another version get the identity that they have here.
                yield {"identity": decode_recorded(line.get("program")).identity, "program": line.get("program")}
            except ValueError as error:
                raise ManifestError(f"{path}, line {number}, is no program ({error})") from error


def _line(path: str | Path, number: int, content: bytes) -> dict[str, Any]:
    """What a line says."""
    try:
        found = parsed(content)
    except (ValueError, MemoryError) as error:
        raise ManifestError(f"{path} is not a manifest (line {number}: {type(error).__name__})") from error
    if not isinstance(found, dict):
        raise ManifestError(f"{path} is not a manifest (line {number})")
    return found


def decode_recorded(line: Any) -> RecordedProgram:
    """The program that a line holds under "program"; ValueError where it holds none."""
    program, is_flat, guessed_since = fields(line, RecordedProgram._fields)
    return RecordedProgram(decode(program), boolean(is_flat), text(guessed_since))


def _encode_recorded(recorded: RecordedProgram) -> dict[str, Any]:
    return {**recorded._asdict(), "program": encode(recorded.program)}


def _json(*values: Any) -> bytes:
    return json.dumps(values if len(values) > 1 else values[0], separators=(",", ":")).encode("ascii")


def encode(value: Any) -> Any:
    """A program, or a part of one, as JSON has it."""
    kind = type(value)
    if value is None or kind in _PLAIN:
        return value
    if kind is tuple or kind is list:
        return [encode(item) for item in value]
    if kind in _FIELDS_OF:
        return {kind.__name__: [encode(getattr(value, name)) for name in _FIELDS_OF[kind]]}
    if kind is Base:
        return {kind.__name__: [encode(item) for item in value]}
    if kind in _NAMED:
        return {_NAMED[kind]: str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"device": str(value)}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    raise TypeError(f"a recorded program holds a {kind.__name__}: {value!r}")


def decode(value: Any) -> Program:
    """The program that `encode` was given; ValueError where it is none.

    What comes out holds together: each value is made before it is read and lies in an array of that layout, and no
    number is larger than one that a recorded program has.
    """
    try:
        return _Decoder().program(value)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


class _Decoder:
    """Reads one program."""

    def __init__(self) -> None:
        self._floats = self._ints = 0
        self._bases: dict[int, Base] = {}  # of the values that are there

    def program(self, value: Any) -> Program:
        ops, inputs, outputs, donated, floats, ints, line = _content(value, "Program", 7)
        self._floats, self._ints = integer(floats, 0, _MOST_LIFTED), integer(ints, 0, _MOST_LIFTED)
        bases = tuple([_base(base) for base in items(inputs)])
        self._bases = {~i: base for i, base in enumerate(bases)}
        made = tuple([self._op(op) for op in items(ops)])
        for output in integers(outputs, -MOST_INT):
            if output not in self._bases:
                raise ValueError(f"nothing makes value {output}")
        donations = integers(donated, 0, len(bases) - 1)
        return Program(made, bases, tuple(outputs), donations, self._floats, self._ints, text(line))

    def _op(self, value: Any) -> Op:
        name, args, results, writes, line, settings, padding = _content(value, "Op", 7)
        arguments = tuple([self._argument(item) for item in items(args)])
        made = tuple([self._results(item) for item in items(results)])
        written = tuple([self._write(item, arguments) for item in items(writes)])
        how = None if settings is None else text(settings)
        return Op(text(name), arguments, made, written, text(line), how, self._padding(padding))

    def _padding(self, value: Any) -> Padding | None:
        if value is None:
            return None
        counts, bounds, reads, made = _content(value, "Padding", 4)
        numbers = tuple([self._lifted(*_content(count, "Lifted", 2)) for count in items(counts, most=_MOST_VARIABLES)])
        limits = tuple([_bound(*integers(bound, count=3)) for bound in items(bounds, len(numbers))])
        return Padding(numbers, limits, tuple(map(_part, items(reads))), tuple(map(_part, items(made))))

    def _argument(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is float or kind is str:
            return value
        if kind is int:
            return integer(value, -MOST_INT - 1, 2 * MOST_INT + 1)
        if kind is list:
            return tuple([self._argument(item) for item in value])
        name, content = _only(value)
        if name == "Operand":
            return self._operand(content)
        if name == "Scalar":
            number, dtype, is_wrapped = items(content, 3)
            found = self._argument(number)
            if type(found) not in (bool, int, float, complex, Lifted):
                raise ValueError(f"{name} of no number")
            return Scalar(found, _named("dtype", dtype), boolean(is_wrapped))
        if name == "Lifted":
            return self._lifted(*items(content, 2))
        if name == "Symbolic":
            return Symbolic(expression(*items(content, 1)))
        if name == "Random":
            seed, offset = (self._lifted(*_content(item, "Lifted", 2)) for item in items(content, 2))
            return Random(seed, offset)
        if name == "complex":
            real, imaginary = items(content, 2)
            if type(real) is float and type(imaginary) is float:
                return complex(real, imaginary)
        if name == "device":
            return _device(text(content))
        return _named(name, value)

    def _lifted(self, kind: Any, index: Any) -> Lifted:
        if kind not in ("f", "i"):
            raise ValueError("a number that the program takes is a float or an int")
        return Lifted(kind, integer(index, 0, (self._floats if kind == "f" else self._ints) - 1))

    def _offset(self, value: Any) -> int | Lifted:
        if type(value) is int:
            return integer(value)
        lifted = self._lifted(*_content(value, "Lifted", 2))
        if lifted.kind != "i":
            raise ValueError("an offset is an int")
        return lifted

    def _operand(self, content: Any) -> Operand:
        value, sizes, strides, offset, dtype, base = items(content, 6)
        where, found = self._offset(offset), _base(base)
        view = Operand(value, *_geometry(sizes, strides), where, _named("dtype", dtype), found)
        if value is not None and self._bases.get(integer(value, -MOST_INT)) != found:
            raise ValueError(f"value {value} is not there, or is laid out otherwise")
        _check_reach(view)
        return view

    def _results(self, value: Any) -> Result | tuple[Result | None, ...] | None:
        if type(value) is list:
            return tuple([None if item is None else self._result(item) for item in value])
        return None if value is None else self._result(value)

    def _result(self, item: Any) -> Result:
        value, sizes, strides, dtype, base = _content(item, "Result", 5)
        made = Result(self._new(value), *_geometry(sizes, strides), _named("dtype", dtype), _base(base))
        self._bases[made.value] = made.base
        return made

    def _write(self, item: Any, arguments: tuple[Any, ...]) -> Write:
        at, element, value, sizes, strides, offset, dtype, base, replaces = _content(item, "Write", 9)
        target = arguments[integer(at, 0, len(arguments) - 1)]
        if element is not None:
            target = target[integer(element, 0, len(target) - 1)] if type(target) is tuple else None
        if type(target) is not Operand:
            raise ValueError("what is written is no tensor")
        where, found = self._offset(offset), _base(base)
        made = Write(
            at,
            element,
            self._new(value),
            *_geometry(sizes, strides),
            where,
            _named("dtype", dtype),
            found,
            boolean(replaces),
        )
        if not made.replaces and target.base != found:
            raise ValueError("a part of a value is written that is laid out otherwise")
        _check_reach(made)
        self._bases[made.value] = found
        return made

    def _new(self, value: Any) -> int:
        number = integer(value, 0, _MOST_VALUE)
        if number in self._bases:
            raise ValueError(f"value {number} is made twice")
        return number


def _only(value: Any) -> tuple[str, Any]:
    """The name and the content of an object that has one."""
    if type(value) is not dict or len(value) != 1:
        raise ValueError("an object with one name was expected")
    ((name, content),) = value.items()
    return name, content


def _content(value: Any, name: str, count: int) -> list[Any]:
    """The fields of a data class of that name."""
    found, content = _only(value)
    if found != name:
        raise ValueError(f"a {name} was expected")
    return items(content, count)


def _bound(least: int, most: int, length: int) -> tuple[int, int, int]:
    return least, most, length


def _part(value: Any) -> PaddedExtent | None:
    """What a padded array has of a tensor."""
    if value is None:
        return None
    sizes, shape, factors, ranges, dims, order, places = _content(value, "PaddedExtent", 7)
    taken = [items(item, 3) for item in items(ranges, most=MOST_RANK)]
    return PaddedExtent(
        _sizes(sizes),
        _sizes(shape),
        _sizes(factors),
        tuple([(_size(start), _size(count), integer(step, -MOST_INT)) for start, count, step in taken]),
        None if dims is None else tuple([integers(dim, 0, MOST_RANK) for dim in items(dims, most=MOST_RANK)]),
        integers(order, 0, MOST_RANK),
        _sizes(places),
    )


def _sizes(value: Any) -> tuple[int | str, ...]:
    return tuple(map(_size, items(value, most=MOST_RANK)))


def _size(value: Any) -> int | str:
    """A size, or an expression of the variables of an op's padding."""
    return expression(value) if type(value) is str else integer(value, -MOST_INT)


def _base(value: Any) -> Base:
    shape, dtype = _content(value, "Base", 2)
    sizes, of = integers(shape), _named("dtype", dtype)
    if len(sizes) > MOST_RANK or _nbytes(sizes, of) > MOST_INT:
        raise ValueError("an array that no memory holds")
    return Base(sizes, of)


def _nbytes(sizes: tuple[int, ...], dtype: torch.dtype) -> int:
    # A size of 0 counts as 1: what is empty is not to hide a number that is too large for what follows.
    total = dtype.itemsize
    for size in sizes:
        total *= size or 1
        if total > MOST_INT:
            break
    return total


def _geometry(sizes: Any, strides: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    found = integers(sizes)
    if len(found) > MOST_RANK:
        raise ValueError("a tensor of too many dimensions")
    return found, integers(strides, count=len(found))


def _check_reach(view: Operand | Write) -> None:
    """ValueError where a view reaches farther than any memory; beyond its array it may, where that is padded."""
    last = view.offset if type(view.offset) is int else 0
    for size, stride in zip(view.sizes, view.strides, strict=True):
        last += size * stride
    if (last + 1) * view.dtype.itemsize > MOST_INT:
        raise ValueError("a view that reaches beyond all memory")


def _named(name: str, value: Any) -> Any:
    """The dtype, layout or memory format that an object names."""
    found, content = _only(value)
    known = _VALUES.get(name)
    if found != name or known is None or type(content) is not str or content not in known:
        raise ValueError(f"no {name if known else 'argument'} of a recorded program")
    return known[content]


@functools.lru_cache(maxsize=64)
def _device(content: str) -> torch.device:
    try:
        return torch.device(content)
    except RuntimeError as error:
        raise ValueError("no device") from error


def _without_lines(encoded: dict[str, Any]) -> list[Any]:
    """An encoded program without the places in the user's code."""
    *fields, _ = encoded["Program"]
    at = [field.name for field in dataclasses.fields(Op)].index("line")
    ops = [op["Op"][:at] + op["Op"][at + 1 :] for op in fields[0]]
    return [ops, *fields[1:]]
