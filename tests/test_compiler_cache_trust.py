"""Code is run only from directories where nobody else can put any."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import cache_support
import pytest
from cache_support import child, entry_file, finish, key

from torchtpu.compiler_cache import DirectoryStore, NullStore, default_directory, open_store
from torchtpu.compiler_cache.trust import untrusted

home = pytest.fixture(cache_support.home)
store = pytest.fixture(cache_support.store)
lines = pytest.fixture(cache_support.lines)


@pytest.fixture(autouse=True)
def trusted_base(tmp_path: Path) -> None:
    if untrusted(tmp_path) is not None:
        pytest.skip(f"the test directory itself is not trusted: {untrusted(tmp_path)}")


def opened(directory: Path, **environment: str) -> object:
    return open_store({"TORCHTPU_CACHE_DIR": str(directory), **environment})


def owned_by_another(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    genuine = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        status = list(genuine(path))
        if path in paths:
            status[stat.ST_UID] = 4242
        return os.stat_result(status)

    monkeypatch.setattr(Path, "lstat", lstat)


def test_a_missing_directory_is_made_for_its_user_alone(tmp_path: Path) -> None:
    assert isinstance(opened(tmp_path / "a" / "b"), DirectoryStore)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_directory_that_others_may_write_to_is_not_used(tmp_path: Path, lines: list[str], mode: int) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    assert isinstance(opened(tmp_path / "cache"), NullStore)
    assert len(lines) == 1
    assert "others may write" in lines[0]


@pytest.mark.parametrize("mode", [0o775, 0o777])
def test_neither_is_one_below_such_a_directory(tmp_path: Path, lines: list[str], mode: int) -> None:
    (tmp_path / "shared" / "cache").mkdir(0o700, parents=True)
    (tmp_path / "shared").chmod(mode)
    assert isinstance(opened(tmp_path / "shared" / "cache"), NullStore)
    assert len(lines) == 1


def test_a_private_directory_below_a_sticky_one_is_used(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    assert isinstance(opened(tmp_path / "tmp" / "cache"), DirectoryStore)


@pytest.mark.parametrize("which", ["cache", "above"])
def test_another_users_directory_is_not_used(
    tmp_path: Path,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    which: str,
) -> None:
    cache = tmp_path / "above" / "cache"
    cache.mkdir(0o700, parents=True)
    owned_by_another(monkeypatch, cache if which == "cache" else cache.parent)
    assert isinstance(opened(cache), NullStore)
    assert len(lines) == 1
    assert "uid 4242" in lines[0]


def test_links_are_followed_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real" / "cache").mkdir(0o700, parents=True)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "loop").symlink_to("loop")
    assert untrusted(tmp_path / "link" / "cache") is None
    assert untrusted(tmp_path / "link" / ".." / "real" / "cache") is None
    assert "symbolic links" in str(untrusted(tmp_path / "loop" / "cache"))
    (tmp_path / "real").chmod(0o777)
    assert "real" in str(untrusted(tmp_path / "link" / "cache"))
    (tmp_path / "real").chmod(0o700)
    owned_by_another(monkeypatch, tmp_path / "link")
    assert "link" in str(untrusted(tmp_path / "link" / "cache"))


def test_an_entry_or_its_directory_that_others_may_write_to_is_not_read(
    store: DirectoryStore,
    home: Path,
    lines: list[str],
) -> None:
    store.put(key(1), b"code")
    path = entry_file(store, key(1))
    path.chmod(0o666)
    assert DirectoryStore(home).get(key(1)) is None
    path.chmod(0o600)
    path.parent.chmod(0o777)
    assert DirectoryStore(home).get(key(1)) is None
    assert len(lines) == 2
    path.parent.chmod(0o700)
    assert DirectoryStore(home).get(key(1)) == b"code"


# Layers


def test_a_trusted_layer_is_read_and_never_written(store: DirectoryStore, home: Path, tmp_path: Path) -> None:
    store.put(key(1), b"code")
    os.utime(entry_file(store, key(1)), (1, 1))
    local = tmp_path / "local"
    layered = opened(local, TORCHTPU_CACHE_TRUSTED_DIRS=f"{tmp_path / 'absent'}:{home}")
    assert isinstance(layered, DirectoryStore)
    assert layered.get(key(1)) == b"code"
    assert layered.get_or_build(key(2), lambda: b"more") == b"more"
    layered.discard(key(1), "a test")
    assert {path.name for path in home.rglob("*") if path.is_file()} == {key(1).digest}
    assert entry_file(store, key(1)).stat().st_mtime == 1
    assert [entry.digest for entry in layered.entries()] == [key(2).digest]


def test_what_a_layer_cannot_serve_is_built_into_the_local_cache(
    store: DirectoryStore, home: Path, tmp_path: Path
) -> None:
    store.put(key(1), b"of another machine")
    for _ in range(2):
        layered = opened(tmp_path / "local", TORCHTPU_CACHE_TRUSTED_DIRS=str(home))
        assert isinstance(layered, DirectoryStore)
        if layered.get(key(1)) != b"code":
            layered.discard(key(1), "a test")
            assert layered.get_or_build(key(1), lambda: b"code") == b"code"
    assert layered.stats().builds == 0


def test_a_layer_may_be_anothers_but_not_everybodys(
    store: DirectoryStore,
    home: Path,
    tmp_path: Path,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store.put(key(1), b"code")
    owned_by_another(monkeypatch, home)
    layered = opened(tmp_path / "local", TORCHTPU_CACHE_TRUSTED_DIRS=str(home))
    assert isinstance(layered, DirectoryStore)
    assert layered.get(key(1)) == b"code"
    assert lines == []
    home.chmod(0o707)
    layered = opened(tmp_path / "local", TORCHTPU_CACHE_TRUSTED_DIRS=str(home))
    assert isinstance(layered, DirectoryStore)
    assert layered.get(key(1)) is None
    assert len(lines) == 1


def test_a_layer_serves_where_there_is_no_directory_of_ones_own(store: DirectoryStore, home: Path) -> None:
    store.put(key(1), b"code")
    layered = opened(Path("/proc/nowhere"), TORCHTPU_CACHE_TRUSTED_DIRS=str(home))
    assert isinstance(layered, DirectoryStore)
    assert layered.get(key(1)) == b"code"
    assert layered.get_or_build(key(2), lambda: b"more") == b"more"
    assert not layered.put(key(3), b"code")


# What the environment asks for


def test_off_keeps_nothing(tmp_path: Path) -> None:
    assert isinstance(opened(tmp_path / "cache", TORCHTPU_CACHE="off"), NullStore)
    assert not (tmp_path / "cache").exists()


def test_the_directory_is_xdgs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_directory({}) == tmp_path / ".cache" / "torchtpu"
    assert default_directory({"XDG_CACHE_HOME": "relative"}) == tmp_path / ".cache" / "torchtpu"
    assert default_directory({"XDG_CACHE_HOME": "/x"}) == Path("/x/torchtpu")
    assert default_directory({"XDG_CACHE_HOME": "/x", "TORCHTPU_CACHE_DIR": "~/mine"}) == tmp_path / "mine"


@pytest.mark.parametrize(
    ("text", "nbytes"), [("", 10 * 2**30), ("1000", 1000), ("2G", 2**31), ("1.5 MiB", 3 * 2**19), ("3kb", 3072)]
)
def test_a_size_may_have_a_unit(tmp_path: Path, text: str, nbytes: int) -> None:
    found = opened(tmp_path / "cache", TORCHTPU_CACHE_MAX_BYTES=text)
    assert isinstance(found, DirectoryStore)
    assert found.max_bytes == nbytes


def test_a_misspelled_setting_is_said_and_harmless(tmp_path: Path, lines: list[str]) -> None:
    found = opened(tmp_path / "cache", TORCHTPU_CACHE="yes", TORCHTPU_CACHE_MAX_BYTES="lots")
    assert isinstance(found, DirectoryStore)
    assert len(lines) == 2


def test_a_user_without_home_and_without_rights_runs_without_a_cache(tmp_path: Path) -> None:
    """As a random uid in a container does: whatever the directory, there is one line and no error."""
    if os.geteuid() == 0:
        drop = "os.setgroups([]); os.setgid(54321); os.setuid(54321)"
    else:
        drop = "os.environ['HOME'] = '/proc'"
    code = f"""
        import logging
        lines = []
        handler = logging.Handler(); handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("torchtpu.compiler_cache").addHandler(handler)
        os.environ["HOME"] = sys.argv[1]
        {drop}
        store = open_store(dict(HOME=sys.argv[1]))
        assert store.get_or_build(key(1), lambda: b"code") == b"code"
        assert store.get_or_build(key(2), lambda: b"code") == b"code"
        print(type(store).__name__, len(lines))
    """
    for place in ("/", "/nonexistent", tmp_path, "/proc"):
        if place != tmp_path or os.geteuid() == 0:
            assert finish(child(code, place)).split() == ["NullStore", "1"], place


def test_a_read_only_directory_is_read_with_one_line(tmp_path: Path) -> None:
    """Run as another user where we are root, whom no mode stops."""
    code = """
        import logging
        lines = []
        handler = logging.Handler(); handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("torchtpu.compiler_cache").addHandler(handler)
        import tempfile
        root = os.geteuid() == 0
        place = tempfile.mkdtemp()
        if root: os.chown(place, 54321, 54321); os.setgroups([]); os.setgid(54321); os.setuid(54321)
        DirectoryStore(place).put(key(1), b"code")
        made = [place, *(os.path.join(at, name) for at, names, _ in os.walk(place) for name in names)]
        for directory in made: os.chmod(directory, 0o500)
        store = open_store(dict(TORCHTPU_CACHE_DIR=place))
        assert store.get(key(1)) == b"code"
        assert store.get_or_build(key(2), lambda: b"more") == b"more"
        assert store.get_or_build(key(3), lambda: b"more") == b"more"
        print(len(lines), store.put(key(4), b"more"))
        for directory in made: os.chmod(directory, 0o700)
        import shutil; shutil.rmtree(place, ignore_errors=True)
    """
    assert finish(child(code)).split() == ["1", "False"]
