"""Convolutions by the names of PyTorch's older kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchtpu.ops.registry import composed

aten: Any = torch.ops.aten


def _convolve(x: Tensor, weight: Tensor, kernel: list[int], bias: Tensor | None, **window: Any) -> Tensor:
    """Some callers give the weight as a matrix."""
    ones, zeros = [1] * len(kernel), [0] * len(kernel)
    window = {"dilation": ones, "transposed": False, "output_padding": zeros, "groups": 1, **window}
    made: Tensor = aten.convolution(x, weight.reshape(weight.shape[0], -1, *kernel), bias, **window)
    return made


@composed("_slow_conv2d_forward", "slow_conv3d_forward")
def slow_conv_forward(
    self: Tensor, weight: Tensor, kernel_size: list[int], bias: Tensor | None, stride: list[int], padding: list[int]
) -> Tensor:
    return _convolve(self, weight, kernel_size, bias, stride=stride, padding=padding)


@composed("_slow_conv2d_backward.output_mask")
def slow_conv2d_backward(
    grad_output: Tensor,
    self: Tensor,
    weight: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    kernels = weight.reshape(weight.shape[0], -1, *kernel_size)
    window = (stride, padding, [1, 1], False, [0, 0], 1)
    dx, dweight, dbias = aten.convolution_backward(grad_output, self, kernels, [weight.shape[0]], *window, output_mask)
    return dx, None if dweight is None else dweight.view_as(weight), dbias


@composed("_slow_conv2d_backward.grad_input")
def slow_conv2d_gradients(
    grad_output: Tensor, self: Tensor, weight: Tensor, kernel_size: list[int], stride: list[int], padding: list[int]
) -> tuple[Tensor | None, ...]:
    return slow_conv2d_backward(grad_output, self, weight, kernel_size, stride, padding, [True, True, True])


@composed("slow_conv_dilated2d", "slow_conv_dilated3d")
def slow_conv_dilated(
    self: Tensor,
    weight: Tensor,
    kernel_size: list[int],
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
) -> Tensor:
    return _convolve(self, weight, kernel_size, bias, stride=stride, padding=padding, dilation=dilation)


@composed("slow_conv_transpose2d", "slow_conv_transpose3d")
def slow_conv_transpose(
    self: Tensor,
    weight: Tensor,
    kernel_size: list[int],
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
) -> Tensor:
    window = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
    return _convolve(self, weight, kernel_size, bias, transposed=True, **window)
