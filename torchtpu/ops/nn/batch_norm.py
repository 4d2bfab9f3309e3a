"""Batch norm of (batch, channels, *space), alone and across devices, with updated statistics."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._prims_common import get_computation_dtype

from torchtpu.ops.nn.norm import refuse_mixed
from torchtpu.ops.registry import jnp, lax, like, lowering, opmath, suggest_memory_format
from torchtpu.ops.sizes import as_number, is_known

_STATS = ("running_mean", "running_var")


def _over(x: Any) -> tuple[int, ...]:
    """Every dimension but the channels."""
    return (0, *range(2, x.ndim))


def _wide(v: Any, x: Any) -> Any:
    """A value per channel, to be combined with `x`."""
    return v.astype(x.dtype).reshape(1, -1, *[1] * (x.ndim - 2))


def _moments(x: Any) -> tuple[Any, Any]:
    mean = x.mean(_over(x))
    return mean, jnp.square(x - _wide(mean, x)).mean(_over(x))


def _affine(x: Any, mean: Any, rstd: Any, weight: Any, bias: Any) -> Any:
    made = (x - _wide(mean, x)) * _wide(rstd if weight is None else rstd * weight.astype(rstd.dtype), x)
    return made if bias is None else made + _wide(bias, x)


def _rstd(variance: Any, eps: Any) -> Any:
    return lax.rsqrt(variance + jnp.asarray(eps, variance.dtype))


def _moved(running: Any, new: Any, momentum: Any) -> Any:
    if running is None:
        return None
    momentum = jnp.asarray(momentum, new.dtype)
    return (1 - momentum) * running.astype(new.dtype) + momentum * new


def _unbiasing(count: Any, dtype: Any) -> Any:
    """What makes a mean of so many squares a variance that is not biased."""
    if is_known(count):
        return count / max(count - 1, 1)
    many = as_number(count, jnp.float64)
    return (many / jnp.maximum(many - 1, 1)).astype(dtype)


def _normalize(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: Any, eps: Any
) -> Any:
    """(output, mean, rstd, running mean, running variance) of one call."""
    x = opmath(input)
    if not training:
        mean, rstd = opmath(running_mean), _rstd(opmath(running_var), eps)
        return _affine(x, mean, rstd, weight, bias), mean, rstd, running_mean, running_var
    mean, variance = _moments(x)
    rstd = _rstd(variance, eps)
    count = math.prod(x.shape[i] for i in _over(x))
    unbiased = variance * _unbiasing(count, variance.dtype)
    moved = _moved(running_mean, mean, momentum), _moved(running_var, unbiased, momentum)
    return _affine(x, mean, rstd, weight, bias), mean, rstd, *moved


def _infer_batch_norm(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: Any, eps: Any
) -> tuple[torch.Tensor, ...]:
    given = weight, bias, running_mean, running_var
    made = _laid_out(input, input, given)
    refuse_mixed(input, *given)
    if any(t is not None and t.dim() != 1 for t in given):
        raise RuntimeError("weight, bias and statistics of batches are expected to have 1 dimension")
    lacks_statistics = not training and (running_mean is None or running_var is None)
    if made is None or lacks_statistics or (training and input.numel() == input.shape[1]):
        arguments = input, weight, bias, running_mean, running_var, training, momentum, eps
        return torch.ops.aten.native_batch_norm(*arguments)
    dtype = get_computation_dtype(input.dtype)
    return made, *(input.new_empty(input.shape[1], dtype=dtype) for _ in range(2))


def _laid_out(grad: torch.Tensor, input: torch.Tensor, per_channel: Any) -> torch.Tensor | None:
    """What is made of each element of both; None where PyTorch's meta function has to say how it lies, or what is
    wrong."""
    dtypes = input.dtype, get_computation_dtype(input.dtype)
    is_usual = (
        input.dim() >= 2
        and input.numel() > 0
        and input.is_floating_point()
        and grad.shape == input.shape
        and grad.dtype == input.dtype
        and all(t is None or (t.shape == (input.shape[1],) and t.dtype in dtypes) for t in per_channel)
    )
    if not is_usual:
        return None
    if input.is_contiguous() and grad.is_contiguous():
        return input.new_empty(input.shape)
    memory_format = suggest_memory_format(input)
    is_alike = min(input.shape) > 1 and grad.stride() == input.stride()
    return like(input) if is_alike and input.is_contiguous(memory_format=memory_format) else None


@lowering("native_batch_norm", mutates=_STATS, infer=_infer_batch_norm)
@lowering("_native_batch_norm_legit")
def native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, *, ctx):
    made, mean, rstd, *moved = _normalize(input, weight, bias, running_mean, running_var, training, momentum, eps)
    if ctx.results[1][0] == (0,):  # what PyTorch saves in eval mode: nothing on CPU, the statistics on other devices
        mean = rstd = jnp.zeros((0,), mean.dtype)
    return made, mean, rstd, *moved


@lowering("_native_batch_norm_legit.no_stats")
def native_batch_norm_no_stats(input, weight, bias, training, momentum, eps):
    return _normalize(input, weight, bias, None, None, True, momentum, eps)[:3]


@lowering("_native_batch_norm_legit_no_training")
def native_batch_norm_no_training(input, weight, bias, running_mean, running_var, momentum, eps, *, ctx):
    return native_batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps, ctx=ctx)[:3]


@lowering("_batch_norm_with_update")
def batch_norm_with_update(input, weight, bias, running_mean, running_var, momentum, eps):
    made, mean, rstd, *moved = _normalize(input, weight, bias, running_mean, running_var, True, momentum, eps)
    return made, mean, rstd, jnp.zeros((0,), jnp.uint8), *moved


@lowering("_batch_norm_no_update")
def batch_norm_no_update(input, weight, bias, running_mean, running_var, momentum, eps, *, ctx):
    training = running_mean is None
    made, mean, rstd, *_ = native_batch_norm(
        input, weight, bias, running_mean, running_var, training, momentum, eps, ctx=ctx
    )
    return made, mean, rstd, jnp.zeros((0,), jnp.uint8)


def _infer_batch_norm_backward(
    grad_out: Any, input: Any, weight: Any, running_mean: Any, running_var: Any, save_mean: Any, save_invstd: Any,
    train: bool, eps: Any, output_mask: Any, reserve: Any = None,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """PyTorch's own promises a gradient of the input that nobody asked for."""
    used = (save_mean, save_invstd) if train else (running_mean, running_var)
    made = None if any(t is None for t in used) else _laid_out(grad_out, input, (weight, *used))
    if made is None:
        arguments = grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask
        made = torch.ops.aten.native_batch_norm_backward(*arguments)[0]
    dtype = input.dtype if weight is None else weight.dtype
    per_channel = (input.new_empty(input.shape[1], dtype=dtype) if wanted else None for wanted in output_mask[1:])
    return (made if output_mask[0] else None), *per_channel


