"""Ops composed of others, and those that databases do not reach, give the CPU's results on the device."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from torchtpu import metrics

torch.manual_seed(0)
MATRICES = torch.randn(2, 4, 4, dtype=torch.float64)
COMPLEX = torch.randn(3, 3, dtype=torch.complex128)
SAMPLE = torch.randn(24)
IMAGES, KERNEL, TURNED = torch.randn(2, 2, 6, 7), torch.randn(3, 2, 3, 3), torch.randn(2, 3, 3, 3)

aten: Any = torch.ops.aten


def by_strides(
    x: torch.Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], padding: int, *, transposed: bool = False
) -> tuple[torch.Tensor, ...]:
    channels = (x.shape[1], 2) if transposed else (2, x.shape[1])
    weight = torch.linspace(-1, 1, math.prod((*channels, *kernel)), dtype=torch.double, device=x.device)
    x, weight = x.detach().double().requires_grad_(), weight.view(*channels, *kernel).requires_grad_()
    call: Any = getattr(functional, f"conv{'_transpose' if transposed else ''}{len(kernel)}d")
    made = call(x, weight, stride=stride, padding=padding)
    return made.detach(), *torch.autograd.grad(made.square().sum(), (x, weight))


def gradient(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    (found,) = torch.autograd.grad(call(x).abs().sum(), x)
    return found


def solved(a: torch.Tensor, hermitian: bool) -> tuple[torch.Tensor, ...]:
    factors, pivots = torch.linalg.ldl_factor(a, hermitian=hermitian)
    return factors, pivots, torch.linalg.ldl_solve(factors, pivots, a[..., :2], hermitian=hermitian)


def written(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, number = x.clone(), (x * 8).long()
    x //= torch.tensor(0.5, device=x.device)
    number <<= 2
    number >>= torch.tensor(1, device=x.device)
    return x, number, (x.abs() + 1).polygamma_(2)


def convolved(call: Any, x: torch.Tensor, weight: torch.Tensor, *window: Any) -> tuple[torch.Tensor, ...]:
    """A convolution by the name of its kernel, and its gradients."""
    x, weight, bias = (t.to(x.device).requires_grad_() for t in (x.detach(), weight.detach(), torch.ones(3)))
    made = call(x, weight, weight.shape[2:], bias, *window)
    return made, *torch.autograd.grad(made.square().sum(), (x, weight, bias))


def by_vector(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What linear makes of a weight that is a vector, and its gradients."""
    x, weight = x.detach().requires_grad_(), torch.arange(4.0, device=x.device).requires_grad_()
    made = functional.linear(x, weight)
    with torch.inference_mode():
        without = functional.linear(x, weight)
    return made, without, *torch.autograd.grad(made.square().sum(), (x, weight))


