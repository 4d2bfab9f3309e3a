"""Connectionist temporal classification: losses and gradients from log probabilities and labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchtpu.ops.registry import composed, jax, jnp, lax, like, lowering


def _labels(targets: Any, target_lengths: Any, width: int, blank: int) -> Any:
    """(batch, width): the labels of each sample with blanks around them, from rows or from one concatenated row."""
    lengths = jnp.asarray(target_lengths, jnp.int32)
    place = jnp.arange(width) // 2
    if targets.ndim == 1:
        start = jnp.cumsum(lengths) - lengths
        index = jnp.minimum(start[:, None] + place, max(targets.shape[0] - 1, 0))
        found = targets[index] if targets.shape[0] else jnp.full(index.shape, blank)
    elif targets.shape[1]:
        found = jnp.take(targets, jnp.minimum(place, targets.shape[1] - 1), 1)
    else:
        found = jnp.full((targets.shape[0], width), blank)
    is_label = (jnp.arange(width) % 2 == 1) & (place < lengths[:, None])
    return jnp.where(is_label, found, blank).astype(jnp.int32)


def _log_sum(*terms: Any) -> Any:
    """log(sum(exp(terms))), -inf where all are."""
    top = lax.stop_gradient(jnp.max(jnp.stack(terms), 0))
    none = top == -jnp.inf
    safe = jnp.where(none, 0, top)
    total = sum(jnp.exp(t - safe) for t in terms)
    # The inner `where` keeps the gradient of an empty sum 0 instead of NaN.
    return jnp.where(none, -jnp.inf, jnp.log(jnp.where(none, 1, total)) + safe)


def _shifted(x: Any, by: int) -> Any:
    return lax.pad(x, jnp.asarray(-jnp.inf, x.dtype), ((0, 0, 0), (by, -by, 0)))


def _batched(log_probs: Any, targets: Any) -> tuple[Any, Any]:
    if log_probs.ndim == 2:
        return log_probs[:, None], targets.reshape(1, -1)
    return log_probs, targets


def _emitted(log_probs: Any, labels: Any) -> Any:
    """The log probability of each label at each step: (time, batch, width)."""
    return jnp.take_along_axis(log_probs, labels[None], 2)


def _walk(emitted: Any, labels: Any, start: Any) -> Any:
    """The log probability of every prefix of `labels` after each step: (batch, time, width)."""
    same = jnp.pad(labels[:, 2:] == labels[:, :-2], ((0, 0), (2, 0)), constant_values=True)[:, : labels.shape[1]]

    def step(alpha: Any, row: Any) -> tuple[Any, Any]:
        skip = jnp.where(same, -jnp.inf, _shifted(alpha, 2))
        alpha = _log_sum(alpha, _shifted(alpha, 1), skip) + row
        return alpha, alpha

    # Slices, not indices, whose gradients are scatters where sizes are not known.
    first = jnp.where(start, lax.index_in_dim(emitted, 0, keepdims=False), -jnp.inf)
    _, others = lax.scan(step, first, lax.slice_in_dim(emitted, 1, emitted.shape[0]))
    return jnp.concatenate([first[None], others]).swapaxes(0, 1)


def _at(x: Any, place: Any) -> Any:
    """What each sample has at its place of dimension 1; a choice, whose gradient is one too, and no scatter."""
    here = jnp.arange(x.shape[1]) == place[:, None]
    return jnp.where(here.reshape(here.shape + (1,) * (x.ndim - 2)), x, 0).sum(1)


def _ends(alpha: Any, input_lengths: Any, target_lengths: Any) -> Any:
    """The log probability of each whole label row."""
    times, lengths = (jnp.asarray(v, jnp.int32) for v in (input_lengths, target_lengths))
    last = _at(alpha, jnp.maximum(times - 1, 0))
    final = _at(last, 2 * lengths)
    before = _at(last, jnp.maximum(2 * lengths - 1, 0))
    total = _log_sum(final, jnp.where(lengths > 0, before, -jnp.inf))
    return jnp.where(times > 0, total, jnp.where(lengths == 0, 0, -jnp.inf))


def _infer(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    # The lengths are values of the device here: the longest label row is bounded by the targets' width.
    batch = log_probs.shape[1] if log_probs.dim() == 3 else 1
    width = 2 * targets.shape[-1] + 1
    alpha = log_probs.new_empty((batch, log_probs.shape[0], width))
    return (log_probs.new_empty(batch) if log_probs.dim() == 3 else log_probs.new_empty(())), alpha


def _on_device(lengths: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int64).to(like.device)


@composed("_ctc_loss")
def ctc_loss_of_ints(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths are values of the device: batches differ in them, and share programs."""
    scores, labels = (torch.empty(each.shape, dtype=each.dtype, device="meta") for each in (log_probs, targets))
    torch.ops.aten._ctc_loss(scores, labels, input_lengths, target_lengths, blank, zero_infinity)
    lengths = (_on_device(each, log_probs) for each in (input_lengths, target_lengths))
    loss, alpha = torch.ops.aten._ctc_loss.Tensor(log_probs, targets, *lengths, blank, zero_infinity)
    return loss, alpha


