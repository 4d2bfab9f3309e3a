"""The workloads' steps in hand-written JAX, one jit with donated state each: the bar that XLA sets."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import data
import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import tree_map

Tree = dict[str, Any]
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


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


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return attention(q, k, v, jnp.tril(jnp.ones((q.shape[2], q.shape[2]), bool)))


def split_heads(p: Tree, b: str, x: jax.Array, heads: int) -> list[jax.Array]:
    batch, length, width = x.shape
    qkv = jnp.split(linear(p, b + "qkv", layer_norm(p, b + "ln1", x)), 3, 2)
    return [t.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3) for t in qkv]


def finish_block(p: Tree, b: str, x: jax.Array, y: jax.Array) -> jax.Array:
    x = x + linear(p, b + "proj", y.transpose(0, 2, 1, 3).reshape(x.shape))
    hidden = jax.nn.gelu(linear(p, b + "fc", layer_norm(p, b + "ln2", x)), approximate=False)
    return x + linear(p, b + "out", hidden)


def gpt(p: Tree, ids: jax.Array, attend: Attention, heads: int, layers: int) -> jax.Array:
    x = p["token_embedding.weight"][ids] + p["position_embedding.weight"][: ids.shape[1]]
    for i in range(layers):
        x = finish_block(p, f"blocks.{i}.", x, attend(*split_heads(p, f"blocks.{i}.", x, heads)))
    return linear(p, "head", layer_norm(p, "lnf", x))


def decode(p: Tree, caches: Tree, token: jax.Array, position: jax.Array) -> tuple[jax.Array, Tree]:
    """The scores of what follows one token of each sequence, and the caches with its keys and values."""
    x = p["token_embedding.weight"][token] + p["position_embedding.weight"][position]
    mask = jnp.arange(p["position_embedding.weight"].shape[0]) <= position
    caches = dict(caches)
    for i in range(4):
        b = f"blocks.{i}."
        q, k, v = split_heads(p, b, x, 4)
        caches[b + "k"] = keys = lax.dynamic_update_slice_in_dim(caches[b + "k"], k, position[0], 2)
        caches[b + "v"] = values = lax.dynamic_update_slice_in_dim(caches[b + "v"], v, position[0], 2)
        x = finish_block(p, b, x, attention(q, keys, values, mask))
    return linear(p, "head", layer_norm(p, "lnf", x)), caches


def convolve(p: Tree, name: str, x: jax.Array, stride: int, padding: int) -> jax.Array:
    pads = [(padding, padding)] * 2
    return lax.conv_general_dilated(x, p[name + ".weight"], (stride, stride), pads)


def batch_norm(p: Tree, running: Tree, name: str, x: jax.Array) -> jax.Array:
    """Normalises by the batch and moves the running statistics, which are changed in place in their tree."""
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
    count = x.size // x.shape[1]
    for key, now in ((".running_mean", mean), (".running_var", variance * (count / (count - 1)))):
        running[name + key] = 0.9 * running[name + key] + 0.1 * now
    running[name + ".num_batches_tracked"] += 1
    scale = lax.rsqrt(variance + 1e-5) * p[name + ".weight"]
    return (x - mean[:, None, None]) * scale[:, None, None] + p[name + ".bias"][:, None, None]


RESIDUAL_BLOCKS = ((64, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512), (512, 512))


def resnet(p: Tree, running: Tree, x: jax.Array) -> tuple[jax.Array, Tree]:
    running = dict(running)
    x = jax.nn.relu(batch_norm(p, running, "bn1", convolve(p, "conv1", x, 2, 3)))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), ((0, 0), (0, 0), (1, 1), (1, 1)))
    for i, (inputs, outputs) in enumerate(RESIDUAL_BLOCKS):
        b, stride = f"layers.{i}.", 1 if inputs == outputs else 2
        y = jax.nn.relu(batch_norm(p, running, b + "bn1", convolve(p, b + "conv1", x, stride, 1)))
        y = batch_norm(p, running, b + "bn2", convolve(p, b + "conv2", y, 1, 1))
        if stride == 2:
            x = batch_norm(p, running, b + "down.1", convolve(p, b + "down.0", x, 2, 0))
        x = jax.nn.relu(x + y)
    return linear(p, "fc", x.mean((2, 3))), running


def linear_shapes(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {name + ".weight": (outputs, inputs), name + ".bias": (outputs,)}


def mlp_shapes() -> dict[str, tuple[int, ...]]:
    return {**linear_shapes("l1", 256, 256), **linear_shapes("l2", 256, 256), **linear_shapes("l3", 256, 10)}


def gpt_shapes(vocabulary: int, width: int, layers: int, length: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embedding.weight": (vocabulary, width),
        "position_embedding.weight": (length, width),
        "lnf.weight": (width,),
        "lnf.bias": (width,),
        "head.weight": (vocabulary, width),
    }
    for b in (f"blocks.{i}." for i in range(layers)):
        shapes |= {b + n: (width,) for n in ("ln1.weight", "ln1.bias", "ln2.weight", "ln2.bias")}
        for name, inputs, outputs in (("qkv", 1, 3), ("proj", 1, 1), ("fc", 1, 4), ("out", 4, 1)):
            shapes |= linear_shapes(b + name, inputs * width, outputs * width)
    return shapes


def resnet_shapes() -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Of the parameters and of the running statistics."""
    convolutions: list[tuple[str, str, tuple[int, ...]]] = [("conv1", "bn1", (64, 3, 7, 7))]
    for i, (inputs, outputs) in enumerate(RESIDUAL_BLOCKS):
        b = f"layers.{i}."
        convolutions.append((b + "conv1", b + "bn1", (outputs, inputs, 3, 3)))
        convolutions.append((b + "conv2", b + "bn2", (outputs, outputs, 3, 3)))
        if inputs != outputs:
            convolutions.append((b + "down.0", b + "down.1", (outputs, inputs, 1, 1)))
    shapes, running = linear_shapes("fc", 512, 100), {}
    for convolution, norm, shape in convolutions:
        shapes |= {convolution + ".weight": shape, norm + ".weight": shape[:1], norm + ".bias": shape[:1]}
        running |= {norm + ".running_mean": shape[:1], norm + ".running_var": shape[:1]}
        running[norm + ".num_batches_tracked"] = ()
    return shapes, running


