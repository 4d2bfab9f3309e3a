"""Sorting on platform cpu has PyTorch's order and positions, with NaNs and equal elements, and so has searching."""

from __future__ import annotations

import math

import pytest
import torch

ODD = [0.0, -0.0, math.nan, math.inf, -math.inf, 1.5, -1.5, 3e-39, -3e-39, -math.nan, 1.5, 65504.0]
NORMAL = [value for value in ODD if abs(value) != 3e-39]  # XLA compares the others as zero


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool]
)
def test_sorting_keeps_equal_elements_in_order_and_nans_last(dtype: torch.dtype, *, descending: bool) -> None:
    values = torch.tensor(ODD * 3).reshape(4, 9)
    x = values.nan_to_num(7, 100, -100).abs().to(dtype) if not dtype.is_floating_point else values.to(dtype)
    for dim in (0, 1):
        expected = torch.sort(x, dim=dim, descending=descending, stable=True)
        made = torch.sort(x.to("tpu"), dim=dim, descending=descending, stable=True)
        assert torch.equal(made.indices.cpu(), expected.indices)
        torch.testing.assert_close(made.values.cpu(), expected.values, rtol=0, atol=0, equal_nan=True)
        if dtype.is_floating_point:
            signs = made.values.cpu().signbit(), expected.values.signbit()
            assert torch.equal(*(sign & ~expected.values.isnan() for sign in signs))


@pytest.mark.parametrize("tests", [[], [1.0], [2.0, 3.0, 1.0]])
@pytest.mark.parametrize("invert", [False, True])
def test_whether_a_number_is_among_others_is_one_truth_value(tests: list[float], *, invert: bool) -> None:
    x = torch.tensor(tests)
    expected, made = torch.isin(1.0, x, invert=invert), torch.isin(1.0, x.to("tpu"), invert=invert)
    assert (made.shape, made.dtype, made.item()) == ((), torch.bool, expected.item())


@pytest.mark.parametrize("count", [0, 1, 2, 5, 16, 17, 40, 300])
@pytest.mark.parametrize("right", [False, True])
def test_a_binary_search_ends_where_the_cpus_does_also_in_what_is_not_sorted(count: int, *, right: bool) -> None:
    generator = torch.Generator().manual_seed(count)
    sought = torch.tensor([*range(-6, 7), *NORMAL])
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        row = torch.randint(-5, 6, (3, count), generator=generator).to(dtype)
        if dtype.is_floating_point:
            row[torch.rand(row.shape, generator=generator) < 0.2] = math.nan
        x = (sought if dtype.is_floating_point else sought.nan_to_num(3, 9, -9)).to(dtype).expand(3, -1).contiguous()
        order = torch.rand(row.shape, generator=generator).argsort()
        on_tpu = row.to("tpu"), x.to("tpu"), order.to("tpu")
        made = [
            torch.searchsorted(on_tpu[0], on_tpu[1], right=right),
            torch.searchsorted(on_tpu[0], on_tpu[1], right=right, sorter=on_tpu[2]),
            torch.bucketize(on_tpu[1], on_tpu[0][0], right=right),
        ]
        expected = [
            torch.searchsorted(row, x, right=right),
            torch.searchsorted(row, x, right=right, sorter=order),
            torch.bucketize(x, row[0], right=right),
        ]
        for ours, theirs in zip(made, expected, strict=True):
            assert torch.equal(ours.cpu(), theirs)


def test_numbers_are_found_among_many_that_are_no_numbers() -> None:
    x = torch.tensor([*NORMAL, 1999.0, 2000.0] * 50)
    for last in (1.0, math.inf):
        among = torch.cat([torch.arange(2000.0), torch.full((2000,), math.nan), torch.tensor([last])])
        assert torch.equal(torch.isin(x.to("tpu"), among.to("tpu")).cpu(), torch.isin(x, among))


def test_isin_tells_integers_apart_that_no_float_does() -> None:
    x = torch.randint(1 << 62, (2000,), generator=torch.Generator().manual_seed(0))
    among = torch.cat([x[::3], x[1::3] + 1, x])[: len(x)]
    assert torch.equal(torch.isin(x.to("tpu"), among.to("tpu")).cpu(), torch.isin(x, among))
