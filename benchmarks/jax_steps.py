"""In: a workload. Out: the same training step in hand-written JAX, one jit with donated state: the bar XLA sets."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import data
import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import tree_map

Tree = dict[str, Any]


def linear(p: Tree, name: str, x: jax.Array) -> jax.Array:
    y = x @ p[name + ".weight"].T
    return y + p[name + ".bias"] if name + ".bias" in p else y


def layer_norm(p: Tree, name: str, x: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * p[name + ".weight"] + p[name + ".bias"]


def mlp(p: Tree, x: jax.Array) -> jax.Array:
    return linear(p, "l3", jax.nn.relu(linear(p, "l2", jax.nn.relu(linear(p, "l1", x)))))


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * (q.shape[-1] ** -0.5)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), -1), v)


def gpt(p: Tree, ids: jax.Array, heads: int = 4, layers: int = 4) -> jax.Array:
    length = ids.shape[1]
    x = p["token_embedding.weight"][ids] + p["position_embedding.weight"][:length]
    mask = jnp.tril(jnp.ones((length, length), bool))
    for i in range(layers):
        b = f"blocks.{i}."
        batch, _, width = x.shape
        q, k, v = (
            t.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)
            for t in jnp.split(linear(p, b + "qkv", layer_norm(p, b + "ln1", x)), 3, 2)
        )
        y = attention(q, k, v, mask).transpose(0, 2, 1, 3).reshape(batch, length, width)
        x = x + linear(p, b + "proj", y)
        hidden = jax.nn.gelu(linear(p, b + "fc", layer_norm(p, b + "ln2", x)), approximate=False)
        x = x + linear(p, b + "out", hidden)
    return linear(p, "head", layer_norm(p, "lnf", x))


def linear_shapes(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {name + ".weight": (outputs, inputs), name + ".bias": (outputs,)}


def mlp_shapes() -> dict[str, tuple[int, ...]]:
    return {**linear_shapes("l1", 256, 256), **linear_shapes("l2", 256, 256), **linear_shapes("l3", 256, 10)}


def gpt_shapes(vocabulary: int = 1000, width: int = 256, layers: int = 4) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embedding.weight": (vocabulary, width),
        "position_embedding.weight": (128, width),
        "lnf.weight": (width,),
        "lnf.bias": (width,),
        "head.weight": (vocabulary, width),
    }
    for b in (f"blocks.{i}." for i in range(layers)):
        shapes |= {b + n: (width,) for n in ("ln1.weight", "ln1.bias", "ln2.weight", "ln2.bias")}
        for name, inputs, outputs in (("qkv", 1, 3), ("proj", 1, 1), ("fc", 1, 4), ("out", 4, 1)):
            shapes |= linear_shapes(b + name, inputs * width, outputs * width)
    return shapes


def build(workload: str) -> Callable[[int], jax.Array]:
    """step(i) trains once and returns the loss, unread."""
    model, shapes = (gpt, gpt_shapes()) if workload == "w3" else (mlp, mlp_shapes())
    parameters = {name: jnp.asarray(data.parameter(name, shape)) for name, shape in shapes.items()}
    x, y = map(jnp.asarray, data.batch(workload))

    def loss_of(p: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        scores = model(p, x)
        scores, y = scores.reshape(-1, scores.shape[-1]), y.reshape(-1)
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], 1).mean()

    if workload == "w8":

        @functools.partial(jax.jit, donate_argnums=(0,))
        def sgd(p: Tree, x: jax.Array, y: jax.Array, lr: float) -> tuple[jax.Array, Tree]:
            loss, g = jax.value_and_grad(loss_of)(p, x, y)
            return loss, tree_map(lambda p, g: p - lr * g, p, g)

        def step(i: int) -> jax.Array:
            nonlocal parameters
            loss, parameters = sgd(parameters, x, y, data.learning_rate(i))
            return loss

        step.compiled = lambda: sgd.lower(parameters, x, y, 0.01).compile()  # type: ignore[attr-defined]
        return step

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def adamw(p: Tree, state: Tree, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Tree, Tree]:
        loss, g = jax.value_and_grad(loss_of)(p, x, y)
        t = state["t"] + 1
        m = tree_map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], g)
        v = tree_map(lambda v, g: 0.999 * v + 0.001 * g * g, state["v"], g)
        c1, c2 = 1 - 0.9**t, 1 - 0.999**t
        p = tree_map(lambda p, m, v: p * (1 - 1e-5) - 1e-3 * (m / c1) / (jnp.sqrt(v / c2) + 1e-8), p, m, v)
        return loss, p, {"t": t, "m": m, "v": v}

    zeros = functools.partial(tree_map, jnp.zeros_like)
    state: Tree = {"t": jnp.zeros(()), "m": zeros(parameters), "v": zeros(parameters)}

    def adamw_step(i: int) -> jax.Array:
        nonlocal parameters, state
        loss, parameters, state = adamw(parameters, state, x, y)
        return loss

    adamw_step.compiled = lambda: adamw.lower(parameters, state, x, y).compile()  # type: ignore[attr-defined]
    return adamw_step


def peak_bytes(step: Any) -> int:
    """What the compiled step needs at once: arguments, results that take no argument's place, temporaries."""
    m = step.compiled().memory_analysis()
    new = m.output_size_in_bytes - m.alias_size_in_bytes
    return int(m.argument_size_in_bytes + new + m.temp_size_in_bytes)
