"""What recorded steps cost on TPU chips, by libtpu's estimate, beside the same steps in hand-written JAX.

Both are compiled by libtpu for a chip that need not be here, with the same options, precision and attention kernel, and
none runs. The time of a step is the larger of two bounds: the compiler's cycles at the chip's clock, with what has no
cycles charged by the bytes that it moves, and all bytes at the bandwidth of the chip's memory. Of a module that jaxlib
cannot read, as GPT-2's for v6e, only the second one is known.
JAX's integers have 32 bits, PyTorch's 64.

    python benchmarks/tpu_cost.py w2 w3 --chips v5e v6e
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import data
import peers

WORKLOADS = {
    **data.WORKLOADS,
    "gpt2": "GPT of 12 layers, 768 wide, bfloat16, AdamW",
    "decode": "one more token of that GPT of 4 layers",
}
DEFAULT = ("w2", "w3", "w4", "decode", "gpt2")
LIMIT = 1.05
_STEPS = 8
_WITHOUT_OPTIMIZER = ("decode", "w8")  # whose steps do not end a region by themselves


def record(workload: str) -> list[str]:
    """The identities of the programs of one step among others; results of the device are stand-ins."""
    import torch
    import torch_steps

    from torchtpu.runtime.dry_run import DryRun

    launched: list[str] = []
    launch = DryRun.launch

    def noted(engine: DryRun, work: Any) -> None:
        launched.append(engine._journal.program(work.program))
        launch(engine, work)

    DryRun.launch = noted  # type: ignore[method-assign]
    step = torch_steps.build_decode("tpu") if workload == "decode" else torch_steps.build(workload, "tpu")
    kept = []
    for i in range(_STEPS):
        kept.append(step(i))
        if workload in _WITHOUT_OPTIMIZER:
            torch.tpu.synchronize()
    torch.tpu.synchronize()
    (usual, _), *_ = Counter(launched).most_common(1)
    *_, before, last = (i for i, identity in enumerate(launched) if identity == usual)
    return launched[before:last]


def cost_of_recorded(workload: str, target: str) -> list[dict[str, Any]]:
    """The cost of each program of a step."""
    from torchtpu import startup
    from torchtpu.cli.worker import WarmWorker
    from torchtpu.runtime.ir.manifest import decode_recorded

    worker = WarmWorker(target, startup.open_store())
    with tempfile.TemporaryDirectory() as folder:
        knobs = {"TORCHTPU_TARGET": target, "TORCHTPU_READS": "standin", "TORCHTPU_JOURNAL": folder}
        launched = json.loads(run_self(__file__, ["--record", workload], {**os.environ, **knobs}))
        lines = [json.loads(line) for file in Path(folder).iterdir() for line in file.read_text().splitlines()]
    programs = {line["identity"]: line["program"] for line in lines if "program" in line}
    found = [worker.compile(decode_recorded(programs[identity])) for identity in launched]
    for done in found:
        assert done.outcome != "failed", done.error
    return [done.note for done in found]


def cost_of_jax(workload: str, target: str) -> dict[str, Any]:
    """The cost of the hand-written step."""
    import jax
    import jax_steps
    import numpy as np
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    from torchtpu.runtime.compile.aot import AotClient

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        block = next(b for b in (512, 256, 128) if q.shape[2] % b == 0)  # as recorded attention has them
        sizes = flash.BlockSizes(block, block, block, 1, *[block] * 7)
        return flash.flash_attention(q, k, v, causal=True, sm_scale=q.shape[-1] ** -0.5, block_sizes=sizes)

    step = jax_steps.describe(workload, attend)
    parameters = {name: jax.ShapeDtypeStruct(shape, step.dtype) for name, shape in step.parameters.items()}
    arrays = data.tokens() if workload == "decode" else data.batch(workload)
    narrow = [array.astype("int32") if array.dtype == np.int64 else array for array in arrays]
    more = [data.learning_rate(0)] if workload == "w8" else []
    with jax.default_matmul_precision("default" if step.dtype == jax.numpy.bfloat16 else "highest"):
        lowered = step.function.trace(parameters, step.rest, *narrow, *more).lower(lowering_platforms=("tpu",))
    return AotClient(target).compile(lowered.as_text()).cost._asdict()


def compare(workload: str, target: str) -> dict[str, Any]:
    """Both costs: sums over a step's programs, and the largest temporary memory of one."""
    recorded, jax = cost_of_recorded(workload, target), cost_of_jax(workload, target)
    sums = ("flops", "bytes_accessed", "cycles", "unpriced_bytes", "code_bytes")
    ours = {name: sum(cost[name] for cost in recorded) for name in sums}
    ours["temporary_bytes"] = max(cost["temporary_bytes"] for cost in recorded)
    ours |= {"programs": len(recorded), "gaps": [cost["gaps"] for cost in recorded]}
    return {"tpu": ours, "jax": {name: jax[name] for name in (*sums, "temporary_bytes", "gaps")}}


