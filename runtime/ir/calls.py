"""Calls of ops: a recorded op's lowering arguments, array parameters and results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from torchtpu.runtime.ir.types import tensor_type

from .program import Lifted, Op, Operand, Random, Result, Scalar, Write

Parameter = Operand | Lifted


class LoweringEntry(Protocol):
    """What the engine needs of an op's lowering (`torchtpu.ops.registry.Lowering`)."""

    @property
    def name(self) -> str: ...
    @property
    def function(self) -> Callable[..., Any]: ...
    @property
    def infer(self) -> Callable[..., Any] | None: ...
    @property
    def takes_context(self) -> bool: ...
    @property
    def persists(self) -> bool: ...
    @property
    def maps(self) -> bool: ...
    @property
    def repeats(self) -> bool: ...
    @property
    def elementwise(self) -> bool: ...
    @property
    def ints(self) -> tuple[str, ...]: ...
    @property
    def write(self) -> Callable[..., list[str] | None] | None: ...


class Lowerings(NamedTuple):
    """The lowerings, handed in from above.

    `find` gives the functional op name that serves a recorded one; `context` makes the object that lowerings ask
    (`torchtpu.ops.registry.Context`); `templates` is the folder of what was traced of them beforehand.
    """

    general: Mapping[str, LoweringEntry]
    by_platform: Mapping[tuple[str, str], LoweringEntry]
    find: Callable[[str], str]
    context: Callable[..., Any]
    templates: Path | None = None

    def entry(self, op_name: str, platform: str) -> LoweringEntry:
        """The lowering that serves a recorded op; raises NotImplementedError where there is none."""
        name = self.find(op_name)
        found = self.by_platform.get((name, platform)) or self.general.get(name)
        if found is None:
            raise NotImplementedError(f"{full_name(op_name)}: no lowering of {name}")
        return found


def parameters(op: Op) -> tuple[str, list[Parameter]]:
    """What of the arguments decides the fragment, as text, and the arrays that it is called with."""
    key: list[str] = []
    found: list[Parameter] = []
    for argument in op.args:
        _describe(argument, key, found)
    if op.padding is not None:
        key.append(f" padding {op.padding.bounds} {op.padding.reads} {op.padding.made}")
        found += op.padding.counts
    return ",".join(key), found


def _describe(value: Any, key: list[str], found: list[Parameter]) -> None:
    kind = type(value)
    if kind is Operand:
        key.append(tensor_type(value.sizes, value.dtype))
        found.append(value)
    elif kind is tuple or kind is list:
        key.append("[")
        for item in value:
            _describe(item, key, found)
        key.append("]")
    elif kind is Lifted:
        key.append(value.kind)
        found.append(value)
    elif kind is Scalar:
        if type(value.value) is Lifted:
            key.append(f"{value.value.kind}:{value.dtype}:{value.wrapped}")
            found.append(value.value)
        else:
            key.append(f"{value.value!r}:{value.dtype}:{value.wrapped}")
    elif kind is Random:
        key.append("random")
        found += (value.seed, value.offset)
    elif kind is torch.device:
        key.append(value.type)  # never the index: devices share their programs
    else:
        key.append(f"{kind.__name__}:{value!r}")


def precision_of(op: Op) -> str | None:
    """The precision of its products, if it multiplies."""
    return next((word for word in (op.settings or "").split() if "." not in word), None)


def default_dtype_of(op: Op) -> torch.dtype:
    """The default dtype at its call."""
    names = [word.removeprefix("torch.") for word in (op.settings or "").split() if "." in word]
    found = getattr(torch, names[0]) if names else torch.float32
    assert isinstance(found, torch.dtype)
    return found


def describe_results(op: Op) -> str:
    """What of the results decides the fragment, as text."""
    key = [tensor_type(w.sizes, w.dtype) for w in op.writes]
    for result in op.results:
        _describe_result(result, key)
    return ",".join(key)


def _describe_result(result: Any, key: list[str]) -> None:
    if result is None:
        key.append("-")
    elif type(result) is tuple:
        key.append("[")
        for item in result:
            _describe_result(item, key)
        key.append("]")
    else:
        key.append(tensor_type(result.sizes, result.dtype))


def full_name(op_name: str) -> str:
    """`aten::add_.Tensor`; an op outside ATen has its namespace in its name."""
    return op_name if "::" in op_name else f"aten::{op_name}"


def results_of(op: Op) -> list[Result | Write]:
    """Every array the op makes, in the order a lowering returns them: new tensors or out= arguments, then others."""
    made: list[Result | Write] = []
    for result in op.results:
        if type(result) is Result:
            made.append(result)
        elif type(result) is tuple:
            made += [r for r in result if r is not None]
    writes = list(op.writes)
    if len(writes) > 1:
        arguments = schema_of(op.name).arguments
        writes.sort(key=lambda write: not arguments[write.arg].is_out)
    return made + writes


def written(op: Op, write: Write) -> Operand:
    """The argument that a write goes into."""
    argument = op.args[write.arg]
    if write.element is not None:
        argument = argument[write.element]
    assert isinstance(argument, Operand)
    return argument


def bind(schema: torch.FunctionSchema, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments for a lowering: as the schema has them, without out= arguments."""
    positional, named = [], {}
    for argument, value in zip(schema.arguments, values, strict=False):
        if not argument.kwarg_only:
            positional.append(value)
        elif argument.alias_info is None or not argument.alias_info.is_write:
            named[argument.name] = value
    if len(values) > len(schema.arguments):
        named["generator"] = values[-1]
    return positional, named


@functools.cache
def operator_of(op_name: str) -> torch._ops.OpOverload[..., Any]:
    """PyTorch's `add_.Tensor` and the like, and `mylib::scale`."""
    packet, _, overload = op_name.partition(".")
    namespace, _, packet = packet.rpartition("::")
    packets = getattr(torch.ops, namespace or "aten")
    found = getattr(getattr(packets, packet), overload or "default")
    assert isinstance(found, torch._ops.OpOverload)
    return found


@functools.cache
def schema_of(op_name: str) -> torch.FunctionSchema:
    """The schema of `add_.Tensor` and the like, and of `mylib::scale`."""
    return operator_of(op_name)._schema
