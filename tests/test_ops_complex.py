"""Complex numbers with infinities, NaN and zeros of both signs give what the CPU makes of them, NaN for NaN."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from torchtpu import metrics

PARTS = (0.0, -0.0, 1.0, -1.0, 2.0, 0.5, float("inf"), -float("inf"), float("nan"))
NUMBERS = [complex(real, imaginary) for real, imaginary in itertools.product(PARTS, PARTS)]
EXPONENTS = (-2, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 1 + 2j, 1j)
BASES = (0.0, 1.0, 2.0, -1.0, float("inf"), 1j)


def assert_as_cpu(function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
    numbers = torch.tensor(NUMBERS, dtype=dtype)
    found, expected = function(numbers.to("tpu")).cpu(), function(numbers)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(torch.view_as_real(found), torch.view_as_real(expected), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("name", ["exp", "log", "sqrt", "rsqrt", "reciprocal"])
def test_functions_at_infinity_and_nan(name: str, dtype: torch.dtype) -> None:
    assert_as_cpu(getattr(torch, name), dtype)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("name", ["log2", "log10", "exp2"])
def test_functions_of_base_2_and_10_at_infinity_and_nan(name: str, dtype: torch.dtype) -> None:
    assert_as_cpu(getattr(torch, name), dtype)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("name", ["acos", "acosh", "asin", "asinh", "atan", "atanh"])
def test_inverse_functions_on_both_sides_of_their_cuts(name: str, dtype: torch.dtype) -> None:
    """Zeros of both signs say on which."""
    parts = (0.0, -0.0, 0.001, -0.001, 0.5, -0.5, 2.0, -2.0, 100.0, -100.0)
    numbers = torch.tensor([complex(*pair) for pair in itertools.product(parts, parts)], dtype=dtype)
    found, expected = (torch.view_as_real(getattr(torch, name)(x).cpu()) for x in (numbers.to("tpu"), numbers))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("exponent", EXPONENTS, ids=str)
@pytest.mark.parametrize("power", [torch.pow, torch.float_power])
def test_powers_at_infinity_and_nan(power: Callable[..., torch.Tensor], exponent: complex) -> None:
    assert_as_cpu(lambda x: power(x, exponent), torch.complex64)


@pytest.mark.parametrize("base", BASES, ids=str)
def test_powers_of_a_number_at_infinity_and_nan(base: complex) -> None:
    assert_as_cpu(lambda x: torch.pow(base, x), torch.complex64)


@pytest.mark.parametrize("power", [torch.pow, torch.float_power])
def test_powers_of_each_to_each(power: Callable[..., torch.Tensor]) -> None:
    assert_as_cpu(lambda x: power(x[:, None], x[None]), torch.complex64)


@pytest.mark.parametrize("exponent", EXPONENTS, ids=str)
@pytest.mark.parametrize("name", ["pow_", "float_power_"])
def test_powers_in_place_at_infinity_and_nan(name: str, exponent: complex) -> None:
    dtype = torch.complex64 if name == "pow_" else torch.complex128
    assert_as_cpu(lambda x: getattr(x.clone(), name)(exponent), dtype)


@pytest.mark.filterwarnings("ignore:aten.*ran on CPU:UserWarning", "ignore:ComplexHalf:UserWarning")
def test_complex_numbers_of_half_precision_are_computed_on_the_cpu() -> None:
    half, beside = torch.ones(3, dtype=torch.float16, device="tpu"), torch.zeros(3, device="tpu")
    made = torch.complex(half, half) * 2
    beside.add_(1)
    assert made.dtype == torch.complex32 and made.cpu().tolist() == [2 + 2j] * 3
    assert beside.tolist() == [1.0] * 3
    assert torch.zeros(2, dtype=torch.complex32, device="tpu").fill_(1j).tolist() == [1j] * 2
    halves = torch.ones(2, dtype=torch.half, device="tpu")
    assert (halves == 1j).tolist() == [False] * 2
    assert (halves != 1 + 0j).tolist() == [False] * 2
    assert metrics.snapshot()["cpu_fallbacks"]["aten::complex"] == 1


@pytest.mark.filterwarnings("ignore:aten.*ran on CPU:UserWarning", "ignore:ComplexHalf:UserWarning")
def test_parts_of_complex_half_precision_are_written() -> None:
    x = torch.zeros(4, dtype=torch.complex32, device="tpu")
    x[1:3].copy_(torch.tensor([1, 2j], dtype=torch.complex32))
    x[::3].conj().copy_(torch.tensor([3j, 4], dtype=torch.complex32, device="tpu"))
    assert x.tolist() == [-3j, 1, 2j, 4]
    assert x.resize_(6)[:4].tolist() == [-3j, 1, 2j, 4]
    assert torch.empty(2, 3, out=torch.zeros(1, dtype=torch.complex32, device="tpu").resize_(0)).shape == (2, 3)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_number_is_true_for_its_imaginary_part(dtype: torch.dtype) -> None:
    numbers = torch.tensor(NUMBERS, dtype=dtype)
    sent = numbers.to("tpu")
    assert torch.equal(sent.bool().cpu(), numbers.bool())
    assert torch.equal(torch.empty_like(sent, dtype=torch.bool).copy_(sent).cpu(), numbers.bool())
