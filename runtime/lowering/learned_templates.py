"""Templates that are made while the program runs, of ops that come with ever other sizes.

Ops whose descriptions differ in sizes alone are of one kind. Where two sizes of a kind have been traced and a third
comes, its fragment is filled in from then on.

    mul.Tensor(tensor<31x20xf32>,tensor<20xf32>)->...        traced
    mul.Tensor(tensor<44x20xf32>,tensor<20xf32>)->...        traced
    mul.Tensor(tensor<27x20xf32>,tensor<20xf32>)->...        template: A varies, B is 20; filled in with A = 27
    mul.Tensor(tensor<53x20xf32>,tensor<20xf32>)->...        filled in

Ops on elements need one: arrays of one shape are as good as such of one dimension (`on_a_line`).

    hardswish(tensor<4x16x8x8xf32>)->...                     traced on tensor<1621xf32>, and filled in with 4x16x8x8

Invariant: what is filled in is to the letter what tracing gives. Sizes that never varied stay as they are. Of those
that did, tracing with symbols for them shows that nothing is decided by them, but that they differ from each other and
from the others, as they do in all ops of the kind; the text is that of sizes which no text has for another reason, and
gives the fragments that have been traced, of other sizes than these: a number that follows from a size, and is no
product of some, would show. Decompositions of matrices, whose form is decided after tracing, have no template.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchtpu.runtime.ir.calls import LoweringEntry, parameters, results_of
from torchtpu.runtime.ir.program import Lifted, Op, Operand, Result, Write

from .templates import SHAPE, FragmentTemplate, of_shape, of_sizes, template_of
from .tracing import Fragment, Tracer

SENTINELS = (211, 307, 401, 503, 607, 701, 809, 907, 1009, 1103, 1201, 1301, 1409, 1511, 1601, 1709)
_LINE = 1621  # the size of arrays that have one dimension instead of theirs
_CALL = "stablehlo.custom_call"  # of LAPACK: what is around it was decided by sizes when it was lowered, not traced
_PLACE = re.compile(r"\[\d")  # of a dimension, or of an element
_MOST_VARYING = 8
_MOST_KINDS = 4096
_NUM_TRACED = 2  # of a kind, before a template is made
_MOST_TRIED = 3  # templates of a kind: each is for all sizes that have varied


@dataclasses.dataclass
class _Kind:
    """Ops that differ in sizes alone: fragments by size, and templates with the sizes that they are for."""

    traced: list[tuple[dict[str, str], Fragment]] = dataclasses.field(default_factory=list)
    templates: list[tuple[dict[str, str], FragmentTemplate]] = dataclasses.field(default_factory=list)
    num_tried: int = 0

    def find(self, sizes: Mapping[str, str]) -> Fragment | None:
        for fixed, template in self.templates:
            if fixed.items() <= sizes.items():
                return template.filled(sizes)
        return None

    def varying(self, others: Sequence[Mapping[str, str]]) -> list[str]:
        """The letters whose sizes are not the same in all that have been traced and these."""
        seen = [*(sizes for sizes, _ in self.traced), *others]
        return [letter for letter in seen[0] if len({sizes[letter] for sizes in seen}) > 1]

    def sentinels(self, sizes: Mapping[str, str], varying: Sequence[str]) -> dict[int, int]:
        """Other sizes for these letters, which neither this op nor what was traced has, as many as there are."""
        seen = {size for each in (sizes, *(sizes for sizes, _ in self.traced)) for size in each.values()}
        free = [sentinel for sentinel in SENTINELS if str(sentinel) not in seen]
        return {int(sizes[letter]): sentinel for letter, sentinel in zip(varying, free, strict=False)}


class LearnedTemplates:
    """The kinds of ops that one platform has traced; callers hold a lock."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._kinds: dict[str, _Kind] = {}

    def find(self, description: str) -> Fragment | None:
        """The fragment of an op with this description, if a template has it."""
        pattern, sizes = _kind_of(description)
        kind = self._kinds.get(pattern)
        return None if kind is None else kind.find(sizes)

    def note(self, description: str, fragment: Fragment) -> None:
        """Keeps a fragment that was traced: the first and the last of its kind."""
        pattern, sizes = _kind_of(description)
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        traced = self._kinds.setdefault(pattern, _Kind()).traced
        traced[1:] = [(sizes, fragment)] if traced else []
        if not traced:
            traced.append((sizes, fragment))

    def others(self, descriptions: Iterable[str]) -> list[str]:
        """Those that wait until others of their kind have been traced, which may make a template for them."""
        found, counts = [], dict[str, int]()
        for description in descriptions:
            pattern, _ = _kind_of(description)
            kind = self._kinds.get(pattern) or _Kind()
            counts[pattern] = counts.get(pattern, len(kind.traced)) + 1
            if counts[pattern] > _NUM_TRACED and kind.num_tried < _MOST_TRIED:
                found.append(description)
        return found

    def learn(self, ops: Mapping[str, tuple[Op, LoweringEntry]], watched: str) -> None:
        """Makes templates for the kinds of these ops, by description, which `others` gave."""
        kinds: dict[str, list[tuple[dict[str, str], Op, LoweringEntry]]] = {}
        for description, (op, entry) in ops.items():
            pattern, sizes = _kind_of(description)
            kinds.setdefault(pattern, []).append((sizes, op, entry))
        asked = []
        for pattern, members in kinds.items():
            kind, (sizes, op, entry) = self._kinds[pattern], members[0]
            kind.num_tried += 1
            varying = kind.varying([each for each, _, _ in members])
            sentinels = kind.sentinels(sizes, varying)
            if any(_CALL in fragment.text for _, fragment in kind.traced):
                continue
            if (
                len(sentinels) == len(varying) <= _MOST_VARYING
                and decided(self._tracer, op, entry, sizes, varying, watched) is not None
            ):
                asked.append((kind, op, entry, sizes, varying, sentinels))
        made = self._resized([(op, entry, sentinels) for _, op, entry, _, _, sentinels in asked], watched)
        for (kind, _, entry, sizes, varying, _), found in zip(asked, made, strict=True):
            template = None if found is None else _template(entry, sizes, *found)
            if template is not None and all(template.filled(known) == fragment for known, fragment in kind.traced):
                fixed = {letter: size for letter, size in sizes.items() if letter not in varying}
                kind.templates.append((fixed, template))

    def _resized(
        self, asked: Sequence[tuple[Op, LoweringEntry, Mapping[int, int]]], watched: str
    ) -> list[tuple[Fragment, dict[int, int]] | None]:
        """What the tracer makes of all, or of each where one fails."""
        if not asked:
            return []
        with contextlib.suppress(Exception):
            return list(self._tracer.resized(asked, watched))
        if len(asked) == 1:
            return [None]
        return [made for each in asked for made in self._resized([each], watched)]


