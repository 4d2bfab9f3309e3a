"""Quotients are rounded once, as PyTorch rounds them: products and their factors divide exactly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from record_support import Record

from torchtpu import startup
from torchtpu.runtime.lowering.emit import lower

DIVISORS: dict[str, Callable[[torch.Tensor], torch.Tensor | float]] = {
    "a number": lambda c: c.item(),
    "0-dim": lambda c: c[0],
    "one element": lambda c: c,
    "a row": lambda c: c.expand(2000),
    "made in the region": lambda c: torch.ones(2000, device=c.device, dtype=c.dtype) * c,
    "full": lambda c: torch.full((2000,), c.item(), device=c.device, dtype=c.dtype),
}
QUOTIENTS: dict[str, Callable[[torch.Tensor, torch.Tensor | float], torch.Tensor]] = {
    "div": torch.div,
    "div_": lambda x, y: x.clone().div_(y),
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "floor_divide": torch.floor_divide,
    "index": lambda x, y: (x.round().long() / y).long(),
    "foreach": lambda x, y: torch._foreach_div([x, x], [y, y] if isinstance(y, torch.Tensor) else y)[1],
    "addcdiv": lambda x, y: torch.zeros_like(x).addcdiv(x, torch.as_tensor(y, device=x.device, dtype=x.dtype)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("divisor", DIVISORS)
@pytest.mark.parametrize("quotient", QUOTIENTS)
def test_a_multiple_is_divided_exactly(quotient: str, divisor: str, dtype: torch.dtype) -> None:
    for c in (41.0, 49.0, 7.0):
        on_cpu = torch.arange(1.0, 2001.0, dtype=dtype) * c
        y = DIVISORS[divisor](torch.tensor([c], dtype=dtype, device="tpu"))
        found = QUOTIENTS[quotient](on_cpu.to("tpu"), y).cpu()
        torch.testing.assert_close(found, torch.arange(1, 2001).to(found.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_quotients_are_those_of_the_cpu_to_the_bit(dtype: torch.dtype) -> None:
    x, y = torch.randn(50, 40).to(dtype), torch.randn(50, 1).to(dtype)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, 3e-37, 1e37]).to(dtype)
    for a, b in ((x, y), (x, y[0]), (y, x), (special[:, None], special), (special, special[3]), (special, special[0])):
        torch.testing.assert_close((a.to("tpu") / b.to("tpu")).cpu(), a / b, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close((x.to("tpu") / 127.5).cpu(), x / 127.5, rtol=0, atol=0)


QUOTIENTS_OF_QUOTIENTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "by tensors": lambda x, y: x / y / y,
    "by numbers": lambda x, y: x / 1e25 / 1e25 / 1e-25 / 1e-25,
    "in place": lambda x, y: x.clone().div_(y).div_(y),
    "views": lambda x, y: (x / y).view(2, 4).T.div(y.view(2, 4).T),
    "broadcast": lambda x, y: (x / y)[:, None] / y,
    "a part written": lambda x, y: (x / y).index_fill(0, torch.tensor([1], device=x.device), 2.0) / y,
    "foreach": lambda x, y: torch._foreach_div(torch._foreach_div([x], [y]), [y])[0],
}


@pytest.mark.parametrize("way", QUOTIENTS_OF_QUOTIENTS)
@pytest.mark.parametrize(("dividend", "divisor"), [(1e-20, 1e-25), (1e30, 1e25), (3.0, 7.0)])
def test_a_quotient_is_divided_again_where_a_product_of_the_divisors_would_overflow_or_vanish(
    way: str, dividend: float, divisor: float
) -> None:
    x, y = torch.full((8,), dividend), torch.full((8,), divisor)
    expected = QUOTIENTS_OF_QUOTIENTS[way](x, y)
    found = QUOTIENTS_OF_QUOTIENTS[way](x.to("tpu"), y.to("tpu")).cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("divisor", [1e-20, 3e-10, 2.0, 1e25])
def test_the_gradient_of_a_divisor_is_finite_where_the_square_of_the_divisor_is_not(divisor: float) -> None:
    gradients = []
    for device in ("cpu", "tpu"):
        x = torch.tensor([2e-3 * divisor, divisor], device=device, requires_grad=True)
        (x[0] / x[1]).backward()
        gradients.append(x.grad.cpu())
    assert gradients[0].isfinite().all() and gradients[0].all()
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize(("then", "barriers"), [(lambda x: torch.softmax(x, 1), 0), (lambda x: x / 5, 1)])
def test_only_what_is_divided_again_is_kept_apart(then: Callable[[torch.Tensor], torch.Tensor], barriers: int) -> None:
    with Record() as record:
        x = then(record.input(torch.rand(4, 4)) / 3)
    text = lower(record.program(x), startup.engine().fragments).text
    assert text.count("stablehlo.optimization_barrier") == barriers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quotients_of_half_precision_are_rounded_before_they_are_cut(dtype: torch.dtype) -> None:
    x, y = (torch.randn(300, 300) * 10).to(dtype), torch.randn(300, 300).to(dtype)
    for divisor in (y, y[0]):
        found = torch.div(x.to("tpu"), divisor.to("tpu"), rounding_mode="trunc").cpu()
        torch.testing.assert_close(found, torch.div(x, divisor, rounding_mode="trunc"), rtol=0, atol=0)


WHOLE: dict[str, Callable[[torch.Tensor, torch.Tensor | float], torch.Tensor]] = {
    "floor_divide": torch.floor_divide,
    "floor_divide_": lambda x, y: x.clone().floor_divide_(y),
    "//": lambda x, y: x // y,
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "into floats": lambda x, y: torch.div(
        x, y, rounding_mode="floor", out=torch.empty(x.shape, device=x.device, dtype=torch.float)
    ),
    "by floats": lambda x, y: x.clone().div_(y.float() if isinstance(y, torch.Tensor) else y, rounding_mode="floor"),
    "remainder": torch.remainder,
    "fmod": torch.fmod,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", WHOLE)
def test_whole_quotients_of_half_precision_are_rounded_at_the_steps_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    drawn = torch.Generator().manual_seed(1)
    x, y = (torch.randn(2, 50_000, generator=drawn) * torch.randn(2, 50_000, generator=drawn).mul(3).exp()).to(dtype)
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, -2.5, 6e4]).to(dtype)
    least = torch.finfo(dtype).smallest_normal / (2 if dtype == torch.float16 else 1)
    small = torch.tensor([1.0, 2, -1, 3], dtype=dtype) * least
    squares = [(each[:, None].expand(-1, len(each)).contiguous(), each) for each in (special, small)]
    numbers: list[float | torch.Tensor] = [0.3, -1.7, 1e-3, y[:1], y[0], torch.tensor(0.3)]
    for a, b in [(x, y), (x[:1], y[:1]), (x[:1000].view(10, 100), y[:100]), *squares, *((x, n) for n in numbers)]:
        expected = WHOLE[name](a, b)
        found = WHOLE[name](a.to("tpu"), b.to("tpu") if isinstance(b, torch.Tensor) else b).cpu()
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found.signbit(), expected.signbit()) or expected.isnan().any()


def test_decimals_are_rounded_as_on_the_cpu() -> None:
    x = torch.randn(1000) * 100
    for decimals in (-2, 1, 2, 3):
        torch.testing.assert_close(
            x.to("tpu").round(decimals=decimals).cpu(), x.round(decimals=decimals), rtol=0, atol=0
        )


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_divisors_and_multiples_of_the_smallest_integer_are_found(dtype: torch.dtype) -> None:
    least = torch.iinfo(dtype).min
    a = torch.tensor([least, 0, least, least, 12, 0], dtype=dtype)
    b = torch.tensor([0, least, least, 1, -18, 0], dtype=dtype)
    for op in (torch.gcd, torch.lcm):
        assert op(a.to("tpu"), b.to("tpu")).tolist() == op(a, b).tolist(), op


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_signs_that_overflow_leaves_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    drawn = torch.randint(info.min, info.max, (2, 500), generator=torch.Generator().manual_seed(1), dtype=dtype)
    least = torch.full((500,), info.min, dtype=dtype)
    assert torch.equal(torch.gcd(least.to("tpu"), drawn[0].to("tpu")).cpu(), torch.gcd(least, drawn[0]))
    assert torch.equal(torch.gcd(drawn[0].to("tpu"), least.to("tpu")).cpu(), torch.gcd(drawn[0], least))
    assert torch.equal(torch.lcm(*drawn.to("tpu")).cpu(), torch.lcm(*drawn))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("value", [1.5, -0.5, 3])
def test_a_product_that_is_added_to_integers_is_scaled_by_a_whole_number(dtype: torch.dtype, value: float) -> None:
    x = torch.tensor([1, 2, -7, 2**30], dtype=dtype)
    expected = torch.addcmul(x, x, x, value=value), torch._foreach_addcmul([x], [x], [x], value=value)[0]
    on_tpu = x.to("tpu")
    made = torch.addcmul(*[on_tpu] * 3, value=value), torch._foreach_addcmul(*[[on_tpu]] * 3, value=value)[0]
    for a, b in zip(made, expected, strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("host", [torch.tensor(7), torch.tensor(7.5), torch.tensor(7, dtype=torch.int8)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float16, torch.float32])
def test_a_number_on_the_host_is_divided_on_the_device(host: torch.Tensor, dtype: torch.dtype) -> None:
    x = torch.tensor([2, 3, -4]).to(dtype)
    for left, right in ((host, x), (x, host), (host, x[0])):
        expected = left // right
        found = left // right.to("tpu") if left is host else left.to("tpu") // right
        assert (found.device.type, found.dtype) == ("tpu", expected.dtype)
        assert torch.equal(found.cpu(), expected)
    assert not torch.tpu.cpu_fallback_counts()  # type: ignore[attr-defined]
