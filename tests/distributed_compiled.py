"""Compiled models train on all ranks as in one process, in as few launches."""

from __future__ import annotations

import torch
import torch._dynamo
import torch.distributed as dist
from distributed_clients import adamw, check, make_model, train
from distributed_fusion import train as train_counted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def sharded(model: nn.Module) -> nn.Module:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def fsdp2_of_compiled_layers() -> None:
    """As recipes do it: compile the parts, then shard them."""
    model = make_model().to("tpu")
    for layer in model:
        layer.compile()
    check(train(sharded(model), adamw(model)), model)


def fsdp2_compiled_whole() -> None:
    model = sharded(make_model().to("tpu"))
    check(train(torch.compile(model), adamw(model)), model)


def ddp_compiled() -> None:
    model = DistributedDataParallel(make_model().to("tpu"))
    check(train(torch.compile(model), adamw(model)), model)


def tensor_parallel_compiled() -> None:
    mesh = init_device_mesh("tpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).to("tpu")
    torch.manual_seed(0)
    split = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).to("tpu")
    parallelize_module(split, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).to("tpu")
    compiled = torch.compile(split, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), alone(x), rtol=1e-5, atol=1e-6)
    compiled(x).square().sum().backward()
    alone(x).square().sum().backward()
    for found, wanted in zip(split.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), wanted.grad, rtol=1e-5, atol=1e-6)


def an_fsdp2_step_is_one_program() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to("tpu")
    for layer in model:
        layer.compile()
    last = train_counted(sharded(model))
    assert last["collectives_alone"] == 0, last
    assert last["collectives_fused"] >= 5, last
    assert last["launches"] <= 2, last


def main() -> None:
    dist.init_process_group("tpu")
    for client in (
        fsdp2_of_compiled_layers, fsdp2_compiled_whole, ddp_compiled, tensor_parallel_compiled,
        an_fsdp2_step_is_one_program,
    ):  # fmt: skip
        torch._dynamo.reset()
        client()
        print(f"rank {dist.get_rank()}: {client.__name__} is equal", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
