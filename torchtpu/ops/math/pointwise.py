"""Elementwise arithmetic on arrays and numbers promoted as PyTorch promotes them.

Comparisons, logic, bits and choices are in logic.py, activation functions in activation.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import get_computation_dtype

from torchtpu.ops.math import complex_functions
from torchtpu.ops.math.complex_functions import is_complex
from torchtpu.ops.registry import (
    Context,
    as_dtype,
    jnp,
    lax,
    like,
    lowering,
    opmath,
    pointwise,
    torch_dtype,
    without_kernels,
)

EXPONENTS = (0, 1, 2, 3, 0.5, -0.5, -1, -2)  # torch computes these without pow

# ATen name -> jax.numpy name of unary functions that turn integers into floats
for _name, _function in {
    "cos": "cos",
    "cosh": "cosh",
    "deg2rad": "deg2rad",
    "expm1": "expm1",
    "log1p": "log1p",
    "rad2deg": "rad2deg",
    "sin": "sin",
    "sinc": "sinc",
    "sinh": "sinh",
    "tan": "tan",
    "tanh": "tanh",
}.items():
    pointwise(_name, promote="int_to_float")(lambda self, _function=_function: getattr(jnp, _function)(self))

for _name, _function in {
    "acos": "arccos",
    "acosh": "arccosh",
    "asin": "arcsin",
    "asinh": "arcsinh",
    "atan": "arctan",
    "atanh": "arctanh",
    "exp": "exp",
    "exp2": "exp2",
    "log": "log",
    "log10": "log10",
    "log2": "log2",
    "reciprocal": "reciprocal",
    "sqrt": "sqrt",
}.items():
    pointwise(_name, promote="int_to_float")(
        lambda self, _function=_function: getattr(complex_functions if is_complex(self) else jnp, _function)(self)
    )


@pointwise("rsqrt", promote="int_to_float")
def rsqrt(self):
    return complex_functions.reciprocal(complex_functions.sqrt(self)) if is_complex(self) else lax.rsqrt(self)


@pointwise("sigmoid", promote="int_to_float")
def sigmoid(self):
    return lax.logistic(self)


def computed(ctx: Context) -> torch.dtype:
    """The dtype that PyTorch computes the op's first result in."""
    return get_computation_dtype(ctx.results[0][1])


# Rounding and signs


@pointwise("ceil")
def ceil(self):
    return jnp.ceil(self) if jnp.issubdtype(self.dtype, jnp.floating) else self


@pointwise("floor")
def floor(self):
    return jnp.floor(self) if jnp.issubdtype(self.dtype, jnp.floating) else self


@pointwise("trunc")
def trunc(self):
    return jnp.trunc(self) if jnp.issubdtype(self.dtype, jnp.floating) else self


@pointwise("frac")
def frac(self):
    return self - jnp.trunc(self)


@pointwise("round")
def round_(self):
    return jnp.round(self) if jnp.issubdtype(self.dtype, jnp.floating) else self


def _divide(x: Any, y: Any) -> Any:
    """x / y, rounded once. By one number for many elements XLA divides as if by its reciprocal, which rounds twice, but
    not where the divisor hangs on x too: that of a NaN is NaN here, which changes nothing."""
    return x / y if is_complex(x) else x / jnp.where(jnp.isnan(x), x, y)


@lowering("round.decimals", elementwise=True)
def round_decimals(self, *, decimals, ctx):
    if not jnp.issubdtype(self.dtype, jnp.floating):
        return self
    x = as_dtype(self, computed(ctx))
    scale = 10.0 ** abs(decimals)
    return _divide(jnp.round(x * scale), scale) if decimals > 0 else jnp.round(_divide(x, scale)) * scale


@pointwise("abs", promote="complex_to_float")
def abs_(self):
    return self if self.dtype == bool else jnp.abs(self)


@pointwise("neg")
def neg(self):
    return -self


@pointwise("sign", "sgn")
def sign(self):
    if jnp.issubdtype(self.dtype, jnp.complexfloating):
        size = jnp.abs(self)
        return jnp.where(size == 0, 0, self / jnp.where(size == 0, 1, size))
    if self.dtype == bool:
        return self
    # NaN has sign 0 here and sign NaN in XLA.
    return (self > 0).astype(self.dtype) - (self < 0).astype(self.dtype)


