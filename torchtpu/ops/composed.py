"""Registers ops that are composed of other ops as kernels in PyTorch's dispatcher."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torchtpu.ops.registry import COMPOSED, LOWERINGS

# Where an op has a lowering too, the recorder hands over the calls that it cannot record, under this namespace.
_UNRECORDED = "torchtpu_composed"

# Ops that PyTorch takes apart, but whose out= form it does not, and ops that write an argument: their out= form is no
# variant of the recorder's.
_WITH_OUT = (
    "mvlgamma",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "linalg_eigvals",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
    "rrelu_with_noise",
)

# PyTorch's kernels of these warn of nothing where they resize an out= argument that has elements.
_RESIZED_SILENTLY = ("adaptive_avg_pool2d", "adaptive_avg_pool3d")

_libraries: list[Any] = []  # registrations last as long as these; written at import


def install() -> None:
    """Registers the kernels with PyTorch's dispatcher. Called once, at import."""
    library: Any = torch.library.Library
    aten, unrecorded = library("aten", "IMPL"), library(_UNRECORDED, "FRAGMENT")
    _libraries.extend((aten, unrecorded))
    for name, function in COMPOSED.items():
        for variant, kernel in _variants(name, function):
            if name in LOWERINGS:
                schema = str(_overload(variant)._schema)
                unrecorded.define(schema.removeprefix("aten::"))
                unrecorded.impl(variant, kernel, "PrivateUse1")
            else:
                aten.impl(variant, kernel, "PrivateUse1")
    for name in _WITH_OUT:
        out = _overload(f"{name}.out")
        aten.impl(f"{name}.out", _plain(functools.partial(_into, out, _overload(name))), "PrivateUse1")


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _variants(name: str, function: Callable[..., Any]) -> list[tuple[str, Callable[..., Any]]]:
    """The op and, unless PyTorch makes that out of the op, its out= form."""
    if any(a.is_out for a in _overload(name)._schema.arguments):
        return [(name, _plain(functools.partial(_into, _overload(name), function)))]
    found = [(name, _plain(function))]
    base = name.partition(".")[0]
    given = [(a.name, str(a.type)) for a in _overload(name)._schema.arguments]
    for overload in getattr(torch.ops.aten, base).overloads():
        out = _overload(f"{base}.{overload}")
        arguments = [(a.name, str(a.type)) for a in out._schema.arguments if not a.is_out]
        is_out = len(arguments) < len(out._schema.arguments) and arguments == given
        if is_out and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{base}.{overload}", "CPU"):
            found.append((f"{base}.{overload}", _plain(functools.partial(_into, out, function))))
    return found


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` outside of the user's torch function modes."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return kernel


def _into(op: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `function` and stores its results in the out= arguments, resized where they do not fit."""
    outs = {a.name: kwargs.pop(a.name) for a in op._schema.arguments if a.is_out}
    made = function(*args, **kwargs)
    results = made if isinstance(made, tuple) else (made,)
    for result, out in zip(results, outs.values(), strict=True):
        if result.device != out.device:  # the CPU cannot say this
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{result.device} and {out.device}!"
            )
    if any(m.dtype != out.dtype for m, out in zip(results, outs.values(), strict=True)):
        raise_as_cpu(op, *args, **kwargs, **outs)
    for result, out in zip(results, outs.values(), strict=True):
        if result.shape != out.shape:
            if op.overloadpacket.__name__ in _RESIZED_SILENTLY:
                out.resize_(result.shape)
            else:
                torch.ops.aten.clone.out(result, out=out)  # which warns
            out.as_strided_(result.shape, result.stride())
        out.copy_(result)
    return tuple(outs.values()) if isinstance(made, tuple) else out


def raise_as_cpu(op: Any, *args: Any, **kwargs: Any) -> None:
    """Raises what the CPU says to a call with arguments like these, if it refuses it."""

    def on_host(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [on_host(v) for v in value]
        return value.new_zeros(value.shape, device="cpu") if isinstance(value, torch.Tensor) else value

    op(*map(on_host, args), **{k: on_host(v) for k, v in kwargs.items()})
