"""Trains the GPT of train_gpt.py data parallel, on several ranks.

The same script runs on GPUs with `--device cuda`.

    torchrun --nproc-per-node=2 examples/ddp.py
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from train_gpt import GPT, draw_batch, read_corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="tpu")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step, of all ranks together")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--losses", type=Path, help="write the loss of every step to this file")
    a = parser.parse_args()

    device = torch.device(a.device, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same weights and batches on every rank, of which each takes its rows
    corpus = read_corpus()
    model = DistributedDataParallel(GPT(a.context, a.width, a.layers, heads=4, dropout=0.0).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = torch.zeros(a.steps, device=device)

    for step in range(a.steps):
        x, y = (rows.chunk(size)[rank] for rows in draw_batch(corpus, a.batch, a.context, "cpu"))
        loss = F.cross_entropy(model(x.to(device)).flatten(0, 1), y.to(device).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach()
        if rank == 0 and step % 25 == 0:
            print(f"step {step:4d}  loss of rank 0 {loss.item():.4f}", flush=True)

    dist.all_reduce(losses, dist.ReduceOp.AVG)
    if rank == 0:
        print(f"last loss {losses[-1].item():.4f}")
        if a.losses:
            a.losses.write_text("\n".join(map(repr, losses.tolist())) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
