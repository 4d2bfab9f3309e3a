"""Host calls: runs a region of one op on the host, and returns the arrays of its results.

A host call takes its turn in the launch order, as a program does: after the regions that make its arguments, before
those that use its result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from torchtpu.runtime.device.client import Client
from torchtpu.runtime.execute.checks import PendingCheck, unsettled
from torchtpu.runtime.execute.executable import LaunchContext
from torchtpu.runtime.ir.program import Lifted, Op, Operand, Program, Result
from torchtpu.runtime.telemetry.observers import Called

HostOp = Callable[..., torch.Tensor]  # gets the op's arguments, tensors on the CPU, and makes one contiguous CPU tensor


class HostCall:
    """What a plan is given whose only op runs on the host; `skip` hears, instead of `function`, of an argument that
    failed."""

    meets_others = True
    takes_padding = False

    def __init__(
        self,
        client: Client,
        program: Program,
        device: int,
        function: HostOp,
        skip: Callable[..., None],
    ) -> None:
        assert len(program.ops) == 1, f"{program.ops[-1].name} is recorded with other ops in its region"
        self._client = client
        self.op = program.ops[0]
        self._device = device
        self._function = function
        self._skip = skip
        self._result = _result_of(self.op)

    def launch(self, work: Any, context: LaunchContext) -> None:
        """Runs the op, whose result depends on all its arguments."""
        with context.catching(work):
            context.counters.host_calls += 1
            started = time.perf_counter()
            outputs = self.run(work)
            for observer in context.observers:
                observer.called(Called(self.op.name, work.device, self.op.line, started, time.perf_counter()))
            pending = unsettled(work.guards())
            work.done(outputs, [PendingCheck(None, 0, pending)] * len(outputs) if pending else [])

    def run(self, work: Any) -> list[Any]:
        """Runs the op now; waits for its arguments. Raises what the op raises, or what an argument failed with."""
        for error, _ in work.errors():
            self._skip(error, *[None if type(a) is Operand else self._value(a, [], work) for a in self.op.args])
            raise error
        inputs = work.inputs()
        made = self._function(*[self._value(argument, inputs, work) for argument in self.op.args])
        assert made.shape == self._result.sizes and made.dtype == self._result.dtype, f"a wrong {self.op.name}"
        return [self._client.upload(made.reshape(self._result.base.shape), self._device)]

    def _value(self, argument: Any, inputs: list[Any], work: Any) -> Any:
        if isinstance(argument, Operand):
            return self._tensor(argument, inputs)
        return number_of(argument, work) if isinstance(argument, Lifted) else argument

    def _tensor(self, operand: Operand, inputs: list[Any]) -> torch.Tensor:
        if operand.value is None:  # never written: any value will do
            return torch.zeros(operand.sizes, dtype=operand.dtype)
        assert isinstance(operand.offset, int), "a host op takes tensors that begin their storage"
        flat = self._client.download(inputs[~operand.value]).view(-1).view(operand.dtype)
        return flat.as_strided(operand.sizes, operand.strides, operand.offset)


def number_of(lifted: Lifted | float, work: Any) -> float | int:
    """What a launch gives for a run-time number."""
    if not isinstance(lifted, Lifted):
        return lifted
    number: float | int = (work.floats if lifted.kind == "f" else work.ints)[lifted.index].item()
    return number


def _result_of(op: Op) -> Result:
    (result,) = op.results
    assert isinstance(result, Result) and not op.writes, f"{op.name} makes one tensor"
    return result
