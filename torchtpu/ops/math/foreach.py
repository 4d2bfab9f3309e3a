"""Ops over lists: the single op on each element."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch._prims_common import dtype_to_type

from torchtpu.ops.math.pointwise import EXPONENTS
from torchtpu.ops.registry import LOWERINGS, jnp, lowering, opmath

# Single op -> the list ops that apply it to each element. Lists go in step, everything else is shared.
EACH = {
    "abs": ("_foreach_abs",),
    "acos": ("_foreach_acos",),
    "add.Tensor": ("_foreach_add.List", "_foreach_add.Scalar", "_foreach_add.ScalarList", "_foreach_add.Tensor"),
    "addcdiv": ("_foreach_addcdiv.Scalar", "_foreach_addcdiv.ScalarList"),
    "addcmul": ("_foreach_addcmul.Scalar", "_foreach_addcmul.ScalarList"),
    "asin": ("_foreach_asin",),
    "atan": ("_foreach_atan",),
    "ceil": ("_foreach_ceil",),
    "clamp_max": ("_foreach_clamp_max.List", "_foreach_clamp_max.Scalar", "_foreach_clamp_max.ScalarList"),
    "clamp_min": ("_foreach_clamp_min.List", "_foreach_clamp_min.Scalar", "_foreach_clamp_min.ScalarList"),
    "cos": ("_foreach_cos",),
    "cosh": ("_foreach_cosh",),
    "div.Tensor": ("_foreach_div.List", "_foreach_div.Scalar", "_foreach_div.ScalarList", "_foreach_div.Tensor"),
    "erf": ("_foreach_erf",),
    "erfc": ("_foreach_erfc",),
    "exp": ("_foreach_exp",),
    "expm1": ("_foreach_expm1",),
    "floor": ("_foreach_floor",),
    "frac": ("_foreach_frac",),
    "lerp.Scalar": ("_foreach_lerp.List", "_foreach_lerp.Scalar", "_foreach_lerp.ScalarList"),
    "lgamma": ("_foreach_lgamma",),
    "log": ("_foreach_log",),
    "log10": ("_foreach_log10",),
    "log1p": ("_foreach_log1p",),
    "log2": ("_foreach_log2",),
    "max": ("_foreach_max",),
    "maximum": ("_foreach_maximum.List", "_foreach_maximum.Scalar", "_foreach_maximum.ScalarList"),
    "minimum": ("_foreach_minimum.List", "_foreach_minimum.Scalar", "_foreach_minimum.ScalarList"),
    "mul.Tensor": ("_foreach_mul.List", "_foreach_mul.Scalar", "_foreach_mul.ScalarList", "_foreach_mul.Tensor"),
    "neg": ("_foreach_neg",),
    "pow.Tensor_Scalar": ("_foreach_pow.Scalar", "_foreach_pow.ScalarList"),
    "pow.Tensor_Tensor": ("_foreach_pow.List", "_foreach_pow.ScalarAndTensor"),
    "reciprocal": ("_foreach_reciprocal",),
    "round": ("_foreach_round",),
    "rsqrt": ("_foreach_rsqrt",),
    "sigmoid": ("_foreach_sigmoid",),
    "sign": ("_foreach_sign",),
    "sin": ("_foreach_sin",),
    "sinh": ("_foreach_sinh",),
    "sqrt": ("_foreach_sqrt",),
    "sub.Tensor": ("_foreach_sub.List", "_foreach_sub.Scalar", "_foreach_sub.ScalarList"),
    "tan": ("_foreach_tan",),
    "tanh": ("_foreach_tanh",),
    "trunc": ("_foreach_trunc",),
    "zero": ("_foreach_zero",),
}
# PyTorch's meta kernels let these values pass, which the CPU refuses: op -> the types of refused elements.
REFUSED: dict[str, tuple[type, ...]] = {
    "addcdiv": (int, bool),
    "ceil": (bool, complex),
    "clamp_max": (complex,),
    "clamp_min": (complex,),
    "erf": (complex,),
    "erfc": (complex,),
    "floor": (bool, complex),
    "frac": (int, bool, complex),
    "lerp.Scalar": (int, bool),
    "lgamma": (complex,),
    "max": (complex,),
    "maximum": (complex,),
    "minimum": (complex,),
    "round": (bool, complex),
    "sign": (complex,),
    "sub.Tensor": (bool,),
    "trunc": (bool, complex),
}
STRUCTURAL = {"_foreach_pow.Scalar": {"exponent": EXPONENTS}, "_foreach_pow.ScalarList": {"exponent": EXPONENTS}}


def each(entry, ctx, *args, **kwargs):
    """`entry`'s single op applied to each element of the lists among `args`."""
    made = []
    for i, result in enumerate(ctx.results):
        mine = [a[i] if isinstance(a, (list, tuple)) else a for a in args]
        context = {"ctx": dataclasses.replace(ctx, op=entry.name, results=(result,))} if entry.takes_context else {}
        made.append(entry.function(*mine, **kwargs, **context))
    return made


def _refusing(name: str, refused: tuple[type, ...]) -> Any:
    """Shape inference of a list op that raises where an element of its lists, or what goes with them, is `refused`."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    given = [a.name for a in op._schema.arguments]
    is_binary = len(given) > 1 and given[1] != "ord"

    def infer(self: list[torch.Tensor], *rest: Any) -> Any:
        other = rest[0] if is_binary else []
        elements = [*self, *(other if isinstance(other, (list, tuple)) else [other])]
        types = {dtype_to_type(e.dtype) if isinstance(e, torch.Tensor) else type(e) for e in elements}
        if not types.isdisjoint(refused):
            raise RuntimeError(f"{name} takes no such elements")
        return op(self, *rest[:1], **dict(zip(given[2:], rest[1:], strict=True)))

    return infer


def _register(single, name):
    # reduce.py and special.py may lower the single op: it is looked up when the op is traced.
    infer = _refusing(name, REFUSED[single]) if single in REFUSED else None
    facts = {"lifts": True, "maps": True, "elementwise": single != "max"}

    @lowering(name, structural=STRUCTURAL.get(name, {}), infer=infer, **facts)
    def lowered(*args, ctx, **kwargs):
        return each(LOWERINGS[single], ctx, *args, **kwargs)

    return functools.update_wrapper(lowered, each, assigned=("__module__",), updated=())


for _single, _names in EACH.items():
    for _name in _names:
        _register(_single, _name)


@lowering("_foreach_clone", maps=True, elementwise=True)
def foreach_clone(self, *, memory_format=None):
    return list(self)


@lowering(
    "_foreach_norm.Scalar", structural={"ord": None}, infer=_refusing("_foreach_norm.Scalar", (int, bool)), maps=True
)
def foreach_norm(self, ord=2, dtype=None, *, ctx):
    norm = LOWERINGS["linalg_vector_norm"]
    made = []
    for x, result in zip(self, ctx.results, strict=True):
        context = {"ctx": dataclasses.replace(ctx, op=norm.name, results=(result,))} if norm.takes_context else {}
        made.append(norm.function(x, ord, None, False, dtype=dtype, **context))
    return made


@lowering("_foreach_powsum.Scalar", structural={"ord": None}, maps=True)
def foreach_powsum(self, ord=2, dtype=None):
    return [jnp.sum(jnp.abs(opmath(x)) ** ord) for x in self]
