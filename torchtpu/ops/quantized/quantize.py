"""Fake quantization: rounds real numbers to those that a quantized tensor can hold."""

from __future__ import annotations

from typing import Any

import torch

from torchtpu.ops.registry import composed, jnp, like, lowering, opmath


def _fake_quantize(x: Any, scale: Any, zero_point: Any, low: int, high: int) -> tuple[Any, Any, Any]:
    """(values, mask of those in range, their quantized values before clipping)."""
    x = opmath(x)
    scale, zero_point = (jnp.asarray(v).astype(x.dtype) for v in (scale, zero_point))
    quantized = jnp.round(x * (1 / scale)) + zero_point
    mask = (quantized >= low) & (quantized <= high)
    return (jnp.clip(quantized, low, high) - zero_point) * scale, mask, quantized


def _along(channel_values: Any, axis: int, ndim: int) -> Any:
    return channel_values.reshape([-1 if d == axis % ndim else 1 for d in range(ndim)])


def _infer(self: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return like(self), like(self, dtype=torch.bool)


def _infer_one(self: torch.Tensor, *_: Any) -> torch.Tensor:
    return like(self)


def _infer_backward(
    grad: torch.Tensor, self: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, *_: Any
) -> Any:
    return like(self), like(scale), like(zero_point)


@lowering("fake_quantize_per_tensor_affine_cachemask", infer=_infer)
def fake_quantize_per_tensor(self, scale, zero_point, quant_min, quant_max):
    return _fake_quantize(self, scale, zero_point, quant_min, quant_max)[:2]


@lowering("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", infer=_infer)
def fake_quantize_per_tensor_qparams(self, scale, zero_point, fake_quant_enabled, quant_min, quant_max):
    values, mask, _ = _fake_quantize(self, scale.reshape(()), zero_point.reshape(()), quant_min, quant_max)
    enabled = fake_quant_enabled.reshape(()) != 0
    return jnp.where(enabled, values, self.astype(values.dtype)), mask | ~enabled


@lowering("fake_quantize_per_channel_affine_cachemask", infer=_infer)
def fake_quantize_per_channel(self, scale, zero_point, axis, quant_min, quant_max):
    scale, zero_point = (_along(v, axis, self.ndim) for v in (scale, zero_point))
    return _fake_quantize(self, scale, zero_point, quant_min, quant_max)[:2]


@composed("dequantize.self")
def dequantize(self: torch.Tensor) -> torch.Tensor:
    return self.float()


def _rounded(zero_point: Any, low: int, high: int) -> Any:
    return jnp.clip(jnp.round(zero_point), low, high)


@lowering("_fake_quantize_learnable_per_tensor_affine", infer=_infer_one)
def learnable_per_tensor(self, scale, zero_point, quant_min, quant_max, grad_factor=1.0):
    zero_point = _rounded(zero_point.reshape(()), quant_min, quant_max)
    return _fake_quantize(self, scale.reshape(()), zero_point, quant_min, quant_max)[0]


@lowering("_fake_quantize_learnable_per_channel_affine", infer=_infer_one)
def learnable_per_channel(self, scale, zero_point, axis, quant_min, quant_max, grad_factor=1.0):
    zero_point = _along(_rounded(zero_point, quant_min, quant_max), axis, self.ndim)
    return _fake_quantize(self, _along(scale, axis, self.ndim), zero_point, quant_min, quant_max)[0]


@lowering("_fake_quantize_learnable_per_tensor_affine_backward", infer=_infer_backward)
def learnable_per_tensor_backward(grad, self, scale, zero_point, quant_min, quant_max, grad_factor=1.0):
    flat = grad.reshape(1, -1), self.reshape(1, -1)
    dx, dscale, dzero = _learnable_backward(*flat, scale, zero_point, 0, quant_min, quant_max, grad_factor)
    return dx.reshape(self.shape), dscale.reshape(scale.shape), dzero.reshape(zero_point.shape)


@lowering("_fake_quantize_learnable_per_channel_affine_backward", infer=_infer_backward)
def learnable_per_channel_backward(grad, self, scale, zero_point, axis, quant_min, quant_max, grad_factor=1.0):
    return _learnable_backward(grad, self, scale, zero_point, axis, quant_min, quant_max, grad_factor)


def _learnable_backward(
    grad: Any, x: Any, scale: Any, zero_point: Any, axis: int, low: int, high: int, factor: Any
) -> tuple[Any, Any, Any]:
    grad, x = opmath(grad), opmath(x)
    step, zero = _along(scale, axis, x.ndim), _along(_rounded(zero_point, low, high), axis, x.ndim)
    values, mask, quantized = _fake_quantize(x, step, zero, low, high)
    clipped = jnp.where(quantized < low, low - zero, high - zero)
    by_scale = grad * jnp.where(mask, (values - x) / step, clipped) * jnp.asarray(factor, x.dtype)
    by_zero = jnp.where(mask, 0, -grad * step) * jnp.asarray(factor, x.dtype)
    others = tuple(d for d in range(x.ndim) if d != axis % x.ndim)
    return jnp.where(mask, grad, 0), by_scale.sum(others), by_zero.sum(others)
