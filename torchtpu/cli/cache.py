"""`torchtpu cache`: shows what lies in the cache, and moves it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from torchtpu.cli.output import Json, err, fail, out, print_json, show_seconds, table
from torchtpu.compiler_cache import (
    UNREADABLE,
    BundleError,
    CacheEntry,
    DirectoryStore,
    EntryFile,
    cause_of,
    default_directory,
    difference,
    explain,
    export_bundle,
    import_bundle,
    open_store,
    parse_nbytes,
)
from torchtpu.runtime.device.sizes import show_bytes

cache = typer.Typer(help="Look into the cache of compiled programs, and move it.", no_args_is_help=True)

Digest = Annotated[str, typer.Argument(help="An entry's digest, or enough of its beginning.")]
Secret = Annotated[
    str | None, typer.Option(help="File with the secret that signs the bundle.", metavar="FILE", show_default=False)
]


@cache.command("path")
def path(as_json: Json = False) -> None:
    """Print the directory."""
    directory = default_directory()
    if directory is None:
        fail("there is no home directory; name one in TORCHTPU_CACHE_DIR")
    print_json({"path": str(directory)}) if as_json else print(directory)


@cache.command("ls")
def ls(
    kind: Annotated[str | None, typer.Option(help="Only this kind: plan, program or fragment.")] = "program",
    every: Annotated[bool, typer.Option("--all", help="Entries of every kind.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="Most rows; 0: all.")] = 50,
    as_json: Json = False,
) -> None:
    """List the entries, the one used last first."""
    store = _store()
    files = sorted((file for file in store.entries() if every or file.kind == kind), key=lambda file: -file.used)
    rows = map(_row, files[: limit or None])
    if as_json:
        print_json(list(rows))
        return
    columns = ("digest", "kind", "size", "used", "compiled in", "for", "what")
    out.print(table(columns, map(_cells, rows)))
    if limit and len(files) > limit:
        out.print(f"and {len(files) - limit} more (--limit 0 lists them all)")
    out.print(f"{len(files)} entries, {show_bytes(sum(f.nbytes for f in files))} in {store.directory}", markup=False)


@cache.command("info")
def info(
    digest: Annotated[str | None, typer.Argument(help="An entry's digest; none: the whole cache.")] = None,
    as_json: Json = False,
) -> None:
    """Show the whole cache in numbers, or one entry's key and note."""
    store = _store()
    found = _summary(store) if digest is None else _entry(store, digest)
    if as_json:
        print_json(found)
        return
    flat = {**found.pop("key", {}), **found.pop("note", {})}
    flat = {**found, **flat}
    out.print(table(("", ""), ((name, value) for name, value in flat.items() if value is not None)))


@cache.command("verify")
def verify(
    delete: Annotated[bool, typer.Option("--delete", help="Delete the damaged entries.")] = False, as_json: Json = False
) -> None:
    """Read every entry and check it; exit status 1 where a damaged one is left."""
    store = _store()
    count = sum(1 for _ in store.entries())
    damaged = list(store.damaged())
    left = sum(not (delete and _deletes(file)) for file, _ in damaged)
    if as_json:
        print_json(
            {
                "entries": count,
                "damaged": [{"digest": file.digest, "kind": file.kind, "reason": why} for file, why in damaged],
                "deleted": delete and not left,
            }
        )
    else:
        for file, why in damaged:
            out.print(f"{file.kind} {file.digest[:16]}: {why}", markup=False)
        deleted = f", {len(damaged) - left} of them deleted" if delete and damaged else ""
        out.print(f"{count} entries, {len(damaged)} damaged{deleted}")
    raise typer.Exit(1 if left else 0)


@cache.command("prune")
def prune(
    max_bytes: Annotated[str | None, typer.Option(help="Keep at most this much: 2G; 0 empties the cache.")] = None,
    as_json: Json = False,
) -> None:
    """Delete what was used longest ago, down to the cache's bound or to --max-bytes."""
    limit = None
    if max_bytes is not None:
        limit = parse_nbytes(max_bytes)
        if limit is None:
            fail(f"--max-bytes {max_bytes}: expected a size such as 512M or 2G", 2)
    store = _store()
    swept = store.prune(limit)
    if as_json:
        print_json({"deleted": swept.evicted, "entries": swept.entries, "nbytes": swept.nbytes})
    else:
        out.print(f"{swept.evicted} deleted, {swept.entries} entries and {show_bytes(swept.nbytes)} left")


@cache.command("export")
def export(
    file: Annotated[Path, typer.Argument(help="The bundle to write.")],
    platform: Annotated[str | None, typer.Option(help="Only programs for this platform: cpu, tpu or cuda.")] = None,
    secret: Secret = None,
    as_json: Json = False,
) -> None:
    """Write the entries to one file that another machine can import."""
    store = _store()
    try:
        count, left_out = export_bundle(
            store,
            file,
            chosen=lambda key: platform is None or dict(key.parts).get("platform") == platform,
            secret=_read_secret(secret),
        )
    except OSError as error:
        fail(f"{file} cannot be written: {error.strerror}")
    if as_json:
        print_json({"entries": count, "left_out": [{"entry": name, "reason": why} for name, why in left_out]})
        return
    for name, why in left_out:
        err.print(f"left out: {name}: {why}", markup=False)
    out.print(f"{count} entries in {file}, {'signed' if secret else 'unsigned'}", markup=False)


