"""What programs take to compile with the usual options and with those of the first tier, and what their launches take.

The programs are those that the regions of programs of unseen.py are made of. Each is compiled both ways, and launched
both ways on what its first launch was given, in milliseconds and microseconds of a process that does nothing else
meanwhile: CPU time on platform cpu, else wall time. The planes through all of them are numbers of
`runtime/compile/tiers.py`. With `ops` the programs are single ops, and what a launch of the first tier loses is shown
for each element that `runtime/compile/computed.py` says they compute, and for those that they make.

    python benchmarks/compile_price.py
    python benchmarks/compile_price.py gpt --laps 2
    python benchmarks/compile_price.py ops
    TORCHTPU_PLATFORM=gpu python benchmarks/compile_price.py
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import peers
import torch
import unseen
from torch.nn import functional as F

from torchtpu import config, startup
from torchtpu.runtime.compile.computed import computed
from torchtpu.runtime.compile.tiers import FIRST_TIERS
from torchtpu.runtime.ir.calls import results_of
from torchtpu.runtime.ir.program import Program, Random

NAMES = ("gpt", "mlp", "cnn", "lbfgs", "episode", "batches", "noread", "tokens")
LAUNCHES, ROUNDS = 20, 12
DONATED = re.compile(r"(tf\.aliasing_output = \d+ : i32|jax\.buffer_donor = true)(, )?")


def forward(function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> unseen.Lap:
    """Calls the function of tensors of these shapes."""
    given = [torch.randn(shape).to("tpu") for shape in shapes]
    return lambda i: function(*given)


def gradients(function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> unseen.Lap:
    """And its gradients."""
    given = [torch.randn(shape).to("tpu").requires_grad_() for shape in shapes]
    return lambda i: torch.autograd.grad(function(*given).sum(), given)


def recurrent(x: torch.Tensor, hx: torch.Tensor, cx: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    return torch.lstm(x, (hx, cx), weights, False, 1, 0.0, False, False, False)[0]


IMAGES, ROWS = (4, 32, 32, 32), (256, 1024)
SEQUENCES = (32, 16, 128), (1, 16, 128), (1, 16, 128), (512, 128), (512, 128)
OPS: dict[str, Callable[[], unseen.Lap]] = {
    "tanh": lambda: forward(torch.tanh, (1024, 1024)),
    "softmax": lambda: forward(lambda x: x.softmax(-1), (1024, 1024)),
    "convolution": lambda: forward(lambda x, w: F.conv2d(x, w, padding=1), IMAGES, (32, 32, 3, 3)),
    "its gradients": lambda: gradients(lambda x, w: F.conv2d(x, w, padding=1), IMAGES, (32, 32, 3, 3)),
    "convolution of small images": lambda: forward(
        lambda x, w: F.conv2d(x, w, padding=1), (4, 128, 8, 8), (128, 128, 3, 3)
    ),
    "depthwise 3 x 3": lambda: forward(lambda x, w: F.conv2d(x, w, padding=1, groups=32), IMAGES, (32, 1, 3, 3)),
    "depthwise 7 x 7": lambda: forward(lambda x, w: F.conv2d(x, w, padding=3, groups=32), IMAGES, (32, 1, 7, 7)),
    "its gradients, depthwise": lambda: gradients(
        lambda x, w: F.conv2d(x, w, padding=3, groups=32), IMAGES, (32, 1, 7, 7)
    ),
    "convolution in 3 dimensions": lambda: forward(
        lambda x, w: F.conv3d(x, w, padding=1), (2, 8, 8, 16, 16), (8, 8, 3, 3, 3)
    ),
    "max pooling": lambda: forward(lambda x: F.max_pool2d(x, 3, 2, 1), (4, 32, 64, 64)),
    "its gradient": lambda: gradients(lambda x: F.max_pool2d(x, 3, 2, 1), (4, 32, 64, 64)),
    "attention, gradients": lambda: gradients(F.scaled_dot_product_attention, *[(2, 4, 256, 32)] * 3),
    "argmax": lambda: forward(lambda x: x.argmax(1), ROWS),
    "max of rows": lambda: forward(lambda x: x.max(1)[1], ROWS),
    "topk": lambda: forward(lambda x: x.topk(8, 1)[0], ROWS),
    "median": lambda: forward(lambda x: x.median(1)[0], ROWS),
    "cumsum": lambda: forward(lambda x: x.cumsum(1), ROWS),
    "logcumsumexp": lambda: forward(lambda x: x.logcumsumexp(1), ROWS),
    "patches": lambda: forward(lambda x: F.unfold(x, 3, padding=1), IMAGES),
    "bicubic": lambda: forward(lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), IMAGES),
    "lstm": lambda: forward(recurrent, *SEQUENCES),
    "lstm, gradients": lambda: gradients(recurrent, *SEQUENCES),
    "samples of a grid": lambda: forward(lambda x, g: F.grid_sample(x, g, align_corners=False), IMAGES, (4, 32, 32, 2)),
}


class Row(NamedTuple):
    """A program: elements that its ops make, and draw; both ways, the usual options first."""

    ops: int
    kilobytes: float
    computed: float
    plain: int
    padded: int
    drawn: int
    compile_ms: list[float]
    launch_us: list[float]


class Meter:
    """Compiles and launches what one program of unseen.py is made of."""

    def __init__(self) -> None:
        self._engine = startup.engine()
        self._clock = time.process_time if startup.platform() == "cpu" else time.perf_counter
        self._options = (), FIRST_TIERS[startup.platform()].options
        self._alone = threading.Lock()
        self._programs: dict[str, Program] = {}
        self._plans: dict[int, Any] = {}  # by the ids of their executables
        self._given: dict[int, list[torch.Tensor]] = {}
        self._kept: list[Any] = []  # executables: their ids stay theirs

    def measure(self, make: Callable[[], unseen.Lap], laps: int) -> list[Row]:
        with self._watching():
            lap = make()
            for i in range(laps):
                made = lap(i)
                torch.tpu.synchronize()
                del made
        return [self._row(self._plans[key], arguments) for key, arguments in self._given.items()]

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        builder, compiler, client = self._engine._builder, self._engine.compiler, self._engine.client
        submit, load, execute = builder.submit, compiler._load_or_compile, client.execute

        def submitted(program: Program, plan: Any, *rest: Any, **options: Any) -> Any:
            self._programs[plan.key.digest] = program
            return submit(program, plan, *rest, **options)

        def loaded(plan: Any, *rest: Any) -> Any:
            made = load(plan, *rest)
            self._kept.append(made.executable)
            self._plans[id(made.executable)] = plan
            return made

        def executed(executable: Any, arguments: list[Any], handlers: list[Any]) -> Any:
            if id(executable) in self._plans and id(executable) not in self._given:
                self._given[id(executable)] = [client.download(argument).clone() for argument in arguments]
            return execute(executable, arguments, handlers)

        with (
            mock.patch.object(builder, "submit", submitted),
            mock.patch.object(compiler, "_load_or_compile", loaded),
            mock.patch.object(client, "execute", executed),
        ):
            yield

    def _row(self, plan: Any, arguments: list[torch.Tensor]) -> Row:
        program = self._programs[plan.key.digest]
        made = [(op, sum(math.prod(result.sizes) for result in results_of(op))) for op in program.ops]
        drawn = sum(n for op, n in made if any(isinstance(argument, Random) for argument in op.args))
        padded = sum(n for op, n in made if op.padding is not None)
        both = [self._compiled(plan, options) for options in self._options]
        launch_us = [self._launch_us(executable, arguments) for executable, _ in both]
        plain = sum(n for _, n in made) - padded - drawn
        return Row(
            len(made),
            plan.text_bytes / 1e3,
            sum(map(computed, program.ops)),
            plain,
            padded,
            drawn,
            [milliseconds for _, milliseconds in both],
            launch_us,
        )

    def _compiled(self, plan: Any, options: Any) -> tuple[Any, float]:
        """The program, whose launches leave what they are given, and the milliseconds that it took to compile."""
        text = DONATED.sub("", plan.text())
        started = self._clock()
        executable = self._engine.client.compile(text, 0, plan.homes, options)
        return executable, (self._clock() - started) * 1e3

    def _launch_us(self, executable: Any, arguments: list[torch.Tensor]) -> float:
        arrays, rounds = [self._engine.client.upload(argument, 0) for argument in arguments], []
        for _ in range(ROUNDS):
            started = self._clock()
            for _ in range(LAUNCHES):
                executable.execute_sharded(arrays, with_tokens=True).consume_token().block_until_ready()
            rounds.append((self._clock() - started) / LAUNCHES * 1e6)
        return min(rounds)


def fitted(columns: Sequence[Sequence[float]], found: Sequence[float], noise: float = 0.0) -> list[float]:
    """The plane through points whose errors grow with the roots of what was found."""
    weights = 1 / np.sqrt(np.abs(found) + noise)
    made, *_ = np.linalg.lstsq(np.array(columns).T * weights[:, None], np.array(found) * weights, rcond=None)
    return [float(x) for x in made]


def show_ops() -> None:
    """Prints what single ops lose."""
    rows = [["op", "kB", "launches, us", "ns for one made", "ns for one computed"]]
    for name, make in OPS.items():
        found = Meter().measure(make, 1)
        usual, first = (sum(row.launch_us[i] for row in found) for i in range(2))
        counts = sum(row.plain + row.padded + row.drawn for row in found), sum(row.computed for row in found)
        losses = [f"{(first - usual) * 1e3 / count:.1f}" for count in counts]
        rows.append([name, f"{sum(row.kilobytes for row in found):.0f}", f"{usual:.0f}, {first:.0f}", *losses])
    print(peers.table(rows))


def show_programs(names: Sequence[str], laps: int) -> None:
    """Prints what programs of unseen.py cost, and the planes through them."""
    rows, found = [["program", "programs", "ops", "kB", "usual, ms", "first tier, ms", "launches, us"]], list[Row]()
    for name in names:
        made = Meter().measure(functools.partial(unseen.PROGRAMS[name], "tpu"), laps)
        (usual, first), (run, run_first) = (
            np.sum([getattr(row, field) for row in made], 0) for field in ("compile_ms", "launch_us")
        )
        counts = len(made), sum(row.ops for row in made), round(sum(row.kilobytes for row in made))
        rows.append([name, *map(str, counts), f"{usual:.0f}", f"{first:.0f}", f"{run:.0f}, {run_first:.0f}"])
        found += made
    print(peers.table(rows))
    sizes = [[1.0] * len(found), [row.kilobytes for row in found]]
    for what, place in (("usual", 0), ("first tier", 1)):
        a, b = fitted(sizes, [row.compile_ms[place] for row in found])
        print(f"{what}: {a:.0f} ms a program and {b:.1f} ms a kB")
    counts_of = [[float(row.ops), row.plain, row.padded, row.drawn] for row in found]
    losses = [row.launch_us[1] - row.launch_us[0] for row in found]
    op, plain, padded, drawn = fitted(list(zip(*counts_of, strict=True)), losses, noise=20.0)
    print(f"a launch of the first tier loses {op:.1f} us an op, and for an element {plain * 1e3:.1f} ns,", end=" ")
    print(f"{padded * 1e3:.1f} where it is padded and {drawn * 1e3:.0f} where it is drawn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", choices=[[], "ops", *unseen.PROGRAMS])
    parser.add_argument("--laps", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with config.using(tiers="off", sweep=False, cache="off"):
        torch.ones(2, device="tpu").cpu()
        if arguments.programs == ["ops"]:
            show_ops()
        else:
            show_programs(arguments.programs or NAMES, arguments.laps)


if __name__ == "__main__":
    main()
