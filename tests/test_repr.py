"""print, repr, format and pdb of tpu tensors give CUDA's text with `tpu`, from one read and no recorded op."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from torchtpu import metrics

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def as_cuda(text: str) -> str:
    return text.replace("tpu:0", "cuda:0")


def expected(x: torch.Tensor, suffix: str = "device='tpu:0'") -> str:
    """What torch prints for the CPU tensor, with the device as the first suffix (only where all fits one line)."""
    inner = repr(x).removeprefix("tensor(").removesuffix(")")
    values, *suffixes = inner.split(", dtype=")
    return "tensor(" + ", ".join([values, suffix, *(f"dtype={s}" for s in suffixes)]) + ")"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype_prints_as_on_the_cpu(dtype):
    x = torch.tensor([0, 1, 2]).to(dtype)
    assert repr(x.to("tpu")) == expected(x)


def test_print_records_no_op_and_reads_once():
    x = torch.arange(6.0, device="tpu").reshape(2, 3).t() + 1
    torch.tpu.synchronize()
    before = metrics.snapshot()
    text = repr(x)
    after = metrics.snapshot()
    assert after["ops_recorded"] == before["ops_recorded"]
    assert after["downloads"] - before["downloads"] <= 1
    assert text == "tensor([[1., 4.],\n        [2., 5.],\n        [3., 6.]], device='tpu:0')"


def same_numbers(x: torch.Tensor, expected: torch.Tensor) -> None:
    numbers = [re.sub(r"\s+", "", repr(t)).split("]" * t.dim())[0] for t in (x, expected)]
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
@pytest.mark.parametrize("shape", [(2**23,), (2**12, 2**11), (2, 2**20, 4), (7, 3, 2, 2**18)], ids=str)
def test_a_large_tensor_copies_what_is_printed(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    count = torch.Size(shape).numel()
    x = (torch.arange(count) % 1009).to(dtype).reshape(shape)
    y = x.to("tpu").transpose(0, -1)
    torch.tpu.synchronize()
    before = metrics.snapshot()["bytes_downloaded"]
    same_numbers(y, x.transpose(0, -1))
    assert metrics.snapshot()["bytes_downloaded"] - before <= 64 << 10
    torch.set_printoptions(edgeitems=5, threshold=3)
    try:
        same_numbers(y, x.transpose(0, -1))
    finally:
        torch.set_printoptions(profile="default")


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1, 1), (2000,), (50, 50), (3, 40, 40)], ids=str)
def test_any_shape_prints_as_on_the_cpu(shape):
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    body = repr(x.to("tpu"))
    assert "device='tpu:0'" in body
    values = lambda text: re.split(r"\]|, device|, size|\)$", text)[0]
    assert values(body) == values(repr(x))


def test_autograd_suffixes_are_cudas():
    x = torch.ones(2, device="tpu", requires_grad=True)
    assert repr(x) == "tensor([1., 1.], device='tpu:0', requires_grad=True)"
    assert repr(x * 2) == "tensor([2., 2.], device='tpu:0', grad_fn=<MulBackward0>)"
    assert repr(nn.Parameter(x.detach())) == (
        "Parameter containing:\ntensor([1., 1.], device='tpu:0', requires_grad=True)"
    )


def test_containers_and_modules_print():
    x = torch.ones(1, device="tpu")
    assert str({"x": [x]}) == "{'x': [tensor([1.], device='tpu:0')]}"
    assert repr(nn.Linear(2, 3).to("tpu")) == "Linear(in_features=2, out_features=3, bias=True)"


def test_f_strings_format_numbers():
    loss = torch.tensor(1.25, device="tpu", requires_grad=True) * 2
    assert f"{loss:.3f}" == "2.500"
    assert f"{torch.ones(1, device='tpu')}" == "tensor([1.], device='tpu:0')"
    assert f"{torch.tensor(3, device='tpu'):>4d}" == "   3"


def test_conjugate_and_negative_views_print_their_values():
    x = torch.tensor([1 + 2j, 3 - 1j])
    y = x.to("tpu")
    assert repr(y.conj()) == expected(x.conj())
    assert repr(y.conj().imag) == expected(x.conj().imag)


def test_print_options_are_honoured():
    x = torch.tensor([1 / 3], device="tpu")
    torch.set_printoptions(precision=2)
    try:
        assert repr(x) == "tensor([0.33], device='tpu:0')"
    finally:
        torch.set_printoptions(profile="default")


def test_printing_under_autocast_inference_and_modes():
    x = torch.ones(2, device="tpu")
    with torch.inference_mode():
        assert "device='tpu:0'" in repr(x + 1)
    with torch.autocast("tpu", dtype=torch.bfloat16):
        assert "device='tpu:0'" in repr(x)
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        assert repr(x) == "tensor([1., 1.], device='tpu:0')"


def test_fake_and_functorch_tensors_are_left_to_torch():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        assert repr(torch.empty(2, device="tpu")) == "FakeTensor(..., device='tpu:0', size=(2,))"
    shown = []
    torch.vmap(lambda a: (shown.append(repr(a)), a)[1])(torch.ones(2, device="tpu"))
    assert shown[0].startswith("BatchedTensor(lvl=1, bdim=0, value=\n    tensor([1., 1.], device='tpu:0')")
    torch.func.grad(lambda a: (shown.append(repr(a)), a.sum())[1])(torch.ones(2, device="tpu"))
    assert shown[1].startswith("GradTrackingTensor(")


def test_subclasses_print_under_their_own_name():
    class Mine(torch.Tensor):
        pass

    assert repr(torch.ones(1, device="tpu").as_subclass(Mine)) == "Mine([1.], device='tpu:0')"


def test_numpy_refuses_with_cudas_text():
    with pytest.raises(TypeError) as caught:
        torch.ones(2, device="tpu").numpy()
    assert str(caught.value) == (
        "can't convert tpu:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
    )
    assert torch.ones(2, device="tpu").numpy(force=True).tolist() == [1, 1]
