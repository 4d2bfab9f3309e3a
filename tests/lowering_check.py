"""Checks lowerings without a device, against PyTorch's own op samples on the CPU.

Every ATen call that a sample makes, forward and backward, is also computed by its lowering (jitted by JAX on the CPU)
and inferred on meta tensors; both have to agree with what PyTorch's CPU kernel returned.

    python tests/lowering_check.py add mul --dtypes float32,int64 --samples 3
    python tests/lowering_check.py --file torchtpu/ops/math/reduce.py
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import sys
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if __name__ == "__main__":  # no device is needed
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import opinfo_without_stack  # noqa: E402, F401
import torch  # noqa: E402
from opinfo_compare import errs_like  # noqa: E402
from torch.testing._internal import common_methods_invocations as invocations  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_map_only  # noqa: E402

DTYPES = (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64)
UNSUPPORTED = (torch.complex32, torch.quint8, torch.qint8, torch.qint32)
WIDER = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
CHOOSES = ("topk", "kthvalue", "sort", "mode", "median.dim", "nanmedian.dim")  # among equal elements, as it likes
LITERAL = (0, 1, -1, 2)  # the recorder never lifts these


def opinfo_groups() -> dict[str, list[Any]]:
    """OpInfos by name: the general ones and those of `_foreach_*`."""
    groups: dict[str, list[Any]] = {}
    foreach = [
        info
        for name in dir(invocations)
        if name.startswith("foreach_") and name.endswith("_op_db")
        for info in getattr(invocations, name)
    ]
    for info in [*invocations.op_db, *foreach]:
        groups.setdefault(info.name, []).append(info)
    return groups


def extra_samples(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What `samples(dtype)` of each file in `lowering_samples/` yields: (label, function that calls torch)."""
    for path in sorted((ROOT / "tests" / "lowering_samples").glob("*.py")):
        scope: dict[str, Any] = {"__name__": f"lowering_samples_{path.stem}", "__file__": str(path)}
        exec(compile(path.read_text(), str(path), "exec"), scope)
        for label, call in scope["samples"](dtype):
            yield f"extra:{label}", call


