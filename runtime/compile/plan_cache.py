"""Plans: a recorded program's key and what its launches must know, from the store or by lowering the program.

With a plan from the store nothing is traced and no text is written, unless the program itself has to be compiled; nor
is a program searched for clusters whose places are in the store. The keys hold the op stream, the platform, and
fingerprints of the lowerings that the ops use and of what writes the text or searches; a plan holds the digest of the
text, which the program's own key is made of.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torchtpu.compiler_cache import Key, Note, Store, program_digest
from torchtpu.runtime.device.client import Compiles, Options, calls_lapack, key_of
from torchtpu.runtime.device.process_group import Homes
from torchtpu.runtime.ir.calls import Parameter, results_of
from torchtpu.runtime.ir.checked import (
    MOST_INT,
    bits,
    boolean,
    error_class,
    fields,
    integer,
    integers,
    items,
    parsed,
    text,
)
from torchtpu.runtime.ir.list_ops import take_apart
from torchtpu.runtime.ir.manifest import FORMAT, decode, encode
from torchtpu.runtime.ir.program import Base, Lifted, Op, Program
from torchtpu.runtime.ir.strided_access import Digit
from torchtpu.runtime.ir.values import operands
from torchtpu.runtime.lowering import fingerprint
from torchtpu.runtime.lowering.emit import Aval, Check, Module, lower
from torchtpu.runtime.lowering.fragments import Fragments
from torchtpu.runtime.lowering.templates import EVALUATION
from torchtpu.runtime.padding.layout import shape_agnostic_signature
from torchtpu.runtime.partition.clusters import Clusters, Places, cut_out, may_have_clusters, search
from torchtpu.runtime.telemetry.counters import Counters

_EMISSION = (lower.__module__, key_of.__module__)
_SEARCH = (search.__module__,)
_MOST_FORMS = 16  # of one shape-agnostic signature
_FIELDS = ("program", "calls_lapack", "checks", "kinds", "sources", "offsets")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64} \([0-9]{1,20} bytes\)")


@dataclass(frozen=True, slots=True)
class Plan:
    """A program's key and digest, its text when it is wanted, what `lower.Module` says of a launch, who takes part in
    it, and with which more options than usual it is compiled."""

    key: Key
    text: Callable[[], str]
    calls_lapack: bool
    inputs: tuple[Aval, ...]
    outputs: tuple[Aval, ...]
    checks: tuple[Check, ...]
    sources: tuple[int, ...]
    offsets: Mapping[int, frozenset[Digit]]
    homes: Homes
    digest: str = ""
    options: Options = ()

    @property
    def text_bytes(self) -> int:
        """How long the text is."""
        return int(self.digest[self.digest.rindex("(") + 1 :].split()[0])


class _Stored(NamedTuple):
    """What a plan's entry holds."""

    digest: str
    calls_lapack: bool
    checks: tuple[Check, ...]
    sources: tuple[int, ...]
    offsets: Mapping[int, frozenset[Digit]]


