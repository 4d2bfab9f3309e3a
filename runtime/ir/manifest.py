"""Manifests: in come recorded programs, out go lines of JSON that hold them, and back.

A line is data: reading one runs no code, and whoever writes a manifest can make its reader compile something, no more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .program import Base, Lifted, Op, Operand, Padding, Part, Program, Random, Result, Scalar, Symbolic, Write

FORMAT = "torchtpu manifest 1"
_KEPT = (Base, Lifted, Op, Operand, Padding, Part, Program, Random, Result, Scalar, Symbolic, Write)
_CLASSES = {kept.__name__: kept for kept in _KEPT}
_NAMED = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}


class ManifestError(ValueError):
    """A file that is no manifest, or one of another version."""


class Recorded(NamedTuple):
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


class Outcome(NamedTuple):
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
            recorded = Recorded(program, is_flat, self._guessed_since)
            identity = recorded.identity
            if identity not in self._known:
                self._known.add(identity)
                self._write({"identity": identity, "program": _encode_recorded(recorded)})
        return identity

    def outcome(self, outcome: Outcome) -> None:
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
        try:
            found = json.loads(file.readline())["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise ManifestError(f"{path} is not a manifest") from error
        if found != FORMAT:
            raise ManifestError(f"{path} is of another version ({found}, this is {FORMAT})")
        for number, text in enumerate(file, 2):
            try:
                line = json.loads(text)
                # Lines written by hand or by another version get the identity that they have here.
                yield {"identity": decode_recorded(line["program"]).identity, "program": line["program"]}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ManifestError(f"{path}, line {number}, is no program ({error!r})") from error


def decode_recorded(fields: Mapping[str, Any]) -> Recorded:
    """The program that a line holds under "program"."""
    return Recorded(decode(fields["program"]), fields["is_flat"], fields["guessed_since"])


def _encode_recorded(recorded: Recorded) -> dict[str, Any]:
    return {**recorded._asdict(), "program": encode(recorded.program)}


def _json(*values: Any) -> bytes:
    return json.dumps(values if len(values) > 1 else values[0], separators=(",", ":")).encode("ascii")


def encode(value: Any) -> Any:
    """A program, or a part of one, as JSON has it."""
    kind = type(value)
    if kind.__name__ in _CLASSES and _CLASSES[kind.__name__] is kind:
        fields = value if kind is Base else [getattr(value, field.name) for field in dataclasses.fields(value)]
        return {kind.__name__: [encode(item) for item in fields]}
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (tuple, list):
        return [encode(item) for item in value]
    if kind in _NAMED:
        return {_NAMED[kind]: str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"device": str(value)}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    raise TypeError(f"a recorded program holds a {kind.__name__}: {value!r}")


def decode(value: Any) -> Any:
    """What `encode` was given."""
    if isinstance(value, list):
        return tuple(map(decode, value))
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name in _CLASSES:
        return _CLASSES[name](*map(decode, content))
    if name == "device":
        return torch.device(content)
    if name == "complex":
        return complex(*content)
    found = getattr(torch, content)
    if _NAMED.get(type(found)) != name:
        raise ValueError(f"{content!r} is no {name}")
    return found


def _without_lines(encoded: dict[str, Any]) -> list[Any]:
    """An encoded program without the places in the user's code."""
    *fields, _ = encoded["Program"]
    at = [field.name for field in dataclasses.fields(Op)].index("line")
    ops = [op["Op"][:at] + op["Op"][at + 1 :] for op in fields[0]]
    return [ops, *fields[1:]]
