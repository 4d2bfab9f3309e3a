"""Programs and CPU time of the first text generation of a GPT, and of a token once warm.

The cache of keys and values grows by `torch.cat` (cat), or is as long as it will be and is read up to a position that
Python knows (position) or that the device knows (static). Peers: torch on the CPU with the same script, and
hand-written `jax.jit` with a static cache, which is what JAX can compile once.

    python benchmarks/generation.py                  # cat position static, 3 repeats
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import peers

VARIANTS = {
    "cat": "the cache grows by torch.cat",
    "position": "a cache of 128, read up to a Python position",
    "static": "a cache of 128, read as a whole with a mask",
}
TOKENS, BATCH = 64, 8
_GENERATIONS = 24
LIMITS = {"cat": 12}  # programs of the first generation


def generator(variant: str, device: str) -> Callable[[], list[int]]:
    """Generates greedily, every token read; the tokens of the first sequence."""
    import torch
    import torch_steps
    from torch.nn import functional as F

    torch.set_num_threads(1)
    model = torch_steps.make_model("decode", device)
    shape = (BATCH, 4, 128, 64)

    def attend(block: Any, x: torch.Tensor, cache: list[torch.Tensor], place: int) -> torch.Tensor:
        q, k, v = block._split(x)
        if variant == "cat":
            cache[:] = [torch.cat([old, new], 2) for old, new in zip(cache, (k, v), strict=True)] if cache else [k, v]
            seen = cache
        else:
            for old, new in zip(cache, (k, v), strict=True):
                old[:, :, place : place + 1] = new
            seen = [old[:, :, : place + 1] for old in cache]
        return block._finish(x, F.scaled_dot_product_attention(q, *seen))

    @torch.no_grad()
    def generate() -> list[int]:
        token, found = torch.zeros(BATCH, 1, dtype=torch.int64, device=device), []
        grows = variant == "cat"
        caches = [[] if grows else [torch.zeros(shape, device=device) for _ in range(2)] for _ in model.blocks]
        position = torch.zeros(1, dtype=torch.int64, device=device)
        for place in range(TOKENS):
            if variant == "static":
                scores = model.decode(token, position, caches)
            else:
                x = model.token_embedding(token) + model.position_embedding(position)
                for block, cache in zip(model.blocks, caches, strict=True):
                    x = attend(block, x, cache, place)
                scores = model.head(model.lnf(x))
            token, position = scores.argmax(-1), position + 1
            found.append(int(token[0, 0]))
        return found

    return generate


def jax_generator() -> Callable[[], list[int]]:
    """The same with a static cache."""
    import data
    import jax.numpy as jnp
    import jax_steps

    found = jax_steps.describe("decode")
    parameters = {name: jnp.asarray(data.parameter(name, shape)) for name, shape in found.parameters.items()}

    def generate() -> list[int]:
        caches = {name: jnp.zeros(array.shape, array.dtype) for name, array in found.rest.items()}
        token, tokens = jnp.zeros((BATCH, 1), int), []
        for place in range(TOKENS):
            scores, caches = found.function(parameters, caches, token, jnp.array([place]))
            token = scores.argmax(-1)
            tokens.append(int(token[0, 0]))
        return tokens

    return generate


def measure(backend: str, variant: str) -> dict[str, Any]:
    """The first generation, the second one, and the median token of the last five, when hot programs have settled."""
    generate = jax_generator() if backend == "jax" else generator(variant, backend)
    taken, programs, tokens = [], [peers.programs_compiled(backend)], []
    for _ in range(_GENERATIONS):
        started = time.process_time()
        tokens = generate()
        taken.append(time.process_time() - started)
        programs.append(peers.programs_compiled(backend))
    return {
        "first_s": taken[0],
        "token_ms": statistics.median(taken[-5:]) / TOKENS * 1e3,
        "programs": programs[1] - programs[0],
        "programs_again": programs[2] - programs[1],
        "tokens": tokens[:8],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", default=[])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", choices=peers.BACKENDS, help=argparse.SUPPRESS)
    a = parser.parse_args()
    variants = a.variants or list(VARIANTS)
    if a.worker:
        print(json.dumps(measure(a.worker, variants[0])))
        return
    heads = ["programs", "programs again", "first generation", "token / torch cpu", "token / jax static", "same tokens"]
    rows = [["cache", *heads]]
    for variant in variants:
        found = peers.run_interleaved(__file__, variant, peers.BACKENDS, a.repeats)
        tpu, cpu, jax = (found[backend] for backend in ("tpu", "cpu", "jax"))
        rows.append(
            [
                f"{variant} ({VARIANTS[variant]})",
                peers.verdict(tpu["programs"], LIMITS.get(variant)),
                peers.verdict(tpu["programs_again"], 0),
                f"{tpu['first_s']:.1f} s",
                peers.verdict(tpu["token_ms"] / cpu["token_ms"], 1.0),
                peers.verdict(tpu["token_ms"] / jax["token_ms"], 1.0),
                str(tpu["tokens"] == cpu["tokens"]),
            ]
        )
    print(peers.table(rows))


if __name__ == "__main__":
    main()
