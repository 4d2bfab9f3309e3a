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
        x = DATA.to(device, copy=True).requires_grad_()
        repeated = x.repeat_interleave((x[0] > 0).long() + 1, 0)
        (x.masked_select(x > 0).pow(2).sum() + x[x > 1].exp().sum() + repeated.sum()).backward()
        assert x.grad is not None
        return x.grad.cpu()

    torch.testing.assert_close(gradient("tpu"), gradient("cpu"))


def of(device: str, *numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, device=device)


UNFIT: dict[str, tuple[Callable[[str], tuple[Any, Any]], str]] = {
    "places beside a mask": (lambda on: ((of(on, True, True, True, False), of(on, 0, 1)), 7.0), r"shapes \[.\], \[2\]"),
    "a mask beside places": (lambda on: ((of(on, 0, 1), of(on, True, True, True, False)), 7.0), r"shapes \[2\], \[.\]"),
    "two masks": (lambda on: ((of(on, True, True, False, True), of(on, True, False, False, True)), 7.0), "shapes"),
    "an empty mask and another": (lambda on: ((of(on, *[False] * 4), of(on, True, False, False, True)), 7.0), "shapes"),
    "values behind a dimension": (
        lambda on: ((slice(None), of(on, True, True, True, False)), torch.ones(4, 2, device=on)),
        r"value tensor of shape \[4, 2\] .* of shape \[4, .\]",
    ),
    "values beside two masks": (
        lambda on: ((of(on, True, True, False, True), of(on, True, False, True, True)), torch.ones(2, device=on)),
        r"value tensor of shape \[2\] .* of shape \[.\]",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_counts_that_do_not_fit_fail_the_next_read_with_the_error_of_the_cpu(name: str) -> None:
    written, message = UNFIT[name]

    def write(device: str) -> torch.Tensor:
        x = DATA.to(device, copy=True)
        at, values = written(device)
        x[at] = values
        return x.cpu()

    kinds = []
    for device in ("cpu", "tpu"):
        with pytest.raises((IndexError, RuntimeError), match=f"^shape mismatch: .*{message}") as raised:
            write(device)
        kinds.append(raised.type)
    assert kinds[0] is kinds[1]


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.__setitem__(x[0] > 0, torch.ones(2, 3, device=x.device)),
        lambda x: x.__setitem__(x[0] > 0, torch.ones(2, 1, 4, device=x.device)),
        lambda x: x.__setitem__((x[0] > 0, of(x.device.type, 0, 1)), torch.ones(5, device=x.device)),
    ],
)
def test_values_that_fit_no_count_are_refused_by_the_call_which_names_the_count(write: Callable[..., Any]) -> None:
    texts = []
    for device in ("cpu", "tpu"):
        with pytest.raises((IndexError, RuntimeError)) as raised:
            write(DATA.to(device, copy=True))
        texts.append((raised.type, str(raised.value)))
    assert texts[0] == texts[1]


def test_a_part_of_a_tensor_is_written_through_a_mask_to_another_part() -> None:
    made = []
    for device in ("cpu", "tpu"):
        x = DATA.to(device, copy=True)
        x[0][x[1] == x[1]] = x[2]
        made.append(x.cpu())
    assert torch.equal(*made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("value", [3.7, -1, 300, 1e20, 70000.0, float("inf"), float("nan"), 3 + 0j, 3 + 1j, True])
def test_a_number_of_another_dtype_is_converted_for_a_mask(dtype: torch.dtype, value: complex) -> None:
    def made(device: str) -> str:
        x, number = torch.zeros(4, dtype=dtype, device=device), torch.tensor(value, device=device)
        try:
            x[of(device, True, False, True, False)] = number
            return str(x.tolist())
        except RuntimeError as error:
            return str(error).partition(" (aten")[0]

    assert made("tpu") == made("cpu")
    assert not metrics.snapshot()["cpu_fallbacks"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8, torch.int8, torch.bool])
@pytest.mark.parametrize("value", [3.7, -200, 300, 1e20, 70000.0, float("inf"), float("nan"), 3 + 0j, 3 + 1j, True])
@pytest.mark.parametrize("name", ["masked_fill", "masked_fill_", "index_fill", "index_fill_"])
def test_a_number_that_fills_another_dtype_has_to_fit(name: str, dtype: torch.dtype, value: complex) -> None:
    def made(device: str, number: Any) -> str:
        x = torch.zeros(4, dtype=dtype, device=device)
        where = (of(device, True, False, True, False),) if "mask" in name else (0, of(device, 0, 2))
        try:
            return str(getattr(x, name)(*where, number).tolist())
        except RuntimeError as error:
            return str(error).partition(" (aten")[0]

    for number in (value, torch.tensor(value)):
        assert made("tpu", number) == made("cpu", number)
    assert made("tpu", of("tpu", value).view(())) == made("cpu", torch.tensor(value))
    assert not metrics.snapshot()["cpu_fallbacks"]
