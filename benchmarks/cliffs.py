"""CPU time of ops that XLA:CPU computes slowly as jax.numpy has them, on `tpu`, beside torch CPU and `jax.jit`.

All three run in one process, one thread each, in alternate rounds.

    python benchmarks/cliffs.py                  # all cases
    python benchmarks/cliffs.py conv sort        # those whose name has one of these words
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import peers

os.environ |= {**peers.ONE_THREAD, "JAX_PLATFORMS": "cpu", "TORCHTPU_PLATFORM": "cpu"}

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax import lax

Function = Callable[..., Any]


class Case(NamedTuple):
    """The same function in torch and in JAX as a user writes it, and its arguments."""

    torch: Function
    jax: Function
    arguments: tuple[np.ndarray, ...]


# Ratios that a case may have to torch's CPU and to jax.
LIMITS: dict[str, tuple[float | None, float | None]] = {
    "mix of 150 ops, 262144 elements": (None, 0.12),
    "chain of 300 ops, 262144 elements": (1.0, 1.0),
    "conv 3x3, 512 channels, 2x2": (1.3, 0.05),
    "conv 3x3, 512 channels, 2x2, image gradient": (1.3, 0.05),
    "max pool and its gradient": (1.0, 0.7),
}
_SECONDS = 3.0  # after which a case is not run again, once it has run three times


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype("float32")


def chain(tanh: Function) -> Function:
    """Each op reads the one before it."""

    def function(x: Any) -> Any:
        for _ in range(100):
            x = tanh(x * 0.9) + 0.1
        return x

    return function


def mix(tanh: Function) -> Function:
    """150 ops on four live values; each reads three of them and takes the place of one."""

    def run(*values: Any) -> Any:
        live = list(values)
        for i in range(150):
            a, b, c = (live[(i + k) % 4] for k in range(3))
            live[i % 4] = tanh(a) * b + c
        return tuple(live)

    return run


def chained_dots(ops: int) -> Function:
    def run(x: Any, w: Any) -> Any:
        for _ in range(ops):
            x = x @ w.T
        return x

    return run


def convolution(stride: int, padding: int) -> tuple[Function, Function]:
    def ours(x: Any, w: Any) -> Any:
        return F.conv2d(x, w, None, stride, padding)

    def theirs(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (stride, stride), [(padding, padding)] * 2)

    return ours, theirs


def gradient(ours: Function, theirs: Function, place: int) -> tuple[Function, Function]:
    """The gradient of the sum to one argument; torch and tpu compute the forward pass too."""

    def by_torch(*arguments: Any) -> Any:
        arguments = tuple(a.detach() for a in arguments)
        arguments[place].requires_grad_()
        return torch.autograd.grad(ours(*arguments).sum(), arguments[place])[0]

    return by_torch, jax.grad(lambda *a: theirs(*a).sum(), place)


def pool_by_jax(x: Any) -> Any:
    pads = ((0, 0), (0, 0), (1, 1), (1, 1))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), pads)


def pool(x: Any) -> Any:
    return F.max_pool2d(x, 3, 2, 1)


def norm_by_jax(x: Any, weight: Any, bias: Any) -> Any:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * weight + bias


def attention_by_jax(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, -1), v)


def make_cases() -> dict[str, Case]:
    wide, line = normal(1024, 1024), np.random.default_rng(0).permutation(65536).astype("float32")
    values = tuple(normal(262144) + k for k in range(4))
    cases = {
        "mix of 150 ops, 262144 elements": Case(mix(torch.tanh), mix(jnp.tanh), values),
        "chain of 300 ops, 262144 elements": Case(chain(torch.tanh), chain(jnp.tanh), values[:1]),
    }
    shapes = {
        "7x7 stride 2, 3 to 64 channels, 64x64": (3, 64, 64, 7, 2, 3),
        "3x3, 64 channels, 16x16": (64, 64, 16, 3, 1, 1),
        "3x3, 128 channels, 8x8": (128, 128, 8, 3, 1, 1),
        "3x3, 256 channels, 4x4": (256, 256, 4, 3, 1, 1),
        "3x3, 512 channels, 2x2": (512, 512, 2, 3, 1, 1),
        "3x3 stride 2, 64 to 128 channels, 16x16": (64, 128, 16, 3, 2, 1),
        "1x1 stride 2, 64 to 128 channels, 16x16": (64, 128, 16, 1, 2, 0),
        "8x8 stride 8, 32 channels, 56x56": (32, 32, 56, 8, 8, 0),
        "16x16 stride 16, 3 to 192 channels, 224x224": (3, 192, 224, 16, 16, 0),
    }
    for name, (inputs, outputs, side, kernel, stride, padding) in shapes.items():
        arguments = normal(8, inputs, side, side), normal(outputs, inputs, kernel, kernel)
        both = convolution(stride, padding)
        cases[f"conv {name}"] = Case(*both, arguments)
        cases[f"conv {name}, image gradient"] = Case(*gradient(*both, 0), arguments)
        cases[f"conv {name}, kernel gradient"] = Case(*gradient(*both, 1), arguments)
    linear = lambda x, w: x @ w.T
    for rows in (1, 8, 64, 1024):
        cases[f"x @ W.T, {rows}x256 by 1024x256"] = Case(linear, linear, (normal(rows, 256), normal(1024, 256)))
    cases |= {
        "x @ W.T twenty times, 1x512": Case(chained_dots(20), chained_dots(20), (normal(1, 512), normal(512, 512))),
        "dW: 1024x1024 transposed by 1024x256": Case(
            lambda g, x: g.T @ x, lambda g, x: g.T @ x, (wide, normal(1024, 256))
        ),
        "attention 8x4x128x64, causal": Case(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            attention_by_jax,
            tuple(normal(8, 4, 128, 64) for _ in range(3)),
        ),
        "max pool 3x3 stride 2, 8x64x32x32": Case(pool, pool_by_jax, (normal(8, 64, 32, 32),)),
        "max pool and its gradient": Case(*gradient(pool, pool_by_jax, 0), (normal(8, 64, 32, 32),)),
        "gelu of 1M": Case(F.gelu, lambda x: jax.nn.gelu(x, approximate=False), (wide,)),
        "tanh of 1M": Case(torch.tanh, jnp.tanh, (wide,)),
        "exp of 1M": Case(torch.exp, jnp.exp, (wide,)),
        "sigmoid of 1M": Case(torch.sigmoid, jax.nn.sigmoid, (wide,)),
        "softmax 32x128x128": Case(lambda x: x.softmax(-1), lambda x: jax.nn.softmax(x, -1), (normal(32, 128, 128),)),
        "layer norm 1024x256": Case(
            lambda x, w, b: F.layer_norm(x, (256,), w, b), norm_by_jax, (normal(1024, 256), normal(256), normal(256))
        ),
        "sum of 1M": Case(torch.sum, jnp.sum, (wide,)),
        "sum of 1M by columns": Case(lambda x: x.sum(0), lambda x: x.sum(0), (wide,)),
        "transpose 1024x1024": Case(lambda x: x.t().contiguous(), lambda x: x.T + 0, (wide,)),
        "sort of 64k": Case(lambda x: x.sort(), lambda x: (jnp.sort(x), jnp.argsort(x)), (line,)),
        "argsort of 64k": Case(torch.argsort, jnp.argsort, (line,)),
        "sort 256x256 by rows": Case(
            lambda x: x.sort(-1), lambda x: (jnp.sort(x), jnp.argsort(x)), (line.reshape(256, 256),)
        ),
        "top 10 of 64k": Case(lambda x: x.topk(10), lambda x: lax.top_k(x, 10), (line,)),
        "cumsum of 64k": Case(lambda x: x.cumsum(0), jnp.cumsum, (line,)),
        "cumsum 256x256 by rows": Case(lambda x: x.cumsum(-1), lambda x: jnp.cumsum(x, -1), (normal(256, 256),)),
        "cumsum 256x256 by columns": Case(lambda x: x.cumsum(0), lambda x: jnp.cumsum(x, 0), (normal(256, 256),)),
        "embedding gradient, 1024 rows into 1000": Case(
            *gradient(lambda w, i: F.embedding(i.long() % 1000, w) * 2, lambda w, i: w[i.astype(int) % 1000] * 2, 0),
            (normal(1000, 256), np.arange(1024, dtype="int32")),
        ),
        "index add of 64k into 1000": Case(
            lambda x, i: torch.zeros(1000, device=x.device).index_add_(0, i.long() % 1000, x),
            lambda x, i: jnp.zeros(1000).at[i % 1000].add(x),
            (line, np.arange(65536, dtype="int32")),
        ),
    }
    return cases


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Backend -> median CPU milliseconds of a call, until its results are there."""

    def by_torch(device: str) -> Callable[[], Any]:
        given = [torch.from_numpy(a).to(device) for a in case.arguments]

        def run() -> Any:
            made = case.torch(*given)
            if device == "tpu":
                torch.tpu.synchronize()
            return made

        return run

    jitted, given = jax.jit(case.jax), [jnp.asarray(a) for a in case.arguments]
    runs = {"tpu": by_torch("tpu"), "cpu": by_torch("cpu"), "jax": lambda: jax.block_until_ready(jitted(*given))}
    compare({backend: run() for backend, run in runs.items()})
    settle(runs["tpu"])
    taken: dict[str, list[float]] = {backend: [] for backend in runs}
    stop = time.perf_counter() + _SECONDS
    for turn in range(rounds + 2):
        if turn >= 5 and time.perf_counter() > stop:
            break
        for backend, run in runs.items():
            begun = time.process_time()
            run()
            if turn >= 2:
                taken[backend].append(time.process_time() - begun)
    return {backend: statistics.median(times) * 1e3 for backend, times in taken.items()}


