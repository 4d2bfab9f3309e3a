"""The table of lowerings: from an ATen op name to the function that computes it with jax.numpy.

Nothing here or in an op file imports jax when the file is imported: `jax`, `jnp` and `lax` are loaded at first use,
so that `import torch` stays fast and DataLoader workers never start an XLA client.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Promotion
from torch._prims_common import get_computation_dtype

from torchtpu.runtime.device import jax_modules

jax, jnp, lax = jax_modules.jax, jax_modules.jnp, jax_modules.lax


@dataclass
class Context:
    """What a lowering may ask about the op it is tracing, beyond its arguments.

    `results` lists (shape, dtype) of each array the lowering has to return, flattened: the unaliased returns in schema
    order, then the written arguments.  The engine casts to these dtypes, so a lowering need not.  `precision` is None
    unless the op is registered as one that multiplies. `num_unknown` counts where the lowering has another form than
    where sizes are known.
    """

    op: str
    platform: str
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    precision: str | None = None
    checks: list[tuple[Any, str, type[Exception]]] = field(default_factory=list)
    num_unknown: int = 0

    @contextlib.contextmanager
    def assumes(self, default_dtype: torch.dtype) -> Iterator[None]:
        """Lowerings promote as where this is the default dtype."""
        before = _assumed.default_dtype, _assumed.context
        _assumed.default_dtype, _assumed.context = default_dtype, self
        try:
            yield
        finally:
            _assumed.default_dtype, _assumed.context = before

    def check(self, ok: Any, message: str, error: type[Exception] = IndexError) -> None:
        """Fails the op at the next read with `error(message)` where the boolean array `ok` has a False."""
        self.checks.append((jnp.all(ok), message, error))


class _Assumed(threading.local):
    """What holds where an op that is being traced was called."""

    default_dtype: torch.dtype | None = None
    context: Context | None = None


_assumed = _Assumed()


def note_unknown() -> None:
    """The lowering that is being traced would have another form if it knew a size."""
    if _assumed.context is not None:
        _assumed.context.num_unknown += 1


Row = tuple[str, dict[str, Any], bool, bool, tuple[str, ...], bool, tuple[str, ...], bool, bool, bool]


@dataclass(frozen=True)
class Lowering:
    """One op's lowering and what the recorder must know of the op.

    structural: argument name -> values at which the argument changes meaning (None: every value); compared, never
        lifted to a run-time input.
    lifts: float scalars become run-time inputs at first sight, not when a second value is seen.
    random: the op draws random numbers; a `Random` follows the arguments unless the schema has a generator.
    mutates: arguments the op writes although its schema does not say so.
    infer: shape inference on meta tensors, for ops whose meta kernel is missing or has other strides.
    persists: the fragments may be kept on disk: they follow from the arguments and this package's sources.
    ints: int arguments that become run-time inputs when a second value is seen; they do not decide a shape.
    multiplies: the result depends on `torch.set_float32_matmul_precision`, which the lowering finds in `ctx.precision`.
    maps: the op goes through lists in step: element i of a result depends on element i of each list, and on what is no
        list.
    elementwise: each element of a result depends on those at its place in the arguments, broadcast; all else, as how
        long a loop runs or what is checked, depends on none.
    repeats: called again with the same arguments, the op is computed again, and not before its turn.
    write: makes the lines of StableHLO that the function is traced into, without jax, for an op of an array or a list
        of them: of the shape and element type of each, those of the result, and the other arguments; None where it
        cannot. `%arg0` is the first.
    """

    name: str
    function: Callable[..., Any]
    structural: Mapping[str, tuple[float, ...] | None] = field(default_factory=dict)
    lifts: bool = False
    random: bool = False
    mutates: tuple[str, ...] = ()
    infer: Callable[..., Any] | None = None
    persists: bool = True
    ints: tuple[str, ...] = ()
    multiplies: bool = False
    maps: bool = False
    elementwise: bool = False
    repeats: bool = False
    write: Callable[..., list[str] | None] | None = None

    @functools.cached_property
    def takes_context(self) -> bool:
        return "ctx" in inspect.signature(self.function).parameters

    def row(self, *, runs_once: bool = False) -> Row:
        """What the recorder is told of the op; `runs_once` where it has an effect beside its results."""
        facts = dict(self.structural), self.lifts, self.random, self.mutates
        return self.name, *facts, self.infer is not None, self.ints, self.multiplies, runs_once, self.elementwise


Register = Callable[[Callable[..., Any]], Callable[..., Any]]

LOWERINGS: dict[str, Lowering] = {}
PLATFORM_LOWERINGS: dict[tuple[str, str], Lowering] = {}
REMOVED = {"cholesky": "2.14"}  # ops that some supported PyTorch has: the first one without
COMPOSED: dict[str, Callable[..., Any]] = {}


def lowering(*names: str, platform: str | None = None, **facts: Any) -> Register:
    """Registers the decorated function as the lowering of the ATen ops `names` (`"add.Tensor"`, without namespace).

    The function gets the op's arguments by the schema's names and order: tensors as jax arrays of their logical shape,
    dtypes as torch.dtype, other arguments as Python values; a `Scalar` or float argument may be a weakly typed 0-dim
    array.  It returns the unaliased results, then the written arguments (one array, or a tuple; a list result is a
    list).  A parameter named `ctx` receives the `Context`.  In-place and out= variants follow from the functional op.
    With `platform` ("cpu", "tpu" or "cuda") it replaces the general lowering there.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            entry = Lowering(name, function, **facts)
            if platform is None:
                assert name not in LOWERINGS, f"two lowerings of {name}"
                LOWERINGS[name] = entry
            else:
                PLATFORM_LOWERINGS[name, platform] = entry
        return function

    return register


