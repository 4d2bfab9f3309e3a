"""Models whose parameters do not divide by the ranks train in programs of all ranks, as they do on the CPU: a
vocabulary of 50257 words, weights of three rows and of one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from distributed_fusion import counts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

WORDS = 50257
STEPS = 8
COUNTED_STEPS = 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.narrow, self.wide = nn.Linear(8, 3), nn.Linear(3, 8)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(8, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        x = x + self.down(nn.functional.gelu(self.up(x))) * self.scale
        return self.head(x + self.wide(self.narrow(x)))


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def sharded() -> nn.Module:
    model = make_model().to("tpu")
    for layer in (model.words, model.up, model.head):
        fully_shard(layer)
    return fully_shard(model)


def tensor_parallel() -> nn.Module:
    plan = {
        "words": RowwiseParallel(input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(use_local_output=False),
    }
    return parallelize_module(make_model().to("tpu"), init_device_mesh("tpu", (dist.get_world_size(),)), plan)


def train(model: nn.Module, device: str, *, is_parallel: bool = False) -> tuple[list[float], dict[str, int]]:
    """The losses, and what the last steps counted."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=not is_parallel)  # it has DTensors and others
    losses = []
    before = counts()
    for step in range(STEPS):
        words = torch.randint(WORDS, (12,), generator=torch.Generator().manual_seed(step)).to(device)
        with loss_parallel() if is_parallel else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(model(words), words.flip(0))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.full_tensor() if isinstance(loss, DTensor) else loss).detach())
        if device == "tpu":
            torch.tpu.synchronize()
        if step == STEPS - COUNTED_STEPS - 1:
            before = counts()
    return [loss.item() for loss in losses], {name: value - before[name] for name, value in counts().items()}


def check_all() -> None:
    makers: tuple[Callable[[], nn.Module], ...] = (sharded, tensor_parallel)
    wanted, _ = train(make_model(), "cpu")
    for make in makers:
        losses, last = train(make(), "tpu", is_parallel=make is tensor_parallel)
        torch.testing.assert_close(losses, wanted, rtol=1e-6, atol=1e-6)
        assert last["collectives_alone"] == 0 and last["collectives_fused"] >= 4 * COUNTED_STEPS, (make.__name__, last)
        print(f"rank {dist.get_rank()}: {make.__name__}: {last} in {COUNTED_STEPS} steps", flush=True)
