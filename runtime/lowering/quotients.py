"""Quotients: finds the values that are divided again, which XLA would divide once by a product.

XLA rewrites a / b / c as a / (b * c), where the product overflows or vanishes although no quotient does: the gradient
of a / b is -(a / b) / b, and would be infinite for denominators below 1e-19. A barrier between the two keeps them
apart, and does not keep them out of one loop.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from torchtpu.runtime.ir.program import Result, Write

from .tracing import Fragment

_MADE = re.compile(r"^    (%\w+) = stablehlo\.divide ", re.MULTILINE)
_RETURNED = re.compile(r"^    return (.*) :", re.MULTILINE)


class DividingCall(Protocol):
    """An op of the program: its fragment, the values that it reads and those that it makes."""

    @property
    def fragment(self) -> Fragment: ...
    @property
    def made(self) -> Sequence[Result | Write]: ...

    def read(self) -> set[int]: ...


def find_divided(calls: Sequence[DividingCall]) -> set[int]:
    """The quotients that another call reads which divides."""
    quotients: set[int] = set()
    found: set[int] = set()
    for call in calls:
        if "stablehlo.divide" not in call.fragment.text:
            continue
        found |= quotients & call.read()
        made = _quotients(call.fragment)
        quotients.update(target.value for i, target in enumerate(call.made) if i in made)
    return found


def _quotients(fragment: Fragment) -> set[int]:
    """Which of the arrays that the op makes are quotients as they stand."""
    text = fragment.text.partition("\n  }")[0]  # helpers follow it
    returned, made = _RETURNED.search(text), {match[1] for match in _MADE.finditer(text)}
    return {i for i, name in enumerate(returned[1].split(", ")) if name in made} if returned else set()