@composed("_ctc_loss_backward")
def ctc_loss_backward_of_ints(
    grad: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    *others: Any,
) -> torch.Tensor:
    lengths = (_on_device(each, log_probs) for each in (input_lengths, target_lengths))
    made: torch.Tensor = torch.ops.aten._ctc_loss_backward.Tensor(grad, log_probs, targets, *lengths, *others)
    return made


@lowering("_ctc_loss.Tensor", infer=_infer)
def ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False, *, ctx):
    shape, width = ctx.results[0][0], ctx.results[1][0][2]
    log_probs, targets = _batched(log_probs, targets)
    labels = _labels(targets, target_lengths, width, blank)
    lengths = jnp.asarray(target_lengths, jnp.int32).reshape(-1, 1)
    start = (jnp.arange(width) == 0) | ((jnp.arange(width) == 1) & (lengths > 0))
    alpha = _walk(_emitted(log_probs, labels), labels, start)
    return -_ends(alpha, jnp.reshape(jnp.asarray(input_lengths), -1), lengths[:, 0]).reshape(shape), alpha


def _like_scores(grad: torch.Tensor, log_probs: torch.Tensor, *_: Any) -> torch.Tensor:
    return like(log_probs, memory_format=torch.contiguous_format)


@lowering("_ctc_loss_backward.Tensor", infer=_like_scores)
def ctc_loss_backward(
    grad, log_probs, targets, input_lengths, target_lengths, neg_log_likelihood, log_alpha, blank, zero_infinity=False
):
    shape = log_probs.shape
    log_probs, targets = _batched(log_probs, targets)
    times = jnp.reshape(jnp.asarray(input_lengths, jnp.int32), -1)
    lengths = jnp.reshape(jnp.asarray(target_lengths, jnp.int32), -1)
    loss = neg_log_likelihood.reshape(-1)
    width = log_alpha.shape[2]
    labels = _labels(targets, lengths, width, blank)

    def log_likelihood(emitted: Any) -> Any:
        start = (jnp.arange(width) == 0) | ((jnp.arange(width) == 1) & (lengths[:, None] > 0))
        return jnp.where(jnp.isfinite(loss), _ends(_walk(emitted, labels, start), times, lengths), 0).sum()

    # PyTorch's gradient is the one through log_softmax: the probabilities less how often each class was used.
    each = jax.grad(log_likelihood)(_emitted(log_probs, labels))
    is_class = labels[:, :, None] == jnp.arange(log_probs.shape[2])
    used = jnp.where(is_class, each[..., None], 0).sum(2)
    made = (jnp.exp(log_probs) - used) * grad.reshape(1, -1, 1)
    made = jnp.where((loss == jnp.inf)[None, :, None], 0 if zero_infinity else jnp.nan, made)
    return jnp.where(jnp.arange(log_probs.shape[0])[:, None, None] < times[:, None], made, 0).reshape(shape)
