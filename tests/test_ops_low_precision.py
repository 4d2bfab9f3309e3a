"""In: bfloat16, float8 and int8 numbers, and quantized tensors. Out: PyTorch's roundings, products and refusals."""

from __future__ import annotations

import pytest
import torch

from torchtpu import metrics
from torchtpu.runtime.pjrt import Client

E4 = torch.float8_e4m3fn


def test_bfloat16_is_rounded_after_each_op_as_in_eager_pytorch() -> None:
    def chain(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        a = x * y + z
        return (a * a + x) * (a - z) + a.abs().sqrt()

    numbers = [torch.randn(2000, generator=torch.manual_seed(i)).bfloat16() for i in range(3)]
    assert torch.equal(chain(*(x.to("tpu") for x in numbers)).cpu(), chain(*numbers))


def test_excess_precision_is_an_option_of_the_compiler() -> None:
    assert Client("cpu", excess_precision=True).options(0) != Client("cpu").options(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_casts_to_float8_saturate_as_pytorchs_do(dtype: torch.dtype) -> None:
    x = torch.tensor([0.1, 3.3, 447, 448, 465, 500, 1e9, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    torch.testing.assert_close(x.to("tpu").to(E4).cpu().float(), x.to(E4).float(), rtol=0, atol=0, equal_nan=True)
    wide = (x.to("tpu") + 1).to(torch.float8_e5m2).cpu()
    torch.testing.assert_close(wide.float(), (x + 1).to(torch.float8_e5m2).float(), rtol=0, atol=0, equal_nan=True)


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


def test_sparse_and_quantized_tensors_are_refused_in_plain_words() -> None:
    x = torch.eye(3, device="tpu")
    with pytest.raises(NotImplementedError, match="sparse tensors are not supported on tpu"):
        x.to_sparse_csr()
    with pytest.raises(NotImplementedError, match="quantized tensors are not supported on tpu"):
        torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
