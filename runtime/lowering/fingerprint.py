"""Fingerprints: hashes of what loaded functions and modules compute.

Bytecode, constants and tables count; comments, lines and files do not. What is loaded is looked at, not its source,
which somebody may be editing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

from torchtpu.compiler_cache import fingerprint

_ROOT = __name__.partition(".")[0] + "."
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype)


@functools.cache
def of_function(function: Callable[..., Any], context: Callable[..., Any]) -> str:
    """Changes with what a lowering traces to: with its own code, with its module and those of its package that this
    one uses, with the context's module, and with the versions of Python, torch and jax."""
    home = inspect.unwrap(function).__module__
    modules = used_by(home) | {inspect.unwrap(context).__module__}
    return _hash([*_describe(function, home), *map(_describe_module, sorted(modules))])


@functools.cache
def of_modules(*names: str) -> str:
    """Changes with the code of these modules and of those of their packages that they use."""
    return _hash(map(_describe_module, sorted(set().union(*map(used_by, names)))))


def used_by(name: str) -> set[str]:
    """A module and those of its package that it uses, directly or not; of ours, the part of torchtpu that it is in."""
    package = ".".join(name.split(".")[:2]) if name.startswith(_ROOT) else name.rpartition(".")[0] or name
    found: set[str] = set()
    waiting = [name]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for value in vars(importlib.import_module(name)).values():
            other = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
            if isinstance(other, str) and other.startswith(package + "."):
                waiting.append(other)
    return found


def _hash(descriptions: Iterable[str]) -> str:
    versions = {"bytecode": importlib.util.MAGIC_NUMBER.hex(), "torch": torch.__version__, "jax": _jax_version()}
    return fingerprint((text.encode("utf-8", "surrogatepass") for text in descriptions), versions)


@functools.cache
def _jax_version() -> str:
    return importlib.metadata.version("jax")  # jax itself takes long to import


@functools.cache
def _describe_module(name: str) -> str:
    values = vars(importlib.import_module(name))
    described = ([key, *_describe(values[key], name)] for key in sorted(values) if not key.startswith("__"))
    return "\n".join(map(" ".join, described))


def _describe(value: Any, home: str, around: tuple[Any, ...] = ()) -> Iterator[str]:
    """Words for what a value is to the code of module `home`; for what is neither code nor plain data its type.

    `around` are the functions and classes that hold it.
    """
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, FunctionType):
        yield from _describe_function(value, home, around)
    elif isinstance(value, type):
        yield value.__qualname__
        if value.__module__ == home and value not in around:
            for name, held in sorted(vars(value).items()):
                if isinstance(held, FunctionType) or not name.startswith("__"):
                    yield from (name, *_describe(held, home, (*around, value)))
    elif isinstance(value, (list, tuple)):
        yield str(len(value))
        for item in value:
            yield from _describe(item, home, around)
    elif isinstance(value, (set, frozenset)):
        yield from sorted(" ".join(_describe(item, home, around)) for item in value)
    elif isinstance(value, dict):
        yield from sorted(" ".join(_describe(pair, home, around)) for pair in value.items())
    elif isinstance(value, functools.partial):
        yield from _describe((value.func, value.args, value.keywords), home, around)
    elif isinstance(value, property):
        yield from _describe((value.fget, value.fset), home, around)
    elif isinstance(value, functools.cached_property):
        yield from _describe(value.func, home, around)
    elif isinstance(wrapped := getattr(value, "__wrapped__", None), FunctionType):  # by a cache or a class
        yield from _describe(wrapped, home, around)
    else:
        yield f"{type(value).__qualname__} {getattr(value, '__name__', '')}"


def _describe_function(function: FunctionType, home: str, around: tuple[Any, ...]) -> Iterator[str]:
    """Its code, and what it holds where it is of this module. Another module of the package is described itself."""
    if function in around or (function.__module__ != home and function.__module__.startswith(_ROOT)):
        yield f"{function.__module__}.{function.__qualname__}"
        return
    yield from _describe_code(function.__code__, home)
    if function.__module__ == home:
        yield from _describe((function.__defaults__, function.__kwdefaults__), home, (*around, function))
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a name that is never bound
                yield from _describe(cell.cell_contents, home, (*around, function))


def _describe_code(code: CodeType, home: str) -> Iterator[str]:
    yield f"{code.co_code.hex()} {code.co_exceptiontable.hex()} {code.co_flags}"
    yield f"{code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount}"
    yield f"{code.co_names} {code.co_varnames} {code.co_freevars} {code.co_cellvars}"
    for constant in code.co_consts:
        yield from _describe_code(constant, home) if isinstance(constant, CodeType) else _describe(constant, home)
