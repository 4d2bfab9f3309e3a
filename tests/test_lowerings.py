"""Lowerings of ops that PyTorch's databases do not reach, checked on our own samples.

`tests/lowering_check.py` compares each lowering with PyTorch's CPU kernel, without a device.
"""

from __future__ import annotations

from collections.abc import Iterator

import lowering_check
import pytest
import torch
from known_gaps import KNOWN_GAPS

from torchtpu.ops.math.foreach import EACH
from torchtpu.ops.registry import LOWERINGS


@pytest.fixture(scope="module")
def lowerings() -> Iterator[dict[str, object]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lowering_check.load_ops()
    torch.set_num_threads(threads)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", lowering_check.DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_lowerings_compute_what_the_cpu_computes(dtype: torch.dtype, lowerings: dict[str, object]) -> None:
    check = lowering_check.Check(set(lowerings), per_op=2, in_all=2)
    torch.manual_seed(0)  # the samples, and with them the gaps, are the same in every run
    lowering_check.run_samples(check, ["extra"], [dtype], 2, backward=dtype.is_floating_point)
    shown = str(dtype).removeprefix("torch.")
    wrong = {f"aten::{name}": outcome.failures[0] for name, outcome in check.outcomes.items() if outcome.failures}
    known = {name for name, gap_dtype in KNOWN_GAPS if gap_dtype == shown and name.startswith("aten::")}
    new = {name: problem for name, problem in wrong.items() if name not in known}
    assert not new, "\n".join(f"{name}: {problem}" for name, problem in new.items())
    assert not known - wrong.keys(), f"these gaps have closed; remove their lines from known_gaps.py: {sorted(known)}"
    assert any(outcome.checked for outcome in check.outcomes.values())


def test_an_op_over_lists_is_one_on_elements_where_the_single_one_is() -> None:
    facts = {name: LOWERINGS[single].elementwise for single, names in EACH.items() for name in names}
    assert facts == {name: LOWERINGS[name].elementwise for name in facts}
