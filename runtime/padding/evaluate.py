"""Evaluates a jaxpr that was traced with symbolic sizes on arrays that are longer than those sizes.

Invariant: of every array the elements count whose indices are below the size of each dimension; the others, the
surplus, are any bits at all. A rule makes what counts of its results from what counts of its arguments, and reads
nothing else. So the sum of `x: f32[a]`, given as f32[32], is the sum of `where(iota < a, x, 0)`, while `x + 1` needs no
rule. Sizes are i32 numbers at run time.

A primitive without a rule, or a case that its rule does not know, raises `Refused`.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from torchtpu.runtime.device.jax_modules import core, export, jax, jnp, lax, prng, shape_poly, shape_poly_decision
from torchtpu.runtime.ir.program import PaddedExtent

from .layout import Bound, is_zero, marked, values_of
from .refusals import Refused

_MOST_COMPARED = 100_000  # values of variables for which two sizes are compared
_MOST_ELEMENTS = 2**31 - 1  # places are counted in i32
_MOST_STEPS = 2000  # of a comparison of two sizes: some tenth of a second


class Sizes:
    """What the variables of symbolic sizes are: `bounds` when the program is made, `values` when it runs."""

    def __init__(self, bounds: Mapping[str, Bound], values: Mapping[str, Any]) -> None:
        self._capacities = {name: bound.capacity for name, bound in bounds.items()}
        self._values = values
        self._known: dict[str, Any] = {}

    def capacity(self, dim: Any) -> int:
        """How long a dimension of this size is in memory; Refused where the size has no upper bound."""
        if core.is_constant_dim(dim):
            return int(dim)
        least, most = shape_poly._bounds_decision(dim, shape_poly.BoundsPrecision.BEST)
        if most == math.inf or least < 0:
            raise Refused(f"the size {dim} has no bounds")
        terms = [(term, factor) for term, factor in dim._sorted_terms if not term.is_constant]
        if all(factor > 0 for _, factor in terms):
            most = max(most, sum(factor * int(term.evaluate(self._capacities, dim.scope)) for term, factor in terms))
        return int(most)

    def shape(self, dims: Sequence[Any]) -> tuple[int, ...]:
        """The capacities of the dimensions."""
        shape = tuple(map(self.capacity, dims))
        if math.prod(shape) > _MOST_ELEMENTS:
            raise Refused(f"an array of {math.prod(shape)} elements")
        return shape

    def of(self, dim: Any) -> Any:
        """The size: an int, or an i32 that is known at run time."""
        if core.is_constant_dim(dim):
            return int(dim)
        key = str(dim)
        if key not in self._known:
            self._known[key] = jnp.asarray(dim._evaluate(self._values), jnp.int32)
        return self._known[key]

    def inside(self) -> Sizes:
        """The same for a branch, or for the body of a loop: what is computed there is not known outside."""
        made = copy.copy(self)
        made._known = dict(self._known)
        return made


class Symbols:
    """The variables of an op's `Padding`: expressions of them, from text, and what is traced with such sizes."""

    def __init__(self, bounds: Sequence[Sequence[int]]) -> None:
        _watch_sizes()
        self._bounds = {name: Bound(*bound) for name, bound in zip("abcdefgh", bounds, strict=False)}
        limits = [f"{n} >= {b.least}" for n, b in self._bounds.items()]
        limits += [f"{n} <= {b.most}" for n, b in self._bounds.items()]
        self._scope = export.SymbolicScope(limits)
        self._scope.ranges = self._bounds
        self._undecided = _Undecided(self._scope)
        self._taken: set[str] = set()  # for other than 0, of sizes that are to be equal
        self._sizes: dict[str, Any] = {}  # by their texts, which take long to read

    def size(self, text: int | str) -> Any:
        """A size with its variables."""
        if not isinstance(text, str):
            return text
        if text not in self._sizes:
            self._sizes[text] = export.symbolic_shape(text, scope=self._scope)[0]
        return self._sizes[text]

    def sizes(self, texts: Sequence[int | str]) -> tuple[Any, ...]:
        """Sizes with their variables."""
        return tuple(map(self.size, texts))

    def unequal(self) -> tuple[str, ...]:
        """The expressions that the trace took for other than 0 without knowing."""
        return (*self._undecided.texts(), *sorted(self._taken))

    def trace(self, function: Callable[..., list[Any]], structs: Sequence[Any]) -> Any:
        """The jaxpr of a function of arrays with symbolic sizes."""
        with self._undecided:
            return jax.make_jaxpr(function)(*structs)

    def evaluate(
        self,
        function: Callable[..., list[Any]],
        parts: Sequence[PaddedExtent | None],
        given: Sequence[Any],
        shapes: Sequence[Sequence[int]],
    ) -> list[Any]:
        """The function of symbolic sizes on longer arrays, of which the last are what the variables are; its first
        results have these shapes in memory."""
        arrays, counts = given[: len(parts)], given[len(parts) :]
        structs = [
            jax.ShapeDtypeStruct(a.shape if p is None else self.sizes(p.shape), a.dtype, weak_type=a.weak_type)
            for a, p in zip(arrays, parts, strict=True)
        ]
        closed = self.trace(function, structs)
        values = {name: count.astype(jnp.int32) for name, count in zip(self._bounds, counts, strict=True)}
        sizes = Sizes(self._bounds, values)
        fitted = [fit(a, sizes.shape(s.shape)) for a, s in zip(arrays, structs, strict=True)]
        made = evaluate(closed, fitted, sizes)
        return [fit(m, shape) for m, shape in zip(made, shapes, strict=False)] + made[len(shapes) :]

    def read(self, array: Any, part: PaddedExtent) -> Any:
        """What a tensor takes of its array."""
        sizes = self.sizes(part.sizes)
        if part.places:
            first, *steps = map(core.dimension_as_value, self.sizes(part.places))
            place = jnp.asarray(first, jnp.int32)
            for axis, step in enumerate(steps):
                place = place + lax.broadcasted_iota(jnp.int32, sizes, axis) * jnp.asarray(step, jnp.int32)
            return jnp.take(lax.reshape(array, (math.prod(array.shape),)), place, mode="clip")
        if part.dims is None:
            return array
        ranges = [(self.size(start), self.size(count), step) for start, count, step in part.ranges]
        rows = self._rows_of_run(array.shape, *ranges[0][:2]) if part.order else None
        if rows is not None:
            for axis, (row, count) in enumerate(rows):
                array = lax.slice_in_dim(array, row, row + count, axis=axis)
            ranges = []
        else:
            array = lax.reshape(array, self.sizes(part.factors))
        for axis, (start, count, step) in enumerate(ranges):
            if step == 1 and not core.is_constant_dim(start) and core.is_constant_dim(count):
                array = lax.dynamic_slice_in_dim(array, core.dimension_as_value(start), count, axis)
                continue
            try:
                array = lax.slice_in_dim(array, start, start + (count - 1) * step + 1, step, axis)
            except core.InconclusiveDimensionOperation:  # that it ends within the array is known of the sizes that came
                places = core.dimension_as_value(start) + step * lax.iota(jnp.int32, count)
                array = jnp.take(array, places, axis, mode="clip")
        if part.order:
            array = lax.reshape(array, tuple(sizes[axis] for axis in part.order))
            return lax.transpose(array, [part.order.index(axis) for axis in range(len(sizes))])
        order = [k for dim in part.dims for k in dim]
        used = sorted(order)
        array = lax.reshape(array, tuple(ranges[k][1] for k in used))
        array = lax.transpose(array, [used.index(k) for k in order])
        array = lax.reshape(array, tuple(math.prod(ranges[k][1] for k in dim) for dim in part.dims))
        return jnp.broadcast_to(array, sizes)

    def _rows_of_run(self, shape: Sequence[Any], start: Any, count: Any) -> list[tuple[int, int]] | None:
        """The rows of the leading dimensions, the first of each and how many, that are `count` elements from `start` on
        of an array of `shape`; None where these are no whole rows, or at places that are not known."""
        some = {name: bound.least for name, bound in self._bounds.items()}
        rows: list[tuple[int, int]] = []
        for axis, size in enumerate(shape):
            if core.definitely_equal(start, 0) and core.definitely_equal(count, math.prod(shape[axis:])):
                return rows
            row = math.prod(shape[axis + 1 :])
            length = _evaluated(row, some)
            if not core.is_constant_dim(size) or not length:
                return None
            first, number = _evaluated(start, some) // length, _evaluated(count, some) // length
            start = start - first * row
            if core.definitely_equal(start, 0) and core.definitely_equal(count, number * row):
                return [*rows, (first, number)]
            rows.append((first, 1))
        return None

    def write(self, old: Any, new: Any, part: PaddedExtent) -> Any:
        """The array with `new` where a tensor takes it; what is not taken stays as it was."""
        shape, factors = self.sizes(part.shape), self.sizes(part.factors)
        if part.dims is None:
            return new
        if part.order:
            raise Refused("a write to a part of what lies one after the other")
        ranges = [(self.size(start), self.size(count), step) for start, count, step in part.ranges]
        order = [k for dim in part.dims for k in dim]
        if any(not dim and not _is_one(size) for dim, size in zip(part.dims, new.shape, strict=True)):
            raise Refused("a write to an expanded tensor")
        new = lax.reshape(new, tuple(ranges[k][1] for k in order))
        new = lax.transpose(new, [order.index(k) for k in sorted(order)])
        new = lax.reshape(new, tuple(count for _, count, _ in ranges))
        if all(taken == size for (_, taken, _), size in zip(part.ranges, part.factors, strict=True)):
            return lax.reshape(new, shape)
        if old is None:  # what was not written is any number
            old = jnp.zeros(shape, new.dtype)
        if old.shape != shape or any(step != 1 for _, _, step in ranges):
            raise Refused("a write with a step, or into an array of another shape")
        starts = [jnp.asarray(core.dimension_as_value(start), jnp.int32) for start, _, _ in ranges]
        old = lax.reshape(old, factors)
        try:
            made = lax.dynamic_update_slice(old, new, starts)
        except core.InconclusiveDimensionOperation:  # as where it is read
            inside = jnp.asarray(True)
            for axis, (_, count, _) in enumerate(ranges):
                if part.ranges[axis][1] != part.factors[axis]:
                    new = jnp.take(new, lax.iota(jnp.int32, factors[axis]) - starts[axis], axis, mode="clip")
                    places = lax.broadcasted_iota(jnp.int32, factors, axis) - starts[axis]
                    inside &= (places >= 0) & (places < core.dimension_as_value(count))
            made = jnp.where(inside, new, old)
        return lax.reshape(made, shape)

    def checked(self, array: Any, sizes: Sequence[Any]) -> Any:
        """An array that a lowering made, if it has these sizes. Where that hangs on the variables, it is taken for so:
        what was traced is not to be run where it is not.
        """
        made = jnp.asarray(array)
        if len(made.shape) != len(sizes) or not all(map(self._may_be_equal, made.shape, sizes)):
            raise Refused(f"the lowering returned shape {made.shape} instead of {tuple(sizes)}")
        return made

    def _may_be_equal(self, made: Any, size: Any) -> bool:
        if self._are_equal(made, size):
            return True
        if core.is_constant_dim(made) or core.is_constant_dim(size):
            return False
        self._taken.add(is_zero(str(made - size)))
        return True

    def _are_equal(self, one: Any, other: Any) -> bool:
        """Whether two sizes are equal whatever the variables are."""
        if core.definitely_equal(one, other):
            return True
        difference = one - other
        names = sorted(_variables(difference))
        ranges = [range(self._bounds[n].least, self._bounds[n].most + 1) for n in names]
        if math.prod(map(len, ranges)) > _MOST_COMPARED:
            return False
        values = dict(zip(names, np.meshgrid(*(np.asarray(r, np.int64) for r in ranges), sparse=True), strict=True))
        return not np.any(values_of(str(difference), values))


