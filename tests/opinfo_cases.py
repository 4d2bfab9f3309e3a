"""The cases of a check of an op: calls that run on any device with a sample that PyTorch made on the CPU."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import opinfo_modules
import torch
from opinfo_checks import Check, subjects
from opinfo_move import Move
from torch.testing._internal.common_device_type import precisionOverride, toleranceOverride
from torch.testing._internal.opinfo.core import DecorateInfo
from torch.utils._pytree import tree_leaves, tree_map

# Forward calls of a dtype, of the two that stand for all floating and all integer ones, and calls in other modes.
SAMPLES, MANY_SAMPLES, FEW_SAMPLES = 2, 6, 1
MANY = ("float32", "int64")
SAMPLES_SEEN = 200  # some ops list a thousand; the cases are spread over these

# PyTorch leaves open which of several equal elements these point at.
CHOOSES = ("topk", "kthvalue", "mode", "median", "nanmedian", "sort", "argsort")
UNINITIALIZED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
# PyTorch's CPU kernels write beyond out= tensors that are not contiguous.
OVERRUNS = ("linalg.lu", "lu_unpack")
# Their other tensors are read on the host and have to be there, on every device.
HOST_ARGUMENTS = ("tensor_split",)


@dataclass(frozen=True)
class Case:
    """`run` calls PyTorch on the device that its argument moves to; the rest says how to compare two devices.

    `process` maps results, on the CPU, to what the sample promises of them.  `tolerance` is (atol, rtol) or None for
    the dtype's own.  `has_values` is false where memory is returned as it is found.
    """

    run: Callable[[Move], Any]
    process: Callable[[Any], Any] = lambda made: made
    tolerance: tuple[float, float] | None = None
    has_values: bool = True


def cases(check: Check) -> list[Case]:
    """The calls of a check; the same ones in every process.  Raises where the CPU cannot make them."""
    info = subjects(check.kind)[check.name]
    if check.kind == "module":
        return [Case(run) for run in opinfo_modules.module_runs(info, check)]
    if check.kind == "optimizer":
        return [Case(run) for run in opinfo_modules.optimizer_runs(info, check)]
    if check.mode == "error":
        seed()
        inputs = [error.sample_input for error in info.error_inputs("cpu")]
        return [Case(functools.partial(_forward, info, sample)) for sample in inputs]
    dtype = getattr(torch, check.dtype)
    needs_grad = check.mode in ("backward", "gradgrad")
    samples = _samples(check.name, dtype, needs_grad)
    if check.mode == "inplace":
        samples = [s for s in samples if not s.broadcasts_input]
    elif check.mode == "noncontiguous":
        samples = [s for s in samples if any(isinstance(t, torch.Tensor) for t in _parts(s))]
    elif needs_grad:
        samples = [s for s in samples if any(t.requires_grad for t in _tensors(s))]
    run = {"noncontiguous": _noncontiguous, "out": _out, "inplace": _inplace}.get(check.mode, _forward)
    run = {"backward": _backward, "gradgrad": _gradgrad}.get(check.mode, run)
    return [
        Case(
            functools.partial(run, info, sample),
            functools.partial(_process, info, sample, check.mode),
            tolerance(info, dtype),
            info.name not in UNINITIALIZED,
        )
        for sample in _spread(samples, _count(check))
    ]


def _count(check: Check) -> int:
    if check.mode != "forward":
        return FEW_SAMPLES
    if check.name.startswith("_foreach"):  # a sample is a list of twenty tensors
        return FEW_SAMPLES
    return MANY_SAMPLES if check.dtype in MANY and check.execution == "region" else SAMPLES


def seed() -> None:
    """Starts every generator anew, on all devices."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  what PyTorch's samples draw from
    torch.manual_seed(0)


@functools.lru_cache(maxsize=4)
def _samples(name: str, dtype: torch.dtype, requires_grad: bool) -> list[Any]:
    seed()
    return list(
        itertools.islice(subjects("op")[name].sample_inputs("cpu", dtype, requires_grad=requires_grad), SAMPLES_SEEN)
    )


