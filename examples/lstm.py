"""Trains an LSTM on the identifiers of the Python standard library, and lets it make up new ones.

An ordinary PyTorch script (nn.LSTM, padding, Adam): `--device cuda` or `cpu` run the same lines.

    python examples/lstm.py
"""

from __future__ import annotations

import argparse
import re
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

LENGTH = 16  # of an identifier, its end included
CHARACTERS = ".abcdefghijklmnopqrstuvwxyz_"  # the dot begins and ends a name
IGNORED = -100


class NameModel(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), 32)
        self.lstm = nn.LSTM(32, width, batch_first=True)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, len(CHARACTERS))

    def forward(self, ids: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, state = self.lstm(self.embedding(ids), state)
        return self.head(self.drop(y)), state


def read_names() -> tuple[Tensor, Tensor]:
    """Every lower-case identifier of 4 to 15 characters: (characters before, character to predict), both (n, 16)."""
    names: set[str] = set()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        names.update(re.findall(r"\b[a-z][a-z_]{3,14}\b", path.read_text(encoding="utf-8", errors="ignore")))
    before = torch.zeros(len(names), LENGTH, dtype=torch.int64)
    after = torch.full((len(names), LENGTH), IGNORED)
    for row, name in enumerate(sorted(names)):
        ids = torch.tensor([CHARACTERS.index(c) for c in name])
        before[row, 1 : len(ids) + 1] = ids
        after[row, : len(ids)] = ids
        after[row, len(ids)] = 0
    return before, after


@torch.no_grad()
def invent(model: NameModel, count: int, device: str) -> list[str]:
    """`count` names, all written at once, one character a step."""
    model.eval()
    ids, state = torch.zeros(count, 1, dtype=torch.int64, device=device), None
    columns = []
    for _ in range(LENGTH):
        scores, state = model(ids, state)
        ids = torch.multinomial(F.softmax(scores[:, -1] / 0.8, dim=-1), 1)
        columns.append(ids)
    rows = torch.cat(columns, dim=1).tolist()
    model.train()
    return ["".join(CHARACTERS[i] for i in row).split(".")[0] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="tpu")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--losses", type=Path, help="write the loss of every step to this file")
    a = parser.parse_args()

    torch.manual_seed(a.seed)
    names = TensorDataset(*read_names())
    model = NameModel(a.width, a.dropout).to(a.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = torch.zeros(a.steps, device=a.device)
    print(f"{len(names):,} names, {a.device}")

    step, started = 0, time.perf_counter()
    while step < a.steps:
        for before, after in DataLoader(names, a.batch, shuffle=True, drop_last=True):
            scores, _ = model(before.to(a.device))
            loss = F.cross_entropy(scores.flatten(0, 1), after.to(a.device).flatten(), ignore_index=IGNORED)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.detach()
            if step % 25 == 0 or step == a.steps - 1:
                print(f"step {step:4d}  loss {loss.item():.4f}  {time.perf_counter() - started:6.1f} s", flush=True)
            step += 1
            if step == a.steps:
                break

    if a.losses:
        a.losses.write_text("\n".join(map(repr, losses.tolist())) + "\n")
    else:
        print(*invent(model, 20, a.device))


if __name__ == "__main__":
    main()