def _variables(dim: Any) -> set[str]:
    return set() if core.is_constant_dim(dim) else set(dim._get_vars())


def _evaluated(dim: Any, values: Mapping[str, int]) -> int:
    return int(dim) if core.is_constant_dim(dim) else int(dim._evaluate(values))


class _Undecided:
    """Notes which sizes a lowering compared, in a scope, and took for different because nothing is known of them: jax
    has it so. Whoever runs what was traced has to see to it that they are. What jax itself does with two sizes of which
    it knows nothing is right where they are equal too: that is what it promises of what it exports.
    """

    _active = threading.local()

    def __init__(self, scope: Any) -> None:
        self._scope = scope
        self._pairs: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self._outer = getattr(self._active, "of", None)
        self._active.of = self

    def __exit__(self, *_: object) -> None:
        self._active.of = self._outer

    @classmethod
    def note(cls, one: Any, other: Any) -> None:
        """Two sizes were taken for different."""
        found = getattr(cls._active, "of", None)
        if found is not None and found._scope is one.scope and getattr(other, "scope", one.scope) is one.scope:
            found._pairs.append((one, other))

    def texts(self) -> tuple[str, ...]:
        """The differences that may be 0."""
        found = set()
        for one, other in self._pairs:
            difference = one - other
            least, most = shape_poly._bounds_decision(difference, shape_poly.BoundsPrecision.BEST)
            if least <= 0 <= most:
                found.add(str(difference))
        return tuple(sorted(found))


