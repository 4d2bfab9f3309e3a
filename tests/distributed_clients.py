"""Stock training on all ranks gives what one process gives on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from torchtpu import metrics

STEPS = 10


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 13), nn.LayerNorm(13), nn.Linear(13, 3))


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        yield torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def mine(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()].to("tpu")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def on_one_process(*, clip: float | None = None) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and parameters of the same training on the CPU."""
    model = make_model()
    optimizer = adamw(model)
    losses = []
    for x, y in batches():
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[..., Any] | None = None) -> list[float]:
    """The mean losses of all ranks."""
    losses = []
    for x, y in batches():
        loss = nn.functional.mse_loss(model(mine(x)), mine(y))
        loss.backward()
        if step is not None:
            step()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach(), dist.ReduceOp.AVG)
        losses.append(loss)
    return [loss.item() for loss in losses]


def check(losses: list[float], model: nn.Module, *, clip: float | None = None) -> None:
    expected, parameters = on_one_process(clip=clip)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    for found, wanted in zip(model.parameters(), parameters, strict=True):
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(whole.detach().cpu(), wanted, rtol=1e-5, atol=1e-6)


def ddp() -> None:
    for options in (
        {},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005},
        {"static_graph": True, "device_ids": [torch.device("tpu", torch.tpu.current_device())]},
    ):
        model = DistributedDataParallel(make_model().to("tpu"), **options)
        check(train(model, adamw(model)), model)


def ddp_hooks() -> None:
    model = DistributedDataParallel(make_model().to("tpu"))
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    check(train(model, adamw(model)), model)
    model = DistributedDataParallel(make_model().to("tpu"))
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    losses = train(model, adamw(model))
    torch.testing.assert_close(losses, on_one_process()[0], rtol=1e-2, atol=1e-2)