def opinfo_samples(info: Any, dtype: torch.dtype, count: int, backward: bool) -> Iterator[Callable[[], Any]]:
    """Up to `count` calls of the op, spread over its samples."""
    grad = backward and info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
    made = list(itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=grad), 60))
    for index in sorted({i * max(len(made) - 1, 1) // max(count - 1, 1) for i in range(count)}):
        if index < len(made):
            yield lambda sample=made[index]: _call(info, sample, grad)


def _call(info: Any, sample: Any, grad: bool) -> None:
    args = [sample.input, *sample.args]
    if info.name.startswith("_foreach"):
        length = len(sample.input)
        args = [a[:3] if isinstance(a, (list, tuple)) and len(a) == length else a for a in args]
        sample.kwargs = {k: a[:3] if isinstance(a, (list, tuple)) else a for k, a in sample.kwargs.items()}
    made = info.op(*args, **sample.kwargs)
    if grad:
        _backward(made, (args, sample.kwargs))


def _backward(made: Any, inputs: Any) -> None:
    outs = [t for t in tree_flatten(made)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
    leaves = [t for t in tree_flatten(inputs)[0] if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
    if outs and leaves:
        torch.autograd.grad(outs, leaves, [torch.randn_like(t) for t in outs], allow_unused=True)


class Names(TorchDispatchMode):
    """Collects the names of the ATen ops called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(overload_name(func))
        return func(*args, **(kwargs or {}))


def overload_name(func: Any) -> str:
    return func._schema.name.removeprefix("aten::") + (f".{o}" if (o := func._schema.overload_name) else "")


def sample_index() -> dict[str, list[str]]:
    """OpInfo name -> the ATen ops it reaches; built once per torch version (about two minutes) and kept in /tmp."""
    path = Path(tempfile.gettempdir()) / f"torchtpu-sample-index-{torch.__version__}-{os.getuid()}.json"
    if path.exists():
        found: dict[str, list[str]] = json.loads(path.read_text())
        return found
    print("building the index of samples ...", file=sys.stderr)
    index: dict[str, list[str]] = {}
    for name, infos in opinfo_groups().items():
        with Names() as seen:
            for info in infos:
                for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64):
                    if dtype in info.supported_dtypes("cpu"):
                        _attempt(lambda: [call() for call in opinfo_samples(info, dtype, 4, True)])  # noqa: B023
                        if dtype is torch.float32:
                            break
        index[name] = sorted(seen.names)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(index))
    partial.replace(path)
    return index


def _attempt(call: Callable[[], Any]) -> None:
    """Runs a sample; one that this CPU build rejects is not a lowering's matter."""
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call()


@dataclass
class Outcome:
    """What was found out about one registered name."""

    checked: int = 0
    failures: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    called_as: Counter[str] = field(default_factory=Counter)


class Check(TorchDispatchMode):
    """Runs each call on the CPU, and those with a lowering also through it: the lowering that `platform` has."""

    def __init__(self, targets: set[str], per_op: int = 12, in_all: int = 1000, platform: str = "cpu") -> None:
        super().__init__()
        self.registry = importlib.import_module("torchtpu.ops.registry")
        self.targets = targets
        self.platform = platform
        self.per_op = per_op
        self.in_all = in_all
        self.outcomes: dict[str, Outcome] = {name: Outcome() for name in targets}
        self._seen: Counter[Any] = Counter()
        self._by_dtype: Counter[Any] = Counter()
        self._functional: dict[Any, str | None] = {}

    def functional_name(self, func: Any) -> str | None:
        """The registered name that serves `func`: itself, or the functional form of an in-place or out= variant."""
        if func not in self._functional:
            self._functional[func] = _functional_name(func, self.registry.LOWERINGS)
        return self._functional[func]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = self.functional_name(func) if func.namespace == "aten" else None
        if name not in self.targets or not self._wanted(name, func, args, kwargs):
            return func(*args, **kwargs)
        before = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        strided = tree_map_only(torch.Tensor, _on_meta, (args, kwargs))
        made = func(*args, **kwargs)
        outcome = self.outcomes[name]
        outcome.checked += 1
        outcome.called_as[overload_name(func)] += 1
        entry = self.registry.PLATFORM_LOWERINGS.get((name, self.platform)) or self.registry.LOWERINGS[name]
        shown = f"{overload_name(func)}({', '.join(map(_show, [*before[0], *before[1].items()]))})"
        try:
            expected = _expected(func, entry, args, kwargs, made)
        except (ValueError, IndexError, TypeError) as error:
            outcome.failures.append(f"{shown}: harness: {error!r}")
            return made
        for problem in self._compare_lowering(entry, func, *before, expected, self._truth(entry, func, before)):
            outcome.failures.append(f"{shown}: {problem}")
        for problem, fatal in _compare_meta(entry, func, *strided, made):
            (outcome.failures if fatal else outcome.warnings).append(f"{shown}: {problem}")
        return made

    def _wanted(self, name: str, func: Any, args: Any, kwargs: Any) -> bool:
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        if any(t.dtype in UNSUPPORTED or t.layout != torch.strided or t.numel() > 1 << 22 for t in tensors):
            return False
        signature = (name, overload_name(func), *(_show(a) for a in tree_flatten((args, kwargs))[0]))
        lists = [a for a in args if isinstance(a, (list, tuple)) and any(_is_mask(t) for t in a)]
        if name.startswith("index") and lists:  # a read or write at a mask runs on the CPU
            return False
        kind = (name, tuple(t.dtype for t in tensors[:3]))
        self._seen[signature] += 1
        if self.outcomes[name].checked >= self.in_all:
            return False
        if self._seen[signature] > 1 or self._by_dtype[kind] >= self.per_op:
            return False
        self._by_dtype[kind] += 1
        return True

    def _truth(self, entry: Any, func: Any, arguments: Any) -> Callable[[], list[Any]]:
        """The same call in the next wider dtype: decides where the CPU's kernel rounds more often than we do."""

        def compute() -> list[Any]:
            args, kwargs = tree_map_only(
                torch.Tensor, lambda t: t.to(WIDER.get(t.dtype, t.dtype), copy=True), arguments
            )
            return _expected(func, entry, args, kwargs, func(*args, **kwargs))

        return compute

    def _compare_lowering(
        self, entry: Any, func: Any, args: Any, kwargs: Any, expected: list[Any], truth: Callable[[], list[Any]]
    ) -> Iterator[str]:
        lifted = self.outcomes[entry.name].checked % 2 == 1
        try:
            actual = run_lowering(lowered_call(entry, func, args, kwargs, expected, lifted, self.platform))
        except Exception as error:  # every kind of failure of a lowering is a line of the table
            yield f"{'lifted: ' if lifted else ''}{_first_line(error)}"
            return
        if len(actual) != len(expected):
            yield f"{len(actual)} results instead of {len(expected)}"
            return
        for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
            if theirs is None:
                continue
            if theirs._is_zerotensor():  # it has no memory to compare with
                theirs = torch.zeros(theirs.shape, dtype=theirs.dtype)
            if ours is None:
                yield f"result {index} is None"
            elif tuple(ours.shape) != tuple(theirs.shape):
                yield f"result {index} has shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}"
            elif not _is_random(entry, func):
                tolerance = {"rtol": 1e-5, "atol": 1e-5} if theirs.dtype in (torch.float32, torch.complex64) else {}
                try:
                    torch.testing.assert_close(ours, theirs.detach().contiguous(), equal_nan=True, **tolerance)
                except AssertionError as error:
                    if entry.name in CHOOSES and index == 1 and _points_at(func, args, kwargs, ours, expected[0]):
                        continue
                    with contextlib.suppress(Exception):
                        wide = truth()[index]
                        if not errs_like(ours, theirs.detach(), wide):
                            torch.testing.assert_close(ours, wide.to(theirs.dtype), equal_nan=True, **tolerance)
                        continue
                    lines = [line for line in str(error).splitlines() if line.strip()]
                    yield f"result {index}: " + " ".join(lines[:4])


def _functional_name(func: Any, names: Iterable[str]) -> str | None:
    schema = func._schema
    own = overload_name(func)
    if own in names:
        return own
    base, _, overload = own.partition(".")
    wanted = [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]
    if base.endswith("_") and not base.endswith("__"):
        base = base[:-1]
    candidates = [n for n in names if n.partition(".")[0] == base]
    for candidate in sorted(candidates, key=lambda n: n.partition(".")[2] != overload):
        packet, _, its_overload = candidate.partition(".")
        other = getattr(getattr(torch.ops.aten, packet), its_overload or "default")._schema
        if [(a.name, str(a.type)) for a in other.arguments] == wanted:
            return candidate
    return None


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """(schema argument, its value or default), without out= arguments."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.is_out:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
        yield argument, value


def _expected(func: Any, entry: Any, args: Any, kwargs: Any, made: Any) -> list[Any]:
    """What the lowering has to return, flat: the unaliased returns, then the written arguments."""
    returns = func._schema.returns
    results = [made] if len(returns) == 1 else list(made or ())
    flat = [t for r, value in zip(returns, results, strict=True) if r.alias_info is None for t in _flat(value)]
    for index, argument in enumerate(func._schema.arguments):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written or argument.name in entry.mutates:
            flat += _flat(args[index] if index < len(args) else kwargs.get(argument.name))
    return flat


def _flat(value: Any) -> list[Any]:
    return [t for v in value for t in _flat(v)] if isinstance(value, (list, tuple)) else [value]


class Call(NamedTuple):
    """A lowering as a function of arrays alone, the arrays of a sample, and the checks made while it is traced."""

    program: Callable[..., Any]
    leaves: tuple[Any, ...]
    checks: list[tuple[Any, str, type[Exception]]]


def lowered_call(
    entry: Any,
    func: Any,
    args: Any,
    kwargs: Any,
    expected: list[Any],
    lifted: bool,
    platform: str,
    size: Callable[[int], Any] = int,
) -> Call:
    """The lowering's call, its results cast to the dtypes of `expected`; `lifted` makes its numbers arrays too, and
    `size` maps the sizes of its results."""
    registry = importlib.import_module("torchtpu.ops.registry")
    leaves: list[Any] = []
    results = tuple((tuple(map(size, t.shape)), t.dtype) for t in expected if isinstance(t, torch.Tensor))
    checks: list[tuple[Any, str, type[Exception]]] = []

    def encode(argument: Any, value: Any) -> Callable[[Any], Any]:
        if isinstance(value, (list, tuple)):
            parts = [encode(argument, v) for v in value]
            return lambda xs: [part(xs) for part in parts]
        if isinstance(value, torch.Tensor):
            leaves.append(to_numpy(value))
        elif lifted and _lifts(entry, argument, value):
            leaves.append(value)
        elif str(argument.type) == "Optional[Generator]":
            return lambda xs: (xs[-2], xs[-1])
        else:
            return lambda xs: value
        position = len(leaves) - 1
        return lambda xs: xs[position]

    encoded = [(argument, encode(argument, value)) for argument, value in _arguments(func, args, kwargs)]
    if _is_random(entry, func):
        import numpy as np

        leaves += [np.uint64(7), np.int64(0)]

    def program(*xs: Any) -> Any:
        positional = [build(xs) for argument, build in encoded if not argument.kwarg_only]
        named = {argument.name: build(xs) for argument, build in encoded if argument.kwarg_only}
        if entry.random and "generator" not in named and all(a.name != "generator" for a, _ in encoded):
            named["generator"] = (xs[-2], xs[-1])
        ctx = registry.Context(entry.name, platform, results, "highest" if entry.multiplies else None)
        if entry.takes_context:
            named["ctx"] = ctx
        made = _flat(entry.function(*positional, **named))
        want = [t.dtype if isinstance(t, torch.Tensor) else None for t in expected] + [None] * len(made)
        cast = [m if m is None or d is None else registry.as_dtype(m, d) for m, d in zip(made, want, strict=False)]
        checks[:] = ctx.checks
        return cast, [ok for ok, _, _ in ctx.checks]

    return Call(program, tuple(leaves), checks)


def run_lowering(call: Call) -> list[Any]:
    """The lowering's results as CPU tensors, compiled as programs are at first: in a third of the time."""
    import jax

    from torchtpu.runtime.compile.tiers import FIRST_TIERS

    options = dict(FIRST_TIERS["cpu"].options)
    with jax.enable_x64(True):
        made, passed = jax.jit(call.program, compiler_options=options)(*call.leaves)
    failed = [call.checks[i][1] for i, ok in enumerate(passed) if not ok]
    assert not failed, f"device-side check failed on a valid sample: {failed}"
    return [None if m is None else to_torch(m) for m in made]


def _is_random(entry: Any, func: Any) -> bool:
    return entry.random or any(str(a.type) == "Optional[Generator]" for a in func._schema.arguments)


def _lifts(entry: Any, argument: Any, value: Any) -> bool:
    kind = str(argument.type)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value in LITERAL:
        return False
    if argument.name in entry.ints:
        return True
    if kind not in ("number", "float", "Optional[number]", "Optional[float]", "List[number]"):
        return False
    if argument.name in entry.structural:
        values = entry.structural[argument.name]
        return values is not None and value not in values
    return True


def to_numpy(tensor: torch.Tensor) -> Any:
    import ml_dtypes

    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "bfloat16" or name.startswith("float8"):
        raw = torch.int16 if tensor.dtype.itemsize == 2 else torch.uint8
        return tensor.view(raw).numpy().view(getattr(ml_dtypes, name))
    return tensor.numpy()


def to_torch(array: Any) -> torch.Tensor:
    import numpy as np

    host = np.array(array)
    name = str(host.dtype)
    if name == "bfloat16" or name.startswith("float8"):
        raw = np.int16 if host.dtype.itemsize == 2 else np.uint8
        return torch.from_numpy(host.view(raw).reshape(host.shape)).view(getattr(torch, name))
    return torch.from_numpy(host)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _compare_meta(entry: Any, func: Any, args: Any, kwargs: Any, made: Any) -> Iterator[tuple[str, bool]]:
    """(problem, is fatal): a wrong shape or dtype is fatal, other strides are a warning."""
    kwargs = {**kwargs, **({"device": "meta"} if kwargs.get("device") is not None else {})}
    if any(a.name == "device" for a in func._schema.arguments):
        kwargs["device"] = "meta"
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if entry.infer is None:
                inferred = func(*args, **kwargs)
            else:
                schema = enumerate(func._schema.arguments)
                values = [args[i] if i < len(args) else kwargs.get(a.name, a.default_value) for i, a in schema]
                inferred = entry.infer(*values) if func._schema.returns else made
    except Exception as error:  # whatever it raises, the recorder cannot infer this call
        yield f"meta inference: {_first_line(error)}", True
        return
    ours, theirs = (tree_flatten(x)[0] for x in (inferred, made))
    if len(ours) != len(theirs):
        yield f"meta inference: {len(ours)} results instead of {len(theirs)}", True
        return
    for o, t in zip(ours, theirs, strict=True):
        if not isinstance(t, torch.Tensor) or not isinstance(o, torch.Tensor):
            if isinstance(t, torch.Tensor) != isinstance(o, torch.Tensor):
                yield f"meta inference: {o} instead of {t}", True
        elif (o.shape, o.dtype) != (t.shape, t.dtype):
            # Devices keep the statistics of bfloat16 in float32, the CPU does not.
            is_wider = o.shape == t.shape and WIDER.get(t.dtype) == o.dtype == torch.float32
            yield f"meta inference: {tuple(o.shape)} {o.dtype} instead of {tuple(t.shape)} {t.dtype}", not is_wider
        elif t.numel() > 1 and _strides(o) != _strides(t):
            yield f"meta inference: strides {o.stride()} instead of {t.stride()} for {tuple(t.shape)}", False


def _points_at(func: Any, args: Any, kwargs: Any, indices: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether `indices` are distinct places in the input that hold `values`."""
    named = {argument.name: value for argument, value in _arguments(func, args, kwargs)}
    dim, x = named["dim"], named["self"]
    if x.dim() == 0:
        return bool((indices == 0).all())
    if values.dim() < x.dim():
        indices, values = indices.unsqueeze(dim), values.unsqueeze(dim)
    is_inside = bool(((indices >= 0) & (indices < x.shape[dim])).all())
    ordered = indices.sort(dim).values
    is_distinct = not bool((ordered.diff(dim=dim) == 0).any())
    return is_inside and is_distinct and torch.equal(x.gather(dim, indices).nan_to_num(), values.nan_to_num())


def _is_mask(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


def _strides(tensor: torch.Tensor) -> list[int]:
    """The strides that matter."""
    return [stride for stride, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        return f"{value[0]}={_show(value[1])}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_show, value))}]"
    return repr(value)


def run_samples(check: Check, names: Iterable[str], dtypes: Iterable[torch.dtype], count: int, backward: bool) -> None:
    """Runs `count` samples per dtype of each OpInfo (or extra sample) in `names` under `check`."""
    groups = opinfo_groups()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in dtypes:
            torch.manual_seed(0)
            for label, call in extra_samples(dtype):
                if label in names or "extra" in names:
                    with check:
                        _attempt(call)
            for name in names:
                for info in groups.get(name, ()):
                    if dtype in info.supported_dtypes("cpu"):
                        _attempt(lambda: _run_opinfo(check, info, dtype, count, backward))  # noqa: B023


def _run_opinfo(check: Check, info: Any, dtype: torch.dtype, count: int, backward: bool) -> None:
    composite = any(n in check.targets for n in ("linear", "matmul"))
    for call in opinfo_samples(info, dtype, count, backward):
        with check:
            _attempt(call)
        if composite:  # a composite op with a lowering is seen by a dispatch mode in inference mode only
            with torch.inference_mode(), check:
                _attempt(call)


def op_files() -> list[Path]:
    """Every file with lowerings."""
    return [path for path in sorted((ROOT / "torchtpu" / "ops").rglob("*.py")) if path.stem != "__init__"]


def module_of(path: Path) -> str:
    """The name under which an op file is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def load_ops() -> dict[str, Any]:
    """Imports every op file; returns LOWERINGS."""
    for path in op_files():
        importlib.import_module(module_of(path))
    found: dict[str, Any] = importlib.import_module("torchtpu.ops.registry").LOWERINGS
    return found


def names_reaching(targets: set[str], lowerings: dict[str, Any], searched: int = 6) -> list[str]:
    """The OpInfo names whose samples call one of `targets`, most specific first."""
    reached: dict[str, list[str]] = {}
    cached: dict[str, str | None] = {}
    for name, ops in sample_index().items():
        for op in ops:
            if op not in cached:
                packet, _, overload = op.partition(".")
                func = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
                cached[op] = _functional_name(func, lowerings) if func is not None else None
            if cached[op] in targets:
                reached.setdefault(cached[op], []).append(name)
    size = {name: len(ops) for name, ops in sample_index().items()}
    picked: dict[str, None] = {}
    for target, names in reached.items():
        own = [n for n in names if n.rpartition(".")[2].strip("_") == target.partition(".")[0].strip("_")]
        for name in dict.fromkeys([*own, *sorted(names, key=size.__getitem__)[:searched]]):
            picked[name] = None
    return list(picked)


def report(check: Check, verbose: bool = False) -> int:
    """Prints the table; returns how many ops failed."""
    failed = 0
    for name, outcome in sorted(check.outcomes.items()):
        if outcome.failures:
            failed += 1
            print(f"{name:44} FAIL {len(outcome.failures)}/{outcome.checked}  {outcome.failures[0]}")
            for line in outcome.failures[1:] if verbose else ():
                print(f"{'':44}   {line}")
        elif outcome.checked:
            note = f"  ({len(outcome.warnings)} warnings: {outcome.warnings[0]})" if outcome.warnings else ""
            print(f"{name:44} ok {outcome.checked}{note}")
        else:
            print(f"{name:44} no sample reached it")
    done = sum(1 for o in check.outcomes.values() if o.checked)
    print(f"{len(check.outcomes)} ops, {done} checked, {failed} failed")
    return failed


def _resolve(words: list[str], lowerings: dict[str, Any]) -> tuple[set[str], list[str]]:
    """Words of the command line -> (registered names to check, OpInfo names to run)."""
    groups = opinfo_groups()
    targets = {n for n in lowerings for w in words if n == w or n.partition(".")[0] == w}
    infos = [w for w in words if w in groups or w.startswith("extra")]
    infos += [n for n in groups for w in words if n.rpartition(".")[2] == w and n not in infos]
    if not targets:  # an OpInfo that is no op of ours: check everything it calls
        targets = set(lowerings)
    elif any(w not in infos for w in words):
        infos += [n for n in names_reaching(targets, lowerings) if n not in infos]
    return targets, infos


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="OpInfo names, ATen names (add.Tensor) or packets (add)")
    parser.add_argument("--file", action="append", default=[], help="check the ops registered in this file")
    parser.add_argument("--all-ops", action="store_true", help="check every lowering that samples reach")
    parser.add_argument("--dtypes", default=",".join(str(d).removeprefix("torch.") for d in DTYPES))
    parser.add_argument("--samples", type=int, default=4, help="samples per OpInfo and dtype")
    parser.add_argument("--per-op", type=int, default=10, help="checks per op and dtype")
    parser.add_argument("--no-backward", action="store_true")
    parser.add_argument("--platform", default="cpu", help="take this platform's lowerings; they run on the CPU")
    parser.add_argument("--verbose", "-v", action="store_true", help="print every mismatch")
    options = parser.parse_args()
    # The ops need no device: keep torchtpu/__init__.py, which starts one, out of this process.
    package = types.ModuleType("torchtpu")
    package.__path__ = [str(ROOT / "torchtpu")]  # type: ignore[attr-defined]
    sys.modules["torchtpu"] = package
    torch.set_num_threads(1)
    if options.file:
        stems = {Path(name).stem for name in options.file}
        modules = {module_of(path) for path in op_files() if path.stem in stems}
        for module in modules:
            importlib.import_module(module)
        with contextlib.suppress(ImportError, AssertionError, SyntaxError, NameError):  # another file in the making
            load_ops()
        lowerings = importlib.import_module("torchtpu.ops.registry").LOWERINGS
        targets = {n for n, entry in lowerings.items() if entry.function.__module__ in modules}
        infos = [*names_reaching(targets, lowerings), "extra"]
        if options.names:
            targets &= _resolve(options.names, lowerings)[0]
            infos = [*names_reaching(targets, lowerings), "extra"]
    else:
        lowerings = load_ops()
        targets, infos = _resolve(options.names, lowerings)
    check = Check(set(lowerings) if options.all_ops else targets, options.per_op, platform=options.platform)
    dtypes = [getattr(torch, d) for d in options.dtypes.split(",")]
    run_samples(check, infos, dtypes, options.samples, not options.no_backward)
    return 1 if report(check, options.verbose) else 0


if __name__ == "__main__":
    sys.exit(main())
