"""Losses over classes, from scores and class indices, and their gradients.

`reduction` is 0 for none, 1 for the mean, 2 for the sum.
"""

from __future__ import annotations

from typing import Any

import torch

from torchtpu.ops.registry import jnp, like, lowering, opmath


def _picked(target: Any, classes: int, ignore_index: int, ctx: Any) -> tuple[Any, Any]:
    """(the class to read at each place, whether the place counts)."""
    counts = target != ignore_index
    ctx.check(~counts | ((target >= 0) & (target < classes)), "Target is out of bounds.", IndexError)
    return jnp.where(counts, target, 0), counts


def _weights(weight: Any, index: Any, counts: Any, dtype: Any) -> Any:
    each = jnp.ones((), dtype) if weight is None else jnp.take(weight.astype(dtype), index, mode="clip")
    return jnp.where(counts, each, 0)


def _nll(self: Any, target: Any, weight: Any, reduction: int, ignore_index: int, axis: int, ctx: Any) -> Any:
    x = opmath(self)
    index, counts = _picked(target, x.shape[axis], ignore_index, ctx)
    each = _weights(weight, index, counts, x.dtype)
    # A place that does not count adds nothing, even where the score is NaN or infinite.
    losses = jnp.where(counts, -_scores_of(x, index, axis, ctx) * each, 0)
    total = each.sum()
    if reduction == 0 and x.ndim > 1:  # PyTorch has no total then
        return losses, jnp.zeros((), x.dtype)
    if reduction == 0:
        return losses, total
    return losses.sum() / total if reduction == 1 else losses.sum(), total


def _scores_of(x: Any, index: Any, axis: int, ctx: Any) -> Any:
    """The score of one class at each place."""
    if ctx.platform == "tpu":  # there a gather is half a dozen kernels, and has all scores stored for it
        return jnp.where(_is_class(x, index, axis), x, 0).sum(axis)
    return jnp.squeeze(jnp.take_along_axis(x, jnp.expand_dims(index, axis), axis, mode="clip"), axis)


def _is_class(x: Any, index: Any, axis: int) -> Any:
    classes = jnp.arange(x.shape[axis], dtype=index.dtype).reshape([-1 if i == axis else 1 for i in range(x.ndim)])
    return classes == jnp.expand_dims(index, axis)


def _nll_backward(
    grad: Any, self: Any, target: Any, weight: Any, reduction: int, ignore_index: int, total: Any, axis: int, ctx: Any
) -> Any:
    x, grad = opmath(self), opmath(grad)
    index, counts = _picked(target, x.shape[axis], ignore_index, ctx)
    each = _weights(weight, index, counts, x.dtype)
    grad = grad / total.astype(grad.dtype) if reduction == 1 else grad
    slope = jnp.expand_dims(jnp.where(counts, -each * grad, 0), axis)
    # A comparison with every class, not a scatter: it fuses with the log_softmax gradient that follows.
    return jnp.where(_is_class(x, index, axis), slope, 0)


@lowering("nll_loss_forward")
def nll_loss(self, target, weight, reduction, ignore_index, *, ctx):
    target = target.reshape(self.shape[:-1])  # one sample may come with a target of shape (1,)
    return _nll(self, target, weight, reduction, ignore_index, self.ndim - 1, ctx)


@lowering("nll_loss_backward")
def nll_loss_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight, *, ctx):
    target = target.reshape(self.shape[:-1])
    grad = grad_output.reshape(target.shape) if reduction == 0 else grad_output
    return _nll_backward(grad, self, target, weight, reduction, ignore_index, total_weight, self.ndim - 1, ctx)


def _infer_nll_loss2d(self: torch.Tensor, target: torch.Tensor, *rest: Any) -> Any:
    if target.dim() != 3 or self.dim() != 4 or target.shape != (self.shape[0], *self.shape[2:]):
        raise RuntimeError(f"size mismatch (got input: {list(self.shape)} , target: {list(target.shape)}")
    return torch.ops.aten.nll_loss2d_forward(self, target, *rest)


@lowering("nll_loss2d_forward", infer=_infer_nll_loss2d)
def nll_loss2d(self, target, weight, reduction, ignore_index, *, ctx):
    return _nll(self, target, weight, reduction, ignore_index, 1, ctx)


@lowering("nll_loss2d_backward")
def nll_loss2d_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight, *, ctx):
    return _nll_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight, 1, ctx)


def _reduced(losses: Any, reduction: int, ctx: Any) -> Any:
    # Unreduced, one sample's loss has shape () or (1,), depending on the op.
    return losses.reshape(ctx.results[0][0]) if reduction == 0 else losses.mean() if reduction == 1 else losses.sum()


def _reduction_slope(grad: Any, reduction: int, count: int) -> Any:
    """The gradient of each of `count` losses, as a column."""
    grad = opmath(grad)
    return grad.reshape(-1, 1) / (count if reduction == 1 else 1)


