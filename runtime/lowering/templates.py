"""Templates: fragments that the package brings along, so that a first script of ordinary ops imports no jax.

A template is the fragment of an op on arrays of whatever sizes. It is found by the description of an op with letters
for its sizes, and filled in: S is the shape of all arrays of an op that have dimensions, N how many elements that is;
A, B, ... are single sizes.

    relu(tensor<Sxf32>)->(tensor<Sxf32>) None                                   of tensor<7x1x5xf32>: S is 7x1x5
    sum.dim_IntList(tensor<AxBxf32>,[,int:1,],...)->(tensor<Axf32>) None        of tensor<3x5xf32>: A is 3, B is 5
    native_layer_norm(tensor<AxBxf32>,[,int:B,],...)->(tensor<AxBxf32>,...) None of tensor<3x5xf32>: also an int is 5
    ... func.func private @0(%arg0: tensor<$Ax$Bxf32>) -> (tensor<$Axf32>) { ...

Invariant: single sizes are all different and at least 2; those of 0 and 1 stand as they are. A template counts only
beside the sources that it was traced from. `packaging/fragment_templates.py` makes them and checks that they hold.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from torchtpu.runtime.ir.calls import LoweringEntry
from torchtpu.runtime.ir.checked import error_class

from . import fingerprint
from .tracing import Fragment, symbol_of

_DIMENSIONS = re.compile(r"(?<=tensor<)\d+(?:x\d+)*(?=x)")
_NUMBER = re.compile(r"\d+")
_INT = re.compile(r"(?<=\bint:)\d+\b")
_FLOAT = re.compile(r"\b\d\.\d{6}e\+\d\d\b")
_FILLED = re.compile(r"\$(e?[A-Z])")
_MOST_EXACT = 2**24  # integers that every float type of a lowering's constants has
SHAPE, COUNT = "S", "N"
LETTERS = "ABCDEFGHIJKLM"


class FragmentTemplate(NamedTuple):
    """A fragment's text, call and checks (message, module and name of the error), with `$A` for size A, `$eA` for it as
    a floating-point number."""

    op: str
    body: str
    used: list[int]
    forwards: list[int | None]
    signature: str
    checks: list[list[str]]

    def filled(self, sizes: Mapping[str, str]) -> Fragment | None:
        """The fragment with these sizes; None where one is written in another way."""
        texts = dict(sizes)
        for letter, size in sizes.items():
            if f"$e{letter}" in self.body:
                number = _float_of(int(size))
                if number is None:
                    return None
                texts[f"e{letter}"] = number

        def fill(text: str) -> str:
            return _FILLED.sub(lambda found: texts[found[1]], text)

        body = fill(self.body)
        symbol = symbol_of(self.op, body)
        text = body.replace("@0", f"@{symbol}")
        checks = tuple([(fill(message), error_class(module, name)) for message, module, name in self.checks])
        return Fragment(symbol, text, tuple(self.used), tuple(self.forwards), fill(self.signature), checks)


class Templates:
    """The templates of a platform, in a folder with a file for each op, which is read when the op comes first."""

    def __init__(self, folder: Path | None, platform: str) -> None:
        self._folder = folder
        self._platform = platform
        self._loaded: dict[str, _OfAnOp] = {}

    def find(self, description: str, entry: LoweringEntry) -> Fragment | None:
        """The fragment of an op with this description and lowering, if a template has it."""
        of_op = self._of(description.partition("(")[0])
        home = inspect.unwrap(entry.function).__module__
        for pattern, sizes in patterns(description):
            template = of_op.templates.get(pattern)
            if template is not None and of_op.sources.get(home) == digest_of_sources(home):
                return template.filled(sizes)
        return None

    def _of(self, op: str) -> _OfAnOp:
        found = self._loaded.get(op)
        if found is None:
            found = self._loaded[op] = self._load(op)
        return found

    def _load(self, op: str) -> _OfAnOp:
        try:
            held = json.loads(file_of(self._folder, op).read_text()) if self._folder is not None else None
        except FileNotFoundError:
            held = None
        if held is None:
            return _OfAnOp({}, {})
        found = {
            key: FragmentTemplate(*fields)
            for platforms, key, *fields in held["templates"]
            if self._platform in platforms
        }
        return _OfAnOp(held["sources"], found)


class _OfAnOp(NamedTuple):
    sources: Mapping[str, str]  # of each module of lowerings: of what sources its templates were made
    templates: Mapping[str, FragmentTemplate]


def file_of(folder: Path, op: str) -> Path:
    """Where the templates of `add.Tensor` are."""
    return folder / f"{op}.json"


def patterns(description: str) -> Iterator[tuple[str, dict[str, str]]]:
    """A description with letters for sizes, and what these stand for: for one shape of all arrays, for single sizes,
    and for these where they are int arguments too. There are none for single sizes where letters do not suffice."""
    shapes = set(_DIMENSIONS.findall(description))
    count: dict[str, str] = {}
    if len(shapes) == 1:
        shape = shapes.pop()
        count[COUNT] = str(math.prod(map(int, shape.split("x"))))
        yield _DIMENSIONS.sub(SHAPE, description), {SHAPE: shape, **count}
    letters: dict[str, str] = {}
    free = iter(LETTERS)

    def lettered(found: re.Match[str]) -> str:
        size = found[0]
        return size if size in {"0", "1"} else letters.get(size) or letters.setdefault(size, next(free, ""))

    pattern = _DIMENSIONS.sub(lambda found: _NUMBER.sub(lettered, found[0]), description)
    if "" in letters.values():
        return
    sizes = count | {letter: size for size, letter in letters.items()}
    yield pattern, sizes
    linked = _INT.sub(lambda found: letters.get(found[0], found[0]), pattern)
    if linked != pattern:
        yield linked, sizes


def template_of(op: str, fragment: Fragment, sizes: Mapping[str, str]) -> FragmentTemplate | None:
    """The template of a fragment that an op was traced into with these sizes, whose numbers stand for nothing else;
    None where one of them is left in it."""
    letters = {size: letter for letter, size in reversed(list(sizes.items()))}
    floats = {_float_of(int(size)): size for size in letters if size.isdigit()}

    def letter(text: str) -> str:
        if SHAPE in sizes:
            text = re.sub(rf"(?<=tensor<){sizes[SHAPE]}(?=x)", f"${SHAPE}", text)
        text = _FLOAT.sub(lambda found: f"$e{letters[size]}" if (size := floats.get(found[0])) else found[0], text)
        return _NUMBER.sub(lambda found: f"${letters[found[0]]}" if found[0] in letters else found[0], text)

    checks = [[letter(message), error.__module__, error.__qualname__] for message, error in fragment.checks]
    body = letter(fragment.text.replace(f"@{fragment.symbol}", "@0"))
    made = FragmentTemplate(op, body, list(fragment.used), list(fragment.forwards), letter(fragment.signature), checks)
    numbers = {size for shape in sizes.values() for size in shape.split("x")} - {"0", "1"}
    is_free = not fragment.unequal and "$" not in fragment.text and numbers.isdisjoint(_NUMBER.findall(made.body))
    return made if is_free else None


def _float_of(size: int) -> str | None:
    """As StableHLO writes it where six digits say all of it, else None."""
    return f"{size:e}" if size <= _MOST_EXACT and int(float(f"{size:.5e}")) == size else None


@functools.cache
def digest_of_sources(module: str) -> str:
    """Of the sources that lowerings in a module are traced with. The files are read: other versions of Python, torch
    and jax would make other code of them, which templates are none the worse for."""
    digest = hashlib.sha256()
    for name in sorted(fingerprint.used_by(module) | {Fragment.__module__}):
        file = importlib.import_module(name).__file__
        assert file is not None
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()
