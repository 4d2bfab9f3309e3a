"""What an FSDP2 training step costs on each chip of a TPU slice, by the compiler's account.

One rank of the whole job is recorded under a process group in which nobody else is, compiled by libtpu for the slice,
which need not be here, and not run. It is compiled again without the barriers that keep backward's gathers of sharded
parameters apart from forward's, and with --parts once more as it runs where ranks disagree: in the parts between its
collectives. Communication is charged at the published bandwidth of a chip's links, and is exposed where nothing else
is known to run beside it.

    python benchmarks/dist_cost.py v5e:2x4 v5p:4x4x4 --parts
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import peers
from tpu_cost import run_self

SLICES = ("v5e:2x4", "v5p:4x4x4", "v5p:8x8x8")
_STEPS = 4


def record(layers: int, width: int, tokens: int) -> str:
    """The identity of the program of a step among others: residual layers of two products, bfloat16, AdamW."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from torchtpu import startup

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up = nn.Linear(width, 4 * width, bias=False)
            self.down = nn.Linear(4 * width, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    dist.init_process_group("tpu")
    with torch.device("meta"):
        model = nn.Sequential(*[Layer() for _ in range(layers)]).bfloat16()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="tpu")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.zeros(tokens, width, device="tpu", dtype=torch.bfloat16)
    for _ in range(_STEPS):
        loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.tpu.synchronize()
    *_, last = startup.engine().history
    dist.destroy_process_group()
    return str(last)


def cost(target: str, arguments: list[str], *, with_parts: bool) -> dict[str, Any]:
    """The costs of a step on one chip, with and without barriers; `parts` are the temporary bytes in parts."""
    from torchtpu.distributed.calls import OP
    from torchtpu.ops.registry import LOWERINGS
    from torchtpu.runtime.device.chips import find_chip
    from torchtpu.runtime.ir.manifest import decode_recorded
    from torchtpu.runtime.partition.split import split
    from torchtpu.runtime.spmd.regions import ends_around

    _, topology = find_chip(target)
    ranks = math.prod(map(int, topology.split("x")))
    with tempfile.TemporaryDirectory() as folder:
        knobs = {"TARGET": target, "READS": "standin", "JOURNAL": folder, "WORLD_SIZE": ranks}
        job = {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 29500}
        job |= {"MASTER_ADDR": "localhost", **{f"TORCHTPU_{name}": value for name, value in knobs.items()}}
        identity = run_self(__file__, ["--record", *arguments], os.environ | {k: str(v) for k, v in job.items()})
        lines = [json.loads(line) for file in Path(folder).iterdir() for line in file.read_text().splitlines()]
    programs = {line["identity"]: line["program"] for line in lines if "program" in line}
    program = decode_recorded(programs[identity]).program
    compiler = _Compiler(target)
    found: dict[str, Any] = {"ranks": ranks, "with": compiler.cost(program)}
    if with_parts:
        found["parts"] = compiler.peak(program, split(program, ends_around(program, OP)))
    LOWERINGS[OP] = dataclasses.replace(LOWERINGS[OP], repeats=False)
    return found | {"without": _Compiler(target).cost(program)}


class _Compiler:
    """Compiles programs for all chips of a slice."""

    def __init__(self, target: str) -> None:
        from torchtpu.cli.worker import WarmWorker
        from torchtpu.compiler_cache import NullStore
        from torchtpu.runtime.compile.aot import AotClient

        self._worker = WarmWorker(target, NullStore("every cost is wanted"))
        self._client = AotClient(target)
        self._known: dict[Any, Any] = {}

    def cost(self, program: Any) -> dict[str, Any]:
        """A program's cost, and that of its collectives where the compiled module can be read."""
        from torchtpu.runtime.telemetry.traffic import traffic

        plan = self._worker.plan(program)
        built = self._client.compile(plan.text(), plan.homes)
        moved = None if built.text is None else traffic(built.text, self._client.chip)._asdict()
        return {"cost": built.cost._asdict(), "traffic": moved}

    def peak(self, program: Any, parts: list[Any]) -> int:
        """The bytes that a program's parts take beyond its arguments, one after the other."""
        from torchtpu.runtime.execute.sequence import Sequence

        def executable_of(number: int) -> Any:
            part = parts[number].program
            key = dataclasses.replace(part, ops=tuple(dataclasses.replace(op, line="") for op in part.ops))
            if key not in self._known:
                self._known[key] = _Launched(self.cost(part)["cost"])
            return self._known[key]

        return Sequence(program, parts, executable_of).needed_bytes


class _Launched:
    """What the memory of a sequence asks of an executable."""

    def __init__(self, cost: dict[str, Any]) -> None:
        self.needed_bytes = cost["output_bytes"] - cost["aliased_bytes"] + cost["temporary_bytes"]


def row(target: str, found: dict[str, Any]) -> list[str]:
    kept, merged = found["with"], found["without"]
    cells = [target, str(found["ranks"])]
    moved = kept["traffic"]
    if moved is None:
        cells += ["unknown"] * 4
    else:
        for kinds in (moved["beside"], moved["alone"]):
            cells.append(", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none")
        cells += [f"{moved[name] * 1e3:.2f} ms" for name in ("seconds", "exposed_seconds")]
    cells.append(f"{kept['cost']['seconds'] * 1e3:.2f} / {merged['cost']['seconds'] * 1e3:.2f} ms")
    cells += [f"{form['cost']['temporary_bytes'] / 2**20:.0f} MiB" for form in (kept, merged)]
    whole = kept["cost"]["output_bytes"] - kept["cost"]["aliased_bytes"] + kept["cost"]["temporary_bytes"]
    return [*cells, peers.verdict(whole / found["parts"], 1.1) if found.get("parts") else ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slices", nargs="*", default=SLICES)
    parser.add_argument("--layers", default="4")
    parser.add_argument("--width", default="2048")
    parser.add_argument("--tokens", default="4096", help="of each chip")
    parser.add_argument("--parts", action="store_true", help="memory in parts too, some minutes more")
    parser.add_argument("--record", nargs=3, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--cost", help=argparse.SUPPRESS)
    a = parser.parse_args()
    sizes = [a.layers, a.width, a.tokens]
    if a.record:
        print(record(*a.record))
    elif a.cost:
        print(json.dumps(cost(a.cost, sizes, with_parts=a.parts)))
    else:
        from torchtpu.runtime.compile.aot import environment

        heads = ["slice", "ranks", "beside other work", "alone", "communication", "exposed"]
        heads += ["cycles with / without barriers", "temporary memory", "without barriers", "memory / in parts"]
        rows = [heads]
        for target in a.slices:
            options = ["--layers", a.layers, "--width", a.width, "--tokens", a.tokens, *["--parts"] * a.parts]
            found = json.loads(run_self(__file__, ["--cost", target, *options], environment()))
            print(json.dumps({target: found}), file=sys.stderr)
            rows.append(row(target, found))
        print(peers.table(rows))


if __name__ == "__main__":
    main()
