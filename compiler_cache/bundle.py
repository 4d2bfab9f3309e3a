"""Bundles: in comes a cache directory, out goes one file that another machine can import, and back.

A bundle is an uncompressed tar: `manifest.json`, `manifest.sig` where a secret was given, then each entry's file as
`<kind>/<digest>`.  The manifest names each one's size and sha256; the signature is the manifest's HMAC-SHA256.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import os
import secrets
import tarfile
from collections.abc import Callable
from typing import IO, NamedTuple

from .catalog import EntryFile
from .entry import HEAD_BYTES, VERSION, DamagedEntry, Entry, decode, read_lengths
from .key import Key
from .store import DirectoryStore, Store

_FORMAT = "torchtpu cache bundle 1"
_MANIFEST = "manifest.json"
_SIGNATURE = "manifest.sig"
_MANIFEST_BYTES = 256 * 2**20


class BundleError(ValueError):
    """A file that is no bundle, or one that must not be imported."""


class Imported(NamedTuple):
    """What an import did: entries stored, entries the store had already, and entries it refused with the reason."""

    stored: int
    present: int
    refused: tuple[tuple[str, str], ...]


def export_bundle(
    store: DirectoryStore,
    path: str,
    *,
    chosen: Callable[[Key], bool] = lambda key: True,
    secret: bytes | None = None,
) -> tuple[int, tuple[tuple[str, str], ...]]:
    """Writes the store's undamaged entries whose key is `chosen` to `path`; how many, and which were left out and why.

    The same entries give the same bytes.  Raises OSError where `path` cannot be written, which then is as before.
    """
    manifest, refused, files = [], [], []
    for file in sorted(store.entries()):
        try:
            entry = file.read()
            raw = _raw(file)
        except (DamagedEntry, OSError) as error:
            refused.append((f"{file.kind}/{file.digest}", str(error)))
            continue
        if _name(entry.key) == f"{file.kind}/{file.digest}" and chosen(entry.key):
            manifest.append({"name": _name(entry.key), "nbytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()})
            files.append(file)
    text = json.dumps({"format": _FORMAT, "entry_version": VERSION, "entries": manifest}, indent=1).encode("ascii")
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "xb") as opened, tarfile.open(fileobj=opened, mode="w", format=tarfile.PAX_FORMAT) as tar:
            _add(tar, _MANIFEST, text)
            if secret is not None:
                _add(tar, _SIGNATURE, _signature(secret, text))
            for file, listed in zip(files, manifest, strict=True):
                _add(tar, str(listed["name"]), _raw(file))
        os.replace(temporary, path)
    finally:
        if os.path.lexists(temporary):
            os.unlink(temporary)
    return len(files), tuple(refused)


def import_bundle(store: Store, path: str, *, secret: bytes | None = None, trusts: bool = False) -> Imported:
    """Stores a bundle's entries.

    An entry is native code that will run as you: the bundle has to carry a signature made with `secret`, or the caller
    says that it `trusts` the file as it is.  Raises BundleError where neither holds or the manifest is none, OSError
    where the file cannot be read.  An entry that does not match the manifest is refused, the others are stored.
    """
    try:
        with tarfile.open(path, "r:") as tar:
            listed = _manifest(tar, path, secret, trusts)
            return _store_members(store, tar, listed)
    except tarfile.TarError as error:
        raise BundleError(f"{path} is not a bundle ({error})") from error


def _manifest(tar: tarfile.TarFile, path: str, secret: bytes | None, trusts: bool) -> dict[str, tuple[int, str]]:
    """Of each entry's name its size and sha256, once the bundle may be used."""
    text = _read(tar, tar.next(), _MANIFEST, _MANIFEST_BYTES)
    if text is None:
        raise BundleError(f"{path} is not a bundle (it does not begin with {_MANIFEST})")
    position = tar.offset
    signature = _read(tar, tar.next(), _SIGNATURE, 1024)
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
    if signature is None:
        tar.offset = position
    try:
        fields = json.loads(text)
        if fields["format"] != _FORMAT or fields["entry_version"] != VERSION:
            raise BundleError(f"{path} is of another version ({fields['format']}, {fields['entry_version']})")
        return {entry["name"]: (int(entry["nbytes"]), str(entry["sha256"])) for entry in fields["entries"]}
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, BundleError):
            raise
        raise BundleError(f"{path} has a manifest that cannot be read ({error!r})") from error


def _store_members(store: Store, tar: tarfile.TarFile, listed: dict[str, tuple[int, str]]) -> Imported:
    stored = present = 0
    refused: list[tuple[str, str]] = []
    missing = dict(listed)
    while (member := tar.next()) is not None:
        if member.name in (_MANIFEST, _SIGNATURE):
            continue
        announced = missing.pop(member.name, None)
        # Nothing is ever unpacked by its name: a member is bytes that a manifest announces and that must be an entry.
        raw = None if announced is None else _read(tar, member, member.name, announced[0])
        if announced is None or raw is None:
            refused.append((member.name, "not in the manifest" if announced is None else "not the announced size"))
            continue
        try:
            entry = _entry(member.name, raw, announced)
        except DamagedEntry as error:
            refused.append((member.name, str(error)))
            continue
        if store.get(entry.key) == entry.payload:
            present += 1
        elif store.put(entry.key, entry.payload, entry.note):
            stored += 1
        else:
            refused.append((member.name, "the store did not keep it"))
    refused.extend((name, "missing from the file") for name in missing)
    return Imported(stored, present, tuple(refused))


def _entry(name: str, raw: bytes, announced: tuple[int, str]) -> Entry:
    if len(raw) != announced[0] or hashlib.sha256(raw).hexdigest() != announced[1]:
        raise DamagedEntry("not what the manifest announces")
    head = raw[:HEAD_BYTES]
    lengths = read_lengths(head)
    start = HEAD_BYTES + lengths.key + lengths.note
    entry = decode(head, raw[HEAD_BYTES:start], raw[start:])
    if _name(entry.key) != name:
        raise DamagedEntry(f"it holds {_name(entry.key)}")
    return entry


def _name(key: Key) -> str:
    return f"{key.kind}/{key.digest}"


def _raw(file: EntryFile) -> bytes:
    with open(file.path, "rb") as opened:
        return opened.read()


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo | None, name: str, limit: int) -> bytes | None:
    """The content of `member` where it is the plain file `name` of at most `limit` bytes."""
    if member is None or member.name != name or not member.isreg() or member.size > limit:
        return None
    opened: IO[bytes] | None = tar.extractfile(member)
    return None if opened is None else opened.read()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    member.mode = 0o600
    tar.addfile(member, io.BytesIO(content))


def _signature(secret: bytes, text: bytes) -> bytes:
    return hmac.new(secret, text, hashlib.sha256).hexdigest().encode("ascii")
