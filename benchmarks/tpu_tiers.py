"""In: a workload, a TPU chip and compile options. Out: what the step's tiers compile for and cost by libtpu's account.

The tiers are the step as one program, its repeated parts as programs, and the small programs that new streams are made
of; each different program is compiled once, in this process and by one client, and none runs. CPU seconds are the
compiler's, cycles those of all launches of a step.

    nice python benchmarks/tpu_tiers.py gpt2 --chip v5e whole layers pieces
    nice python benchmarks/tpu_tiers.py gpt2 --chip v5e pieces --options exec_time_optimization_effort=-1.0
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import peers
import tpu_cost

Options = tuple[tuple[str, Any], ...]
FORMS = ("whole", "layers", "pieces")


def record(workload: str, target: str) -> list[Any]:
    """The programs of one step among others."""
    from torchtpu.runtime.ir.manifest import decode_recorded

    with tempfile.TemporaryDirectory() as folder:
        knobs = {"TORCHTPU_TARGET": target, "TORCHTPU_READS": "standin", "TORCHTPU_JOURNAL": folder}
        script = str(Path(tpu_cost.__file__))
        launched = json.loads(tpu_cost.run_self(script, ["--record", workload], {**os.environ, **knobs}))
        lines = [json.loads(line) for file in Path(folder).iterdir() for line in file.read_text().splitlines()]
    programs = {line["identity"]: decode_recorded(line["program"]).program for line in lines if "program" in line}
    return [programs[identity] for identity in launched]


class Tiers:
    """Divides programs as the runtime does, and compiles them for one target."""

    def __init__(self, target: str) -> None:
        from torchtpu.cli.worker import WarmWorker
        from torchtpu.compiler_cache import NullStore
        from torchtpu.runtime.compile.aot import AotClient

        self._worker = WarmWorker(target, NullStore("each program is compiled once"))
        self._client = AotClient(target)

    def parts(self, program: Any, form: str) -> list[Any]:
        from torchtpu.runtime.partition.pieces import Divider

        if form == "pieces":
            return [piece.program for piece in Divider(self._worker._fragments).divide(program)]
        clusters = self._worker._plans.clusters(program) if form == "layers" else None
        return [part.program for part in clusters.parts] if clusters else [program]

    def measure(self, programs: Iterable[Any], form: str, options: Options) -> dict[str, Any]:
        from torchtpu.runtime.ir.values import without_lines

        parts = [part for program in programs for part in self.parts(program, form)]
        counts: dict[Any, int] = {}
        different: dict[Any, Any] = {}
        for part in parts:
            key = without_lines(part)
            different.setdefault(key, part)
            counts[key] = counts.get(key, 0) + 1
        costs, lower_seconds, compile_seconds = {}, 0.0, 0.0
        for number, (key, part) in enumerate(different.items()):
            lowered, seconds = timed(lambda part=part: self._worker.plan(part).text())
            lower_seconds += seconds
            built, seconds = timed(functools.partial(self._client.compile, lowered, (), options))
            compile_seconds += seconds
            costs[key] = built.cost
            print(f"{number + 1} of {len(different)}: {len(part.ops)} ops, {seconds:.2f} s", file=sys.stderr)
        sums = ("cycles", "bytes_accessed", "unpriced_bytes")
        totals = {name: sum(getattr(costs[key], name) * n for key, n in counts.items()) for name in sums}
        most = max(cost.temporary_bytes for cost in costs.values())
        code = sum(cost.code_bytes for cost in costs.values())
        return {
            "form": form, "options": dict(options), "programs": len(different), "launches": len(parts),
            "lower_s": lower_seconds, "compile_s": compile_seconds, **totals, "temporary_bytes": most,
            "code_bytes": code,
        }  # fmt: skip


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returns, and its CPU seconds in all threads."""
    started = time.process_time()
    return call(), time.process_time() - started


def parsed(words: list[str]) -> Options:
    """Options as the command line gives them."""
    pairs = (word.partition("=")[::2] for word in words)
    return tuple((name, json.loads(value) if value[:1] in "-0123456789tf" else value) for name, value in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", help=", ".join(tpu_cost.WORKLOADS))
    parser.add_argument("forms", nargs="*", default=FORMS, help=", ".join(FORMS))
    parser.add_argument("--chip", default="v5e")
    parser.add_argument("--options", nargs="*", default=[], help="name=value, of each program")
    a = parser.parse_intermixed_args()
    from torchtpu.runtime.compile.aot import environment

    os.environ |= environment()
    programs, tiers = record(a.workload, a.chip), Tiers(a.chip)
    rows = [
        ["form", "programs", "launches", "compile, CPU s", "tracing, CPU s", "cycles", "bytes", "temporary", "code"]
    ]
    for form in a.forms:
        found = tiers.measure(programs, form, parsed(a.options))
        print(json.dumps(found), file=sys.stderr)
        sizes = (f"{found[name] / 1e6:.1f} MB" for name in ("bytes_accessed", "temporary_bytes", "code_bytes"))
        times = (f"{found[name]:.1f}" for name in ("compile_s", "lower_s"))
        rows.append([form, str(found["programs"]), str(found["launches"]), *times, f"{found['cycles']:,}", *sizes])
    print(peers.table(rows))


if __name__ == "__main__":
    main()
