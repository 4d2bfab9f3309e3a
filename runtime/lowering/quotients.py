"""Quotients: finds the values that are divided again, which XLA would divide once by a product.

XLA rewrites a / b / c as a / (b * c), where the product overflows or vanishes although no quotient does: the gradient
of a / b is -(a / b) / b, and would be infinite for denominators below 1e-19. A barrier between the two keeps them
apart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from torchtpu.runtime.ir.program import Result, Write

from .tracing import Fragment

_MADE = re.compile(r"^    (%\w+) = stablehlo\.divide ", re.MULTILINE)
_RETURNED = re.compile(r"^    return (.*) :", re.MULTILINE)
_GIVEN = re.compile(r"(%\w+): ")
_LINE = re.compile(r"^    (%\w+)(?::\d+)? = (\S+) (.*?) : ", re.MULTILINE)
_NAME = re.compile(r"%\w+")
_THROUGH = {f"stablehlo.{name}" for name in ("reshape", "broadcast_in_dim", "transpose", "convert", "negate")}


class DividingCall(Protocol):
    """An op of the program: its fragment, the values that it reads and those that it makes."""

    @property
    def fragment(self) -> Fragment: ...
    @property
    def made(self) -> Sequence[Result | Write]: ...

    def taken(self) -> list[int | None]: ...


def find_divided(calls: Sequence[DividingCall]) -> set[int]:
    """The quotients that another call divides, or divides by."""
    quotients: set[int] = set()
    found: set[int] = set()
    for call in calls:
        if "stablehlo.divide" not in call.fragment.text:
            continue
        taken = call.taken()
        if not quotients.isdisjoint(taken):
            divided = _divided(call.fragment)
            found.update(value for i, value in enumerate(taken) if i in divided and value in quotients)
        made = _quotients(call.fragment)
        quotients.update(target.value for i, target in enumerate(call.made) if i in made)
    return found


def _divided(fragment: Fragment) -> set[int]:
    """Which of the arrays that the op takes it divides, or divides by, as they are or in another shape; what it gives
    to helpers counts."""
    head, _, text = fragment.text.partition("\n  }")[0].partition("\n")
    is_from = {name: {i} for i, name in enumerate(_GIVEN.findall(head.partition(" -> ")[0]))}
    found: set[int] = set()
    for made, op, given in _LINE.findall(text):
        sources = {i for name in _NAME.findall(given) for i in is_from.get(name, ())}
        if op in _THROUGH:
            is_from[made] = sources
        elif op in ("stablehlo.divide", "call", "func.call"):
            found |= sources
    return found


def _quotients(fragment: Fragment) -> set[int]:
    """Which of the arrays that the op makes are quotients as they stand."""
    text = fragment.text.partition("\n  }")[0]  # helpers follow it
    returned, made = _RETURNED.search(text), {match[1] for match in _MADE.finditer(text)}
    return {i for i, name in enumerate(returned[1].split(", ")) if name in made} if returned else set()
