"""Fragments: in come recorded ops, out go the StableHLO functions that compute them, from memory, the store or a trace.

A fragment is found by what decides its text: the op's name, the types of its array arguments, the values of the
others, the recorded results, the platform and, for an op that multiplies, the precision.
"""

from __future__ import annotations

import importlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from torchtpu.compiler_cache import Key, Store

from . import fingerprint
from .calls import Entry, Lowerings, Parameter, describe_results, parameters
from .counters import Counters
from .region import Op
from .tracing import Fragment, Tracer, explained

if TYPE_CHECKING:
    from .pjrt import Client

_BATCH = 128  # ops traced in one module


class Fragments:
    """Finds, loads or traces fragments for one platform, by default the client's; one per engine.

    `watch` says what each op's results are checked for: "off", "nan" or "inf" (which includes NaN).
    """

    def __init__(
        self,
        lowerings: Lowerings,
        client: Client,
        store: Store,
        counters: Counters,
        platform: str = "",
        watch: Callable[[], str] = lambda: "off",
    ) -> None:
        self.watch = watch
        self._lowerings = lowerings
        self.platform = platform or client.lowering_platform
        self._tracer = Tracer(client, self.platform, lowerings.context)
        self._tracing = (Tracer.__module__, type(client).__module__)
        self._store = store
        self._counters = counters
        self._lock = threading.Lock()  # held while fragments are added
        self._known: dict[str, Fragment] = {}

    def maps(self, op: Op) -> bool:
        """Whether an op goes through its lists in step, element by element."""
        try:
            return self._lowerings.entry(op.name, self.platform).maps
        except NotImplementedError as error:
            raise explained(op, error) from error

    def describe(self, ops: Iterable[Op], watched: str) -> list[tuple[str, list[Parameter]]]:
        """What decides each op's fragment, as text, and the arrays it is called with; an error names the op and its
        line."""
        suffix = "" if watched == "off" else f" {watched}"
        found = []
        for op in ops:
            try:
                arguments, arrays = parameters(op)
                found.append((f"{op.name}({arguments})->({describe_results(op)}) {op.precision}{suffix}", arrays))
            except TypeError as error:  # an element type that XLA does not have
                raise explained(op, error) from error
        return found

    def sources(self, ops: Iterable[Op]) -> str | None:
        """The lowerings that ops use, with their fingerprints; None where one may not be kept on disk."""
        found = {}
        for op in {op.name: op for op in ops}.values():
            try:
                entry = self._lowerings.entry(op.name, self.platform)
            except Exception as error:
                raise explained(op, error) from error
            if not entry.persists:
                return None
            mark = "by element " if entry.maps else ""
            found[entry.name] = mark + fingerprint.of_function(entry.function, self._lowerings.context)[:16]
        return " ".join(f"{name}={found[name]}" for name in sorted(found))

    def find(self, ops: Sequence[Op]) -> list[tuple[Fragment, list[Parameter]]]:
        """Each op's fragment and the arrays it is called with; an error while tracing names the op and its line."""
        watched = self.watch()
        described = self.describe(ops, watched)
        missing = {key: op for (key, _), op in zip(described, ops, strict=True) if key not in self._known}
        if missing:
            with self._lock:
                self._add(missing, watched)
        return [(self._known[key], arrays) for key, arrays in described]

    def _add(self, missing: dict[str, Op], watched: str) -> None:
        waiting: list[tuple[str, Op, Entry]] = []
        for key, op in missing.items():
            try:
                entry = self._lowerings.entry(op.name, self.platform)
                stored = self._store.get(self._disk_key(key, entry)) if self._store.keeps and entry.persists else None
            except Exception as error:
                raise explained(op, error) from error
            if stored is None:
                waiting.append((key, op, entry))
            else:
                self._counters.fragment_hits_disk += 1
                self._known[key] = _decode(stored)
        for first in range(0, len(waiting), _BATCH):
            self._trace(waiting[first : first + _BATCH], watched)

    def _trace(self, waiting: list[tuple[str, Op, Entry]], watched: str) -> None:
        started = time.perf_counter()
        traced = self._tracer.trace([(op, entry) for _, op, entry in waiting], watched)
        self._counters.fragment_traces += len(traced)
        build_ms = round((time.perf_counter() - started) * 1e3 / len(traced), 3)
        for (key, op, entry), fragment in zip(waiting, traced, strict=True):
            self._known[key] = fragment
            if self._store.keeps and entry.persists:
                self._store.put(self._disk_key(key, entry), _encode(fragment), {"op": op.name, "build_ms": build_ms})

    def _disk_key(self, key: str, entry: Entry) -> Key:
        parts = {
            "op": key,
            "platform": self.platform,
            "lowering": fingerprint.of_function(entry.function, self._lowerings.context),
            "tracing": fingerprint.of_modules(*self._tracing),
        }
        return Key.of("fragment", parts)


def _encode(fragment: Fragment) -> bytes:
    fields = fragment._asdict()
    fields["checks"] = [(message, error.__module__, error.__qualname__) for message, error in fragment.checks]
    return json.dumps(fields).encode()


def _decode(data: bytes) -> Fragment:
    fields = json.loads(data)
    checks = tuple((m, getattr(importlib.import_module(module), name)) for m, module, name in fields["checks"])
    used, forwards = tuple(fields["used"]), tuple(fields["forwards"])
    return Fragment(fields["symbol"], fields["text"], used, forwards, fields["signature"], checks)
