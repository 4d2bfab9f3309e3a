"""Every fault at every boundary, in each kind of training: the right error, once, and what the CPU has at that op.

Ranks, stores and sockets that are lost are in test_dead_ranks.py.
"""

from __future__ import annotations

import functools

import pytest
import torch
from fault_table import FAULTS, Training, rows_of, run_case
from script import torchrun

# Each fault is met once by default, on the first visit or on a later one.
CASES = [
    pytest.param(fault, settled, marks=[pytest.mark.full] if (settled > 0) != place % 2 else [])
    for place, fault in enumerate(FAULTS)
    for settled in (0, 3)
]


@pytest.mark.bailouts("padding")  # the launch that is refused may be a padded program's
@pytest.mark.parametrize(("fault", "settled"), CASES)
def test_a_fault_is_raised_once_and_leaves_what_the_cpu_has(fault: str, settled: int) -> None:
    rows = rows_of(fault, settled)
    run_case(fault, settled, Training("tpu", rows), Training("cpu", rows))


COMPILED_BY_DEFAULT = {("compile raises", 0), ("allocation refused", 3), ("a check on the device fails", 3)}


@pytest.mark.bailouts("padding")
@pytest.mark.parametrize(
    ("fault", "settled"),
    [
        pytest.param(fault, settled, marks=[] if (fault, settled) in COMPILED_BY_DEFAULT else [pytest.mark.full])
        for fault in FAULTS
        for settled in (0, 3)
    ],
)
def test_a_fault_in_a_compiled_model_leaves_what_the_cpu_has(fault: str, settled: int) -> None:
    rows = rows_of(fault, settled)
    reference = Training("cpu", rows, functools.partial(torch.compile, backend="aot_eager"))
    run_case(fault, settled, Training("tpu", rows, torch.compile), reference, is_compiled=True)


def check_ranks(cases: list[str]) -> None:
    ended = torchrun("fault_table.py", *cases, ranks=2, seconds=1100)
    assert ended.status == 0, ended
    assert ended.out.count(": right") == 2 * 2 * len(cases), ended.out  # two ranks and two wrappers, in any order


def test_a_fault_on_all_ranks_leaves_what_was_there_before_the_step() -> None:
    check_ranks(["lowering raises 0", "launch raises 3"])


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_any_fault_on_all_ranks_leaves_what_was_there_before_the_step() -> None:
    check_ranks([f"{fault} {settled}" for fault in FAULTS for settled in (0, 3)])
