"""An engine of few lowerings, the plans and works that it is given, and what hand-recorded programs make of it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from record_support import Record

from torchtpu.compiler_cache import Key
from torchtpu.ops.registry import LOWERINGS, Context, Lowering, jnp
from torchtpu.runtime.compile import plan_cache as plans
from torchtpu.runtime.engine import Engine
from torchtpu.runtime.ir.calls import Lowerings
from torchtpu.runtime.ir.program import Program
from torchtpu.runtime.lowering.emit import lower
from torchtpu.runtime.telemetry.counters import Counters

KNOBS: dict[str, Any] = {
    "clusters": True, "debug_nans": "off", "excess_precision": False, "log": (), "memory_limit": 0,
    "num_compile_threads": 1, "policy": "background", "deterministic": False, "sweep": False, "tiers": "off",
    "compare": "always", "max_programs": 1024, "max_fragments": 16384, "check": "off", "padding": True,
}  # fmt: skip


def add(x, y, *, alpha=1):
    return x + (y if isinstance(alpha, int) and alpha == 1 else alpha * y)


def pick(self, dim, index, ctx):
    ctx.check((index >= 0) & (index < self.shape[dim]), "index out of range in self", IndexError)
    return jnp.take(self, index, axis=dim)


def norm(input, shape, weight, bias, eps):
    weight, bias = 1 if weight is None else weight, 0 if bias is None else bias
    mean = input.mean(-1, keepdims=True)
    rstd = 1 / jnp.sqrt(input.var(-1, keepdims=True) + eps)
    return (input - mean) * rstd * weight + bias, mean, rstd


TABLE = {
    name: Lowering(name, function)
    for name, function in {
        "add.Tensor": add,
        "mul.Tensor": lambda x, y: x * y,
        "mul.Scalar": lambda x, y: x * y,
        "mm": lambda x, y: x @ y,
        "relu": lambda x: jnp.maximum(x, 0),
        "copy": lambda x, y, non_blocking: jnp.broadcast_to(y, x.shape).astype(x.dtype),
        "clone": lambda x, *, memory_format: x,
        "fill.Scalar": lambda x, v: jnp.full(x.shape, v, x.dtype),
        "zero": lambda x: x * 0,
        "index_select": pick,
        "index_copy": LOWERINGS["index_copy"].function,
        "native_layer_norm": norm,
        "_foreach_add.List": lambda xs, ys, *, alpha: [x + alpha * y for x, y in zip(xs, ys, strict=True)],
        "neg": lambda x: x * -1,
        "sort.stable": lambda x, *, stable, dim, descending: (jnp.sort(x, dim), jnp.argsort(x, dim)),
    }.items()
}
SERVED = {
    "add_.Tensor": "add.Tensor", "add.out": "add.Tensor", "mul_.Tensor": "mul.Tensor", "mul_.Scalar": "mul.Scalar",
    "copy_": "copy", "relu_": "relu", "fill_.Scalar": "fill.Scalar", "zero_": "zero", "mm.out": "mm",
    "_foreach_add_.List": "_foreach_add.List", "index_copy_": "index_copy",
}  # fmt: skip


class Plan:
    """Stands for the recorder's plan."""

    def __init__(self, program: Program, device: int = 0) -> None:
        self.program, self.device, self.line, self.run = program, device, program.line, ""
        self.nearest = ""
        self.before = None
        self.regions = 1
        self.is_loop = False
        self.executable: Any = None
        self.error: Any = None
        self._done = threading.Event()

    def ready(self, executable: Any) -> None:
        self.executable = executable
        self._done.set()

    def failed(self, error: BaseException) -> None:
        self.error = error
        self._done.set()

    def wait(self) -> Any:
        assert self._done.wait(60)
        if self.error is not None:
            raise self.error
        return self.executable


