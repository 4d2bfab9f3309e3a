"""Rules on primitives compute from padded arrays what the data alone would give, whatever the padding is."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from torchtpu.runtime.ir.checked import expression
from torchtpu.runtime.ir.program import PaddedExtent
from torchtpu.runtime.padding import evaluate
from torchtpu.runtime.padding.layout import is_zero, value_of
from torchtpu.runtime.padding.refusals import Refused

ROOM = 8
SURPLUS = {"f": (np.nan, np.inf, -1e30, 1e30, 0.5), "i": (3, -1, 2**30, -(2**31)), "b": (True, False), "u": (3, 2**31)}


def check(function: Callable[..., Any], arrays: list[np.ndarray], axes: list[set[int]]) -> None:
    """Compares what the function makes of arrays whose axes are longer with what it makes of the arrays themselves."""
    sizes = list(dict.fromkeys(a.shape[k] for a, own in zip(arrays, axes, strict=True) for k in sorted(own)))
    names = dict(zip(sizes, "abcdefgh", strict=False))
    symbols = evaluate.Symbols([(2, ROOM, ROOM) for _ in sizes])
    dims = [
        tuple(names[n] if k in own else n for k, n in enumerate(a.shape)) for a, own in zip(arrays, axes, strict=True)
    ]

    def flat(*given: Any) -> list[Any]:
        made: list[Any] = jax.tree.leaves(function(*given))
        return made

    def padded(*given: Any) -> list[Any]:
        return symbols.evaluate(flat, [PaddedExtent(d, d) for d in dims], given, [])

    counts = [np.int64(n) for n in sizes]
    run = jax.jit(padded).lower(*longer(arrays, axes, 0), *counts).compile()
    expected = [np.asarray(e) for e in flat(*map(jnp.asarray, arrays))]
    for surplus in range(5):
        made = run(*longer(arrays, axes, surplus), *counts)
        for f, e in zip(made, expected, strict=True):
            np.testing.assert_allclose(np.asarray(f)[tuple(map(slice, e.shape))], e, 2e-5, 2e-5)


def longer(arrays: list[np.ndarray], axes: list[set[int]], surplus: int) -> list[np.ndarray]:
    """The arrays as the first elements of longer ones."""
    found = []
    for array, own in zip(arrays, axes, strict=True):
        kinds = SURPLUS[array.dtype.kind]
        shape = [ROOM if k in own else n for k, n in enumerate(array.shape)]
        padded = np.full(shape, kinds[surplus % len(kinds)]).astype(array.dtype)
        padded[tuple(map(slice, array.shape))] = array
        found.append(padded)
    return found


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).randn(*shape).astype(np.float32)


def ints(most: int, *shape: int, seed: int = 1) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, most, shape).astype(np.int32)


X = floats(5, 4, 3)
SQUARE = floats(3, 4, 4) + 4 * np.eye(4, dtype=np.float32)
IMAGE, KERNEL = floats(3, 2, 5, 7), floats(4, 2, 3, 3, seed=2)


def take_rows(x: Any, i: Any) -> Any:
    return jnp.take(x, i, axis=0)


def convolve(x: Any, w: Any, **options: Any) -> Any:
    options = {"window_strides": (1, 1), "padding": ((1, 1), (1, 1)), **options}
    return lax.conv_general_dilated(x, w, **options)


def looped(x: Any) -> Any:
    return lax.while_loop(lambda s: s[0] < s[1].shape[0], lambda s: (s[0] + 1, s[1] * 1.5), (jnp.int32(0), x))[1]


CASES: dict[str, tuple[Callable[..., Any], list[np.ndarray]]] = {
    "elementwise": (lambda x: jnp.tanh(x) * 2 + jnp.exp(x), [X]),
    "two": (lambda x, y: x * y + jnp.where(x > y, x, -y), [X, floats(5, 4, 3, seed=3)]),
    "broadcast": (lambda x: jnp.broadcast_to(x[None], (2, *x.shape)) + x.sum(1, keepdims=True), [X]),
    "iota": (lambda x: x + lax.broadcasted_iota(jnp.float32, x.shape, 0) * x.shape[0], [X]),
    "number of elements": (lambda x: x.sum() / x.size, [X]),
    **{
        f"{name} {axis}": (functools.partial(getattr(jnp, name), axis=axis), [X])
        for name in ("sum", "prod", "max", "min", "argmax", "argmin", "mean", "var", "any", "all")
        for axis in (0, 1, 2, None)
    },
    **{
        f"{name} {axis} {backward}": (
            functools.partial(getattr(lax, name), axis=axis, reverse=backward), [X]
        )
        for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp") for axis in (0, 2)
        for backward in (False, True)
    },
    "integers": (lambda i: (i.max(0), i.min(1), i.argmax(), i.sum()), [ints(9, 5, 4)]),
    "reduce by": (
        lambda x: lax.reduce(x, np.float32(0), lambda a, b: a + b * 1, (0, 2)), [X]
    ),
    "reshape": (lambda x: x.reshape(-1, x.shape[2]) * 2, [X]),
    "flat": (lambda x: x.reshape(-1) * 2, [X]),
    "split in two": (
        lambda x: x.reshape(x.shape[0], 2, 2, x.shape[2]).transpose(1, 0, 2, 3).reshape(2, -1), [X]
    ),
    "transpose": (lambda x: x.transpose(2, 0, 1) + 1, [X]),
    "flip": (lambda x: (jnp.flip(x, 0), jnp.flip(x, (1, 2))), [X]),
    "concatenate": (lambda x: (jnp.concatenate([x, x * 2, x[:1]], 0), jnp.concatenate([x[:, :1], x], 1)), [X]),
    "stack": (lambda x: jnp.stack([x, x + 1], 1), [X]),
    "tile": (lambda x: jnp.tile(x, (2, 1, 3)), [X]),
    "pad": (lambda x: jnp.pad(x, ((1, 2), (0, 1), (2, 0)), constant_values=7).sum(0), [X]),
    "negative pad": (lambda x: lax.pad(x, np.float32(1), ((-1, 2, 0), (1, -1, 0), (0, 0, 1))), [X]),
    "slice": (lambda x: (x[1:], x[:-1, 1:], x[::2], x[-1], x[:, :, -2:]), [X]),
    "dynamic_slice": (
        lambda x, i: lax.dynamic_slice(x, (i[0], 0, i[1] - 9), (2, x.shape[1], 2)), [X, np.array([9, 1], np.int32)]
    ),
    "dynamic_update_slice": (
        lambda x, y, i: lax.dynamic_update_slice(x, y, (i[0], 0, 0)),
        [X, floats(2, 4, 3, seed=4), np.array([4, 1], np.int32)],
    ),
    "dot": (lambda x, y: (x @ y, y @ x, x @ y @ x), [floats(5, 4), floats(4, 5, seed=5)]),
    "batched dot": (lambda x: jnp.einsum("btd,bsd->bts", x, x), [X]),
    "sort": (lambda x: (jnp.sort(x, 0), jnp.argsort(x, 1), jnp.sort(x, 2)), [X]),
    "sort with NaN": (lambda x: jnp.sort(jnp.where(x > 0, x, jnp.nan), 0), [X]),
    "top_k": (lambda x: lax.top_k(x, 2), [X]),
    "top_k of half": (lambda x: lax.top_k(jnp.moveaxis(x, 0, -1), (x.shape[0] + 1) // 2), [X]),
    "top_k of all": (lambda x: lax.top_k(jnp.moveaxis(x, 0, -1), x.shape[0]), [X]),
    "top_k of negative NaN": (lambda x: lax.top_k(jnp.where(x > 2, x, -jnp.abs(jnp.float32(jnp.nan))), 2), [X]),
    "top_k of the least integers": (lambda x: lax.top_k(jnp.where(x > 2, 1, jnp.iinfo(jnp.int32).min), 2), [X]),
    "reduce_window": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 1), "VALID"), [floats(3, 5, 7)]
    ),
    "reduce_window of sums": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 2), (1, 2, 1), ((0, 0), (1, 1), (0, 1))), [floats(3, 5, 7)]
    ),
    "max pool backward": (
        jax.grad(lambda x: (lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 1), "VALID") ** 2).sum()),
        [floats(3, 5, 7)],
    ),
    "convolution": (convolve, [IMAGE, KERNEL]),
    "convolution with steps": (
        lambda x, w: convolve(x, w, window_strides=(2, 1), rhs_dilation=(1, 2)), [IMAGE, KERNEL]
    ),
    "transposed convolution": (lambda x, w: convolve(x, w, lhs_dilation=(2, 2)), [IMAGE, KERNEL]),
    "convolution of groups": (
        lambda x, w: convolve(x, w, feature_group_count=2), [IMAGE, floats(4, 1, 3, 3, seed=2)]
    ),
    "convolution backward": (jax.grad(lambda x, w: (convolve(x, w) ** 2).sum(), (0, 1)), [IMAGE, KERNEL]),
    "gather": (take_rows, [floats(5, 4), ints(5, 7)]),
    "gather outside": (lambda x, i: x.at[i].get(mode="fill", fill_value=9), [floats(5, 4), ints(12, 7)]),
    "gather clamped": (lambda x, i: x.at[i].get(mode="clip"), [floats(5, 4), ints(12, 7) - 2]),
    "gather promised": (lambda x, i: x.at[:, i].get(mode="promise_in_bounds"), [floats(5, 4), ints(4, 7)]),
    "gather of both": (lambda x, i: jnp.take_along_axis(x, i, 1), [floats(5, 4), ints(4, 5, 3)]),
    "gather of points": (lambda x, i: x[i, i], [floats(5, 4), ints(4, 7)]),
    **{
        f"scatter {name} {mode}": (
            lambda x, i, y, name=name, mode=mode: getattr(x.at[i], name)(y, mode=mode),
            [floats(5, 4), ints(5, 7) if name != "set" else np.array([4, 2, 0], np.int32),
             floats(7 if name != "set" else 3, 4, seed=6)],
        )
        for name in ("add", "max", "min", "multiply", "set") for mode in ("drop", "clip", "promise_in_bounds")
    },
    "scatter outside": (lambda x, i, y: x.at[i].add(y), [floats(5, 4), ints(12, 7), floats(7, 4, seed=6)]),
    "scatter outside clamped": (
        lambda x, i, y: x.at[i].add(y, mode="clip"), [floats(5, 4), ints(12, 7), floats(7, 4, seed=6)]
    ),
    "scan": (lambda x: lax.scan(lambda c, row: (c + row.sum(), c * row), 0.0, x), [floats(5, 4)]),
    "scan backwards": (
        lambda x: lax.scan(lambda c, row: (c + row, c.sum()), x[0] * 0, x, reverse=True), [floats(5, 4)]
    ),
    "while": (looped, [floats(5, 4)]),
    "cond": (lambda x: lax.cond(x.sum() > 0, lambda x: x * 2, lambda x: jnp.cumsum(x, 0), x), [floats(5, 4)]),
    "cholesky": (lambda x: jnp.linalg.cholesky(x @ x.mT), [SQUARE]),
    "solve": (lambda x: lax.linalg.triangular_solve(x, x * 2, left_side=True, lower=True), [SQUARE]),
    "solve for columns": (
        lambda x, y: lax.linalg.triangular_solve(x + 9 * jnp.eye(4), y, left_side=True),
        [floats(3, 4, 4), floats(3, 4, 5)],
    ),
    "solve for rows": (
        lambda x, y: lax.linalg.triangular_solve(x + 9 * jnp.eye(4), y, transpose_a=True),
        [floats(3, 4, 4), floats(3, 5, 4)],
    ),
    "qr": (jnp.linalg.qr, [SQUARE]),
    "lu": (lax.linalg.lu, [SQUARE]),
    "pivots": (lambda x: lax.linalg.lu_pivots_to_permutation(lax.linalg.lu(x)[1], x.shape[-1]), [SQUARE]),
    "reflectors": (lambda x: lax.linalg.householder_product(x, x[:, 0]), [SQUARE]),
    "fft": (lambda x: jnp.abs(jnp.fft.fft(x)), [SQUARE]),
    "softmax": (lambda x: (jax.nn.softmax(x, 0), jax.nn.log_softmax(x, -1), jax.nn.logsumexp(x, 1)), [X]),
    "erf_inv": (lambda x: lax.erf_inv(jnp.tanh(x)) + lax.lgamma(x * x + 1), [X]),
    "random bits": (
        lambda x, k: lax.rng_bit_generator(
            k, (x.shape[0] * x.shape[1],), jnp.uint32, algorithm=lax.RandomAlgorithm.RNG_THREE_FRY
        )[1].reshape(x.shape),
        [floats(5, 3), np.array([3, 4, 5, 6], np.uint32)],
    ),
    "uniform": (
        lambda x, k: jax.random.uniform(jax.random.wrap_key_data(k, impl="threefry2x32"), x.shape) + x,
        [floats(5, 4), np.array([3, 4], np.uint32)],
    ),
    "integer overflow of the surplus": (lambda i: (i * i + i).sum(0), [ints(9, 5, 4)]),
}  # fmt: skip

# What a rule does not know: sizes that are not to change there.
REFUSED = {
    ("solve for columns", 4), ("solve for rows", 4), ("qr", 4), ("reflectors", 4), ("fft", 4),
    ("convolution of groups", 4), ("convolution backward", 3), ("random bits", 4),
}  # fmt: skip


def cases(pairs: int) -> Iterator[Any]:
    """The sizes that change together: each alone, and pairs of them."""
    for name, (_, arrays) in CASES.items():
        sizes = sorted({n for a in arrays for n in a.shape if n > 2})
        for chosen in [*((n,) for n in sizes), *itertools.islice(itertools.combinations(sizes, 2), pairs)]:
            yield pytest.param(name, chosen, id=f"{name} {chosen}")


def check_case(name: str, sizes: tuple[int, ...]) -> None:
    function, arrays = CASES[name]
    axes = [{k for k, n in enumerate(a.shape) if n in sizes} for a in arrays]
    with jax.threefry_partitionable(True):
        if any((name, n) in REFUSED for n in sizes):
            with pytest.raises((Refused, ValueError, TypeError, NotImplementedError, AssertionError)):
                check(function, arrays, axes)
        else:
            check(function, arrays, axes)


@pytest.mark.parametrize(("name", "sizes"), list(cases(0)))
def test_a_rule_reads_nothing_but_what_counts(name: str, sizes: tuple[int, ...]) -> None:
    check_case(name, sizes)


@pytest.mark.timeout(300)
def test_a_rule_hides_what_xla_never_ends_with() -> None:
    with jax.enable_x64(True):
        x = np.linspace(1, 3, 20).reshape(5, 4)
        check(lambda a: (lax.igamma(a, a), lax.igammac(a, a)), [x], [{0}])


def test_comparisons_that_sizes_decide_are_noted_and_no_others() -> None:
    symbols, watched = evaluate.Symbols([(2, 99, 128)] * 2), evaluate.shape_poly._DimExpr.__eq__
    evaluate.Symbols([(2, 99, 128)])
    assert evaluate.shape_poly._DimExpr.__eq__ is watched, "once: jax's own comparisons are told by who calls"
    a, b = symbols.sizes("ab")

    def compare() -> list[Any]:
        assert a != b and a not in (7, 8) and a != 9
        return []

    symbols.trace(
        lambda x, y: [x @ y, jnp.concatenate([x.T, y], 0)],
        [jax.ShapeDtypeStruct(s, "float32") for s in ((a, b), (b, a))],
    )
    assert not symbols.unequal()
    symbols.trace(compare, [])
    assert set(symbols.unequal()) == {"- b + a", "a - 7", "a - 8", "a - 9"}
    symbols.trace(lambda: [jnp.zeros(a * b)] if a * a == 2 * a + b else [], [])
    assert "a^2 - b - 2*a" in {expression(each) for each in symbols.unequal()}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", ["a + -1*b", "- c + a + 8", "a^2 + -4*b"])
def test_that_sizes_were_taken_for_equal_can_be_read_from_the_store(text: str) -> None:
    condition = expression(is_zero(text))
    for values in ({"a": 4, "b": 4, "c": 12}, {"a": 5, "b": 4, "c": 12}, {"a": 2, "b": 9, "c": 1}):
        assert (value_of(condition, values) == 0) == (value_of(text, values) != 0)


def test_a_comparison_that_jax_does_not_end_is_undecided() -> None:
    a, b, c, d = evaluate.Symbols([(2, 32, 32), (2, 32, 32), (2, 7, 32), (2, 7, 32)]).sizes("abcd")
    pixels = (a - 2 * c + 6) * (b - 2 * d + 6) * (a + b - c - d + 3) * (a - d + 1)
    with pytest.raises(jax.errors.InconclusiveDimensionOperation):
        bool(pixels <= 64)


@pytest.mark.full
@pytest.mark.parametrize(("name", "sizes"), [case for case in cases(3) if len(case.values[1]) > 1])
def test_a_rule_reads_nothing_but_what_counts_where_two_sizes_change(name: str, sizes: tuple[int, ...]) -> None:
    check_case(name, sizes)
