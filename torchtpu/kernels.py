"""Kernels of your own: JAX functions and Pallas kernels as ops on tpu tensors.

    @torchtpu.kernels.jax_kernel
    def gelu(x, *, approximate=True):
        return jax.nn.gelu(x, approximate=approximate)

    y = gelu(x, approximate=False)

The op is recorded like any other: it is compiled together with what stands around it. Every kernel is a call of the
one op `torchtpu::jax_call`, whose lowering calls the function that a call names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchtpu.ops.registry import LOWERINGS, Lowering, jax, jnp, torch_dtype
from torchtpu.runtime import _C

__all__ = ["jax_kernel"]

Arrays = Sequence[Any]
_OP = "torchtpu::jax_call"


def jax_kernel(
    function: Callable[..., Any] | None = None,
    *,
    backward: Callable[..., Any] | None = None,
    aliases: Mapping[str, int] | None = None,
) -> Any:
    """A function on tpu tensors that computes what the JAX function computes on arrays.

    Tensors may stand anywhere in the arguments, also inside lists, tuples and dicts; everything else is static and has
    to be hashable. Results are tensors in the structure that the function returns. Shapes come from `jax.eval_shape`;
    as in JAX, 64-bit arrays become 32-bit ones unless `jax_enable_x64` is set where the kernel is called, and products
    have the precision of `jax_default_matmul_precision` there.

    The gradient is that of `jax.vjp`. `backward(arguments, outputs, gradients)`, a JAX function of three lists of
    arrays, replaces it; it returns one gradient (or None) per tensor argument.

    `aliases` maps a parameter's name to the number of the result that is written into that argument, in place; the
    result returned for it is the argument itself.

    On platform cpu Pallas kernels run interpreted. Raises NotImplementedError for tensors that are not on tpu, and for
    sharded ones.
    """
    if function is None:
        return functools.partial(jax_kernel, backward=backward, aliases=aliases)
    kernel = _Kernel(function, backward, dict(aliases or {}))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return kernel(args, kwargs)

    _calls.append(call)
    if "torch._dynamo" in sys.modules:
        allow_in_graph: Any = torch._dynamo.allow_in_graph
        allow_in_graph(call)
    return call


def callables() -> list[Callable[..., Any]]:
    """Every kernel made so far, for dynamo to put into graphs as they are."""
    return list(_calls)


_calls: list[Callable[..., Any]] = []


# ---- functions of flat lists of arrays, by number


@dataclass(frozen=True)
class _Flat:
    """What a call computes: a kernel's function with its static arguments and structure. Equal ones have one number.

    `derived` says how it comes from that: ("vjp", which arrays are differentiated) or ("vmap", their dimensions, size).
    """

    kernel: _Kernel
    spec: Any
    statics: tuple[Any, ...]
    has_x64: bool
    precision: str | None
    derived: tuple[tuple[Any, ...], ...] = ()

    def __call__(self, arrays: Arrays) -> list[Any]:
        """Traces; the results are flat."""
        with jax.enable_x64(self.has_x64), jax.default_matmul_precision(self.precision):
            if not self.has_x64:
                arrays = [_narrow(a) for a in arrays]
            return self.function()(list(arrays))

    def function(self) -> Callable[[list[Any]], list[Any]]:
        """The function from a flat list of arrays to a flat list of arrays."""
        made: Callable[[list[Any]], list[Any]] = self._plain
        for i, (kind, *facts) in enumerate(self.derived):
            given = self.kernel.backward if i == 0 else None
            made = _vjp(made, given, *facts) if kind == "vjp" else _vmap(made, *facts)
        return made

    def _plain(self, arrays: list[Any]) -> list[Any]:
        waiting = iter(arrays)
        leaves = [next(waiting) if s is _ARRAY else s for s in self.statics]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return pytree.tree_leaves(self.kernel.function(*args, **kwargs))


class _Array:
    """Stands for an array among the static arguments."""

    def __repr__(self) -> str:
        return "array"


_ARRAY = _Array()


def _vjp(
    function: Callable[[list[Any]], list[Any]], given: Callable[..., Any] | None, wanted: tuple[int, ...], count: int
) -> Callable[[list[Any]], list[Any]]:
    """From `count` arguments and then the results' gradients to the gradients of the `wanted` arguments."""

    def backward(arrays: list[Any]) -> list[Any]:
        arguments, gradients = arrays[:count], arrays[count:]

        def of_wanted(*values: Any) -> list[Any]:
            replaced = list(arguments)
            for i, value in zip(wanted, values, strict=True):
                replaced[i] = value
            return function(replaced)

        if given is not None:
            made = given(arguments, function(arguments), gradients)
            return [jnp.zeros_like(arguments[i]) if made[i] is None else made[i] for i in wanted]
        outputs, pull = jax.vjp(of_wanted, *(arguments[i] for i in wanted))
        return list(pull([_cotangent(g, o) for g, o in zip(gradients, outputs, strict=True)]))

    return backward


