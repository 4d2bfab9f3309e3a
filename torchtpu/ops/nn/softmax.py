"""Softmax and its relatives along one dimension."""

from __future__ import annotations

from typing import Any

import torch

from torchtpu.ops.registry import jax_dtype, jnp, like, lowering, opmath


@lowering("_softmax")
def softmax(self, dim, half_to_float):
    x = opmath(self)
    if self.ndim == 0:
        return jnp.where(jnp.isfinite(x), jnp.ones_like(x), jnp.nan)
    weight = jnp.exp(x - x.max(dim, keepdims=True, initial=-jnp.inf))
    return weight / weight.sum(dim, keepdims=True)


@lowering("_log_softmax")
def log_softmax(self, dim, half_to_float):
    x = opmath(self)
    if self.ndim == 0:
        return jnp.where(jnp.isfinite(x), jnp.zeros_like(x), jnp.nan)
    shifted = x - x.max(dim, keepdims=True, initial=-jnp.inf)
    return shifted - jnp.log(jnp.exp(shifted).sum(dim, keepdims=True))


@lowering("_softmax_backward_data")
def softmax_backward(grad_output, output, dim, input_dtype):
    grad, output = opmath(grad_output), opmath(output)
    weighted = grad * output
    return weighted - output * _sum(weighted, dim)


@lowering("_log_softmax_backward_data")
def log_softmax_backward(grad_output, output, dim, input_dtype):
    grad = opmath(grad_output)
    return grad - jnp.exp(opmath(output)) * _sum(grad, dim)


def _sum(x: Any, dim: int) -> Any:
    return x.sum(dim, keepdims=True) if x.ndim else x


def _infer_safe(self: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    if not -max(self.ndim, 1) <= dim < max(self.ndim, 1):
        raise IndexError(dim)
    return like(self, dtype=dtype, memory_format=torch.contiguous_format)


@lowering("_safe_softmax", infer=_infer_safe)
def safe_softmax(self, dim, dtype=None):
    x = opmath(self if dtype is None else self.astype(jax_dtype(dtype)))
    if self.ndim == 0:
        return jnp.where(x == -jnp.inf, 0.0, softmax(x, dim, False))
    # A row of -inf alone gives zeros instead of NaNs.
    masked = jnp.all(x == -jnp.inf, dim, keepdims=True)
    return jnp.where(masked, 0, softmax(x, dim, False))


def _infer_masked(
    self: torch.Tensor, mask: torch.Tensor, dim: int | None = None, mask_type: int | None = None
) -> torch.Tensor:
    return like(self, memory_format=torch.contiguous_format)


def _infer_masked_backward(
    grad_output: torch.Tensor, output: torch.Tensor, mask: torch.Tensor, dim: int | None = None
) -> torch.Tensor:
    return like(grad_output, memory_format=torch.contiguous_format)


@lowering("_masked_softmax", infer=_infer_masked)
def masked_softmax(self, mask, dim=None, mask_type=None):
    # True means left out. Type 0 is an (L, L) mask, type 1 a (batch, L) one, type 2 has the scores' shape.
    if mask_type == 1 and mask.shape != self.shape:
        mask = mask.reshape(mask.shape[0], *[1] * (self.ndim - 2), mask.shape[1])
    mask = jnp.broadcast_to(mask, self.shape)
    dim = -1 if dim is None else dim
    x = jnp.where(mask, -jnp.inf, opmath(self))
    top = jnp.where(jnp.all(mask, dim, keepdims=True), 0, x.max(dim, keepdims=True))
    weight = jnp.exp(x - top)
    return weight / weight.sum(dim, keepdims=True)


@lowering("_masked_softmax_backward", infer=_infer_masked_backward)
def masked_softmax_backward(grad_output, output, mask, dim=None):
    mask = jnp.broadcast_to(mask, output.shape)
    grad, output = (jnp.where(mask, 0, opmath(a)) for a in (grad_output, output))
    dim = -1 if dim is None else dim
    return output * (grad - (grad * output).sum(dim, keepdims=True))
