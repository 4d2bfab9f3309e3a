"""Cache keys: named parts, their canonical encoding, its sha256, and the difference of two keys."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

Value = str | bytes | int | bool | None

_VERBATIM_CHARACTERS = 8192
_KIND = re.compile(r"[a-z][a-z0-9_]{0,31}\Z")


@dataclass(frozen=True, slots=True)
class Key:
    """The identity of one cache entry.

    `kind` is the level ("plan", "program", "fragment"); `parts` are (name, value) pairs sorted by name.  Long text and
    all bytes are held as their digest, so a key stays small whatever it names.  Two keys are equal exactly when their
    `encoded` forms are.
    """

    kind: str = field(compare=False)
    parts: tuple[tuple[str, str | int | bool | None], ...] = field(compare=False)
    encoded: bytes = field(repr=False)
    digest: str = field(repr=False, compare=False)

    @staticmethod
    def of(kind: str, parts: Mapping[str, Value]) -> Key:
        """The key of `kind` with these parts, in any order."""
        return _key(kind, {name: _short(value) for name, value in parts.items()})

    @staticmethod
    def decode(encoded: bytes) -> Key:
        """The key whose `encoded` form this is; ValueError where it is none."""
        try:
            fields = json.loads(encoded)
            key = _key(fields["kind"], fields["parts"])
        except (AttributeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not an encoded key: {error!r}") from error
        if key.encoded != encoded:
            raise ValueError("not a canonical encoding of a key")
        return key


class KeyDifference(NamedTuple):
    """One named part in which two keys differ; None for a part that one of them lacks."""

    name: str
    left: str | None
    right: str | None


def difference(left: Key, right: Key) -> tuple[KeyDifference, ...]:
    """The parts in which two keys differ, by name; empty exactly when the keys are equal."""
    old: dict[str, str | int | bool | None] = {"kind": left.kind, **dict(left.parts)}
    new: dict[str, str | int | bool | None] = {"kind": right.kind, **dict(right.parts)}
    return tuple(
        KeyDifference(name, _text(old[name]) if name in old else None, _text(new[name]) if name in new else None)
        for name in sorted(old.keys() | new.keys())
        if name not in old or name not in new or json.dumps(old[name]) != json.dumps(new[name])
    )


def explain(left: Key, right: Key) -> str:
    """One line per differing part; of a part that is a list of words only the words that differ."""
    lines = [f"{name}: {_changed_words(old, new)}" for name, old, new in difference(left, right)]
    return "\n".join(lines) or "equal keys"


def digest_of(content: bytes) -> str:
    """What stands in a key for `content`."""
    return f"sha256:{hashlib.sha256(content).hexdigest()} ({len(content)} bytes)"


def fingerprint(sources: Iterable[bytes], versions: Mapping[str, str]) -> str:
    """The hash of what a plan or a fragment was made by: the lowering sources (in this order) and named versions."""
    total = hashlib.sha256(json.dumps(sorted(versions.items()), ensure_ascii=True).encode())
    for source in sources:
        total.update(hashlib.sha256(source).digest())
    return total.hexdigest()


def _key(kind: str, parts: Mapping[str, str | int | bool | None]) -> Key:
    if not _KIND.match(kind):
        raise ValueError(f"a key's kind is a short lower-case word, got {kind!r}")
    if "kind" in parts or not all(isinstance(value, str | int | None) for value in parts.values()):
        raise ValueError("a key's parts are strings, bytes, integers, booleans or None, none of them named 'kind'")
    encoded = json.dumps({"kind": kind, "parts": dict(parts)}, sort_keys=True, separators=(",", ":")).encode("ascii")
    return Key(kind, tuple(sorted(parts.items())), encoded, hashlib.sha256(encoded).hexdigest())


def _short(value: Value) -> str | int | bool | None:
    if isinstance(value, str) and len(value) > _VERBATIM_CHARACTERS:
        value = value.encode("utf-8", "surrogatepass")
    return digest_of(value) if isinstance(value, bytes) else value


def _text(value: str | int | bool | None) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _changed_words(old: str | None, new: str | None) -> str:
    if old is None or new is None:
        return f"{'absent' if old is None else old} -> {'absent' if new is None else new}"
    if old.startswith("sha256:") or new.startswith("sha256:"):
        return f"{old} -> {new}"
    olds, news = old.split(), new.split()
    gone, come = [word for word in olds if word not in news], [word for word in news if word not in olds]
    if not gone and not come:
        return f"{old} -> {new}"
    return f"{' '.join(gone) or 'nothing'} -> {' '.join(come) or 'nothing'}"