@lowering("signbit", elementwise=True)
def signbit(self):
    return jnp.signbit(self) if jnp.issubdtype(self.dtype, jnp.floating) else self < 0


@pointwise("copysign.Tensor", "copysign.Scalar", promote="int_to_float")
def copysign(self, other):
    return jnp.copysign(self, other)


@pointwise("nextafter", promote="no_opmath")
def nextafter(self, other):
    return jnp.nextafter(self, other)


# Arithmetic


@pointwise("add.Tensor", "add.Scalar")
def add(self, other, alpha=1):
    return self + other * alpha


@pointwise("sub.Tensor", "sub.Scalar")
def sub(self, other, alpha=1):
    return self - other * alpha


@pointwise("rsub.Tensor", "rsub.Scalar")
def rsub(self, other, alpha=1):
    return other - self * alpha


@pointwise("mul.Tensor", "mul.Scalar")
def mul(self, other):
    return self * other


@pointwise("div.Tensor", "div.Scalar", promote="int_to_float")
def div(self, other):
    return _divide(self, other)


@lowering("div.Tensor_mode", "div.Scalar_mode", lifts=True, elementwise=True)
def div_mode(self, other, *, rounding_mode=None):
    if rounding_mode is not None:
        return {"trunc": _trunc_divide, "floor": floor_divide}[rounding_mode](self, other)
    made, result = div(self, other), _as_result(self, other)[0].dtype
    return made.astype(result) if jnp.issubdtype(result, jnp.inexact) else made


@pointwise(promote="no_opmath")
def _as_result(self, other):
    return jnp.broadcast_arrays(self, other)


@pointwise()
def _as_computed(self, other):
    return jnp.broadcast_arrays(self, other)


Rounds = Callable[[Any], Any]


def _of_steps(self: Any, other: Any) -> tuple[Any, Any, Any, Rounds]:
    """The numbers to divide, the dtype of the quotient, and what happens to each step of a division. As in PyTorch's
    kernels, a step in half precision is rounded, but where a tensor is divided by one number: that has all its digits,
    and the result alone is rounded."""
    x, y = _as_result(self, other)
    dtype = x.dtype
    is_half = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    if not is_half or jnp.size(other) == 1:
        return *_as_computed(self, other), dtype, lambda step: step
    digits = jnp.finfo(dtype)

    def rounded(step: Any) -> Any:  # what is subnormal here is exact, and taken for zero by XLA
        return jnp.where(jnp.abs(step) < digits.tiny, step, lax.reduce_precision(step, digits.nexp, digits.nmant))

    return opmath(x), opmath(y), dtype, rounded


def _trunc_divide(self, other):
    x, y, dtype, rounded = _of_steps(self, other)
    if jnp.issubdtype(dtype, jnp.integer):
        return lax.div(x, y)
    return jnp.trunc(rounded(_divide(x, y))).astype(dtype)


