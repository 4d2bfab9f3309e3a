"""One cache file: in come a key, a payload and a note, out go bytes that prove they are undamaged, and back.

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
import os
import struct
from collections.abc import Mapping
from typing import BinaryIO, NamedTuple

from .key import Key

VERSION = 1
_MAGIC = b"TORCHTPU"
_LENGTHS = struct.Struct("<8sIIIQ")
_DIGEST_BYTES = 32
HEAD_BYTES = _LENGTHS.size + _DIGEST_BYTES

Note = Mapping[str, str | int | float | None]


class DamagedEntry(ValueError):
    """A file that is not a whole, unchanged entry of this format for the expected key."""


class Entry(NamedTuple):
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
    note_text = json.dumps(dict(note), sort_keys=True, separators=(",", ":")).encode("ascii")
    lengths = _LENGTHS.pack(_MAGIC, VERSION, len(key.encoded), len(note_text), len(payload))
    total = hashlib.sha256(lengths)
    for piece in (key.encoded, note_text, payload):
        total.update(piece)
    return b"".join((lengths, total.digest(), key.encoded, note_text))


def decode(head: bytes, labels: bytes, payload: bytes, expected: Key | None = None) -> Entry:
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
    except ValueError as error:
        raise DamagedEntry(str(error)) from error
    return Entry(key, note if isinstance(note, dict) else {}, payload)


def read_entry(file: BinaryIO, expected: Key | None = None) -> Entry:
    """The entry in `file`, which must end where the entry ends; DamagedEntry where it is not whole and unchanged."""
    head = file.read(HEAD_BYTES)
    lengths = read_lengths(head)
    if os.fstat(file.fileno()).st_size != HEAD_BYTES + sum(lengths):
        raise DamagedEntry(f"not the {HEAD_BYTES + sum(lengths)} bytes that it announces")
    return decode(head, file.read(lengths.key + lengths.note), file.read(lengths.payload), expected)


def read_lengths(head: bytes) -> Lengths:
    """What the first HEAD_BYTES of a file announce; DamagedEntry where they are no head of this version."""
    if len(head) != HEAD_BYTES:
        raise DamagedEntry(f"only {len(head)} bytes long")
    magic, version, *lengths = _LENGTHS.unpack(head[: _LENGTHS.size])
    if magic != _MAGIC:
        raise DamagedEntry("not an entry of this cache")
    if version != VERSION:
        raise DamagedEntry(f"format version {version}, this is {VERSION}")
    return Lengths(*lengths)
