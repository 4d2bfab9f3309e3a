"""Traces the lowerings of recorded ops into fragments: StableHLO functions, as text.

The lowerings become inner functions of one JAX module, because each module needs an MLIR context of its own, which
costs more than a lowering. Its text is then taken apart into the functions of each op.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchtpu.runtime.device.client import Client
from torchtpu.runtime.ir.calls import (
    LoweringEntry,
    Parameter,
    bind,
    default_dtype_of,
    full_name,
    parameters,
    precision_of,
    results_of,
    schema_of,
    written,
)
from torchtpu.runtime.ir.program import Lifted, Op, Operand, PaddedExtent, Random, Scalar, Symbolic, Write
from torchtpu.runtime.ir.types import tensor_type

if TYPE_CHECKING:
    from torchtpu.runtime.padding.evaluate import Symbols

_MOST_TRACED = 2048  # ops, of which jax keeps some 4 kB each


class Fragment(NamedTuple):
    """A private function and how to call it.

    `used` are the positions of the array parameters it takes; `forwards[i]` is the parameter that result i simply is;
    `signature` is the call's type; `checks` are the messages of the i1 results that follow the op's own. Where the op
    has padding, it is right where none of the expressions `unequal` of its variables is 0.
    """

    symbol: str
    text: str
    used: tuple[int, ...]
    forwards: tuple[int | None, ...]
    signature: str
    checks: tuple[tuple[str, type[Exception]], ...]
    unequal: tuple[str, ...] = ()

    @property
    def is_call(self) -> bool:
        """Whether anything is computed at all."""
        return bool(self.checks) or None in self.forwards


class Tracer:
    """Traces lowerings for a platform, which need not be the client's; `context` makes the object that they may ask
    (`torchtpu.ops.registry.Context`)."""

    def __init__(self, client: Client, platform: str, context: Callable[..., Any]) -> None:
        self._client = client
        self._platform = platform
        self._context = context
        self._num_traced = 0  # ops, since what jax keeps of them was dropped

    def trace(self, ops: Sequence[tuple[Op, LoweringEntry]], watched: str = "off") -> list[Fragment]:
        """A fragment per op; the error of a lowering names its op and line."""
        return self._lowered(
            [
                (_Trace if op.padding is None else _PaddedTrace)(op, entry, self._context, self._platform, watched)
                for op, entry in ops
            ]
        )

    def resized(
        self, ops: Sequence[tuple[Op, LoweringEntry, Mapping[int, Any]]], watched: str = "off"
    ) -> list[tuple[Fragment, dict[int, int]]]:
        """A fragment per op on arrays of other sizes, and what became of all sizes. They are given for those of the
        arguments; those that only results have, as the lowering makes them."""
        traces = [self._resized(*each, watched) for each in ops]
        return [(made, trace.sizes) for made, trace in zip(self._lowered(traces), traces, strict=True)]

    def decisions(
        self, op: Op, entry: LoweringEntry, sizes: Mapping[int, Any], symbols: Symbols, watched: str = "off"
    ) -> tuple[str, ...]:
        """What tracing an op, with symbols for some sizes, took for other than 0 without knowing; raises what tracing
        raises, and ValueError where the lowering has another form for known sizes."""
        trace = self._resized(op, entry, sizes, watched)
        with self._client.tracing():
            symbols.trace(trace.function("op"), [_struct(p) for p in trace.parameters])
        self._count(1)
        if trace.num_unknown:
            raise ValueError(f"{entry.name} has another form where sizes are known")
        return symbols.unequal()

    def _resized(self, op: Op, entry: LoweringEntry, sizes: Mapping[int, Any], watched: str) -> _ResizedTrace:
        return _ResizedTrace(op, entry, self._context, self._platform, watched, sizes)

    def _lowered(self, traces: Sequence[_Trace]) -> list[Fragment]:
        import jax

        with self._client.tracing():
            inner = [jax.jit(trace.function(f"torchtpu_op_{i}")) for i, trace in enumerate(traces)]

            def every(*groups: list[Any]) -> list[Any]:
                return [function(*group) for function, group in zip(inner, groups, strict=True)]

            groups = [[_struct(p) for p in trace.parameters] for trace in traces]
            traced = jax.jit(every, keep_unused=True).trace(*groups)
            module = traced.lower(lowering_platforms=(self._platform,)).as_text()
        self._count(len(traces))
        functions = {name: (head, body) for name, head, body in _FUNCTION.findall(module)}
        return [trace.fragment(functions, f"torchtpu_op_{i}") for i, trace in enumerate(traces)]

    def _count(self, num_traced: int) -> None:
        """Drops what jax keeps of traces, where that is much."""
        self._num_traced += num_traced
        if self._num_traced >= _MOST_TRACED:
            self._num_traced = 0
            self._client.forget_traces()


def explained(op: Op, error: Exception) -> Exception:
    """The error of a lowering, naming the op and its line."""
    kind = NotImplementedError if isinstance(error, NotImplementedError) else RuntimeError
    text = str(error).strip()
    first_line = f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
    return kind(f"{full_name(op.name)} recorded at {op.line} cannot be lowered: {first_line}")


class _Trace:
    """One op on its way through JAX."""

    def __init__(self, op: Op, entry: LoweringEntry, context: Callable[..., Any], platform: str, watched: str) -> None:
        self._watched = watched
        self._op = op
        self._entry = entry
        self._results = tuple((r.sizes, r.dtype) for r in results_of(op))
        self._context = context(entry.name, platform, self._sizes_of_results(), precision_of(op))
        _, self.parameters = parameters(op)

    @property
    def num_unknown(self) -> int:
        """Where the lowering, once traced, has another form than where sizes are known: in how many places."""
        return int(self._context.num_unknown)

    def _sizes_of_results(self) -> tuple[tuple[tuple[Any, ...], torch.dtype], ...]:
        """What the lowering is to return."""
        return self._results

    def _unequal(self) -> tuple[str, ...]:
        return ()

    def function(self, name: str) -> Callable[..., list[Any]]:
        """The lowering as a function of arrays alone, with its results as recorded and then its checks."""

        def traced(*arrays: Any) -> list[Any]:
            try:
                return self._outputs(arrays)
            except Exception as error:
                raise explained(self._op, error) from error

        traced.__name__ = name
        return traced

    def _outputs(self, arrays: Sequence[Any]) -> list[Any]:
        made = self._call(iter(arrays))
        made = [_as_recorded(m, *aval) for m, aval in zip(made, self._results, strict=True)]
        if self._watched != "off":
            self._watch(arrays, made)
        return made + [ok for ok, _, _ in self._context.checks]

    def _call(self, given: Iterator[Any], size_of: Callable[[Any], Any] | None = None) -> list[Any]:
        schema = schema_of(self._op.name)
        positional, named = bind(schema, [_rebuild(a, given, size_of) for a in self._op.args])
        if self._entry.takes_context:
            named["ctx"] = self._context
        with self._context.assumes(default_dtype_of(self._op)):
            made = self._entry.function(*positional, **named)
        return _align(made, self._op, schema)

    def _watch(self, given: Sequence[Any], made: Sequence[Any]) -> None:
        """Checks that the op makes no NaN (or Inf) of arguments that have none."""
        import jax.numpy as jnp

        def has_bad(arrays: Sequence[Any]) -> Any:
            floats = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]
            bad = [jnp.isnan(x) if self._watched == "nan" else ~jnp.isfinite(x) for x in floats]
            return jnp.stack([jnp.any(b) for b in bad] or [jnp.zeros((), bool)]).any()

        if not any(dtype.is_floating_point or dtype.is_complex for _, dtype in self._results):
            return
        what = "a NaN" if self._watched == "nan" else "a NaN or an infinity"
        self._context.checks.append((~has_bad(made) | has_bad(given), f"{what} appeared", FloatingPointError))

    def fragment(self, functions: dict[str, tuple[str, str]], root: str) -> Fragment:
        """The op's part of the module: its function and those it calls, under names that depend on their text alone."""
        checks = tuple((str(message), error) for _, message, error in self._context.checks)
        ins = [_parameter_type(p) for p in self.parameters]
        if len(_PARAMETER.findall(functions[root][0])) != len(ins):
            raise RuntimeError(f"{full_name(self._op.name)} takes values that are none of its arguments")
        outs = [tensor_type(*aval) for aval in self._results] + ["tensor<i1>"] * len(checks)
        body = functions[root][1]
        used = tuple(sorted({int(n) for n in _PARAMETER.findall(body) if int(n) < len(ins)}))
        returned = _RETURN.findall(body)[-1].split(", ") if outs else []
        forwarded = [_PARAMETER.fullmatch(r) for r in returned[: len(self._results)]]
        forwards = tuple(int(m[1]) if m else None for m in forwarded)
        head = f"({', '.join(f'%arg{n}: {ins[n]}' for n in used)}) -> ({', '.join(outs)}) {{"
        text = _canonical({**functions, root: (head, body)}, root)
        symbol = symbol_of(self._entry.name, text)
        signature = f"({', '.join(ins[n] for n in used)}) -> ({', '.join(outs)})"
        return Fragment(symbol, text.replace("@0", f"@{symbol}"), used, forwards, signature, checks, self._unequal())


