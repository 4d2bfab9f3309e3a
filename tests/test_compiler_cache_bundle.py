"""A bundle fills another cache if it is signed or trusted, and exactly as it was written."""

from __future__ import annotations

import io
import re
import tarfile
from contextlib import redirect_stdout
from pathlib import Path

import cache_support
import pytest
from cache_support import entry_file, key, payload

from torchtpu.compiler_cache import BundleError, DirectoryStore, NullStore, export_bundle, import_bundle

home = pytest.fixture(cache_support.home)
store = pytest.fixture(cache_support.store)

SECRET = b"of the team"


@pytest.fixture
def bundle(store: DirectoryStore, tmp_path: Path) -> Path:
    for i in range(4):
        store.put(key(i), payload(i), {"line": "train.py:61"})
    assert export_bundle(store, tmp_path / "bundle", secret=SECRET) == (4, ())
    return tmp_path / "bundle"


@pytest.fixture
def other(tmp_path: Path) -> DirectoryStore:
    (tmp_path / "other").mkdir(0o700)
    return DirectoryStore(tmp_path / "other")


def test_a_bundle_fills_an_empty_cache(bundle: Path, other: DirectoryStore) -> None:
    assert import_bundle(other, bundle, secret=SECRET) == (4, 0, ())
    assert import_bundle(other, bundle, secret=SECRET) == (0, 4, ())
    assert all(other.get(key(i)) == payload(i) for i in range(4))
    assert next(other.entries()).read().note["line"] == "train.py:61"


def test_equal_caches_give_equal_bundles(bundle: Path, other: DirectoryStore, tmp_path: Path) -> None:
    import_bundle(other, bundle, secret=SECRET)
    export_bundle(other, tmp_path / "again", secret=SECRET)
    assert (tmp_path / "again").read_bytes() == bundle.read_bytes()


def test_only_what_is_chosen_and_undamaged_is_exported(store: DirectoryStore, tmp_path: Path) -> None:
    for i in range(4):
        store.put(key(i), payload(i))
    entry_file(store, key(2)).write_bytes(b"damaged")
    count, refused = export_bundle(store, tmp_path / "bundle", chosen=lambda one: one != key(0))
    assert count == 2
    assert [name for name, _ in refused] == [f"program/{key(2).digest}"]


def test_an_unsigned_bundle_takes_the_callers_trust(
    store: DirectoryStore, other: DirectoryStore, tmp_path: Path
) -> None:
    store.put(key(1), b"code")
    export_bundle(store, tmp_path / "bundle")
    with pytest.raises(BundleError, match="code that will run as you"):
        import_bundle(other, tmp_path / "bundle")
    with pytest.raises(BundleError, match="not signed"):
        import_bundle(other, tmp_path / "bundle", secret=SECRET)
    assert list(other.entries()) == []
    assert import_bundle(other, tmp_path / "bundle", trusts=True).stored == 1


def test_a_wrong_secret_is_refused_even_with_trust(bundle: Path, other: DirectoryStore) -> None:
    with pytest.raises(BundleError, match="another secret"):
        import_bundle(other, bundle, secret=b"wrong", trusts=True)
    with pytest.raises(BundleError, match="code that will run as you"):
        import_bundle(other, bundle)


def rewritten(bundle: Path, change: dict[str, bytes | None], extra: list[tarfile.TarInfo] | None = None) -> Path:
    """The bundle with members replaced or left out, and with more of them."""
    result = bundle.with_name("rewritten")
    with tarfile.open(bundle) as old, tarfile.open(result, "w") as new:
        for member in old.getmembers():
            content = change.get(member.name, old.extractfile(member).read())
            if content is not None:
                member.size = len(content)
                new.addfile(member, io.BytesIO(content))
        for member in extra or []:
            new.addfile(member, io.BytesIO(b"x" * member.size))
    return result


