"""Comparisons, logic, bits and choices."""

from __future__ import annotations

from typing import Any

import torch

from torchtpu.ops.registry import as_dtype, jnp, lax, like, lowering, pointwise
from torchtpu.ops.shape.index import filling

# Comparisons happen in the dtype of the tensors: a number is rounded to bfloat16 before it is compared with one.


@pointwise("eq.Tensor", "eq.Scalar", promote="no_opmath")
def eq(self, other):
    return self == other


@pointwise("ne.Tensor", "ne.Scalar", promote="no_opmath")
def ne(self, other):
    return self != other


@pointwise("lt.Tensor", "lt.Scalar", promote="no_opmath")
def lt(self, other):
    return self < other


@pointwise("le.Tensor", "le.Scalar", promote="no_opmath")
def le(self, other):
    return self <= other


@pointwise("gt.Tensor", "gt.Scalar", promote="no_opmath")
def gt(self, other):
    return self > other


@pointwise("ge.Tensor", "ge.Scalar", promote="no_opmath")
def ge(self, other):
    return self >= other


@lowering("isnan", elementwise=True)
def isnan(self):
    return jnp.isnan(self)


@lowering("isinf", elementwise=True)
def isinf(self):
    return jnp.isinf(self)


@lowering("isposinf", elementwise=True)
def isposinf(self):
    return self == jnp.inf if jnp.issubdtype(self.dtype, jnp.floating) else jnp.zeros(self.shape, bool)


@lowering("isneginf", elementwise=True)
def isneginf(self):
    return self == -jnp.inf if jnp.issubdtype(self.dtype, jnp.floating) else jnp.zeros(self.shape, bool)


@lowering("logical_not", elementwise=True)
def logical_not(self):
    return self == 0


@lowering("logical_and", elementwise=True)
def logical_and(self, other):
    return (self != 0) & (other != 0)


@lowering("logical_or", elementwise=True)
def logical_or(self, other):
    return (self != 0) | (other != 0)


@lowering("logical_xor", elementwise=True)
def logical_xor(self, other):
    return (self != 0) ^ (other != 0)


@pointwise("bitwise_not")
def bitwise_not(self):
    return ~self


@pointwise("bitwise_and.Tensor", "bitwise_and.Scalar", "bitwise_and.Scalar_Tensor")
def bitwise_and(self, other):
    return self & other


@pointwise("bitwise_or.Tensor", "bitwise_or.Scalar", "bitwise_or.Scalar_Tensor")
def bitwise_or(self, other):
    return self | other


@pointwise("bitwise_xor.Tensor", "bitwise_xor.Scalar", "bitwise_xor.Scalar_Tensor")
def bitwise_xor(self, other):
    return self ^ other


@pointwise(
    "bitwise_left_shift.Tensor",
    "bitwise_left_shift.Tensor_Scalar",
    "bitwise_left_shift.Scalar_Tensor",
    "__lshift__.Tensor",
    "__lshift__.Scalar",
    "__ilshift__.Tensor",
    "__ilshift__.Scalar",
)
def bitwise_left_shift(self, other):
    bits = jnp.iinfo(self.dtype).bits
    return jnp.where((other < 0) | (other >= bits), 0, self << jnp.clip(other, 0, bits - 1))


@pointwise(
    "bitwise_right_shift.Tensor",
    "bitwise_right_shift.Tensor_Scalar",
    "bitwise_right_shift.Scalar_Tensor",
    "__rshift__.Tensor",
    "__rshift__.Scalar",
    "__irshift__.Tensor",
    "__irshift__.Scalar",
)
def bitwise_right_shift(self, other):
    info = jnp.iinfo(self.dtype)
    if info.min == 0:
        return jnp.where(other >= info.bits, 0, self >> jnp.clip(other, 0, info.bits - 1))
    return self >> jnp.where((other < 0) | (other >= info.bits), info.bits - 1, other)


@pointwise("maximum", "clamp_min", "clamp_min.Tensor")
def maximum(self, other):
    return jnp.maximum(self, other)


@pointwise("minimum", "clamp_max", "clamp_max.Tensor")
def minimum(self, other):
    return jnp.minimum(self, other)


@pointwise("fmax")
def fmax(self, other):
    return jnp.fmax(self, other)


@pointwise("fmin")
def fmin(self, other):
    return jnp.fmin(self, other)


@pointwise("clamp", "clamp.Tensor")
def clamp(self, min=None, max=None):
    self = self if min is None else jnp.maximum(self, min)
    return self if max is None else jnp.minimum(self, max)


@lowering("nan_to_num", lifts=True, infer=like, elementwise=True)
def nan_to_num(self, nan=None, posinf=None, neginf=None):
    if jnp.issubdtype(self.dtype, jnp.complexfloating):
        return lax.complex(nan_to_num(self.real, nan, posinf, neginf), nan_to_num(self.imag, nan, posinf, neginf))
    if not jnp.issubdtype(self.dtype, jnp.floating):
        return self
    info = jnp.finfo(self.dtype)
    given = (0 if nan is None else nan, info.max if posinf is None else posinf, info.min if neginf is None else neginf)
    nan, posinf, neginf = (jnp.asarray(v).astype(self.dtype) for v in given)
    return jnp.where(
        jnp.isnan(self), nan, jnp.where(self == jnp.inf, posinf, jnp.where(self == -jnp.inf, neginf, self))
    )


@lowering("where.self", lifts=True, elementwise=True)
def where(condition, self, other, *, ctx):
    dtype = ctx.results[0][1]
    return jnp.where(condition != 0, as_dtype(self, dtype), as_dtype(other, dtype))


def _refuse_fill(mask: torch.Tensor, value: Any) -> None:
    if mask.dtype != torch.bool:
        raise RuntimeError(f"masked_fill_ only supports boolean masks, but got mask with dtype {mask.dtype}")
    if isinstance(value, torch.Tensor) and value.dim():
        raise RuntimeError(
            f"masked_fill_ only supports a 0-dimensional value tensor, but got tensor with {value.dim()} dimension(s)."
        )


def _infer_masked_fill(self: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
    """Contiguous, whatever it is filled over."""
    _refuse_fill(mask, value)
    return self.new_empty(torch.broadcast_tensors(self, mask)[0].shape)


def _infer_masked_fill_(self: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
    """The value may lie on the host, which PyTorch does not expect here."""
    _refuse_fill(mask, value)
    self.masked_fill_(mask, 0)
    return self


@lowering("masked_fill.Scalar", "masked_fill.Tensor", lifts=True, infer=_infer_masked_fill, elementwise=True)
@lowering("masked_fill_.Scalar", "masked_fill_.Tensor", lifts=True, infer=_infer_masked_fill_, elementwise=True)
def masked_fill(self, mask, value, *, ctx):
    return jnp.where(mask, filling(ctx, value, self.dtype), self)
