"""Measures one backend (tpu, compiled, cpu or jax) on one workload in a process of its own.

The backends run one process each, in turn, so that a busy machine disturbs all of them alike.  CPU time is what counts:
`process_time` of all threads together, one thread of computation each.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

BACKENDS = ("tpu", "cpu", "jax")
ON_TPU = ("tpu", "compiled", "reads")  # "compiled": tpu with the model and the loss under torch.compile
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NPROC": "1"}
# Its compiler has all cores, and other processes a part of its memory.
ON_GPU = {
    "TORCHTPU_PLATFORM": "gpu",
    "JAX_PLATFORMS": "",
    "NPROC": str(os.cpu_count()),
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


def run_worker(script: str, backend: str, *words: str, **environment: str) -> dict[str, Any]:
    """The JSON that `python script --worker backend words` prints last, with one thread of computation."""
    given = {**os.environ, **ONE_THREAD, "JAX_PLATFORMS": "cpu", "TORCHTPU_PLATFORM": "cpu"}
    given |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(backend in ON_TPU)), **environment}
    command = [sys.executable, "-W", "ignore", script, "--worker", backend, *words]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_interleaved(
    script: str, workload: str, backends: tuple[str, ...], repeats: int, *words: str
) -> dict[str, dict[str, Any]]:
    """Backend -> the median over the repeats of every number that `python script --worker backend workload words`
    prints."""
    runs = defaultdict(list)
    for _ in range(repeats):
        for backend in backends:
            # No cache of compiled programs from an earlier run: jax has none by default either.
            runs[backend].append(run_worker(script, backend, workload, *words, TORCHTPU_CACHE="off"))
    return {backend: {key: _middle([r[key] for r in found]) for key in found[0]} for backend, found in runs.items()}


def _middle(values: list[Any]) -> Any:
    numbers = all(isinstance(v, int | float) for v in values)
    return statistics.median(values) if numbers else values[-1]


def build_step(backend: str, workload: str) -> tuple[Callable[[int], Any], Callable[[Any], float]]:
    """(step(i) -> loss, read(loss) -> float)"""
    sys.path.insert(0, str(Path(__file__).parent))
    if backend == "jax":
        import jax_steps

        return jax_steps.build(workload), float
    import torch_steps

    torch_steps.torch.set_num_threads(1)
    if backend == "compiled":
        return torch_steps.build(workload, "tpu", is_compiled=True), lambda loss: loss.item()
    return torch_steps.build(workload, backend), lambda loss: loss.item()


def programs_compiled(backend: str) -> int:
    if backend not in ON_TPU:
        return 0
    from torchtpu import metrics

    return int(metrics.snapshot()["programs_compiled"])


def quick_launches(backend: str) -> int:
    """Launches of programs that are compiled quickly, not yet with the usual options."""
    if backend not in ON_TPU:
        return 0
    from torchtpu import metrics

    tiers = metrics.snapshot()["tiers"]
    return sum(int(tiers[name]["launches"]) for name in ("quick", "pieces") if name in tiers)


def children_time() -> float:
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def table(rows: list[list[str]]) -> str:
    """The rows, the first being the heads, as a Markdown table."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def verdict(ratio: float, limit: float | None) -> str:
    return f"{ratio:.2f}" if limit is None else f"{ratio:.2f} ({'at most' if ratio <= limit else 'OVER'} {limit:.2f})"
