"""Losses that compare predictions and targets element by element, and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from torchtpu.ops.math.pointwise import computed
from torchtpu.ops.registry import Context, as_dtype, jax, jnp, like, lowering

NONE, MEAN = 0, 1  # ATen's Reduction; 2 is the sum


def reduced(loss: Any, reduction: int) -> Any:
    """`loss` under an ATen reduction; the mean of nothing is NaN."""
    return loss if reduction == NONE else jnp.mean(loss) if reduction == MEAN else jnp.sum(loss)


def _shared(grad: Any, slope: Any, reduction: int) -> Any:
    """The gradient of a reduced loss: `slope` scaled by what arrives."""
    return grad * slope / (slope.size if reduction == MEAN else 1)


def _computed(ctx: Context, *values: Any) -> Any:
    return (None if v is None else as_dtype(v, computed(ctx)) for v in values)


def _infer_huber_loss(
    self: torch.Tensor, target: torch.Tensor, reduction: int = MEAN, delta: float = 1.0
) -> torch.Tensor:
    """A loss of the input's dtype, whatever the target's is."""
    if delta <= 0:
        raise RuntimeError("delta is not positive")  # which PyTorch's CPU kernel says in its own words
    shape = torch.broadcast_shapes(self.shape, target.shape)
    if reduction != NONE:
        return self.new_empty(())
    return like(self) if shape == self.shape else self.new_empty(shape)


def _infer_gradient(grad: torch.Tensor, self: torch.Tensor, target: torch.Tensor, *rest: Any) -> torch.Tensor:
    if self.dtype != target.dtype:
        raise RuntimeError("the target's dtype is not the input's")  # as above
    shape = torch.broadcast_shapes(grad.shape, self.shape, target.shape)
    return like(self) if shape == self.shape else self.new_empty(shape)


def _infer_in_place(self: torch.Tensor, target: torch.Tensor, reduction: int = MEAN) -> torch.Tensor:
    """A loss that PyTorch computes in memory like the input's."""
    is_whole = not (self.is_floating_point() or self.is_complex())
    if is_whole or torch.broadcast_shapes(self.shape, target.shape) != self.shape:
        raise RuntimeError("the input cannot hold the loss")  # as above
    return self.new_empty(()) if reduction != NONE else like(self)


def _infer_of_one_dtype(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
) -> torch.Tensor:
    if self.dtype != target.dtype or self.shape != target.shape:
        raise RuntimeError("the target's dtype or shape is not the input's")  # as above
    return self.new_empty(()) if reduction != NONE else like(self)


@lowering("mse_loss")
def mse_loss(self, target, reduction=MEAN, *, ctx):
    x, y = _computed(ctx, self, target)
    return reduced(abs((x - y) * (x - y)) if jnp.iscomplexobj(x) else (x - y) * (x - y), reduction)


def _infer_mse_loss_backward(
    grad_output: torch.Tensor, self: torch.Tensor, target: torch.Tensor, reduction: int
) -> Any:
    return self.new_empty(torch.broadcast_tensors(self, target, grad_output)[0].shape)


@lowering("mse_loss_backward", infer=_infer_mse_loss_backward)
def mse_loss_backward(grad_output, self, target, reduction, *, ctx):
    grad, x, y = _computed(ctx, grad_output, self, target)
    return _shared(grad, 2 * (x - y), reduction)


@lowering("smooth_l1_loss", structural={"beta": (0.0,)}, lifts=True)
def smooth_l1_loss(self, target, reduction=MEAN, beta=1.0, *, ctx):
    x, y = _computed(ctx, self, target)
    gap = jnp.abs(x - y)
    if isinstance(beta, float) and beta == 0:
        return reduced(gap, reduction)
    return reduced(jnp.where(gap < beta, 0.5 * gap * gap / beta, gap - 0.5 * beta), reduction)


def _infer_smooth_l1_loss_backward(
    grad: torch.Tensor, self: torch.Tensor, target: torch.Tensor, *rest: Any
) -> torch.Tensor:
    if not grad.dtype == self.dtype == target.dtype:
        return torch.ops.aten.smooth_l1_loss_backward(grad, self, target, *rest)
    return self.new_empty(torch.broadcast_shapes(grad.shape, self.shape, target.shape))