def _bounds_at_corners(dim: Any) -> tuple[int, int] | None:
    """The least and the most of an expression that is linear in each of its variables, as `a*b - a` is: it has them
    where each variable is the least or the most that it may be. None of others, as of `a*a` or `a // 2`."""
    ranges = getattr(getattr(dim, "scope", None), "ranges", None)
    if ranges is None:
        return None
    terms: list[tuple[int, list[str]]] = []
    for term, factor in dim._sorted_terms:
        names = [each.var for each, exponent in term._factors if exponent == 1]
        if None in names or len(names) < len(term._factors):
            return None
        terms.append((factor, names))
    variables = sorted({name for _, names in terms for name in names})
    ends = itertools.product(*((ranges[name].least, ranges[name].most) for name in variables))
    corners = [dict(zip(variables, end, strict=True)) for end in ends]
    values = [sum(factor * math.prod(map(corner.__getitem__, names)) for factor, names in terms) for corner in corners]
    return min(values), max(values)


def _marked(dim: Any, spec: str) -> str:
    is_lowerings = sys._getframe(1).f_globals.get("__name__", "").startswith("torchtpu.ops.")
    return marked(str(dim)) if is_lowerings else format(str(dim), spec)


@functools.cache
def _watch_sizes() -> None:
    """Has comparisons of jax's symbolic sizes noted from now on, and marked what lowerings say of them in messages. No
    comparison takes long: jax eliminates term by term, in steps that multiply with the terms. Of products of sizes it
    knows little: that `a*b - a` is not negative."""
    is_equal = shape_poly._DimExpr.__eq__

    def compare(one: Any, other: Any) -> bool:
        found: bool = is_equal(one, other)
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if not found and not caller.startswith("jax") and (core.is_constant_dim(other) or isinstance(other, type(one))):
            _Undecided.note(one, other)
        return found

    def noted_is_equal(one: Any, other: Any) -> bool:
        return compare(one, other)

    def noted_is_unequal(one: Any, other: Any) -> bool:
        return not compare(one, other)

    decision = shape_poly_decision._DecisionByElimination
    find_bounds = decision._bounds_for_sorted_terms

    def find_bounds_soon(self: Any, *given: Any) -> tuple[float, float]:
        self._steps = getattr(self, "_steps", 0) + 1
        bounds: tuple[float, float] = find_bounds(self, *given) if self._steps < _MOST_STEPS else (-math.inf, math.inf)
        return bounds

    decide = decision.bounds

    def decide_at_corners(self: Any, dim: Any, *given: Any, **named: Any) -> tuple[float, float]:
        bounds: tuple[float, float] = _bounds_at_corners(dim) or decide(self, dim, *given, **named)
        return bounds

    decision._bounds_for_sorted_terms = find_bounds_soon
    decision.bounds = decide_at_corners
    shape_poly._DimExpr.__eq__ = noted_is_equal
    shape_poly._DimExpr.__ne__ = noted_is_unequal
    shape_poly._DimExpr.__format__ = _marked


def evaluate(closed: Any, arrays: Sequence[Any], sizes: Sizes) -> list[Any]:
    """What a closed jaxpr makes of these arrays, which have the capacities of its arguments' sizes."""
    values: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return jnp.asarray(atom.val, atom.aval.dtype) if isinstance(atom, core.Literal) else values[atom]

    jaxpr = closed.jaxpr
    values.update(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, arrays, strict=True))
    for equation in jaxpr.eqns:
        made = _apply(_Equation(equation, sizes), [read(atom) for atom in equation.invars])
        for var, array in zip(equation.outvars, made, strict=True):
            values[var] = fit(array, sizes.shape(var.aval.shape))
    return [read(atom) for atom in jaxpr.outvars]


def fit(array: Any, shape: Sequence[int]) -> Any:
    """The array with more or less surplus."""
    for axis, size in enumerate(shape):
        if array.shape[axis] > size:
            array = lax.slice_in_dim(array, 0, size, axis=axis)
    if array.shape != tuple(shape):
        zero = jnp.zeros((), array.dtype)
        array = lax.pad(array, zero, [(0, n - m, 0) for n, m in zip(shape, array.shape, strict=True)])
    return array


class _Equation(NamedTuple):
    """One application of a primitive, with symbolic sizes."""

    equation: Any
    sizes: Sizes

    @property
    def name(self) -> str:
        name: str = self.equation.primitive.name
        return name

    @property
    def params(self) -> dict[str, Any]:
        params: dict[str, Any] = self.equation.params
        return params

    def dims(self, argument: int) -> tuple[Any, ...]:
        """The symbolic sizes of an argument."""
        return tuple(self.equation.invars[argument].aval.shape)

    def made(self, result: int = 0) -> tuple[Any, ...]:
        """The symbolic sizes of a result."""
        return tuple(self.equation.outvars[result].aval.shape)

    def shape(self, result: int = 0) -> tuple[int, ...]:
        """The capacities of a result."""
        return self.sizes.shape(self.made(result))

    def bind(self, *arrays: Any, **changed: Any) -> Any:
        """The primitive on other arrays, with other parameters."""
        primitive = self.equation.primitive
        with self.equation.ctx.manager:
            return primitive.bind(*arrays, **primitive.get_bind_params({**self.params, **changed}))

    def fill(self, array: Any, argument: int, axes: Sequence[int], value: Any) -> Any:
        """An argument with `value` for the surplus along these axes."""
        inside = self.inside(array.shape, self.dims(argument), axes)
        return array if inside is None else jnp.where(inside, array, jnp.asarray(value, array.dtype))

    def inside(self, shape: Sequence[int], dims: Sequence[Any], axes: Sequence[int]) -> Any:
        """Where an array counts, along these axes; None where it has no surplus there."""
        found = None
        for axis in axes:
            if not core.is_constant_dim(dims[axis]):
                here = lax.broadcasted_iota(jnp.int32, shape, axis) < self.sizes.of(dims[axis])
                found = here if found is None else found & here
        return found


Rule = Callable[[_Equation, list[Any]], Any]
_RULES: dict[str, Rule] = {}


def rules() -> Mapping[str, Rule]:
    """The rules, by primitive."""
    return _RULES


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def _changing(dims: Sequence[Any]) -> list[int]:
    """The axes whose size is not known."""
    return [axis for axis, dim in enumerate(dims) if not core.is_constant_dim(dim)]


