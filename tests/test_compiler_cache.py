"""Under threads, processes, crashes, damage and full disks the cache is right or absent, never in the way."""

from __future__ import annotations

import errno
import fcntl
import gc
import hashlib
import os
import random
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cache_support
import pytest
from cache_support import child, entry_file, finish, key, must_not_build, payload, ready

from torchtpu.compiler_cache import DirectoryStore, NullStore, Store, export_bundle, files, flight, open_store
from torchtpu.compiler_cache.flight import KeyLock, Lease

home = pytest.fixture(cache_support.home)
store = pytest.fixture(cache_support.store)
lines = pytest.fixture(cache_support.lines)


# What a store gives back


def test_what_was_put_is_found_by_another_store(store: DirectoryStore, home: Path) -> None:
    assert store.get(key(1)) is None
    assert store.put(key(1), payload(1))
    assert DirectoryStore(home).get(key(1)) == payload(1)
    assert DirectoryStore(home).get_or_build(key(1), must_not_build) == payload(1)
    assert store.stats().misses == store.stats().stored == 1


def test_entries_and_directories_belong_to_their_user_alone(store: DirectoryStore, home: Path) -> None:
    os.umask(previous := os.umask(0))
    os.umask(0)
    try:
        store.put(key(1), b"code")
    finally:
        os.umask(previous)
    for path in home.rglob("*"):
        assert path.lstat().st_mode & 0o077 == 0


def test_a_hit_says_what_it_saved(store: DirectoryStore, home: Path) -> None:
    def build() -> bytes:
        time.sleep(0.02)
        return b"code"

    store.get_or_build(key(1), build, {"line": "train.py:61"})
    reader = DirectoryStore(home)
    reader.get(key(1))
    assert reader.stats().hits == 1
    assert reader.stats().saved_ms >= 20
    (entry,) = store.entries()
    assert entry.read().note["line"] == "train.py:61"


def test_an_empty_payload_is_a_payload(store: DirectoryStore) -> None:
    assert store.get_or_build(key(1), lambda: b"") == b""
    assert store.get_or_build(key(1), must_not_build) == b""


def test_a_discarded_entry_is_built_again(store: DirectoryStore, lines: list[str]) -> None:
    store.put(key(1), b"of another machine")
    store.discard(key(1), "unknown instruction")
    assert len(lines) == 1
    assert "unknown instruction" in lines[0]
    assert store.get_or_build(key(1), lambda: b"code") == b"code"
    assert store.get(key(1)) == b"code"
    assert store.stats().discarded == 1


# Single flight


def in_threads(count: int, work: Callable[[], Any]) -> list[Any]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except ValueError as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("keeps", [True, False])
def test_threads_build_a_key_once(store: DirectoryStore, keeps: bool) -> None:
    tested: Store = store if keeps else NullStore("a test")
    built = []

    def build() -> bytes:
        built.append(1)
        time.sleep(0.2)
        return b"code"

    assert in_threads(8, lambda: tested.get_or_build(key(1), build)) == [b"code"] * 8
    assert len(built) == 1
    assert tested.stats().builds == 1


def test_a_failed_build_is_its_own_callers_and_a_waiter_builds(store: DirectoryStore) -> None:
    started = []

    def build() -> bytes:
        started.append(1)
        time.sleep(0.05)
        if len(started) == 1:
            raise ValueError("no registers left")
        return b"code"

    results = in_threads(4, lambda: store.get_or_build(key(1), build))
    assert [type(result) for result in results].count(ValueError) == 1
    assert results.count(b"code") == 3
    assert len(started) == 2


def test_a_build_may_use_the_store_and_even_its_own_key(store: DirectoryStore) -> None:
    def build() -> bytes:
        part = store.get_or_build(key(2), lambda: b"part")
        return store.get_or_build(key(1), lambda: part + b" and whole") if part else b""

    assert in_threads(1, lambda: DirectoryStore(None).get_or_build(key(1), lambda: b"x")) == [b"x"]
    assert store.get_or_build(key(3), lambda: store.get_or_build(key(2), lambda: b"part") + b"!") == b"part!"
    null = NullStore("a test")
    assert null.get_or_build(key(1), lambda: null.get_or_build(key(1), lambda: b"inner")) == b"inner"


