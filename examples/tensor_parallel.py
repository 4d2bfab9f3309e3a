"""Trains a GPT whose attention heads and hidden units are split among the ranks.

The same script runs on GPUs with `--device cuda`.

    torchrun --nproc-per-node=2 examples/tensor_parallel.py
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from train_gpt import CHARACTERS, draw_batch, read_corpus

HEAD = 16  # the width of an attention head


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(2, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


PLAN = {
    "q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "out": RowwiseParallel(),
    "up": ColwiseParallel(), "down": RowwiseParallel(),
}  # fmt: skip


class GPT(nn.Module):
    def __init__(self, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(len(CHARACTERS), width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(CHARACTERS))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.characters(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="tpu")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--losses", type=Path, help="write the loss of every step to this file")
    a = parser.parse_args()

    device = torch.device(a.device, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device.index)
    mesh = init_device_mesh(a.device, (int(os.environ["WORLD_SIZE"]),))

    torch.manual_seed(0)
    corpus = read_corpus()
    model = GPT(a.context, a.width, a.layers).to(device)
    for block in model.blocks:
        parallelize_module(block, mesh, PLAN)
    # Whole and split weights do not go into one foreach op.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, foreach=False)
    losses = torch.zeros(a.steps, device=device)

    for step in range(a.steps):
        x, y = draw_batch(corpus, a.batch, a.context, str(device))
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach()
        if dist.get_rank() == 0 and step % 25 == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)

    if dist.get_rank() == 0:
        print(f"last loss {losses[-1].item():.4f}")
        if a.losses:
            a.losses.write_text("\n".join(map(repr, losses.tolist())) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
