"""Fragments: in come recorded ops, out go the StableHLO functions that compute them, from memory, the store or a trace.

A fragment is found by what decides its text: the op's name, the types of its array arguments, the values of the
others, the recorded results, the platform and, for an op that multiplies, the precision.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchtpu.compiler_cache import Key, Store

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
        self._watch = watch
        self._lowerings = lowerings
        self.platform = platform or client.lowering_platform
        self._tracer = Tracer(client, self.platform, lowerings.context)
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

    def find(self, ops: Sequence[Op]) -> list[tuple[Fragment, list[Parameter]]]:
        """Each op's fragment and the arrays it is called with; an error while tracing names the op and its line."""
        known, keys, arrays = self._known, [], []
        watched = self._watch()
        suffix = "" if watched == "off" else f" {watched}"
        missing: dict[str, Op] = {}
        for op in ops:
            try:
                arguments, found = parameters(op)
                key = f"{op.name}({arguments})->({describe_results(op)}) {op.precision}{suffix}"
            except TypeError as error:  # an element type that XLA does not have
                raise explained(op, error) from error
            keys.append(key)
            arrays.append(found)
            if key not in known:
                missing[key] = op
        if missing:
            with self._lock:
                self._add(missing, watched)
        return [(known[key], found) for key, found in zip(keys, arrays, strict=True)]

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
        source = fingerprint(entry.function, self._lowerings.context)
        return Key.of("fragment", {"op": key, "platform": self.platform, "fingerprint": source})


@functools.cache
def fingerprint(function: Callable[..., Any], context: Callable[..., Any]) -> str:
    """Hash of everything that decides what a lowering traces to: its sources and the versions of torch and jax.

    The sources are the module it stands in, the modules of that package which this one reaches, the context's, and
    those that call it.
    """
    import jax

    home = inspect.unwrap(function).__module__
    package = home.rpartition(".")[0] or home
    callers = (Tracer.__module__, parameters.__module__)
    reached, waiting = {inspect.unwrap(context).__module__, *callers}, [home]
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        for value in vars(importlib.import_module(name)).values():
            other = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
            if isinstance(other, str) and other.startswith(package + "."):
                waiting.append(other)
    digest = hashlib.sha256(f"torch {torch.__version__} jax {jax.__version__}".encode())
    for name in sorted(reached):
        digest.update(inspect.getsource(importlib.import_module(name)).encode())
    return digest.hexdigest()


def _encode(fragment: Fragment) -> bytes:
    fields = fragment._asdict()
    fields["checks"] = [(message, error.__module__, error.__qualname__) for message, error in fragment.checks]
    return json.dumps(fields).encode()


def _decode(data: bytes) -> Fragment:
    fields = json.loads(data)
    checks = tuple((m, getattr(importlib.import_module(module), name)) for m, module, name in fields["checks"])
    used, forwards = tuple(fields["used"]), tuple(fields["forwards"])
    return Fragment(fields["symbol"], fields["text"], used, forwards, fields["signature"], checks)
