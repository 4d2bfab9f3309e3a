"""An engine on a cache that others wrote to or damaged computes right values and rebuilds what is missing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import cache_support
import engine_support
import jaxlib
import pytest
import torch
from record_support import Record

from torchtpu.compiler_cache import DirectoryStore, EntryFile
from torchtpu.runtime.device import client as pjrt
from torchtpu.runtime.lowering import fingerprint
from torchtpu.runtime.telemetry.counters import Counters

home = pytest.fixture(cache_support.home)
lines = pytest.fixture(cache_support.lines)


@pytest.fixture
def record() -> Record:
    with Record() as record:
        x = record.input(torch.arange(6.0).view(2, 3))
        record.made = torch.neg(x.t()) * 2.0
    return record


@pytest.fixture
def run(home: Path, record: Record) -> Callable[[], Counters]:
    """Checks the program's values in a new engine, and gives the engine's counts."""

    def run() -> Counters:
        engine = engine_support.make_engine(store=DirectoryStore(home))
        engine_support.check(engine, record, record.made)
        engine.close()
        return engine.counters

    return run


def entry(home: Path, kind: str) -> EntryFile:
    (found,) = (file for file in DirectoryStore(home).entries() if file.kind == kind)
    return found


def damaged(whole: bytes, *, flips: int, cuts: int) -> Iterator[bytes]:
    """A file with one byte changed, and one that ends early."""
    chance = random.Random(3)
    for _ in range(flips):
        changed = bytearray(whole)
        changed[chance.randrange(len(whole))] ^= chance.randrange(1, 256)
        yield bytes(changed)
    for _ in range(cuts):
        yield whole[: chance.randrange(len(whole))]


@pytest.mark.compiles
@pytest.mark.timeout(3600)  # with --full it compiles 600 times
@pytest.mark.parametrize("kind", ["program", "plan"])
def test_what_is_damaged_is_built_again_with_one_line(
    home: Path, lines: list[str], run: Callable[[], Counters], request: pytest.FixtureRequest, kind: str
) -> None:
    run()
    path = entry(home, kind).path
    whole = path.read_bytes()
    is_full = kind == "program" and request.config.getoption("--full")
    for content in damaged(whole, flips=500 if is_full else 8, cuts=100 if is_full else 4):
        lines.clear()
        path.write_bytes(content)
        counts = run()
        assert counts.programs_compiled == (kind == "program")
        assert counts.plan_hits_disk == (kind == "program")
        assert counts.cache_load_failures == 0
        assert len(lines) == 1, lines
        assert path.exists()
    counts = run()
    assert (counts.programs_compiled, counts.plan_hits_disk, counts.cache_hits_disk) == (0, 1, 1)


def spoof_compiler(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(jaxlib, "__version__", "99.0")


def spoof_cpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pjrt, "host_cpu_features", lambda: ("x86_64", "sse2"))


@pytest.mark.compiles
@pytest.mark.parametrize("spoof", [spoof_compiler, spoof_cpu])
def test_other_compilers_and_cpus_share_a_directory_and_no_program(
    home: Path,
    run: Callable[[], Counters],
    spoof: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run()
    with monkeypatch.context() as patch:
        spoof(patch)
        counts = run()
        assert (counts.programs_compiled, counts.plan_hits_disk) == (1, 1)
        assert run().programs_compiled == 0
    assert run().programs_compiled == 0
    assert len([file for file in DirectoryStore(home).entries() if file.kind == "program"]) == 2


@pytest.mark.compiles
def test_another_torch_makes_plans_anew_and_programs_hit(
    home: Path, run: Callable[[], Counters], monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    fingerprints = (fingerprint.of_function, fingerprint.of_modules)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "99.0")
        for cached in fingerprints:
            cached.cache_clear()
        counts = run()
    for cached in fingerprints:
        cached.cache_clear()
    assert (counts.programs_compiled, counts.plan_hits_disk, counts.cache_hits_disk) == (0, 0, 1)
    counts = run()
    assert (counts.plan_hits_disk, counts.fragment_traces) == (1, 0)
