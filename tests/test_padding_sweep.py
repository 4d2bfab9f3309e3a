"""Padding, op by op, gives what exact shapes give, on PyTorch's own samples with a size that changes.

Every run checks a part of all ops, another one with each commit; `--full` checks all, and how many are served.
"""

from __future__ import annotations

from collections.abc import Iterator

import padding_sweep
import pytest
import torch

ONE_OF = 160  # parts
FEWEST_SERVED = 520


@pytest.fixture(scope="module")
def lowerings() -> Iterator[dict[str, object]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield padding_sweep.lowering_check.load_ops()
    torch.set_num_threads(threads)


@pytest.mark.timeout(1200)
def test_ops_of_this_commit_make_of_longer_arrays_what_they_make_of_exact_ones(
    rotation: int, lowerings: dict[str, object]
) -> None:
    found = padding_sweep.sweep(padding_sweep.part_of(rotation, ONE_OF), lowerings)
    wrong = {name: result.wrong for name, result in found.items() if result.wrong}
    assert not wrong, padding_sweep.summary(found)


def test_convolution_and_pooling_are_served(lowerings: dict[str, object]) -> None:
    found = padding_sweep.sweep(["nn.functional.conv2d", "nn.functional.avg_pool2d"], lowerings)
    assert not any(result.wrong for result in found.values()), padding_sweep.summary(found)
    for op in ("convolution", "avg_pool2d"):
        assert found[op].served, padding_sweep.summary(found, verbose=True)


@pytest.mark.full
@pytest.mark.timeout(3 * 3600)
def test_most_ops_are_served(lowerings: dict[str, object]) -> None:
    found = padding_sweep.sweep(padding_sweep.part_of(0, 1), lowerings)
    print(padding_sweep.summary(found))
    assert not any(result.wrong for result in found.values())
    assert sum(result.served > 0 for result in found.values()) >= FEWEST_SERVED


def test_a_rule_that_reads_the_surplus_is_found(monkeypatch: pytest.MonkeyPatch, lowerings: dict[str, object]) -> None:
    from torchtpu.runtime.padding import evaluate

    monkeypatch.setitem(evaluate._RULES, "reduce_sum", evaluate._elementwise)
    found = padding_sweep.sweep(["sum"], lowerings)
    assert found["sum.dim_IntList"].wrong
