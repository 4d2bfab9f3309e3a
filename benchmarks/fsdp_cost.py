"""What a step of FSDP2 and a vote cost the recording thread, beside a step without sharding and PyTorch's FSDP2 on the
CPU with a process group that does nothing.

Two ranks on `tpu` and one process on the CPU run in turn. CPU time of the main thread counts, backward in it too.

    python benchmarks/fsdp_cost.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import peers

STEPS = 100
VOTES = 500
WIDTH = 16


def make_step(device: str, mesh: Any = None) -> Callable[[], None]:
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4)]
    model = nn.Sequential(*blocks).to(device)
    if mesh is not None:
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4, WIDTH).to(device)

    def step() -> None:
        (model(x) - x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def cost(step: Callable[[], None], wait: Callable[[], None]) -> tuple[float, float]:
    """The CPU seconds of a step: of this thread, and of the process."""
    for _ in range(10):
        step()
    wait()
    process, thread = time.process_time(), time.thread_time()
    for _ in range(STEPS):
        step()
    thread = time.thread_time() - thread
    wait()
    return thread / STEPS, (time.process_time() - process) / STEPS


def on_cpu() -> dict[str, float]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    plain, _ = cost(make_step("cpu"), lambda: None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    sharded, _ = cost(make_step("cpu", init_device_mesh("cpu", (2,))), lambda: None)
    return {"plain": plain, "sharded": sharded}


def on_tpu() -> dict[str, float]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from torchtpu import distributed, metrics

    dist.init_process_group("tpu")
    plain, _ = cost(make_step("tpu"), torch.tpu.synchronize)
    before = metrics.snapshot()["votes"]
    sharded, process = cost(make_step("tpu", init_device_mesh("tpu", (2,))), torch.tpu.synchronize)
    votes = (metrics.snapshot()["votes"] - before) / (STEPS + 10)
    meet = next(iter(distributed._groups))._transport.meet
    started = time.process_time()
    for _ in range(VOTES):
        meet([0] * 5)
    vote = (time.process_time() - started) / VOTES
    dist.destroy_process_group()
    return {"plain": plain, "sharded": sharded, "process": process, "votes": votes, "vote": vote}


def run_worker(device: str) -> dict[str, float]:
    """What a job of the device measures."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if device == "tpu" else []
    environment = {**os.environ, **peers.ONE_THREAD, "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(device == "tpu"))}
    command = [sys.executable, *launcher, __file__, "--worker", device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, float] = json.loads(line)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.worker:
        import torch

        torch.autograd.set_multithreading_enabled(False)
        found = on_tpu() if a.worker == "tpu" else on_cpu()
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(found), flush=True)
        return
    runs = [(run_worker("tpu"), run_worker("cpu")) for _ in range(a.repeats)]
    print(json.dumps(runs), file=sys.stderr)

    def middle(ratio: Callable[[dict[str, float], dict[str, float]], float]) -> str:
        return f"{statistics.median(ratio(*run) for run in runs):.2f}"

    rows = [
        ["what", "ratio"],
        ["a sharded step, to the CPU's", middle(lambda tpu, cpu: tpu["sharded"] / cpu["sharded"])],
        ["a plain step, to the CPU's", middle(lambda tpu, cpu: tpu["plain"] / cpu["plain"])],
        ["a sharded step, to a plain one", middle(lambda tpu, cpu: tpu["sharded"] / tpu["plain"])],
        ["the same on the CPU", middle(lambda tpu, cpu: cpu["sharded"] / cpu["plain"])],
        ["votes in a sharded step", middle(lambda tpu, cpu: tpu["votes"])],
        ["their CPU time, to the process's", middle(lambda tpu, cpu: tpu["votes"] * tpu["vote"] / tpu["process"])],
    ]
    print(peers.table(rows))


if __name__ == "__main__":
    main()
