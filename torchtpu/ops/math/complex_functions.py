"""Complex functions as C's library computes them, infinities and NaN included.

XLA's own are right for what is finite; what C's Annex G and PyTorch's division say of the rest is written out here.
"""

from __future__ import annotations

import math
from typing import Any

from torchtpu.ops.registry import jnp, lax


def is_complex(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.complexfloating))


def exp(x: Any) -> Any:
    """C's cexp."""
    a, b = jnp.real(x), jnp.imag(x)
    size = jnp.exp(a)
    angle = jnp.where(jnp.isinf(b) & jnp.isinf(a), 0, b)  # of infinity and 0: their signs are what is left
    turned = jnp.where(jnp.isnan(b) & (a == -jnp.inf), 0, angle)
    real, imag = size * jnp.cos(turned), size * jnp.sin(turned)
    real = jnp.where(jnp.isnan(b) & (a == jnp.inf), jnp.inf, real)
    no_number = jnp.where(a == -jnp.inf, jnp.copysign(jnp.zeros_like(b), b), jnp.nan)
    imag = jnp.where(jnp.isinf(a) & ~jnp.isfinite(b), no_number, imag)
    return lax.complex(real, jnp.where(b == 0, b, imag))


def log(x: Any) -> Any:
    """C's clog."""
    a, b = jnp.real(x), jnp.imag(x)
    found = jnp.log(x)
    radius = jnp.where(jnp.isinf(a) | jnp.isinf(b), jnp.inf, jnp.real(found))
    return lax.complex(radius, jnp.arctan2(b, a))


def exp2(x: Any) -> Any:
    """2 ** x as PyTorch computes it."""
    return exp(_scaled(x, math.log(2)))


def log2(x: Any) -> Any:
    """log(x) of base 2, by C's clog."""
    return _scaled(log(x), 1 / math.log(2))


def log10(x: Any) -> Any:
    """log(x) of base 10, by C's clog."""
    return _scaled(log(x), 1 / math.log(10))


def _scaled(x: Any, by: float) -> Any:
    return lax.complex(jnp.real(x) * by, jnp.imag(x) * by)


def sqrt(x: Any) -> Any:
    """C's csqrt."""
    a, b = jnp.real(x), jnp.imag(x)
    found = jnp.sqrt(x)
    infinite = jnp.full_like(a, jnp.inf)
    real, imag = jnp.real(found), jnp.copysign(jnp.imag(found), b)
    real = jnp.where(a == -jnp.inf, jnp.where(jnp.isnan(b), jnp.nan, 0), real)
    imag = jnp.where(a == -jnp.inf, jnp.copysign(infinite, b), imag)
    real = jnp.where((a == jnp.inf) | jnp.isinf(b), jnp.inf, real)
    imag = jnp.where(a == jnp.inf, jnp.where(jnp.isnan(b), jnp.nan, jnp.copysign(jnp.zeros_like(b), b)), imag)
    return lax.complex(real, jnp.where(jnp.isinf(b), b, imag))


def arccos(x: Any) -> Any:
    """C's cacos."""
    return _mirrored(jnp.arccos, x)


def arccosh(x: Any) -> Any:
    """C's cacosh."""
    return _mirrored(jnp.arccosh, x)


def arcsin(x: Any) -> Any:
    """C's casin."""
    return _mirrored(jnp.arcsin, x, is_odd=True)


def arcsinh(x: Any) -> Any:
    """C's casinh."""
    return _mirrored(jnp.arcsinh, x, is_odd=True)


def arctan(x: Any) -> Any:
    """C's catan."""
    return _mirrored(jnp.arctan, x, is_odd=True)


def arctanh(x: Any) -> Any:
    """C's catanh."""
    return _mirrored(jnp.arctanh, x, is_odd=True)


def _mirrored(function: Any, x: Any, *, is_odd: bool = False) -> Any:
    """function(x) by its value above the real axis and, if it is odd, right of the imaginary one. On a branch cut the
    sign of a zero says on which side of it x lies, which XLA does not ask."""
    a, b = jnp.real(x), jnp.imag(x)
    found = function(lax.complex(jnp.abs(a) if is_odd else a, jnp.abs(b)))
    real, imag = jnp.real(found), jnp.imag(found)
    if is_odd:  # each part has the sign of its own
        return lax.complex(jnp.copysign(real, a), jnp.copysign(imag, b))
    return lax.complex(real, jnp.where(jnp.signbit(b), -imag, imag))


def reciprocal(x: Any) -> Any:
    """1 / x as PyTorch divides: by the larger of the two parts."""
    a, b = jnp.real(x), jnp.imag(x)
    is_real = jnp.abs(a) >= jnp.abs(b)
    ratio = jnp.where(is_real, b / a, a / b)
    scale = 1 / jnp.where(is_real, a + b * ratio, b + a * ratio)
    real, imag = jnp.where(is_real, scale, ratio * scale), jnp.where(is_real, -ratio * scale, -scale)
    is_zero = (a == 0) & (b == 0)
    return lax.complex(jnp.where(is_zero, jnp.inf, real), jnp.where(is_zero, jnp.nan, imag))


def power(x: Any, y: Any) -> Any:
    """C's cpow, which is exp(y log x)."""
    x, y = jnp.broadcast_arrays(x, y)
    found = jnp.power(x, y)
    parts = (jnp.real(x), jnp.imag(x), jnp.real(y), jnp.imag(y), jnp.real(found), jnp.imag(found))
    is_finite = (x != 0) & jnp.stack([jnp.isfinite(part) for part in parts]).all(0)
    return jnp.where(is_finite, found, exp(_product(y, log(x))))


def _product(x: Any, y: Any) -> Any:
    """C's product: where both parts are NaN and a factor is infinite, so is the product."""
    a, b, c, d = jnp.real(x), jnp.imag(x), jnp.real(y), jnp.imag(y)
    products = a * c, b * d, a * d, b * c
    real, imag = products[0] - products[1], products[2] + products[3]
    left, right = jnp.isinf(a) | jnp.isinf(b), jnp.isinf(c) | jnp.isinf(d)
    overflows = ~(left | right) & jnp.stack([jnp.isinf(p) for p in products]).any(0)

    def boxed(part: Any, own: Any, other: Any) -> Any:
        part = jnp.where(own, jnp.copysign(jnp.isinf(part).astype(part.dtype), part), part)
        return jnp.where((other | overflows) & jnp.isnan(part), jnp.copysign(jnp.zeros_like(part), part), part)

    a, b, c, d = boxed(a, left, right), boxed(b, left, right), boxed(c, right, left), boxed(d, right, left)
    recovers = jnp.isnan(real) & jnp.isnan(imag) & (left | right | overflows)
    real = jnp.where(recovers, jnp.inf * (a * c - b * d), real)
    return lax.complex(real, jnp.where(recovers, jnp.inf * (a * d + b * c), imag))
