"""Matrix products of arrays of two or more dimensions, accumulated as PyTorch does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchtpu.ops.registry import as_dtype, composed, jax, jax_dtype, jnp, lax, lowering, opmath

_SCALES = {"beta": (0.0, 1.0), "alpha": (0.0, 1.0)}


def precision_of(dtype: Any, precision: str | None) -> Any:
    """The XLA precision that `torch.set_float32_matmul_precision(precision)` asks for."""
    if dtype not in (jnp.float32, jnp.complex64):
        return None
    assert precision is not None, "the op is not registered as one that multiplies"
    return {"highest": lax.Precision.HIGHEST, "high": lax.Precision.HIGH, "medium": lax.Precision.DEFAULT}[precision]


def contract(x: Any, y: Any, over: Any, batch: Any, ctx: Any) -> Any:
    """`lax.dot_general` of arrays of one dtype; float16 and bfloat16 accumulate in, and return, float32."""
    if ctx.platform == "tpu" and x.dtype in (jnp.int64, jnp.uint64):
        return _products_summed(x, y, over, batch)
    half = x.dtype.itemsize == 2 and jnp.issubdtype(x.dtype, jnp.floating)
    return lax.dot_general(
        x,
        y,
        (over, batch),
        precision=precision_of(x.dtype, ctx.precision),
        preferred_element_type=jnp.float32 if half else x.dtype,
    )


def _products_summed(x: Any, y: Any, over: Any, batch: Any) -> Any:
    """As `lax.dot_general`, which the TPU compiler refuses for 64-bit integers; it fuses this and stores no product."""

    def rows(array: Any, summed: Any, shared: Any) -> tuple[Any, tuple[int, ...]]:
        free = [d for d in range(array.ndim) if d not in (*summed, *shared)]
        shape = tuple(array.shape[d] for d in free)
        depth = math.prod(array.shape[d] for d in summed)
        ordered = array.transpose(*shared, *free, *summed)
        return ordered.reshape(*(array.shape[d] for d in shared), math.prod(shape), depth), shape

    (left, left_shape), (right, right_shape) = rows(x, over[0], batch[0]), rows(y, over[1], batch[1])
    made = (left[..., :, None, :] * right[..., None, :, :]).sum(-1)
    return made.reshape(*(x.shape[d] for d in batch[0]), *left_shape, *right_shape)


def product(x: Any, y: Any, ctx: Any) -> Any:
    """The matrix product over the last two dimensions (the last one of a vector `y`), batched over the others."""
    batch = tuple(range(max(y.ndim - 2, 0)))
    return contract(x, y, ((x.ndim - 1,), (len(batch),)), (batch, batch), ctx)


def _is(factor: Any, number: int) -> bool:
    return isinstance(factor, (bool, int, float, complex)) and factor == number


def scaled(x: Any, factor: Any) -> Any:
    """`x * factor` in `x`'s dtype; `factor` is a number that a program may take at run time."""
    if _is(factor, 1):
        return x
    return x * jnp.asarray(factor).astype(x.dtype)


def blend(beta: Any, self: Any, alpha: Any, made: Any) -> Any:
    """`beta * self + alpha * made`, where `beta == 0` ignores `self`, even its NaNs.

    So does `alpha == 0` with `made`, but not in half precision, for which the CPU does not call BLAS.
    """
    is_ignored = _is(alpha, 0) and self.dtype.itemsize > 2
    if _is(beta, 0):
        return jnp.zeros_like(made) if is_ignored else scaled(made, alpha)
    kept = scaled(self.astype(made.dtype), beta)
    return jnp.broadcast_to(kept, made.shape) if is_ignored else kept + scaled(made, alpha)


@lowering("mm", "bmm", "mv", multiplies=True)
def mm(self, mat2, *, ctx):
    return product(self, mat2, ctx)


@lowering("mm.dtype", "bmm.dtype", multiplies=True)
def mm_dtype(self, mat2, out_dtype, *, ctx):
    return product(self, mat2, ctx)


@lowering("_int_mm")
def int_mm(self, mat2):
    over = (((1,), (0,)), ((), ()))
    return lax.dot_general(self, mat2, over, preferred_element_type=jnp.int32)


