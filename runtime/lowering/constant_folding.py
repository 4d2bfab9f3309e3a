"""Constant folding: finds the calls that XLA would compute while it compiles, one element at a time.

What follows from constants alone, as sums and sorts of `torch.ones` do, XLA evaluates at compile time: 15 s for a
running sum of 131072 zeros. Behind a barrier their arguments are no constants.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torchtpu.runtime.ir.calls import Parameter
from torchtpu.runtime.ir.program import Op, Operand, Random

from .tracing import Fragment

_FEWEST_ELEMENTS = 4096
_LOOPS = re.compile(r"\bstablehlo\.(?:reduce|reduce_window|scatter|select_and_scatter|sort|while)\b")


class FoldableCall(Protocol):
    """What is asked of a call (`lower` has more)."""

    op: Op
    fragment: Fragment
    parameters: list[Parameter]
    made: list[Any]

    def kept(self) -> Iterator[int | None]: ...


def folded(calls: Sequence[FoldableCall]) -> set[int]:
    """The places of calls with a loop over many elements that are all constants."""
    constant: set[int | None] = {None}  # zeros
    found = set()
    for place, call in enumerate(calls):
        taken = [call.parameters[n] for n in call.fragment.used]
        read = [parameter for parameter in taken if isinstance(parameter, Operand)]
        if not all(value in constant for value in (*call.kept(), *(parameter.value for parameter in read))):
            continue
        is_large = any(math.prod(parameter.sizes) >= _FEWEST_ELEMENTS for parameter in read)
        if is_large and _LOOPS.search(call.fragment.text):
            found.add(place)
        elif len(read) == len(taken) and not any(isinstance(argument, Random) for argument in call.op.args):
            constant.update(target.value for target in call.made)
    return found
