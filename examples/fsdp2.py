"""Trains the GPT of train_gpt.py on several ranks, with weights, gradients and optimizer sharded; with --checkpoint it
is saved, and a run that ended early continues.

The same script runs on GPUs with `--device cuda`.

    torchrun --nproc-per-node=2 --max-restarts=3 examples/fsdp2.py --checkpoint /tmp/gpt
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from train_gpt import GPT, draw_batch, read_corpus


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states, "step": torch.tensor(step)}, checkpoint_id=folder / f"{step:06d}")


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the last checkpoint that is whole; the steps it has behind it."""
    whole = sorted(found.parent for found in folder.glob("*/.metadata"))
    if not whole:
        return 0
    weights, states = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": states, "step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=whole[-1])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(state["step"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="tpu")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step, of all ranks together")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--checkpoint", type=Path, help="a folder for checkpoints")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--losses", type=Path, help="write the loss of every step of this run to this file")
    a = parser.parse_args()

    device = torch.device(a.device, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    corpus = read_corpus()
    model = GPT(a.context, a.width, a.layers, heads=4, dropout=0.0).to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    first = resume(a.checkpoint, model, optimizer) if a.checkpoint else 0
    losses = torch.zeros(a.steps, device=device)

    for step in range(first, a.steps):
        torch.manual_seed(step)  # the batch of a step is the same in every run
        x, y = (rows.chunk(size)[rank] for rows in draw_batch(corpus, a.batch, a.context, "cpu"))
        loss = F.cross_entropy(model(x.to(device)).flatten(0, 1), y.to(device).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach()
        if rank == 0 and step % 25 == 0:
            print(f"step {step:4d}  loss of rank 0 {loss.item():.4f}", flush=True)
        if a.checkpoint and (step + 1) % a.every == 0:
            save(a.checkpoint, step + 1, model, optimizer)

    dist.all_reduce(losses, dist.ReduceOp.AVG)
    if rank == 0:
        print(f"steps {first} to {a.steps}, last loss {losses[-1].item():.4f}")
        if a.losses:
            a.losses.write_text("\n".join(map(repr, losses[first:].tolist())) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
