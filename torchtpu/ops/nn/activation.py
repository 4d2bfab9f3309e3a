"""Activation functions and their gradients."""

from __future__ import annotations

import math

import torch

from torchtpu.ops.registry import jax, jnp, lax, like, lowering, opmath, pointwise

SQRT_HALF = math.sqrt(0.5)
GELU_INNER = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715


@pointwise("relu")
def relu(self):
    return jnp.maximum(self, 0)


@pointwise("_add_relu.Tensor", "_add_relu.Scalar", infer=lambda x, other, alpha: torch.add(x, other, alpha=alpha))
def add_relu(self, other, alpha=1):
    return jnp.maximum(self + other * alpha, 0)


def _in_own_dtype(x, *numbers):
    """Elements and numbers as kernels compute them that cast the numbers to the elements, whole ones for integers."""
    x = opmath(x)
    return x, *(jnp.asarray(number).astype(x.dtype) for number in numbers)


@lowering("threshold", lifts=True, elementwise=True)
def threshold(self, threshold, value):
    self, threshold, value = _in_own_dtype(self, threshold, value)
    return jnp.where(self <= threshold, value, self)


@pointwise("threshold_backward")
def threshold_backward(grad_output, self, threshold):
    return jnp.where(self <= threshold, 0, grad_output)


@pointwise("leaky_relu")
def leaky_relu(self, negative_slope=0.01):
    return jnp.where(self > 0, self, self * negative_slope)


@pointwise("leaky_relu_backward")
def leaky_relu_backward(grad_output, self, negative_slope, self_is_result):
    return jnp.where(self > 0, grad_output, grad_output * negative_slope)


@pointwise("_prelu_kernel")
def prelu_kernel(self, weight):
    return jnp.where(self > 0, self, weight * self)


@pointwise("_prelu_kernel_backward")
def prelu_kernel_backward(grad_output, self, weight):
    return jnp.where(self > 0, grad_output, weight * grad_output), jnp.where(self > 0, 0, self * grad_output)


@pointwise("elu")
def elu(self, alpha=1, scale=1, input_scale=1):
    # The selected-away side must not overflow: its gradient would be 0 * inf.
    negative = jnp.expm1(jnp.minimum(self, 0) * input_scale) * (alpha * scale)
    return jnp.where(self <= 0, negative, self * scale)


@pointwise("elu_backward")
def elu_backward(grad_output, alpha, scale, input_scale, is_result, self_or_result):
    x, negative = self_or_result, alpha * scale
    slope = input_scale * (x + negative) if is_result else input_scale * negative * jnp.exp(x * input_scale)
    return jnp.where(x <= 0, grad_output * slope, grad_output * scale)


@pointwise("celu")
def celu(self, alpha=1.0):
    return jnp.where(self <= 0, jnp.expm1(jnp.minimum(self, 0) / alpha) * alpha, self)


@pointwise("softplus")
def softplus(self, beta=1, threshold=20):
    scaled = self * beta
    return jnp.where(scaled > threshold, self, jnp.log1p(jnp.exp(scaled)) / beta)


@pointwise("softplus_backward")
def softplus_backward(grad_output, self, beta, threshold):
    scaled = self * beta
    return jnp.where(scaled > threshold, grad_output, grad_output * lax.logistic(scaled))


@lowering("hardtanh", infer=like, lifts=True, elementwise=True)
def hardtanh(self, min_val=-1, max_val=1):
    self, min_val, max_val = _in_own_dtype(self, min_val, max_val)
    return jnp.minimum(jnp.maximum(self, min_val), max_val)


@pointwise("hardtanh_backward")
def hardtanh_backward(grad_output, self, min_val, max_val):
    return jnp.where((self <= min_val) | (self >= max_val), 0, grad_output)


@pointwise("hardsigmoid")
def hardsigmoid(self):
    return jnp.clip(self + 3, 0, 6) / 6


@pointwise("hardsigmoid_backward")
def hardsigmoid_backward(grad_output, self):
    return jnp.where((self > -3) & (self < 3), grad_output / 6, 0)


@pointwise("hardswish")
def hardswish(self):
    return self * jnp.clip(self + 3, 0, 6) / 6