def _spread(scale: Any, shape: tuple[int, ...]) -> Any:
    """A scale per block of an array, as one per element."""
    if scale.size == 1:
        return scale.reshape((1,) * len(shape)).astype(jnp.float32)
    for axis, size in enumerate(shape):
        scale = scale if scale.shape[axis] == 1 else jnp.repeat(scale, size // scale.shape[axis], axis)
    return scale.astype(jnp.float32)


@lowering("_scaled_mm", multiplies=True)
def scaled_mm(self, mat2, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False, *, ctx):
    over = (((1,), (0,)), ((), ()))
    if scale_a.shape[1:] in ((), (1,)) and scale_b.shape[:1] in ((), (1,)):
        made = lax.dot_general(self, mat2, over, preferred_element_type=jnp.float32)
        made = made * _spread(scale_a, made.shape) * _spread(scale_b, made.shape)
    else:
        a, b = (x.astype(jnp.float32) * _spread(s, x.shape) for x, s in ((self, scale_a), (mat2, scale_b)))
        made = contract(a, b, *over, ctx)
    if bias is not None:
        made = made + bias.astype(made.dtype)
    is_scaled = scale_result is not None and ctx.results[0][1].itemsize == 1
    return made * scale_result.astype(made.dtype) if is_scaled else made


@composed("_scaled_mm_v2")
def scaled_mm_v2(
    self: Tensor,
    mat2: Tensor,
    scale_a: list[Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    if len(scale_a) != 1 or len(scale_b) != 1 or any(swizzle_a) or any(swizzle_b):
        raise NotImplementedError("aten::_scaled_mm_v2: scales of two levels, or swizzled, are not supported on tpu")
    made: Tensor = torch.ops.aten._scaled_mm(self, mat2, scale_a[0], scale_b[0], bias, None, out_dtype, use_fast_accum)
    return made


@lowering("_weight_int8pack_mm", multiplies=True)
def weight_int8pack_mm(self, mat2, scales, *, ctx):
    made = contract(opmath(self), mat2.astype(opmath(self).dtype), ((1,), (1,)), ((), ()), ctx)
    return made * scales.astype(made.dtype)


@lowering("dot", multiplies=True)
def dot(self, tensor, *, ctx):
    return contract(self, tensor, ((0,), (0,)), ((), ()), ctx)


@lowering("vdot", multiplies=True)
def vdot(self, other, *, ctx):
    return contract(self.conj(), other, ((0,), (0,)), ((), ()), ctx)


def _infer_addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *_: Any) -> Tensor:
    rows, columns = mat1.shape[0], mat2.shape[-1]
    if (
        mat1.dim() != 2
        or mat2.dim() != 2
        or mat1.shape[1] != mat2.shape[0]
        or len({self.dtype, mat1.dtype, mat2.dtype}) > 1
    ):
        raise RuntimeError("mat1 and mat2 cannot be multiplied")
    self.expand(rows, columns)  # raises where it has more dimensions
    return mat1.new_empty((rows, columns))


@lowering("addmm", structural=_SCALES, infer=_infer_addmm, multiplies=True)
@lowering("baddbmm", "addmv", structural=_SCALES, multiplies=True)
def addmm(self, mat1, mat2, *, beta=1, alpha=1, ctx):
    return blend(beta, self, alpha, product(mat1, mat2, ctx))


def _infer_wider(self: Tensor, mat1: Tensor, mat2: Tensor, out_dtype: torch.dtype, *_: Any) -> Tensor:
    made = torch.matmul(mat1, mat2).to(out_dtype)
    self.expand(made.shape)
    return made


@lowering("addmm.dtype", "baddbmm.dtype", structural=_SCALES, infer=_infer_wider, multiplies=True)
def addmm_dtype(self, mat1, mat2, out_dtype, *, beta=1, alpha=1, ctx):
    return blend(beta, self, alpha, product(mat1, mat2, ctx).astype(jax_dtype(out_dtype)))


@lowering("addbmm", structural=_SCALES, multiplies=True)
def addbmm(self, batch1, batch2, *, beta=1, alpha=1, ctx):
    return blend(beta, self, alpha, contract(batch1, batch2, ((0, 2), (0, 1)), ((), ()), ctx))


@lowering("_addmm_activation", structural=_SCALES, infer=_infer_addmm, multiplies=True)
def addmm_activation(self, mat1, mat2, *, beta=1, alpha=1, use_gelu=False, ctx):
    made = blend(beta, self, alpha, product(mat1, mat2, ctx))
    return jax.nn.gelu(made, approximate=False) if use_gelu else jax.nn.relu(made)


def _infer_combination(input: Tensor, coefficients: Tensor) -> Tensor:
    return input.new_empty((coefficients.shape[0], *input.shape[1:]))


@lowering("_compute_linear_combination", infer=_infer_combination, multiplies=True)
def compute_linear_combination(input, coefficients, *, ctx):
    return contract(coefficients, input, ((1,), (0,)), ((), ()), ctx)


@lowering("addr", structural=_SCALES)
def addr(self, vec1, vec2, *, beta=1, alpha=1, ctx):
    self, vec1, vec2 = (as_dtype(x, ctx.results[0][1]) for x in (self, vec1, vec2))
    if self.dtype == bool:
        made = vec1[:, None] & vec2[None, :] & bool(alpha)
        return made | self if beta else made
    return blend(beta, opmath(self), 1, scaled(opmath(vec1)[:, None] * opmath(vec2)[None, :], alpha))


def _infer_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    is_vector = weight.dim() == 1 and (bias is None or input.dim() != 2)
    fits = (weight.dim() == 2 or is_vector) and input.dim() > 0
    fits = fits and input.shape[-1] == weight.shape[-1] and input.dtype == weight.dtype
    if not fits or (bias is not None and (bias.shape != weight.shape[:-1] or bias.dtype != weight.dtype)):
        raise RuntimeError("input and weight cannot be multiplied")
    if input.dim() > 2 and not input.is_contiguous():
        return torch.ops.aten.linear(input, weight, bias)  # some layouts are kept
    return input.new_empty((*input.shape[:-1], *weight.shape[:-1]))


@lowering("linear", infer=_infer_linear, multiplies=True)
def linear(input, weight, bias=None, *, ctx):
    # Contracts the weight's own last dimension: XLA:CPU would copy a transposed weight in every call.
    made = contract(input, weight, ((input.ndim - 1,), (weight.ndim - 1,)), ((), ()), ctx)
    return made if bias is None else made + bias.astype(made.dtype)


@lowering("linear_backward", multiplies=True)
def linear_backward(self, grad_output, weight, output_mask, *, ctx):
    rows = tuple(range(self.ndim - 1))
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        grad_input = contract(grad_output, weight, ((grad_output.ndim - 1,), (0,)), ((), ()), ctx)
    if output_mask[1] or output_mask[2]:  # the meta kernel promises both together
        grad_weight = contract(grad_output, self, (rows, rows), ((), ()), ctx)
        grad_bias = opmath(grad_output).sum(rows)
    return grad_input, grad_weight, grad_bias
