"""An engine for tests of the recorder that computes values with torch on the CPU, op by op.

It takes XLA and the lowerings out of the picture: what differs from the CPU under it is the recorder's doing. It holds
the recorder to the contract of donation too: a donated buffer is overwritten and refuses any further use.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtpu import startup
from torchtpu.runtime import _C
from torchtpu.runtime.ir.program import Lifted, Op, Operand, Program, Random, Result, Scalar, Write
from torchtpu.runtime.ir.values import bases_of

_POISON = 0xA5
_PATIENCE = 60


class Buffer:
    """A contiguous CPU tensor in its base's shape, until a launch that it is donated to takes it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._taker = ""

    def read(self) -> torch.Tensor:
        if self._taker:
            raise AssertionError(f"a buffer donated to the region of {self._taker} is used again")
        return self._tensor

    def give_to(self, region: str) -> None:
        _bytes(self._tensor).fill_(_POISON)
        self._taker = region


class Executable:
    """A program, ready to run."""

    def __init__(self, program: Program) -> None:
        self.program = program


@dataclass
class ReferenceEngine:
    """Answers the recorder; `programs` are all that were planned, `executables` those that are still held."""

    programs: list[Program] = field(default_factory=list)
    executables: weakref.WeakSet[Executable] = field(default_factory=weakref.WeakSet)
    launches: int = 0
    subgraphs: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def plan(self, plan: Any) -> None:
        try:
            program = plan.program
        except Exception as error:
            plan.failed(error)
        else:
            executable = Executable(program)
            with self.lock:
                self.programs.append(program)
                self.executables.add(executable)
            plan.ready(executable)

    def launch(self, work: Any) -> None:
        for error in (work.build_error, work.stopped_by):
            if error is not None:
                return work.failed(error)
        errors = work.errors()
        if errors and not work.is_subgraph:
            return work.failed(errors[0][0])
        inputs = work.inputs()
        missing = {~i for i in range(len(inputs)) if any(bits >> i & 1 for _, bits in errors)}
        try:
            with _plain_torch():
                outputs = run(work.executable.program, inputs, work.floats, work.ints, missing)
        except Exception as error:
            work.failed(error)
        else:
            with self.lock:
                self.launches += not work.is_subgraph
                self.subgraphs += work.is_subgraph
            for k, output in enumerate(outputs):
                if output is None:
                    work.poison(k, errors[0][0])
            work.done(outputs, [])

    def upload(self, tensor: torch.Tensor, device: int) -> Buffer:
        return Buffer(tensor.clone().contiguous())

    def download(self, buffer: Buffer) -> torch.Tensor:
        return buffer.read()

    def resolve(self, guard: object) -> None:
        raise AssertionError("no launch made a guard")

    def await_launches(self, device: int) -> None:
        """Nothing runs between the calls."""

    def finish(self, device: int) -> None:
        """What failed was raised by the calls."""

    def infer(self, name: str, args: Any) -> Any:
        return startup._lazy.infer(name, args)

    def fallback(self, name: str, dtype: torch.dtype | None, line: str, nbytes: int) -> None:
        startup._lazy.fallback(name, dtype, line, nbytes)

    def waiting(self, info: str, seconds: float) -> None:
        """Nobody logs under test."""

    def waited(self) -> None:
        """Nothing was logged."""


class IdleEngine(ReferenceEngine):
    """Counts programs and launches, keeps no program, and computes nothing: each value is the zeros of its base."""

    def __init__(self) -> None:
        super().__init__()
        self.planned = 0
        self.ops_launched = 0

    def plan(self, plan: Any) -> None:
        executable = Executable(plan.program)
        with self.lock:
            self.planned += 1
            self.executables.add(executable)
        plan.ready(executable)

    def launch(self, work: Any) -> None:
        program = work.executable.program
        bases = bases_of(program)
        made = [bases[value] for value in program.outputs]
        work.done([Buffer(torch.zeros((), dtype=b.dtype).expand(b.shape)) for b in made], [])
        with self.lock:
            self.launches += not work.is_subgraph
            self.subgraphs += work.is_subgraph
            self.ops_launched += len(program.ops)