def symbol_of(op: str, text: str) -> str:
    """The name of an op's function, whose text has the name @0."""
    return f"{_NO_NAME.sub('_', op)}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


class _ResizedTrace(_Trace):
    """An op on arrays of other sizes than it was recorded with."""

    def __init__(self, *args: Any) -> None:
        *most, given = args
        self.sizes = dict(given)
        super().__init__(*most)
        self.parameters = [
            dataclasses.replace(p, sizes=self._of(p.sizes)) if isinstance(p, Operand) else p for p in self.parameters
        ]

    def _of(self, sizes: tuple[int, ...]) -> tuple[Any, ...]:
        return tuple(self.sizes.get(size, size) for size in sizes)

    def _sizes_of_results(self) -> tuple[tuple[tuple[Any, ...], torch.dtype], ...]:
        taken = {size for p in parameters(self._op)[1] if isinstance(p, Operand) for size in p.sizes}
        taken |= set(_ints(self._op.args))
        made = {size for r in results_of(self._op) for size in r.sizes}
        self.sizes |= {size: _UNKNOWN for size in made - taken if size > 1}
        return tuple((self._of(r.sizes), r.dtype) for r in results_of(self._op))

    def _call(self, given: Iterator[Any], size_of: Callable[[Any], Any] | None = None) -> list[Any]:
        made = super()._call(given, lambda size: self.sizes.get(size, size))
        for array, result in zip(made, results_of(self._op), strict=True):
            for found, size in zip(array.shape, result.sizes, strict=True):
                if self.sizes.get(size) is _UNKNOWN:
                    self.sizes[size] = found
        self._results = tuple((self._of(r.sizes), r.dtype) for r in results_of(self._op))
        return made


