"""Layer, group, RMS and weight norm, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import get_computation_dtype

from torchtpu.ops.registry import jnp, lax, like, lowering, opmath, suggest_memory_format


def _statistics(x: Any, axes: tuple[int, ...], eps: Any) -> tuple[Any, Any]:
    """The mean over `axes` (kept as 1) and one over the standard deviation."""
    mean = x.mean(axes, keepdims=True)
    # The two passes PyTorch's result asks for: mean(x*x) - mean*mean cancels.
    return mean, lax.rsqrt(jnp.square(x - mean).mean(axes, keepdims=True) + jnp.asarray(eps, x.dtype))


def _split(x: Any, normalized_shape: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The outer and the normalised dimensions."""
    outer = x.ndim - len(normalized_shape)
    return tuple(range(outer)), tuple(range(outer, x.ndim))


def refuse_mixed(input: torch.Tensor, *parameters: torch.Tensor | None) -> None:
    """Refuses what PyTorch's kernels refuse: parameters of another dtype, unless they are float32 and the input is
    bfloat16 or float16."""
    found = {t.dtype for t in parameters if t is not None}
    is_half = input.dtype in (torch.bfloat16, torch.float16)
    if not (found <= {input.dtype} or (is_half and found <= {input.dtype, torch.float32})):
        raise RuntimeError(f"mixed dtype: expected parameters of {input.dtype}, but got {found}")


def _infer_layer_norm(input: torch.Tensor, normalized_shape: Any, weight: Any, bias: Any, eps: Any) -> Any:
    shape = tuple(normalized_shape)
    outer = input.dim() - len(shape)
    fits = len(shape) > 0 and outer >= 0 and input.shape[outer:] == shape and input.is_floating_point()
    if not fits or any(p is not None and p.shape != shape for p in (weight, bias)):
        raise RuntimeError(f"layer_norm of {tuple(input.shape)} over {shape}")
    refuse_mixed(input, weight, bias)
    statistics = [*input.shape[:outer], *(1 for _ in shape)]
    dtype = get_computation_dtype(input.dtype)
    return input.new_empty(input.shape), *(input.new_empty(statistics, dtype=dtype) for _ in range(2))


def _infer_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask) -> Any:
    made = (input, weight, bias)
    return tuple(
        x.new_empty(x.shape) if mask and x is not None else None for x, mask in zip(made, output_mask, strict=True)
    )


@lowering("native_layer_norm", infer=_infer_layer_norm)
def native_layer_norm(input, normalized_shape, weight, bias, eps):
    x = opmath(input)
    mean, rstd = _statistics(x, _split(x, normalized_shape)[1], eps)
    made = (x - mean) * rstd
    if weight is not None:
        made = made * weight.astype(made.dtype)
    if bias is not None:
        made = made + bias.astype(made.dtype)
    return made, mean, rstd


@lowering("native_layer_norm_backward", infer=_infer_layer_norm_backward)
def native_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask):
    grad, x = opmath(grad_out), opmath(input)
    outer, inner = _split(x, normalized_shape)
    normal = (x - mean.astype(x.dtype)) * rstd.astype(x.dtype)
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        scaled = grad if weight is None else grad * weight.astype(x.dtype)
        slope = scaled - scaled.mean(inner, keepdims=True) - normal * (scaled * normal).mean(inner, keepdims=True)
        grad_input = slope * rstd.astype(x.dtype)
    if output_mask[1] and weight is not None:
        grad_weight = (grad * normal).sum(outer)
    if output_mask[2] and bias is not None:
        grad_bias = grad.sum(outer)
    return grad_input, grad_weight, grad_bias


@lowering("_fused_rms_norm")
def fused_rms_norm(input, normalized_shape, weight, eps):
    x = opmath(input)
    if eps is None:
        eps = jnp.finfo(x.dtype).eps
    rstd = lax.rsqrt(jnp.square(x).mean(_split(x, normalized_shape)[1], keepdims=True) + jnp.asarray(eps, x.dtype))
    made = x * rstd
    return made if weight is None else made * weight.astype(made.dtype), rstd


@lowering("_fused_rms_norm_backward")
def fused_rms_norm_backward(grad_out, input, normalized_shape, rstd, weight, output_mask):
    grad, x = opmath(grad_out), opmath(input)
    outer, inner = _split(x, normalized_shape)
    rstd = rstd.astype(x.dtype)
    normal = x * rstd
    grad_input = grad_weight = None
    if output_mask[0]:
        scaled = grad if weight is None else grad * weight.astype(x.dtype)
        grad_input = (scaled - normal * (scaled * normal).mean(inner, keepdims=True)) * rstd
    if output_mask[1] and weight is not None:
        grad_weight = (grad * normal).sum(outer)
    return grad_input, grad_weight


