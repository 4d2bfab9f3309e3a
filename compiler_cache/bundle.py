"""Bundles: in comes a cache directory, out goes one file that another machine can import, and back.

A bundle is an uncompressed tar: each entry's file as `<kind>/<digest>`, then `manifest.json`, and `manifest.sig` where
a secret was given.  The manifest names each entry's size and sha256; the signature is the manifest's HMAC-SHA256.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import secrets
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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
    path: str | Path,
    *,
    chosen: Callable[[Key], bool] = lambda key: True,
    secret: bytes | None = None,
) -> tuple[int, tuple[tuple[str, str], ...]]:
    """Writes the store's undamaged entries whose key is `chosen` to `path`; how many, and which were left out and why.

    The same entries give the same bytes.  Raises OSError where `path` cannot be written, which then is as before.
    """
    manifest: list[dict[str, str | int]] = []
    refused: list[tuple[str, str]] = []
    temporary = Path(f"{path}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as opened, tarfile.open(fileobj=opened, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for file in sorted(store.entries()):
                name = f"{file.kind}/{file.digest}"
                try:
                    raw = file.path.read_bytes()
                    if not chosen(_entry(name, raw).key):
                        continue
                except (DamagedEntry, OSError) as error:
                    refused.append((name, str(error)))
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
        with tarfile.open(path, "r:") as tar:
            listed = _manifest(tar, path, secret, trusts)
            return _store_members(store, tar, listed)
    except tarfile.TarError as error:
        raise BundleError(f"{path} is not a bundle ({error})") from error


def _manifest(tar: tarfile.TarFile, path: str | Path, secret: bytes | None, trusts: bool) -> dict[str, tuple[int, str]]:
    """Of each entry's name its size and sha256, once the bundle may be used."""
    text = _read(tar, _MANIFEST, _MANIFEST_BYTES)
    if text is None:
        raise BundleError(f"{path} is not a bundle (it has no {_MANIFEST})")
    signature = _read(tar, _SIGNATURE, 1024)
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
        return {entry["name"]: (int(entry["nbytes"]), str(entry["sha256"])) for entry in fields["entries"]}
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, BundleError):
            raise
        raise BundleError(f"{path} has a manifest that cannot be read ({error!r})") from error


def _store_members(store: Store, tar: tarfile.TarFile, listed: dict[str, tuple[int, str]]) -> Imported:
    stored = present = 0
    refused: list[tuple[str, str]] = []
    for member in tar.getmembers():
        if member.name in (_MANIFEST, _SIGNATURE):
            continue
        try:
            entry = _announced(tar, member, *listed.pop(member.name, (-1, "")))
        except DamagedEntry as error:
            refused.append((member.name, str(error)))
            continue
        if store.get(entry.key) == entry.payload:
            present += 1
        elif store.put(entry.key, entry.payload, entry.note):
            stored += 1
        else:
            refused.append((member.name, "the store did not keep it"))
    refused.extend((name, "missing from the file") for name in listed)
    return Imported(stored, present, tuple(refused))


def _announced(tar: tarfile.TarFile, member: tarfile.TarInfo, nbytes: int, digest: str) -> Entry:
    """The entry that `member` holds, which must be of this size and sha256."""
    # Nothing is ever unpacked by its name: a member is bytes that the manifest announces and that are an entry.
    opened = tar.extractfile(member) if member.isreg() and member.size == nbytes else None
    raw = b"" if opened is None else opened.read()
    if hashlib.sha256(raw).hexdigest() != digest:
        raise DamagedEntry("not what the manifest announces")
    return _entry(member.name, raw)


def _entry(name: str, raw: bytes) -> Entry:
    """The entry that `raw` is, which must be the one called `name`."""
    head = raw[:HEAD_BYTES]
    lengths = read_lengths(head)
    start = HEAD_BYTES + lengths.key + lengths.note
    entry = decode(head, raw[HEAD_BYTES:start], raw[start:])
    if f"{entry.key.kind}/{entry.key.digest}" != name:
        raise DamagedEntry(f"it holds {entry.key.kind}/{entry.key.digest}")
    return entry


def _read(tar: tarfile.TarFile, name: str, limit: int) -> bytes | None:
    """The content of the plain file `name` of at most `limit` bytes, or None where there is no such member."""
    try:
        member = tar.getmember(name)
    except KeyError:
        return None
    opened = tar.extractfile(member) if member.isreg() and member.size <= limit else None
    return None if opened is None else opened.read()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    member.mode = 0o600
    tar.addfile(member, io.BytesIO(content))


def _signature(secret: bytes, text: bytes) -> bytes:
    return hmac.new(secret, text, hashlib.sha256).hexdigest().encode("ascii")
