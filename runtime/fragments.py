"""Fragments: in comes a recorded op, out goes the StableHLO function that computes it, traced once from its lowering.

A fragment is found by what decides its text: the lowering's name, the types of its array arguments, the values of the
others, the recorded results, the platform and the matmul precision. It is kept in memory and in the store.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from torchtpu.compiler_cache import Key, Store

from .counters import Counters
from .hlo import tensor_type
from .region import Lifted, Op, Operand, Random, Result, Scalar, Write

if TYPE_CHECKING:
    from .pjrt import Client

Aval = tuple[tuple[int, ...], torch.dtype]


class Entry(Protocol):
    """What the engine needs of an op's lowering (`torchtpu.ops.registry.Lowering`)."""

    @property
    def name(self) -> str: ...
    @property
    def function(self) -> Callable[..., Any]: ...
    @property
    def infer(self) -> Callable[..., Any] | None: ...
    @property
    def takes_context(self) -> bool: ...


class Lowerings(NamedTuple):
    """The lowerings, handed in from above.

    `find` gives the functional op name that serves a recorded one; `context` makes the object that lowerings ask
    (`torchtpu.ops.registry.Context`).
    """

    general: Mapping[str, Entry]
    by_platform: Mapping[tuple[str, str], Entry]
    find: Callable[[str], str]
    context: Callable[..., Any]

    def entry(self, op_name: str, platform: str) -> Entry:
        """The lowering that serves a recorded op; raises NotImplementedError where there is none."""
        name = self.find(op_name)
        found = self.by_platform.get((name, platform)) or self.general.get(name)
        if found is None:
            raise NotImplementedError(f"aten::{op_name}: no lowering of {name}")
        return found


class Fragment(NamedTuple):
    """A private function and how to call it.

    `used` are the positions of the array parameters it takes; `forwards[i]` is the parameter that result i simply is;
    `signature` is the call's type; `checks` are the messages of the i1 results that follow the op's own.
    """

    symbol: str
    text: str
    used: tuple[int, ...]
    forwards: tuple[int | None, ...]
    signature: str
    checks: tuple[tuple[str, type[Exception]], ...]

    @property
    def is_call(self) -> bool:
        """Whether anything is computed at all."""
        return bool(self.checks) or None in self.forwards


Parameter = Operand | Lifted


def parameters(op: Op) -> tuple[str, list[Parameter]]:
    """What of the arguments decides the fragment, as text, and the arrays that it is called with."""
    key: list[str] = []
    found: list[Parameter] = []
    for argument in op.args:
        _describe(argument, key, found)
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


def results_of(op: Op) -> list[Result | Write]:
    """Every array the op makes, in the order a lowering returns them: new tensors, then written arguments."""
    made: list[Result | Write] = []
    for result in op.results:
        if type(result) is Result:
            made.append(result)
        elif type(result) is tuple:
            made += [r for r in result if r is not None]
    made += op.writes
    return made


class Fragments:
    """Finds, loads or traces fragments; one per engine."""

    def __init__(self, lowerings: Lowerings, client: Client, store: Store, counters: Counters) -> None:
        self._lowerings = lowerings
        self._client = client
        self._store = store
        self._counters = counters
        self._platform = client.lowering_platform
        self._lock = threading.Lock()  # held while tracing
        self._known: dict[str, Fragment] = {}

    def get(self, op: Op, arguments_key: str, precision: str) -> Fragment:
        """The op's fragment; an error while tracing names the op and its line."""
        results = [tensor_type(w.sizes, w.dtype) for w in op.writes]
        for result in op.results:
            _describe_result(result, results)
        key = f"{op.name}({arguments_key})->({','.join(results)}) {precision}"
        fragment = self._known.get(key)
        if fragment is None:
            with self._lock:
                fragment = self._known.get(key)
                if fragment is None:
                    fragment = self._known[key] = self._load_or_trace(op, key, precision)
        return fragment

    def _load_or_trace(self, op: Op, key: str, precision: str) -> Fragment:
        try:
            entry = self._lowerings.entry(op.name, self._platform)
            if not self._store.keeps:
                return self._trace(op, entry, precision)
            parts = {
                "op": key,
                "platform": self._platform,
                "fingerprint": fingerprint(entry.function, self._lowerings.context),
            }
            disk_key = Key.of("fragment", parts)
            stored = self._store.get(disk_key)
            if stored is not None:
                self._counters.fragment_hits_disk += 1
                return _decode(stored)
            started = time.perf_counter()
            fragment = self._trace(op, entry, precision)
            build_ms = round((time.perf_counter() - started) * 1e3, 3)
            self._store.put(disk_key, _encode(fragment), {"op": op.name, "build_ms": build_ms})
        except Exception as error:
            kind = NotImplementedError if isinstance(error, NotImplementedError) else RuntimeError
            raise kind(f"aten::{op.name} recorded at {op.line} cannot be lowered: {_one_line(error)}") from error
        return fragment

    def _trace(self, op: Op, entry: Entry, precision: str) -> Fragment:
        import jax

        self._counters.fragment_traces += 1
        expected = tuple((r.sizes, r.dtype) for r in results_of(op))
        context = self._lowerings.context(entry.name, self._client.lowering_platform, expected, precision)
        schema = schema_of(op.name)

        def function(*arrays: Any) -> list[Any]:
            given = iter(arrays)
            values = [_rebuild(a, given) for a in op.args]
            positional, named = bind(schema, values)
            if entry.takes_context:
                named["ctx"] = context
            made = _align(entry.function(*positional, **named), op, schema)
            return [_as_recorded(m, *aval) for m, aval in zip(made, expected, strict=True)] + [
                ok for ok, _, _ in context.checks
            ]

        _, arguments = parameters(op)
        with self._client.tracing(precision):
            structs = [_struct(a) for a in arguments]
            traced = jax.jit(function, keep_unused=True).trace(*structs)
            text = traced.lower(lowering_platforms=(self._platform,)).as_text()
        checks = tuple((str(message), error) for _, message, error in context.checks)
        ins = [_parameter_type(a) for a in arguments]
        outs = [tensor_type(*aval) for aval in expected] + ["tensor<i1>"] * len(checks)
        return _fragment(entry.name, text, ins, outs, checks)


