"""PyTorch's Python shape functions without `torch._dynamo`, as long as the program has not imported it.

They tell Dynamo to leave their bodies alone, for which the first call of each imports it: a second of CPU time. Where
it is not imported there is nothing to tell.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch._decomp import global_decomposition_table

from torchtpu.compat.imports import after

_PACKAGES = ("torch._refs", "torch._decomp", "torch._prims")
_MARK = "__dynamo_disable"  # where `torch._disable_dynamo` keeps what it calls instead of a function


def install() -> None:
    """Marks these functions as what is to be called instead of them, until Dynamo is there. Called once."""
    if "torch._dynamo" in sys.modules:
        return
    marked = list(_disabled())
    for function in marked:
        setattr(function, _MARK, function)

    def unmark(_: ModuleType) -> None:
        for function in marked:
            if getattr(function, _MARK, None) is function:
                delattr(function, _MARK)

    after("torch._dynamo", unmark)


def _disabled() -> Iterator[Any]:
    """The functions that are called with Dynamo disabled, once each."""
    disable: Any = getattr(torch, "_disable_dynamo", None)
    if disable is None:
        return
    code: CodeType = disable(lambda: None).__code__
    found: list[dict[Any, Any]] = list(global_decomposition_table.values())
    found += [vars(module) for name, module in list(sys.modules.items()) if name.startswith(_PACKAGES)]
    left = [value for named in found for value in list(named.values()) if isinstance(value, FunctionType)]
    seen: set[int] = set()
    while left:
        function = left.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        is_disabled = function.__code__ is code
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                if isinstance(cell.cell_contents, FunctionType):
                    left.append(cell.cell_contents)
                    if is_disabled:
                        yield cell.cell_contents