def _spread(items: list[Any], count: int) -> list[Any]:
    """`count` of them, evenly; the middle one where it is one."""
    if len(items) <= count:
        return items
    if count == 1:
        return [items[len(items) // 2]]
    return [items[i * (len(items) - 1) // (count - 1)] for i in range(count)]


def _parts(sample: Any) -> list[Any]:
    return tree_leaves([sample.input, *sample.args, *sample.kwargs.values()])


def _tensors(sample: Any) -> list[torch.Tensor]:
    return [t for t in _parts(sample) if isinstance(t, torch.Tensor)]


def _arguments(info: Any, sample: Any, move: Move) -> tuple[Any, list[Any], dict[str, Any]]:
    if info.name in HOST_ARGUMENTS:
        return move(sample.input), list(sample.args), sample.kwargs
    return move(sample.input), [move(a) for a in sample.args], move(sample.kwargs)


def _forward(info: Any, sample: Any, move: Move) -> Any:
    x, args, kwargs = _arguments(info, sample, move)
    return info.op(x, *args, **kwargs)


def _noncontiguous(info: Any, sample: Any, move: Move) -> Any:
    return _forward(info, sample.noncontiguous(), move)


def _inplace(info: Any, sample: Any, move: Move) -> Any:
    x, args, kwargs = _arguments(info, sample, move)
    made = info.get_inplace()(x, *args, **kwargs)
    return x, made is x


def _out(info: Any, sample: Any, move: Move) -> Any:
    """Writes into tensors of the right shape whose memory is laid out the other way round, where the CPU can."""
    x, args, kwargs = _arguments(info, sample, move)
    out = _out_tensors(_forward(info, sample, Move("cpu", move.is_wider)))
    if info.name in OVERRUNS:
        out = tree_map(torch.Tensor.contiguous, out)
    out = Move(move.device)(out)
    made = info.op(x, *args, **kwargs, out=out)
    return out, [m is o for m, o in zip(_listed(made), _listed(out), strict=True)]


def _out_tensors(expected: Any) -> Any:
    if isinstance(expected, torch.Tensor):
        order = list(reversed(range(expected.dim())))
        made = torch.empty([expected.shape[i] for i in order], dtype=expected.dtype).permute(order)
        return made.fill_(1)
    return tuple(_out_tensors(e) for e in expected)


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _backward(info: Any, sample: Any, move: Move) -> Any:
    return gradients(*_differentiable(info, sample, move), move)


def gradients(made: Any, leaves: list[torch.Tensor], move: Move, create_graph: bool = False) -> Any:
    """The gradients of `leaves` for cotangents that are the same on every device."""
    outs = [t for t in tree_leaves(made) if isinstance(t, torch.Tensor) and t.requires_grad]
    generator = torch.Generator().manual_seed(0)
    draw = lambda t: torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype)
    cotangents = [draw(t).to(move.device) for t in outs]
    return torch.autograd.grad(outs, leaves, cotangents, allow_unused=True, create_graph=create_graph) if outs else ()


def _gradgrad(info: Any, sample: Any, move: Move) -> Any:
    """The second derivatives, which PyTorch holds to gradgradcheck on the CPU."""
    made, leaves = _differentiable(info, sample, move)
    first = [g for g in gradients(made, leaves, move, create_graph=True) if g is not None]
    return gradients(first, leaves, move)


def _differentiable(info: Any, sample: Any, move: Move) -> tuple[Any, list[torch.Tensor]]:
    """(results, the arguments that require a gradient)."""
    x, args, kwargs = _arguments(info, sample, move)
    made = sample.output_process_fn_grad(info.op(x, *args, **kwargs))
    return made, [t for t in tree_leaves([x, args, kwargs]) if isinstance(t, torch.Tensor) and t.requires_grad]


def _process(info: Any, sample: Any, mode: str, made: Any) -> Any:
    chooses = info.name in CHOOSES and not sample.kwargs.get("stable")
    if mode in ("backward", "gradgrad"):
        return [g.sum() for g in made if g is not None] if chooses else made
    made, rest = made if mode in ("inplace", "out") else (made, None)
    if chooses and isinstance(made, tuple):
        made = made[0], _elements(info, sample, made[1])
    elif chooses and info.name == "argsort":
        made = _elements(info, sample, made)
    return sample.output_process_fn_grad(made), rest


def _elements(info: Any, sample: Any, indices: torch.Tensor) -> torch.Tensor:
    """The elements of the sample's input that `indices` point at."""
    position = {"topk": 1, "kthvalue": 1}.get(info.name, 0)
    x = sample.input.detach()
    dim = sample.kwargs.get("dim", sample.args[position] if len(sample.args) > position else -1)
    if x.dim() == 0:
        return x + indices
    if indices.dim() < x.dim():
        indices = indices.unsqueeze(dim)
    return x.gather(dim, indices)


def tolerance(info: Any, dtype: torch.dtype) -> tuple[float, float] | None:
    """What PyTorch's own tests of a device allow this op, where that is more than the dtype's default."""
    atol = rtol = 0.0
    for entry in info.decorators or ():
        if not isinstance(entry, DecorateInfo) or not entry.active_if:
            continue
        if entry.device_type not in (None, "cpu", "cuda") or entry.cls_name not in (None, "TestCommon"):
            continue
        for decorator in entry.decorators:
            if isinstance(decorator, toleranceOverride) and dtype in decorator.d:
                atol, rtol = max(atol, decorator.d[dtype].atol), max(rtol, decorator.d[dtype].rtol)
            elif isinstance(decorator, precisionOverride) and dtype in decorator.d:
                atol = max(atol, decorator.d[dtype])
    return (atol, rtol) if atol or rtol else None