def find(name: str) -> Lowering:
    """The lowering of an op, or that of a platform where there is none for all."""
    known = LOWERINGS.get(name)
    return known or next(entry for (op, _), entry in PLATFORM_LOWERINGS.items() if op == name)


def composed(*names: str) -> Register:
    """Registers the decorated function as the kernel of ATen ops that are calls of other ops of the device.

    It gets the op's arguments as torch tensors at every call and may look at what a lowering cannot: strides, and
    counts on the device (`counts.read`).  An out= variant follows from the functional op; where PyTorch has none, the
    function returns what the out= op writes.  Of an op that has a lowering too it gets the calls that cannot be
    recorded.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            assert name not in COMPOSED, f"two kernels of {name}"
            COMPOSED[name] = function
        return function

    return register


def pointwise(
    *names: str, promote: str = "default", rounds_numbers: bool = False, elementwise: bool = True, **facts: Any
) -> Register:
    """Registers an elementwise lowering; its tensors and numbers arrive promoted as PyTorch promotes them.

    `promote` names a `torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND` ("default", "int_to_float", "always_bool",
    "complex_to_float", "bool_to_long", "no_opmath").  bfloat16 and float16 arrive as float32, as PyTorch computes them,
    and numbers beside them with all their digits, or rounded to their dtype.
    """
    kind = Promotion[promote.upper()]

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def promoted(*args: Any, **kwargs: Any) -> Any:
            values = _values(args, kwargs)
            steps = [_promoted_dtype(values, kind)] * rounds_numbers + [_compute_dtype(values, kind)]
            cast = lambda v: v if v is None or isinstance(v, (str, bool)) else functools.reduce(as_dtype, steps, v)
            return function(*map(cast, args), **{k: v if k == "ctx" else cast(v) for k, v in kwargs.items()})

        @functools.wraps(promoted)
        def rounded(*args: Any, **kwargs: Any) -> Any:
            """As the op, which is of its result's dtype, wherever an out= argument takes more digits."""
            made = promoted(*args, **kwargs)
            values = _values(args, kwargs)
            result, compute = _promoted_dtype(values, kind), _compute_dtype(values, kind)
            if result == compute:
                return made
            narrow = lambda v: as_dtype(v, result) if v.dtype == jax_dtype(compute) else v
            return tuple(map(narrow, made)) if isinstance(made, (list, tuple)) else narrow(made)

        lowering(*names, lifts=True, elementwise=elementwise, **facts)(rounded)
        return promoted

    return register


def _values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [*args, *(v for k, v in kwargs.items() if k != "ctx")]