def _infer_floor_divide(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """As the remainder, of which PyTorch expects that a number may lie on the host."""
    if torch.result_type(self, other) is torch.bool:
        raise NotImplementedError("\"div_floor\" not implemented for 'Bool'")
    return torch.remainder(self, other)


@lowering("floor_divide", lifts=True, infer=_infer_floor_divide, elementwise=True)
@lowering("floor_divide.Scalar", "floor_divide_.Tensor", lifts=True, elementwise=True)
def floor_divide(self, other):
    x, y, dtype, rounded = _of_steps(self, other)
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.floor_divide(x, y)
    rest = lax.rem(x, y)
    quotient = rounded(_divide(rounded(x - rest), y))
    quotient = jnp.where((rest != 0) & ((y < 0) != (rest < 0)), rounded(quotient - 1), quotient)
    nearest = jnp.floor(quotient)
    nearest = jnp.where(quotient - nearest > 0.5, nearest + 1, nearest)
    nearest = jnp.where(quotient == 0, jnp.copysign(0.0, x / y).astype(nearest.dtype), nearest)
    return jnp.where(y == 0, x / y, nearest).astype(dtype)


@pointwise("fmod.Tensor", "fmod.Scalar", rounds_numbers=True)
def fmod(self, other):
    return lax.rem(*jnp.broadcast_arrays(self, other))


@pointwise("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor", rounds_numbers=True)
def remainder(self, other):
    return jnp.remainder(self, other)


@lowering("pow.Tensor_Scalar", structural={"exponent": EXPONENTS}, lifts=True, elementwise=True)
def pow_scalar(self, exponent, ctx):
    dtype = computed(ctx)
    if not any(jnp.issubdtype(jnp.result_type(v), jnp.complexfloating) for v in (self, exponent)):
        dtype = dtype.to_real()  # an out= argument of real numbers' powers may be complex
    x = as_dtype(self, dtype)
    # PyTorch's kernels round the exponent to the dtype, and products of bfloat16 each time
    is_half = opmath(self).dtype != self.dtype and not is_complex(x)
    factor = self if is_half and self.dtype == jnp.bfloat16 else x
    if isinstance(exponent, (int, float, complex)) and exponent in EXPONENTS:
        match exponent:
            case 0:
                return jnp.ones_like(x)
            case 1:
                return x
            case 2:
                return x * x
            case 3:
                return factor * factor * factor
            case 0.5:
                return complex_functions.sqrt(x) if is_complex(x) else jnp.sqrt(x)
            case -0.5:
                return complex_functions.reciprocal(complex_functions.sqrt(x)) if is_complex(x) else lax.rsqrt(x)
            case -1:
                return complex_functions.reciprocal(x) if is_complex(x) else 1 / x
            case _:
                square = as_dtype(factor * factor, dtype)
                return complex_functions.reciprocal(square) if is_complex(x) else 1 / square
    return _power(x, as_dtype(as_dtype(exponent, torch_dtype(self.dtype)) if is_half else exponent, dtype))


@pointwise("pow.Tensor_Tensor")
def pow_tensor(self, exponent):
    return _power(self, exponent)


@pointwise("pow.Scalar", rounds_numbers=True)
def pow_of_scalar(self, exponent):
    return jnp.where(self == 1, jnp.ones_like(exponent), _power(self, exponent))


def _power(x: Any, exponent: Any) -> Any:
    if is_complex(x):
        return complex_functions.power(x, exponent)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.power(x, exponent)
    # An integer to a negative power is 0, but for 1 and -1.
    one = jnp.ones_like(x)
    negative = jnp.where(x == 1, 1, jnp.where(x == -1, jnp.where(exponent % 2 == 0, one, -one), 0))
    return jnp.where(exponent < 0, negative, _whole_power(x, jnp.maximum(exponent, 0))).astype(x.dtype)


def _whole_power(x: Any, exponent: Any) -> Any:
    """An integer to a power of 0 or more, with the bits that overflow leaves; jnp.power takes six bits of the power."""
    x, exponent = jnp.broadcast_arrays(x, exponent)

    def multiply(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        made, square, rest = state
        return jnp.where(rest % 2 == 1, made * square, made), square * square, rest // 2

    return lax.while_loop(lambda state: jnp.any(state[2] > 0), multiply, (jnp.ones_like(x), x, exponent))[0]


@pointwise()
def _added_product(self, tensor1, tensor2, value):
    return self + value * tensor1 * tensor2


@lowering("addcmul", lifts=True, elementwise=True)
def addcmul(self, tensor1, tensor2, value=1):
    if all(jnp.issubdtype(each.dtype, jnp.integer) for each in (self, tensor1, tensor2)):
        value = jnp.asarray(value).astype(jnp.result_type(self, tensor1, tensor2))  # as C++ converts the number
    return _added_product(self, tensor1, tensor2, value)


@pointwise("addcdiv")
def addcdiv(self, tensor1, tensor2, value=1):
    return self + _divide(value * tensor1, tensor2)


@pointwise("lerp.Scalar", "lerp.Tensor")
def lerp(self, end, weight):
    span = end - self
    return jnp.where(jnp.abs(weight) < 0.5, self + weight * span, end - span * (1 - weight))


@pointwise("hypot")
def hypot(self, other):
    return jnp.hypot(self, other)


@pointwise("atan2", promote="int_to_float")
def atan2(self, other):
    return jnp.arctan2(self, other)


@pointwise("logaddexp", promote="int_to_float")
def logaddexp(self, other):
    if not jnp.issubdtype(self.dtype, jnp.complexfloating):
        return jnp.logaddexp(self, other)
    # PyTorch does not wrap the imaginary part, JAX does.
    low, high = (jnp.where(self.real < other.real, a, b) for a, b in ((self, other), (other, self)))
    return high + jnp.log1p(jnp.exp(low - high))


@pointwise("logaddexp2", promote="int_to_float")
def logaddexp2(self, other):
    return jnp.logaddexp2(self, other)


@pointwise("xlogy.Tensor", "xlogy.Scalar_Self", "xlogy.Scalar_Other", promote="int_to_float", rounds_numbers=True)
def xlogy(self, other, ctx):
    logarithm = as_dtype(as_dtype(jnp.log(other), ctx.results[0][1]), torch_dtype(other.dtype))
    return jnp.where(jnp.isnan(other), jnp.nan, jnp.where(self == 0, 0, self * logarithm))


def _infer_heaviside(self: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """PyTorch's shape function is not asked for `heaviside_`, which converts nothing either."""
    if self.dtype != values.dtype or self.is_complex():
        raise RuntimeError("heaviside is not yet implemented for complex tensors or tensors with different dtypes.")
    return without_kernels(torch.ops.aten.heaviside.default, self, values)


@pointwise("heaviside", infer=_infer_heaviside)
def heaviside(self, values):
    return jnp.where(self == 0, values, (self > 0).astype(self.dtype))


def _magnitude(x: Any) -> Any:
    """The absolute value as an unsigned integer, which that of the smallest integer is too."""
    return jnp.abs(x).astype(f"uint{x.dtype.itemsize * 8}")


@pointwise("gcd")
def gcd(self, other):
    """The absolute value of the smallest integer is itself, which PyTorch's loop leaves signs of; jax's does not end
    where it meets a zero."""

    def step(state: tuple[Any, Any]) -> tuple[Any, Any]:
        a, b = state
        return jnp.where(a == 0, 0, lax.rem(b, jnp.where(a == 0, 1, a))), jnp.where(a == 0, b, a)

    both = tuple(jnp.broadcast_arrays(jnp.abs(self), jnp.abs(other)))
    return lax.while_loop(lambda state: jnp.any(state[0] != 0), step, both)[1]


@pointwise("lcm")
def lcm(self, other):
    wide = jnp.promote_types(self.dtype, jnp.int32)  # as in C++
    product = jnp.lcm(_magnitude(self.astype(wide)), _magnitude(other.astype(wide))).astype(wide)
    return jnp.abs(product).astype(self.dtype)  # also where the product is no integer of the dtype


@pointwise("ldexp.Tensor", promote="int_to_float")
def ldexp(self, other):
    return self * jnp.exp2(other)


@pointwise("frexp.Tensor", infer=lambda self: (like(self), like(self, dtype=torch.int32)))
def frexp(self):
    return jnp.frexp(self)


@lowering("logit", structural={"eps": None}, elementwise=True)
def logit(self, eps=None, *, ctx):
    x = as_dtype(self, computed(ctx).to_real())
    x = x if eps is None else jnp.clip(x, eps, 1 - eps)
    return jnp.log(x / (1 - x))


@lowering("logit_backward", structural={"eps": None}, elementwise=True)
def logit_backward(grad_output, self, eps=None, *, ctx):
    grad, x = (as_dtype(v, computed(ctx)) for v in (grad_output, self))
    low, high, outside = (0.0, 1.0, jnp.nan) if eps is None else (eps, 1 - eps, 0.0)
    return jnp.where((x < low) | (x > high), outside, grad / (x * (1 - x)))


# Complex numbers


def _infer_complex(real: torch.Tensor, imag: torch.Tensor) -> torch.Tensor:
    if real.dtype != imag.dtype:
        raise RuntimeError(f"Expected object of scalar type {real.dtype} but got scalar type {imag.dtype}")
    return torch.complex(real, imag)


@pointwise("complex", infer=_infer_complex)
def complex_(real, imag):
    return lax.complex(*jnp.broadcast_arrays(real, imag))


@pointwise("polar")
def polar(abs, angle):
    return lax.complex(*jnp.broadcast_arrays(abs * jnp.cos(angle), abs * jnp.sin(angle)))


@lowering("_conj_physical", infer=like, elementwise=True)
@lowering("conj_physical.out", "conj_physical_")
def conj_physical(self):
    return jnp.conj(self) if jnp.issubdtype(self.dtype, jnp.complexfloating) else self


@pointwise("angle", promote="int_to_float")
def angle(self):
    if jnp.issubdtype(self.dtype, jnp.complexfloating):
        return jnp.angle(self)
    return jnp.where(jnp.isnan(self), self, jnp.where(self < 0, jnp.pi, 0))