def ddp_no_sync() -> None:
    """Two half batches, the first without communication, are one whole batch."""
    model = DistributedDataParallel(make_model().to("tpu"))
    optimizer = adamw(model)
    for x, y in batches():
        (x1, x2), (y1, y2) = mine(x).chunk(2), mine(y).chunk(2)
        before = metrics.snapshot()["collectives"].get("all_reduce", 0)
        with model.no_sync():
            (nn.functional.mse_loss(model(x1), y1) / 2).backward()
        assert metrics.snapshot()["collectives"].get("all_reduce", 0) == before
        (nn.functional.mse_loss(model(x2), y2) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    check(on_one_process()[0], model)


def fsdp2() -> None:
    mesh = init_device_mesh("tpu", (dist.get_world_size(),))

    def sharded(model: nn.Module, **options: Any) -> nn.Module:
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    model = sharded(make_model().to("tpu"))
    check(train(model, adamw(model), lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5)), model, clip=0.5)
    model = sharded(make_model())  # of the CPU: fully_shard moves it
    check(train(model, adamw(model)), model)
    model = sharded(make_model().to("tpu"), reshard_after_forward=False)
    check(train(model, adamw(model)), model)
    half = sharded(make_model().to("tpu"), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    torch.testing.assert_close(train(half, adamw(half)), on_one_process()[0], rtol=2e-2, atol=2e-2)
    off = sharded(make_model(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    check(train(off, adamw(off)), off)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    sharded(empty)
    empty.to_empty(device="tpu")
    for parameter in empty.parameters():
        nn.init.ones_(parameter)
    assert empty(torch.ones(1, 6, device="tpu")).tolist() == [[29.0, 29.0]]


def hybrid() -> None:
    """Sharded in one dimension of the mesh, replicated in the other."""
    mesh = init_device_mesh("tpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(make_model().to("tpu"), mesh=mesh)
    check(train(model, adamw(model)), model)


def fsdp1() -> None:
    device = torch.device("tpu", torch.tpu.current_device())
    model = FullyShardedDataParallel(make_model().to("tpu"), use_orig_params=True, device_id=device)
    losses = train(model, adamw(model))
    with FullyShardedDataParallel.summon_full_params(model):
        check(losses, model)


def pipeline() -> None:
    """A stage of each rank, and two of each, which are not neighbours."""
    size, rank = dist.get_world_size(), dist.get_rank()
    device = torch.device("tpu", torch.tpu.current_device())
    for count in (size, 2 * size):
        layers, alone = stages_and_whole(count)
        mine = [PipelineStage(layers[n].to(device), n, count, device) for n in range(rank, count, size)]
        if count == size:
            schedule: Any = Schedule1F1B(mine[0], 4, loss_fn=nn.functional.mse_loss)
        else:
            schedule = ScheduleInterleaved1F1B(mine, 4, loss_fn=nn.functional.mse_loss)

        def step(x: torch.Tensor, losses: list[torch.Tensor], schedule: Any = schedule) -> None:
            given = (x.to(device),) if rank == 0 else ()
            wanted = {"target": x.flip(0).to(device), "losses": losses} if rank == size - 1 else {}
            schedule.step(*given, **wanted)

        train_stages([layers[n] for n in range(rank, count, size)], [*alone][rank::size], alone, step)


def plain_pipeline() -> None:
    """In the order of 1F1B and of interleaved 1F1B, each tensor sent and received by itself."""
    size, rank = dist.get_world_size(), dist.get_rank()
    device = torch.device("tpu", torch.tpu.current_device())
    for count in (size, 2 * size):
        layers, alone = stages_and_whole(count)
        mine = {n: layers[n].to(device) for n in range(rank, count, size)}
        if count == size:
            ahead = min(size - rank, 4)
            order = [("F", rank, part) for part in range(ahead)]
            for part in range(4):
                order += [("B", rank, part), *[("F", rank, ahead + part)] * (ahead + part < 4)]
        else:
            stages: list[Any] = [PipelineStage(layer, n, count, device) for n, layer in mine.items()]
            acts = [act for act in ScheduleInterleaved1F1B(stages, 4).pipeline_order[rank] if act is not None]
            order = [(act.computation_type.value, act.stage_index, act.microbatch_index) for act in acts]
        assert len(order) == 2 * 4 * len(mine)
        last = count - 1

        def step(
            x: torch.Tensor, losses: list[torch.Tensor], *, order: Any = order, mine: Any = mine, last: int = last
        ) -> None:
            parts, wanted = x.chunk(4), x.flip(0).chunk(4)
            taken, made = {}, {}
            sent: list[Any] = []
            for kind, n, part in order:
                tag = 2 * (4 * n + part)  # of what goes to the stage after this one; odd ones come back
                if kind == "F":
                    given = parts[part].to(device) if n == 0 else torch.empty_like(parts[part], device=device)
                    if n > 0:
                        dist.irecv(given, (n - 1) % size, tag=tag - 8).wait()
                    taken[n, part] = given.requires_grad_()
                    made[n, part] = mine[n](given)
                    if n < last:
                        sent.append(dist.isend(made[n, part].detach(), (n + 1) % size, tag=tag))
                    continue
                if n == last:
                    loss = nn.functional.mse_loss(made[n, part], wanted[part].to(device))
                    losses.append(loss.detach())
                    (loss / len(parts)).backward()
                else:
                    dist.irecv(gradient := torch.empty_like(made[n, part]), (n + 1) % size, tag=tag + 1).wait()
                    made[n, part].backward(gradient)
                if n > 0:
                    sent.append(dist.isend(taken[n, part].grad, (n - 1) % size, tag=tag - 7))
            for work in sent:
                work.wait()

        train_stages([*mine.values()], [*alone][rank::size], alone, step)


def stages_and_whole(count: int) -> tuple[list[nn.Module], nn.Sequential]:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(6, 6) for _ in range(count)]
    return layers, nn.Sequential(*[copy.deepcopy(layer) for layer in layers])


def train_stages(
    mine: list[nn.Module],
    same: list[nn.Module],
    alone: nn.Sequential,
    step: Callable[[torch.Tensor, list[torch.Tensor]], None],
) -> None:
    """Trains this rank's stages and the whole on the CPU; their losses and what `same` of it has learned are equal."""
    optimizers = adamw(nn.ModuleList(mine)), adamw(alone)
    for x, _ in batches():
        losses: list[torch.Tensor] = []
        step(x, losses)
        loss = nn.functional.mse_loss(alone(x), x.flip(0))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert bool(losses) == (dist.get_rank() == dist.get_world_size() - 1)
        if losses:
            torch.testing.assert_close(torch.stack(losses).mean().item(), loss.item(), rtol=1e-6, atol=1e-6)
    for layer, other in zip(mine, same, strict=True):
        for found, expected in zip(layer.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(found.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-6)


def dtensors() -> None:
    mesh = init_device_mesh("tpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    x = torch.arange(20.0).view(5, 4)
    rows = distribute_tensor(x.to("tpu"), mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    copies = columns.redistribute(mesh, [Replicate()])
    assert torch.equal(copies.to_local().cpu(), x)
    assert torch.equal((rows @ rows.t()).full_tensor().cpu(), x @ x.t())
    parts = DTensor.from_local(x.to("tpu"), mesh, [Partial()])
    assert torch.equal(parts.full_tensor().cpu(), x * dist.get_world_size())
    assert torch.equal(parts.redistribute(mesh, [Shard(0)]).full_tensor().cpu(), x * dist.get_world_size())
    assert rows.sum().full_tensor().item() == x.sum().item()


def tensor_parallel() -> None:
    mesh = init_device_mesh("tpu", (dist.get_world_size(),))

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))

    model, alone = make().to("tpu"), make()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizers = adamw(model), adamw(alone)
    for x, y in batches():
        losses = []
        for m, optimizer, device in zip((model, alone), optimizers, ("tpu", "cpu"), strict=True):
            loss = nn.functional.mse_loss(m(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-6)


def sequence_parallel() -> None:
    mesh = init_device_mesh("tpu", (dist.get_world_size(),))

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.LayerNorm(6))

    model, alone = make().to("tpu"), make()
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
        "4": SequenceParallel(),
    }
    parallelize_module(model, mesh, plan)
    optimizers = adamw(model), adamw(alone)
    for seed in range(3):
        x = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(seed))
        made = model(distribute_tensor(x.to("tpu"), mesh, [Shard(1)]))
        assert tuple(made.placements) == (Shard(1),)
        losses = made.full_tensor().square().mul(x.to("tpu")).mean(), alone(x).square().mul(x).mean()
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(losses[0].cpu(), losses[1], rtol=1e-6, atol=1e-6)


def functional() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    x = torch.arange(4.0, device="tpu") + rank
    total = funcol.all_reduce(x, "sum", group) + 1
    expected = [sum(i + r for r in range(size)) + 1.0 for i in range(4)]
    assert total.tolist() == expected
    gathered = funcol.all_gather_tensor(x, 0, group)
    assert gathered.tolist() == [i + float(r) for r in range(size) for i in range(4)]
    part = funcol.reduce_scatter_tensor(x.repeat(size), "avg", 0, group)
    assert part.tolist() == [(e - 1) / size for e in expected]
    exchanged = funcol.all_to_all_single(torch.full((size,), float(rank), device="tpu"), None, None, group)
    assert exchanged.tolist() == [float(r) for r in range(size)]


def checkpoint(folder: str) -> None:
    """Saved here by all ranks; the second half of the test loads it in one process."""
    model = make_model().to("tpu")
    fully_shard(model)
    optimizer = adamw(model)
    train(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    dcp.async_save({"model": weights, "optimizer": states}, checkpoint_id=folder).result()
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    before = [p.full_tensor().cpu() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    for found, wanted in zip(model.parameters(), before, strict=True):
        assert torch.equal(found.full_tensor().cpu(), wanted)


def reshard(old: str, new: str) -> None:
    """What other ranks saved in one folder is loaded by these, and saved in another one."""
    model = make_model().to("tpu")
    fully_shard(model)
    optimizer = adamw(model)
    weights, states = get_state_dict(model, optimizer)  # which makes the optimizer's
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=old)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=new)


def load_alone(folder: str) -> None:
    """One process reads what all ranks wrote, and its parameters are those of training alone."""
    model = make_model().to("tpu")
    dcp.load({"model": (weights := model.state_dict())}, checkpoint_id=folder)
    model.load_state_dict(weights)
    for found, wanted in zip(model.parameters(), on_one_process()[1], strict=True):
        torch.testing.assert_close(found.detach().cpu(), wanted, rtol=1e-5, atol=1e-6)


CLIENTS = (
    ddp, ddp_hooks, ddp_no_sync, fsdp2, hybrid, fsdp1, pipeline, plain_pipeline, dtensors, tensor_parallel,
    sequence_parallel, functional,
)  # fmt: skip


def check_all(folder: str) -> None:
    """Every client; a checkpoint of their last stays in the folder."""
    for client in CLIENTS:
        client()
        print(f"rank {dist.get_rank()}: {client.__name__} is equal", flush=True)
    checkpoint(folder)