@pointwise("hardswish_backward")
def hardswish_backward(grad_output, self):
    return jnp.where(self <= -3, 0, jnp.where(self < 3, grad_output * (self / 3 + 0.5), grad_output))


@pointwise("hardshrink")
def hardshrink(self, lambd=0.5):
    return jnp.where((self >= -lambd) & (self <= lambd), 0, self)


@pointwise("softshrink")
def softshrink(self, lambd=0.5):
    # self * 0 keeps NaN.
    return jnp.where(self > lambd, self - lambd, jnp.where(self < -lambd, self + lambd, self * 0))


@pointwise("hardshrink_backward", "softshrink_backward")
def shrink_backward(grad_output, self, lambd):
    return jnp.where((self >= -lambd) & (self <= lambd), 0, grad_output)


@pointwise("sigmoid_backward")
def sigmoid_backward(grad_output, output):
    return grad_output * jnp.conj((1 - output) * output)


@pointwise("tanh_backward")
def tanh_backward(grad_output, output):
    return grad_output * jnp.conj(1 - output * output)


@pointwise("silu")
def silu(self):
    return self * lax.logistic(self)


@pointwise("silu_backward")
def silu_backward(grad_output, self):
    open_ = lax.logistic(self)
    return grad_output * (open_ * (1 + self * (1 - open_)))


@pointwise("mish")
def mish(self):
    return self * jnp.tanh(jax.nn.softplus(self))


@pointwise("mish_backward")
def mish_backward(grad_output, self):
    bounded = jnp.tanh(jax.nn.softplus(self))
    return grad_output * (bounded + self * lax.logistic(self) * (1 - bounded * bounded))


@pointwise("gelu")
def gelu(self, *, approximate="none"):
    if approximate == "tanh":
        return 0.5 * self * (1 + jnp.tanh(GELU_INNER * (self + GELU_CUBIC * self * self * self)))
    return 0.5 * self * (1 + lax.erf(self * SQRT_HALF))


@pointwise("gelu_backward")
def gelu_backward(grad_output, self, *, approximate="none"):
    x = self
    if approximate == "tanh":
        inner = jnp.tanh(GELU_INNER * (x + GELU_CUBIC * x * x * x))
        slope = 0.5 * x * (1 - inner * inner) * GELU_INNER * (1 + 3 * GELU_CUBIC * x * x)
        return grad_output * (0.5 * (1 + inner) + slope)
    density = jnp.exp(-0.5 * x * x) * (GELU_INNER * 0.5)
    return grad_output * (0.5 * (1 + lax.erf(x * SQRT_HALF)) + x * density)


@pointwise("log_sigmoid_forward")
def log_sigmoid_forward(self):
    buffer = jnp.exp(-jnp.abs(self))
    return jnp.minimum(self, 0) - jnp.log1p(buffer), buffer


@pointwise("log_sigmoid_backward")
def log_sigmoid_backward(grad_output, self, buffer):
    share = buffer / (1 + buffer)
    return grad_output * jnp.where(self < 0, 1 - share, share)


@lowering("glu")
def glu(self, dim=-1):
    value, gate = jnp.split(opmath(self), 2, axis=dim)
    return value * lax.logistic(gate)


@lowering("glu_backward")
def glu_backward(grad_output, self, dim):
    value, gate = jnp.split(opmath(self), 2, axis=dim)
    grad, open_ = opmath(grad_output), lax.logistic(gate)
    return jnp.concatenate([grad * open_, grad * value * open_ * (1 - open_)], axis=dim)


@lowering("glu_jvp", infer=lambda glu, x, dx, dim: glu.clone())
def glu_jvp(glu, x, dx, dim):
    gate = jnp.split(opmath(x), 2, axis=dim)[1]
    d_value, d_gate = jnp.split(opmath(dx), 2, axis=dim)
    open_ = lax.logistic(gate)
    return d_value * open_ + opmath(glu) * (1 - open_) * d_gate


@lowering("glu_backward_jvp", infer=lambda grad_x, *_: grad_x.clone())
def glu_backward_jvp(grad_x, grad_glu, x, dgrad_glu, dx, dim):
    point, direction = (opmath(grad_glu), opmath(x)), (opmath(dgrad_glu), opmath(dx))
    return jax.jvp(lambda grad, x: glu_backward(grad, x, dim), point, direction)[1]
