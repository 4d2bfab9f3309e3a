"""In: nothing. Out: the Chebyshev coefficients in torchtpu/ops/special/bessel.py, computed anew with 50 digits.

`python tests/bessel_tables.py` prints them. Each table is the smooth part of a function on a range that is mapped to t
in [-1, 1]; the code that reads the table says how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath
from mpmath import airyai, airybi, besseli, besselj, besselk, bessely, cos, exp, log, pi, sin, sqrt

NODES = 72  # of the interpolation: what it adds to a coefficient is one of place 100 or later, below 1e-40
MOST = 40  # coefficients of a table
UNSEEN = 7e-18  # of the largest coefficient: what float64 does not see


def _phase_parts(t: Any, order: int) -> tuple[Any, Any]:
    """P and Q of x = 8 / near, where t = 2 near^2 - 1: J + iY is sqrt(2 / (pi x)) (P + i near Q) e^(i phase)."""
    near = sqrt((1 + t) / 2)
    x = 8 / near
    phase = x - pi / 4 - order * pi / 2
    j, y = besselj(order, x), bessely(order, x)
    scale = sqrt(pi * x / 2)
    return scale * (j * cos(phase) + y * sin(phase)), scale * (y * cos(phase) - j * sin(phase)) / near


def _small(t: Any) -> Any:
    return sqrt(32 * (1 + t))  # x up to 8


def _y0(t: Any) -> Any:
    x = _small(t)
    return bessely(0, x) - 2 / pi * log(x) * besselj(0, x)


def _y1(t: Any) -> Any:
    x = _small(t)
    return (bessely(1, x) - 2 / pi * (besselj(1, x) * log(x) - 1 / x)) / x


def _k0(t: Any) -> Any:
    x = sqrt(2 * (1 + t))
    return besselk(0, x) + log(x / 2) * besseli(0, x)


def _k1(t: Any) -> Any:
    x = sqrt(2 * (1 + t))
    return x * (besselk(1, x) - log(x / 2) * besseli(1, x))


def _k_large(t: Any, order: int) -> Any:
    x = 4 / (1 + t)
    return besselk(order, x) * exp(x) * sqrt(x)


def _airy_decay(t: Any) -> Any:
    zeta = 8 * sqrt(2) / (3 * (1 + t))
    x = (3 * zeta / 2) ** (mpmath.mpf(2) / 3)
    return airyai(x) * exp(zeta) * 2 * sqrt(pi) * sqrt(sqrt(x))


def _airy_parts(t: Any) -> tuple[Any, Any]:
    """P and Q of Ai(-x), x > 4: sqrt(pi) x^(1/4) Ai(-x) is P sin(angle) + ratio Q cos(angle)."""
    ratio = sqrt((1 + t) / 2)
    zeta = mpmath.mpf(16) / 3 / ratio
    x = (3 * zeta / 2) ** (mpmath.mpf(2) / 3)
    angle, scale = zeta + pi / 4, sqrt(pi) * sqrt(sqrt(x))
    a, b = scale * airyai(-x), scale * airybi(-x)
    return a * sin(angle) + b * cos(angle), (a * cos(angle) - b * sin(angle)) / ratio


TABLES: dict[str, Callable[[Any], Any]] = {
    "J0": lambda t: besselj(0, _small(t)),
    "J1": lambda t: besselj(1, _small(t)) / _small(t),
    "Y0": _y0,
    "Y1": _y1,
    "P0": lambda t: _phase_parts(t, 0)[0],
    "Q0": lambda t: _phase_parts(t, 0)[1],
    "P1": lambda t: _phase_parts(t, 1)[0],
    "Q1": lambda t: _phase_parts(t, 1)[1],
    "K0": _k0,
    "K1": _k1,
    "K0_LARGE": lambda t: _k_large(t, 0),
    "K1_LARGE": lambda t: _k_large(t, 1),
    "AIRY": lambda t: airyai(3 * t - 1),
    "AIRY_DECAY": _airy_decay,
    "AIRY_P": lambda t: _airy_parts(t)[0],
    "AIRY_Q": lambda t: _airy_parts(t)[1],
}


def table(name: str) -> tuple[float, ...]:
    """The coefficients of a table."""
    with mpmath.workdps(50):
        angles = [pi * (2 * j + 1) / (2 * NODES) for j in range(NODES)]
        values = [TABLES[name](cos(angle)) for angle in angles]
        sums = [mpmath.fsum(v * cos(k * a) for v, a in zip(values, angles, strict=True)) for k in range(MOST)]
        found = [float(total * (1 if k == 0 else 2) / NODES) for k, total in enumerate(sums)]
    largest = max(map(abs, found))
    while abs(found[-1]) < UNSEEN * largest:
        found.pop()
    return tuple(found)


def main() -> None:
    for name in TABLES:
        print(f"{name} = {table(name)}")


if __name__ == "__main__":
    main()
