"""Finds programs that XLA:CPU of jaxlib 0.10 compiles wrongly, after the fact.

A product one of whose operands is one number broadcast to a matrix, fused with what follows it into a call of YNNPACK,
reads memory that nothing has written: `jax.jit(lambda x: (x @ jnp.ones((64, 64))).sum())` is garbage. A product of
bfloat16 that XLA left to YNNPACK when it looked at it first, and to nobody in the end, cannot be launched, as that of
transposed rows, of which those up to a number count, with such rows. These come of what XLA makes of a whole program,
and cannot be told before; without YNNPACK small products and reductions take several times as long. So what was
compiled is looked through, and compiled again without it where that is needed.
"""

from __future__ import annotations

import functools
import re

WITHOUT = (("xla_cpu_experimental_ynn_fusion_type", ""),)  # options, as `Client.compile` takes them
# What keys say of programs that were looked through.
CHECK = "--torchtpu_looks_for=products_of_one_number,bfloat16_products"

_FUSION = re.compile(r"fusion\(.*kind=kCustom.*calls=(%[\w.-]+).*__ynn_fusion")
_COMPUTATION = re.compile(r"^(?:ENTRY )?(%[\w.-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?(%[\w.-]+) = \S+ ([\w-]+)\(([^)]*)\)(.*)$", re.MULTILINE)
_NAME = re.compile(r"%[\w.-]+")
_BFLOAT16 = re.compile(r"^\s*(?:ROOT )?(%[\w.-]+) = bf16\[", re.MULTILINE)
_PRODUCT = re.compile(r" dot\(([^)]*)\)")


def may_be(text: str) -> bool:
    """Whether a StableHLO module has what may be compiled wrongly."""
    return "stablehlo.dot" in text


def is_miscompiled(compiled: str) -> bool:
    """Whether the text of an optimized HLO module has such a fusion, or such a product."""
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
