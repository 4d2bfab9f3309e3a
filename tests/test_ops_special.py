"""In: special functions of numbers where XLA's own are inexact, or come to no end. Out: their values."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from scipy import special


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_incomplete_gammas_of_large_shapes_end_and_are_exact(dtype: torch.dtype, tolerance: float) -> None:
    a = torch.tensor([1e2, 2e3, 5e5, 1e8, 1e16, 1e30], dtype=dtype)
    x = a + torch.tensor([-3.0, 0.0, 3.0], dtype=dtype)[:, None] * a.sqrt()
    for ours, exact in ((torch.special.gammainc, special.gammainc), (torch.special.gammaincc, special.gammaincc)):
        found = ours(a.to("tpu"), x.to("tpu")).cpu().double()
        expected = torch.from_numpy(exact(a.double().numpy(), x.double().numpy()))
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_incomplete_gamma_functions_far_from_a_large_shape(dtype: torch.dtype) -> None:
    a = torch.tensor([1e10, 1e10, 1e10, 1e6, 1e5, 3e10, 170.0, 1e10], dtype=dtype)
    x = torch.tensor([1.0, 0.5, 20.5, 1.0, 1.0, 3.0, 1e10, 2e10], dtype=dtype)
    for function in (torch.special.gammainc, torch.special.gammaincc):
        torch.testing.assert_close(function(a.to("tpu"), x.to("tpu")).cpu(), function(a, x))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
def test_polygamma_of_negative_numbers_adds_up_what_does_not_cancel(dtype: torch.dtype, tolerance: float) -> None:
    """The first 60 terms are added up as fractions."""
    for n in range(2, 13):
        x = torch.tensor([-0.5, -1.5, -2.5, -5.25, -8.5, -11.7], dtype=dtype)
        exact = []
        for value in x.tolist():
            terms = sorted((Fraction(value) + k) ** -(n + 1) for k in range(60))
            tail = torch.special.zeta(torch.tensor(n + 1.0, dtype=torch.float64), torch.tensor(value + 60)).item()
            exact.append((-1) ** (n + 1) * math.factorial(n) * (float(sum(terms)) + tail))
        found = torch.special.polygamma(n, x.to("tpu")).cpu()
        torch.testing.assert_close(found, torch.tensor(exact, dtype=dtype), rtol=tolerance, atol=0)