def _apply(equation: _Equation, arrays: list[Any]) -> Sequence[Any]:
    rule = _RULES.get(equation.name)
    atoms = [*equation.equation.invars, *equation.equation.outvars]
    is_known = all(core.is_constant_shape(getattr(atom.aval, "shape", ())) for atom in atoms)
    if is_known and not _has_jaxpr(equation.params) and equation.name != "dim_as_value":
        made = equation.bind(*arrays)
    elif rule is None:
        raise Refused(f"the primitive {equation.name} has no rule")
    else:
        made = rule(equation, arrays)
    return made if isinstance(made, (list, tuple)) else [made]


def _has_jaxpr(params: Mapping[str, Any]) -> bool:
    return any(
        isinstance(item, (core.Jaxpr, core.ClosedJaxpr))
        for value in params.values()
        for item in (value if isinstance(value, (list, tuple)) else (value,))
    )


def _lowest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf
    return False if dtype == jnp.bool_ else jnp.iinfo(dtype).min


def _least(dtype: Any) -> Any:
    """What `top_k`, which orders by bits, has behind everything else: a negative NaN with all bits set."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return _lowest(dtype)
    return np.full((), -1, f"int{8 * dtype.itemsize}").view(dtype)


def _highest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return np.inf
    return True if dtype == jnp.bool_ else jnp.iinfo(dtype).max


Neutral = float | bool | Callable[[Any], Any]


def _neutral(value: Neutral, dtype: Any) -> Any:
    return value(dtype) if callable(value) else value


# ---- primitives that compute each element from those at the same place


_ELEMENTWISE = (
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type",
    "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2",
    "expand_dims", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log",
    "log1p", "logistic", "lt", "lt_to", "max", "min", "mul", "mulhi", "ne", "neg", "nextafter", "not",
    "optimization_barrier", "or", "polygamma", "population_count", "pow", "random_unwrap", "random_wrap", "real",
    "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "squeeze", "stop_gradient", "sub", "tan", "tanh",
    "threefry2x32", "transpose", "xor", "zeta",
)  # fmt: skip


@_rule(*_ELEMENTWISE)
def _elementwise(equation: _Equation, arrays: list[Any]) -> Any:
    if equation.name == "bitcast_convert_type" and equation.dims(0) != equation.made():
        raise Refused("a bitcast to another width")
    return equation.bind(*arrays)


@_rule("igamma", "igamma_grad_a", "igammac", "random_gamma_grad", "regularized_incomplete_beta")
def _converge(equation: _Equation, arrays: list[Any]) -> Any:
    """XLA goes on until each element has converged, for some numbers without an end."""
    return equation.bind(*(equation.fill(a, k, _changing(equation.dims(k)), 1) for k, a in enumerate(arrays)))


# ---- shapes


@_rule("broadcast_in_dim")
def _broadcast(equation: _Equation, arrays: list[Any]) -> Any:
    return lax.broadcast_in_dim(arrays[0], equation.shape(), equation.params["broadcast_dimensions"])


@_rule("iota")
def _iota(equation: _Equation, arrays: list[Any]) -> Any:
    return lax.broadcasted_iota(equation.params["dtype"], equation.shape(), equation.params["dimension"])


@_rule("dim_as_value")
def _dim_as_value(equation: _Equation, arrays: list[Any]) -> Any:
    return jnp.asarray(equation.sizes.of(equation.params["dim"]), equation.equation.outvars[0].aval.dtype)


@_rule("reshape")
def _reshape(equation: _Equation, arrays: list[Any]) -> Any:
    (array,), given, made = arrays, equation.dims(0), equation.made()
    if equation.params["dimensions"] is not None:
        raise Refused("a reshape that transposes")
    kept, wanted = ([dim for dim in dims if not _is_one(dim)] for dims in (given, made))
    if kept == wanted:
        return lax.reshape(array, equation.shape())
    # Leading and trailing dimensions that stay have no part in it.
    first, last = 0, 0
    fewest = min(len(given), len(made))
    while first < fewest and given[first] == made[first]:
        first += 1
    while last < fewest - first and given[-1 - last] == made[-1 - last]:
        last += 1
    old, new = given[first : len(given) - last], made[first : len(made) - last]
    shape = equation.shape()
    lead, tail = shape[:first], shape[len(shape) - last :]
    if not _changing(old) and not _changing(new):
        return lax.reshape(array, shape)
    rows, places = math.prod(equation.sizes.shape(old)), equation.sizes.shape(new)
    if _is_outermost(old) and _is_outermost(new):
        # Only the outermost dimension has a surplus: what counts comes first in memory.
        flat = lax.reshape(array, (*lead, rows, *tail))
        return lax.reshape(fit(flat, (*lead, math.prod(places), *tail)), shape)
    width = math.gcd(_width(equation.sizes, old), _width(equation.sizes, new))  # is moved together
    moved = _moved(equation.sizes, _in_rows(old, width), _in_rows(new, width))
    flat = lax.reshape(array, (*lead, rows // width, width, *tail))
    return lax.reshape(jnp.take(flat, moved.reshape(-1), axis=first, mode="clip"), shape)


def _is_one(dim: Any) -> bool:
    return core.is_constant_dim(dim) and int(dim) == 1


def _is_outermost(dims: Sequence[Any]) -> bool:
    long = [dim for dim in dims if not _is_one(dim)]
    return not _changing(long[1:])


def _width(sizes: Sizes, dims: Sequence[Any]) -> int:
    """How many elements lie one after the other, whatever the sizes are."""
    width = 1
    for dim in reversed(dims):
        if not core.is_constant_dim(dim):
            factors = [factor for _, factor in dim._sorted_terms]
            return width * math.gcd(*factors, sizes.capacity(dim))
        width *= int(dim)
    return width


def _in_rows(dims: Sequence[Any], width: int) -> tuple[Any, ...]:
    """Dimensions of rows of `width` elements, where so many lie one after the other."""
    outer, row = list(dims), 1
    while outer and core.is_constant_dim(outer[-1]):
        row *= int(outer.pop())
    if row % width:
        row = outer.pop() * row
    return (*outer, row // width)


def _moved(sizes: Sizes, old: Sequence[Any], new: Sequence[Any]) -> Any:
    """For each element of dimensions `new`, its place in memory among dimensions `old` of the same elements."""
    number = _count(sizes, new)
    place, step = jnp.zeros_like(number), 1
    for dim in reversed(old):
        size = jnp.maximum(sizes.of(dim), 1)
        place += number % size * step
        number //= size
        step *= sizes.capacity(dim)
    return place


def _count(sizes: Sizes, dims: Sequence[Any], dtype: Any = np.int32) -> Any:
    """The number of each element that counts, in row-major order."""
    shape, number = sizes.shape(dims), jnp.zeros((), dtype)
    for axis, dim in enumerate(dims):
        number = number * jnp.asarray(sizes.of(dim), dtype) + lax.broadcasted_iota(dtype, shape, axis)
    return number


@_rule("rev")
def _reverse(equation: _Equation, arrays: list[Any]) -> Any:
    (array,) = arrays
    for axis in equation.params["dimensions"]:
        size = equation.sizes.of(equation.dims(0)[axis])
        if isinstance(size, int):
            array = lax.rev(array, (axis,))
        else:
            array = jnp.take(array, size - 1 - jnp.arange(array.shape[axis]), axis=axis, mode="clip")
    return array


@_rule("concatenate")
def _concatenate(equation: _Equation, arrays: list[Any]) -> Any:
    axis = equation.params["dimension"]
    return _join(equation, arrays, [equation.dims(k)[axis] for k in range(len(arrays))], axis)


def _join(equation: _Equation, arrays: Sequence[Any], parts: Sequence[Any], axis: int) -> Any:
    if not _changing(parts):
        return lax.concatenate(arrays, axis)
    shape = list(equation.shape())
    if _changing(parts[1:]):
        shape[axis] = sum(array.shape[axis] for array in arrays)  # so that none is moved back to fit
    made = fit(arrays[0], shape)  # the others are written over its surplus
    place = equation.sizes.of(parts[0])
    for array, part in zip(arrays[1:], parts[1:], strict=True):
        made = lax.dynamic_update_slice_in_dim(made, array, place, axis)
        place = place + equation.sizes.of(part)
    return made


@_rule("split")
def _split(equation: _Equation, arrays: list[Any]) -> Any:
    axis, place, made = equation.params["axis"], 0, []
    for number, size in enumerate(equation.params["sizes"]):
        made.append(_take(equation.sizes, arrays[0], {axis: (place, 1)}, equation.made(number)))
        place = place + equation.sizes.of(size)
    return made


@_rule("stack")
def _stack(equation: _Equation, arrays: list[Any]) -> Any:
    return jnp.stack(arrays, equation.params["axis"])


@_rule("unstack")
def _unstack(equation: _Equation, arrays: list[Any]) -> Any:
    axis = equation.params["axis"]
    if _changing(equation.dims(0)[axis : axis + 1]):
        raise Refused("unstack of a changing size")
    return [lax.index_in_dim(arrays[0], k, axis, keepdims=False) for k in range(arrays[0].shape[axis])]


@_rule("tile")
def _tile(equation: _Equation, arrays: list[Any]) -> Any:
    (array,) = arrays
    for axis, (dim, made) in enumerate(zip(equation.dims(0), equation.made(), strict=True)):
        if core.is_constant_dim(dim) and not _is_one(dim) and core.is_constant_dim(made):
            array = jnp.concatenate([array] * (int(made) // int(dim)), axis)
        elif dim is not made and dim != made:
            place = jnp.arange(equation.sizes.capacity(made), dtype=jnp.int32) % equation.sizes.of(dim)
            array = jnp.take(array, place, axis=axis, mode="clip")
    return array


@_rule("pad")
def _pad(equation: _Equation, arrays: list[Any]) -> Any:
    array, value = arrays
    dims, made = equation.dims(0), equation.made()
    array = equation.fill(array, 0, _changing(dims), value)
    for axis, (low, _, inner) in enumerate(equation.params["padding_config"]):
        shape = list(array.shape)
        longest = shape[axis] + max(shape[axis] - 1, 0) * inner
        wanted = equation.sizes.capacity(made[axis])
        if core.is_constant_dim(low):
            around = [(0, 0, 0)] * len(shape)
            around[axis] = (int(low), wanted - int(low) - longest, inner)
            array = lax.pad(array, value, around)
            # A negative pad behind takes away some of what counts, which is surplus then: nothing to do.
        elif inner:
            raise Refused("a pad between elements behind a changing size")
        else:
            place = jnp.arange(wanted, dtype=jnp.int32) - equation.sizes.of(low)
            inside = (place >= 0) & (place < equation.sizes.of(dims[axis]))
            array = jnp.take(array, place, axis=axis, mode="clip")
            array = jnp.where(lax.broadcast_in_dim(inside, array.shape, (axis,)), array, value)
    return array


def _take(sizes: Sizes, array: Any, starts: Mapping[int, tuple[Any, int]], made: Sequence[Any]) -> Any:
    """Elements `start, start + step, ...` along some axes; what counts of the result is inside what counts."""
    for axis, (start, step) in starts.items():
        count, size = sizes.capacity(made[axis]), array.shape[axis]
        if isinstance(start, int):
            count = min(count, max(0, -(-(size - start) // step)))
            array = lax.slice_in_dim(array, start, start + (count - 1) * step + 1 if count else start, step, axis)
        elif core.is_constant_dim(made[axis]) and step == 1:
            array = lax.dynamic_slice_in_dim(array, start, count, axis)
        else:
            place = start + step * jnp.arange(count, dtype=jnp.int32)
            array = jnp.take(array, place, axis=axis, mode="clip")
    return array


@_rule("slice")
def _slice(equation: _Equation, arrays: list[Any]) -> Any:
    steps = equation.params["strides"] or (1,) * len(equation.dims(0))
    if _changing(steps):
        raise Refused("a slice with a changing step")
    starts = {
        axis: (equation.sizes.of(start), int(step))
        for axis, (start, step) in enumerate(zip(equation.params["start_indices"], steps, strict=True))
    }
    return _take(equation.sizes, arrays[0], starts, equation.made())


def _clamped(equation: _Equation, starts: Sequence[Any], whole: Sequence[Any], part: Sequence[Any]) -> list[Any]:
    of = equation.sizes.of
    clamped = [
        jnp.clip(start, jnp.asarray(0, start.dtype), jnp.asarray(of(n) - of(m), start.dtype))
        for start, n, m in zip(starts, whole, part, strict=True)
    ]
    return [start.astype(jnp.int32) for start in clamped]


@_rule("dynamic_slice")
def _dynamic_slice(equation: _Equation, arrays: list[Any]) -> Any:
    array, *starts = arrays
    clamped = _clamped(equation, starts, equation.dims(0), equation.made())
    return _take(equation.sizes, array, {axis: (start, 1) for axis, start in enumerate(clamped)}, equation.made())


@_rule("dynamic_update_slice")
def _dynamic_update_slice(equation: _Equation, arrays: list[Any]) -> Any:
    array, new, *starts = arrays
    part = equation.dims(1)
    clamped = _clamped(equation, starts, equation.dims(0), part)
    if not _changing(part):
        return lax.dynamic_update_slice(array, new, clamped)
    inside = None
    for axis, start in enumerate(clamped):
        place = jnp.arange(array.shape[axis], dtype=jnp.int32) - start
        new = jnp.take(new, place, axis=axis, mode="clip")
        here = (place >= 0) & (place < equation.sizes.of(part[axis]))
        here = lax.broadcast_in_dim(here, array.shape, (axis,))
        inside = here if inside is None else inside & here
    return jnp.where(inside, new, array)


# ---- reductions


_REDUCED: dict[str, Neutral] = {
    "reduce_sum": 0, "reduce_prod": 1, "reduce_max": _lowest, "reduce_min": _highest, "reduce_or": False,
    "reduce_and": True, "reduce_xor": 0, "argmax": _lowest, "argmin": _highest,
}  # fmt: skip
_CUMULATIVE: dict[str, Neutral] = {
    "cumsum": 0, "cumprod": 1, "cummax": _lowest, "cummin": _highest, "cumlogsumexp": -np.inf,
}  # fmt: skip


@_rule(*_REDUCED)
def _reduce(equation: _Equation, arrays: list[Any]) -> Any:
    neutral = _neutral(_REDUCED[equation.name], arrays[0].dtype)
    return equation.bind(equation.fill(arrays[0], 0, equation.params["axes"], neutral))


@_rule(*_CUMULATIVE)
def _cumulate(equation: _Equation, arrays: list[Any]) -> Any:
    neutral = _neutral(_CUMULATIVE[equation.name], arrays[0].dtype)
    return equation.bind(equation.fill(arrays[0], 0, [equation.params["axis"]], neutral))


@_rule("reduce")
def _reduce_by(equation: _Equation, arrays: list[Any]) -> Any:
    half = len(arrays) // 2
    axes = equation.params["dimensions"]
    filled = [equation.fill(array, k, axes, arrays[half + k]) for k, array in enumerate(arrays[:half])]
    return equation.bind(*filled, *arrays[half:])


@_rule("dot_general")
def _dot(equation: _Equation, arrays: list[Any]) -> Any:
    (left, right), _ = equation.params["dimension_numbers"]
    filled = equation.fill(arrays[0], 0, left, 0), equation.fill(arrays[1], 1, right, 0)
    return equation.bind(*filled)


@_rule("sort")
def _sort(equation: _Equation, arrays: list[Any]) -> Any:
    axis, keys = equation.params["dimension"], equation.params["num_keys"]
    dims = equation.dims(0)
    if not _changing(dims[axis : axis + 1]):
        return equation.bind(*arrays)
    outside = lax.broadcasted_iota(jnp.int32, arrays[0].shape, axis) >= equation.sizes.of(dims[axis])
    made = lax.sort((outside, *arrays), dimension=axis, is_stable=equation.params["is_stable"], num_keys=keys + 1)
    return made[1:]


@_rule("top_k")
def _top_k(equation: _Equation, arrays: list[Any]) -> Any:
    axis = equation.params.get("axis", len(equation.dims(0)) - 1)
    count, array = equation.params["k"], equation.fill(arrays[0], 0, [axis], _least(arrays[0].dtype))
    if core.is_constant_dim(count):
        return equation.bind(array)
    made = equation.bind(array, k=min(equation.sizes.capacity(count), array.shape[axis]))
    return [fit(each, equation.shape(number)) for number, each in enumerate(made)]


# ---- windows


_WINDOWS: dict[str, Neutral] = {
    "reduce_window_sum": 0, "reduce_window_max": _lowest, "reduce_window_min": _highest,
}  # fmt: skip


def _spread(size: int, dilation: int) -> int:
    return max(0, (size - 1) * dilation + 1)


def _around(size: int, inner: int, window: int, step: int, low: int, made: int) -> tuple[int, int]:
    """The padding of a dimension, of which what follows is neutral, that makes at least so many results."""
    return low, max(0, (made - 1) * step + window - low - _spread(size, inner))


@_rule(*_WINDOWS, "reduce_window")
def _reduce_window(equation: _Equation, arrays: list[Any]) -> Any:
    half = (len(arrays) + 1) // 2 if equation.name == "reduce_window" else len(arrays)
    params, made = equation.params, equation.shape()
    filled = []
    for number, array in enumerate(arrays[:half]):
        if equation.name == "reduce_window":
            neutral = arrays[half + number]
        else:
            neutral = _neutral(_WINDOWS[equation.name], array.dtype)
        filled.append(equation.fill(array, number, _changing(equation.dims(number)), neutral))
    return equation.bind(*filled, *arrays[half:], padding=_window_padding(params, arrays[0].shape, made))


def _window_padding(
    params: Mapping[str, Any], shape: Sequence[int], made: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    windows, steps = params["window_dimensions"], params["window_strides"]
    inner, outer = params.get("base_dilation"), params.get("window_dilation")
    padding = []
    for axis, (low, _) in enumerate(params["padding"]):
        if _changing([windows[axis], steps[axis], low]):
            raise Refused("a window of changing size")
        window = _spread(int(windows[axis]), int(outer[axis]) if outer else 1)
        dilation = int(inner[axis]) if inner else 1
        padding.append(_around(shape[axis], dilation, window, int(steps[axis]), int(low), made[axis]))
    return tuple(padding)


@_rule("select_and_gather_add")
def _select_and_gather(equation: _Equation, arrays: list[Any]) -> Any:
    tangents, array = arrays
    axes = _changing(equation.dims(0))
    neutral = _selected_last(equation, array.dtype)
    padding = _window_padding(equation.params, array.shape, equation.shape())
    filled = equation.fill(tangents, 0, axes, 0), equation.fill(array, 1, axes, neutral)
    return equation.bind(*filled, padding=padding)


@_rule("select_and_scatter_add")
def _select_and_scatter(equation: _Equation, arrays: list[Any]) -> Any:
    source, array = arrays
    neutral = _selected_last(equation, array.dtype)
    params = equation.params
    padding = _window_padding(params, array.shape, source.shape)
    source = equation.fill(source, 0, _changing(equation.dims(0)), 0)
    around = zip(array.shape, padding, params["window_dimensions"], params["window_strides"], strict=True)
    source = fit(source, [(n + low + high - window) // step + 1 for n, (low, high), window, step in around])
    return equation.bind(source, equation.fill(array, 1, _changing(equation.dims(1)), neutral), padding=padding)


def _selected_last(equation: _Equation, dtype: Any) -> Any:
    return _lowest(dtype) if "ge" in str(equation.params["select_prim"]) else _highest(dtype)


@_rule("conv_general_dilated")
def _convolve(equation: _Equation, arrays: list[Any]) -> Any:
    params, made = equation.params, equation.shape()
    left, right, out = params["dimension_numbers"]
    if params["batch_group_count"] != 1 and _changing([equation.dims(0)[left[0]]]):
        raise Refused("a convolution of groups of a changing batch")
    if params["feature_group_count"] != 1 and _changing([equation.dims(0)[left[1]], equation.dims(1)[right[0]]]):
        raise Refused("a convolution of changing groups")
    if params["batch_group_count"] != 1 and _changing([equation.dims(1)[right[0]]]):
        raise Refused("a convolution of changing groups")
    image, kernel = equation.fill(arrays[0], 0, left[1:], 0), equation.fill(arrays[1], 1, right[1:], 0)
    padding = []
    for k, (low, _) in enumerate(params["padding"]):
        if _changing([low]):
            raise Refused("a convolution behind a pad of changing size")
        window = _spread(kernel.shape[right[2 + k]], params["rhs_dilation"][k])
        size, step = image.shape[left[2 + k]], params["window_strides"][k]
        padding.append(_around(size, params["lhs_dilation"][k], window, step, int(low), made[out[2 + k]]))
    return equation.bind(image, kernel, padding=tuple(padding))


# ---- indices


@_rule("gather")
def _gather(equation: _Equation, arrays: list[Any]) -> Any:
    array, indices = arrays
    params, dims, windows = equation.params, equation.dims(0), equation.params["slice_sizes"]
    numbers, mode = params["dimension_numbers"], params["mode"]
    shape = equation.sizes.shape(windows)
    if not jnp.issubdtype(indices.dtype, jnp.signedinteger):
        indices = indices.astype(jnp.int64)
    columns = []
    for column, axis in enumerate(numbers.start_index_map):
        place = indices[..., column]
        if _changing([dims[axis], windows[axis]]):
            top = jnp.asarray(equation.sizes.of(dims[axis]) - equation.sizes.of(windows[axis]), place.dtype)
            inside = jnp.clip(place, 0, top)
            if mode == lax.GatherScatterMode.FILL_OR_DROP:
                place = jnp.where(place == inside, place, jnp.asarray(-1, place.dtype))
            else:
                place = inside
            if not core.is_constant_dim(windows[axis]):  # the window may reach over the end of the memory
                array = fit(array, [n + shape[axis] * (k == axis) for k, n in enumerate(array.shape)])
        columns.append(place)
    for axis, window in enumerate(shape):
        if axis not in numbers.start_index_map and window > array.shape[axis]:
            raise Refused("a window longer than the array")
    made = jnp.stack(columns, -1) if columns else indices
    return equation.bind(array, made, slice_sizes=shape)


@_rule("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter_add", "scatter_mul",
       "scatter_min", "scatter_max", "scatter-sub", "scatter_sub")  # fmt: skip
def _scatter(equation: _Equation, arrays: list[Any]) -> Any:
    array, indices, new = arrays
    dims, places, parts = (equation.dims(k) for k in range(3))
    numbers, mode = equation.params["dimension_numbers"], equation.params["mode"]
    if not jnp.issubdtype(indices.dtype, jnp.signedinteger):
        indices = indices.astype(jnp.int64)
    hidden = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    shown = [axis for axis in range(len(dims)) if axis not in hidden]
    windows = dict(zip(shown, numbers.update_window_dims, strict=True))
    outside = None
    columns = []
    for column, axis in enumerate(numbers.scatter_dims_to_operand_dims):
        place = indices[..., column]
        window = parts[windows[axis]] if axis in windows else 1
        if _changing([dims[axis], window]):
            if not core.is_constant_dim(window):
                raise Refused("a scatter of changing windows")
            top = jnp.asarray(equation.sizes.of(dims[axis]) - int(window), place.dtype)
            if mode == lax.GatherScatterMode.FILL_OR_DROP:
                gone = (place < 0) | (place > top)
                outside = gone if outside is None else outside | gone
            else:
                place = jnp.clip(place, 0, top)
        columns.append(place)
    for axis, window in windows.items():
        is_part = axis not in numbers.scatter_dims_to_operand_dims and parts[window] != dims[axis]
        if is_part and _changing([dims[axis], parts[window]]):
            raise Refused("a scatter of a part of a changing size")
    inside = equation.inside(indices.shape, places, _changing(places))
    if inside is not None:
        outside = ~inside[..., 0] if outside is None else outside | ~inside[..., 0]
    if not columns:
        if outside is not None:
            raise Refused("a scatter to one place")
        return equation.bind(array, indices, new)
    made = jnp.stack(columns, -1)
    if outside is None:
        return equation.bind(array, made, new)
    made = jnp.where(outside[..., None], jnp.asarray(-1, made.dtype), made)
    # Where an index was promised to be inside, XLA clamps it: those outside have to be dropped all the same.
    if mode != lax.GatherScatterMode.FILL_OR_DROP:
        made = jnp.where(outside[..., None], made, _clipped(equation, made, array, parts, windows))
    drop = lax.GatherScatterMode.FILL_OR_DROP
    return equation.bind(array, made, new, mode=drop, indices_are_sorted=False, unique_indices=False)


def _clipped(equation: _Equation, indices: Any, array: Any, parts: Sequence[Any], windows: Mapping[int, int]) -> Any:
    """Indices inside the memory, as XLA clamps those that are promised to be inside."""
    columns = []
    for column, axis in enumerate(equation.params["dimension_numbers"].scatter_dims_to_operand_dims):
        window = equation.sizes.capacity(parts[windows[axis]]) if axis in windows else 1
        columns.append(jnp.clip(indices[..., column], 0, array.shape[axis] - window))
    return jnp.stack(columns, -1)


# ---- random numbers


@_rule("rng_bit_generator")
def _random_bits_of_xla(equation: _Equation, arrays: list[Any]) -> Any:
    if len(equation.made(1)) != 1 or equation.params["algorithm"] != lax.RandomAlgorithm.RNG_THREE_FRY:
        raise Refused("random bits that depend on the shape")
    # XLA's ThreeFry gives element i the same bits whatever the length.
    return equation.bind(*arrays, shape=equation.shape(1))


@_rule("iota_2x32_shape")
def _counters(equation: _Equation, arrays: list[Any]) -> Any:
    number = _count(equation.sizes, equation.params["shape"], jnp.uint32)
    return [jnp.zeros_like(number), number]


@_rule("random_bits")
def _random_bits(equation: _Equation, arrays: list[Any]) -> Any:
    if equation.params["bit_width"] != 32 or equation.dims(0):
        raise Refused("random bits of another width or of several keys")
    first, second = jax.random.key_data(arrays[0])
    number = _count(equation.sizes, equation.params["shape"], jnp.uint32)
    keys = jnp.broadcast_to(first, number.shape), jnp.broadcast_to(second, number.shape)
    high, low = prng.threefry2x32.threefry2x32_p.bind(*keys, jnp.zeros_like(number), number)
    return high ^ low


# ---- calls and loops


@_rule("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call",
       "custom_vjp_call", "custom_vjp_call_jaxpr")  # fmt: skip
def _call(equation: _Equation, arrays: list[Any]) -> Any:
    found = (equation.params.get(name) for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"))
    return evaluate(_closed(next(jaxpr for jaxpr in found if jaxpr is not None)), arrays, equation.sizes)


def _closed(jaxpr: Any) -> Any:
    return jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else core.ClosedJaxpr(jaxpr, ())


@_rule("cond")
def _cond(equation: _Equation, arrays: list[Any]) -> Any:
    def branch(jaxpr: Any) -> Callable[..., list[Any]]:
        return lambda *given: evaluate(_closed(jaxpr), given, equation.sizes.inside())

    return lax.switch(arrays[0], [branch(jaxpr) for jaxpr in equation.params["branches"]], *arrays[1:])


@_rule("while")
def _while(equation: _Equation, arrays: list[Any]) -> Any:
    params, sizes = equation.params, equation.sizes
    tests, steps = params["cond_nconsts"], params["body_nconsts"]
    for_test, for_step, state = arrays[:tests], arrays[tests : tests + steps], arrays[tests + steps :]
    if params["cond_jaxpr"].out_avals[0].shape:
        raise Refused("a loop of several")
    return lax.while_loop(
        lambda state: evaluate(params["cond_jaxpr"], [*for_test, *state], sizes.inside())[0],
        lambda state: evaluate(params["body_jaxpr"], [*for_step, *state], sizes.inside()),
        state,
    )


@_rule("scan")
def _scan(equation: _Equation, arrays: list[Any]) -> Any:
    params, sizes, body = equation.params, equation.sizes, equation.params["jaxpr"]
    # What the body is given and makes row by row has one dimension more outside; jax's versions count the rest each
    # in their own way.
    num_carried = sum(v.aval.ndim == a.ndim for v, a in zip(equation.equation.outvars, body.out_avals, strict=True))
    last = sum(v.aval.ndim == a.ndim for v, a in zip(equation.equation.invars, body.in_avals, strict=True))
    first = last - num_carried
    constants, carried, items = arrays[:first], arrays[first:last], arrays[last:]
    rows = [jnp.zeros(equation.shape(k), v.aval.dtype) for k, v in enumerate(equation.equation.outvars)]
    length = sizes.of(params["length"])

    def step(number: Any, state: Any) -> Any:
        carried, rows = state
        place = length - 1 - number if params["reverse"] else number
        taken = [lax.dynamic_index_in_dim(item, place, 0, keepdims=False) for item in items]
        made = evaluate(body, [*constants, *carried, *taken], sizes.inside())
        new = made[len(carried) :]
        return made[: len(carried)], [
            lax.dynamic_update_index_in_dim(r, n, place, 0) for r, n in zip(rows, new, strict=True)
        ]

    state = list(carried), rows[len(carried) :]
    carried, made = lax.fori_loop(jnp.int32(0), jnp.asarray(length, jnp.int32), step, state)
    return [*carried, *made]


# ---- matrices


def _of_matrices(equation: _Equation, arrays: list[Any]) -> Any:
    """Only the batch may change."""
    rank = max(array.ndim for array in arrays)
    for number, array in enumerate(arrays):
        own = array.ndim - rank + 2  # dimensions: 2 of a matrix, 1 of pivots and the like
        if _changing(equation.dims(number)[array.ndim - own :]):
            raise Refused(f"{equation.name} of matrices of changing size")
    return equation.bind(*arrays)


_RULES.update(
    dict.fromkeys(
        ("eig", "eigh", "geqrf", "householder_product", "hessenberg", "ormqr", "qr", "schur", "svd", "tridiagonal",
         "tridiagonal_solve"),
        _of_matrices,
    )
)  # fmt: skip


@_rule("triangular_solve")
def _triangular_solve(equation: _Equation, arrays: list[Any]) -> Any:
    """Each column of the right-hand side, or row where the unknown is on the left, is solved for by itself."""
    given, side = arrays
    axis = side.ndim - (2 if equation.params["left_side"] else 1)
    return equation.bind(_with_identity(equation, given), equation.fill(side, 1, [axis], 0))


@_rule("cholesky", "lu")
def _factored(equation: _Equation, arrays: list[Any]) -> Any:
    """The factors of a matrix with an identity beside it are its own factors with identities beside them."""
    return equation.bind(_with_identity(equation, arrays[0]))


def _with_identity(equation: _Equation, array: Any) -> Any:
    """The first argument, square matrices, with an identity for the surplus."""
    rows, columns = equation.dims(0)[-2:]
    if not _changing((rows, columns)):
        return array
    if str(rows) != str(columns):
        raise Refused(f"{equation.name} of matrices of changing size that are not square")
    inside = equation.inside(array.shape, equation.dims(0), [array.ndim - 2, array.ndim - 1])
    return jnp.where(inside, array, jnp.eye(array.shape[-1], dtype=array.dtype))


@_rule("lu_pivots_to_permutation")
def _permutation(equation: _Equation, arrays: list[Any]) -> Any:
    (pivots,), size = arrays, equation.sizes.capacity(equation.params["permutation_size"])
    inside = equation.inside(pivots.shape, equation.dims(0), [pivots.ndim - 1])
    if inside is not None:
        pivots = jnp.where(inside, pivots, lax.broadcasted_iota(pivots.dtype, pivots.shape, pivots.ndim - 1))
    return equation.bind(pivots, permutation_size=size)


@_rule("fft")
def _fft(equation: _Equation, arrays: list[Any]) -> Any:
    count = len(equation.params["fft_lengths"])
    if _changing(equation.params["fft_lengths"]) or _changing(equation.dims(0)[-count:]):
        raise Refused("a Fourier transform of changing length")
    return equation.bind(*arrays)