def _cotangent(gradient: Any, output: Any) -> Any:
    if jnp.issubdtype(output.dtype, jnp.inexact):
        return gradient.astype(output.dtype)
    return jax.numpy.zeros(output.shape, jax.dtypes.float0)


def _vmap(
    function: Callable[[list[Any]], list[Any]], dims: tuple[int | None, ...], size: int
) -> Callable[[list[Any]], list[Any]]:
    return lambda arrays: list(jax.vmap(function, in_axes=(list(dims),), axis_size=size)(arrays))


def _narrow(array: Any) -> Any:
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))


@dataclass
class _KernelTable:
    """`flats[i]` has number i; `numbers` finds it. Guarded by `lock`; grows only."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    flats: list[_Flat] = field(default_factory=list)
    numbers: dict[_Flat, int] = field(default_factory=dict)

    def number(self, flat: _Flat) -> int:
        with self.lock:
            number = self.numbers.setdefault(flat, len(self.flats))
            if number == len(self.flats):
                self.flats.append(flat)
            return number


_table = _KernelTable()


# ---- calls


@dataclass(frozen=True, eq=False)
class _Kernel:
    """A JAX function with its options; calls flatten their arguments."""

    function: Callable[..., Any]
    backward: Callable[..., Any] | None
    aliases: dict[str, int]

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _define()
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        name = self.function.__name__
        _check(name, tensors)
        statics = tuple(_ARRAY if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        try:
            modes = bool(jax.config.jax_enable_x64), jax.config.jax_default_matmul_precision
            number = _table.number(_Flat(self, spec, statics, *modes))
        except TypeError as error:
            raise TypeError(f"{name}: static arguments of a kernel have to be hashable: {error}") from error
        structure = _structure(number, tuple(_aval(t) for t in tensors))  # raises the function's own errors
        results = torch.ops.torchtpu.jax_call(tensors, number, name)
        for parameter, i in self.aliases.items():
            target = self._argument(parameter, args, kwargs)
            target.copy_(results[i])
            results[i] = target
        return pytree.tree_unflatten(results, structure)

    def _argument(self, parameter: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        found = inspect.signature(self.function).bind(*args, **kwargs).arguments[parameter]
        assert isinstance(found, torch.Tensor), f"{parameter} is no tensor"
        return found


def _check(name: str, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if type(tensor).__name__ == "DTensor":
            raise NotImplementedError(f"{name}: a kernel takes whole tensors, not a DTensor. Give it x.to_local().")
        if tensor.device.type != "tpu":
            raise NotImplementedError(f"{name}: a kernel runs on tpu; an argument is on {tensor.device}.")


def _aval(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(int(n) for n in tensor.shape), tensor.dtype  # a symbolic size becomes the number it is


@functools.lru_cache(maxsize=4096)
def _shapes(number: int, avals: tuple[Any, ...]) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shape and dtype of each result."""
    with jax.enable_x64(True):
        arrays = [jax.ShapeDtypeStruct(s, jnp.dtype(str(d).removeprefix("torch."))) for s, d in avals]
        made = jax.eval_shape(_table.flats[number], arrays)
    return tuple((tuple(m.shape), torch_dtype(m.dtype)) for m in made)