def _margins(self: Any, target: Any, margin: Any, weight: Any, ctx: Any) -> tuple[Any, Any, Any]:
    """(how far each class is inside the margin, whether it is another class than the target, the target's weight)."""
    x = jnp.atleast_2d(opmath(self))
    target = target.reshape(-1, 1)
    ctx.check((target >= 0) & (target < x.shape[1]), "target out of range", RuntimeError)
    other = jnp.arange(x.shape[1]) != target
    inside = jnp.asarray(margin, x.dtype) - jnp.take_along_axis(x, target, 1, mode="clip") + x
    each = jnp.ones((), x.dtype) if weight is None else jnp.take(opmath(weight), target, mode="clip")
    return jnp.where(other & (inside > 0), inside, 0), other, each


def _infer_multi_margin(self: torch.Tensor, target: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    # PyTorch's shape function gives one sample's loss the shape (1,), its kernels give it the target's.
    made: torch.Tensor = torch.ops.aten.multi_margin_loss(self, target, *rest, **named)
    return made.reshape(()) if self.dim() < 2 and target.dim() == 0 else made


def _infer_multilabel_margin(self: torch.Tensor, target: torch.Tensor, reduction: int) -> tuple[torch.Tensor, ...]:
    made, is_target = torch.ops.aten.multilabel_margin_loss_forward(self, target, reduction)
    return (made.reshape(()) if self.dim() < 2 else made), is_target


@lowering("multi_margin_loss", structural={"p": None}, infer=_infer_multi_margin)
def multi_margin_loss(self, target, p=1, margin=1, weight=None, reduction=1, *, ctx):
    inside, _, each = _margins(self, target, margin, weight, ctx)
    losses = ((inside if p == 1 else jnp.square(inside)) * each).sum(1) / inside.shape[1]
    return _reduced(losses, reduction, ctx)


def _like_scores(grad_output: torch.Tensor, self: torch.Tensor, *_: Any) -> torch.Tensor:
    return like(self, memory_format=torch.contiguous_format)


@lowering("multi_margin_loss_backward", structural={"p": None}, infer=_like_scores)
def multi_margin_loss_backward(grad_output, self, target, p, margin, weight=None, reduction=1, *, ctx):
    inside, other, each = _margins(self, target, margin, weight, ctx)
    slope = each * (jnp.where(inside > 0, 1, 0) if p == 1 else 2 * inside) / inside.shape[1]
    slope = slope * _reduction_slope(grad_output, reduction, inside.shape[0])
    return jnp.where(other, slope, -slope.sum(1, keepdims=True)).reshape(self.shape)


def _label_rows(self: Any, target: Any, ctx: Any) -> tuple[Any, Any, Any, Any]:
    """(scores, targets, which entries of `target` stand before its first -1, the classes they name) as rows."""
    x, target = jnp.atleast_2d(opmath(self)), jnp.atleast_2d(target)
    ctx.check((target >= -1) & (target < x.shape[1]), "target out of range", RuntimeError)
    listed = jnp.cumsum(target < 0, 1) == 0
    named = (listed[:, :, None] & (target[:, :, None] == jnp.arange(x.shape[1]))).any(1)
    return x, jnp.where(listed, target, 0), listed, named


def _pair_margins(x: Any, target: Any, listed: Any, named: Any) -> Any:
    """How far class j is inside the margin of the k-th target: (rows, k, j), 0 where the pair does not count."""
    inside = 1 - jnp.take_along_axis(x, target, 1, mode="clip")[:, :, None] + x[:, None, :]
    return jnp.where(listed[:, :, None] & ~named[:, None, :] & (inside > 0), inside, 0)


@lowering("multilabel_margin_loss_forward", infer=_infer_multilabel_margin)
def multilabel_margin_loss(self, target, reduction, *, ctx):
    x, rows, listed, named = _label_rows(self, target, ctx)
    losses = _pair_margins(x, rows, listed, named).sum((1, 2)) / x.shape[1]
    return _reduced(losses, reduction, ctx), named.reshape(target.shape)


@lowering("multilabel_margin_loss_backward", infer=_like_scores)
def multilabel_margin_loss_backward(grad_output, self, target, reduction, is_target, *, ctx):
    x, rows, listed, named = _label_rows(self, target, ctx)
    active = (_pair_margins(x, rows, listed, named) > 0).astype(x.dtype)
    targets = (rows[:, :, None] == jnp.arange(x.shape[1])) & listed[:, :, None]
    slope = active.sum(1) - jnp.where(targets, active.sum(2)[:, :, None], 0).sum(1)
    return (slope / x.shape[1] * _reduction_slope(grad_output, reduction, x.shape[0])).reshape(self.shape)
