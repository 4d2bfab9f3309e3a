"""Collectives run in programs of all ranks, and ranks that differ stay right."""

from __future__ import annotations

import contextlib
import datetime as dt
import random
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from torchtpu import metrics

STEPS = 6


def counts() -> dict[str, Any]:
    found = metrics.snapshot()
    return {name: found[name] for name in ("collectives_fused", "collectives_alone", "votes", "launches")}


def train(model: nn.Module) -> dict[str, int]:
    """Some steps; what the last of them counted."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = counts()
    for step in range(STEPS):
        before = counts()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(4, 8, generator=generator).to("tpu")
        loss = (model(x) - x).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.tpu.synchronize()
    return {name: value - before[name] for name, value in counts().items()}


def a_ddp_step_is_one_program() -> None:
    torch.manual_seed(0)
    last = train(DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).to("tpu")))
    assert last == {"collectives_fused": 1, "collectives_alone": 0, "votes": 1, "launches": 1}, last


def an_fsdp2_step_is_one_program() -> None:
    """Though each rank has its own place in the buffers that are gathered."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to("tpu")
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    last = train(model)
    assert last["collectives_alone"] == 0 and last["collectives_fused"] >= 5, last
    assert last["launches"] <= 2, last


def unequal_shards_are_fused() -> None:
    """13 rows, 3, and 1: of some parameters a rank has fewer rows than others, or none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 13), nn.GELU(), nn.Linear(13, 3), nn.Linear(3, 1), nn.Linear(1, 8)).to("tpu")
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    last = train(model)
    assert last["collectives_alone"] == 0 and last["collectives_fused"] >= 5, last


def a_vocabulary_in_unequal_parts_is_fused() -> None:
    """Its embedding, its product and its loss; and what it learns is what one process learns."""
    mesh = init_device_mesh("tpu", (dist.get_world_size(),))

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(57, 8), nn.Linear(8, 57, bias=False))

    model, alone = make().to("tpu"), make()
    plan = {"0": RowwiseParallel(input_layouts=Replicate()), "1": ColwiseParallel(use_local_output=False)}
    parallelize_module(model, mesh, plan)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, alone)]
    before = counts()
    for step in range(STEPS):
        before = counts()
        tokens = torch.randint(57, (6,), generator=torch.Generator().manual_seed(step))
        losses = []
        for m, optimizer, device in zip((model, alone), optimizers, ("tpu", "cpu"), strict=True):
            with loss_parallel() if device == "tpu" else contextlib.nullcontext():
                loss = nn.functional.cross_entropy(m(tokens.to(device)), tokens.to(device).flip(0))
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.full_tensor() if isinstance(loss, DTensor) else loss)
        torch.testing.assert_close(losses[0].item(), losses[1].item(), rtol=1e-6, atol=1e-6)
    last = {name: value - before[name] for name, value in counts().items()}
    assert last["collectives_alone"] == 0 and last["collectives_fused"] >= 4, last


def groups_of_two_dimensions_are_fused() -> None:
    """Hybrid sharding, and data parallel layers that are tensor parallel: a program for the ranks of each group.
    Of two ranks each is alone in one of its groups."""
    size = dist.get_world_size()
    least = 5 if size > 2 else 2
    mesh = init_device_mesh("tpu", (2, size // 2), mesh_dim_names=("data", "inner"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to("tpu")
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    last = train(fully_shard(model, mesh=mesh))
    assert last["collectives_alone"] == 0 and last["collectives_fused"] >= least, last
    assert last["launches"] <= 5, last
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to("tpu")
    parallelize_module(model, mesh["inner"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    last = train(fully_shard(model, mesh=mesh["data"]))
    assert last["collectives_alone"] == 0 and last["collectives_fused"] >= least, last


def one_rank_may_print() -> None:
    """Rank 0 reads in mid-step, computes what nobody else does, and leaves out what others do."""
    rank, size = dist.get_rank(), dist.get_world_size()
    before = counts()
    for step in range(8):
        x = torch.full((5,), float(step), device="tpu")
        dist.all_reduce(x)
        if rank == 0 and step == 3:
            assert x.tolist() == [step * size] * 5
        if rank == 0 and step == 4:
            print("mean", (x * 2).mean().item())
        y = x * 2
        dist.all_reduce(y)
        if rank != 0:
            (y + 1).sum()
        assert y.tolist() == [2.0 * step * size * size] * 5
    found = {name: value - before[name] for name, value in counts().items()}
    assert found["collectives_fused"] + found["collectives_alone"] == 16, found
    assert found["collectives_fused"] >= 8, found


def what_one_rank_logs_soon_leaves_all_fused() -> None:
    """Rank 0 reads the loss in the middle of each step, or of some, or keeps a mean that nobody else has."""
    for place in ("after forward", "after backward", "seldom", "a mean"):
        for wrap in (fully_shard, DistributedDataParallel):
            torch.manual_seed(0)
            model = wrap(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to("tpu"))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            mean = torch.zeros((), device="tpu")
            before = counts()
            for step in range(16):
                if step == 12:
                    before = counts()
                logs = dist.get_rank() == 0 and (place != "seldom" or step % 4 == 0)
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to("tpu")
                loss = (model(x) - x).pow(2).mean()
                if logs and place in ("after forward", "seldom"):
                    loss.item()
                loss.backward()
                if logs and place == "after backward":
                    loss.item()
                optimizer.step()
                optimizer.zero_grad()
                if logs and place == "a mean":
                    mean = mean * 0.9 + loss.detach() * 0.1
                torch.tpu.synchronize()
            last = {name: value - before[name] for name, value in counts().items()}
            assert last["collectives_alone"] == 0 and last["collectives_fused"] >= 4, (place, wrap.__name__, last)


def a_waiting_rank_does_not_hold_up_the_others() -> None:
    """Rank 1 waits in the store for what rank 0 says after a collective that rank 1 has recorded only."""
    store = dist.distributed_c10d._get_default_store()
    x = torch.ones(3, device="tpu")
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        total = x.sum().item()
        store.set("said", str(total))
    else:
        store.wait(["said"], dt.timedelta(seconds=50))
    assert float(store.get("said")) == 3.0 * dist.get_world_size()
    assert x.tolist() == [dist.get_world_size()] * 3


def random_steps(count: int) -> None:
    """Each rank reads, adds, waits or sleeps wherever it likes."""
    size, own = dist.get_world_size(), random.Random(dist.get_rank())
    shared = random.Random(7)
    for _ in range(count):
        value, steps = shared.randrange(1, 5), shared.randrange(1, 4)
        x = torch.full((4,), float(value), device="tpu")
        for _ in range(steps):
            dist.all_reduce(x)
            x = x / size
            match own.randrange(8):
                case 0:
                    assert x.tolist() == [value] * 4
                case 1:
                    (x + 3).sum()
                case 2:
                    torch.tpu.synchronize()
                case 3 if own.random() < 0.1:
                    time.sleep(0.3)
        assert x.tolist() == [value] * 4


def check_all(steps: int) -> None:
    """With so many random steps."""
    an_fsdp2_step_is_one_program()
    a_ddp_step_is_one_program()
    unequal_shards_are_fused()
    a_vocabulary_in_unequal_parts_is_fused()
    groups_of_two_dimensions_are_fused()
    one_rank_may_print()
    what_one_rank_logs_soon_leaves_all_fused()
    a_waiting_rank_does_not_hold_up_the_others()
    random_steps(steps)