def like(
    self: torch.Tensor, *_: Any, dtype: torch.dtype | None = None, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    """Shape inference: what the first argument is, in its layout or in another one."""
    return without_kernels(torch.ops.aten.empty_like.default, self, dtype=dtype, memory_format=memory_format)


def suggest_memory_format(t: torch.Tensor) -> torch.memory_format:
    """`Tensor::suggest_memory_format` of PyTorch's C++, where its Python counterpart imports a symbolic algebra."""
    if t.dim() not in (4, 5):
        return torch.contiguous_format
    least = 0
    for d in (1, *range(t.dim() - 1, 1, -1), 0):
        size, stride = t.shape[d], t.stride(d)
        if size == 0 or stride < least or (d == 1 and stride == 0) or (d == 0 and least == t.stride(1)):
            return torch.contiguous_format
        least = stride * max(size, 1)
    return torch.channels_last if t.dim() == 4 else torch.channels_last_3d


def without_kernels(op: torch._ops.OpOverload, *args: Any, **named: Any) -> torch.Tensor:
    """What an op makes of meta tensors by PyTorch's own C++. Dispatched to Meta, it would be Python code with strides
    of its own; a backend without kernels gets what serves any device."""
    made = op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse2), *args, **named)
    assert isinstance(made, torch.Tensor)
    return made


def as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """`value`, an array or a Python number, as an array of a torch dtype (complex to real drops the imaginary part)."""
    array = jnp.asarray(value)
    if jnp.issubdtype(array.dtype, jnp.complexfloating) and not dtype.is_complex:
        array = array.real
    if array.dtype == bool and (dtype.is_floating_point or dtype.is_complex):
        # XLA takes a product with a converted bool for a choice, in which False times infinity is 0 instead of NaN.
        return jnp.where(array, jnp.ones((), jax_dtype(dtype)), jnp.zeros((), jax_dtype(dtype)))
    return array.astype(jax_dtype(dtype))


def jax_dtype(dtype: torch.dtype) -> Any:
    """The numpy/ml_dtypes dtype of a torch dtype."""
    return jnp.dtype(str(dtype).removeprefix("torch."))


def torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype of a jax array's dtype."""
    found = getattr(torch, str(jnp.dtype(dtype)))
    assert isinstance(found, torch.dtype)
    return found


def default_dtype() -> torch.dtype:
    """That of the call that is being traced."""
    return _assumed.default_dtype or torch.get_default_dtype()


def opmath(x: Any) -> Any:
    """`x` in the dtype PyTorch accumulates it in: float32 for bfloat16, float16 and float8."""
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4 else x


def _compute_dtype(values: list[Any], kind: Promotion) -> torch.dtype:
    """What PyTorch computes an op on elements in. `torch._prims_common.elementwise_dtypes` says the same, and imports
    sympy to say it."""
    result = _promoted_dtype(values, kind)
    is_known = result is not torch.complex32  # to XLA
    return result if kind is Promotion.NO_OPMATH and is_known else get_computation_dtype(result)


def _promoted_dtype(values: list[Any], kind: Promotion) -> torch.dtype:
    """The dtype of what such an op makes, but for comparisons and absolute values of complex numbers."""
    result = _result_dtype([v for v in values if v is not None and not isinstance(v, (str, bool))])
    if kind is Promotion.INT_TO_FLOAT and not (result.is_floating_point or result.is_complex):
        result = default_dtype()
    if kind is Promotion.BOOL_TO_LONG and result is torch.bool:
        return torch.long
    return result


def _result_dtype(values: list[Any]) -> torch.dtype:
    """PyTorch's type promotion: the dtype of the arrays with axes that are of the highest category among all values,
    else that of those without axes, else the category's default."""
    dtypes = [torch_dtype(v.dtype) if hasattr(v, "dtype") else _NUMBERS[type(v)] for v in values]
    highest = max(map(_category, dtypes), default=0)
    if highest == _COMPLEX:
        dtypes = [d.to_complex() if d.is_floating_point else d for d in dtypes]
    for has_axes in (True, False):
        taken = [
            dtype
            for dtype, v in zip(dtypes, values, strict=True)
            if not _is_number(v) and bool(v.ndim) is has_axes and _category(dtype) == highest
        ]
        if taken:
            return functools.reduce(torch.promote_types, taken)
    default = default_dtype()
    return (torch.bool, torch.long, default, default.to_complex())[highest]


_NUMBERS = {bool: torch.bool, int: torch.long, float: torch.double, complex: torch.complex128}
_COMPLEX = 3


def _category(dtype: torch.dtype) -> int:
    if dtype is torch.bool:
        return 0
    return _COMPLEX if dtype.is_complex else 2 if dtype.is_floating_point else 1


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex)) or bool(getattr(value, "weak_type", False))