class SlowEngine(ReferenceEngine):
    """Answers plans one by one, in an order of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._plans: list[Any] = []
        self._condition = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def plan(self, plan: Any) -> None:
        executable = Executable(plan.program)
        with self._condition:
            self._plans.append((plan, executable))
            self._condition.notify_all()

    def _answer(self) -> None:
        while True:
            with self._condition:
                while not self._plans and not self._is_closed:
                    self._condition.wait()
                if not self._plans:
                    return
            time.sleep(self._random.choice((0, 0, 1e-3)))  # others may come and overtake
            with self._condition:
                plan, executable = self._plans.pop(self._random.randrange(len(self._plans)))
            plan.ready(executable)

    def close(self) -> None:
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._thread.join(_PATIENCE)


@contextlib.contextmanager
def reference_engine(engine: ReferenceEngine | None = None) -> Iterator[ReferenceEngine]:
    """Everything recorded inside the block runs on this engine; tensors of the device must not cross its ends."""
    engine = engine or ReferenceEngine()
    _exchange(engine)
    try:
        yield engine
    finally:
        _exchange(startup._lazy)


def _exchange(engine: Any) -> None:
    gc.collect()
    try:
        torch.tpu.synchronize()
    finally:  # what a failing test left is no later test's
        _C.forget_streams()  # its plans hold the executables of the engine that made them
        _C.set_engine(engine)


@contextlib.contextmanager
def _plain_torch() -> Iterator[None]:
    """A launch may run in a reading thread, under whatever modes its user has entered."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run(
    program: Program, inputs: list[Buffer], floats: Any, ints: Any, missing: AbstractSet[int] = frozenset()
) -> list[Buffer | None]:
    """The program's outputs, None for those that depend on missing inputs; donated inputs are taken."""
    assert len(inputs) == len(program.inputs), (len(inputs), program.inputs)
    assert (0 if floats is None else len(floats)) == program.floats, (floats, program.floats)
    assert (0 if ints is None else len(ints)) == program.ints, (ints, program.ints)
    values = {~i: buffer.read() for i, buffer in enumerate(inputs) if ~i not in missing}
    for i, base in enumerate(program.inputs):
        if ~i in missing:
            continue
        assert values[~i].dtype == base.dtype and values[~i].shape == base.shape, (values[~i], base)
    numbers = {
        "f": [] if floats is None else floats.tolist(),
        "i": [] if ints is None else ints.tolist(),
    }
    for op in program.ops:
        if missing and any(o.value is not None and o.value not in values for o in _operands(op.args)):
            continue
        try:
            _run_op(op, values, numbers)
        except Exception as error:
            if missing:  # it may lack a number only
                continue
            raise AssertionError(f"reference engine: {op}: {type(error).__name__}: {error}") from error
    outputs = [Buffer(values[v]) if v in values else None for v in program.outputs]
    for i in program.donated:
        inputs[i].give_to(program.line)
    return outputs


def _operands(args: tuple[Any, ...]) -> Iterator[Operand]:
    for arg in args:
        if isinstance(arg, Operand):
            yield arg
        elif isinstance(arg, tuple):
            yield from _operands(arg)


