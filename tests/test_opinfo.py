"""PyTorch's own op, module and optimizer samples on the device: what differs from the CPU is a known gap, or fails.

By default a part of the list runs, another one with each commit, and one check that shows each known gap; `--full`
runs all of it:

    pytest tests/test_opinfo.py --full --shard 0/4 --results shard0.jsonl
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import opinfo_run
import pytest
import torch
from known_gaps import KNOWN_GAPS
from opinfo_checks import DTYPES, NO_DTYPE, Check, listed

ONE_OF = 64  # so many checks runs by default, another one with each commit


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def chosen(dtype: str, config: pytest.Config, rotation: int) -> list[Check]:
    is_full = config.getoption("--full")
    checks = opinfo_run.chosen(dtypes=[dtype], shard=config.getoption("--shard") if is_full else "0/1")
    if is_full:
        return checks
    return [c for c in checks if zlib.crc32(c.id.encode()) % ONE_OF == rotation % ONE_OF or shows_gap(c)]


def shows_gap(check: Check) -> bool:
    gap = KNOWN_GAPS.get((check.name, check.dtype))
    return gap is not None and check.mode == gap.mode and check.execution == "region"


@pytest.mark.timeout(12 * 3600)  # a check has a limit of its own
@pytest.mark.parametrize("dtype", [*DTYPES, NO_DTYPE])
def test_the_device_does_what_the_cpu_does(dtype: str, pytestconfig: pytest.Config, rotation: int) -> None:
    checks = chosen(dtype, pytestconfig, rotation)
    path = pytestconfig.getoption("--results")
    if path:
        for _ in opinfo_run.run_into(Path(path), checks):
            pass
        results = opinfo_run.finished(Path(path))
    else:
        results = {result.check: result for result in opinfo_run.run(checks)}
    outcomes = {check: results[check.id] for check in checks}
    failed = {check: result for check, result in outcomes.items() if result.status not in ("pass", "skip")}
    new = [f"{r.check}: {r.status} {r.detail}" for c, r in failed.items() if (c.name, c.dtype) not in KNOWN_GAPS]
    assert not new, "\n".join([*new, f"again: pytest tests/test_opinfo.py --rotation {rotation}"])
    closed = {(c.name, c.dtype) for c in checks if shows_gap(c) and c not in failed}
    assert not closed, f"these gaps have closed; remove their lines from known_gaps.py: {sorted(closed)}"
    assert outcomes


def test_every_known_gap_names_listed_checks() -> None:
    assert {(name, dtype) for name, dtype in KNOWN_GAPS if not name.startswith("aten::")} <= {
        (c.name, c.dtype) for c in listed()
    }