def decided(
    tracer: Tracer, op: Op, entry: LoweringEntry, sizes: Mapping[str, str], varying: Sequence[str], watched: str = "off"
) -> list[list[str]] | None:
    """The pairs of which tracing an op decides that they differ, of these letters and other sizes; None where it
    decides anything else by the sizes of these letters."""
    from torchtpu.runtime.padding.evaluate import Symbols

    symbols = Symbols([(2, 2**31 - 1, 2**31 - 1)] * len(varying))
    named = dict(zip(varying, symbols.sizes("abcdefgh"[: len(varying)]), strict=True))
    try:
        found = tracer.decisions(op, entry, {int(sizes[k]): v for k, v in named.items()}, symbols, watched)
    except Exception:  # noqa: BLE001 - whatever cannot be done with symbolic sizes
        return None
    of_letters = {letter: named.get(letter, int(size)) for letter, size in sizes.items()}
    pairs = {
        str(of_letters[one] - of_letters[other]): [x if x in named else sizes[x] for x in sorted((one, other))]
        for one, other in itertools.permutations(of_letters, 2)
    }
    return sorted(map(list, {tuple(pairs[text]) for text in found})) if pairs.keys() >= set(found) else None


def on_a_line(op: Op) -> Op | None:
    """An op on elements as one on arrays of one dimension, where all that have dimensions are of one shape and not
    empty, else None. Of its tensors, sizes and element types alone count."""
    tensors = [t for t in (*parameters(op)[1], *results_of(op)) if not isinstance(t, Lifted)]
    shapes = {t.sizes for t in tensors} - {()}
    if op.padding is not None or len(shapes) != 1 or any(0 in shape for shape in shapes):
        return None
    args, results, writes = (_on_a_line(each) for each in (op.args, op.results, op.writes))
    return dataclasses.replace(op, args=args, results=results, writes=writes)


def _on_a_line(of: Any) -> Any:
    if isinstance(of, (Operand, Result, Write)):
        return dataclasses.replace(of, sizes=(_LINE,)) if of.sizes else of
    return type(of)(map(_on_a_line, of)) if isinstance(of, (tuple, list)) else of


def with_shape(entry: LoweringEntry, on_line: Fragment, description: str) -> Fragment | None:
    """The fragment of an op on elements with this description, given that on a line; None where that says something of
    its dimension, as a loop does that runs until all elements are done, or has the line's size for another reason."""
    shaped = of_shape(description)
    template = _of_line(entry.name, on_line)
    return None if shaped is None or template is None else template.filled(shaped[1])


@functools.lru_cache(maxsize=1024)
def _of_line(name: str, on_line: Fragment) -> FragmentTemplate | None:
    if _PLACE.search(on_line.text):
        return None
    return template_of(name, on_line, {SHAPE: str(_LINE)})


def _kind_of(description: str) -> tuple[str, dict[str, str]]:
    """The pattern of an op for single sizes, and these. One with more sizes than letters is of a kind of its own."""
    return of_sizes(description) or (description, {})


def _template(
    entry: LoweringEntry, sizes: Mapping[str, str], fragment: Fragment, became: Mapping[int, Any]
) -> FragmentTemplate | None:
    """The template of a fragment that was traced with sentinels."""
    letters = {letter: str(became.get(int(sizes[letter]), sizes[letter])) for letter in sizes}
    if len(set(letters.values())) < len(letters):  # what a result has is not to be told from another size
        return None
    return template_of(entry.name, fragment, letters)
