"""The file format of a cache entry, whose checksum covers its key, payload and note.

| bytes | content |
|---|---|
| 8 | magic `TORCHTPU` |
| 4, 4, 4, 8 | little-endian: format version, length of the key, of the note, of the payload |
| 32 | sha256 of every other byte of the file |
| ... | the key's canonical JSON, the note's JSON, the payload |
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import NamedTuple

from .key import Key

VERSION = 1
_MAGIC = b"TORCHTPU"
_LENGTHS = struct.Struct("<8sIIIQ")
_DIGEST_BYTES = 32
HEAD_BYTES = _LENGTHS.size + _DIGEST_BYTES
_MOST_LABEL_BYTES = 2**24
_MOST = 2.0**63

Note = Mapping[str, str | int | float | None]


class DamagedEntry(ValueError):
    """A file that is not a whole, unchanged entry of this format for the expected key."""


class CacheEntry(NamedTuple):
    """What an entry holds; the note is information for people and is no part of the key."""

    key: Key
    note: Note
    payload: bytes


class Lengths(NamedTuple):
    """The bytes that a file's key, note and payload take."""

    key: int
    note: int
    payload: int


def encode(key: Key, payload: bytes, note: Note) -> bytes:
    """The file up to its payload: head, key and note."""
    facts = {name: fact for name, fact in note.items() if _is_fact(fact)}
    note_text = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode("ascii")
    lengths = _LENGTHS.pack(_MAGIC, VERSION, len(key.encoded), len(note_text), len(payload))
    total = hashlib.sha256(lengths)
    for piece in (key.encoded, note_text, payload):
        total.update(piece)
    return b"".join((lengths, total.digest(), key.encoded, note_text))


def decode(head: bytes, labels: bytes, payload: bytes, expected: Key | None = None) -> CacheEntry:
    """The entry of a file that reads `head`, `labels` (key and note), `payload`; DamagedEntry where anything is off."""
    lengths = read_lengths(head)
    if len(labels) != lengths.key + lengths.note or len(payload) != lengths.payload:
        found = HEAD_BYTES + len(labels) + len(payload)
        raise DamagedEntry(f"{found} bytes long, {HEAD_BYTES + sum(lengths)} announced")
    total = hashlib.sha256(head[: _LENGTHS.size])
    total.update(labels)
    total.update(payload)
    if total.digest() != head[_LENGTHS.size :]:
        raise DamagedEntry("the checksum does not match")
    encoded = labels[: lengths.key]
    if expected is not None and encoded != expected.encoded:
        raise DamagedEntry("it holds the entry of another key")
    try:
        key = Key.decode(encoded) if expected is None else expected
        note = json.loads(labels[lengths.key :])
    except (ValueError, RecursionError) as error:
        raise DamagedEntry(str(error)) from error
    if not (isinstance(note, dict) and all(map(_is_fact, note.values()))):
        raise DamagedEntry("its note is none")
    return CacheEntry(key, note, payload)


def decode_whole(content: bytes) -> CacheEntry:
    """The entry that a file with this content is; DamagedEntry where it is none."""
    head = content[:HEAD_BYTES]
    lengths = read_lengths(head)
    start = HEAD_BYTES + lengths.key + lengths.note
    return decode(head, content[HEAD_BYTES:start], content[start:])


def read_lengths(head: bytes) -> Lengths:
    """What the first HEAD_BYTES of a file announce; DamagedEntry where they are no head of this version."""
    if len(head) != HEAD_BYTES:
        raise DamagedEntry(f"only {len(head)} bytes long")
    magic, version, *lengths = _LENGTHS.unpack(head[: _LENGTHS.size])
    if magic != _MAGIC:
        raise DamagedEntry("not an entry of this cache")
    if version != VERSION:
        raise DamagedEntry(f"format version {version}, this is {VERSION}")
    if max(lengths[:2]) > _MOST_LABEL_BYTES:
        raise DamagedEntry(f"a key of {lengths[0]} bytes and a note of {lengths[1]}")
    return Lengths(*lengths)


def _is_fact(value: object) -> bool:
    """Whether a note holds such a thing: text, a number that anybody can calculate with, or nothing."""
    return value is None or isinstance(value, str) or (isinstance(value, int | float) and abs(value) < _MOST)
