"""What an accelerate.Accelerator makes of a small regression, for tests and for the scripts that they run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

PYTHONPATH = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))))  # of scripts


def prepared(accelerator: Any, batch_size: int = 16) -> tuple[Any, Any, Any]:
    """A model that is to learn a sum, its optimizer and its data."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    x = torch.randn(64, 8)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    return model, optimizer, data


def step(accelerator: Any, model: Any, optimizer: Any, inputs: Any, targets: Any) -> Any:
    """The loss of a batch, for which the model has been changed."""
    from torch.nn.functional import mse_loss

    loss = mse_loss(model(inputs), targets)
    accelerator.backward(loss)
    if accelerator.sync_gradients:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
