"""In: a loss. Out: a training step of it as users of gradient scaling write it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def scaled_step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, model: nn.Module, loss: Tensor) -> None:
    """Scales the loss, clips the gradients that it has without that, and steps."""
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