def of_pixels(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A convolution of images of one pixel whose strides say channels_last, and its gradients."""
    pixels = x[:, :, 0, 0].contiguous().view(2, 1, 1, 2).permute(0, 3, 1, 2)
    return convolved(lambda x, weight, _, bias: functional.conv2d(x, weight, bias, padding=1), pixels, KERNEL)


def into_new(call: Any, *arguments: Any, **outs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What `call` writes into new tensors like `outs`."""
    outs = {name: torch.empty_like(like) for name, like in outs.items()}
    call(*arguments, **outs)
    return tuple(outs.values())


def convolution_gradients(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weight = KERNEL.to(x.device)
    made = torch._C._nn.thnn_conv2d(x, weight, 3)
    outs = {"grad_input": x, "grad_weight": weight, "grad_bias": weight[:, 0, 0, 0].clone()}
    return into_new(aten._slow_conv2d_backward.grad_input, made, x, weight, [3, 3], [1, 1], [0, 0], **outs)


def pooling_gradient(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return into_new(aten.adaptive_avg_pool3d_backward.grad_input, x[..., :2, :3] * 2, x, grad_input=x)


def observed(x: torch.Tensor, by_row: bool, is_symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Three tensors in turn: seen alone, quantized and seen, quantized alone."""
    made: list[torch.Tensor] = []
    start = [] if by_row else [math.inf]
    state = [torch.tensor(start, device=x.device), -torch.tensor(start, device=x.device)]
    state += [torch.ones(len(start), device=x.device), torch.zeros(len(start), dtype=torch.int32, device=x.device)]
    for factor, *switches in ((1, 1, 0), (2, 1, 1), (3, 0, 1)):
        on = (torch.tensor([switch], device=x.device) for switch in switches)
        made += torch.fused_moving_avg_obs_fake_quant(x * factor, *on, *state, 0.1, -128, 127, 0, by_row, is_symmetric)[
            None
        ]
    return *made, *state


def rows_of(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    ends = torch.tensor([0, 3, 3, 8], device=x.device)
    padded = aten._jagged_to_padded_dense_forward(x.view(8, 3), [ends], [4], 7.5)
    dense = torch.arange(30.0, device=x.device).view(3, 5, 2)
    return padded, *(aten._padded_dense_to_jagged_forward(dense, [ends], total) for total in (None, 8))


def products_of_segments(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, lengths = x.detach().requires_grad_(), torch.tensor([1, 2, 3, 4, 0], device=x.device)
    made = torch.segment_reduce(x, "prod", lengths=lengths, initial=2, unsafe=True)
    return made, *torch.autograd.grad(made.sum(), x)


CALLS: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "det": (lambda x: (torch.det(x), torch.det(x.mT), gradient(torch.det, x), gradient(torch.det, x.mT)), MATRICES),
    "slogdet": (lambda x: (*torch.slogdet(x[:, ::2, ::2]), *torch.slogdet(x)), MATRICES),
    "complex det": (lambda x: (torch.det(x), gradient(torch.det, x.mT)), COMPLEX),
    "eig": (lambda x: (*torch.linalg.eig(x), gradient(torch.linalg.eigvals, x)), MATRICES),
    "ldl": (lambda x: solved(x, False), MATRICES),
    "hermitian ldl": (lambda x: solved(x, True), COMPLEX),
    "qr of nothing": (
        lambda x: tuple(part for mode in ("reduced", "complete", "r") for part in torch.linalg.qr(x[:, :0], mode=mode)),
        MATRICES,
    ),
    "singular ldl": (lambda x: torch.linalg.ldl_factor_ex(x - x), MATRICES),
    "histogram": (lambda x: (*torch.histogram(x, 5, weight=x.abs(), density=True), *torch.histogram(x - x, 3)), SAMPLE),
    "histogram at edges": (lambda x: torch.histogram(x, x[:6].sort()[0]), SAMPLE),
    "histogramdd": (lambda x: torch.histogramdd(x.view(-1, 2), [3, 4], range=[-1.0, 1, -2, 2])[0], SAMPLE),
    "slow_conv2d": (lambda x: convolved(torch._C._nn.thnn_conv2d, x, KERNEL, 2, 1), IMAGES),
    "slow_conv3d": (lambda x: convolved(torch._C._nn.slow_conv3d, x[:, :, None], KERNEL[:, :, None]), IMAGES),
    "slow_conv_dilated2d": (lambda x: convolved(aten.slow_conv_dilated2d, x, KERNEL, [1, 1], [1, 1], [2, 2]), IMAGES),
    "slow_conv_transpose2d": (
        lambda x: convolved(aten.slow_conv_transpose2d, x, TURNED, [2, 2], [1, 1], [1, 1]),
        IMAGES,
    ),
    "convolution of pixels": (of_pixels, IMAGES),
    "slow_conv2d into gradients": (convolution_gradients, IMAGES),
    "adaptive_avg_pool3d into a gradient": (pooling_gradient, IMAGES),
    "lanczos": (lambda x: functional.interpolate(x, (3, 9), mode="lanczos", antialias=True), IMAGES),
    "lanczos gradient": (
        lambda x: gradient(functools.partial(functional.interpolate, size=(3, 9), mode="lanczos", antialias=True), x),
        IMAGES,
    ),
    "observer": (lambda x: observed(x, False, False), SAMPLE),
    "observer of rows": (lambda x: observed(x.view(4, 6), True, True), SAMPLE),
    "rows of different lengths": (rows_of, SAMPLE),
    "products of segments": (
        products_of_segments,
        torch.tensor([3, torch.nan, 3, 0, torch.nan, 0, torch.inf, 0, 2, 5]),
    ),
    "the margin of one sample": (
        lambda x: (
            functional.multi_margin_loss(x, torch.tensor([2], device=x.device), reduction="none"),
            functional.multi_margin_loss(x, torch.tensor(2, device=x.device), reduction="none"),
            gradient(
                lambda x: functional.multi_margin_loss(x, torch.tensor([2], device=x.device), reduction="none"), x
            ),
        ),
        SAMPLE[:5],
    ),
    "samples at nowhere": (
        lambda x: tuple(
            functional.grid_sample(
                x[:1],
                torch.tensor([[[[torch.nan, 0.4], [0.2, torch.nan], [torch.nan, torch.nan]]]], device=x.device),
                mode,
                padding,
                align_corners=False,
            )
            for mode in ("bilinear", "nearest", "bicubic")
            for padding in ("zeros", "border", "reflection")
        ),
        IMAGES,
    ),
    "volumes sampled at nowhere": (
        lambda x: tuple(
            functional.grid_sample(
                x.view(1, 1, 2, 3, 4),
                torch.tensor([[[[[bad, 0.4, 0.1], [0.2, bad, bad], [0.1, 0.2, -0.3]]]]], device=x.device),
                mode,
                align_corners=False,
            )
            for mode in ("bilinear", "nearest")
            for bad in (math.nan, math.inf, -math.inf)
        ),
        SAMPLE,
    ),
    "nearest elements of signals, images and volumes": (
        lambda x: tuple(
            functional.interpolate(x[:n].view(1, 1, *[1] * (rank - 1), n).double(), scale_factor=scale, mode=mode)
            for rank in (1, 2, 3)
            for n, scale in (
                (8, (*[1.0] * (rank - 1), 1.1)),
                (3, (*[1.0] * (rank - 1), 2.2)),
                (16, (*[1.0] * (rank - 1), 2.6)),
            )
            for mode in ("nearest", "nearest-exact")
        ),
        SAMPLE,
    ),
    "kernels of a stride": (lambda x: by_strides(x.view(1, 2, 3, 4).repeat(2, 1, 2, 2), (2, 3), (2, 3), 0), SAMPLE),
    "kernels of a stride at a rim": (lambda x: by_strides(x.view(2, 2, 2, 3), (2, 3), (2, 3), 1), SAMPLE),
    "kernels of a stride over nothing": (lambda x: by_strides(x[:0].view(0, 2, 4, 6), (2, 3), (2, 3), 0), SAMPLE),
    "kernels of two large strides": (lambda x: by_strides(x.view(1, 2, 12), (32,), (16,), 13), SAMPLE),
    "transposed kernels of a stride": (lambda x: by_strides(x.view(2, 3, 4), (3,), (3,), 1, transposed=True), SAMPLE),
    "transposed kernels of two large strides": (
        lambda x: by_strides(x.view(2, 3, 4), (32,), (16,), 8, transposed=True),
        SAMPLE,
    ),
    "add_relu": (
        lambda x: (torch._C._VariableFunctions._add_relu(x, x, alpha=2.5), aten._add_relu(x, -0.5, 2)),
        SAMPLE,
    ),
    "linear combination": (lambda x: aten._compute_linear_combination(x.view(3, 2, 4), x.view(8, 3)), SAMPLE),
    "integers at a threshold": (
        lambda x: (functional.threshold(x, -1.7, -4.3), functional.hardtanh(x, -2.5, 2**60)),
        torch.tensor([-3, -2, -1, 0, 1, 2**53 + 1]),
    ),
    "integers to large powers": (
        lambda x: (x[:, None] ** (x.abs() + 60), x**100, 3 ** (x.abs() + 60), (x % 7).to(torch.int8) ** 127),
        torch.tensor([-7, -3, -2, -1, 0, 1, 2, 3, 5, 196]),
    ),
    "masks times infinity": (
        lambda x: ((x > 0) * (x / 0), (x > 0).double() * (x / 0), (x > 0).to(torch.complex64) * (x / 0), x * (x < 0)),
        torch.tensor([-1.5, 2.5, torch.inf]),
    ),
    "linear by a vector": (lambda x: by_vector(x.view(2, 3, 4)) + by_vector(x.view(6, 4)) + by_vector(x[:4]), SAMPLE),
    "in place": (written, SAMPLE),
    "filled with a number of the host": (
        lambda x: x.view(4, 6).t().index_fill(0, torch.tensor([1, 3], device=x.device), torch.tensor(2.5)),
        SAMPLE,
    ),
    "real results into complex ones": (
        lambda x: tuple(
            call(x, number, out=torch.empty_like(x, dtype=torch.cfloat))
            for call, number in ((torch.pow, 0.5), (torch.pow, 1.5), (torch.logit, 0.1), (torch.logit, None))
        ),
        SAMPLE,
    ),
    "out": (lambda x: torch.mvlgamma(x.abs() + 3, 2, out=torch.empty(0, device=x.device)), SAMPLE),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_the_cpu_and_made_on_the_device(name: str) -> None:
    call, x = CALLS[name]
    found, expected = call(x.to("tpu")), call(x)
    pairs = zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
    for ours, theirs in pairs:
        assert ours.device.type == "tpu"
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours.cpu(), theirs, equal_nan=True)
    assert not metrics.snapshot()["cpu_fallbacks"]


def test_is_set_to_compares_storages() -> None:
    x = torch.ones(4, 3, device="tpu")
    assert x.is_set_to(x.view(4, 3))
    assert not x.is_set_to(x[1:])
    assert not x.is_set_to(x.clone())


def test_a_determinant_refuses_integers_as_the_cpu_does() -> None:
    for device in ("cpu", "tpu"):
        with pytest.raises(RuntimeError, match="Got Long"):
            torch.det(torch.ones(2, 2, dtype=torch.int64, device=device))


@pytest.mark.parametrize("call", [torch._foreach_frac, torch._foreach_ceil, lambda x: torch._foreach_lerp(x, x, 0.5)])
def test_lists_refuse_elements_for_which_no_device_has_a_kernel(call: Callable[[Any], Any]) -> None:
    for device in ("cpu", "tpu"):
        with pytest.raises(NotImplementedError, match="not implemented for 'Bool'"):
            call([torch.ones(2, dtype=torch.bool, device=device)])


REFUSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a product of two dtypes": lambda x: x @ x.half(),
    "a product of numbers and integers": lambda x: torch.mm(x, x.long()),
    "a convolution of two dtypes": lambda x: functional.conv1d(x[None], x[None].double()),
    "bits of floating numbers": lambda x: x & 1,
    "shifts of floating numbers": lambda x: x << 1,
    "an order of complex numbers": lambda x: x.cfloat() > 1,
    "a sorted list of complex numbers": lambda x: x.cfloat().sort()[0],
    "the positive part of complex numbers": lambda x: x.cfloat().relu_(),
    "a number too large for the elements": lambda x: x.int().fill_(1e30),
    "a complex number for real elements": lambda x: x.masked_fill_(x > 0, 1j),
    "many numbers for masked elements": lambda x: x.masked_fill(x > 0, x[0]),
    "a number too large for scattered elements": lambda x: x.int().scatter(0, x.long(), 1e30),
    "a softmax of integers": lambda x: x.int().softmax(0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_device_has_a_kernel_for_is_refused_by_the_call(name: str) -> None:
    errors = []
    for device in ("cpu", "tpu"):
        with pytest.raises(RuntimeError) as raised:
            REFUSED[name](torch.ones(2, 2, device=device))
        errors.append((raised.type, str(raised.value)))
    assert errors[0] == errors[1]


def test_what_is_large_is_refused_as_well() -> None:
    x = torch.empty(3000, 3000, device="tpu")
    message = r"same dtype|not implemented for 'Float'|not supported for complex|without overflow"
    for call in (lambda: x.double() @ x, lambda: x & x, lambda: x.cfloat().relu(), lambda: x.long().fill_(1e30)):
        with pytest.raises(RuntimeError, match=message):
            call()


def test_what_cuda_has_a_kernel_for_is_taken() -> None:
    x = torch.ones(2, 2, device="tpu")
    assert x.bool().abs().tolist() == [[True, True]] * 2
    assert (x.to(torch.uint16) + 1).tolist() == [[2, 2]] * 2
    half = x.bfloat16()
    for made in (
        torch.addmm(x, half, half, out_dtype=torch.float32),
        torch.baddbmm(x[None], half[None], half[None], out_dtype=torch.float32)[0],
    ):
        assert made.dtype == torch.float32 and made.tolist() == [[3, 3]] * 2


def test_a_histogram_of_nan_fails_the_next_read() -> None:
    x = torch.tensor([1.0, float("nan")], device="tpu")
    with pytest.raises(RuntimeError, match="range is not finite"):
        torch.histogram(x, 2)[0].cpu()


@pytest.mark.parametrize("is_masked", [False, True])
def test_a_transformer_encoder_in_eval_mode_stays_on_the_device(is_masked: bool) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=is_masked)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 4 + [True], [False] * 5])
    masks = {"src_key_padding_mask": padding} if is_masked else {}
    with torch.no_grad():
        expected = model(x, **masks)
        found = copy.deepcopy(model).to("tpu")(x.to("tpu"), **{k: m.to("tpu") for k, m in masks.items()})
    torch.testing.assert_close(found.cpu(), expected)
    assert not metrics.snapshot()["cpu_fallbacks"]


@pytest.mark.parametrize(
    "name", ["silu", "mish", "gelu", "hardswish", "softplus", "elu", "celu", "logsigmoid", "hardsigmoid", "leaky_relu"]
)
def test_an_activation_and_its_gradient_are_one_record_each(name: str) -> None:
    x = torch.linspace(-30, 30, 41)
    call = getattr(functional, name)
    expected = call(x), gradient(call, x)
    y = x.to("tpu").requires_grad_()
    metrics.reset()
    made = call(y)
    assert metrics.snapshot()["ops_recorded"] == 1
    ones = torch.ones_like(made)
    metrics.reset()
    (found,) = torch.autograd.grad(made, y, ones)
    assert metrics.snapshot()["ops_recorded"] == 1
    torch.testing.assert_close(made.detach().cpu(), expected[0])
    torch.testing.assert_close((found * made.detach().sign()).cpu(), expected[1], equal_nan=True)


@pytest.mark.parametrize("name", ["cumsum", "cumprod"])
def test_running_results_are_as_precise_as_the_cpus(name: str) -> None:
    x = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0)) * 0.02 + 0.99
    torch.testing.assert_close(getattr(x.to("tpu"), name)(0).cpu(), getattr(x, name)(0), rtol=1.2e-7, atol=0)


def test_the_phase_of_running_complex_sums_goes_on_as_on_the_cpu() -> None:
    x = torch.randn(5, 40, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)) * 3
    torch.testing.assert_close(x.to("tpu").logcumsumexp(1).cpu(), x.logcumsumexp(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("call", [torch.sort, torch.argsort, functools.partial(torch.sort, stable=True)])
def test_sorting_refuses_a_dimension_that_is_not_there(call: Any) -> None:
    for x in (torch.ones(4, device="tpu"), torch.ones((), device="tpu")):
        with pytest.raises(
            IndexError, match=r"Dimension out of range \(expected to be in range of \[-1, 0\], but got 1\)"
        ):
            call(x, dim=1)


@pytest.mark.parametrize("op", [torch.var, torch.std])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_variance_of_integers_is_refused(op: Any, dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match="std and var only support floating point and complex dtypes"):
        op(torch.ones(3, 4, dtype=dtype, device="tpu"), 0)


def test_scatter_into_a_number_takes_the_first_of_a_longer_source() -> None:
    source = torch.tensor([7, 8, 9])
    for number in (torch.tensor(3), torch.tensor(3, device="tpu")):
        index = torch.tensor([0], device=number.device)
        assert number.scatter(-1, index, source.to(number.device)).item() == 7


@pytest.mark.parametrize(
    "call",
    [
        lambda x, at, source: x.gather(0, at),
        lambda x, at, source: x.scatter(0, at, source),
        lambda x, at, source: x.scatter(0, at, 5.0),
        lambda x, at, source: x.scatter_add(0, at, source),
        lambda x, at, source: x.scatter_reduce(0, at, source, "sum"),
    ],
    ids=["gather", "scatter", "scatter of a value", "scatter_add", "scatter_reduce"],
)
def test_a_number_takes_several_indices(call: Any) -> None:
    found = []
    for device in ("cpu", "tpu"):
        x = torch.tensor(3.0, device=device, requires_grad=True)
        out = call(x, torch.zeros(2, dtype=torch.int64, device=device), torch.tensor([7.0, 8.0, 9.0], device=device))
        out.sum().backward()
        assert x.grad is not None
        found.append((out.tolist(), x.grad.item()))
    assert found[0] == found[1]


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_unpooling_a_batch_of_nothing_makes_nothing(rank: int) -> None:
    x = torch.randn(0, *[4] * (rank + 1), device="tpu", requires_grad=True)
    pooled, chosen = getattr(functional, f"max_pool{rank}d")(x, 2, return_indices=True)
    out = getattr(functional, f"max_unpool{rank}d")(pooled, chosen, 2)
    out.sum().backward()
    assert out.shape == x.shape and out.tolist() == []
    assert x.grad is not None and x.grad.tolist() == []


@pytest.mark.parametrize("shape", [(0, 2, 4, 4), (2, 0, 4, 4)])
def test_sampling_of_nothing_makes_nothing(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device="tpu", requires_grad=True)
    grid = torch.zeros(shape[0], 3, 3, 2, device="tpu", requires_grad=True)
    out = functional.grid_sample(x, grid, align_corners=False)
    out.sum().backward()
    assert out.shape == (*shape[:2], 3, 3) and out.cpu().numel() == 0
    for leaf in (x, grid):
        assert leaf.grad is not None and leaf.grad.count_nonzero().item() == 0


@pytest.mark.parametrize("size", [(0, 1), (1, 0), (0, 0)])
def test_fractional_pools_may_make_nothing(size: tuple[int, int]) -> None:
    x = torch.randn(2, 3, 8, 8, device="tpu", requires_grad=True)
    out = functional.fractional_max_pool2d(x, 2, output_size=size)
    out.sum().backward()
    assert out.shape == (2, 3, *size) and out.cpu().numel() == 0
    assert x.grad is not None and x.grad.count_nonzero().item() == 0


def test_the_ctc_loss_of_batches_of_ever_other_lengths_takes_few_programs() -> None:
    dice = random.Random(0)
    programs = []
    for lap in range(16):
        time, longest = dice.randint(20, 30), dice.randint(5, 9)
        lengths = torch.tensor([longest, *(dice.randint(0, longest) for _ in range(3))])
        times = torch.tensor([dice.randint(12, time) for _ in range(4)])
        scores, targets = torch.randn(time, 4, 7), torch.randint(1, 7, (4, longest))
        found = []
        for device in ("cpu", "tpu"):
            given = scores.detach().to(device).requires_grad_()
            kind = "sum" if lap % 2 else "mean"
            loss = functional.ctc_loss(
                functional.log_softmax(given, -1), targets.to(device), times, lengths, reduction=kind
            )
            loss.backward()
            assert given.grad is not None
            found.append((loss.detach().cpu(), given.grad.cpu()))
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
        programs.append(metrics.snapshot()["programs_compiled"])
    assert programs[-1] <= programs[10] + 1


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 2, 3), (2, 1, 1), (3, 2, 1, 2)])
def test_a_read_at_an_index_is_laid_out_as_on_the_cpu(shape: tuple[int, ...]) -> None:
    x = torch.arange(math.prod(shape)).view(shape)
    for dim, taken in itertools.product(range(len(shape)), ([0], [[0, 0]], 0, [])):
        at = (*[slice(None)] * dim, torch.tensor(taken, dtype=torch.int64))
        expected, found = x[at], x.to("tpu")[*at[:-1], at[-1].to("tpu")]
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.numel() == 0 or found.stride() == expected.stride()
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("form", ["plain", "causal", "masked"])
def test_gradients_of_attention_in_double_precision_are_as_exact_as_its_values(form: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(2, 3, 7, 8, generator=generator, dtype=torch.float64) for _ in range(3)]
    more: dict[str, Any] = {"is_causal": form == "causal"}
    mask = torch.randn(7, 7, generator=generator, dtype=torch.float64)

    def gradients(device: str) -> list[torch.Tensor]:
        given = [row.to(device).requires_grad_() for row in rows]
        bias = {"attn_mask": mask.to(device)} if form == "masked" else {}
        made = functional.scaled_dot_product_attention(*given, **bias, **more)
        return [gradient.cpu() for gradient in torch.autograd.grad(made.square().sum(), given)]

    for found, expected in zip(gradients("tpu"), gradients("cpu"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


BOOLS: dict[str, Callable[[torch.Tensor, bool], torch.Tensor]] = {
    "floor_divide": lambda x, b: x // (b or True),
    "fmod": lambda x, b: torch.fmod(x, b or True),
    "divided by": lambda x, b: torch.div(b, x),  # type: ignore[call-overload]
    "power of": lambda x, b: b**x,
    "xlogy": torch.xlogy,
    "xlogy_": lambda x, b: x.double().xlogy_(b),
    "zeta": torch.special.zeta,
    "multiple": lambda x, b: torch.add(x, x, alpha=b),
    "added": lambda x, b: x + b,
    "equal": lambda x, b: x == b,
    "list": lambda x, b: torch._foreach_mul([x], [b])[0],
}


@pytest.mark.parametrize("name", BOOLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool])
def test_a_bool_is_a_number_beside_numbers(name: str, dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 2, 3]).to(dtype)
    for b in (True, False):
        try:
            wanted = BOOLS[name](x, b)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                BOOLS[name](x.to("tpu"), b)
        else:
            torch.testing.assert_close(BOOLS[name](x.to("tpu"), b).cpu(), wanted, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool, torch.uint16, torch.uint64])
def test_a_deterministic_resize_fills_what_it_adds(dtype: torch.dtype) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        made = [torch.zeros(2, 3, dtype=dtype, device=on)[1:].resize_(2, 4).cpu() for on in ("cpu", "tpu")]
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(made[1], made[0], equal_nan=True)


def test_numbers_that_no_int64_holds() -> None:
    def made(device: str) -> list[object]:
        x = torch.tensor([1, 2**63 + 5, 2**64 - 1], dtype=torch.uint64, device=device)
        found: list[object] = []
        for number in range(2**63 - 2000, 2**63 + 6000, 1000):  # some are, and they keep changing
            found += [x.eq(number).tolist(), (x & number).tolist(), torch.full_like(x, number).tolist()]
            found += torch.full((2,), number, dtype=torch.float64, device=device).tolist()
        return [*found, x.eq(2**64 - 1).tolist(), x.clone().fill_(2**64 - 1).tolist()]

    assert made("tpu") == made("cpu")