def _ints(value: Any) -> Iterator[int]:
    """The ints in an argument."""
    if type(value) is int:
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _ints(item)


class _Unknown:
    """A size that follows from others; a lowering that asks for it cannot be traced without."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("a size that is not known yet")

    __hash__ = None  # type: ignore[assignment]


_UNKNOWN = _Unknown()


class _PaddedTrace(_Trace):
    """An op on arrays that are longer than what counts of them: its lowering is traced with symbolic sizes."""

    def _sizes_of_results(self) -> tuple[tuple[tuple[Any, ...], torch.dtype], ...]:
        from torchtpu.runtime.padding.evaluate import Symbols

        assert self._op.padding is not None
        self._padding = self._op.padding
        self._symbols = Symbols(self._padding.bounds)
        made = zip(results_of(self._op), self._padding.made, strict=True)
        return tuple((r.sizes if part is None else self._symbols.sizes(part.sizes), r.dtype) for r, part in made)

    def _unequal(self) -> tuple[str, ...]:
        return self._symbols.unequal()

    def _outputs(self, arrays: Sequence[Any]) -> list[Any]:
        reads = iter(self._padding.reads)
        parts = [next(reads) if isinstance(p, Operand) else None for p in self.parameters]
        count = len(self._padding.counts)
        made = self._symbols.evaluate(
            functools.partial(self._symbolic, parts), parts[: len(parts) - count], arrays, [r[0] for r in self._results]
        )
        assert len(made) == len(self._results) + len(self._context.checks)
        return made

    def _symbolic(self, parts: Sequence[PaddedExtent | None], *arrays: Any) -> list[Any]:
        """The op's results on arrays with symbolic sizes, each as the array that holds it, and its checks."""
        symbols = self._symbols
        views = [a if part is None else symbols.read(a, part) for a, part in zip(arrays, parts, strict=False)]
        made = self._call(iter(views), symbols.size)
        held = []
        for array, target, (sizes, dtype), part in zip(
            made, results_of(self._op), self._context.results, self._padding.made, strict=True
        ):
            new = _cast(symbols.checked(array, sizes), dtype)
            if part is None:
                held.append(new)
                continue
            old = None
            if isinstance(target, Write):
                operand = written(self._op, target)
                if operand.value is not None:
                    old = next(a for a, p in zip(arrays, self.parameters, strict=False) if p is operand)
            held.append(symbols.write(old, new, part))
        return held + [ok for ok, _, _ in self._context.checks]


