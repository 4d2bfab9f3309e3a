"""Finds programs that XLA:CPU of jaxlib 0.10 compiles wrongly, after the fact.

A product one of whose operands is one number broadcast to a matrix, fused with what follows it into a call of YNNPACK,
reads memory that nothing has written: `jax.jit(lambda x: (x @ jnp.ones((64, 64))).sum())` is garbage. Such fusions come
of what XLA makes of a whole program, and cannot be told before; without YNNPACK small products and reductions take
several times as long. So what was compiled is looked through, and compiled again without it where that is needed.
"""

from __future__ import annotations

import functools
import re

WITHOUT = (("xla_cpu_experimental_ynn_fusion_type", ""),)  # options, as `Client.compile` takes them
CHECK = "--torchtpu_looks_for=products_of_one_number"  # what keys say of programs that were looked through

_FUSION = re.compile(r"fusion\(.*kind=kCustom.*calls=(%[\w.-]+).*__ynn_fusion")
_COMPUTATION = re.compile(r"^(%[\w.-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?(%[\w.-]+) = \S+ ([\w-]+)\(([^)]*)\)(.*)$", re.MULTILINE)
_NAME = re.compile(r"%[\w.-]+")


def may_be(text: str) -> bool:
    """Whether a StableHLO module has what may be compiled wrongly."""
    return "stablehlo.dot" in text


def is_miscompiled(compiled: str) -> bool:
    """Whether the text of an optimized HLO module has such a fusion."""
    fusions = set(_FUSION.findall(compiled))
    bodies = (body for name, body in _COMPUTATION.findall(compiled) if name in fusions) if fusions else ()
    return any(map(_multiplies_one_number, bodies))


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