def test_processes_build_a_key_once(home: Path, request: pytest.FixtureRequest) -> None:
    processes, keys = (8, 20) if request.config.getoption("--full") else (4, 3)
    code = """
        store = DirectoryStore(sys.argv[1])
        def build(i):
            with open(sys.argv[2], "a") as file: file.write(f"{i}\\n")
            time.sleep(0.1)
            return payload(i)
        print("ready", flush=True); sys.stdin.readline()
        right = all(store.get_or_build(key(i), lambda: build(i)) == payload(i) for i in range(int(sys.argv[3])))
        stats = store.stats()
        print(right, stats.builds, stats.hits + stats.waits + stats.builds)
    """
    log = home.parent / "builds"
    children = [child(code, home, log, keys) for _ in range(processes)]
    for one in children:
        assert ready(one) == "ready"
    for one in children:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    answers = [finish(one).split() for one in children]
    assert sorted(map(int, log.read_text().split())) == list(range(keys))
    assert all((right, total) == ("True", str(keys)) for right, _, total in answers)
    assert sum(int(builds) for _, builds, _ in answers) == keys
    assert list((home / "locks").iterdir()) == []


# Crashes


def test_a_killed_writer_leaves_no_error_and_no_delay(home: Path, request: pytest.FixtureRequest) -> None:
    code = """
        store = DirectoryStore(sys.argv[1])
        # Written slowly, so that most kills strike while a file is half written.
        class Slow:
            def __init__(self, file): self.file = file
            def __enter__(self): return self
            def __exit__(self, *error): self.file.close()
            def write(self, piece): time.sleep(0.0005); return self.file.write(piece[:20_000])
        genuine = os.fdopen
        def fdopen(descriptor, mode, **rest):
            file = genuine(descriptor, mode, **rest)
            return Slow(file) if "w" in mode else file
        os.fdopen = fdopen
        print("ready", flush=True)
        for i in range(1000):
            store.get_or_build(key(i), lambda: payload(i))
    """
    moments, found, torn = random.Random(0), 0, 0
    for _ in range(200 if request.config.getoption("--full") else 20):
        writer = child(code, home)
        assert ready(writer) == "ready"
        time.sleep(moments.uniform(0, 0.05))
        writer.kill()
        finish(writer)
        torn += any((home / "tmp").iterdir()) if (home / "tmp").exists() else 0
        reader = DirectoryStore(home)
        for i in range(20):
            stored = reader.get(key(i))
            assert stored in (None, payload(i))
            found += stored is not None
        started = time.monotonic()
        for i in range(20):
            assert reader.get_or_build(key(i), lambda i=i: payload(i)) == payload(i)
        assert time.monotonic() - started < 2
        assert reader.stats().damaged == 0
        for entry in list(reader.entries())[::2]:
            entry.path.unlink()
        for left in (home / "tmp").iterdir():
            left.unlink()
    assert found
    assert torn


def test_a_waiter_takes_over_from_a_killed_builder(store: DirectoryStore, home: Path) -> None:
    # The builder has forked a worker, as a DataLoader does: the worker must not keep the lock alive.
    code = """
        def build():
            worker = os.fork()
            if worker == 0: time.sleep(60); os._exit(0)
            print(worker, flush=True); time.sleep(60)
        DirectoryStore(sys.argv[1]).get_or_build(key(1), build)
    """
    builder = child(code, home)
    worker = int(ready(builder))
    results: list[bytes] = []
    waiter = threading.Thread(target=lambda: results.append(store.get_or_build(key(1), lambda: b"code")))
    try:
        waiter.start()
        waiter.join(0.3)
        assert waiter.is_alive()
        builder.kill()
        waiter.join(2)
        assert results == [b"code"]
        os.kill(worker, 0)  # still there
    finally:
        os.kill(worker, signal.SIGKILL)
        builder.kill()
        finish(builder)


def test_what_killed_writers_left_is_swept(store: DirectoryStore, home: Path) -> None:
    store.put(key(1), b"code")
    (home / "locks").mkdir(exist_ok=True)
    (home / "locks" / key(7).digest).touch()
    left, fresh = home / "tmp" / "1-left", home / "tmp" / "2-fresh"
    left.write_bytes(b"half")
    fresh.write_bytes(b"being written")
    os.utime(left, (1, 1))
    DirectoryStore(home).put(key(2), b"code")
    assert not left.exists()
    assert fresh.exists()
    assert list((home / "locks").iterdir()) == []


