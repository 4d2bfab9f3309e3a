"""Compiles lowerings of PyTorch's op samples for TPUs without one, and lists what libtpu's compiler refuses.

python tests/aot_check.py --target v5e gather sort --dtypes float32,int64
python tests/aot_check.py --target v6e                    # every lowering
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lowering_check
import torch

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
_BATCH = 16  # lowerings compiled as one module: a module costs more than a lowering
_SECONDS, _MORE_SECONDS = 30, 5  # of processor time, for a module and for each lowering in it
_NBYTES = 6 << 30


class Sample(NamedTuple):
    """A lowering on the arguments of one sample."""

    name: str
    shown: str
    call: lowering_check.Call


class Collector(lowering_check.Check):
    """Collects the calls that `Check` would compare."""

    def __init__(self, targets: set[str], in_all: int) -> None:
        super().__init__(targets, per_op=in_all, in_all=in_all, platform="tpu")
        self.samples: list[Sample] = []

    def _compare_lowering(
        self, entry: Any, func: Any, args: Any, kwargs: Any, expected: list[Any], truth: Any
    ) -> Iterator[str]:
        if not any(isinstance(t, torch.Tensor) and t.numel() > 0 for t in expected):
            self.outcomes[entry.name].checked -= 1  # an empty result is no program
            return iter(())
        lifted = len(self.samples) % 2 == 1
        call = lowering_check.lowered_call(entry, func, args, kwargs, expected, lifted, self.platform)
        shown = f"{entry.name}({', '.join(map(lowering_check._show, [*args, *kwargs.items()]))})"
        self.samples.append(Sample(entry.name, shown, call))
        return iter(())


def collect(targets: set[str], dtypes: Sequence[torch.dtype], in_all: int = 1, searched: int = 1) -> list[Sample]:
    """Samples of the lowerings `targets`, up to `in_all` per dtype of the OpInfos' arguments."""
    names = lowering_check.names_reaching(targets, lowering_check.load_ops(), searched)
    samples: list[Sample] = []
    for dtype in dtypes:
        torch.manual_seed(0)
        collector = Collector(targets, in_all)
        lowering_check.run_samples(collector, [*names, "extra"], [dtype], 2, backward=dtype.is_floating_point)
        samples += collector.samples
    return samples


def lowered(samples: Sequence[Sample]) -> str:
    """One StableHLO module with every sample's lowering; raises what a lowering raises."""
    import jax

    structs = [[jax.typeof(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in s.call.leaves] for s in samples]

    def every(*groups: Any) -> Any:
        return [jax.jit(s.call.program)(*group) for s, group in zip(samples, groups, strict=True)]

    with jax.enable_x64(True):
        traced = jax.jit(every, keep_unused=True).trace(*structs)
        return traced.lower(lowering_platforms=("tpu",)).as_text()


def refused(samples: Sequence[Sample], compile: Any) -> Iterator[tuple[Sample, str]]:
    """The samples that cannot be lowered or compiled, each with its error; halves a batch that fails."""
    try:
        compile(lowered(samples), len(samples))
    except Exception as error:  # whatever it is, it belongs to one of these
        if len(samples) == 1:
            yield samples[0], lowering_check._first_line(error)
            return
        middle = len(samples) // 2
        yield from refused(samples[:middle], compile)
        yield from refused(samples[middle:], compile)


class Compiler:
    """A process with libtpu in it: the compiler may crash, or take memory and time without end."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._process: subprocess.Popen[str] | None = None

    def compile(self, text: str, lowerings: int = 1) -> None:
        """Raises RuntimeError where the text is not compiled within the limits."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        seconds = _SECONDS + _MORE_SECONDS * lowerings
        process.stdin.write(json.dumps([text, seconds]) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            status = process.wait()
            self.close()
            why = f"{seconds} s of processor time" if status == -signal.SIGXCPU else f"status {status}"
            raise RuntimeError(f"the compiler's process ended: {why}")
        if json.loads(answer):
            raise RuntimeError(json.loads(answer))

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        from torchtpu.runtime.compile import aot

        return subprocess.Popen(
            [sys.executable, __file__, "--serve", self._target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=aot.environment(),
        )


def serve(target: str) -> None:
    """Compiles each text that comes in and answers with its error, or with an empty text."""
    from torchtpu.runtime.compile.aot import AotClient

    client = AotClient(target)
    resource.setrlimit(resource.RLIMIT_AS, (_NBYTES + _mapped_bytes(), resource.RLIM_INFINITY))
    for line in sys.stdin:
        error = ""
        text, seconds = json.loads(line)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + seconds, resource.RLIM_INFINITY))
        try:
            client.compile(text)
        except Exception as caught:
            error = lowering_check._first_line(caught)
        print(json.dumps(error), flush=True)


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="ATen names (add.Tensor) or packets (add); none: every lowering")
    parser.add_argument("--target", default="v5e")
    parser.add_argument("--dtypes", default=",".join(str(d).removeprefix("torch.") for d in DTYPES))
    parser.add_argument("--samples", type=int, default=1, help="samples per lowering and dtype")
    parser.add_argument("--json", help="a file for the outcome")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = set(lowering_check.load_ops())
    targets = {n for n in names if not options.names or n in options.names or n.partition(".")[0] in options.names}
    samples = collect(targets, [getattr(torch, d) for d in options.dtypes.split(",")], options.samples)
    compiler = Compiler(options.target)
    outcome: dict[str, list[str]] = {sample.name: [] for sample in samples}
    for start in range(0, len(samples), _BATCH):
        for sample, error in refused(samples[start : start + _BATCH], compiler.compile):
            outcome[sample.name].append(f"{sample.shown}: {error}")
            print(f"{sample.shown}: {error}", flush=True)
        print(f"{min(start + _BATCH, len(samples))}/{len(samples)}", file=sys.stderr, flush=True)
    for name in sorted(targets - outcome.keys()):
        print(f"{name}: no sample reached it")
    compiler.close()
    failed = sum(map(bool, outcome.values()))
    print(f"{len(targets)} lowerings, {len(outcome)} compiled for {options.target}, {failed} refused")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(outcome, file, indent=1)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
