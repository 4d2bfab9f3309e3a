"""What the first run of a program costs that nobody has prepared: those of tests/ecosystem.py, beside torch CPU.

A process per program and column; CPU seconds of one run, and of processes that compile for it, beyond the imports, and
the programs compiled. `warm` is a second process on the cache of the first. Where a program has an optimizer, 1.1 s of
torch CPU's column are the import of torch._dynamo, which PyTorch's optimizers do where the device is not installed.

    python benchmarks/first_runs.py
    python benchmarks/first_runs.py graphs written
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
from pathlib import Path

import peers

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import ecosystem


def cpu_seconds() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def measure(device: str, name: str) -> dict[str, float]:
    """What one run costs this process, and how many programs it compiles."""
    import torch

    torch.set_num_threads(1)
    started = cpu_seconds()
    ecosystem.PROGRAMS[name].run(device)
    if device == "cpu":
        return {"seconds": cpu_seconds() - started, "programs": 0}
    torch.tpu.synchronize()
    import torchtpu

    programs = torchtpu.metrics.snapshot()["programs_compiled"]
    return {"seconds": cpu_seconds() - started, "programs": programs}


def run(device: str, name: str, cache: str) -> dict[str, float]:
    """The same in a process of its own."""
    folders = str(Path(ecosystem.__file__).parent / "site"), os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, folders))
    return peers.run_worker(__file__, device, name, TORCHTPU_CACHE_DIR=cache, PYTHONPATH=path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", choices=[[], *ecosystem.PROGRAMS])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(options.worker, options.programs[0])))
        return
    print("| program | torch CPU, s | cold, s | programs | warm, s |\n|---|---|---|---|---|", flush=True)
    for name in options.programs or filter(ecosystem.is_installed, ecosystem.PROGRAMS):
        with tempfile.TemporaryDirectory() as cache:
            cpu, cold, warm = (run(device, name, cache) for device in ("cpu", "tpu", "tpu"))
        what = ecosystem.PROGRAMS[name].what
        seconds = [f"{found['seconds']:.1f}" for found in (cpu, cold, warm)]
        print(f"| {what} | {seconds[0]} | {seconds[1]} | {cold['programs']} | {seconds[2]} |", flush=True)


if __name__ == "__main__":
    main()
