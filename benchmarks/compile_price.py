"""How long regions compile with the usual options and with those of the first tier, for each of their ops.

The regions are those of programs of unseen.py, each compiled as one program, both ways, in milliseconds of a process
that does nothing else meanwhile: CPU time on platform cpu, else wall time. `op_ms` of `runtime/compile/tiers.py` is the
median of the differences.

    python benchmarks/compile_price.py
    python benchmarks/compile_price.py gpt --laps 2
    TORCHTPU_PLATFORM=gpu python benchmarks/compile_price.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import peers
import torch
import unseen

from torchtpu import config, startup
from torchtpu.runtime.compile.tiers import FIRST_TIERS

NAMES = ("gpt", "mlp", "cnn", "lbfgs", "episode", "batches", "noread")


def measure(name: str, laps: int) -> dict[tuple[int, str], tuple[float, float]]:
    """Milliseconds with the usual options and with the first tier's, by a program's ops and the begin of its key."""
    compiler = startup.engine().compiler
    found: dict[tuple[int, str], tuple[float, float]] = {}
    real, options = compiler._load_or_compile, FIRST_TIERS[startup.platform()].options
    clock = time.process_time if startup.platform() == "cpu" else time.perf_counter

    def compile_both(plan: Any, device: int, note: Any, *rest: Any) -> Any:
        taken = []
        for more in ((), options):
            started = clock()
            compiler._client.compile(plan.text(), device, plan.homes, more)
            taken.append((clock() - started) * 1e3)
        found[note["ops"], plan.key.digest[:8]] = taken[0], taken[1]
        return real(plan, device, note, *rest)

    compiler._load_or_compile = compile_both  # type: ignore[method-assign]
    try:
        lap = unseen.PROGRAMS[name]("tpu")
        for i in range(laps):
            lap(i)
            torch.tpu.synchronize()
    finally:
        compiler._load_or_compile = real  # type: ignore[method-assign]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", choices=[[], *unseen.PROGRAMS])
    parser.add_argument("--laps", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, differences = [["program", "ops", "usual, ms", "first tier, ms", "difference an op, ms"]], []
    with config.using(tiers="off", clusters=False, sweep=False, padding=False, cache="off"):
        torch.ones(2, device="tpu").cpu()
        for name in arguments.programs or NAMES:
            (ops, _), (usual, first) = max(measure(name, arguments.laps).items())
            differences.append((usual - first) / ops)
            rows.append([name, str(ops), f"{usual:.0f}", f"{first:.0f}", f"{differences[-1]:.1f}"])
    print(peers.table(rows))
    print(f"median: {statistics.median(differences):.1f} ms an op")


if __name__ == "__main__":
    main()
