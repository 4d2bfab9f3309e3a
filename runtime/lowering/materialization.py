"""Materialization boundaries: finds the values of a program that XLA is to store instead of recomputing.

XLA:CPU fuses a producer into each of its consumers. Where values have several, what they are made of is computed
several times, and that of those again: 150 ops on four live values run 180 times as long, and compile 60 times as
long. And it fuses a chain of any length into one loop, which LLVM does not vectorise any more and whose steps wait for
one another: 500 times tanh, times and plus run 13 times as long. A value that has passed a call which is not inlined is
stored; the call itself costs nothing.

What is computed again may differ in the last bit, since LLVM contracts products and sums in each loop as it likes.
Where a value is compared with what was chosen from it, as the gradient of `amax` does, it has to be the same bits, and
is stored too.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torchtpu.runtime.ir.program import Base, Result, Write
from torchtpu.runtime.ir.types import tensor_type

from .tracing import Fragment

# Ops whose results XLA stores whatever follows them: what lies between two of these is fused.
STORED = re.compile(
    r"\bstablehlo\.(?:dot|dot_general|convolution|reduce_window|select_and_scatter|scatter|gather|sort|while|custom_call"
    r"|fft|cholesky|triangular_solve|rng_bit_generator)\b"
)
_END_OF_FUSION = re.compile(rf"{STORED.pattern}|\bstablehlo\.reduce\b")
_OP = re.compile(r"\b(?:stablehlo|chlo)\.(\w+)")
_FREE = {"broadcast_in_dim", "constant", "convert", "iota", "reshape", "return", "slice", "transpose"}
_SLOW = {
    "atan2", "cbrt", "cosine", "divide", "erf", "erf_inv", "expm1", "exponential", "exponential_minus_one", "lgamma",
    "log", "log_plus_one", "logistic", "power", "remainder", "rsqrt", "sine", "sqrt", "tan", "tanh",
}  # fmt: skip


class MaterializationCosts(NamedTuple):
    """What an element costs, in simple ops on one element: a slow op, storing it and reading it again, and, once for
    all elements of a value, one more loop. `chain` is the most that one loop should do for an element of a value with
    at least `many`."""

    slow: float
    stored: float
    loop: float
    chain: float
    many: int


# Version 2, for jaxlib 0.10.2 on two cores with AVX-512. Estimates of the order of magnitude, chosen for what they lead
# to, which benchmarks/cliffs.py measures: a mix of 150 ops on four values and a chain of 300, beside `jax.jit`.
COSTS: Mapping[str, MaterializationCosts] = {
    "cpu": MaterializationCosts(slow=6.0, stored=3.0, loop=8192.0, chain=64.0, many=1024)
}


class StoredCall(Protocol):
    """An op of the program: its fragment, the values that it reads, those that it makes, with their sizes, and those
    that take their place where a check fails."""

    @property
    def fragment(self) -> Fragment: ...
    @property
    def made(self) -> Sequence[Result | Write]: ...
    @property
    def compares(self) -> bool: ...

    def read(self) -> set[int]: ...

    def fallbacks(self, shields: Mapping[int, bool]) -> Iterable[int]: ...

    def stored_whole(self) -> Iterable[tuple[int, Base]]: ...


def find_boundaries(
    calls: Sequence[StoredCall], outputs: Collection[int], platform: str, shields: Mapping[int, bool]
) -> set[int]:
    """The values to store: those whose consumers would spend more on computing them again, and those that are compared
    with what they made. Of `shields` those that are true are what was there before where a check has failed."""
    costs = COSTS.get(platform)
    if costs is None:
        return set()
    compared = _find_compared(calls)
    fused, is_stored = Counter[int](), set(outputs)  # values: consumers that they are fused into, those stored anyway
    again_read: list[list[int]] = []  # by each call, as what it falls back to
    checks = 0
    for call in calls:
        checks += len(call.fragment.checks)
        again_read.append([*call.fallbacks(shields)] if checks else [])
        fused.update((*call.read(), *again_read[-1]))
        if STORED.search(call.fragment.text):
            is_stored.update(call.read())
            fused.subtract(call.read())
    found: set[int] = set()
    work: defaultdict[int, float] = defaultdict(float)  # value -> what one element costs each consumer again
    for call, fallbacks in zip(calls, again_read, strict=True):
        own, is_end = _work(call.fragment.text, costs)
        own += 0.0 if is_end else sum(work[value] for value in (*call.read(), *fallbacks))
        for value, base in call.stored_whole():
            again = fused[value] - (value not in is_stored)
            elements = math.prod(base.shape)
            price = 0.0 if value in is_stored else costs.stored * elements + costs.loop
            is_long = own > costs.chain and elements >= costs.many and fused[value] > 0 and value not in is_stored
            if value in compared or is_long or (again > 0 and again * elements * own > price + again * elements):
                found.add(value)
            else:
                work[value] = own
    return found


def _find_compared(calls: Sequence[StoredCall]) -> set[int]:
    """The values that are compared with others that were computed from them."""
    makers = {target.value: call for call in calls for target in call.made}
    found = set()
    for call in calls:
        if not call.compares:
            continue
        operands = [value for value in call.read() if value in makers]
        for value in operands:
            seen, open_ = set[int](), [other for other in operands if other != value]
            while open_ and value not in seen:
                maker = makers.get(open_.pop())
                new = maker.read() - seen if maker is not None else set()
                seen |= new
                open_ += new
            if value in seen:
                found.add(value)
    return found


def _work(text: str, costs: MaterializationCosts) -> tuple[float, bool]:
    """What an element of a fragment's results costs since something was stored, and whether anything was."""
    *before, last = _END_OF_FUSION.split(text)
    names = [name for name in _OP.findall(last) if name not in _FREE]
    return sum(costs.slow if name in _SLOW else 1.0 for name in names), bool(before)


def boundary(base: Base) -> tuple[str, str, str]:
    """The symbol and the text of the function that a stored value passes, and how it is called after its argument."""
    kind = tensor_type(*base)
    symbol = f"store_{re.sub(r'[^0-9A-Za-z]', '_', kind)}"
    text = f"  func.func private @{symbol}(%arg0: {kind}) -> {kind} {{\n    return %arg0 : {kind}\n  }}"
    return symbol, text, f'{{mhlo.frontend_attributes = {{inlineable = "false"}}}} : ({kind}) -> {kind}'
