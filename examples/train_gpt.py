"""Trains a character-level GPT on the Python standard library's own sources, and lets it write a text.

An ordinary PyTorch script: `--device cuda` or `--device cpu` run the same lines.

    python examples/train_gpt.py
    python examples/train_gpt.py --device cpu --steps 100
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(batch, length, width)))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, context: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS), width)
        self.positions = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*[Block(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(CHARACTERS), bias=False)
        self.apply(self._init)
        self.head.weight = self.characters.weight  # tied, as in GPT-2

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.05)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.characters(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(self.drop(x))))


def read_corpus(limit: int = 2_000_000) -> Tensor:
    """The first `limit` characters of the standard library, as indices into CHARACTERS."""
    index = {c: i for i, c in enumerate(CHARACTERS)}
    ids: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        ids += [index[c] for c in path.read_text(encoding="utf-8", errors="ignore") if c in index]
        if len(ids) >= limit:
            break
    return torch.tensor(ids[:limit])


def draw_batch(corpus: Tensor, batch: int, context: int, device: str) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(corpus) - context, (batch,))
    rows = torch.stack([corpus[s : s + context + 1] for s in starts.tolist()])
    return rows[:, :-1].to(device, non_blocking=True), rows[:, 1:].to(device, non_blocking=True)


def learning_rate(step: int, steps: int) -> float:
    """Factor of the peak: linear warm-up over 20 steps, then a cosine to a tenth."""
    warm_up = min(1.0, (step + 1) / 20)
    return warm_up * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))


@torch.no_grad()
def write_text(model: GPT, prompt: Tensor, length: int) -> str:
    """`length` characters that follow `prompt` (one row, as long as the context)."""
    model.eval()
    window, written = prompt, []
    for _ in range(length):
        probabilities = F.softmax(model(window)[:, -1] / 0.7, dim=-1)
        chosen = torch.multinomial(probabilities, 1)
        window = torch.cat([window[:, 1:], chosen], dim=1)
        written.append(CHARACTERS[int(chosen.item())])
    model.train()
    return "".join(written)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="tpu")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sample", type=int, default=300, help="characters of text to write at the end")
    parser.add_argument("--losses", type=Path, help="write the loss of every step to this file")
    a = parser.parse_args()

    torch.manual_seed(a.seed)
    corpus = read_corpus()
    model = GPT(a.context, a.width, a.layers, heads=4, dropout=a.dropout).to(a.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, a.steps))
    losses = torch.zeros(a.steps, device=a.device)  # read every 25 steps: the device is not waited for in between
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(corpus):,} characters, {a.device}")

    started = time.perf_counter()
    for step in range(a.steps):
        x, y = draw_batch(corpus, a.batch, a.context, a.device)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses[step] = loss.detach()
        if step % 25 == 0 or step == a.steps - 1:
            print(f"step {step:4d}  loss {loss.item():.4f}  {time.perf_counter() - started:6.1f} s", flush=True)

    if a.losses:
        a.losses.write_text("\n".join(map(repr, losses.tolist())) + "\n")
    if a.sample:
        prompt = corpus[: a.context].to(a.device).unsqueeze(0)
        print("-" * 80, write_text(model, prompt, a.sample), "-" * 80, sep="\n")
    if a.device.startswith("tpu"):
        from torchtpu import metrics

        m = metrics.snapshot()
        print(
            f"{m['ops_recorded']} ops recorded, {m['regions']} regions run, {m['programs_compiled']} programs compiled,"
            f" {sum(m['cpu_fallbacks'].values())} fallbacks"
        )


if __name__ == "__main__":
    main()