@lowering("native_batch_norm_backward", infer=_infer_batch_norm_backward)
def native_batch_norm_backward(
    grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask
):
    grad, x = opmath(grad_out), opmath(input)
    if train:
        mean, rstd = opmath(save_mean), opmath(save_invstd)
    else:
        mean, rstd = opmath(running_mean), _rstd(opmath(running_var), eps)
    normal = (x - _wide(mean, x)) * _wide(rstd, x)
    total, along = grad.sum(_over(x)), (grad * normal).sum(_over(x))
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        slope = grad
        if train:
            count = math.prod(x.shape[i] for i in _over(x))
            slope = grad - _wide(total / count, x) - normal * _wide(along / count, x)
        grad_input = slope * _wide(rstd if weight is None else rstd * weight.astype(rstd.dtype), x)
    if output_mask[1]:
        grad_weight = along
    if output_mask[2]:
        grad_bias = total
    return grad_input, grad_weight, grad_bias


@lowering("batch_norm_backward", infer=_infer_batch_norm_backward)
def batch_norm_backward(
    grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask, reserve
):
    return native_batch_norm_backward(
        grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask
    )


def _statistics_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _two_per_channel(input: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    make = lambda: input.new_empty(input.shape[1], dtype=_statistics_dtype(input))
    return make(), make()


def _like_input(input: torch.Tensor, *_: Any) -> torch.Tensor:
    return like(input)


def _infer_reduce(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    mean: Any,
    invstd: Any,
    weight: Any,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[torch.Tensor | None, ...]:
    stats, affine = _statistics_dtype(input), input.dtype if weight is None else weight.dtype
    wanted = ((input_g, stats), (input_g, stats), (weight_g, affine), (bias_g, affine))
    return tuple(input.new_empty(input.shape[1], dtype=dtype) if given else None for given, dtype in wanted)


# The ops of SyncBatchNorm, which PyTorch has on CUDA only.


@lowering("batch_norm_stats", infer=_two_per_channel)
def batch_norm_stats(input, eps):
    mean, variance = _moments(opmath(input))
    return mean, _rstd(variance, eps)


@lowering("batch_norm_update_stats", infer=_two_per_channel, mutates=_STATS)
def batch_norm_update_stats(input, running_mean, running_var, momentum):
    x = opmath(input)
    mean, variance = _moments(x)
    count = math.prod(x.shape[i] for i in _over(x))
    unbiased = variance * _unbiasing(count, variance.dtype)
    return mean, variance, _moved(running_mean, mean, momentum), _moved(running_var, unbiased, momentum)


@lowering("batch_norm_elemt", infer=_like_input)
def batch_norm_elemt(input, weight, bias, mean, invstd, eps):
    return _affine(opmath(input), mean, invstd, weight, bias)


def _gather(mean: Any, invstd: Any, running_mean: Any, running_var: Any, momentum: Any, eps: Any, counts: Any) -> Any:
    """The statistics of several devices, one row each, as those of all their elements."""
    mean, invstd, counts = opmath(mean), opmath(invstd), counts.astype(opmath(mean).dtype).reshape(-1, 1)
    total = counts.sum()
    centre = (mean * counts).sum(0) / total
    variance = 1 / jnp.square(invstd) - jnp.asarray(eps, mean.dtype)
    squares = ((variance + jnp.square(mean - centre)) * counts).sum(0)
    moved = _moved(running_mean, centre, momentum), _moved(running_var, squares / (total - 1), momentum)
    return centre, _rstd(squares / total, eps), *moved


@lowering("batch_norm_gather_stats_with_counts", infer=_two_per_channel, mutates=_STATS)
def batch_norm_gather_stats_with_counts(input, mean, invstd, running_mean, running_var, momentum, eps, counts):
    return _gather(mean, invstd, running_mean, running_var, momentum, eps, counts)


@lowering("batch_norm_gather_stats", infer=_two_per_channel, mutates=_STATS)
def batch_norm_gather_stats(input, mean, invstd, running_mean, running_var, momentum, eps, count):
    counts = jnp.broadcast_to(jnp.asarray(count), mean.shape[:1])
    return _gather(mean, invstd, running_mean, running_var, momentum, eps, counts)


@lowering("batch_norm_backward_reduce", infer=_infer_reduce)
def batch_norm_backward_reduce(grad_out, input, mean, invstd, weight, input_g, weight_g, bias_g):
    grad, x = opmath(grad_out), opmath(input)
    total = grad.sum(_over(x))
    along = (grad * (x - _wide(mean, x))).sum(_over(x))
    grad_weight = along * invstd.astype(along.dtype) if weight_g else None
    return total if input_g else None, along if input_g else None, grad_weight, total if bias_g else None


@lowering("batch_norm_backward_elemt", infer=lambda grad_out, input, *_: like(input))
def batch_norm_backward_elemt(grad_out, input, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    grad, x = opmath(grad_out), opmath(input)
    total = count.sum().astype(x.dtype)
    rstd = opmath(invstd)
    slope = grad - _wide(sum_dy / total, x) - (x - _wide(mean, x)) * _wide(jnp.square(rstd) * sum_dy_xmu / total, x)
    return slope * _wide(rstd if weight is None else rstd * weight.astype(rstd.dtype), x)