class Work:
    """Stands for the recorder's work."""

    def __init__(
        self,
        executable: Any,
        inputs: list[Any],
        guards: Any = (),
        floats: Any = None,
        ints: Any = None,
        program: Program | None = None,
    ) -> None:
        self.program = program
        self.executable, self.device, self.floats, self.ints = executable, 0, floats, ints
        self.region, self.run = {"reason": "read", "line": "test.py:9"}, ""
        self.is_subgraph = self.is_ahead = False
        self._inputs, self._guards = inputs, list(guards)
        self.outputs: Any = None
        self.guards_made: list[Any] = []
        self.poisoned: dict[int, BaseException] = {}
        self.kept: dict[int, Any] = {}
        self.restored: dict[int, Any] = {}
        self.error: Any = None
        self.build_error = self.stopped_by = None
        self.engine_launches = 1  # the recorder repeats nothing itself

    def inputs(self) -> list[Any]:
        return [None if isinstance(i, Exception) else i for i in self._inputs]

    def errors(self) -> list[tuple[Exception, int]]:
        return [(error, 1 << i) for i, error in enumerate(self._inputs) if isinstance(error, Exception)]

    def guards(self) -> list[tuple[Any, int]]:
        return [(guard, 1 << i) for i, guard in enumerate(self._guards) if guard is not None]

    def poison(self, output: int, error: BaseException) -> None:
        self.poisoned[output] = error

    def keep(self, output: int, array: Any, guard: Any) -> None:
        self.kept[output] = array

    def restore(self, output: int, base: Any, array: Any, guard: Any) -> None:
        self.restored[output] = array

    def done(self, outputs: list[Any], guards: list[Any]) -> None:
        self.outputs, self.guards_made = outputs, guards

    def failed(self, error: BaseException) -> None:
        self.error = error


def table_of(lowerings: Mapping[str, Lowering]) -> Lowerings:
    return Lowerings(lowerings, {}, lambda name: SERVED.get(name, name), Context)


def make_engine(**changes: Any) -> Engine:
    knobs = {**KNOBS, **changes.pop("knobs", {})}
    lowerings = changes.pop("lowerings", TABLE)
    options: dict[str, Any] = {
        "platform": "cpu", "num_devices": 2, "counters": Counters(), "knob": knobs.__getitem__,
        "lowerings": lowerings if isinstance(lowerings, Lowerings) else table_of(lowerings),
    }  # fmt: skip
    return Engine(**{**options, **changes})


def compile_(engine: Engine, program: Program, device: int = 0) -> Any:
    plan = Plan(program, device)
    engine.plan(plan)
    return plan.wait()


def text_of(engine: Engine, program: Program) -> str:
    return lower(program, engine.fragments).text


def plan_of(text: str) -> plans.Plan:
    return plans.Plan(Key.of("program", {"text": text}), lambda: text, False, (), (), (), (), {}, ())


def run(
    engine: Engine, program: Program, inputs: list[torch.Tensor], floats: list[float] = (), ints: list[int] = ()
) -> list[torch.Tensor]:
    executable = compile_(engine, program)
    work = Work(
        executable,
        [engine.upload(t, 0) for t in inputs],
        floats=torch.tensor(floats, dtype=torch.float64) if floats else None,
        ints=torch.tensor(ints) if ints else None,
        program=program,
    )
    engine.launch(work)
    if work.error is not None:
        raise work.error
    for guard in work.guards_made:
        if guard is not None:
            engine.resolve(guard)
    return [engine.download(o) for o in work.outputs]


def run_recorded(engine: Engine, program: Program, record: Record) -> list[torch.Tensor]:
    """What the program makes of the inputs that it was recorded with, which keep what they hold."""
    return run(engine, program, [tensor.clone() for tensor in record.inputs], record.floats)


def check(engine: Engine, record: Record, *outputs: torch.Tensor, donated: Any = ()) -> Program:
    program = record.program(*outputs, donated=donated)
    actual = run_recorded(engine, program, record)
    for got, want in zip(actual, record.expected(*outputs), strict=True):
        torch.testing.assert_close(got, want)
    return program