def test_a_changed_manifest_is_refused(bundle: Path, other: DirectoryStore) -> None:
    with tarfile.open(bundle) as tar:
        manifest = tar.extractfile("manifest.json").read()
    with pytest.raises(BundleError, match="was changed"):
        import_bundle(other, rewritten(bundle, {"manifest.json": manifest.replace(b"1", b"2")}), secret=SECRET)
    for unreadable in (b"", b"[]", b"{}", manifest[:-1], manifest.replace(b"bundle 1", b"bundle 2")):
        with pytest.raises(BundleError):
            import_bundle(other, rewritten(bundle, {"manifest.json": unreadable}), trusts=True)
    with pytest.raises(BundleError, match=r"no manifest\.json"):
        import_bundle(other, rewritten(bundle, {"manifest.json": None}), trusts=True)
    assert list(other.entries()) == []


def test_a_member_that_is_not_as_announced_is_refused_alone(bundle: Path, other: DirectoryStore) -> None:
    names = [f"program/{key(i).digest}" for i in range(4)]
    link = tarfile.TarInfo("program/link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    outside = tarfile.TarInfo("../../outside")
    outside.size = 5
    with tarfile.open(bundle) as tar:
        whole = tar.extractfile(names[1]).read()
        swapped = tar.extractfile(names[2]).read()
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    changed = rewritten(bundle, {names[0]: None, names[1]: flipped, names[3]: swapped}, [link, outside])
    done = import_bundle(other, changed, secret=SECRET)
    assert done.stored == 1
    assert {name for name, _ in done.refused} == {names[0], names[1], names[3], "program/link", "../../outside"}
    assert [entry.digest for entry in other.entries()] == [key(2).digest]


@pytest.mark.parametrize("entries", ["Infinity", '[{"name": [], "nbytes": Infinity, "sha256": 1}]', "[" * 100_000, "7"])
def test_a_manifest_of_no_sense_is_no_bundle(bundle: Path, other: DirectoryStore, entries: str) -> None:
    text = f'{{"format": "torchtpu cache bundle 1", "entry_version": 1, "entries": {entries}}}'.encode()
    changed = rewritten(bundle, {"manifest.json": text})
    try:
        done = import_bundle(other, changed, trusts=True)
    except BundleError:
        return
    assert done.stored == 0
    assert len(done.refused) >= 4


def test_a_member_larger_than_the_file_is_no_bundle(bundle: Path, other: DirectoryStore) -> None:
    content = bundle.read_bytes()
    for kind in (tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_SPARSE):
        member = tarfile.TarInfo("program/large")
        member.size, member.type = 8 * 2**30 - 1, kind
        bundle.write_bytes(member.tobuf() + content)
        with pytest.raises(BundleError):
            import_bundle(other, bundle, secret=SECRET)


@pytest.mark.parametrize("content", [b"", b"not a tar", b"\0" * 10240])
def test_what_is_no_bundle_is_refused(tmp_path: Path, other: DirectoryStore, content: bytes) -> None:
    (tmp_path / "bundle").write_bytes(content)
    with pytest.raises(BundleError):
        import_bundle(other, tmp_path / "bundle", trusts=True)


def test_a_store_that_keeps_nothing_says_so(bundle: Path) -> None:
    assert [reason for _, reason in import_bundle(NullStore("a test"), bundle, secret=SECRET).refused] == [
        "the store did not keep it"
    ] * 4


def test_a_failed_export_leaves_the_old_file(store: DirectoryStore, tmp_path: Path) -> None:
    store.put(key(1), b"code")
    (tmp_path / "bundle").mkdir()
    with pytest.raises(OSError):
        export_bundle(store, tmp_path / "bundle")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("bundle")] == ["bundle"]


def test_the_documentations_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHTPU_CACHE_DIR", str(tmp_path / "cache"))
    text = (Path(__file__).parent.parent / "docs" / "cache.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    printed = io.StringIO()
    with redirect_stdout(printed):
        for block in blocks:
            exec(block, {})
    assert printed.getvalue() == "options: 3.3.31=3 -> 3.3.31=1\n0 0 ()\n"
