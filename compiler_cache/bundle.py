"""Bundles: exports a cache directory as one file, and imports such a file.

A bundle is an uncompressed tar: each entry's file as `<kind>/<digest>`, then `manifest.json`, and `manifest.sig` where
a secret was given.  The manifest names each entry's size and sha256; the signature is the manifest's HMAC-SHA256.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from .entry import VERSION, CacheEntry, DamagedEntry, decode_whole, encode
from .files import UNREADABLE, cause_of, opened
from .key import Key
from .store import DirectoryStore, Store

if TYPE_CHECKING:
    import tarfile

_FORMAT = "torchtpu cache bundle 1"
_MANIFEST = "manifest.json"
_SIGNATURE = "manifest.sig"
_MANIFEST_BYTES = 256 * 2**20
_MEMBER_BYTES = 8 * 2**30 - 1  # what a header can say

# A tar's header.
_BLOCK_BYTES = 512
_NAME, _SIZE, _CHECKSUM, _TYPE, _PREFIX = slice(100), slice(124, 136), slice(148, 156), slice(156, 157), slice(345, 500)
_OCTAL = re.compile(rb"[0-7]{1,12}")


class BundleError(ValueError):
    """A file that is no bundle, or one that must not be imported."""


class Member(NamedTuple):
    """A member of a tar: its name, where its content lies, and whether it is a plain file."""

    name: str
    at: int
    nbytes: int
    is_plain: bool

    def read(self, file: BinaryIO) -> bytes:
        file.seek(self.at)
        return file.read(self.nbytes)


class Imported(NamedTuple):
    """What an import did: entries stored, entries the store had already, and entries it refused with the reason."""

    stored: int
    present: int
    refused: tuple[tuple[str, str], ...]


def export_bundle(
    store: DirectoryStore,
    path: str | Path,
    *,
    chosen: Callable[[Key], bool] = lambda key: True,
    secret: bytes | None = None,
) -> tuple[int, tuple[tuple[str, str], ...]]:
    """Writes the store's undamaged entries whose key is `chosen` to `path`; how many, and which were left out and why.

    The same entries give the same bytes.  Raises OSError where `path` cannot be written, which then is as before.
    """
    import tarfile  # whoever writes bundles waits for it, and no first op

    manifest: list[dict[str, str | int]] = []
    refused: list[tuple[str, str]] = []
    temporary = Path(f"{path}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as opened, tarfile.open(fileobj=opened, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for file in sorted(store.entries()):
                name = f"{file.kind}/{file.digest}"
                try:
                    entry = _named(name, file.read())
                    if not chosen(entry.key):
                        continue
                    raw = encode(entry.key, entry.payload, entry.note) + entry.payload
                    if len(raw) > _MEMBER_BYTES:
                        raise DamagedEntry(f"{len(raw)} bytes are too many for a bundle")
                except UNREADABLE as error:
                    refused.append((name, cause_of(error)))
                    continue
                manifest.append({"name": name, "nbytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()})
                _add(tar, name, raw)
            text = json.dumps({"format": _FORMAT, "entry_version": VERSION, "entries": manifest}, indent=1).encode()
            _add(tar, _MANIFEST, text)
            if secret is not None:
                _add(tar, _SIGNATURE, _signature(secret, text))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return len(manifest), tuple(refused)


def import_bundle(store: Store, path: str | Path, *, secret: bytes | None = None, trusts: bool = False) -> Imported:
    """Stores a bundle's entries.

    An entry is native code that will run as you: the bundle has to carry a signature made with `secret`, or the caller
    says that it `trusts` the file as it is.  Raises BundleError where neither holds or the manifest is none, OSError
    where the file cannot be read.  An entry that does not match the manifest is refused, the others are stored.
    """
    try:
        with opened(Path(path), follows_links=True) as (file, status):
            members = list(_members(file, status.st_size))
            listed = _manifest(file, members, path, secret, trusts)
            return _store_members(store, file, members, listed)
    except (DamagedEntry, MemoryError) as error:
        raise BundleError(f"{path} is not a bundle ({cause_of(error)})") from error


def _members(file: BinaryIO, nbytes: int) -> Iterator[Member]:
    """What a tar of so many bytes holds; DamagedEntry where it is none.

    Read here and not by tarfile, which takes the word of a header for the size of what follows it.
    """
    at = 0
    while at + _BLOCK_BYTES <= nbytes:
        file.seek(at)
        block = file.read(_BLOCK_BYTES)
        if not block.strip(b"\0"):
            return
        total = sum(block) - sum(block[_CHECKSUM]) + len(block[_CHECKSUM]) * ord(" ")
        size = _octal(block[_SIZE])
        if _octal(block[_CHECKSUM]) != total or size > nbytes - at - _BLOCK_BYTES:
            raise DamagedEntry(f"no tar at byte {at}")
        prefix, name = (block[field].partition(b"\0")[0].decode("utf-8", "replace") for field in (_PREFIX, _NAME))
        is_plain = block[_TYPE] in (b"0", b"\0")
        yield Member(f"{prefix}/{name}" if prefix else name, at + _BLOCK_BYTES, size, is_plain)
        at += _BLOCK_BYTES + -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


def _octal(field: bytes) -> int:
    digits = field.strip(b" \0")
    if not _OCTAL.fullmatch(digits):
        raise DamagedEntry(f"{field!r} is no number of a tar")
    return int(digits, 8)


def _manifest(
    file: BinaryIO, members: list[Member], path: str | Path, secret: bytes | None, trusts: bool
) -> dict[str, tuple[int, str]]:
    """Of each entry's name its size and sha256, once the bundle may be used."""
    text = _read(file, members, _MANIFEST, _MANIFEST_BYTES)
    if text is None:
        raise BundleError(f"{path} is not a bundle (it has no {_MANIFEST})")
    signature = _read(file, members, _SIGNATURE, 1024)
    if secret is not None:
        if signature is None:
            raise BundleError(f"{path} is not signed")
        if not hmac.compare_digest(signature, _signature(secret, text)):
            raise BundleError(f"{path} is signed with another secret, or was changed")
    elif not trusts:
        raise BundleError(
            f"{path} holds code that will run as you, and nothing proves where it is from: "
            "give the secret it was signed with, or say that you trust the file"
        )
    try:
        fields = json.loads(text)
        if fields["format"] != _FORMAT or fields["entry_version"] != VERSION:
            raise BundleError(f"{path} is of another version ({fields['format']}, {fields['entry_version']})")
        return {str(entry["name"]): (entry["nbytes"], entry["sha256"]) for entry in fields["entries"]}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, BundleError):
            raise
        raise BundleError(f"{path} has a manifest that cannot be read ({error!r})") from error


