"""The fixed list of op checks: out of PyTorch's own databases comes `opinfo_checks.txt`, one line per subject and mode.

A subject is an OpInfo, a ModuleInfo or an OptimizerInfo; the list holds all that PyTorch declares to support on 'cpu',
before any skip.  It is the denominator of every percentage.

    python tests/opinfo_checks.py        # writes the list anew, after an upgrade of PyTorch
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import opinfo_without_stack  # noqa: F401
import torch
from torch.testing._internal import common_methods_invocations as invocations
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db
from torch.utils._pytree import tree_leaves

LIST = Path(__file__).with_suffix(".txt")
DTYPES = (
    "float32 float64 bfloat16 float16 int64 int32 int16 int8 uint8 bool complex64 complex128".split()  # noqa: SIM905
)
TWICE_DIFFERENTIATED = ("float64", "complex128")
EXECUTIONS = ("region", "sync")
NO_DTYPE = "any"


@dataclass(frozen=True)
class Check:
    """`execution` is "sync" (each op runs at once) or "region" (many samples are recorded, then all are read)."""

    kind: str
    name: str
    mode: str
    dtype: str
    execution: str

    @property
    def id(self) -> str:
        return f"{self.kind} {self.name} {self.mode} {self.dtype} {self.execution}"


def listed() -> list[Check]:
    """Every check of the committed list."""
    checks = []
    for line in LIST.read_text().splitlines():
        (kind, name, mode), dtypes = line.partition(":")[0].split(), line.partition(":")[2].split()
        checks += [Check(kind, name, mode, dtype, execution) for execution in EXECUTIONS for dtype in dtypes]
    places = {subject: place for place, subject in enumerate(dict.fromkeys((c.kind, c.name) for c in checks))}
    return sorted(checks, key=lambda c: (places[c.kind, c.name], c.execution))  # what runs together stands together


@functools.cache
def subjects(kind: str) -> dict[str, Any]:
    """The infos of a kind by the names that the list uses."""
    if kind == "op":
        foreach = [
            info
            for name in sorted(dir(invocations))
            if name.startswith("foreach_") and name.endswith("_op_db")
            for info in getattr(invocations, name)
        ]
        return {info.full_name: info for info in [*invocations.op_db, *foreach]}
    return {info.name: info for info in (module_db if kind == "module" else optim_db)}


def _op_modes(info: Any) -> Iterator[tuple[str, list[str]]]:
    supported = _names(info.supported_dtypes("cpu"))
    yield "forward", supported
    if supported and _takes_tensors(info, supported[0]):
        yield "noncontiguous", supported
    if info.supports_out and not info.name.startswith("_foreach"):
        yield "out", supported
    if info.get_inplace() is not None:
        yield "inplace", supported
    if info.supports_autograd:
        backward = [d for d in _names(info.supported_backward_dtypes("cpu")) if d in supported]
        yield "backward", backward
        if info.supports_gradgrad:
            yield "gradgrad", [d for d in backward if d in TWICE_DIFFERENTIATED]
    if info.error_inputs_func is not None and list(info.error_inputs("cpu")):
        yield "error", [NO_DTYPE]


def _takes_tensors(info: Any, dtype: str) -> bool:
    samples = itertools.islice(info.sample_inputs("cpu", getattr(torch, dtype), requires_grad=False), 20)
    return any(isinstance(t, torch.Tensor) for s in samples for t in tree_leaves([s.input, s.args, s.kwargs]))


def _module_modes(info: Any) -> Iterator[tuple[str, list[str]]]:
    supported = _names(info.dtypes)
    for phase in ("train", "eval") if info.train_and_eval_differ else ("train",):
        for mode in ("forward", "backward", "noncontiguous"):
            yield f"{phase}-{mode}", supported
    if info.module_error_inputs_func is not None:
        yield "error", [NO_DTYPE]


def _optimizer_modes(info: Any) -> Iterator[tuple[str, list[str]]]:
    for mode in ("loop", *info.supported_impls, *(("capturable",) if info.has_capturable_arg else ()), "tensor-lr"):
        yield mode, ["float32", "float64"]


def _names(dtypes: Any) -> list[str]:
    given = {str(d).removeprefix("torch.") for d in dtypes}
    return [d for d in DTYPES if d in given]


def main() -> None:
    modes = {"op": _op_modes, "module": _module_modes, "optimizer": _optimizer_modes}
    lines = [
        f"{kind} {name} {mode}: {' '.join(dtypes)}"
        for kind, modes_of in modes.items()
        for name, info in subjects(kind).items()
        for mode, dtypes in modes_of(info)
        if dtypes
    ]
    LIST.write_text("\n".join(lines) + "\n")
    print(f"{len(listed())} checks in {len(lines)} lines, torch {torch.__version__}")


if __name__ == "__main__":
    main()
