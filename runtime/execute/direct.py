"""Direct launches: in come the programs that an executable launches in turn, out goes what the recorder repeats itself.

It does so where nothing has to be decided: see runtime/csrc/launch/direct.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torchtpu.runtime import _C

ALWAYS = 1 << 62  # launches


class StepNumbers(NamedTuple):
    """A program's run-time numbers: those at these places among the work's (None: all), and constants after them."""

    taken: tuple[int, ...] | None = None
    constants: tuple[int, ...] = ()


class Step(NamedTuple):
    """One program of a launch: where among the launch's arrays it finds its inputs and puts its outputs, and which of
    them nobody takes after it."""

    executable: Any
    inputs: Sequence[int]
    outputs: Sequence[int]
    dying: Sequence[int]
    floats: StepNumbers | None
    ints: StepNumbers | None


def make(
    client: Any,
    context: Any,
    steps: Sequence[Step],
    outputs: Sequence[int],
    num_arrays: int,
    *,
    is_accounted: bool,
) -> _C.DirectLaunch:
    """What launches these steps; `outputs` are the places of the work's own among `num_arrays`, inputs come first.

    Where it `is_accounted` for, the context is asked for memory and hears of each launch.
    """
    direct = _C.DirectLaunch(client, context, context.counters.launched, client.array_type, list(outputs), num_arrays)
    for step in steps:
        executable = step.executable
        direct.add_step(
            executable,
            executable.run,
            executable.handlers,
            list(step.inputs),
            list(step.outputs),
            list(step.dying),
            bool(executable.checks),
            executable.about.tier,
        )
        if step.floats is not None:
            direct.give_floats(step.floats.taken)
        if step.ints is not None:
            direct.give_ints(step.ints.taken, list(step.ints.constants))
    if is_accounted:
        direct.account(sum(step.executable.needed_bytes for step in steps))
    return direct
