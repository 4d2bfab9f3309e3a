"""CSE barriers: finds the calls of a program that repeat others on purpose and must not be merged with them.

A sharded parameter that backward gathers again is gathered again to save the memory between. Merged with forward's
gather it would be kept; begun too early it would be there too soon. So it waits for the newest result before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from torchtpu.runtime.ir.calls import Parameter
from torchtpu.runtime.ir.program import Op, Operand

from .tracing import Fragment


class RepeatableCall(Protocol):
    """What is asked of a call (`lower` has more)."""

    op: Op
    fragment: Fragment
    parameters: list[Parameter]
    made: list[Any]

    def kept(self) -> Iterator[int | None]: ...


def repeated(calls: Sequence[RepeatableCall], is_meant: Callable[[Op], bool]) -> dict[int, int]:
    """By the place of each such call the value that it waits for; `is_meant` says of which ops a repetition is."""
    if not any(is_meant(call.op) for call in calls):
        return {}
    numbers: dict[Any, int] = {}  # what computes the same has the same number
    numbered: dict[int | None, int] = {}
    seen: set[int] = set()
    computed: set[int | None] = set()
    newest: int | None = None
    found = {}

    def number(what: Any) -> int:
        return numbers.setdefault(what, len(numbers))

    def of_value(value: int | None) -> int:
        if value not in numbered:
            numbered[value] = number(("given", value))
        return numbered[value]

    for place, call in enumerate(calls):
        taken = [call.parameters[n] for n in call.fragment.used]
        read = [parameter for parameter in taken if isinstance(parameter, Operand)]
        same = number((call.fragment.symbol, tuple(_described(p, of_value) for p in taken)))
        if is_meant(call.op):
            if same in seen and newest is not None:
                found[place] = newest
            seen.add(same)
        is_computed = len(read) > 1 or any(parameter.value in computed for parameter in read)
        for i, (target, old) in enumerate(zip(call.made, call.kept(), strict=True)):
            under = None if old is None else of_value(old)
            where = (target.sizes, target.strides, getattr(target, "offset", 0), target.base)
            numbered[target.value] = number((same, i, where, under))
            if is_computed:
                computed.add(target.value)
                newest = target.value
    return found


def _described(parameter: Parameter, of_value: Callable[[int | None], int]) -> Any:
    if not isinstance(parameter, Operand):
        return parameter
    p = parameter
    return of_value(p.value), p.sizes, p.strides, p.offset, p.dtype, p.base


def barrier(name: str, arrays: Iterable[tuple[str, str]]) -> tuple[str, list[str]]:
    """The line after which none of these arrays (names and types) is there before all are, and their new names."""
    names, types = zip(*arrays, strict=True)
    left = f"{name}:{len(names)}" if len(names) > 1 else name
    line = f"    {left} = stablehlo.optimization_barrier {', '.join(names)} : {', '.join(types)}"
    return line, [f"{name}#{i}" for i in range(len(names))] if len(names) > 1 else [name]