def _canonical(functions: dict[str, tuple[str, str]], root: str) -> str:
    """The functions that `root` reaches, in the order of their first call, named @0, @0_1, @0_2, ..."""
    names = {root: "0"}
    texts = []

    def rename(found: re.Match[str]) -> str:
        name = found[1]
        if name in functions and name not in names:
            names[name] = f"0_{len(names)}"
            waiting.append(name)
        return f"@{names.get(name, name)}"

    waiting = [root]
    for name in waiting:
        head, body = functions[name]
        texts.append(f"  func.func private @{names[name]}{head}\n{_SYMBOL.sub(rename, body)}  }}")
    return without_copies("\n".join(texts))


def without_copies(text: str) -> str:
    """Functions @0, @0_1, ... with one for those that are alike: jax sees that of some, and of others where their sizes
    are equal."""
    while True:
        parts = _INNER.split(text)  # what is before the first, then name and rest of each
        named = list(zip(parts[1::2], parts[2::2], strict=True))
        first: dict[str, str] = {}
        copies = {name: other for name, rest in named[1:] if (other := first.setdefault(rest.strip(), name)) != name}
        if not copies:
            return text
        kept = [(name, rest) for name, rest in named if name not in copies]
        new = {name: f"@0_{k}" if k else "@0" for k, (name, _) in enumerate(kept)}
        new |= {name: new[other] for name, other in copies.items()}
        text = "".join(f"  func.func private {name}{rest}" for name, rest in kept).rstrip("\n")
        text = _NAME.sub(lambda found, new=new: new[found[0]], text)  # type: ignore[misc]


_INNER = re.compile(r"^  func\.func private (@0(?:_\d+)?)(?=\()", re.MULTILINE)
_NAME = re.compile(r"@0(?:_\d+)?\b")
_FUNCTION = re.compile(r"^  func\.func (?:public|private) @([\w.$-]+)(\(.*?)\n(.*?)^  \}$", re.MULTILINE | re.DOTALL)
_PARAMETER = re.compile(r"%arg(\d+)\b")
_RETURN = re.compile(r"^    return(?: (.*?) :.*)?$", re.MULTILINE)
_SYMBOL = re.compile(r"(?<!custom_call )@([\w.$-]+)")
_NO_NAME = re.compile(r"[^0-9A-Za-z_]")