@lowering("smooth_l1_loss_backward", structural={"beta": (0.0,)}, lifts=True, infer=_infer_smooth_l1_loss_backward)
def smooth_l1_loss_backward(grad_output, self, target, reduction, beta, *, ctx):
    grad, x, y = _computed(ctx, grad_output, self, target)
    gap = x - y
    if isinstance(beta, float) and beta == 0:
        return _shared(grad, jnp.sign(gap), reduction)
    return _shared(grad, jnp.where(gap <= -beta, -1, jnp.where(gap >= beta, 1, gap / beta)), reduction)


@lowering("huber_loss", lifts=True, infer=_infer_huber_loss)
def huber_loss(self, target, reduction=MEAN, delta=1.0, *, ctx):
    x, y = _computed(ctx, self, target)
    gap = jnp.abs(x - y)
    return reduced(jnp.where(gap < delta, 0.5 * gap * gap, delta * (gap - 0.5 * delta)), reduction)


@lowering("huber_loss_backward", lifts=True, infer=_infer_gradient)
def huber_loss_backward(grad_output, self, target, reduction, delta, *, ctx):
    grad, x, y = _computed(ctx, grad_output, self, target)
    return _shared(grad, jnp.clip(x - y, -delta, delta), reduction)


@lowering("binary_cross_entropy", infer=_infer_of_one_dtype)
def binary_cross_entropy(self, target, weight=None, reduction=MEAN, *, ctx):
    x, y, weight = _computed(ctx, self, target, weight)
    ctx.check((x >= 0) & (x <= 1), "all elements of input should be between 0 and 1", RuntimeError)
    ctx.check((y >= 0) & (y <= 1), "all elements of target should be between 0 and 1", RuntimeError)
    loss = (y - 1) * jnp.maximum(jnp.log1p(-x), -100) - y * jnp.maximum(jnp.log(x), -100)
    return reduced(loss if weight is None else loss * weight, reduction)


@lowering("binary_cross_entropy_backward")
def binary_cross_entropy_backward(grad_output, self, target, weight=None, reduction=MEAN, *, ctx):
    grad, x, y, weight = _computed(ctx, grad_output, self, target, weight)
    slope = (x - y) / jnp.maximum((1 - x) * x, 1e-12)
    return _shared(grad, slope if weight is None else slope * weight, reduction)


def _infer_cross_entropy_with_logits(
    self: torch.Tensor, target: torch.Tensor, weight: Any = None, pos_weight: Any = None, reduction: int = MEAN
) -> torch.Tensor:
    """What the meta kernel says, which is many ops in Python."""
    is_alike = self.is_floating_point() and self.dtype == target.dtype and self.shape == target.shape
    if reduction == NONE or not is_alike or weight is not None or pos_weight is not None:
        return torch.ops.aten.binary_cross_entropy_with_logits(self, target, weight, pos_weight, reduction)
    return self.new_empty(())


@lowering("binary_cross_entropy_with_logits", infer=_infer_cross_entropy_with_logits)
def binary_cross_entropy_with_logits(self, target, weight=None, pos_weight=None, reduction=MEAN, *, ctx):
    x, y, weight, pos_weight = _computed(ctx, self, target, weight, pos_weight)
    log_sigmoid = jax.nn.log_sigmoid(x)
    if pos_weight is not None:
        log_sigmoid = log_sigmoid * ((pos_weight - 1) * y + 1)
    loss = (1 - y) * x - log_sigmoid
    return reduced(loss if weight is None else loss * weight, reduction)


@lowering("soft_margin_loss", infer=_infer_in_place)
def soft_margin_loss(self, target, reduction=MEAN, *, ctx):
    x, y = _computed(ctx, self, target)
    return reduced(jnp.log1p(jnp.exp(-x * y)), reduction)


@lowering("soft_margin_loss_backward")
def soft_margin_loss_backward(grad_output, self, target, reduction, *, ctx):
    grad, x, y = _computed(ctx, grad_output, self, target)
    return _shared(grad, -y * jax.nn.sigmoid(-x * y), reduction)
