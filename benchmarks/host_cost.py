"""What issuing ops on one-element tensors costs on `tpu`, as a ratio to torch on the CPU.

Both devices run in one process, in alternate rounds.  `main thread` is the CPU time until the last call returns,
`process` that of all threads until everything has run.

    OMP_NUM_THREADS=1 python benchmarks/host_cost.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import peers
import torch
from torch import Tensor, nn

COUNT = 1000
Stream = Callable[[str], Callable[[], object]]


def chain(step: Callable[[Tensor, Tensor], Tensor]) -> Stream:
    def make(device: str) -> Callable[[], Tensor]:
        x0 = torch.ones(1, device=device)

        def run() -> Tensor:
            x = x0.clone()
            for _ in range(COUNT):
                x = step(x, x0)
            return x

        return run

    return make


def mlp(device: str) -> Callable[[], Tensor]:
    """Forward, backward and SGD of 6 Linear, 3 LayerNorm and 3 GELU, 20 steps."""
    torch.manual_seed(0)
    layer = [m for _ in range(3) for m in (nn.Linear(1, 1), nn.LayerNorm(1), nn.GELU(), nn.Linear(1, 1))]
    model = nn.Sequential(*layer).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x = torch.ones(1, 1, device=device)

    def run() -> Tensor:
        for _ in range(20):
            optimizer.zero_grad()
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
        return loss

    return run


# name -> (stream, limit on the main thread, limit of the process)
STREAMS: dict[str, tuple[Stream, float, float | None]] = {
    "w1: x * 1.01 + 0.5": (chain(lambda x, _: x * 1.01 + 0.5), 0.55, 0.8),
    "x.relu()": (chain(lambda x, _: x.relu()), 0.8, None),
    "x.add_(y)": (chain(lambda x, y: x.add_(y)), 0.8, None),
    "x + y": (chain(lambda x, y: x + y), 0.8, None),
    "MLP forward, backward, SGD": (mlp, 0.9, None),
}


def synchronize(device: str) -> None:
    if device == "tpu":
        torch.tpu.synchronize()


def measure(stream: Stream, rounds: int) -> dict[str, tuple[float, float]]:
    """Device -> median (main thread, process) CPU seconds of a round."""
    runs = {device: stream(device) for device in ("tpu", "cpu")}
    taken: dict[str, list[tuple[float, float]]] = {device: [] for device in runs}
    for turn in range(rounds + 5):
        for device, run in runs.items():
            thread, process = time.thread_time(), time.process_time()
            result = run()
            thread = time.thread_time() - thread
            synchronize(device)
            process = time.process_time() - process
            del result
            if turn >= 5:  # the first ones compile
                taken[device].append((thread, process))
    return {d: (statistics.median(t for t, _ in v), statistics.median(p for _, p in v)) for d, v in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    a = parser.parse_args()
    torch.set_num_threads(1)
    rows = [["stream", "main thread, tpu / cpu", "process, tpu / cpu", "main thread, tpu"]]
    for name, (stream, main_limit, process_limit) in STREAMS.items():
        found = measure(stream, a.rounds)
        (tpu_main, tpu_all), (cpu_main, cpu_all) = found["tpu"], found["cpu"]
        rows.append(
            [
                name,
                peers.verdict(tpu_main / cpu_main, main_limit),
                peers.verdict(tpu_all / cpu_all, process_limit),
                f"{tpu_main * 1e6 / COUNT:.2f} us" if stream is not mlp else f"{tpu_main * 1e6 / 20:.0f} us a step",
            ]
        )
    print(peers.table(rows))


if __name__ == "__main__":
    main()