def _rebuild(value: Any, given: Iterator[Any]) -> Any:
    """An argument as the lowering gets it, with the traced arrays in its place."""
    import jax.numpy as jnp

    kind = type(value)
    if kind is Operand or kind is Lifted:
        return next(given)
    if kind is tuple or kind is list:
        return [_rebuild(item, given) for item in value]
    if kind is Random:
        return next(given).astype(jnp.uint64), next(given)
    if kind is Scalar:
        return _number(value, next(given) if type(value.value) is Lifted else None)
    return value


def _number(scalar: Scalar, lifted: Any) -> Any:
    """A 0-dim tensor, or for a Python number the number (weakly typed where it is a run-time input)."""
    import jax.numpy as jnp

    if lifted is not None:
        return lifted if scalar.wrapped and scalar.dtype != torch.bool else lifted.astype(_name(scalar.dtype))
    return scalar.value if scalar.wrapped else jnp.asarray(scalar.value, dtype=_name(scalar.dtype))


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
def schema_of(op_name: str) -> torch.FunctionSchema:
    """The schema of `add_.Tensor` and the like."""
    packet, _, overload = op_name.partition(".")
    schema = getattr(getattr(torch.ops.aten, packet), overload or "default")._schema
    assert isinstance(schema, torch.FunctionSchema)
    return schema


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
    if jnp.issubdtype(array.dtype, jnp.complexfloating) and not dtype.is_complex:
        array = array.real
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


_FUNCTION = re.compile(r"^  func\.func (?:public|private) @([\w.$-]+)(\(.*?)\n(.*?)^  \}$", re.MULTILINE | re.DOTALL)
_PARAMETER = re.compile(r"%arg(\d+)\b")
_RETURN = re.compile(r"^    return(?: (.*?) :.*)?$", re.MULTILINE)


def _fragment(
    name: str, module: str, ins: list[str], outs: list[str], checks: tuple[tuple[str, type[Exception]], ...]
) -> Fragment:
    """A traced module's functions as private ones under names that no other fragment has."""
    functions = _FUNCTION.findall(module)
    assert functions and functions[0][0] == "main", f"no main function in:\n{module}"
    body = functions[0][2]
    used = tuple(sorted({int(n) for n in _PARAMETER.findall(body) if int(n) < len(ins)}))
    returned = _RETURN.findall(body)[-1].split(", ") if outs else []
    forwarded = [_PARAMETER.fullmatch(r) for r in returned[: len(outs) - len(checks)]]
    forwards = tuple(int(m[1]) if m else None for m in forwarded)
    signature = f"({', '.join(ins[n] for n in used)}) -> ({', '.join(outs)})"
    symbol = f"{re.sub(r'[^0-9A-Za-z_]', '_', name)}_{hashlib.sha256((signature + module).encode()).hexdigest()[:12]}"
    names = {old: symbol if old == "main" else f"{symbol}_{old}" for old, _, _ in functions}
    renamed = re.compile(
        r"(?<!custom_call )@(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + r")(?![\w.$-])"
    )
    texts = []
    for old, traced_head, inside in functions:
        head = traced_head
        if old == "main":
            head = f"({', '.join(f'%arg{n}: {ins[n]}' for n in used)}) -> ({', '.join(outs)}) {{"
        text = f"  func.func private @{old}{head}\n{inside}  }}"
        texts.append(renamed.sub(lambda found: "@" + names[found[1]], text))
    return Fragment(symbol, "\n".join(texts), used, forwards, signature, checks)


@functools.cache
def fingerprint(function: Callable[..., Any], context: Callable[..., Any]) -> str:
    """Hash of everything that decides what a lowering traces to: its sources and the versions of torch and jax.

    The sources are the module it stands in, the modules of that package which this one reaches, and the context's.
    """
    import jax

    home = inspect.unwrap(function).__module__
    package = home.rpartition(".")[0] or home
    reached, waiting = {inspect.unwrap(context).__module__}, [home]
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        for value in vars(importlib.import_module(name)).values():
            other = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
            if isinstance(other, str) and other.startswith(package + "."):
                waiting.append(other)
    digest = hashlib.sha256(f"torch {torch.__version__} jax {jax.__version__}".encode())
    for name in sorted(reached):
        digest.update(inspect.getsource(importlib.import_module(name)).encode())
    return digest.hexdigest()


def _encode(fragment: Fragment) -> bytes:
    fields = fragment._asdict()
    fields["checks"] = [(message, error.__module__, error.__qualname__) for message, error in fragment.checks]
    return json.dumps(fields).encode()


def _decode(data: bytes) -> Fragment:
    fields = json.loads(data)
    checks = tuple((m, getattr(importlib.import_module(module), name)) for m, module, name in fields["checks"])
    used, forwards = tuple(fields["used"]), tuple(fields["forwards"])
    return Fragment(fields["symbol"], fields["text"], used, forwards, fields["signature"], checks)


def _one_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