def test_a_lock_on_a_deleted_file_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last holder deletes its file between a newcomer's open and flock: that lock would exclude nobody."""
    locks, genuine = KeyLock(tmp_path), fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        (tmp_path / "name").unlink()
        genuine(descriptor, operation)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        assert locks.try_lock("name") is None
    with locks.held("name") as first, locks.held("name") as second:
        assert (first, second) == (True, False)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_build_is_not_in_the_way(store: DirectoryStore) -> None:
    def build() -> bytes:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.get_or_build(key(1), build)
    assert store.get_or_build(key(1), lambda: b"code") == b"code"


STOPPED = """
    from torchtpu.compiler_cache import flight
    flight.RENEW_SECONDS = 0.05
    def build():
        print("building", flush=True); sys.stdin.readline()
        return b"code of the first"
    built = DirectoryStore(sys.argv[1]).get_or_build(key(1), build)
    print(built.decode(), flush=True)
"""


def waiting(store: DirectoryStore, count: int) -> tuple[list[threading.Thread], list[bytes], list[int]]:
    """Threads that ask for a key in stores of their own, as processes do, what they got, and a mark for each build."""
    results: list[bytes] = []
    builds: list[int] = []

    def build() -> bytes:
        builds.append(1)
        time.sleep(0.3)
        return b"code of the second"

    def ask() -> None:
        results.append(DirectoryStore(store.directory).get_or_build(key(1), build))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads, results, builds


def test_a_stopped_builder_is_overtaken_by_one(
    store: DirectoryStore, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "LEASE_SECONDS", 0.5)
    monkeypatch.setattr(flight, "RENEW_SECONDS", 0.05)
    builder = child(STOPPED, home)
    try:
        assert ready(builder) == "building"
        builder.send_signal(signal.SIGSTOP)
        threads, results, builds = waiting(store, 4)
        for thread in threads:
            thread.join(60)
        assert results == [b"code of the second"] * 4
        assert len(builds) == 1
        builder.send_signal(signal.SIGCONT)
        assert finish_with(builder, "\n") == "code of the first"
        assert list((home / "locks").iterdir()) == []
    finally:
        builder.kill()
        builder.wait()


def test_a_slow_builder_is_waited_for(store: DirectoryStore, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "LEASE_SECONDS", 1.0)
    builder = child(STOPPED, home)
    try:
        assert ready(builder) == "building"
        threads, results, builds = waiting(store, 2)
        threads[0].join(3)
        assert all(thread.is_alive() for thread in threads)
        assert finish_with(builder, "\n") == "code of the first"
        for thread in threads:
            thread.join(60)
        assert results == [b"code of the first"] * 2
        assert builds == []
    finally:
        builder.kill()
        builder.wait()


def finish_with(process: subprocess.Popen[str], line: str) -> str:
    return process.communicate(line, timeout=120)[0].strip()


def test_a_lease_ends_by_the_waiters_turns_and_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = Lease()
    turns = int(flight.LEASE_SECONDS / 0.1)
    monkeypatch.setattr(time, "time", lambda: 1e12)
    monkeypatch.setattr(time, "monotonic", lambda: 1e12)
    assert not any(lease.is_over((1, 5), 0.1) for _ in range(turns - 2))
    assert not any(lease.is_over((1, sign), 0.1) for sign in range(3 * turns))
    assert not lease.is_over((2, 3 * turns - 1), 0.1)
    assert any(lease.is_over((2, 3 * turns - 1), 0.1) for _ in range(turns + 2))


# Damage


def test_a_sparse_file_that_announces_terabytes_is_a_miss(
    store: DirectoryStore, home: Path, lines: list[str], tmp_path: Path
) -> None:
    store.put(key(1), b"code")
    path, announced = entry_file(store, key(1)), 8 * 2**40
    head = struct.pack("<8sIIIQ", b"TORCHTPU", 1, len(key(1).encoded), 2, announced)
    path.write_bytes(head + bytes(32) + key(1).encoded + b"{}")
    try:
        os.truncate(path, path.stat().st_size + announced)
    except OSError as error:
        pytest.skip(f"this disk has no such files: {error}")
    assert "holes" in {file.digest: why for file, why in store.damaged()}[key(1).digest]
    assert store.find("program", key(1).digest) is None
    assert store.nearest(key(2)) is None
    assert export_bundle(store, tmp_path / "bundle")[0] == 0
    assert_is_missed_and_rebuilt(home, lines)