def settle(run: Callable[[], Any]) -> None:
    """Runs until a hundred calls have launched nothing of the first tier, or for some seconds."""
    stop, quick = time.perf_counter() + 10 * _SECONDS, -1
    while peers.quick_launches("tpu") != quick and time.perf_counter() < stop:
        quick = peers.quick_launches("tpu")
        for _ in range(100):
            run()


def compare(made: dict[str, Any]) -> None:
    """Refuses to time functions that do not compute the same."""
    leaves = {
        backend: jax.tree_util.tree_leaves(tuple(m) if isinstance(m, tuple) else m) for backend, m in made.items()
    }
    for ours, cpu, theirs in zip(*leaves.values(), strict=True):
        scale = 1e-3 * float(cpu.abs().max()) + 1e-6
        assert np.allclose(ours.cpu().numpy(), cpu.numpy(), 1e-3, scale)
        assert np.allclose(np.asarray(theirs), cpu.numpy(), 1e-3, scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--rounds", type=int, default=15)
    a = parser.parse_args()
    torch.set_num_threads(1)
    rows = [["op", "tpu ms", "torch cpu ms", "jax ms", "tpu / torch cpu", "tpu / jax"]]
    for name, case in make_cases().items():
        if not a.words or any(word in name for word in a.words):
            found = measure(case, a.rounds)
            times = [f"{found[backend]:.2f}" for backend in ("tpu", "cpu", "jax")]
            limits = zip(("cpu", "jax"), LIMITS.get(name, (None, None)), strict=True)
            ratios = [peers.verdict(found["tpu"] / found[backend], limit) for backend, limit in limits]
            rows.append([name, *times, *ratios])
    print(peers.table(rows))


if __name__ == "__main__":
    main()
