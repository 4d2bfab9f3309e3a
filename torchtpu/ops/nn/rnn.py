"""Fused LSTM and GRU cells: the next state, and what backward needs, from two gate products and a state."""

from __future__ import annotations

from typing import Any

import torch

from torchtpu.ops.registry import jax, jnp, like, lowering, opmath


def _gates(product: Any, bias: Any, count: int) -> list[Any]:
    gates = opmath(product)
    return jnp.split(gates if bias is None else gates + opmath(bias), count, 1)


def _joined(input_gates: Any, hidden_gates: Any, input_bias: Any, hidden_bias: Any) -> list[Any]:
    pairs = zip(_gates(input_gates, input_bias, 4), _gates(hidden_gates, hidden_bias, 4), strict=True)
    return [x + h for x, h in pairs]


def _infer_lstm(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cx: torch.Tensor,
    input_bias: Any = None,
    hidden_bias: Any = None,
) -> tuple[torch.Tensor, ...]:
    # PyTorch's own shape function needs biases.
    state = [like(cx, memory_format=torch.contiguous_format) for _ in range(2)]
    return *state, like(input_gates, memory_format=torch.contiguous_format)


@lowering("_thnn_fused_lstm_cell", infer=_infer_lstm)
def lstm_cell(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    enter, forget, cell, leave = _joined(input_gates, hidden_gates, input_bias, hidden_bias)
    enter, forget, leave = map(jax.nn.sigmoid, (enter, forget, leave))
    cell = jnp.tanh(cell)
    cy = forget * opmath(cx) + enter * cell
    return leave * jnp.tanh(cy), cy, jnp.concatenate([enter, forget, cell, leave], 1)


@lowering("_thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    if grad_hy is None and grad_cy is None:
        return None, None, None
    enter, forget, cell, leave = jnp.split(opmath(workspace), 4, 1)
    cx, state = opmath(cx), jnp.tanh(opmath(cy))
    grad_h = jnp.zeros_like(state) if grad_hy is None else opmath(grad_hy)
    grad_c = grad_h * leave * (1 - state * state)
    if grad_cy is not None:
        grad_c = grad_c + opmath(grad_cy)
    grads = (
        grad_c * cell * enter * (1 - enter),
        grad_c * cx * forget * (1 - forget),
        grad_c * enter * (1 - cell * cell),
        grad_h * state * leave * (1 - leave),
    )
    grad_gates = jnp.concatenate(grads, 1)
    return grad_gates, grad_c * forget, grad_gates.sum(0) if has_bias else None


def _infer_gru(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hx: torch.Tensor,
    input_bias: Any = None,
    hidden_bias: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, size = hx.shape
    return hx.new_empty((batch, size)), hx.new_empty((batch, size * 5))


def _infer_gru_backward(
    grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    batch, size = grad_hy.shape
    grads = [
        grad_hy.new_empty((batch, size * 3)),
        grad_hy.new_empty((batch, size * 3)),
        grad_hy.new_empty((batch, size)),
    ]
    return *grads, *(grad_hy.new_empty(size * 3) if has_bias else None for _ in range(2))


@lowering("_thnn_fused_gru_cell", infer=_infer_gru)
def gru_cell(input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None):
    input_reset, input_update, input_new = _gates(input_gates, input_bias, 3)
    hidden_reset, hidden_update, hidden_new = _gates(hidden_gates, hidden_bias, 3)
    hx = opmath(hx)
    reset, update = jax.nn.sigmoid(input_reset + hidden_reset), jax.nn.sigmoid(input_update + hidden_update)
    new = jnp.tanh(input_new + reset * hidden_new)
    return new + update * (hx - new), jnp.concatenate([reset, update, new, hx, hidden_new], 1)


@lowering("_thnn_fused_gru_cell_backward", infer=_infer_gru_backward)
def gru_cell_backward(grad_hy, workspace, has_bias):
    reset, update, new, hx, hidden_new = jnp.split(opmath(workspace), 5, 1)
    grad = opmath(grad_hy)
    grad_update = grad * (hx - new) * update * (1 - update)
    grad_new = grad * (1 - update) * (1 - new * new)
    grad_reset = grad_new * hidden_new * reset * (1 - reset)
    grad_input = jnp.concatenate([grad_reset, grad_update, grad_new], 1)
    grad_hidden = jnp.concatenate([grad_reset, grad_update, grad_new * reset], 1)
    biases = (grad_input.sum(0), grad_hidden.sum(0)) if has_bias else (None, None)
    return grad_input, grad_hidden, grad * update, *biases
