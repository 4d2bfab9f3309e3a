"""Ops whose results have shapes that depend on data give the CPU's results, made on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchtpu import config, metrics

DATA = torch.tensor([[1.0, 0, 2, 0], [0, 0, 0, 0], [1, 0, 2, 0], [3, 1, 1, 3]])
POINTS = torch.tensor([[[1, 0, 2], [0, 0, 0], [1, 0, 2], [1, 0, 1]], [[1, 0, 2], [0, 0, 0], [1, 0, 2], [1, 0, 3]]])
NUMBERS = torch.tensor([3, 1, 1, 0, 5, 5, 5, 3])

CALLS: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "nonzero": (lambda x: (x.nonzero(), x[0].nonzero(), x.t().nonzero(), x[1].nonzero(), x[0, 0].nonzero()), DATA),
    "where": (lambda x: (*torch.where(x > 1), torch.argwhere(x > 1)), DATA),
    "masked_select": (lambda x: (x.masked_select(x > 0), x.masked_select(x[:, :1] == 1), x.masked_select(x > 9)), DATA),
    "mask": (lambda x: (x[x > 0], x[x[:, 0] > 0], x[:, x[0] > 0], x.t()[:, x[:, 0] > 0], x[x[0] > 9]), DATA),
    "mask and numbers": (lambda x: (x[x[0] > 0, torch.tensor([1, 2], device=x.device)], x[x[0] > 0, x[0] > 0]), DATA),
    "unique": (lambda x: torch.unique(x, return_inverse=True, return_counts=True), DATA),
    "unique_dim": (lambda x: torch.unique(x, dim=1, return_inverse=True, return_counts=True), POINTS),
    "unique_consecutive": (lambda x: torch.unique_consecutive(x, return_inverse=True, return_counts=True), NUMBERS),
    "unique_consecutive_dim": (lambda x: torch.unique_consecutive(x, return_counts=True, dim=0), DATA),
    "bincount": (lambda x: (x.bincount(), x.bincount(x.float()), x.bincount(x, minlength=9)), NUMBERS),
    "repeat_interleave": (
        lambda x: (x.repeat_interleave(x), x.repeat_interleave(x, output_size=23), torch.repeat_interleave(x.int())),
        NUMBERS,
    ),
    "out": (lambda x: torch.nonzero(x, out=torch.empty(0, dtype=torch.int64, device=x.device)), DATA),
    "nothing": (lambda x: (x[:0].nonzero(), torch.unique(x[:0]), x[:0].masked_select(x[:0] > 0)), DATA),
}


def as_list(made: Any) -> list[torch.Tensor]:
    return list(made) if isinstance(made, (list, tuple)) else [made]


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_the_cpu_and_made_on_the_device(name: str) -> None:
    call, x = CALLS[name]
    for found, expected in zip(as_list(call(x.to("tpu"))), as_list(call(x)), strict=True):
        assert found.device.type == "tpu"
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)
    assert not metrics.snapshot()["cpu_fallbacks"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x.masked_select(x[0, :3] > 0), "must match the size"),
        (lambda x: x.masked_select(x), "expected BoolTensor"),
        (lambda x: torch.bincount(x.flatten()), "not implemented for 'Float'"),
        (lambda x: torch.nonzero(x, out=torch.empty(0, device=x.device)), "Expected out tensor to have scalar"),
        (lambda x: torch.bincount(-x[0].long()), "non-negative"),
        (lambda x: torch.repeat_interleave(-x[0].long()), "repeats can not be negative"),
        (lambda x: torch.unique(x[:, :0], dim=0), "There are 0 sized dimensions"),
    ],
)
def test_errors_are_those_of_the_cpu(call: Callable[[torch.Tensor], Any], message: str) -> None:
    for device in ("cpu", "tpu"):
        with pytest.raises(RuntimeError, match=message):
            call(DATA.to(device))


def test_a_mask_that_does_not_fit_is_refused() -> None:
    for device in ("cpu", "tpu"):
        with pytest.raises(IndexError, match=r"The shape of the mask \[3\] at index 0 does not match .* \[4, 4\]"):
            DATA.to(device)[torch.ones(3, dtype=torch.bool, device=device)]


def test_a_wrong_output_size_fails_the_next_read() -> None:
    x = NUMBERS.to("tpu")
    with pytest.raises(RuntimeError, match="allocated size does not match"):
        torch.repeat_interleave(x, output_size=7).cpu()


def test_changing_counts_compile_few_programs() -> None:
    x = torch.arange(64.0, device="tpu")

    def positions(count: int) -> list[int]:
        return (x < torch.tensor(count, device="tpu")).nonzero()[:, 0].tolist()

    for count in (1, 20):
        positions(count)
    before = metrics.snapshot()["programs_compiled"]
    assert all(positions(count) == list(range(count)) for count in (16, 7, 2, 23, 17, 3))
    assert metrics.snapshot()["programs_compiled"] == before


def test_the_count_is_one_read_on_the_line_of_the_call(capfd: pytest.CaptureFixture[str]) -> None:
    x = DATA.to("tpu")
    with config.using(log="launch"):
        x.add(1).nonzero()
        torch.tpu.synchronize()
    snapshot = metrics.snapshot()
    assert snapshot["count_reads"] == {"aten::nonzero": 1}
    assert snapshot["cuts"]["read"] == 1
    assert f"cut: read ({__file__}:" in capfd.readouterr().err


def test_writing_through_a_mask_needs_no_count() -> None:
    x, values = DATA.to("tpu"), torch.tensor([5.0, 6, 7, 8], device="tpu")
    x[x == 0] = -1
    metrics.reset()
    x[x == 3] = values[:2]
    x[:, x[1] == -1] = 4
    assert not metrics.snapshot()["cuts"]
    expected = DATA.clone()
    expected[expected == 0] = -1
    expected[expected == 3] = values[:2].cpu()
    expected[:, expected[1] == -1] = 4
    torch.testing.assert_close(x.cpu(), expected)


def test_gradients_flow_through_a_mask() -> None:
    def gradient(device: str) -> torch.Tensor:
        x = DATA.to(device).requires_grad_()
        repeated = x.repeat_interleave((x[0] > 0).long() + 1, 0)
        (x.masked_select(x > 0).pow(2).sum() + x[x > 1].exp().sum() + repeated.sum()).backward()
        assert x.grad is not None
        return x.grad.cpu()

    torch.testing.assert_close(gradient("tpu"), gradient("cpu"))
