"""PyTorch's own functions without the modules of its compiler, as long as the program has not imported them.

Python shape functions and optimizers tell Dynamo to leave them alone, for which the first call of each imports it: a
second of CPU time. Where it is not imported there is nothing to tell. Shape functions compare sizes by a module that
imports sympy; numbers need none of it.
"""

from __future__ import annotations

import dis
import itertools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch._decomp import global_decomposition_table

from torchtpu.compat.imports import after, attempt

_PACKAGES = (
    "torch._refs",
    "torch._decomp",
    "torch._prims",
    "torch._meta_registrations",
    "torch.optim",
    "torch.utils.checkpoint",
)
_MARK = "__dynamo_disable"  # where `torch._disable_dynamo` keeps what it calls instead of a function
_DYNAMO = "torch._dynamo"
_SYMBOLIC = "torch.fx.experimental.symbolic_shapes"
_CONCRETE = "torchtpu.compat.concrete_sizes"
_SYMPY = "sympy"


def install() -> None:
    """Has these functions run by themselves until those modules are there, and as PyTorch has them from then on.
    Called once."""
    attempt(_change, torch)


def _change(_: ModuleType) -> None:
    functions = list(_functions())
    if _DYNAMO not in sys.modules:
        _mark(list(_disabled(functions)))
        steps = [function for function in functions if _breaks_graph(function.__code__)]
        _run_until(_DYNAMO, {function: _unbroken(function).__code__ for function in steps})
    if _SYMBOLIC not in sys.modules:
        uses = [function for function in functions if _imports_symbolic(function.__code__)]
        _run_until(_SYMBOLIC, {function: _with_concrete(function.__code__) for function in uses})
    if _SYMPY not in sys.modules:
        uses = [function for function in functions if _knows_expressions(function.__code__)]
        _run_until(_SYMPY, {function: _with_symbolic_numbers(function.__code__) for function in uses})


def _mark(functions: list[Any]) -> None:
    """Has functions called as they are, until Dynamo is imported."""

    def unmark(_: ModuleType) -> None:
        for function in functions:
            if getattr(function, _MARK, None) is function:
                delattr(function, _MARK)

    after(_DYNAMO, unmark)
    for function in functions:
        setattr(function, _MARK, function)


def _run_until(module: str, codes: dict[FunctionType, CodeType]) -> None:
    """Has functions run other code until a module is imported."""
    own = {function: function.__code__ for function in codes}

    def restore(_: ModuleType) -> None:
        for function, code in own.items():
            function.__code__ = code

    after(module, restore)
    for function, code in codes.items():
        function.__code__ = code


def _functions() -> Iterator[FunctionType]:
    """The functions of these packages and their classes, and those that they wrap, once each."""
    found: list[dict[Any, Any]] = list(global_decomposition_table.values())
    found += [vars(module) for name, module in list(sys.modules.items()) if name.startswith(_PACKAGES)]
    found.append({name: value for name, value in vars(torch).items() if name.startswith("_check")})
    left = [value for named in found for value in list(named.values())]
    seen: set[int] = set()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, type) and value.__module__.startswith(_PACKAGES):
            left.extend(vars(value).values())
        elif isinstance(value, FunctionType):
            yield value
            if value.__closure__:
                left.extend(_closed_over(value))


def _closed_over(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue


def _disabled(functions: list[FunctionType]) -> Iterator[Any]:
    """Those that are called with Dynamo disabled."""
    disable: Any = getattr(torch, "_disable_dynamo", None)
    if disable is None:
        return
    code: CodeType = disable(lambda: None).__code__
    for function in functions:
        if function.__code__ is code:
            yield from (wrapped for wrapped in _closed_over(function) if isinstance(wrapped, FunctionType))


def _breaks_graph(code: CodeType) -> bool:
    """Whether this is the code of what wraps the step of an optimizer, and breaks Dynamo's graph around it."""
    return code.co_name == "_use_grad" and code.co_freevars == ("func",) and "graph_break" in code.co_names


def _unbroken(func: Callable[..., Any]) -> FunctionType:
    """That wrapper where there is no graph: gradients are recorded in a step that is to be differentiable alone."""

    def _use_grad(*args: Any, **kwargs: Any) -> Any:
        was_enabled = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(args[0].defaults["differentiable"])
            return func(*args, **kwargs)
        finally:
            torch.set_grad_enabled(was_enabled)

    assert isinstance(_use_grad, FunctionType)
    return _use_grad


def _imports_symbolic(code: CodeType) -> bool:
    left = [code]  # no recursion: this is asked of thousands of functions at import
    while left:
        code = left.pop()
        if _SYMBOLIC in code.co_names:
            return True
        left += [constant for constant in code.co_consts if type(constant) is CodeType]
    return False


def _with_concrete(code: CodeType) -> CodeType:
    """This code, with another module to import the comparisons of sizes from."""
    names = tuple(_CONCRETE if name == _SYMBOLIC else name for name in code.co_names)
    constants = tuple(_with_concrete(c) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_names=names, co_consts=constants)


def _knows_expressions(code: CodeType) -> bool:
    """Whether this imports sympy to ask whether something is one of its expressions, and for nothing else."""
    if _SYMPY not in code.co_names or "Basic" not in code.co_names:
        return False
    steps = list(dis.get_instructions(code))
    return all(_takes_basic(step, then) for step, then in itertools.pairwise(steps) if _SYMPY in _operands(step))


def _takes_basic(step: dis.Instruction, then: dis.Instruction) -> bool:
    """Whether an instruction with sympy imports or stores it, or loads it for the next one, which takes its Basic."""
    loads = _operands(step)[-1] == _SYMPY and step.opname.startswith("LOAD")
    return then.argval == "Basic" if loads else step.opname.startswith(("IMPORT_NAME", "STORE_FAST"))


def _operands(step: dis.Instruction) -> tuple[Any, ...]:
    """What an instruction loads or stores: some have two variables."""
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)


def _with_symbolic_numbers(code: CodeType) -> CodeType:
    """This code, asking whether something is a symbolic number: there are no expressions without sympy."""
    names = {_SYMPY: "torch", "Basic": "SymInt"}
    return code.replace(co_names=tuple(names.get(name, name) for name in code.co_names))
