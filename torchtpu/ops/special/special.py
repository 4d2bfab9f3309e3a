"""Error, gamma and related functions of each element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torchtpu.ops.registry import jax, jnp, lax, lowering, pointwise

# Error functions and the normal distribution


@pointwise("erf", promote="int_to_float")
def erf(self):
    return lax.erf(self)


@pointwise("erfc", promote="int_to_float")
def erfc(self):
    return lax.erfc(self)


@pointwise("erfinv", promote="int_to_float")
def erfinv(self):
    return lax.erf_inv(self)


@pointwise("special_erfcx", promote="int_to_float")
def special_erfcx(self):
    return jax.scipy.special.erfcx(self)


@pointwise("special_ndtri", promote="int_to_float")
def special_ndtri(self):
    return jax.scipy.special.ndtri(self)


@pointwise("special_log_ndtr", promote="int_to_float")
def special_log_ndtr(self):
    scaled = self * math.sqrt(0.5)
    tail = jnp.log(jax.scipy.special.erfcx(-scaled) / 2) - scaled * scaled
    return jnp.where(self < -1, tail, jnp.log1p(-lax.erfc(scaled) / 2))


# Entropy


@pointwise("special_entr", promote="int_to_float")
def special_entr(self):
    return jnp.where(self > 0, -self * jnp.log(self), jnp.where(self == 0, 0, jnp.where(self < 0, -jnp.inf, self)))


@pointwise("special_xlog1py", "special_xlog1py.other_scalar", "special_xlog1py.self_scalar", promote="int_to_float")
def special_xlog1py(self, other):
    return jnp.where(jnp.isnan(other), other, jnp.where(self == 0, 0, self * jnp.log1p(other)))


# Gamma functions


@pointwise("lgamma", promote="int_to_float")
def lgamma(self):
    return lax.lgamma(self)


@pointwise("digamma", promote="int_to_float")
def digamma(self):
    return _digamma(self)


def _digamma(x: Any) -> Any:
    # PyTorch puts an infinity of the opposite sign at the pole 0, NaN at the other poles.
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), lax.digamma(x))


@lowering("polygamma")
def polygamma(n, self):
    if not isinstance(n, int):  # polygamma_
        n, self = self, n
    dtype = jnp.promote_types(self.dtype, jnp.float32) if jnp.issubdtype(self.dtype, jnp.floating) else jnp.float32
    x = self.astype(dtype)
    if n == 0:
        return _digamma(x)
    if n == 1:
        # Reflected: zeta takes no negative x.
        reflected = (math.pi / jnp.sin(math.pi * x)) ** 2 - lax.zeta(jnp.full_like(x, 2), 1 - x)
        value = jnp.where(x < 0.5, reflected, lax.zeta(jnp.full_like(x, 2), x))
        return jnp.where(x == jnp.inf, 0, value)
    return (-1) ** (n + 1) * math.factorial(n) * _zeta(jnp.full_like(x, n + 1), x)


@pointwise(
    "special_zeta", "special_zeta.other_scalar", "special_zeta.self_scalar", promote="int_to_float", elementwise=False
)
def special_zeta(self, other):
    return _zeta(*jnp.broadcast_arrays(self, other))


def _zeta(x: Any, q: Any) -> Any:
    # XLA differs at the poles q = 0, -1, ..., where x is infinite, and where q is so negative that its first terms do
    # not reach positive numbers: these are added up here, at most 65536 of them, each in a pair with a positive one
    # that is about as far from 0, which it cancels where powers are odd.
    part = q - jnp.floor(q)
    steps = jnp.where((q < 0) & jnp.isfinite(q), jnp.minimum(-jnp.floor(q), 65536), 0)

    def more(state: Any) -> Any:
        count, _ = state
        return (count < steps).any()

    def add(state: Any) -> Any:
        count, total = state
        shift = jnp.asarray(count, q.dtype)
        pair = (part + shift) ** -x + (part - 1 - shift) ** -x
        return count + 1, total + jnp.where(count < steps, pair, 0)

    _, total = lax.while_loop(more, add, (0, jnp.zeros_like(q)))
    rest = jnp.where(steps > 0, part + steps, q)
    far = jnp.where(q == 1, 1, jnp.where(q < 1, jnp.inf, jnp.nan))
    value = jnp.where(x == jnp.inf, far, total + lax.zeta(x, rest))
    value = jnp.where((q <= 0) & (q == jnp.floor(q)), jnp.inf, value)
    return jnp.where(x < 1, jnp.nan, jnp.where(x == 1, jnp.inf, value))


@pointwise("igamma", promote="int_to_float", elementwise=False)
def igamma(self, other):
    return _incomplete_gamma(lax.igamma, self, other, 1)


@pointwise("igammac", promote="int_to_float", elementwise=False)
def igammac(self, other):
    return _incomplete_gamma(lax.igammac, self, other, 0)


# Of Temme's expansion: for each power of 1 / a the coefficients of the powers of eta.
_TEMME = (
    (-1 / 3, 1 / 12, -2 / 135, 1 / 864, 1 / 2835, -139 / 777600, 1 / 25515, -571 / 261273600, -281 / 151559100),
    (-1 / 540, -1 / 288, 1 / 378, -77 / 77760, 1 / 4860),
    (25 / 6048, -139 / 51840, 1 / 1296),
    (101 / 155520,),
)


def _of_large_shape(a: Any, x: Any, sign: int) -> Any:
    """The incomplete gamma function of a large a (DLMF 8.12.3); the lower one for a `sign` of 1."""
    mu = (x - a) / a
    half = mu - jnp.log1p(mu)
    near = mu**2 * _polynomial(mu, [(-1) ** k / (k + 2) for k in range(12)])
    half = jnp.where(abs(mu) < 0.05, near, half)
    eta = jnp.sign(mu) * jnp.sqrt(2 * half)
    first = jnp.where(abs(eta) < 0.2, _polynomial(eta, _TEMME[0]), 1 / mu - 1 / eta)
    series = first + _polynomial(1 / a, [0, *(_polynomial(eta, row) for row in _TEMME[1:])])
    weight = jnp.exp(-a * half) / jnp.sqrt(2 * math.pi * a)
    rest = jnp.where(weight == 0, 0, weight * series)  # far from a the series is infinite
    return 0.5 * lax.erfc(-sign * eta * jnp.sqrt(a / 2)) - sign * rest


def _polynomial(x: Any, coefficients: Sequence[Any]) -> Any:
    total = 0
    for coefficient in reversed(coefficients):
        total = total * x + coefficient
    return total


def _incomplete_gamma(function: Any, a: Any, x: Any, at_infinity: int) -> Any:
    a, x = jnp.broadcast_arrays(a, x)
    large = a >= (1e3 if a.dtype == jnp.float64 else 100)
    inside = (a > 0) & (x > 0) & ~large & jnp.isfinite(x)
    value = function(jnp.where(inside, a, 1), jnp.where(inside, x, 1))
    # XLA's series takes more terms than it has patience for, and has no end where a + 1 is a.
    value = jnp.where(large, _of_large_shape(a, x, 2 * at_infinity - 1), value)
    # A zero or infinite argument puts all the mass on one side; both zero or both infinite has no limit.
    value = jnp.where((x == jnp.inf) | (a == 0), at_infinity, value)
    value = jnp.where((x == 0) | (a == jnp.inf), 1 - at_infinity, value)
    undefined = (a < 0) | (x < 0) | jnp.isnan(a) | jnp.isnan(x) | ((a == 0) & (x == 0)) | (jnp.isinf(a) & jnp.isinf(x))
    return jnp.where(undefined, jnp.nan, value)
