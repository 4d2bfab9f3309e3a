"""The bytes of arrays, as numbers and as text."""

from __future__ import annotations

import math
from typing import Any


def nbytes_of(array: Any) -> int:
    """The bytes of an array's elements, of a deleted one's too."""
    return int(math.prod(array.aval.shape) * array.aval.dtype.itemsize)


def show_bytes(nbytes: float) -> str:
    """`1.21 GB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{int(nbytes)} B"
