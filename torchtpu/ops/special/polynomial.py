"""Orthogonal polynomials at points x, of degrees n."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchtpu.ops.registry import jnp, lax, pointwise


def _polynomial(name: str, value: Callable[[Any, Any], Any]) -> None:
    names = [f"special_{name}", f"special_{name}.n_scalar", f"special_{name}.x_scalar"]
    # The degrees of all decide how long the loop runs.
    pointwise(*names, promote="int_to_float", elementwise=False)(
        lambda x, n: value(*jnp.broadcast_arrays(x, _degree(n)))
    )


def _degree(n: Any) -> Any:
    """The degree rounded toward 0; a NaN counts as negative, where every polynomial is 0."""
    return jnp.where(jnp.isnan(n), -1, jnp.trunc(n))


def _recur(n: Any, p0: Any, p1: Any, step: Callable[[Any, Any, Any], Any], known: Any) -> Any:
    """p_n from p_{k+1} = step(k, p_k, p_{k-1}), elementwise; runs to the largest degree that is not `known`."""
    last = jnp.where(known, 0, n)

    def more(state: Any) -> Any:
        k, _, now, _ = state
        return ((k < last) & ~jnp.isnan(now)).any()

    def advance(state: Any) -> Any:
        k, before, now, found = state
        following = step(k, now, before)
        return k + 1, now, following, jnp.where((k < last) & ~jnp.isnan(now), following, found)

    one = jnp.ones((), n.dtype)
    found = lax.while_loop(more, advance, (one, p0, p1, p1))[3]
    return jnp.where(n < 0, 0, jnp.where(n == 0, p0, found))


def _difference(a: Any, b: Any, c: Any, d: Any) -> Any:
    """a * b - c * d with products that do not round, where the terms all but cancel.

    PyTorch's kernels have this from a fused multiply-add.  Here each factor is two of half its digits, whose products
    are exact (Dekker, A floating-point technique for extending the available precision, 1971).
    """
    info = jnp.finfo(a.dtype)
    digits = (info.nmant + 1) // 2

    def halves(v: Any) -> Any:
        head = lax.reduce_precision(v, info.nexp, digits - 1)
        return head, v - head

    def product(v: Any, w: Any) -> Any:
        (v1, v2), (w1, w2) = halves(v), halves(w)
        return v1 * w1, v1 * w2 + v2 * w1 + v2 * w2

    (ab, rest_ab), (cd, rest_cd) = product(a, b), product(c, d)
    made = ab - cd
    return jnp.where(jnp.isfinite(made), made + (rest_ab - rest_cd), made)


def _sign(n: Any) -> Any:
    return jnp.where(n % 2 == 0, 1, -1)


def _chebyshev(kind: str, from_degree: int) -> Callable[[Any, Any], Any]:
    """The four kinds: a recurrence outside of (-1, 1) and for low degrees, a ratio of sines and cosines inside."""

    def value(x: Any, n: Any) -> Any:
        angle = jnp.arccos(jnp.clip(x, -1, 1))
        sin, cos = jnp.sin, jnp.cos
        first, wave, at_one, at_minus_one = {
            "t": (x, lambda: cos(n * angle), 1, _sign(n)),
            "u": (2 * x, lambda: sin((n + 1) * angle) / sin(angle), n + 1, _sign(n) * (n + 1)),
            "v": (2 * x - 1, lambda: cos((n + 0.5) * angle) / cos(angle / 2), 1, _sign(n) * (2 * n + 1)),
            "w": (2 * x + 1, lambda: sin((n + 0.5) * angle) / sin(angle / 2), 2 * n + 1, _sign(n)),
        }[kind]
        inside = (jnp.abs(x) < 1) & (n > from_degree)
        edge = jnp.abs(x) == 1
        step = lambda _, now, before: _difference(2 * x, now, jnp.ones_like(x), before)
        made = _recur(n, jnp.ones_like(x), first, step, inside | edge)
        made = jnp.where(inside, wave(), made)
        return jnp.where(edge & (n >= 0), jnp.where(x > 0, at_one, at_minus_one), made)

    return value


def _shift(value: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, n: value(x + x - 1, n)


for _kind, _plain, _shifted in (("t", 6, 6), ("u", 8, 6), ("v", 8, 6), ("w", 8, 4)):
    _polynomial(f"chebyshev_polynomial_{_kind}", _chebyshev(_kind, _plain))
    _polynomial(f"shifted_chebyshev_polynomial_{_kind}", _shift(_chebyshev(_kind, _shifted)))


def _hermite(scale: int) -> Callable[[Any, Any], Any]:
    def value(x: Any, n: Any) -> Any:
        # PyTorch gives up above these degrees.
        too_high = n > (512 if x.dtype == jnp.float64 else 128)
        n = jnp.where(jnp.isinf(n), -1, n) if scale == 2 else n
        step = lambda k, now, before: scale * _difference(x, now, k, before)
        return jnp.where(too_high & (n > 0), jnp.nan, _recur(n, jnp.ones_like(x), scale * x, step, too_high))

    return value


def _laguerre(x: Any, n: Any) -> Any:
    step = lambda k, now, before: _difference(2 * k + 1 - x, now, k, before) / (k + 1)
    made = _recur(n, jnp.ones_like(x), 1 - x, step, x == 0)
    return jnp.where((x == 0) & (n >= 0), 1, made)


def _legendre(x: Any, n: Any) -> Any:
    step = lambda k, now, before: _difference((2 * k + 1) * x, now, k, before) / (k + 1)
    edge = jnp.abs(x) == 1
    made = _recur(n, jnp.ones_like(x), x, step, edge)
    return jnp.where(edge & (n >= 0), jnp.where(x > 0, 1, _sign(n)), made)


_polynomial("hermite_polynomial_h", _hermite(2))
_polynomial("hermite_polynomial_he", _hermite(1))
_polynomial("laguerre_polynomial_l", _laguerre)
_polynomial("legendre_polynomial_p", _legendre)
