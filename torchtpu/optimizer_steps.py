"""Marks where the ops of each optimizer's step end, with what undoes the step on the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchtpu.runtime import _C

# Of optimizers whose step has begun: how many parameters had a state.
_num_states: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

watchers: list[Callable[[Optimizer], Any]] = []  # hear of each step, once it has been recorded


def install() -> None:
    """Watches the steps of all optimizers."""
    register_optimizer_step_pre_hook(begin)
    register_optimizer_step_post_hook(end)


def begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A step is about to be recorded."""
    _num_states[optimizer] = len(optimizer.state)


def end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A step has been recorded, if it has been one on the device."""
    undo = _undo_of(optimizer)
    if any(parameter.device.type == "tpu" for group in optimizer.param_groups for parameter in group["params"]):
        _C.mark_boundary("optimizer.step", undo)
    for watch in watchers:
        watch(optimizer)


def _undo_of(optimizer: Optimizer) -> Callable[[], None] | None:
    """What takes back the states that a step has made and the steps that it has counted on the host, where an op before
    it has failed; None where it has done neither."""
    states = optimizer.state
    num_known = _num_states.pop(optimizer, None)
    if num_known is None:  # a step within this one, as super().step(), has been marked
        return None
    made = [_reference(key) for key in islice(states, num_known, None)]
    first: dict[str, Any] = next((own for own in states.values() if isinstance(own, dict)), {})
    counted: list[torch.Tensor] = []
    if num_known and _is_count(first.get("step")):
        known = [own for key, own in islice(states.items(), num_known) if getattr(key, "grad", None) is not None]
        counted = [own["step"] for own in known if isinstance(own, dict) and _is_count(own.get("step"))]
    if not made and not counted:
        return None

    its = weakref.ref(optimizer)  # what has been recorded keeps no parameter alive

    def undo() -> None:
        now = its()
        if now is not None:
            for reference in made:
                key = reference()
                if key is not None:
                    now.state.pop(key, None)
        for count in counted:
            count -= 1
        made.clear()
        counted.clear()  # the regions of several devices may end with one step

    return undo


def _reference(key: Any) -> Callable[[], Any]:
    """Gives what an optimizer keeps a state for while it is there: a parameter or, in some optimizers, a name."""
    return weakref.ref(key) if isinstance(key, torch.Tensor) else lambda: key


def _is_count(steps: Any) -> bool:
    return isinstance(steps, torch.Tensor) and steps.device.type == "cpu"