class Plans:
    """Finds or makes plans; `client` is what the programs are compiled for."""

    def __init__(self, fragments: Fragments, client: Compiles, store: Store, counters: Counters) -> None:
        self.fragments = fragments
        self._client = client
        self._store = store
        self._counters = counters

    def find(self, program: Program, *, is_flat: bool, homes: Homes = ()) -> Plan:
        """The program's plan (`is_flat` as `lower` has it), for all who launch it; raises what `lower` raises."""
        started = time.perf_counter()
        key = self._key("plan", program, _EMISSION, is_flat=is_flat)
        stored = None if key is None else self._store.load(key, lambda data: _decode(data, program))
        if stored is not None:
            self._counters.plan_hits_disk += 1
            return self._plan(stored, program, homes, is_flat=is_flat)
        module = lower(program, self.fragments, is_flat=is_flat)
        digest, has_lapack = program_digest(module.text), calls_lapack(module.text)
        if key is not None and self._is_usual():
            build_ms = round((time.perf_counter() - started) * 1e3, 3)
            note: Note = {"line": program.line, "ops": len(program.ops), "build_ms": build_ms}
            self._store.put(key, _encode(module, digest, has_lapack=has_lapack), note)
        return Plan(
            key_of(digest, self._client, homes),
            lambda: module.text,
            has_lapack,
            module.inputs,
            module.outputs,
            module.checks,
            module.sources,
            module.offsets,
            homes,
            digest,
        )

    def under(self, plan: Plan, options: Options) -> Plan:
        """The plan of the same program compiled with these options more."""
        return replace(plan, key=key_of(plan.digest, self._client, plan.homes, options), options=options)

    def clusters(self, program: Program) -> Clusters | None:
        """The clusters of a program; None where it is better compiled whole."""
        ops = take_apart(program.ops, self.fragments.maps)
        if not may_have_clusters(ops, self.fragments.platform):
            return None
        key = self._key("cluster", program, _SEARCH)
        stored = None if key is None else self._store.load(key, lambda data: (_decode_clusters(data, program, ops),))
        if stored is not None:
            return stored[0]
        places = search(program, ops, self.fragments)
        if key is not None and self._is_usual():
            self._store.put(key, _encode_places(places), {"line": program.line, "ops": len(program.ops)})
        return cut_out(program, ops, places) if places else None

    def note_samples(self, samples: tuple[Program, ...]) -> None:
        """Keeps what a padded form was made of."""
        first, data = samples[0], None
        for key in self._keys_of_samples(first):
            data = data or json.dumps(list(map(encode, samples)), separators=(",", ":")).encode("ascii")
            if not self._store.has(key):
                self._store.put(key, data, {"line": first.line, "ops": len(first.ops)})
            elif self._store.get(key) != data:
                continue
            return

    def samples(self, program: Program) -> Iterator[tuple[Program, ...]]:
        """What each padded form of programs of the same ops was made of, in this process or another."""
        for key in self._keys_of_samples(program):
            found = self._store.load(key, _decode_samples)
            if found is not None:
                yield found

    def _keys_of_samples(self, program: Program) -> Iterator[Key]:
        if self._store.keeps:
            signature = shape_agnostic_signature(program)
            for place in range(_MOST_FORMS):
                parts: dict[str, str | bytes] = {"shape_agnostic_signature": signature, "format": FORMAT}
                yield Key.of("padding", parts | {"place": str(place)})

    def _is_usual(self) -> bool:
        """Whether programs check no more than their ops do: what is only to find a NaN is not kept."""
        return self.fragments.watch() == "off"

    def _key(self, kind: str, program: Program, modules: tuple[str, ...], *, is_flat: bool = False) -> Key | None:
        """The key of what `modules` make of the program; None where nothing, or a lowering, is not kept on disk."""
        if not self._store.keeps or not self._is_usual():
            return None
        lowerings = self.fragments.sources(program.ops)
        if lowerings is None:
            return None
        described = self.fragments.describe(program.ops, "off")
        parts: dict[str, str | bytes] = {
            "stream": _stream(program, described, is_flat=is_flat),
            "platform": self.fragments.platform,
            "lowerings": lowerings,
            "emission": fingerprint.of_modules(*modules),
            "padding": fingerprint.of_modules(EVALUATION) if any(op.padding for op in program.ops) else "",
        }
        return Key.of(kind, parts)

    def _plan(self, stored: _Stored, program: Program, homes: Homes, *, is_flat: bool) -> Plan:
        return Plan(
            key_of(stored.digest, self._client, homes),
            functools.cache(lambda: lower(program, self.fragments, is_flat=is_flat).text),
            stored.calls_lapack,
            tuple((base.shape, base.dtype) for base in program.inputs),
            _outputs(program),
            stored.checks,
            stored.sources,
            stored.offsets,
            homes,
            stored.digest,
        )


def _stream(program: Program, described: list[tuple[str, list[Parameter]]], *, is_flat: bool) -> bytes:
    """All of a program that decides its text: what decides each op's fragment, and which values go where, as what."""
    lines = [repr((program.outputs, program.donated, program.floats, program.ints, is_flat))]
    lines += map(_layout, program.inputs)
    for op, (key, arrays) in zip(program.ops, described, strict=True):
        words = [key]
        for array in arrays:
            if isinstance(array, Lifted):
                words.append(f"{array.kind}{array.index}")
            else:
                words.append(f"{array.value} {_place(array)}")
        for made in op.results:
            words += [f"{m.value} {_place(m)}" for m in (made if isinstance(made, tuple) else (made,)) if m is not None]
        words += [f"{w.value} {_place(w)} in {w.arg} {w.element} {w.replaces}" for w in op.writes]
        lines.append("|".join(words))
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _place(array: Any) -> str:
    """Where a tensor lies in which memory; its shape and element type are in the op's key."""
    return f"{array.strides} {getattr(array, 'offset', 0)} {_layout(array.base)}"


def _layout(base: Base) -> str:
    return f"{tuple(base.shape)} {base.dtype}"


def _outputs(program: Program) -> tuple[Aval, ...]:
    """The array of each of the program's outputs."""
    bases = {~i: base for i, base in enumerate(program.inputs)}
    for op in program.ops:
        for made in results_of(op):
            bases[made.value] = made.base
    return tuple((bases[value].shape, bases[value].dtype) for value in program.outputs)