class Step(NamedTuple):
    """A jitted function of the state (donated), the batch and further numbers, which returns a result and the state.

    The state is described: `parameters` have data's numbers, the rest of it are zeros, and ones where the name ends in
    "var".
    """

    function: Any
    parameters: dict[str, tuple[int, ...]]
    rest: Any
    dtype: Any = jnp.float32


def cross_entropy(scores: jax.Array, y: jax.Array) -> jax.Array:
    scores, y = scores.reshape(-1, scores.shape[-1]), y.reshape(-1)
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], 1).mean()


def adamw(model: Callable[[Tree, jax.Array], jax.Array], shapes: dict[str, tuple[int, ...]], dtype: Any) -> Step:
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(p: Tree, state: Tree, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Tree, Tree]:
        loss, g = jax.value_and_grad(lambda p: cross_entropy(model(p, x), y))(p)
        t = state["t"] + 1
        m = tree_map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], g)
        v = tree_map(lambda v, g: 0.999 * v + 0.001 * g * g, state["v"], g)
        c1, c2 = (1 - 0.9**t).astype(dtype), (1 - 0.999**t).astype(dtype)
        p = tree_map(lambda p, m, v: p * (1 - 1e-5) - 1e-3 * (m / c1) / (jnp.sqrt(v / c2) + 1e-8), p, m, v)
        return loss, p, {"t": t, "m": m, "v": v}

    moments = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    return Step(step, shapes, {"t": jax.ShapeDtypeStruct((), jnp.float32), "m": moments, "v": moments}, dtype)


