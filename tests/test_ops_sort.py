"""Sorting on platform cpu has PyTorch's order and positions, with NaNs and equal elements, and so has searching."""

from __future__ import annotations

import math

import pytest
import torch

ODD = [0.0, -0.0, math.nan, math.inf, -math.inf, 1.5, -1.5, 3e-39, -3e-39, -math.nan, 1.5, 65504.0]


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
