"""Finds programs that XLA:CPU of jaxlib 0.10 compiles wrongly, after the fact.

A product one of whose operands is one number broadcast to a matrix, fused with what follows it into a call of YNNPACK,
reads memory that nothing has written: `jax.jit(lambda x: (x @ jnp.ones((64, 64))).sum())` is garbage. A product of
bfloat16 that XLA left to YNNPACK when it looked at it first, and to nobody in the end, cannot be launched, as that of
transposed rows, of which those up to a number count, with such rows. A maximum or minimum of two arrays, fused with
what is reduced of it into such a call, takes any number for more than NaN: `jax.jit(lambda x: jnp.maximum(x,
0).sum(1))` of 128 x 32 numbers hides it. These come of what XLA makes of a whole program, and cannot be told before;
without YNNPACK small products and reductions take several times as long. So what was compiled is looked through, and
compiled again where that is needed: without it, or with maxima that are written as what they choose. Of the largest
number of an array, where such calls hide NaN too, the lowerings ask for it beside. Reductions of what bfloat16 is
converted to, times a number, are garbage and have ended processes, as `jax.jit(lambda x: jnp.exp(x * 0.5).sum(1))` of
it: such programs are compiled without YNNPACK's reductions from the first.
"""

from __future__ import annotations

import functools
import re

from .jaxlib_versions import REDUCES_BFLOAT16_WRONGLY

WITHOUT = (("xla_cpu_experimental_ynn_fusion_type", ""),)  # options, as `Client.compile` takes them
_OF_PRODUCTS = ("DOT", "INDIVIDUAL_DOT", "INDIVIDUAL_CONVOLUTION")
_WITHOUT_REDUCTIONS = (
    ("xla_cpu_experimental_ynn_fusion_type", ",".join(f"LIBRARY_FUSION_TYPE_{each}" for each in _OF_PRODUCTS)),
)
# What keys say of programs that were looked through.
CHECK = "--torchtpu_looks_for=products_of_one_number,bfloat16_products,bfloat16_reductions,maxima_of_nan"

_FUSION = re.compile(r"fusion\(.*kind=kCustom.*calls=(%[\w.-]+).*__ynn_fusion")
_COMPUTATION = re.compile(r"^(?:ENTRY )?(%[\w.-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?(%[\w.-]+) = \S+ ([\w-]+)\(([^)]*)\)(.*)$", re.MULTILINE)
_NAME = re.compile(r"%[\w.-]+")
_BFLOAT16 = re.compile(r"^\s*(?:ROOT )?(%[\w.-]+) = bf16\[", re.MULTILINE)
_PRODUCT = re.compile(r" dot\(([^)]*)\)")
_EXTREME = re.compile(r" = b?f\d+\[\S* (?:maximum|minimum)\(")
_CHOICE = re.compile(
    r"^( *)(%\w+) = stablehlo\.(maximum|minimum) (%[\w#]+), (%[\w#]+) : tensor<((?:\d+x)*)(b?f\d+)>$", re.MULTILINE
)


def options_for(text: str) -> tuple[tuple[str, str], ...]:
    """What a StableHLO module is to be compiled with from the first."""
    reduces_bfloat16 = "bf16>" in text and "stablehlo.reduce" in text
    return _WITHOUT_REDUCTIONS if REDUCES_BFLOAT16_WRONGLY and reduces_bfloat16 else ()


def may_be(text: str) -> bool:
    """Whether a StableHLO module has what may be compiled wrongly."""
    has_extremes = "stablehlo.maximum" in text or "stablehlo.minimum" in text
    return "stablehlo.dot" in text or (has_extremes and "stablehlo.reduce" in text)


def hides_nan(compiled: str) -> bool:
    """Whether the text of an optimized HLO module has a fusion in which a maximum or minimum is not NaN."""
    fusions = set(_FUSION.findall(compiled))
    return any(name in fusions and _EXTREME.search(body) for name, body in _COMPUTATION.findall(compiled))


def with_choices(text: str) -> str:
    """A StableHLO module with comparisons for the maxima and minima of arrays."""

    def choice(found: re.Match[str]) -> str:
        indent, made, extreme, one, other, dims, dtype = found.groups()
        arrays, flags, n = f"tensor<{dims}{dtype}>", f"tensor<{dims}i1>", found.start()
        order = "GT" if extreme == "maximum" else "LT"
        lines = (
            f"%beyond_{n} = stablehlo.compare {order}, {one}, {other}, FLOAT : ({arrays}, {arrays}) -> {flags}",
            f"%nan_{n} = stablehlo.compare NE, {one}, {one}, FLOAT : ({arrays}, {arrays}) -> {flags}",
            f"%one_{n} = stablehlo.or %beyond_{n}, %nan_{n} : {flags}",
            f"{made} = stablehlo.select %one_{n}, {one}, {other} : {flags}, {arrays}",
        )
        return "\n".join(indent + line for line in lines)

    return _CHOICE.sub(choice, text)


def is_miscompiled(compiled: str) -> bool:
    """Whether the text of an optimized HLO module has such a fusion, or such a product, or hides NaN."""
    if hides_nan(compiled):
        return True
    fusions = set(_FUSION.findall(compiled))
    bodies = _COMPUTATION.findall(compiled)
    if any(_multiplies_one_number(body) for name, body in bodies if name in fusions):
        return True
    bfloat16 = set(_BFLOAT16.findall(compiled))
    products = (given for name, body in bodies if name not in fusions for given in _PRODUCT.findall(body))
    return bool(bfloat16) and any(bfloat16.intersection(_NAME.findall(given)) for given in products)


def _multiplies_one_number(body: str) -> bool:
    instructions = {name: (opcode, given, rest) for name, opcode, given, rest in _INSTRUCTION.findall(body)}

    @functools.cache
    def is_one_number(name: str) -> bool:
        opcode, given, rest = instructions.get(name, ("", "", ""))
        if opcode == "broadcast":
            return "dimensions={}" in rest
        operands = _NAME.findall(given)
        return bool(operands) and all(map(is_one_number, operands))

    return any(
        any(map(is_one_number, _NAME.findall(given))) for opcode, given, _ in instructions.values() if opcode == "dot"
    )