def sgd_with_momentum() -> Step:
    shapes, running = resnet_shapes()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(p: Tree, state: Tree, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Tree, Tree]:
        def loss_of(p: Tree) -> tuple[jax.Array, Tree]:
            scores, running = resnet(p, state["running"], x)
            return cross_entropy(scores, y), running

        (loss, running), g = jax.value_and_grad(loss_of, has_aux=True)(p)
        m = tree_map(lambda m, g: 0.9 * m + g, state["m"], g)
        return loss, tree_map(lambda p, m: p - 0.01 * m, p, m), {"m": m, "running": running}

    moments = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    kept = {name: jax.ShapeDtypeStruct(shape, jnp.float32 if shape else jnp.int32) for name, shape in running.items()}
    return Step(step, shapes, {"m": moments, "running": kept})


def sgd() -> Step:
    @functools.partial(jax.jit, donate_argnums=(0,))
    def step(p: Tree, _: Tree, x: jax.Array, y: jax.Array, lr: float) -> tuple[jax.Array, Tree, Tree]:
        loss, g = jax.value_and_grad(lambda p: cross_entropy(mlp(p, x), y))(p)
        return loss, tree_map(lambda p, g: p - lr * g, p, g), {}

    return Step(step, mlp_shapes(), {})


def decoding() -> Step:
    @functools.partial(jax.jit, donate_argnums=(1,))
    def step(p: Tree, caches: Tree, token: jax.Array, position: jax.Array) -> tuple[jax.Array, Tree]:
        return decode(p, caches, token, position)

    cache = jax.ShapeDtypeStruct((8, 4, 128, 64), jnp.float32)
    return Step(step, gpt_shapes(1000, 256, 4, 128), {f"blocks.{i}.{n}": cache for i in range(4) for n in "kv"})


def describe(workload: str, attend: Attention = causal_attention) -> Step:
    """The workload's step; `attend` is how the GPTs attend."""
    if workload == "w4":
        return sgd_with_momentum()
    if workload == "w8":
        return sgd()
    if workload == "decode":
        return decoding()
    if workload == "w3":
        model = functools.partial(gpt, attend=attend, heads=4, layers=4)
        return adamw(model, gpt_shapes(1000, 256, 4, 128), jnp.float32)
    if workload in ("gpt2", "gpt2-short"):
        model = functools.partial(gpt, attend=attend, heads=12, layers=12)
        return adamw(model, gpt_shapes(50304, 768, 12, 1024), jnp.bfloat16 if workload == "gpt2" else jnp.float32)
    return adamw(mlp, mlp_shapes(), jnp.float32)


def build(workload: str) -> Callable[[int], jax.Array]:
    """step(i) trains once and returns the loss, unread."""
    found = describe(workload)
    parameters = {name: jnp.asarray(data.parameter(name, shape)) for name, shape in found.parameters.items()}
    rest = jax.tree_util.tree_map_with_path(_first, found.rest)
    x, y = map(jnp.asarray, data.batch(workload))
    more = (lambda i: (data.learning_rate(i),)) if workload == "w8" else lambda i: ()

    def step(i: int) -> jax.Array:
        nonlocal parameters, rest
        loss, parameters, rest = found.function(parameters, rest, x, y, *more(i))
        return loss

    step.compiled = lambda: found.function.lower(parameters, rest, x, y, *more(0)).compile()  # type: ignore[attr-defined]
    return step


def _first(path: tuple[Any, ...], array: jax.ShapeDtypeStruct) -> jax.Array:
    return (jnp.ones if str(path[-1].key).endswith("var") else jnp.zeros)(array.shape, array.dtype)


def peak_bytes(step: Any) -> int:
    """What the compiled step needs at once: arguments, results that take no argument's place, temporaries."""
    m = step.compiled().memory_analysis()
    new = m.output_size_in_bytes - m.alias_size_in_bytes
    return int(m.argument_size_in_bytes + new + m.temp_size_in_bytes)