def _linear_backward(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, mask: list[bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = grad.reshape(-1, grad.shape[-1])
    return grad @ weight, rows.T @ x.reshape(-1, x.shape[-1]), rows.sum(0)


_WITHOUT_CPU_KERNEL = {"linear_backward": _linear_backward}


def _run_op(op: Op, values: dict[int, torch.Tensor], numbers: dict[str, list[Any]]) -> None:
    name, _, overload = op.name.partition(".")
    function = getattr(getattr(torch.ops.aten, name), overload or "default")
    arguments = function._schema.arguments
    writes = {(w.arg, w.element): w for w in op.writes}
    opened: dict[tuple[int, int | None], torch.Tensor] = {}

    def build(value: Any, place: tuple[int, int | None]) -> Any:
        match value:
            case Operand():
                opened[place] = _open(value, writes.get(place), values, numbers)
                return opened[place]
            case Lifted():
                return numbers[value.kind][value.index]
            case Scalar():
                number = build(value.value, place)
                return number if value.wrapped else torch.tensor(number, dtype=value.dtype)
            case Random():
                generator = torch.Generator()
                generator.manual_seed((build(value.seed, place) * 31 + build(value.offset, place)) % 2**63)
                return generator
            case tuple():
                return [build(v, (place[0], e)) for e, v in enumerate(value)]
        return value

    args = [build(value, (i, None)) for i, value in enumerate(op.args)][: len(arguments)]
    named = {s.name: _on_cpu(a, s) for a, s in zip(args, arguments, strict=True) if s.kwarg_only}
    kernel = _WITHOUT_CPU_KERNEL.get(op.name, function)
    made = kernel(*(a for a, s in zip(args, arguments, strict=True) if not s.kwarg_only), **named)
    returns = made if len(function._schema.returns) > 1 else (made,)
    for result, value in zip(op.results, returns, strict=False):  # an op without returns gives one None
        for r, v in zip(result, value, strict=True) if isinstance(result, tuple) else [(result, value)]:
            if isinstance(r, Result):
                values[r.value] = _store(r, 0, v, None)
    newest: dict[int | None, int] = {}  # values that this op has already written to
    for w in op.writes:
        operand = op.args[w.arg] if w.element is None else op.args[w.arg][w.element]
        old = operand.value
        while old in newest:
            old = newest[old]
        if old is not None:
            newest[old] = w.value
        under = None if w.replaces or old is None else values[old]
        values[w.value] = _store(w, _offset(w.offset, numbers), opened[w.arg, w.element], under)


def _on_cpu(value: Any, argument: Any) -> Any:
    return torch.device("cpu") if argument.name == "device" else value


def _offset(offset: int | Lifted, numbers: dict[str, list[Any]]) -> int:
    return numbers["i"][offset.index] if isinstance(offset, Lifted) else offset


def _open(
    operand: Operand, write: Write | None, values: dict[int, torch.Tensor], numbers: dict[str, list[Any]]
) -> torch.Tensor:
    """The argument as a CPU tensor; what the op writes, it writes into a copy that nothing else shares."""
    if write is not None and (write.sizes, write.strides) != (operand.sizes, operand.strides):
        return torch.empty_strided(write.sizes, write.strides, dtype=write.dtype)  # an out= argument is resized
    if operand.value is None:
        store = torch.zeros(operand.base.shape, dtype=operand.base.dtype)
    else:
        store = values[operand.value]
    store = store if write is None else store.clone()
    return _view(store, operand.dtype, operand.sizes, operand.strides, _offset(operand.offset, numbers))


def _store(made: Result | Write, offset: int, tensor: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    """The new value: `tensor`, laid out as it was recorded, over the bytes of `old`."""
    value = torch.zeros(made.base.shape, dtype=made.base.dtype)
    if isinstance(made, Result) and not tensor.numel():  # the CPU leaves out what nobody uses
        return value
    assert tensor.shape == made.sizes, (tensor.shape, made)
    assert tensor.dtype == made.dtype, (tensor.dtype, made)
    if old is not None:
        _bytes(value).copy_(_bytes(old)[: value.nbytes])
    view = _view(value, made.dtype, made.sizes, made.strides, offset)
    for d, (size, stride) in enumerate(zip(made.sizes, made.strides, strict=True)):
        if size > 1 and stride == 0:  # only a fill writes an element twice
            view, tensor = view.narrow(d, 0, 1), tensor.narrow(d, 0, 1)
    view.copy_(tensor)
    return value


def _view(store: torch.Tensor, dtype: torch.dtype, sizes: Any, strides: Any, offset: int) -> torch.Tensor:
    extent = offset + 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) if math.prod(sizes) else 0
    assert extent * dtype.itemsize <= store.nbytes, f"{dtype} {sizes} {strides} {offset} outside {store.nbytes} bytes"
    return torch.empty(0, dtype=dtype).set_(store.untyped_storage(), offset, tuple(sizes), tuple(strides))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), 0, (tensor.nbytes,), (1,))
