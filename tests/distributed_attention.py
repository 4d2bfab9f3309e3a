"""Attention of sharded tensors equals that of one process, in programs of all ranks: of DTensors with sharded heads or
batches, and under context parallel of sequences."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.tensor.experimental._attention as ring
from distributed_fusion import counts
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel

STEPS = 8
COUNTED_STEPS = 3


def make_tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def sharded_heads_and_batches(mesh: DeviceMesh) -> None:
    """With and without a bias, which heads or batches may share."""
    size = dist.get_world_size()
    shape = (size, 2 * size, 6, 4)
    attend = nn.functional.scaled_dot_product_attention
    for bias_shape, placed in itertools.product(
        (None, (6, 6), (2 * size, 6, 6), (1, 2 * size, 6, 6), (size, 1, 6, 6)), (Shard(0), Shard(1), Replicate())
    ):
        given = make_tensors(shape, shape, shape, *([bias_shape] if bias_shape else []))
        alone = [t.clone().requires_grad_() for t in given]
        bias = {"attn_mask": alone[3]} if bias_shape else {"is_causal": True}
        wanted = attend(*alone[:3], **bias)
        wanted.square().sum().backward()
        split = [distribute_tensor(t.to("tpu"), mesh, [placed]).requires_grad_() for t in given[:3]]
        if bias_shape:
            split.append(distribute_tensor(given[3].to("tpu"), mesh, [Replicate()]).requires_grad_())
            bias = {"attn_mask": split[3]}
        found = attend(*split[:3], **bias)
        assert tuple(found.placements) == (placed,)
        found.square().sum().backward()
        torch.testing.assert_close(found.full_tensor().detach().cpu(), wanted.detach(), rtol=1e-5, atol=1e-6)
        for one, other in zip(split, alone, strict=True):
            torch.testing.assert_close(one.grad.full_tensor().cpu(), other.grad, rtol=1e-5, atol=1e-5)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given = nn.Linear(8, 24)
        self.made = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
        heads = [t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.given(x).chunk(3, -1)]
        made = nn.functional.scaled_dot_product_attention(*heads, is_causal=is_causal)
        return x + self.made(made.transpose(1, 2).flatten(2))


def train(device: str, mesh: DeviceMesh | None, *, is_causal: bool) -> tuple[list[float], dict[str, int]]:
    """The losses, and what the last steps counted. With a mesh every rank has a part of each sequence."""
    torch.manual_seed(0)
    model = Layer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    before = counts()
    for step in range(STEPS):
        if mesh is not None:
            torch.tpu.synchronize()
            before = counts() if step == STEPS - COUNTED_STEPS else before
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(2, 4 * dist.get_world_size(), 8, generator=generator).to(device)
        with sharded(mesh, x):
            loss = (model(x, is_causal=is_causal) - x.flip(-1)).square().mean()
            loss.backward()
        if mesh is not None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
            dist.all_reduce(loss := loss.detach(), dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if mesh is not None:
        torch.tpu.synchronize()
    return [loss.item() for loss in losses], {name: value - before[name] for name, value in counts().items()}


@contextmanager
def sharded(mesh: DeviceMesh | None, x: torch.Tensor) -> Iterator[None]:
    if mesh is None:
        yield
    else:
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], no_restore_buffers={x}):
            yield


def sharded_sequences(mesh: DeviceMesh) -> None:
    """Keys and values are gathered or go round a ring; causal ones with and without balanced loads."""
    for is_causal, is_balanced, way in ((False, False, "allgather"), *itertools.product((True,), (False, True), WAYS)):
        ring._cp_options.enable_load_balance = is_balanced
        ring.set_rotate_method(way)
        wanted, _ = train("cpu", None, is_causal=is_causal)
        losses, last = train("tpu", mesh, is_causal=is_causal)
        torch.testing.assert_close(losses, wanted, rtol=1e-6, atol=1e-6)
        print(f"rank {dist.get_rank()}: causal {is_causal}, balanced {is_balanced}, {way}: {last}", flush=True)
        assert last["collectives_alone"] == 0 and last["collectives_fused"] > COUNTED_STEPS, last


WAYS = ("allgather", "alltoall")


def check_all() -> None:
    mesh = init_device_mesh("tpu", (dist.get_world_size(),))
    sharded_heads_and_batches(mesh)
    sharded_sequences(mesh)