@cache.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A bundle.")],
    secret: Secret = None,
    trusts: Annotated[bool, typer.Option("--trust", help="Take an unsigned bundle: its code will run as you.")] = False,
    as_json: Json = False,
) -> None:
    """Store a bundle's entries; exit status 1 where one was refused."""
    try:
        done = import_bundle(_store(), file, secret=_read_secret(secret), trusts=trusts)
    except BundleError as error:
        fail(f"{error}{'' if secret or trusts else ' (--secret FILE or --trust)'}")
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror}")
    if as_json:
        refused = [{"entry": name, "reason": why} for name, why in done.refused]
        print_json({"stored": done.stored, "present": done.present, "refused": refused})
    else:
        for name, why in done.refused:
            err.print(f"refused: {name}: {why}", markup=False)
        out.print(f"{done.stored} stored, {done.present} here already, {len(done.refused)} refused")
    raise typer.Exit(1 if done.refused else 0)


@cache.command("explain")
def explain_(
    first: Digest,
    second: Annotated[str | None, typer.Argument(help="Another entry; none: the one whose key is nearest.")] = None,
    as_json: Json = False,
) -> None:
    """Name the parts in which two entries' keys differ."""
    store = _store()
    left = _find(store, first)
    key = _read(left).key
    if second is None:
        near = store.nearest(key)
        if near is None:
            fail(f"{left.digest[:12]} is the only {left.kind} here")
        right = near.entry
    else:
        right = _find(store, second)
    other = _read(right).key
    if as_json:
        parts = [part._asdict() for part in difference(key, other)]
        print_json({"first": left.digest, "second": right.digest, "differences": parts})
    else:
        out.print(f"{left.digest[:12]} -> {right.digest[:12]}")
        out.print(explain(key, other), markup=False)


def _store() -> DirectoryStore:
    store = open_store()
    if not isinstance(store, DirectoryStore) or store.directory is None:
        fail(f"there is no cache to look into: {getattr(store, 'reason', 'it has layers only')}")
    return store


def _find(store: DirectoryStore, digest: str) -> EntryFile:
    found = [file for file in store.entries() if file.digest.startswith(digest)] if digest else []
    if len(found) != 1:
        fail(f"{digest}: {'no entry' if not found else f'{len(found)} entries'} with a digest that begins so")
    return found[0]


def _read(file: EntryFile) -> CacheEntry:
    try:
        return file.read()
    except UNREADABLE as error:
        fail(f"{file.digest}: {cause_of(error)}")


def _deletes(file: EntryFile) -> bool:
    """Whether it is gone; what is no file is left to who put it there."""
    try:
        file.path.unlink(missing_ok=True)
    except OSError as error:
        err.print(f"{file.path} is not deleted: {error.strerror}", markup=False)
        return False
    return True


def _row(file: EntryFile) -> dict[str, Any]:
    row: dict[str, Any] = {"digest": file.digest, "kind": file.kind, "nbytes": file.nbytes, "used": file.used}
    try:
        entry = file.read()
    except UNREADABLE as error:
        return {**row, "damaged": cause_of(error)}
    parts = dict(entry.key.parts)
    return {**row, "target": parts.get("device_kind") or parts.get("platform"), "note": dict(entry.note)}


def _cells(row: dict[str, Any]) -> list[object]:
    note = row.get("note", {})
    build_ms = note.get("build_ms")
    return [
        row["digest"][:12],
        row["kind"],
        show_bytes(row["nbytes"]),
        _ago(row["used"]),
        show_seconds(build_ms / 1e3) if isinstance(build_ms, int | float) else "-",
        row.get("target") or "-",
        row.get("damaged") or note.get("line") or note.get("op") or "",
    ]


def _ago(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "now"


def _summary(store: DirectoryStore) -> dict[str, Any]:
    counts: dict[str, int] = {}
    nbytes: dict[str, int] = {}
    for file in store.entries():
        counts[file.kind] = counts.get(file.kind, 0) + 1
        nbytes[file.kind] = nbytes.get(file.kind, 0) + file.nbytes
    return {
        "directory": str(store.directory),
        "writable": os.access(store.directory or "", os.W_OK),
        **{f"{kind}s": counts[kind] for kind in sorted(counts)},
        **{f"{kind}_bytes": nbytes[kind] for kind in sorted(nbytes)},
        "max_bytes": store.max_bytes,
        "trusted_directories": os.pathsep.join(map(str, store.layers)) or None,
    }


def _entry(store: DirectoryStore, digest: str) -> dict[str, Any]:
    file = _find(store, digest)
    entry = _read(file)
    return {
        "digest": file.digest,
        "kind": file.kind,
        "path": str(file.path),
        "nbytes": file.nbytes,
        "key": dict(entry.key.parts),
        "note": dict(entry.note),
    }


def _read_secret(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        fail(f"{path} cannot be read: {error.strerror}")
    if not secret:
        fail(f"{path} is empty: a signature needs a secret")
    return secret
