"""Entries, plans, manifests and bundles changed at random are taken or refused, and nothing else."""

from __future__ import annotations

import fuzz_cache
import pytest


@pytest.mark.parametrize("kind", fuzz_cache.KINDS)
def test_whatever_a_file_holds_it_is_taken_or_refused(kind: str, request: pytest.FixtureRequest) -> None:
    """Other inputs for each commit; a crash says how to see it again."""
    seed = fuzz_cache.seed_of_commit()
    tried = fuzz_cache.target(kind)
    count = 1_000_000 if request.config.getoption("--full") else 3000
    taken, crashes = fuzz_cache.run(tried, seed, 0, count)
    assert not crashes, fuzz_cache.report(kind, seed, crashes[0])
    assert 0 < taken < count


def test_a_crash_is_found_and_repeated() -> None:
    tried = fuzz_cache.target("entries")

    def read(data: bytes) -> bool:
        assert data in tried.corpus or len(data) % 3, "a bug"
        return tried.read(data)

    taken, crashes = fuzz_cache.run(tried._replace(read=read), "a seed", 0, 200)
    assert taken
    assert crashes
    _, again = fuzz_cache.run(tried._replace(read=read), "a seed", crashes[0].number, 1)
    assert again[0].data == crashes[0].data
    assert f"--start {crashes[0].number} --count 1" in fuzz_cache.report("entries", "a seed", again[0])
