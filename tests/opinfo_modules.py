"""Functions that run the samples of a check of a module or an optimizer on a given device."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from opinfo_checks import Check
from opinfo_move import Move
from torch.testing._internal.common_modules import ModuleErrorEnum
from torch.testing._internal.common_utils import noncontiguous_like
from torch.utils._pytree import tree_leaves, tree_map_only

Run = Callable[[Move], Any]
STEPS = 4
SAMPLES = 3


def module_runs(info: Any, check: Check) -> list[Run]:
    torch.manual_seed(0)
    if check.mode == "error":
        inputs = info.module_error_inputs_func(info, "cpu", torch.float32, requires_grad=False, training=True)
        return [functools.partial(_module_error, info, error) for error in inputs]
    phase, mode = check.mode.split("-")
    is_training = phase == "train"
    inputs = info.module_inputs_func(
        info, device="cpu", dtype=getattr(torch, check.dtype), requires_grad=mode == "backward", training=is_training
    )
    runs = []
    for given in inputs[:SAMPLES]:
        if given.forward_input is None:
            continue
        module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs)
        module.to(getattr(torch, check.dtype)).train(is_training)
        runs.append(functools.partial(_module, module, given.forward_input, mode))
    return runs


def _module(module: torch.nn.Module, given: Any, mode: str, move: Move) -> Any:
    args, kwargs = given.args, given.kwargs
    if mode == "noncontiguous":
        args, kwargs = tree_map_only(torch.Tensor, noncontiguous_like, (args, kwargs))
    args, kwargs = move(list(args)), move(kwargs)
    moved = copy.deepcopy(module).to(move.device)
    if move.is_wider:
        moved.double()
    made = moved(*args, **kwargs)
    if mode != "backward":
        return made, list(moved.buffers())
    from opinfo_cases import gradients

    given_tensors = [t for t in tree_leaves([args, kwargs]) if isinstance(t, torch.Tensor) and t.requires_grad]
    return gradients(made, [*given_tensors, *moved.parameters()], move)


def _module_error(info: Any, error: Any, move: Move) -> Any:
    given = error.module_error_input
    constructor = {**given.constructor_input.kwargs, "device": move.device}
    module = info.module_cls(*given.constructor_input.args, **constructor)
    if error.error_on == ModuleErrorEnum.FORWARD_ERROR:
        return module(*move(list(given.forward_input.args)), **move(given.forward_input.kwargs))
    return None


def optimizer_runs(info: Any, check: Check) -> list[Run]:
    mode = {
        "loop": {"foreach": False} if "foreach" in info.supported_impls else {},
        "tensor-lr": {},
        "capturable": {"capturable": True},
    }.get(check.mode, {check.mode: True})
    inputs = [i for i in info.optim_inputs_func("cpu") if not isinstance(i.kwargs.get("lr"), torch.Tensor)]
    return [functools.partial(_optimizer, info, i.kwargs, mode, check) for i in inputs]


def _optimizer(info: Any, kwargs: dict[str, Any], mode: dict[str, bool], check: Check, move: Move) -> Any:
    """The parameters and the state after some steps towards the least squares."""
    dtype = torch.float64 if move.is_wider else getattr(torch, check.dtype)
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: move(torch.randn(*shape, generator=generator, dtype=torch.float32).to(dtype))
    shapes = [(5, 4), (3, 5)] if info.name == "Muon" else [(5, 4), (3,)]
    parameters = [draw(*shape).requires_grad_() for shape in shapes]
    targets = [draw(*shape) for shape in shapes]
    given = {**kwargs, **mode}
    if move.device == "cpu":  # the CPU has no such form of some optimizers: its loop is the reference
        given = {k: v for k, v in given.items() if k not in ("capturable", "fused")}
    if check.mode == "tensor-lr":
        given["lr"] = torch.tensor(given.get("lr", 1e-2))
        given["foreach"] = False
        given = {k: v for k, v in given.items() if k != "foreach" or "foreach" in info.supported_impls}
    optimizer = info.optim_cls(parameters, **given)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(((p - t) ** 2).sum() for p, t in zip(parameters, targets, strict=True))
        loss.backward()
        if info.only_supports_sparse_grads:
            for p in parameters:
                p.grad = p.grad.to_sparse()
        return loss

    if given.get("differentiable"):
        # Some optimizers then choose between loop and foreach by the device alone.
        devices = "torch.optim.optimizer._get_foreach_kernels_supported_devices"
        with mock.patch(devices, return_value=["cpu", "tpu"]):
            return _differentiable_step(optimizer, parameters, closure)
    for _ in range(STEPS):
        if info.step_requires_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    state = [v for p in parameters for v in optimizer.state[p].values() if isinstance(v, torch.Tensor) and v.dim()]
    return [p.detach() for p in parameters], state


def _differentiable_step(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], closure: Callable[[], torch.Tensor]
) -> Any:
    """The updated parameters, and the gradient that flows through the update to the parameters' start."""
    starts = [p.detach().clone().requires_grad_() for p in parameters]
    moving = [s.clone() for s in starts]
    closure()
    gradients = [p.grad for p in parameters]
    for group in optimizer.param_groups:
        group["params"] = moving
    for m, g in zip(moving, gradients, strict=True):
        m.retain_grad()
        m.grad = g
    try:
        optimizer.step()
        through = torch.autograd.grad(sum((m**2).sum() for m in moving), starts)
        return [m.detach() for m in moving], list(through)
    finally:  # where backward raises, a graph holds the tensors that hold it
        for m in moving:
            m.detach_()
