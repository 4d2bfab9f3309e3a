"""Finds the op and the line where wrong numbers first appear."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from torchtpu import config
from torchtpu.runtime import _C

__all__ = ["Divergence", "compare", "debug_nans"]


@contextlib.contextmanager
def debug_nans(*, infs: bool = False) -> Iterator[None]:
    """In the block, a read of a value raises FloatingPointError where an op before it made a NaN.

    The error names the first such op of the region and its line. An op that was given a NaN is not to blame. With
    `infs` infinities count too. Regions stay fused; they are compiled anew for the block.
    """
    with config.using(debug_nans="inf" if infs else "nan"):
        yield
        torch.tpu.synchronize()  # type: ignore[attr-defined]


class Divergence(NamedTuple):
    """The first op whose results differ: its name, its position in the stream of ops, its line, and by how much."""

    op: str
    position: int
    line: str
    largest_error: float


class _Origin(NamedTuple):
    op: str
    line: str
    tensors: list[Tensor]


_Mode: Any = TorchDispatchMode


class _Trail(_Mode):
    """Keeps a host copy of what each op makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[_Origin] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith("aten.") and not any(part in name for part in ("empty", "_to_copy", "detach")):
            tensors = [t.detach().cpu().clone() for t in tree_leaves(result) if isinstance(t, Tensor)]
            self.made.append(_Origin(name, _C.current_line(), tensors))
        return result


def compare(
    module: Any, *args: Any, rtol: float = 1e-4, atol: float = 1e-5, backward: bool = False
) -> Divergence | None:
    """Runs a module (or function) on cpu and on tpu, op by op, and returns the first op that diverges; None: none does.

    `args` may be on any device. The module is copied, and both runs draw from equal seeds on the CPU only, so a module
    with dropout differs at its dropout. With `backward` the gradients of the results' sum are compared too. Ops are
    matched by their order; where the two devices take different ops, the first such op is returned with error inf.
    """
    trails = [_run(module, args, device, backward) for device in ("cpu", "tpu")]
    for i, (on_cpu, on_tpu) in enumerate(zip(*trails, strict=False)):
        if on_cpu.op != on_tpu.op:
            return Divergence(on_tpu.op, i, on_tpu.line, float("inf"))
        for expected, actual in zip(on_cpu.tensors, on_tpu.tensors, strict=True):
            if not torch.allclose(actual, expected, rtol=rtol, atol=atol, equal_nan=True):
                error = (actual.double() - expected.double()).abs().nan_to_num(nan=float("inf")).max().item()
                return Divergence(on_tpu.op, i, on_tpu.line, error)
    return None


def _run(module: Any, args: Any, device: str, backward: bool) -> list[_Origin]:
    moved = copy.deepcopy(module).to(device) if isinstance(module, torch.nn.Module) else module
    given = tree_map_only(Tensor, lambda t: t.detach().to(device), args)
    torch.manual_seed(0)
    with _Trail() as trail:
        result = moved(*given)
        if backward:
            sums = [t.sum() for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
            torch.autograd.backward(sums)
    return trail.made
