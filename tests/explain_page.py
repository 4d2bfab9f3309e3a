"""Writes the picture of the explain page that the documentation shows: python tests/explain_page.py FILE.png."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from browser import Browser
from torch import nn

import torchtpu
from torchtpu.diagnostics.session import Explanation


def explained_training() -> Explanation:
    """Some steps of a small model: the last batch is smaller, and every loss is read."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with torchtpu.explain() as explanation:
        for rows in (64, 64, 64, 64, 64, 64, 40):
            batch = torch.randn(rows, 64, device="tpu")
            loss = nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
    folder = f"{Path(__file__).parent}/"
    return Explanation(json.loads(json.dumps(explanation.data).replace(folder, "")))


def main(picture: str) -> None:
    """Draws the page and writes what the window shows."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        explained_training().save(page)
        with Browser(Path(folder, "profile"), 1100, 720) as browser:
            browser.open(page.as_uri())
            Path(picture).write_bytes(browser.screenshot())


if __name__ == "__main__":
    main(sys.argv[1])
