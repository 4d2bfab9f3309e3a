"""What an option of XLA changes in a warm step's CPU time, or in its cycles on a TPU.

The programs of one process are compiled with each option, and take turns in it; "same code" is not timed. `again` is
the usual options once more: what it differs by is noise. For a chip, which need not be here, the figures are libtpu's.

    python benchmarks/compile_options.py w3  # what `runtime/compile/tiers.py` has
    python benchmarks/compile_options.py w3 xla_cpu_prefer_vector_width=512
    python benchmarks/compile_options.py w3 --chip v5e xla_tpu_scoped_vmem_limit_kib=32768
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import peers
import tpu_cost

os.environ |= {**peers.ONE_THREAD, "JAX_PLATFORMS": "cpu", "TORCHTPU_PLATFORM": "cpu"}
os.environ |= {"TORCHTPU_CACHE": "off", "TORCHTPU_SWEEP": "0"}
Options = tuple[tuple[str, Any], ...]
_SLOT_SECONDS = 0.1


def variants(words: list[str], platform: str) -> dict[str, Options]:
    """Those of the command line, else those of the table."""
    from torchtpu.runtime.compile.tiers import SWEEPS

    def value(text: str) -> Any:
        return {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)

    asked = {word: ((word.partition("=")[0], value(word.partition("=")[2])),) for word in words}
    return asked or dict(SWEEPS[platform].options)


def measure(workload: str, tried: dict[str, Options], rounds: int) -> list[list[str]]:
    """Per option the ratio of a step's CPU time to that with the usual ones: the rounds' median, and quartiles."""
    from torchtpu import startup
    from torchtpu.runtime.compile.builder import Builder

    built: dict[int, Any] = {}
    make = Builder.executable

    def kept(builder: Builder, build: Any, device: int) -> Any:
        executable = make(builder, build, device)
        built[id(executable)] = build, executable
        return executable

    Builder.executable = kept  # type: ignore[method-assign]
    step, read = peers.build_step("tpu", workload)
    for i in range(20):
        read(step(i))
    client = startup.engine().client
    forms: dict[str, list[Any]] = {}
    compile_seconds = {}
    for name, options in {"usual": (), "again": (), **tried}.items():
        started = time.process_time()
        forms[name] = [client.compile(build.plan.text(), 0, (), options) for build, _ in built.values()]
        compile_seconds[name] = time.process_time() - started
    codes = {name: [code_of(client.serialize(e)) for e in executables] for name, executables in forms.items()}
    same = [name for name in tried if codes[name] == codes["usual"]]
    times: dict[str, list[float]] = {name: [] for name in forms if name not in same}
    i = 20
    for _ in range(rounds):
        for name in random.sample(list(times), len(times)):
            for (_, executable), form in zip(built.values(), forms[name], strict=True):
                executable.run = form
            read(step(i))
            count, started = 0, time.process_time()
            while time.process_time() - started < _SLOT_SECONDS:
                read(step(i + count))
                count += 1
            times[name].append((time.process_time() - started) / count)
            i += count
    rows = [[name, "same code", "", f"{compile_seconds[name]:.1f} s"] for name in same]
    for name, own in times.items():
        ratios = [seconds / usual for seconds, usual in zip(own, times["usual"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append([name, f"{middle:.3f}", f"{low:.3f} to {high:.3f}", f"{compile_seconds[name]:.1f} s"])
    return rows


def code_of(serialized: bytes) -> list[bytes]:
    """The object files in a serialized executable; its options are in there too."""
    found, begin = [], serialized.find(b"\x7fELF")
    while begin >= 0:
        headers = int.from_bytes(serialized[begin + 40 : begin + 48], "little")
        end = begin + headers + 64 * int.from_bytes(serialized[begin + 60 : begin + 62], "little")
        found.append(serialized[begin:end])
        begin = serialized.find(b"\x7fELF", end)
    return sorted(found)


def estimate(workload: str, tried: dict[str, Options], target: str) -> list[list[str]]:
    """Per option the ratios of cycles, bytes and temporary memory to those with the usual ones."""
    from torchtpu.cli.worker import WarmWorker
    from torchtpu.compiler_cache import NullStore
    from torchtpu.runtime.compile.aot import AotClient
    from torchtpu.runtime.ir.manifest import decode_recorded

    with tempfile.TemporaryDirectory() as folder:
        knobs = {"TORCHTPU_TARGET": target, "TORCHTPU_READS": "standin", "TORCHTPU_JOURNAL": folder}
        script = str(Path(tpu_cost.__file__))
        launched = json.loads(tpu_cost.run_self(script, ["--record", workload], {**os.environ, **knobs}))
        lines = [json.loads(line) for file in Path(folder).iterdir() for line in file.read_text().splitlines()]
    programs = {line["identity"]: decode_recorded(line["program"]).program for line in lines if "program" in line}
    worker, client = WarmWorker(target, NullStore("each option is compiled once")), AotClient(target)
    texts = [worker.plan(programs[identity]).text() for identity in launched]
    usual, rows = None, []
    for name, options in {"usual": (), **tried}.items():
        started = time.process_time()
        costs = [client.compile(text, (), options).cost for text in texts]
        found = (
            sum(cost.cycles for cost in costs),
            sum(cost.bytes_accessed for cost in costs),
            max(cost.temporary_bytes for cost in costs),
        )
        usual = usual or found
        ratios = [f"{own / max(1, other):.3f}" for own, other in zip(found, usual, strict=True)]
        rows.append([name, *ratios, f"{time.process_time() - started:.1f} s"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", help=", ".join(tpu_cost.WORKLOADS))
    parser.add_argument("options", nargs="*", help="name=value")
    parser.add_argument("--chip", default="")
    parser.add_argument("--rounds", type=int, default=31)
    a = parser.parse_intermixed_args()
    if a.chip:
        from torchtpu.runtime.compile.aot import environment

        os.environ |= environment()
        heads = ["options", "cycles", "bytes", "temporary memory", "compile"]
        rows = estimate(a.workload, variants(a.options, "tpu"), a.chip)
    else:
        heads = ["options", "CPU time / usual", "quartiles", "compile"]
        rows = measure(a.workload, variants(a.options, "cpu"), a.rounds)
    print(peers.table([heads, *rows]))


if __name__ == "__main__":
    main()