def _infer_group_norm(input: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not input.is_contiguous(memory_format=suggest_memory_format(input)):
        raise RuntimeError("Expected X.is_contiguous(memory_format) to be true, but got false.")
    refuse_mixed(input, *rest[:2])
    if _is_usual_group_norm((input,), *rest[:6]):
        mean, rstd = (input.new_empty(rest[2], rest[5]) for _ in range(2))
    else:
        _, mean, rstd = torch.ops.aten.native_group_norm(input, *rest)
    return like(input, memory_format=suggest_memory_format(input)), mean, rstd


def _is_usual_group_norm(images: tuple[Any, ...], weight: Any, bias: Any, N: int, C: int, HxW: int, group: int) -> bool:
    """Whether the shapes follow without PyTorch's meta kernels, which are many ops in Python."""
    dtype, channels = images[0].dtype, [t for t in (weight, bias) if t is not None]
    return (
        dtype in (torch.float32, torch.float64)
        and all(t.dtype == dtype for t in (*images, *channels))
        and all(t.shape[:2] == (N, C) and t.numel() == N * C * HxW > 0 for t in images)
        and all(t.shape == (C,) for t in channels)
        and group > 0
        and C % group == 0
    )


def _infer_group_norm_backward(
    grad: Any, input: Any, mean: Any, rstd: Any, weight: Any, N: int, C: int, HxW: int, group: int, wanted: Any
) -> tuple[torch.Tensor | None, ...]:
    images = grad, input
    if not _is_usual_group_norm(images, weight, None, N, C, HxW, group) or not all(t.is_contiguous() for t in images):
        arguments = *images, mean, rstd, weight, N, C, HxW, group, wanted
        return tuple(torch.ops.aten.native_group_norm_backward(*arguments))
    shapes = input.shape, (C,), (C,)
    return tuple(input.new_empty(shape) if is_wanted else None for shape, is_wanted in zip(shapes, wanted, strict=True))


@lowering("native_group_norm", infer=_infer_group_norm)
def native_group_norm(input, weight, bias, N, C, HxW, group, eps):
    x = opmath(input)
    if x.size == 0:
        return input, jnp.zeros((N, group), x.dtype), jnp.zeros((N, group), x.dtype)
    x = x.reshape(N, group, -1)
    mean, rstd = _statistics(x, (2,), eps)
    made = ((x - mean) * rstd).reshape(N, C, HxW)
    if weight is not None:
        made = made * weight.astype(made.dtype).reshape(1, C, 1)
    if bias is not None:
        made = made + bias.astype(made.dtype).reshape(1, C, 1)
    return made.reshape(input.shape), mean[:, :, 0], rstd[:, :, 0]


@lowering("native_group_norm_backward", infer=_infer_group_norm_backward)
def native_group_norm_backward(grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask):
    shape = (N, group, C // group, HxW)
    grad, x = (opmath(a).reshape(shape) for a in (grad_out, input))
    mean, rstd = (a.astype(x.dtype).reshape(N, group, 1, 1) for a in (mean, rstd))
    normal = (x - mean) * rstd
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        scaled = grad if weight is None else grad * weight.astype(x.dtype).reshape(1, group, C // group, 1)
        over = (2, 3)
        slope = scaled - scaled.mean(over, keepdims=True) - normal * (scaled * normal).mean(over, keepdims=True)
        grad_input = (slope * rstd).reshape(input.shape)
    if output_mask[1]:
        grad_weight = (grad * normal).sum((0, 3)).reshape(C)
    if output_mask[2]:
        grad_bias = grad.sum((0, 3)).reshape(C)
    return grad_input, grad_weight, grad_bias


def _norm_except(x: Any, dim: int) -> Any:
    axes = tuple(i for i in range(x.ndim) if i != dim % x.ndim) if dim != -1 else tuple(range(x.ndim))
    return jnp.sqrt(jnp.square(x).sum(axes, keepdims=True))


@lowering("_weight_norm_interface")
def weight_norm(v, g, dim=0):
    x = opmath(v)
    norm = _norm_except(x, dim)
    return x * (opmath(g) / norm), norm.reshape(g.shape)


@lowering("_weight_norm_interface_backward")
def weight_norm_backward(grad_w, saved_v, saved_g, saved_norms, dim):
    grad, v, g = opmath(grad_w), opmath(saved_v), opmath(saved_g)
    norm = saved_norms.astype(v.dtype)
    axes = tuple(i for i in range(v.ndim) if i != dim % v.ndim)
    along = (grad * v).sum(axes, keepdims=True)
    return (g / norm) * (grad - v * along / jnp.square(norm)), along / norm
