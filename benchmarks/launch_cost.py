"""In: `torch._foreach_add_` on N tensors of one element, donated to the launch. Out: what a launch costs on `tpu`.

Beside it stand torch on the CPU, `jax.jit` with donated arguments, and jaxlib's own call of a program that is compiled
already.  All of them run in one process, one thread each, in alternate rounds; each launch is waited for.

    python benchmarks/launch_cost.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import peers

os.environ |= {**peers.ONE_THREAD, "JAX_PLATFORMS": "cpu", "TORCHTPU_PLATFORM": "cpu"}
os.environ |= {"TORCHTPU_TIERS": "off", "TORCHTPU_CLUSTERS": "0"}  # a region is one program, as with jax.jit

import jax
import jax.numpy as jnp
import torch

from torchtpu.runtime.device.client import Client

COUNTS = (1, 10, 50, 200, 900)
LAUNCHES = 30  # of a round
ALLOWED = (8.0, 0.1)  # microseconds beside jaxlib's own call: of a launch, and of each buffer

Run = Callable[[], object]


def torch_run(device: str, count: int) -> Run:
    tensors = [torch.ones(1, device=device) for _ in range(count)]
    synchronize = torch.tpu.synchronize if device == "tpu" else lambda: None

    def run() -> None:
        torch._foreach_add_(tensors, 1.0)
        synchronize()

    return run


def jax_run(count: int) -> Run:
    add = jax.jit(lambda arrays: [array + 1.0 for array in arrays], donate_argnums=0)
    arrays = [jnp.ones(1) for _ in range(count)]

    def run() -> None:
        nonlocal arrays
        arrays = add(arrays)
        jax.block_until_ready(arrays)

    return run


def jaxlib_run(count: int) -> Run:
    kind = "tensor<1xf32>"
    given = ", ".join(f"%a{i}: {kind} {{tf.aliasing_output = {i} : i32}}" for i in range(count))
    lines = [f"%b{i} = stablehlo.add %a{i}, %one : {kind}" for i in range(count)]
    made = ", ".join(f"%b{i}" for i in range(count))
    kinds = ", ".join([kind] * count)
    text = "\n".join(
        [
            f"func.func public @main({given}) -> ({kinds}) {{",
            f"%one = stablehlo.constant dense<1.0> : {kind}",
            *lines,
            f"return {made} : {kinds}",
            "}",
        ]
    )
    client = Client("cpu")
    executable = client.compile(text, 0)
    handlers = client.handlers([((1,), torch.float32)] * count, 0)
    arrays = [client.upload(torch.ones(1), 0) for _ in range(count)]

    def run() -> None:
        nonlocal arrays
        arrays, token = client.execute(executable, arrays, handlers)
        client.wait_for_launch(token)

    return run


def measure(count: int, rounds: int) -> dict[str, list[float]]:
    """What ran -> CPU microseconds of a launch, one number a round."""
    runs = {
        "tpu": torch_run("tpu", count),
        "jaxlib": jaxlib_run(count),
        "jax": jax_run(count),
        "cpu": torch_run("cpu", count),
    }
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 5):
        for name, run in runs.items():
            started = time.process_time()
            for _ in range(LAUNCHES):
                run()
            if turn >= 5:  # the first ones compile
                found[name].append((time.process_time() - started) * 1e6 / LAUNCHES)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--counts", type=int, nargs="*", default=COUNTS)
    a = parser.parse_args()
    torch.set_num_threads(1)
    for name, summary in (("minima", min), ("medians", statistics.median)):
        rows = [
            ["N", "tpu", "jaxlib's call", "jax.jit", "torch cpu", "tpu / jax.jit", "beside jaxlib's call", "allowed"]
        ]
        for count in a.counts:
            if name == "minima":
                FOUND[count] = measure(count, a.rounds)
            took = {backend: summary(values) for backend, values in FOUND[count].items()}
            own = took["tpu"] - took["jaxlib"]
            cells = [f"{took[b]:.0f}" for b in ("tpu", "jaxlib", "jax", "cpu")]
            ratio = peers.verdict(took["tpu"] / took["jax"], 1.1 if count >= 50 else None)
            rows.append([str(count), *cells, ratio, f"{own:.0f}", f"{ALLOWED[0] + ALLOWED[1] * count:.0f}"])
        print(f"{name}, us of CPU time\n")
        print(peers.table(rows), "\n")


FOUND: dict[int, dict[str, list[float]]] = {}

if __name__ == "__main__":
    main()