@functools.lru_cache(maxsize=4096)
def _structure(number: int, avals: tuple[Any, ...]) -> Any:
    """How a kernel's results hang together."""
    flat = _table.flats[number]
    found: list[Any] = []

    def call(arrays: Any) -> Any:
        waiting = iter(arrays)
        args, kwargs = pytree.tree_unflatten([next(waiting) if s is _ARRAY else s for s in flat.statics], flat.spec)
        made = flat.kernel.function(*args, **kwargs)
        found.append(pytree.tree_structure(made))
        return pytree.tree_leaves(made)

    with jax.enable_x64(flat.has_x64):
        jax.eval_shape(call, [jax.ShapeDtypeStruct(s, jnp.dtype(str(d).removeprefix("torch."))) for s, d in avals])
    return found[0]


# ---- the op


def _lower(arrays: Arrays, function: int, name: str, *, ctx: Any) -> list[Any]:
    with _interpreted() if ctx.platform == "cpu" else contextlib.nullcontext():
        return _table.flats[function](arrays)


def _interpreted() -> contextlib.AbstractContextManager[Any]:
    """Within it Pallas kernels are traced as plain HLO."""
    if "jax.experimental.pallas" not in sys.modules:
        return contextlib.nullcontext()
    from jax.experimental.pallas import tpu

    mode: contextlib.AbstractContextManager[Any] = tpu.force_tpu_interpret_mode(True)
    return mode


def _infer(arrays: Sequence[torch.Tensor], function: int, name: str) -> list[torch.Tensor]:
    made = _shapes(function, tuple(_aval(t) for t in arrays))
    device = arrays[0].device if arrays else torch.device("tpu")
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in made]


@functools.cache
def _define() -> None:
    """Makes the op, at the first call of a kernel."""
    kind: Any = torch.library.Library
    library = kind("torchtpu", "FRAGMENT")
    library.define("jax_call(Tensor[] arrays, int function, str name) -> Tensor[]")
    _libraries.append(library)
    LOWERINGS[_OP] = Lowering(_OP, _lower, infer=_infer, persists=False)
    _C.register_op(LOWERINGS[_OP].row())
    torch.library.register_fake(_OP, _infer, lib=library)
    torch.library.register_autograd(_OP, _backward, setup_context=_save, lib=library)
    torch.library.register_vmap(_OP, _batch, lib=library)


_libraries: list[torch.library.Library] = []  # an op lives as long as its library


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    arrays, ctx.function, ctx.name = inputs
    ctx.save_for_backward(*arrays)
    ctx.outputs = [_aval(t) for t in output]


def _backward(ctx: Any, gradients: list[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], None, None]:
    arrays = list(ctx.saved_tensors)
    wanted = tuple(i for i, t in enumerate(arrays) if t.is_floating_point() or t.is_complex())
    flat = _table.flats[ctx.function]
    derived = (*flat.derived, ("vjp", wanted, len(arrays)))
    number = _table.number(dataclasses.replace(flat, derived=derived))
    given = [
        torch.zeros(shape, dtype=dtype, device=arrays[0].device) if g is None else g
        for g, (shape, dtype) in zip(gradients, ctx.outputs, strict=True)
    ]
    made = iter(torch.ops.torchtpu.jax_call([*arrays, *given], number, f"{ctx.name}_backward"))
    return [next(made) if i in wanted else None for i in range(len(arrays))], None, None


def _batch(info: Any, in_dims: Any, arrays: list[torch.Tensor], function: int, name: str) -> tuple[Any, Any]:
    dims = tuple(in_dims[0])
    flat = _table.flats[function]
    derived = (*flat.derived, ("vmap", dims, info.batch_size))
    number = _table.number(dataclasses.replace(flat, derived=derived))
    made = torch.ops.torchtpu.jax_call(arrays, number, name)
    return made, [0] * len(made)
