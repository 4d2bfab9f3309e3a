"""Reads values from JSON with the types and bounds that their user takes for granted, and raises ValueError, and no
other error, for everything else."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

MOST_INT = 2**63 - 1
MOST_RANK = 64


def parsed(data: bytes | str) -> Any:
    """What the JSON text says."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def integer(value: Any, least: int = 0, most: int = MOST_INT) -> int:
    """A whole number within these bounds."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{_short(value)} is no whole number from {least} to {most}")
    return value


def boolean(value: Any) -> bool:
    """Yes or no."""
    if type(value) is not bool:
        raise ValueError(f"{_short(value)} is neither true nor false")
    return value


def text(value: Any) -> str:
    """A piece of text."""
    if type(value) is not str:
        raise ValueError(f"{_short(value)} is no text")
    return value


def items(value: Any, count: int | None = None, most: int = MOST_INT) -> list[Any]:
    """A list, of `count` items where that is given."""
    if type(value) is not list or len(value) > most or (count is not None and len(value) != count):
        raise ValueError(f"{_short(value)} is no list{'' if count is None else f' of {count}'}")
    return value


def integers(value: Any, least: int = 0, most: int = MOST_INT, count: int | None = None) -> tuple[int, ...]:
    """Whole numbers within these bounds."""
    for item in items(value, count):
        if type(item) is not int or not least <= item <= most:
            raise ValueError(f"{_short(item)} is no whole number from {least} to {most}")
    return tuple(value)


def fields(value: Any, names: Sequence[str]) -> list[Any]:
    """The values of an object with exactly these names."""
    if type(value) is not dict or len(value) != len(names) or not all(name in value for name in names):
        raise ValueError(f"{_short(value)} is no object with {', '.join(names)}")
    return [value[name] for name in names]


def bits(value: Any, count: int) -> int:
    """A set of numbers below `count`, written as a hexadecimal number with a bit for each."""
    digits = text(value)
    if not digits or len(digits) > count // 4 + 1 or not set(digits) <= _HEXADECIMAL:
        raise ValueError(f"{_short(value)} is no set of numbers below {count}")
    return integer(int(digits, 16), 0, (1 << count) - 1)


def expression(value: Any) -> str:
    """An expression of sizes a to h, as jax writes them: sums, products, powers, quotients, the larger or smaller."""
    found = text(value)
    if len(found) > 500 or not _EXPRESSION.fullmatch(found):
        raise ValueError(f"{_short(value)} is no expression of sizes")
    return found


def error_class(module: Any, name: Any) -> type[Exception]:
    """The class of errors of that name in a module that is loaded; none is imported for it."""
    found: Any = sys.modules.get(text(module))
    for part in text(name).split("."):
        found = getattr(found, "__dict__", {}).get(part)
    if isinstance(found, type) and issubclass(found, Exception):
        return found
    raise ValueError(f"{_short(module)}.{_short(name)} is no class of errors")


_HEXADECIMAL = frozenset("0123456789abcdef")
_EXPRESSION = re.compile(
    r"(?:floordiv|mod|max|min|[a-h](?!\w)|\^\d{1,2}(?!\d)|(?<![\d^])\d{1,18}(?!\d)|[-+*](?!\*)|[(), ])+"
)


def _short(value: Any) -> str:
    if type(value) is list or type(value) is dict:
        return f"a {type(value).__name__} of {len(value)}"
    if type(value) is int and abs(value) > MOST_INT:
        return "a large number"
    shown = repr(value)
    return shown if len(shown) < 80 else f"{shown[:80]}..."
