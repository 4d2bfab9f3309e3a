"""Recurrent nets: fused LSTM and GRU cells, and whole layers of LSTMs, GRUs and plain ones, whose steps are a loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchtpu.ops.linalg.matmul import contract
from torchtpu.ops.registry import jax, jnp, lax, like, lowering, opmath


def _gates(product: Any, bias: Any, count: int) -> list[Any]:
    gates = opmath(product)
    return jnp.split(gates if bias is None else gates + opmath(bias), count, 1)


def _joined(input_gates: Any, hidden_gates: Any, input_bias: Any, hidden_bias: Any) -> list[Any]:
    pairs = zip(_gates(input_gates, input_bias, 4), _gates(hidden_gates, hidden_bias, 4), strict=True)
    return [x + h for x, h in pairs]


def _check_same_size(input_gates: torch.Tensor, hidden_gates: torch.Tensor, name: str) -> None:
    if input_gates.shape != hidden_gates.shape:
        raise RuntimeError(
            "Expected tensor for argument #1 'input_gates' to have same size as tensor for argument #2 'hidden_gates'; "
            f"but {list(input_gates.shape)} does not equal {list(hidden_gates.shape)} "
            f"(while checking arguments for {name})"
        )


def _infer_lstm(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cx: torch.Tensor,
    input_bias: Any = None,
    hidden_bias: Any = None,
) -> tuple[torch.Tensor, ...]:
    # PyTorch's own shape function needs biases.
    _check_same_size(input_gates, hidden_gates, "_thnn_fused_lstm_cell")
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
    _check_same_size(input_gates, hidden_gates, "_thnn_fused_gru_cell")
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


# ---- a layer in one direction: all steps in one loop


Step = tuple[tuple[Any, ...], tuple[Any, ...]]  # the next state, and what backward needs beside it


def _lstm(x: Any, hidden: Any, state: tuple[Any, Any]) -> Step:
    enter, forget, cell, leave = jnp.split(x + hidden, 4, 1)
    enter, forget, leave = map(jax.nn.sigmoid, (enter, forget, leave))
    cell = jnp.tanh(cell)
    cy = forget * state[1] + enter * cell
    return (leave * jnp.tanh(cy), cy), (jnp.concatenate([enter, forget, cell, leave], 1),)


def _gru(x: Any, hidden: Any, state: tuple[Any]) -> Step:
    input_reset, input_update, input_new = jnp.split(x, 3, 1)
    hidden_reset, hidden_update, hidden_new = jnp.split(hidden, 3, 1)
    reset, update = jax.nn.sigmoid(input_reset + hidden_reset), jax.nn.sigmoid(input_update + hidden_update)
    new = jnp.tanh(input_new + reset * hidden_new)
    return (new + update * (state[0] - new),), (jnp.concatenate([reset, update, new, hidden_new], 1),)


def _tanh(x: Any, hidden: Any, state: tuple[Any]) -> Step:
    return (jnp.tanh(x + hidden),), ()


def _relu(x: Any, hidden: Any, state: tuple[Any]) -> Step:
    return (jax.nn.relu(x + hidden),), ()


# By the gradients of a step's state: those of its two gate products, and of the state before except through them. A
# step is (the state before, its own, what it kept).


def _lstm_back(grads: tuple[Any, Any], before: Any, after: Any, kept: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    enter, forget, cell, leave = jnp.split(kept[0], 4, 1)
    state = jnp.tanh(after[1])
    grad_h, grad_c = grads
    grad_c = grad_c + grad_h * leave * (1 - state * state)
    each = (
        grad_c * cell * enter * (1 - enter),
        grad_c * before[1] * forget * (1 - forget),
        grad_c * enter * (1 - cell * cell),
        grad_h * state * leave * (1 - leave),
    )
    grad_gates = jnp.concatenate(each, 1)
    return grad_gates, grad_gates, (jnp.zeros_like(grad_h), grad_c * forget)


def _gru_back(grads: tuple[Any], before: Any, after: Any, kept: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    reset, update, new, hidden_new = jnp.split(kept[0], 4, 1)
    (grad,) = grads
    grad_update = grad * (before[0] - new) * update * (1 - update)
    grad_new = grad * (1 - update) * (1 - new * new)
    grad_reset = grad_new * hidden_new * reset * (1 - reset)
    grad_input = jnp.concatenate([grad_reset, grad_update, grad_new], 1)
    grad_hidden = jnp.concatenate([grad_reset, grad_update, grad_new * reset], 1)
    return grad_input, grad_hidden, (grad * update,)


def _tanh_back(grads: tuple[Any], before: Any, after: Any, kept: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    grad_gates = grads[0] * (1 - after[0] * after[0])
    return grad_gates, grad_gates, (jnp.zeros_like(grad_gates),)


def _relu_back(grads: tuple[Any], before: Any, after: Any, kept: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    grad_gates = jnp.where(after[0] > 0, grads[0], 0)
    return grad_gates, grad_gates, (jnp.zeros_like(grad_gates),)


_STEPS: Mapping[str, Callable[..., Any]] = {"lstm": _lstm, "gru": _gru, "tanh": _tanh, "relu": _relu}
_STEPS_BACK: Mapping[str, Callable[..., Any]] = {
    "lstm": _lstm_back,
    "gru": _gru_back,
    "tanh": _tanh_back,
    "relu": _relu_back,
}


def _infer_layer(
    gates: torch.Tensor, hx: torch.Tensor, cx: Any, weight: Any, bias: Any, lengths: Any, cell: str, reverse: bool
) -> list[torch.Tensor]:
    steps, batch, size = *gates.shape[:2], hx.shape[1]
    count = 1 if cx is None else 2
    shapes = [(batch, size)] * count + [(steps, batch, size)] * count
    shapes += [(steps, batch, 4 * size)] * (cell in ("lstm", "gru"))
    return [gates.new_empty(shape) for shape in shapes]


def _loop(step: Callable[[Any, Any], Any], state: Any, rows: Any, steps: int, *, reverse: bool) -> Any:
    """`lax.scan`, but a single step, as decoders take, is no loop: that would only be more for XLA to compile."""
    if steps != 1:
        return lax.scan(step, state, rows, reverse=reverse)
    state, made = step(state, jax.tree.map(lambda row: row[0], rows))
    return state, jax.tree.map(lambda row: row[None], made)


def _runs(lengths: Any, steps: int) -> list[Any]:
    """Whether each sample has a step of each number: (steps, batch, 1); nothing where all have all."""
    return [] if lengths is None else [(jnp.arange(steps)[:, None] < lengths)[..., None]]


@lowering("torchtpu::rnn_layer", infer=_infer_layer, multiplies=True)
def rnn_layer(gates, hx, cx, weight, bias, lengths, cell, reverse, *, ctx):
    function = _STEPS[cell]

    def step(state: Any, given: Any) -> Any:
        x, *runs = given
        hidden = contract(state[0], weight, ((1,), (1,)), ((), ()), ctx)
        hidden = opmath(hidden) if bias is None else opmath(hidden) + opmath(bias)
        new, kept = function(opmath(x), hidden, tuple(map(opmath, state)))
        new = tuple(n.astype(x.dtype) for n in new)
        for has in runs:
            new = tuple(jnp.where(has, n, s) for n, s in zip(new, state, strict=True))
        return new, (*new, *(k.astype(x.dtype) for k in kept))

    state = (hx,) if cx is None else (hx, cx)
    steps = gates.shape[0]
    last, each = _loop(step, state, (gates, *_runs(lengths, steps)), steps, reverse=reverse)
    return [*last, *each]


def _infer_layer_backward(
    grad_output: Any, grad_hy: Any, grad_cy: Any, hx: torch.Tensor, cx: Any, weight: torch.Tensor, lengths: Any,
    saved: list[torch.Tensor], has_bias: bool, cell: str, reverse: bool,
) -> list[torch.Tensor]:  # fmt: skip
    steps, batch, size = saved[0].shape
    width = weight.shape[0]
    shapes = [(steps, batch, width), (batch, size)] + [(batch, size)] * (cx is not None) + [(width, size)]
    return [weight.new_empty(shape) for shape in shapes + [(width,)] * has_bias]


@lowering("torchtpu::rnn_layer_backward", infer=_infer_layer_backward, multiplies=True)
def rnn_layer_backward(grad_output, grad_hy, grad_cy, hx, cx, weight, lengths, saved, has_bias, cell, reverse, *, ctx):
    first = (hx,) if cx is None else (hx, cx)
    after, kept = saved[: len(first)], saved[len(first) :]
    steps = after[0].shape[0]

    def moved(start: Any, states: Any) -> Any:
        """The state before each step."""
        part = lax.slice_in_dim(states, 1, steps) if reverse else lax.slice_in_dim(states, 0, steps - 1)
        return jnp.concatenate([part, start[None]] if reverse else [start[None], part])

    before = [moved(*each) for each in zip(first, after, strict=True)]
    given = [] if grad_output is None else [grad_output]
    last = [
        jnp.zeros_like(opmath(state)) if grad is None else opmath(grad)
        for state, grad in zip(first, (grad_hy, grad_cy), strict=False)
    ]

    def step(grads: Any, row: Any) -> Any:
        of_output, before, after, kept, runs = row
        grads = [grads[0] + sum(map(opmath, of_output)), *grads[1:]]
        wide = [tuple(map(opmath, each)) for each in (before, after, kept)]
        of_input, of_hidden, of_state = _STEPS_BACK[cell](tuple(grads), *wide)
        for has in runs:
            of_input, of_hidden = (jnp.where(has, each, 0) for each in (of_input, of_hidden))
            of_state = [jnp.where(has, new, old) for new, old in zip(of_state, grads, strict=True)]
        through = contract(of_hidden.astype(weight.dtype), weight, ((1,), (0,)), ((), ()), ctx)
        new = [of_state[0] + opmath(through), *of_state[1:]]
        made = (of_input.astype(weight.dtype), of_hidden.astype(weight.dtype))
        return tuple(new), made if cell == "gru" else made[:1]

    rows = given, before, after, kept, _runs(lengths, steps)
    grads, made = _loop(step, tuple(last), rows, steps, reverse=not reverse)
    of_input, of_hidden = made[0], made[-1]
    grad_weight = contract(of_hidden, before[0], ((0, 1), (0, 1)), ((), ()), ctx)
    return [of_input, *grads, grad_weight] + [opmath(of_hidden).sum((0, 1))] * has_bias
