"""What the first tier's options change in the compile time, the launch time and the bits of small programs.

The figures are milliseconds of a compile (CPU time on platform cpu, else wall time: a GPU's compiler runs programs to
choose among them) and of a launch, with the usual options, with each of the first tier's alone, with others that were
thought of, and with all of the first tier's.

    python benchmarks/compile_tiers.py            # what `runtime/compile/tiers.py` has
    python benchmarks/compile_tiers.py tanh conv
    python benchmarks/compile_tiers.py --platform gpu
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import peers
import torch

from torchtpu.runtime.compile.tiers import FIRST_TIERS
from torchtpu.runtime.device.client import Client

_MANY = 1 << 20
_OTHERS = {"cpu": (), "gpu": (("xla_backend_optimization_level", 0), ("xla_llvm_disable_expensive_passes", True))}


def _conv(x: Any, w: Any, groups: int = 1) -> Any:
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=groups)


def _adam(p: Any, g: Any, m: Any, v: Any) -> Any:
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v


def _norm(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


PROGRAMS: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "add": (lambda x, y: x + y, [(_MANY,), (_MANY,)]),
    "chain": (lambda x: functools.reduce(lambda y, i: jnp.tanh(y * 1.01 + i), range(15), x), [(_MANY,)]),
    "tanh": (jnp.tanh, [(_MANY,)]),
    "gelu": (lambda x: jax.nn.gelu(x, approximate=False), [(_MANY,)]),
    "norm": (_norm, [(1024, 1024)]),
    "softmax": (jax.nn.softmax, [(1024, 1024)]),
    "transpose": (lambda x: x.T + 0, [(1024, 1024)]),
    "sum": (jnp.sum, [(_MANY,)]),
    "cumsum": (lambda x: jnp.cumsum(x, 1), [(256, 1024)]),
    "matmul": (lambda x, y: x @ y, [(512, 512), (512, 512)]),
    "conv": (_conv, [(8, 16, 32, 32), (32, 16, 3, 3)]),
    "depthwise": (lambda x, w: _conv(x, w, 32), [(4, 32, 32, 32), (32, 1, 7, 7)]),
    "scatter": (lambda x, i, y: x.at[(i * 9999).astype(jnp.int32)].add(y), [(10_000, 64), (4096,), (4096, 64)]),
    "random": (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), [(1 << 18,)]),
    "adam": (_adam, [(_MANY,)] * 4),
}


def measure(client: Client, name: str, options: Any) -> tuple[float, float, list[torch.Tensor]]:
    """Milliseconds of a compile and of a launch, and what comes out."""
    function, shapes = PROGRAMS[name]
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(function).trace(*avals).lower(lowering_platforms=(client.lowering_platform,)).as_text()
    clock = time.process_time if client.platform == "cpu" else time.perf_counter
    started = clock()
    executable = client.compile(text, 0, (), options)
    compile_ms = (clock() - started) * 1e3
    generator = torch.Generator().manual_seed(0)
    arguments = [client.upload(torch.rand(shape, generator=generator), 0) for shape in shapes]
    launches = []
    for _ in range(5):
        started = time.perf_counter()
        arrays = [a for (a,) in executable.execute_sharded(arguments).disassemble_into_single_device_arrays()]
        for array in arrays:
            array.block_until_ready()
        launches.append((time.perf_counter() - started) * 1e3)
    return compile_ms, min(launches), [client.download(array) for array in arrays]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", choices=[[], *PROGRAMS])
    parser.add_argument("--platform", choices=tuple(_OTHERS), default="cpu")
    given = parser.parse_args()
    names = given.programs or list(PROGRAMS)
    client, first = Client(given.platform), FIRST_TIERS[given.platform].options
    alone = {f"{name}={value}": ((name, value),) for name, value in (*first, *_OTHERS[given.platform])}
    columns = {"usual": (), **alone, "all": first}
    measure(client, names[0], ())  # the client's first program takes longer
    rows = [["program", *columns, "same bits"]]
    for name in names:
        found = [measure(client, name, options) for options in columns.values()]
        is_same = all(map(torch.equal, found[0][2], found[-1][2]))
        rows.append([name, *(f"{c:.0f}, {run:.2f}" for c, run, _ in found), "yes" if is_same else "no"])
    print(peers.table(rows))


if __name__ == "__main__":
    main()