def _store_members(store: Store, file: BinaryIO, members: list[Member], listed: dict[str, tuple[int, str]]) -> Imported:
    stored = present = 0
    refused: list[tuple[str, str]] = []
    for member in members:
        if member.name in (_MANIFEST, _SIGNATURE):
            continue
        try:
            entry = _announced(file, member, *listed.pop(member.name, (-1, "")))
        except (DamagedEntry, MemoryError) as error:
            refused.append((member.name, cause_of(error)))
            continue
        if store.get(entry.key) == entry.payload:
            present += 1
        elif store.put(entry.key, entry.payload, entry.note):
            stored += 1
        else:
            refused.append((member.name, "the store did not keep it"))
    refused.extend((name, "missing from the file") for name in listed)
    return Imported(stored, present, tuple(refused))


def _announced(file: BinaryIO, member: Member, nbytes: int, digest: str) -> CacheEntry:
    """The entry that `member` holds, which must be of this size and sha256."""
    # Nothing is ever unpacked by its name: a member is bytes that the manifest announces and that are an entry.
    raw = member.read(file) if member.is_plain and member.nbytes == nbytes else b""
    if hashlib.sha256(raw).hexdigest() != digest:
        raise DamagedEntry("not what the manifest announces")
    return _named(member.name, decode_whole(raw))


def _named(name: str, entry: CacheEntry) -> CacheEntry:
    """The entry, which must be the one called `name`."""
    if f"{entry.key.kind}/{entry.key.digest}" != name:
        raise DamagedEntry(f"it holds {entry.key.kind}/{entry.key.digest}")
    return entry


def _read(file: BinaryIO, members: list[Member], name: str, limit: int) -> bytes | None:
    """The content of the plain file `name` of at most `limit` bytes, or None where there is no such member."""
    for member in reversed(members):  # as a tar is read: the last of a name counts
        if member.name == name:
            return member.read(file) if member.is_plain and member.nbytes <= limit else None
    return None


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    import tarfile

    member = tarfile.TarInfo(name)
    member.size = len(content)
    member.mode = 0o600
    tar.addfile(member, io.BytesIO(content))


def _signature(secret: bytes, text: bytes) -> bytes:
    return hmac.new(secret, text, hashlib.sha256).hexdigest().encode("ascii")
