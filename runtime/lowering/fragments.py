"""Fragments: the StableHLO functions of ops, from memory, from a template, from the store, or by tracing.

A fragment is found by what decides its text: the op's name, the types of its array arguments, the values of the
others, the recorded results, the platform and, what PyTorch was set to.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torchtpu.compiler_cache import Key, Note, Store
from torchtpu.runtime.device import jax_modules
from torchtpu.runtime.device.client import Client
from torchtpu.runtime.ir.calls import (
    LoweringEntry,
    Lowerings,
    Parameter,
    describe_results,
    full_name,
    parameters,
    results_of,
    schema_of,
)
from torchtpu.runtime.ir.checked import error_class, expression, fields, integer, integers, items, parsed, text
from torchtpu.runtime.ir.program import Op, Program
from torchtpu.runtime.padding.refusals import Refusals
from torchtpu.runtime.padding.whole import on_all_elements
from torchtpu.runtime.telemetry.bailouts import Bailouts
from torchtpu.runtime.telemetry.counters import Counters

from . import fingerprint
from .known_bounds import KnownBounds, with_bounds
from .learned_templates import LearnedTemplates, on_a_line, with_shape
from .templates import EVALUATION, Templates
from .tracing import Fragment, Tracer, explained
from .written import written_fragment

_BATCH = 128  # ops traced in one module
_FEWEST_REFUSED = 32  # padded ops that differ in sizes alone, before ever fewer are traced
_MOST_REFUSED = 1 << 10  # such ops
_SIZE = re.compile(r"Symbolic\(text='[^']*'\)|[0-9]+")
_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_.$-]*")


class Fragments:
    """Finds, loads or traces fragments for one platform, by default the client's; one per engine.

    `watch` says what each op's results are checked for: "off", "nan" or "inf" (which includes NaN); `capacity` is the
    most fragments kept in memory.
    """

    def __init__(
        self,
        lowerings: Lowerings,
        client: Client,
        store: Store,
        counters: Counters,
        platform: str = "",
        watch: Callable[[], str] = lambda: "off",
        capacity: Callable[[], int] = lambda: 1 << 14,
    ) -> None:
        self.watch = watch
        self._capacity = capacity
        self._lowerings = lowerings
        self.platform = platform or client.lowering_platform
        self._tracer = Tracer(client, self.platform, lowerings.context)
        self._tracing = (Tracer.__module__, type(client).__module__)
        self._templates = Templates(lowerings.templates, self.platform)
        self._learned = LearnedTemplates(self._tracer)
        self._bounds = KnownBounds()
        self._refusals = Refusals(_FEWEST_REFUSED, _MOST_REFUSED)
        self._store = store
        self._counters = counters
        self._lock = threading.Lock()  # held while fragments are added
        # What was used since the older half was forgotten, and that half; both change by single steps of the GIL.
        self._known: dict[str, Fragment] = {}
        self._older: dict[str, Fragment] = {}

    @property
    def bailouts(self) -> Bailouts:
        """Where it is noted that an optimisation failed."""
        return self._counters.bailouts

    def maps(self, op: Op) -> bool:
        """Whether an op goes through its lists in step, element by element."""
        return self._entry(op).maps

    def repeats(self, op: Op) -> bool:
        """Whether the op, called again with the same arguments, is to be computed again."""
        return self._entry(op).repeats

    def ints(self, op: Op) -> list[int]:
        """The places of the arguments that may be run-time ints."""
        names = self._entry(op).ints
        return [i for i, argument in enumerate(schema_of(op.name).arguments) if argument.name in names] if names else []

    def _entry(self, op: Op) -> LoweringEntry:
        try:
            return self._lowerings.entry(op.name, self.platform)
        except Exception as error:
            raise explained(op, error) from error

    def describe(self, ops: Iterable[Op], watched: str) -> list[tuple[str, list[Parameter]]]:
        """What decides each op's fragment, as text, and the arrays it is called with; an error names the op and its
        line."""
        suffix = "" if watched == "off" else f" {watched}"
        found = []
        for op in (self._traced(op, watched) for op in ops):
            try:
                arguments, arrays = parameters(op)
                found.append((f"{op.name}({arguments})->({describe_results(op)}) {op.settings}{suffix}", arrays))
            except TypeError as error:  # an element type that XLA does not have
                raise explained(op, error) from error
        return found

    def _traced(self, op: Op, watched: str) -> Op:
        """An op as its lowering is asked for it. Where no element depends on another place, padding has no part in it:
        but what does not count may well be NaN."""
        is_without = op.padding is not None and watched == "off" and self._entry(op).elementwise
        return on_all_elements(op) if is_without else op

    def sources(self, ops: Iterable[Op]) -> str | None:
        """The lowerings that ops use, with their fingerprints; None where one may not be kept on disk."""
        found = {}
        for op in {op.name: op for op in ops}.values():
            entry = self._entry(op)
            if not entry.persists:
                return None
            mark = ("by element " if entry.maps else "") + ("again " if entry.repeats else "")
            found[entry.name] = mark + fingerprint.of_function(entry.function, self._lowerings.context)[:16]
        return " ".join(f"{name}={found[name]}" for name in sorted(found))

    def find(self, ops: Sequence[Op]) -> list[tuple[Fragment, list[Parameter]]]:
        """Each op's fragment and the arrays it is called with; an error while tracing names the op and its line."""
        watched = self.watch()
        described = self.describe(ops, watched)
        made: dict[str, Fragment] = {}
        missing: dict[str, Op] = {}
        for (key, _), op in zip(described, ops, strict=True):
            known = self._find(key)
            if known is None:
                missing[key] = self._traced(op, watched)
            else:
                made[key] = known
        if missing:
            with self._lock:
                made.update(self._add(missing, watched))
        return [(made[key], arrays) for key, arrays in described]

    def conditions(self, program: Program) -> list[tuple[Op, tuple[str, ...]]]:
        """The padded ops of a program, each with the expressions that are not 0 where it is right; raises what lowering
        them raises."""
        ops = [op for op in program.ops if op.padding is not None]
        return [(op, fragment.unequal) for op, (fragment, _) in zip(ops, self.find(ops), strict=True)]

    def _find(self, key: str) -> Fragment | None:
        found = self._known.get(key)
        if found is None:
            found = self._older.get(key)
            if found is not None:
                self._keep(key, found)
        return found

    def _keep(self, key: str, fragment: Fragment) -> None:
        if 2 * len(self._known) >= self._capacity():
            self._known, self._older = {}, self._known
        self._known[key] = fragment

    def _add(self, missing: dict[str, Op], watched: str) -> dict[str, Fragment]:
        added: dict[str, Fragment] = {}
        waiting: dict[str, tuple[Op, LoweringEntry]] = {}
        for key, op in missing.items():
            known = self._find(key)  # another thread may have been here
            if known is not None:
                added[key] = known
                continue
            try:
                entry = self._lowerings.entry(op.name, self.platform)
                found = self._without_tracing(key, op, entry, watched)
                if found is None and op.padding is not None:
                    found = self._for_wider_bounds(key, op, entry)
                if found is None and self._store.keeps and entry.persists:
                    found = self._store.load(self._disk_key(key, entry), functools.partial(_decode, op=op))
                    self._counters.fragment_hits_disk += found is not None
                    if found is not None and op.padding is None:
                        self._learned.note(key, found)
            except Exception as error:
                raise explained(op, error) from error
            if found is None:
                waiting[key] = op, entry
            else:
                added[key] = found
        if watched == "off":
            added.update(self._of_all_shapes(waiting))
        added.update(self._trace_around(waiting, watched))
        added.update(self._trace_most({key: each for key, each in waiting.items() if key not in added}, watched))
        for key, fragment in added.items():
            self._keep(key, fragment)
            if missing[key].padding is not None:
                self._refusals.forget(_kind(key))
        return added

    def _without_tracing(self, key: str, op: Op, entry: LoweringEntry, watched: str) -> Fragment | None:
        """The op's fragment as its lowering writes it or by a template; None where there is none."""
        found = None
        if entry.persists:
            with self.bailouts.attempt("template", op.line):
                if watched == "off":
                    found = written_fragment(op, entry)
                found = found or self._templates.find(key, entry)
                if op.padding is None:
                    found = found or self._learned.find(key)
                self._counters.fragments_from_templates += found is not None
        return found

    def _for_wider_bounds(self, key: str, op: Op, entry: LoweringEntry) -> Fragment | None:
        """The fragment of a padded op whose sizes lie between others that it was traced for."""
        assert op.padding is not None
        wider = self._bounds.wider(key, op.padding.bounds)
        found = None if wider is None else self._find(wider)
        if found is None or found.unequal:  # what it takes for granted there may be known here, and otherwise
            return None
        self._save(key, op, entry, found, 0.0)
        return found

    def _trace_around(self, waiting: dict[str, tuple[Op, LoweringEntry]], watched: str) -> dict[str, Fragment]:
        """The fragments of padded ops that were traced between other bounds, for those and their own; none where one
        cannot be traced so."""
        wide: dict[str, tuple[Op, LoweringEntry]] = {}
        wider: dict[str, str] = {}
        for key, (op, entry) in waiting.items():
            around = None if op.padding is None else self._bounds.around(key, op.padding.bounds)
            if op.padding is not None and around is not None:
                wider[key] = with_bounds(key, op.padding.bounds, around)
                wide[wider[key]] = replace(op, padding=replace(op.padding, bounds=around)), entry
        made: dict[str, Fragment] = {}
        if wide:
            try:
                traced = self._trace_all(wide, watched)
            except Exception:  # noqa: BLE001 -- they may be right between their own bounds alone
                for key, (op, _) in wide.items():
                    assert op.padding is not None
                    self._bounds.keep_apart(key, op.padding.bounds)
                return made
            for key, described in wider.items():
                op, entry = wide[described]
                if traced[described].unequal and op.padding is not None:  # as above
                    self._bounds.keep_apart(described, op.padding.bounds)
                    continue
                made[key] = traced[described]
                self._keep(described, made[key])
                self._save(key, op, entry, made[key], 0.0)
        return made

    def _of_all_shapes(self, waiting: dict[str, tuple[Op, LoweringEntry]]) -> dict[str, Fragment]:
        """The fragments of ops on elements whose arrays have one shape, filled into those on a line: each is traced
        once, whatever shapes come."""
        lines: dict[str, tuple[str, Op]] = {}
        for key, (op, entry) in waiting.items():
            line = on_a_line(op) if entry.elementwise and entry.persists else None
            if line is not None:
                ((own, _),) = self.describe([line], "off")
                lines[key] = own, line
        made: dict[str, Fragment] = {}
        if all(own == key for key, (own, _) in lines.items()):
            return made
        first, _ = waiting[next(iter(lines))]
        # What has no lowering is refused where it is traced as it is.
        with self.bailouts.attempt("template", first.line), contextlib.suppress(NotImplementedError):
            traced = self._add(dict(lines.values()), "off")
            for key, (own, _) in lines.items():
                filled = with_shape(waiting[key][1], traced[own], key)
                if filled is not None:
                    made[key] = filled
        self._counters.fragments_from_templates += len(made)
        return made

    def _trace_most(self, waiting: dict[str, tuple[Op, LoweringEntry]], watched: str) -> dict[str, Fragment]:
        """The fragments of all ops: as many are traced as make templates for the others."""
        if waiting:
            jax_modules.load()
        general = [key for key, (op, entry) in waiting.items() if op.padding is None and entry.persists]
        others = dict.fromkeys(self._learned.others(general))
        made = self._trace({key: waiting[key] for key in waiting if key not in others}, watched)
        if others:
            asked = {key: waiting[key] for key in others}
            with self.bailouts.attempt("template", next(iter(asked.values()))[0].line):
                self._learned.learn(asked, watched)
                made |= {key: fragment for key in others if (fragment := self._learned.find(key)) is not None}
                self._counters.fragments_from_templates += len(made) - len(waiting) + len(others)
            made |= self._trace({key: each for key, each in asked.items() if key not in made}, watched)
        return made

    def _trace(self, waiting: dict[str, tuple[Op, LoweringEntry]], watched: str) -> dict[str, Fragment]:
        for key, (op, entry) in waiting.items():
            if op.padding is not None and not entry.elementwise:
                self._refusals.check(_kind(key))
        made: dict[str, Fragment] = {}
        keys = list(waiting)
        for first in range(0, len(keys), _BATCH):
            made |= self._trace_batch({key: waiting[key] for key in keys[first : first + _BATCH]}, watched)
        return made

    def _trace_batch(self, batch: dict[str, tuple[Op, LoweringEntry]], watched: str) -> dict[str, Fragment]:
        try:
            return self._trace_all(batch, watched)
        except Exception as error:
            raise self._refused(batch, watched, error) from error

    def _trace_all(self, batch: dict[str, tuple[Op, LoweringEntry]], watched: str) -> dict[str, Fragment]:
        """The fragments of ops, traced in one module; what one of them raises."""
        started = time.perf_counter()
        traced = self._tracer.trace(list(batch.values()), watched)
        self._counters.fragment_traces += len(traced)
        build_ms = round((time.perf_counter() - started) * 1e3 / len(traced), 3)
        made = dict(zip(batch, traced, strict=True))
        for key, fragment in made.items():
            op, entry = batch[key]
            if op.padding is not None:
                self._bounds.note(key, op.padding.bounds)
            elif entry.persists:
                self._learned.note(key, fragment)
            self._save(key, op, entry, fragment, build_ms)
        return made

    def _save(self, key: str, op: Op, entry: LoweringEntry, fragment: Fragment, build_ms: float) -> None:
        if self._store.keeps and entry.persists:
            facts: Note = {"op": op.name, "build_ms": build_ms}
            self._store.put(self._disk_key(key, entry), _encode(fragment), facts)

    def _refused(self, batch: dict[str, tuple[Op, LoweringEntry]], watched: str, error: Exception) -> Exception:
        """The error of what could not be traced. Where these are padded ops, the fragments of the others are kept:
        what is guessed next has most of them, too."""
        if any(op.padding is None for op, _ in batch.values()):
            return error
        if len(batch) == 1:
            ((key, (op, _)),) = batch.items()
            known = error if full_name(op.name) in str(error) else explained(op, error)
            self._refusals.note(_kind(key), str(known))
            return known
        keys = list(batch)
        for half in (keys[len(keys) // 2 :], keys[: len(keys) // 2]):
            try:
                traced = self._trace_batch({key: batch[key] for key in half}, watched)
            except Exception as raised:  # noqa: BLE001 -- the first of them is raised
                error = raised
            else:
                for key, fragment in traced.items():
                    self._keep(key, fragment)
        return error

    def _disk_key(self, key: str, entry: LoweringEntry) -> Key:
        parts = {
            "op": key,
            "platform": self.platform,
            "lowering": fingerprint.of_function(entry.function, self._lowerings.context),
            "tracing": fingerprint.of_modules(*self._tracing),
            "padding": fingerprint.of_modules(EVALUATION) if " padding " in key else "",
        }
        return Key.of("fragment", parts)


def _kind(key: str) -> str:
    """What ops have in common that differ in sizes alone, and in what of their arrays is padded."""
    return _SIZE.sub("", key.partition(" padding ")[0])


def _encode(fragment: Fragment) -> bytes:
    fields = fragment._asdict()
    fields["checks"] = [(message, error.__module__, error.__qualname__) for message, error in fragment.checks]
    return json.dumps(fields).encode()


def _decode(data: bytes, op: Op) -> Fragment:
    """The fragment that `_encode` was given, for this op; ValueError where it cannot be so."""
    symbol, body, used, forwards, signature, checks, unequal = fields(parsed(data), Fragment._fields)
    count, made = len(parameters(op)[1]), len(results_of(op))
    taken = integers(used, 0, count - 1)
    passed = tuple([None if i is None else integer(i, 0, count - 1) for i in items(forwards, made)])
    if not {None, *taken}.issuperset(passed):
        raise ValueError("a result that is a parameter which is not taken")
    if not (_SYMBOL.fullmatch(text(symbol)) and (f"@{symbol}(" in text(body) or not body)):
        raise ValueError("a function of another name")
    found = tuple([(text(m), error_class(module, name)) for m, module, name in (items(c, 3) for c in items(checks))])
    conditions = tuple([expression(item) for item in items(unequal)])
    return Fragment(symbol, body, taken, passed, text(signature), found, conditions)
