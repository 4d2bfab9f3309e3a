"""Templates: fragments that the package brings along, so that a first script of ordinary ops imports no jax.

A template is the fragment of an op on arrays of whatever sizes. It is found by the description of an op and filled in:
S is the shape of all arrays of an op that have dimensions, N how many elements that is; A, B, ... are single sizes.

    relu(tensor<Sxf32>)->(tensor<Sxf32>) None                                   of tensor<7x1x5xf32>: S is 7x1x5
    sum.dim_IntList(tensor<AxBxf32>,[,int:1,],...)->(tensor<Axf32>) None        of tensor<3x5xf32>: A is 3, B is 5
    native_layer_norm(tensor<AxBxf32>,[,int:B,],...)->(tensor<AxBxf32>,...) None of tensor<3x5xf32>: also an int is 5
    convolution(tensor<AxBxCxDxf32>,tensor<ExBx3x3xf32>,...)->... highest       of kernels of 3 x 3 alone
    add.Tensor(tensor<AxBxf32>,..., padding (0 of A) (PaddedExtent(sizes=('a', B),...   of arrays with room for A rows
    ... func.func private @0(%arg0: tensor<$Ax$Bxf32>) -> (tensor<$Axf32>) { ...

Invariant: single sizes are at least 2; those of 0 and 1 stand as they are. Sizes may be equal, but for the pairs that a
template keeps apart, as N and 0, and follow from each other where it says so; what is padded has sizes between 2 and
its capacity, whatever else is known of them. A template counts only beside the sources that it was traced from.
`packaging/fragment_templates.py` makes them and checks that they hold.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torchtpu.runtime.ir.calls import LoweringEntry
from torchtpu.runtime.ir.checked import error_class

from . import fingerprint
from .tracing import Fragment, symbol_of, without_copies

_DIMENSIONS = re.compile(r"(?<=tensor<)[\dA-M]+(?:x[\dA-M]+)*(?=x)")
_NUMBER = re.compile(r"\d+")
_UNNAMED = re.compile(r"%\w+|\d+")  # a value, or a number that is not its name
_INT = re.compile(r"(?<=\bint:)(?:\d+|[A-M])\b")
_SIZED = re.compile(f"{_DIMENSIONS.pattern}|{_INT.pattern}")
_SIZE = re.compile(r"\d+|[A-M]")
_FLOAT = re.compile(r"\b\d\.\d{6}e\+\d\d\b")
_FILLED = re.compile(r"\$(e?)((?:\d+\*)?[A-Z](?:\*[A-Z])*)([-+][123])?")
_BOUNDS = re.compile(r"\((?:\(\d+, \d+, \d+\)(?:, |,(?=\))|(?=\))))+\)")
_BOUND = re.compile(r"\((\d+), (\d+), (\d+)\)")
_WORD = re.compile(r"\b(?:\d+|(?:\d+\.)?[A-M](?:\.[A-M])*)(?![\w.])")
_MOST_ROOM = 2  # that is tried without
_MOST_ELEMENTS, _LONGEST = 2**20, 2**11  # of an op with padding; such counts its places, products of both, in i32
_MOST_EXACT = 2**24  # integers that every float type of a lowering's constants has
_MOST_FACTORS = 4
TIMES = "2", "3", "4", "8", "16", "32", "64"
_PADDING, _MADE = " padding ", ")->("
_TEXT_END = '", ['  # of the first element of a line
SHAPE, COUNT = "S", "N"
EVALUATION = "torchtpu.runtime.padding.evaluate"  # what an op with padding is traced with
LETTERS = "ABCDEFGHIJKLM"
Pattern = tuple[str, dict[str, str]]
Part = tuple[str, str, int, int]  # a size, another one, what that is divided by, and how much more it is then


class FragmentTemplate(NamedTuple):
    """A fragment's text, call and checks (message, module and name of the error), with `$A` for size A, `$A*B-1` for
    what follows from sizes, and `$eA` for it as a floating-point number; sizes that are not equal, by letter or number;
    sizes that are a part of another one.
    """

    op: str
    body: str
    used: list[int]
    forwards: list[int | None]
    signature: str
    checks: list[list[str]]
    unequal: list[str]
    apart: list[list[str]]
    parts: list[Part]

    def suits(self, sizes: Mapping[str, str]) -> bool:
        """Whether it is for sizes like these."""
        return all(sizes.get(one, one) != sizes.get(other, other) for one, other in self.apart) and all(
            (int(sizes[part]) - behind) * divisor == int(sizes[whole]) for part, whole, divisor, behind in self.parts
        )

    def filled(self, sizes: Mapping[str, str]) -> Fragment | None:
        """The fragment with these sizes; None where one is written in another way."""
        is_exact = True

        def value(found: re.Match[str]) -> str:
            nonlocal is_exact
            is_float, names, more = found.groups()
            if names == SHAPE:
                return sizes[SHAPE]
            number = _product(names.split("*"), sizes) + int(more or 0)
            text = _float_of(number) if is_float else str(number)
            is_exact &= text is not None
            return text or ""

        def fill(text: str) -> str:
            return _FILLED.sub(value, text)

        body = without_copies(fill(self.body))
        symbol = symbol_of(self.op, body)
        text = body.replace("@0", f"@{symbol}")
        checks = tuple([(fill(message), error_class(module, name)) for message, module, name in self.checks])
        call = tuple(self.used), tuple(self.forwards), fill(self.signature)
        made = Fragment(symbol, text, *call, checks, tuple(map(fill, self.unequal)))
        return made if is_exact else None


class Templates:
    """The templates of a platform, in a folder with a file for each op, which is read when the op comes first."""

    def __init__(self, folder: Path | None, platform: str) -> None:
        self._folder = folder
        self._platform = platform
        self._loaded: dict[str, OfAnOp] = {}

    def find(self, description: str, entry: LoweringEntry) -> Fragment | None:
        """The fragment of an op with this description and lowering, if a template has it."""
        of_op = self.of(description.partition("(")[0])
        home = inspect.unwrap(entry.function).__module__
        for template, sizes in of_op.matching(description):
            if of_op.sources.get(home) == digest_of_sources(home):
                return template.filled(sizes)
        return None

    def of(self, op: str) -> OfAnOp:
        """The templates of an op."""
        found = self._loaded.get(op)
        if found is None:
            found = self._loaded[op] = self._load(op)
        return found

    def _load(self, op: str) -> OfAnOp:
        try:
            held = file_of(self._folder, op).read_text() if self._folder is not None else ""
        except FileNotFoundError:
            held = ""
        head, *lines = held.splitlines() or ["{}"]
        return OfAnOp(json.loads(head).get("sources", {}), lines, self._platform)


class OfAnOp:
    """The templates of an op on a platform; `sources` are, for each module of lowerings, those that they were made of.

    A file's first line says these, and which version of jax traced; each other line is a template: what the
    descriptions that it is for have in common, their sizes, the platforms, and the fields of the template.
    """

    def __init__(self, sources: Mapping[str, str], lines: Iterable[str], platform: str) -> None:
        self.sources = sources
        self._platform = platform
        self._lines: dict[str, list[str]] = {}  # by the text that they begin with; parsed when that is asked for
        self._templates: dict[str, list[tuple[list[str], FragmentTemplate]]] = {}
        for line in lines:
            self._lines.setdefault(line[: line.index(_TEXT_END)], []).append(line)

    def matching(self, description: str) -> Iterator[tuple[FragmentTemplate, Mapping[str, str]]]:
        """Those that are for an op with this description, and the sizes to fill in."""
        shaped = of_shape(description)
        if shaped is not None:
            of_shapes = (template for _, template in self._beginning_with(shaped[0]))
            yield from ((template, shaped[1]) for template in of_shapes if template.suits(shaped[1]))
        if _PADDING in description and not has_few_places(description):
            return
        for plain in _with_rooms(description):
            text, numbers = without_sizes(plain)
            for wanted, template in self._beginning_with(text):
                sizes = match(wanted, numbers)
                if sizes is not None and template.suits(sizes):
                    yield template, sizes

    def _beginning_with(self, text: str) -> list[tuple[list[str], FragmentTemplate]]:
        found = self._templates.get(text)
        if found is None:
            lines = self._lines.get(json.dumps([text]).removesuffix('"]'), ())
            rows = (json.loads(line) for line in lines)
            found = [(sizes, FragmentTemplate(*fields)) for _, sizes, at, *fields in rows if self._platform in at]
            self._templates[text] = found
        return found


def line_of(platforms: Sequence[str], pattern: str, template: FragmentTemplate) -> str:
    """The line of a file for a template and the pattern that it is for."""
    text, sizes = (pattern, []) if f"<{SHAPE}x" in pattern else without_sizes(pattern)
    return json.dumps([text, sizes, platforms, *template])


def file_of(folder: Path, op: str) -> Path:
    """Where the templates of `add.Tensor` are."""
    return folder / f"{op}.jsonl"


def with_room(description: str) -> str | None:
    """A description with what counts of the bounds of its padding, if it has any: by how much a size is less than its
    capacity at most, and that. None where it may be less than 2."""
    return next(iter(_with_rooms(description)), None)


def _with_rooms(description: str) -> list[str]:
    """The same, and with less room each: what is for sizes that may be larger is for these."""
    given, word, rest = description.partition(_PADDING)
    bounds = _BOUNDS.match(rest)
    if bounds is None:
        return [description]
    triples = [tuple(map(int, triple)) for triple in _BOUND.findall(bounds[0])]
    if not all(2 <= least < most <= capacity for least, most, capacity in triples):
        return []
    found = []
    for less in range(min(_MOST_ROOM, *(capacity - most for _, most, capacity in triples)) + 1):
        rooms = ", ".join(f"{capacity - most - less} of {capacity}" for _, most, capacity in triples)
        found.append(f"{given}{word}({rooms}){rest[bounds.end() :]}")
    return found


def has_few_places(description: str) -> bool:
    """Whether an op with padding has so few elements that a template is looked for."""
    shapes = [[int(size) for size in shape.split("x")] for shape in _DIMENSIONS.findall(description)]
    return all(max(shape) <= _LONGEST and math.prod(shape) < _MOST_ELEMENTS for shape in shapes)


def _in_parts(text: str) -> tuple[str, str, str]:
    """What stands before the padding, that, and what stands behind."""
    given, word, rest = text.partition(_PADDING)
    padding, arrow, made = rest.partition(_MADE)
    return given, word + padding, arrow + made


def without_sizes(text: str) -> tuple[str, list[str]]:
    """A description or a pattern without its sizes and its int arguments, and these; those of 0 and 1 stay."""
    sizes: list[str] = []

    def leave_out(found: re.Match[str]) -> str:
        if found[0] in {"0", "1"}:
            return found[0]
        sizes.append(found[0])
        return "#"

    def of_types(text: str) -> str:
        return _SIZED.sub(lambda found: _SIZE.sub(leave_out, found[0]), text)

    given, padding, made = _in_parts(text)
    return of_types(given) + _WORD.sub(leave_out, padding) + of_types(made), sizes


def match(wanted: Sequence[str], numbers: Sequence[str]) -> dict[str, str] | None:
    """What the letters among the wanted sizes stand for, if these numbers are such; `A.B` and `2.A` are products."""
    sizes: dict[str, str] = {}
    products = []
    for size, number in zip(wanted, numbers, strict=True):
        if "." in size:
            products.append((size, number))
        elif number != (size if size.isdigit() else sizes.setdefault(size, number)):
            return None
    is_right = all(_product(size.split("."), sizes) == int(number) for size, number in products)
    return sizes if is_right else None


def _product(letters: Iterable[str], sizes: Mapping[str, str]) -> int:
    return math.prod(int(sizes.get(letter, letter)) for letter in letters)


def of_shape(description: str) -> Pattern | None:
    """The pattern of a description whose arrays have one shape, and what is to be filled in."""
    shapes = set(_DIMENSIONS.findall(description))
    if len(shapes) != 1:
        return None
    shape = shapes.pop()
    count = str(math.prod(map(int, shape.split("x"))))
    return _DIMENSIONS.sub(SHAPE, description), {SHAPE: shape, COUNT: count}


def of_sizes(description: str, literal: Container[str] = (), ints: Container[str] = ()) -> Pattern | None:
    """The pattern of a description with letters for its sizes, but for the literal ones, and for int arguments that are
    such a size or one of `ints`; what the letters stand for. None where letters do not suffice."""
    letters: dict[str, str] = {}
    unused = iter(LETTERS)

    def lettered(found: re.Match[str]) -> str:
        size = found[0]
        if size in {"0", "1"} or size in literal:
            return size
        return letters.get(size) or letters.setdefault(size, next(unused, ""))

    def lettered_int(found: re.Match[str]) -> str:
        return lettered(found) if found[0] in ints else letters.get(found[0], found[0])

    given, padding, made = _in_parts(_DIMENSIONS.sub(lambda found: _NUMBER.sub(lettered, found[0]), description))
    if padding and "" not in letters.values():
        names = _products({letter: size for size, letter in letters.items()})
        padding = _WORD.sub(lambda found: names.get(found[0], found[0]).replace("*", "."), padding)
    pattern = _INT.sub(lettered_int, given) + padding + made
    return None if "" in letters.values() else (pattern, {letter: size for size, letter in letters.items()})


def template_of(
    op: str,
    fragment: Fragment,
    sizes: Mapping[str, str],
    apart: Sequence[Sequence[str]] = (),
    parts: Sequence[Part] = (),
) -> FragmentTemplate | None:
    """The template of a fragment that an op was traced into with these sizes, whose numbers, and products of them,
    stand for nothing else; None where one of them is left in it."""
    letters = _names(sizes)
    floats = {text: size for size in letters if size.isdigit() and (text := _float_of(int(size)))}

    def letter(text: str) -> str:
        if SHAPE in sizes:
            text = re.sub(rf"(?<=tensor<){sizes[SHAPE]}(?=x)", f"${SHAPE}", text)
        text = _FLOAT.sub(lambda found: f"$e{letters[size]}" if (size := floats.get(found[0])) else found[0], text)
        return _UNNAMED.sub(lambda found: f"${letters[found[0]]}" if found[0] in letters else found[0], text)

    checks = [[letter(message), error.__module__, error.__qualname__] for message, error in fragment.checks]
    body = letter(fragment.text.replace(f"@{fragment.symbol}", "@0"))
    call = list(fragment.used), list(fragment.forwards), letter(fragment.signature), checks
    made = FragmentTemplate(op, body, *call, list(map(letter, fragment.unequal)), list(map(list, apart)), [*parts])
    numbers = {size for shape in sizes.values() for size in shape.split("x")} - {"0", "1"}
    is_free = "$" not in fragment.text and numbers.isdisjoint(_UNNAMED.findall(made.body))
    return made if is_free else None


def _names(sizes: Mapping[str, str]) -> dict[str, str]:
    """What is written for numbers that follow from sizes; of two ways to come to one, the shorter."""
    products = _products({letter: size for letter, size in sizes.items() if letter != SHAPE})
    near = {
        str(int(number) + by): f"{name}{by:+}"
        for by in (3, 2, 1, -3, -2, -1)
        for number, name in reversed(products.items())
    }
    return near | products


def _products(sizes: Mapping[str, str]) -> dict[str, str]:
    """The numbers that are sizes, products and powers of some, or some `TIMES` one, with the letters of these; of two
    ways to come to one, the first of the shorter."""
    found: dict[str, str] = {}
    for count in range(1, _MOST_FACTORS + 1):
        for some in itertools.combinations_with_replacement(sizes, count):
            found.setdefault(str(_product(some, sizes)), "*".join(some))
    for times, letter in itertools.product(TIMES, sizes):  # as where the parts of one array lie, or heads
        found.setdefault(str(_product((times, letter), sizes)), f"{times}*{letter}")
    return found


def _float_of(size: int) -> str | None:
    """As StableHLO writes it where six digits say all of it, else None."""
    return f"{size:e}" if size <= _MOST_EXACT and int(float(f"{size:.5e}")) == size else None


@functools.cache
def digest_of_sources(module: str) -> str:
    """Of the sources that lowerings in a module are traced with. The files are read: other versions of Python, torch
    and jax would make other code of them, which templates are none the worse for."""
    digest = hashlib.sha256()
    for name in sorted(fingerprint.used_by(module) | {Fragment.__module__, EVALUATION}):
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.origin is not None
        digest.update(Path(found.origin).read_bytes())
    return digest.hexdigest()