def test_what_does_not_fit_into_memory_is_a_miss(
    store: DirectoryStore, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(key(1), b"code")

    def refuse(*arguments: object) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(files, "decode", refuse)
        assert store.get(key(1)) is None
    assert len(lines) == 1
    assert "MemoryError" in lines[0]
    assert store.get(key(1)) == b"code"


def test_damage_is_named_a_few_times_and_then_counted(store: DirectoryStore, lines: list[str]) -> None:
    for i in range(50):
        store.put(key(i), b"code")
        entry_file(store, key(i)).write_bytes(b"damaged")
    reader = DirectoryStore(store.directory)
    assert all(reader.get(key(i)) is None for i in range(50))
    reader.discard(key(0), "unknown instruction")
    assert reader.stats().damaged == 50
    assert len(lines) == 3
    del reader
    gc.collect()
    assert len(lines) == 4
    assert "51 entries" in lines[-1]


def test_what_a_decoder_refuses_is_forgotten(store: DirectoryStore, home: Path, lines: list[str]) -> None:
    store.put(key(1), b"text")

    def decode(content: bytes) -> int:
        return int(content)

    assert store.load(key(1), decode) is None
    assert store.load(key(2), decode) is None
    assert (store.stats().discarded, len(lines)) == (1, 1)
    store.put(key(1), b"17")
    assert store.load(key(1), decode) == 17
    assert DirectoryStore(home).load(key(1), decode) == 17


@pytest.mark.parametrize(
    "note", [b"[]", b'{"build_ms":Infinity}', b'{"build_ms":NaN}', b'{"x":[1]}', b"[" * 100_000, b"1" * 5000]
)
def test_an_entry_with_a_note_that_is_none_is_a_miss(store: DirectoryStore, note: bytes) -> None:
    path = entry_file(store, key(1))
    store.put(key(1), b"code")
    head = struct.pack("<8sIIIQ", b"TORCHTPU", 1, len(key(1).encoded), len(note), 4)
    rest = key(1).encoded + note + b"code"
    path.write_bytes(head + hashlib.sha256(head + rest).digest() + rest)
    assert store.get(key(1)) is None
    assert store.stats().damaged == 1


def assert_is_missed_and_rebuilt(home: Path, lines: list[str]) -> None:
    lines.clear()
    reader = DirectoryStore(home)
    assert reader.get(key(1)) is None
    assert len(lines) == 1, lines
    assert reader.get_or_build(key(1), lambda: payload(1)) == payload(1)
    assert len(lines) == 1, lines
    assert DirectoryStore(home).get_or_build(key(1), must_not_build) == payload(1)


def test_a_flipped_byte_is_a_miss(
    store: DirectoryStore, home: Path, lines: list[str], request: pytest.FixtureRequest
) -> None:
    store.put(key(1), b"x" * 300)
    path = entry_file(store, key(1))
    whole = path.read_bytes()
    chance = random.Random(1)
    for flip in range(500 if request.config.getoption("--full") else 50):
        position = flip if flip < 25 else chance.randrange(len(whole))
        changed = bytearray(whole)
        changed[position] ^= chance.randrange(1, 256)
        path.write_bytes(changed)
        assert_is_missed_and_rebuilt(home, lines)


def test_a_truncated_or_longer_file_is_a_miss(
    store: DirectoryStore, home: Path, lines: list[str], request: pytest.FixtureRequest
) -> None:
    store.put(key(1), b"x" * 300)
    path = entry_file(store, key(1))
    whole = path.read_bytes()
    chance = random.Random(2)
    for _ in range(100 if request.config.getoption("--full") else 20):
        path.write_bytes(whole[: chance.randrange(len(whole))])
        assert_is_missed_and_rebuilt(home, lines)
    for damaged in (b"", whole + b"\0", whole * 2):
        path.write_bytes(damaged)
        assert_is_missed_and_rebuilt(home, lines)


def test_another_keys_entry_under_this_name_is_a_miss(store: DirectoryStore, home: Path, lines: list[str]) -> None:
    store.put(key(1), b"right")
    store.put(key(2), b"wrong")
    entry_file(store, key(1)).write_bytes(entry_file(store, key(2)).read_bytes())
    assert [file.digest for file, _ in store.damaged()] == [key(1).digest]
    assert_is_missed_and_rebuilt(home, lines)
    assert list(store.damaged()) == []


@pytest.mark.parametrize("kind", ["directory", "pipe", "link"])
def test_what_is_no_file_is_a_miss(store: DirectoryStore, lines: list[str], kind: str) -> None:
    store.put(key(1), b"code")
    path = entry_file(store, key(1))
    moved = path.rename(path.with_name("moved"))
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(moved)
    assert store.get(key(1)) is None
    assert store.get_or_build(key(1), lambda: b"code") == b"code"
    assert len(lines) <= 2, lines


def test_a_directory_in_place_of_an_entry_stops_no_other_write(store: DirectoryStore, lines: list[str]) -> None:
    entry_file(store, key(1)).mkdir(parents=True)
    assert store.get_or_build(key(1), lambda: b"code") == b"code"
    assert store.put(key(2), b"code")
    assert store.get(key(2)) == b"code"
    assert [file.digest for file, why in store.damaged() if "not a regular file" in why] == [key(1).digest]


def test_a_pipe_in_place_of_an_entry_is_read_by_nobody(store: DirectoryStore, tmp_path: Path) -> None:
    store.put(key(1), b"code")
    entry_file(store, key(1)).unlink()
    os.mkfifo(entry_file(store, key(1)))
    (file,) = store.entries()
    found: list[Any] = []

    def read() -> None:
        found.extend([list(store.damaged()), store.find("program", key(1).digest), store.nearest(key(2))])
        found.append(export_bundle(store, tmp_path / "bundle"))

    reading = threading.Thread(target=read, daemon=True)  # before, it waited for somebody to write
    reading.start()
    reading.join(60)
    why = "not a regular file"
    assert found == [[(file, why)], None, None, (0, ((f"program/{key(1).digest}", why),))]


def test_a_cache_deleted_while_in_use_comes_back(store: DirectoryStore, home: Path) -> None:
    store.put(key(1), b"code")
    for path in sorted(home.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    home.rmdir()
    assert store.get(key(1)) is None
    assert store.get_or_build(key(1), lambda: b"code") == b"code"
    assert store.get_or_build(key(1), must_not_build) == b"code"


@pytest.mark.parametrize("name", ["locks", "tmp", "v1"])
def test_a_link_to_nowhere_in_the_directory_is_not_followed(home: Path, lines: list[str], name: str) -> None:
    (home / name).symlink_to("nowhere")
    store = DirectoryStore(home)
    assert store.get_or_build(key(1), lambda: b"code") == b"code"
    assert store.get_or_build(key(1), lambda: b"code") == b"code"
    assert not (home / "nowhere").exists()
    assert len(lines) <= 2, lines


# Disks that do not take what is written


def failing(number: int) -> Callable[..., Any]:
    def fail(*arguments: object, **options: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO])
def test_a_failing_write_degrades_to_no_cache_with_one_line(
    home: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = DirectoryStore(home)
    store.put(key(0), b"before")
    genuine = os.fdopen

    def fdopen(descriptor: int, mode: str, *rest: Any, **options: Any) -> Any:
        file = genuine(descriptor, mode, *rest, **options)
        if "w" in mode:
            file.close()
            failing(number)()
        return file

    monkeypatch.setattr(os, "fdopen", fdopen)
    for i in range(1, 4):
        assert store.get_or_build(key(i), lambda: b"code") == b"code"
    assert store.get(key(0)) == b"before"
    assert not store.put(key(5), b"code")
    assert len(lines) == 1, lines
    assert list((home / "tmp").iterdir()) == []


def test_a_disk_without_locks_still_builds(
    store: DirectoryStore, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcntl.flock", failing(errno.ENOLCK))
    assert store.get_or_build(key(1), lambda: b"code") == b"code"
    assert len(lines) == 1, lines


def test_a_write_that_fails_stops_no_other_write(home: Path) -> None:
    code = """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        store = DirectoryStore(sys.argv[1])
        print(*[store.get_or_build(key(n), lambda: bytes(n)) == bytes(n) for n in (100_000, 100, 200_000, 200)])
    """
    assert finish(child(code, home)).split() == ["True"] * 4
    assert sorted(len(file.read().payload) for file in DirectoryStore(home).entries()) == [100, 200]
    assert list((home / "tmp").iterdir()) == []


def test_a_full_disk_degrades_to_no_cache(tmp_path: Path, lines: list[str]) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting takes root")
    disk = tmp_path / "disk"
    disk.mkdir(0o700)
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k,mode=0700", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mount.returncode != 0:
        pytest.skip(f"mounting is not permitted: {mount.stderr.decode().strip()}")
    try:
        store = open_store({"TORCHTPU_CACHE_DIR": str(disk / "cache")})
        assert store.put(key(0), b"small")
        assert store.get_or_build(key(1), lambda: payload(1)) == payload(1)
        assert store.get_or_build(key(7), lambda: payload(7)) == payload(7)
        assert store.get_or_build(key(7), lambda: payload(7)) == payload(7)
        assert store.get(key(0)) == b"small"
        assert len(lines) == 1, lines
        assert store.put(key(2), b"small too")
        assert list((disk / "cache" / "tmp").iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_read_mode_reads_and_writes_nothing(store: DirectoryStore, home: Path) -> None:
    store.put(key(1), b"code")
    os.utime(entry_file(store, key(1)), (1, 1))

    def listing() -> list[tuple[str, float]]:
        return sorted((str(path), path.stat().st_mtime) for path in home.rglob("*"))

    before = listing()
    reader = open_store({"TORCHTPU_CACHE_DIR": str(home), "TORCHTPU_CACHE": "read"})
    assert reader.get(key(1)) == b"code"
    assert reader.get_or_build(key(2), lambda: b"built") == b"built"
    reader.discard(key(1), "a test")
    assert reader.get(key(1)) is None
    assert not reader.put(key(3), b"code")
    assert listing() == before


# Bounds


def test_the_longest_unused_entries_go_first(home: Path) -> None:
    store = DirectoryStore(home, max_bytes=200 * 4096)
    for i in range(10):
        store.put(key(i), b"x" * 8000)
        os.utime(entry_file(store, key(i)), (1000 + i, 1000 + i))
    store.get(key(0))  # a use makes it the youngest
    store.prune(max_bytes=5 * 8192)
    left = [i for i in range(10) if entry_file(store, key(i)).exists()]
    assert left == [0, 7, 8, 9]


def test_the_directory_stays_within_its_bound(home: Path) -> None:
    store = DirectoryStore(home, max_bytes=100 * 4096)
    for i in range(300):
        assert store.put(key(i), b"x" * 3000)
    used = sum(-(-entry.nbytes // 4096) * 4096 for entry in store.entries())
    assert used <= 1.05 * 100 * 4096
    assert store.stats().evicted >= 190
    assert store.get(key(299)) is not None
    assert not store.put(key(1000), bytes(101 * 4096))
    few = DirectoryStore(home, max_entries=10)
    few.put(key(1), b"code")
    assert len(list(few.entries())) <= 10


def test_a_hit_is_noted_once_a_minute(store: DirectoryStore) -> None:
    store.put(key(1), b"code")
    path, now = entry_file(store, key(1)), time.time()
    os.utime(path, (now - 30, now - 30))
    store.get(key(1))
    assert path.stat().st_mtime == pytest.approx(now - 30, abs=1)
    os.utime(path, (now - 90, now - 90))
    store.get(key(1))
    assert path.stat().st_mtime == pytest.approx(now, abs=10)


def test_a_clock_that_was_set_back_does_not_keep_old_entries(store: DirectoryStore) -> None:
    for i in range(4):
        store.put(key(i), b"x" * 3000)
    tomorrow = time.time() + 86400
    for i in range(2):
        os.utime(entry_file(store, key(i)), (tomorrow, tomorrow))
    assert store.get(key(0)) is not None  # used now, by today's clock
    store.prune(max_bytes=4 * 4096 - 1)
    assert [i for i in range(4) if store.get(key(i)) is not None] == [0, 2, 3]