def _rebuild(value: Any, given: Iterator[Any], size_of: Callable[[Any], Any] | None = None) -> Any:
    """An argument as the lowering gets it, with the traced arrays in its place; `size_of` may change its ints."""
    import jax.numpy as jnp

    kind = type(value)
    if kind is Operand or kind is Lifted:
        return next(given)
    if kind is tuple or kind is list:
        return [_rebuild(item, given, size_of) for item in value]
    if kind is Random:
        return next(given).astype(jnp.uint64), next(given)
    if kind is Scalar:
        return _number(value, next(given) if type(value.value) is Lifted else None)
    if kind is Symbolic:
        assert size_of is not None
        return size_of(value.text)
    if kind is int and value >> 63 > 0:  # jax takes no such Python number
        return jnp.asarray(value, dtype="uint64")
    if kind is int and size_of is not None:
        return size_of(value)
    return value


def _number(scalar: Scalar, lifted: Any) -> Any:
    """A 0-dim tensor, or for a Python number the number (weakly typed where it is a run-time input)."""
    import jax.numpy as jnp

    if lifted is not None:
        return lifted if scalar.wrapped and scalar.dtype != torch.bool else lifted.astype(_name(scalar.dtype))
    return scalar.value if scalar.wrapped else jnp.asarray(scalar.value, dtype=_name(scalar.dtype))


def _align(made: Any, op: Op, schema: torch.FunctionSchema) -> list[Any]:
    """The arrays a lowering returned that the recorder wants, in order: undefined results are left out."""
    flat = _flatten(made)
    wanted: list[bool] = []
    for declared, result in zip(schema.returns, op.results, strict=True):
        if declared.alias_info is None:
            wanted += [r is not None for r in result] if isinstance(result, tuple) else [result is not None]
    wanted += [True] * len(op.writes)
    if len(flat) == len(wanted):
        flat = [m for m, is_wanted in zip(flat, wanted, strict=True) if is_wanted]
    flat = [m for m in flat if m is not None]
    if len(flat) != sum(wanted):
        raise TypeError(f"the lowering returned {len(flat)} arrays instead of {sum(wanted)}")
    return flat


def _flatten(made: Any) -> list[Any]:
    return [x for item in made for x in _flatten(item)] if isinstance(made, (list, tuple)) else [made]


def _as_recorded(made: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    import jax.numpy as jnp

    array = jnp.asarray(made)
    if array.shape != shape:
        raise TypeError(f"the lowering returned shape {array.shape} instead of {shape}")
    return _cast(array, dtype)


# What PyTorch's CPU and CUDA kernels cast floats to on the way to integers that are narrower.
_BY_WAY_OF = {
    torch.uint8: "int32", torch.int8: "int32", torch.int16: "int32", torch.uint16: "int32", torch.uint32: "int64",
}  # fmt: skip


def _cast(array: Any, dtype: torch.dtype) -> Any:
    import jax.numpy as jnp

    if jnp.issubdtype(array.dtype, jnp.complexfloating) and not dtype.is_complex:
        array = array != 0 if dtype == torch.bool else array.real
    if dtype == torch.float8_e4m3fn and jnp.issubdtype(array.dtype, jnp.floating):
        # PyTorch's largest number stands for all that are larger, XLA's NaN does.
        array = jnp.clip(array, -448, 448)
    if dtype in _BY_WAY_OF and jnp.issubdtype(array.dtype, jnp.floating):
        array = array.astype(_BY_WAY_OF[dtype])  # uint8: 300.0 becomes 44 and -1.0 255; XLA would make them 255 and 0
    if array.dtype == bool and (dtype.is_floating_point or dtype.is_complex):
        # XLA takes a product with a converted bool for a choice, in which False times infinity is 0 instead of NaN.
        return jnp.where(array, jnp.ones((), _name(dtype)), jnp.zeros((), _name(dtype)))
    return array.astype(_name(dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _struct(argument: Parameter) -> Any:
    import jax

    if isinstance(argument, Operand):
        return jax.ShapeDtypeStruct(argument.sizes, jax.numpy.dtype(_name(argument.dtype)))
    return jax.ShapeDtypeStruct((), "float64" if argument.kind == "f" else "int64", weak_type=True)


def _parameter_type(argument: Parameter) -> str:
    if isinstance(argument, Operand):
        return tensor_type(argument.sizes, argument.dtype)
    return "tensor<f64>" if argument.kind == "f" else "tensor<i64>"
