"""bfloat16, float8, int8 and quantized numbers have PyTorch's roundings, products and refusals."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from torchtpu import metrics
from torchtpu.runtime.device.client import Client

E4 = torch.float8_e4m3fn
# Of sums of 256 products near 20, rounded once.
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-4}, torch.bfloat16: {"rtol": 2**-8, "atol": 1e-4}}


def test_bfloat16_is_rounded_after_each_op_as_in_eager_pytorch() -> None:
    def chain(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        a = x * y + z
        return (a * a + x) * (a - z) + a.abs().sqrt()

    numbers = [torch.randn(2000, generator=torch.manual_seed(i)).bfloat16() for i in range(3)]
    assert torch.equal(chain(*(x.to("tpu") for x in numbers)).cpu(), chain(*numbers))


@pytest.mark.parametrize("op", [torch.add, torch.div, torch.atan2, torch.hypot])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_output_of_more_digits_leaves_the_op_as_precise_as_it_is(op: Any, dtype: torch.dtype) -> None:
    x, y = torch.tensor([1.0, 33000, 3]), torch.tensor([2**-11, 33000, 7])
    x, y = x.to("tpu", dtype), y.to("tpu", dtype)
    for wide in (torch.float32, torch.float64):
        out = torch.empty(3, dtype=wide, device="tpu")
        assert op(x, y, out=out).tolist() == op(x, y).tolist()
    assert torch.exp(y, out=out).tolist() == torch.exp(y).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_remainders_and_powers_of_a_number_take_it_in_the_tensors_dtype(dtype: torch.dtype) -> None:
    """For 5.375 modulo 0.3 that is all of the second digit."""
    x = torch.tensor([5.375, -2.5, 0.75, 9, -0.1], dtype=dtype)
    for number in (0.3, 0.1, -0.7):
        for op in (torch.fmod, torch.remainder, lambda x, n: torch.remainder(n, x), lambda x, n: torch.pow(abs(n), x)):
            assert op(x.tpu(), number).tolist() == op(x, number).tolist()


def test_excess_precision_is_an_option_of_the_compiler() -> None:
    assert Client("cpu", excess_precision=True).options(0) != Client("cpu").options(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_casts_to_float8_saturate_as_pytorchs_do(dtype: torch.dtype) -> None:
    x = torch.tensor([0.1, 3.3, 447, 448, 465, 500, 1e9, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    torch.testing.assert_close(x.to("tpu").to(E4).cpu().float(), x.to(E4).float(), rtol=0, atol=0, equal_nan=True)
    wide = (x.to("tpu") + 1).to(torch.float8_e5m2).cpu()
    torch.testing.assert_close(wide.float(), (x + 1).to(torch.float8_e5m2).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32], ids=str)
def test_floats_beyond_a_narrow_integer_wrap_as_on_the_cpu(dtype: torch.dtype) -> None:
    x = torch.tensor([-1.0, -1.5, 255.9, 256, 300, -300, 32768, 65536 + 7, -70000, 2**31 - 128])
    for source in (x, x.double(), x[:6].bfloat16()):
        assert torch.equal(source.to("tpu").to(dtype).cpu(), source.to(dtype))
        assert torch.equal((source.to("tpu") + 1).to(dtype).cpu(), (source + 1).to(dtype))
        assert torch.equal(
            torch.empty(source.shape, dtype=dtype, device="tpu").copy_(source.to("tpu")).cpu(), source.to(dtype)
        )


def scaled(device: str, rows: bool) -> torch.Tensor:
    torch.manual_seed(0)
    a, b = torch.randn(16, 32).to(E4), torch.randn(48, 32).to(E4)
    scales = (torch.rand(16, 1), torch.rand(1, 48)) if rows else (torch.tensor(0.5), torch.tensor(3.0))
    bias = torch.randn(48).bfloat16()
    arguments = [x.to(device) for x in (a, b, *scales, bias)]
    return torch._scaled_mm(arguments[0], arguments[1].t(), *arguments[2:4], arguments[4], out_dtype=torch.bfloat16)


@pytest.mark.parametrize("rows", [False, True])
def test_scaled_products_of_float8(rows: bool) -> None:
    torch.testing.assert_close(scaled("tpu", rows).cpu(), scaled("cpu", rows))
    assert not metrics.snapshot()["cpu_fallbacks"]


def test_products_with_int8_weights() -> None:
    x, weight, scales = torch.randn(3, 32), torch.randint(-128, 127, (48, 32), dtype=torch.int8), torch.rand(48) / 99
    found = torch.ops.aten._weight_int8pack_mm(*(t.to("tpu") for t in (x, weight, scales)))
    torch.testing.assert_close(found.cpu(), x @ (weight * scales[:, None]).t())


def packed_on_cuda(rows: torch.Tensor, tiles: int) -> torch.Tensor:
    """Lane by lane what the layout of an m16n8k16 product says: lane t holds row t / 4, and of each 16 columns the
    pairs t % 4 and t % 4 + 4; the even columns of two such tiles fill an int32's low half, the odd ones its high."""
    count, columns = rows.shape
    packed = torch.zeros(count // 8, columns // (16 * tiles), 32, tiles // 2, dtype=torch.int64)
    for n, outer, t, pair in itertools.product(*map(range, packed.shape)):
        start = (outer * tiles + 2 * pair) * 16 + 2 * (t % 4)
        evens = [start, start + 8, start + 16, start + 24]
        for place, column in enumerate([*evens, *(e + 1 for e in evens)]):
            packed[n, outer, t, pair] |= int(rows[8 * n + t // 4, column]) << 4 * place
    return packed.int()


@pytest.mark.parametrize(("tiles", "group"), [(2, 32), (8, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_with_weights_of_4_bits_packed_as_on_cuda(tiles: int, group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, x = torch.randint(0, 16, (16, 256)), torch.randn(3, 256, dtype=dtype)
    scales = torch.stack([torch.rand(256 // group, 16) + 0.1, torch.randn(256 // group, 16)], -1).to(dtype)
    pairs = (rows[:, ::2] << 4 | rows[:, 1::2]).to(torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs.to("tpu"), tiles)
    assert torch.equal(packed.cpu(), packed_on_cuda(rows, tiles))
    found = torch.ops.aten._weight_int4pack_mm(x.to("tpu"), packed, group, scales.to("tpu"))
    scale, zero = (scales[..., i].float().repeat_interleave(group, 0).t() for i in (0, 1))
    weight = ((rows - 8) * scale + zero).to(dtype)
    torch.testing.assert_close(found.cpu(), (x.double() @ weight.t().double()).to(dtype), **TOLERANCE[dtype])
    assert not metrics.snapshot()["cpu_fallbacks"]


def test_weights_of_4_bits_are_refused_where_cuda_refuses_them() -> None:
    pairs = torch.zeros(16, 64, dtype=torch.uint8, device="tpu")
    with pytest.raises(RuntimeError, match="innerKTiles must be 2, 4 or 8, got 3"):
        torch.ops.aten._convert_weight_to_int4pack(pairs, 3)
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 2)
    scales = torch.ones(4, 16, 2, device="tpu")
    with pytest.raises(RuntimeError, match="the input has 64 columns, the weight 128"):
        torch.ops.aten._weight_int4pack_mm(torch.ones(2, 64, device="tpu"), packed, 32, scales)


def test_sparse_and_quantized_tensors_are_refused_in_plain_words() -> None:
    x = torch.eye(3, device="tpu")
    with pytest.raises(NotImplementedError, match="sparse tensors are not supported on tpu"):
        x.to_sparse_csr()
    with pytest.raises(NotImplementedError, match="quantized tensors are not supported on tpu"):
        torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("exponent", [3, -2, 0.3, 2.7, -1.1])
def test_powers_of_half_precision_are_those_of_the_cpu_to_the_bit(exponent: float, dtype: torch.dtype) -> None:
    x = torch.rand(1000).add(0.1).to(dtype)
    assert torch.equal(x.to("tpu").pow(exponent).cpu(), x.pow(exponent))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logarithms_and_scales_of_half_precision_are_rounded_where_the_cpu_rounds_them(dtype: torch.dtype) -> None:
    x, y = torch.randn(1000).to(dtype), torch.rand(1000).to(dtype)
    for call in (
        torch.xlogy,
        lambda x, y: torch.xlogy(x, 2.3),
        lambda x, y: torch.xlogy(2.3, y),
        lambda x, y: torch.zeros_like(x).index_add(0, torch.arange(1000, device=x.device), x, alpha=0.3),
    ):
        torch.testing.assert_close(call(x.to("tpu"), y.to("tpu")).cpu(), call(x, y), rtol=0, atol=0)
