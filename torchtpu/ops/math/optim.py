"""Fused optimizers and gradient scaling, on lists of parameters, gradients and state."""

from __future__ import annotations

from typing import Any

from torchtpu.ops.registry import jnp, like, lowering, opmath


def _prepared(grad, param, grad_scale, maximize, weight_decay):
    """(what is stored as the gradient, what the update uses)."""
    stored = opmath(grad) if grad_scale is None else opmath(grad) / grad_scale.astype(opmath(grad).dtype)
    used = -stored if maximize else stored
    return stored, used if _is_zero(weight_decay) else used + param * weight_decay


def _is_zero(number):
    return isinstance(number, (int, float)) and number == 0


def _as(number, dtype):
    return jnp.asarray(number).astype(dtype)


def _kept(found_inf, old, new):
    """The lists `new`, or `old` where a gradient was not finite."""
    if found_inf is None:
        return new
    skip = found_inf.reshape(()) == 1
    return [
        [jnp.where(skip, o, n.astype(o.dtype)) for o, n in zip(olds, news, strict=True)]
        for olds, news in zip(old, new, strict=True)
    ]


def _like(count):
    """Shape inference: new tensors like those of the first `count` lists."""
    return lambda *args: tuple([like(t) for t in tensors] for tensors in args[:count])


SGD_STRUCTURAL = {"weight_decay": (0.0,), "momentum": (0.0,), "dampening": (0.0,)}


EACH_ELEMENT: dict[str, Any] = {"lifts": True, "maps": True, "elementwise": True}


@lowering("_fused_sgd", "_fused_sgd.tensor_lr", structural=SGD_STRUCTURAL, infer=_like(3), **EACH_ELEMENT)
def fused_sgd(
    self,
    grads,
    momentum_buffer_list,
    *,
    weight_decay,
    momentum,
    lr,
    dampening,
    nesterov,
    maximize,
    is_first_step,
    grad_scale=None,
    found_inf=None,
):
    params, stored, buffers = [], [], []
    for i, (param, grad) in enumerate(zip(self, grads, strict=True)):
        p = opmath(param)
        kept, g = _prepared(grad, p, grad_scale, maximize, weight_decay)
        if not _is_zero(momentum):
            buffer = g if is_first_step else opmath(momentum_buffer_list[i]) * momentum + g * (1 - dampening)
            buffers.append(buffer)
            g = g + buffer * momentum if nesterov else buffer
        params.append(p - _as(lr, p.dtype) * g)
        stored.append(grad if grad_scale is None else kept)
    buffers = buffers or list(momentum_buffer_list)
    return _kept(found_inf, (self, grads, momentum_buffer_list), (params, stored, buffers))


def _bias_correction(beta, step, dtype):
    # 1 - beta ** step without the cancellation: beta is near 1 and given in double precision.
    return -jnp.expm1(step.astype(dtype) * jnp.log1p(_as(jnp.asarray(beta) - 1.0, dtype)))


@lowering(
    "_fused_adam",
    "_fused_adam.tensor_lr",
    "_fused_adamw",
    "_fused_adamw.tensor_lr",
    structural={"weight_decay": (0.0,)},
    infer=_like(5),
    **EACH_ELEMENT,
)
def fused_adam(
    self,
    grads,
    exp_avgs,
    exp_avg_sqs,
    max_exp_avg_sqs,
    state_steps,
    *,
    lr,
    beta1,
    beta2,
    weight_decay,
    eps,
    amsgrad,
    maximize,
    grad_scale=None,
    found_inf=None,
    ctx,
):
    decouples = ctx.op.startswith("_fused_adamw")
    made = tuple([] for _ in range(5))
    for i, (param, grad) in enumerate(zip(self, grads, strict=True)):
        p = opmath(param)
        rate = _as(lr, p.dtype)
        kept, g = _prepared(grad, p, grad_scale, maximize, 0.0 if decouples else weight_decay)
        if decouples and not _is_zero(weight_decay):
            p = p * (1 - rate * weight_decay)
        m = opmath(exp_avgs[i])
        m = m + (g - m) * _as(1 - beta1, m.dtype)
        v = opmath(exp_avg_sqs[i]) * beta2 + g * g * _as(1 - beta2, g.dtype)
        largest = jnp.maximum(opmath(max_exp_avg_sqs[i]), v) if amsgrad else v
        step = state_steps[i].reshape(())
        size = rate / _bias_correction(beta1, step, p.dtype)
        p = p - size * m / (jnp.sqrt(largest) / jnp.sqrt(_bias_correction(beta2, step, p.dtype)) + eps)
        for values, value in zip(made, (p, grad if grad_scale is None else kept, m, v, largest), strict=True):
            values.append(value)
    new = (*made[:4], made[4] if amsgrad else list(max_exp_avg_sqs))
    return _kept(found_inf, (self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs), new)


@lowering("_fused_adagrad", structural={"weight_decay": (0.0,)}, infer=_like(4), **EACH_ELEMENT)
@lowering("_fused_adagrad.tensor_lr", structural={"weight_decay": (0.0,)}, infer=_like(3), **EACH_ELEMENT)
def fused_adagrad(
    self,
    grads,
    state_sums,
    state_steps,
    *,
    lr,
    lr_decay,
    weight_decay,
    eps,
    maximize,
    grad_scale=None,
    found_inf=None,
    ctx,
):
    params, stored, sums = [], [], []
    for param, grad, state_sum, step in zip(self, grads, state_sums, state_steps, strict=True):
        p = opmath(param)
        kept, g = _prepared(grad, p, grad_scale, maximize, weight_decay)
        total = opmath(state_sum) + g * g
        rate = _as(lr, p.dtype) / (1 + (step.reshape(()).astype(p.dtype) - 1) * lr_decay)
        params.append(p - rate * g / (jnp.sqrt(total) + eps))
        stored.append(grad if grad_scale is None else kept)
        sums.append(total)
    made = _kept(found_inf, (self, grads, state_sums), (params, stored, sums))
    # Only the form with a float learning rate declares that it writes the steps.
    return (*made, list(state_steps)) if len(ctx.results) == 4 * len(self) else made


@lowering("_amp_foreach_non_finite_check_and_unscale")
def amp_foreach_non_finite_check_and_unscale(self, found_inf, inv_scale):
    finite = jnp.stack([jnp.all(jnp.isfinite(g)) for g in self]).all() if self else True
    factor = inv_scale.reshape(())
    unscaled = [opmath(g) * factor.astype(opmath(g).dtype) for g in self]
    return unscaled, jnp.where(finite, found_inf, jnp.ones_like(found_inf))


@lowering("_amp_update_scale", lifts=True)
def amp_update_scale(self, growth_tracker, found_inf, scale_growth_factor, scale_backoff_factor, growth_interval):
    overflowed = found_inf.reshape(self.shape) != 0
    tracker = growth_tracker + 1
    grows = tracker.reshape(self.shape) == growth_interval
    grown = self * scale_growth_factor
    scale = jnp.where(grows & jnp.isfinite(grown), grown, self)
    reset = overflowed.reshape(tracker.shape) | (tracker == growth_interval)
    return jnp.where(overflowed, self * scale_backoff_factor, scale), jnp.where(reset, 0, tracker)