def seconds(cost: dict[str, Any], target: str) -> tuple[float, float]:
    """A step's time by the cycles, and the part of it that is charged by bytes."""
    from torchtpu.runtime.device.chips import find_chip

    chip, _ = find_chip(target)
    unpriced = cost["unpriced_bytes"] / chip.bytes_per_second
    return cost["cycles"] * chip.seconds_per_cycle + unpriced, unpriced


def time_of(cost: dict[str, Any], target: str) -> float:
    from torchtpu.runtime.device.chips import find_chip

    return max(seconds(cost, target)[0], cost["bytes_accessed"] / find_chip(target)[0].bytes_per_second)


def _ratio(part: float, whole: float, form: str) -> str:
    """A dash where the compiled module could not be read, which is why it has no cycles."""
    return f"{part / whole:{form}}" if whole else "-"


def row(workload: str, target: str, found: dict[str, Any]) -> list[str]:
    ours, jax = found["tpu"], found["jax"]
    shares = [
        _ratio(100 * unpriced, whole, ".0f") for whole, unpriced in (seconds(cost, target) for cost in (ours, jax))
    ]
    return [
        f"{workload} ({WORKLOADS[workload]})",
        target,
        peers.verdict(time_of(ours, target) / time_of(jax, target), LIMIT),
        *(f"{time_of(cost, target) * 1e6:.1f} µs" for cost in (ours, jax)),
        *(_ratio(ours[name], jax[name], ".2f") for name in ("cycles", "flops", "bytes_accessed")),
        f"{ours['temporary_bytes'] / 1e6:.1f} / {jax['temporary_bytes'] / 1e6:.1f} MB",
        " / ".join(shares) + " %",
        str(ours["programs"]),
    ]


def run_self(script: str, arguments: list[str], environment: Mapping[str, str]) -> str:
    """The last line that a process of the script prints."""
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=DEFAULT, help=", ".join(WORKLOADS))
    parser.add_argument("--chips", nargs="+", default=["v5e", "v6e"])
    parser.add_argument("--record", help=argparse.SUPPRESS)
    parser.add_argument("--compare", nargs=2, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.record:
        print(json.dumps(record(a.record)))
        return
    if a.compare:
        print(json.dumps(compare(*a.compare)))
        return
    from torchtpu.runtime.compile.aot import environment

    heads = ["recorded / jax", "recorded", "jax", "cycles", "flops", "bytes", "temporary memory", "charged by bytes"]
    rows = [["workload", "chip", *heads, "programs"]]
    for target in a.chips:
        for workload in a.workloads:
            found = json.loads(run_self(__file__, ["--compare", workload, target], environment()))
            print(json.dumps({f"{workload} {target}": found}), file=sys.stderr)
            rows.append(row(workload, target, found))
    print(peers.table(rows))


if __name__ == "__main__":
    main()