def _encode(module: Module, digest: str, *, has_lapack: bool) -> bytes:
    """What a program does not say itself; sets of inputs and checks as hexadecimal numbers, each once."""
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(module.sources))}
    fields = {
        "program": digest,
        "calls_lapack": has_lapack,
        "checks": [
            (c.message, c.error.__module__, c.error.__qualname__, c.place, f"{c.sources:x}") for c in module.checks
        ],
        "kinds": [f"{kind:x}" for kind in kinds],
        "sources": [kinds[sources] for sources in module.sources],
        "offsets": [(index, sorted(digits)) for index, digits in sorted(module.offsets.items())],
    }
    return json.dumps(fields, separators=(",", ":")).encode("ascii")


def _decode(data: bytes, program: Program) -> _Stored:
    """What `_encode` was given, for this program; ValueError where it cannot be so."""
    digest, has_lapack, checks, kinds, sources, offsets = fields(parsed(data), _FIELDS)
    if not _DIGEST.fullmatch(text(digest)):
        raise ValueError("no digest of a program")
    count = len(program.inputs) + len(items(checks))
    sets = [bits(kind, count) for kind in items(kinds)]
    return _Stored(
        digest,
        boolean(has_lapack),
        tuple([_check(program, count, *items(check, 5)) for check in checks]),
        tuple([sets[kind] for kind in integers(sources, 0, len(sets) - 1, len(program.outputs))]),
        dict(_digits(program, *items(entry, 2)) for entry in items(offsets, most=program.ints)),
    )


def _digits(program: Program, index: Any, digits: Any) -> tuple[int, frozenset[Digit]]:
    found = [integers(digit, count=3) for digit in items(digits)]
    if not all(weight and size for weight, size, _ in found):
        raise ValueError("a digit of no size")
    return integer(index, 0, program.ints - 1), frozenset(Digit(*digit) for digit in found)


def _check(program: Program, count: int, message: Any, module: Any, name: Any, place: Any, sources: Any) -> Check:
    op = program.ops[integer(place, -1, len(program.ops) - 1)]
    return Check(text(message), error_class(module, name), op.name, op.line, place, bits(sources, count))


def _decode_samples(data: bytes) -> tuple[Program, ...]:
    samples = tuple(map(decode, items(parsed(data))))
    if not samples:
        raise ValueError("a form that is made of nothing")
    return samples


def _encode_places(places: Places | None) -> bytes:
    fields = places and {
        "kept": places.kept,
        "unread": sorted(places.unread.items()),
        "runs": [(run.start, run.stop, run.step) for run in places.runs],
        "hot": places.hot,
    }
    return json.dumps(fields, separators=(",", ":")).encode("ascii")


def _decode_clusters(data: bytes, program: Program, ops: Sequence[Op]) -> Clusters | None:
    """The clusters whose places are stored; ValueError also where the parts of a run are not alike."""
    places = _decode_places(data, program, ops)
    return None if places is None else cut_out(program, ops, places)


def _decode_places(data: bytes, program: Program, ops: Sequence[Op]) -> Places | None:
    """What `_encode_places` was given, for this program with these `ops`; ValueError where it cannot be so."""
    found = parsed(data)
    if found is None:
        return None
    kept, unread, runs, hot = fields(found, Places._fields)
    places = integers(kept, 0, len(ops) - 1)
    if any(before >= after for before, after in itertools.pairwise(places)):
        raise ValueError("ops that are not in their order")
    pairs = [items(pair, 2) for pair in items(unread, most=len(places))]
    shapes = {integer(i, 0, len(places) - 1): integers(values, -MOST_INT) for i, values in pairs}
    _check_made(program, ops, places, shapes)
    ranges, end = [], 0
    for run in items(runs, most=len(places)):
        start, stop, step = integers(run, 0, len(places), 3)
        if not (end <= start < stop and step):
            raise ValueError("runs that are not in their order")
        ranges.append(range(start, stop, step))
        end = ranges[-1][-1] + step
        if end > len(places):
            raise ValueError("a run that goes on behind the last op")
    return Places(places, shapes, ranges, integer(hot))


def _check_made(
    program: Program, ops: Sequence[Op], places: Sequence[int], unread: Mapping[int, Sequence[int]]
) -> None:
    """ValueError where the ops at `places` read what they do not make, or do not make what the program returns."""
    made: set[int | None] = {None, *(~i for i in range(len(program.inputs)))}
    for i, place in enumerate(places):
        op = ops[place]
        if not {operand.value for operand in operands(op)}.difference(unread.get(i, ())) <= made:
            raise ValueError("an op that is needed is left out")
        made.update(result.value for result in results_of(op))
    if not made.issuperset(program.outputs):
        raise ValueError("an op that is needed is left out")
