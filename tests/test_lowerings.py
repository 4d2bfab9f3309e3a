"""Lowerings against PyTorch's CPU kernels: in come a few samples of every op, out comes a failure per wrong op.

`tests/lowering_check.py` is the whole check; this is the part of it that fits into every run.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import lowering_check
import pytest
import torch
from known_gaps import KNOWN_GAPS

SEARCHED = 1  # OpInfos tried per op beside its own: the shortest ones that reach it


@pytest.fixture(scope="module")
def lowerings() -> Iterator[dict[str, object]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lowering_check.load_ops()
    torch.set_num_threads(threads)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", lowering_check.DTYPES, ids=str)
def test_lowerings_compute_what_the_cpu_computes(dtype: torch.dtype, lowerings: dict[str, object]) -> None:
    check = lowering_check.Check(set(lowerings), per_op=2, in_all=2 if dtype == torch.float32 else 1)
    torch.manual_seed(0)  # the samples, and with them the gaps, are the same in every run
    names = lowering_check.names_reaching(set(lowerings), lowerings, SEARCHED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lowering_check.run_samples(check, [*names, "extra"], [dtype], 2, backward=dtype.is_floating_point)
    wrong = {name: outcome.failures[0] for name, outcome in check.outcomes.items() if outcome.failures}
    known = KNOWN_GAPS.get(dtype, {})
    new = {name: problem for name, problem in wrong.items() if name not in known}
    assert not new, "\n".join(f"{name}: {problem}" for name, problem in new.items())
    closed = {name for name in known if name not in wrong}
    assert not closed, f"these gaps have closed; remove their lines from known_gaps.py: {sorted(closed)}"
    assert sum(1 for outcome in check.outcomes.values() if outcome.checked) > 100
