"""How long regions compile with the usual options and with those of the first tier, by the length of their texts.

The regions are those of programs of unseen.py, each compiled both ways as the programs that it is made of, in
milliseconds of a process that does nothing else meanwhile: CPU time on platform cpu, else wall time. `program_ms` and
`kilobyte_ms` of `runtime/compile/tiers.py` are the line through all of them.

    python benchmarks/compile_price.py
    python benchmarks/compile_price.py gpt --laps 2
    TORCHTPU_PLATFORM=gpu python benchmarks/compile_price.py
"""

from __future__ import annotations

import argparse
import threading
import time
from typing import Any

import numpy as np
import peers
import torch
import unseen

from torchtpu import config, startup
from torchtpu.runtime.compile.tiers import FIRST_TIERS

NAMES = ("gpt", "mlp", "cnn", "lbfgs", "episode", "batches", "noread", "tokens")

Row = tuple[int, int, float, float]  # ops, bytes of text, and milliseconds with the usual options and the first tier's


def measure(name: str, laps: int) -> dict[str, Row]:
    """What the programs of so many laps take to compile, by their keys."""
    compiler = startup.engine().compiler
    found: dict[str, Row] = {}
    real, options = compiler._load_or_compile, FIRST_TIERS[startup.platform()].options
    alone = threading.Lock()
    clock = time.process_time if startup.platform() == "cpu" else time.perf_counter

    def compile_both(plan: Any, device: int, note: Any, *rest: Any) -> Any:
        taken = []
        with alone:
            for more in ((), options):
                started = clock()
                compiler._client.compile(plan.text(), device, plan.homes, more)
                taken.append((clock() - started) * 1e3)
        found[plan.key.digest] = note["ops"], plan.text_bytes, taken[0], taken[1]
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
    rows, found = [["program", "programs", "ops", "kB", "usual, ms", "first tier, ms"]], list[Row]()
    with config.using(tiers="off", sweep=False, cache="off"):
        torch.ones(2, device="tpu").cpu()
        for name in arguments.programs or NAMES:
            made = list(measure(name, arguments.laps).values())
            ops, text_bytes, usual, first = map(sum, zip(*made, strict=True))
            rows.append([name, str(len(made)), str(ops), f"{text_bytes / 1e3:.0f}", f"{usual:.0f}", f"{first:.0f}"])
            found += made
    print(peers.table(rows))
    for what, column in (("usual", 2), ("first tier", 3)):
        program_ms, kilobyte_ms = fitted(np.array([(row[1] / 1e3, row[column]) for row in found]))
        print(f"{what}: {program_ms:.0f} ms a program and {kilobyte_ms:.1f} ms for 1000 bytes of its text")


def fitted(points: Any) -> Any:
    """The line through points, where errors grow with the root of the second coordinate."""
    x, y = points.T
    weights = 1 / np.sqrt(y)
    return np.linalg.lstsq(np.stack([weights, x * weights], 1), y * weights, rcond=None)[0]


if __name__ == "__main__":
    main()
