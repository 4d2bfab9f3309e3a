"""Every collective on the device leaves what gloo leaves on CPU tensors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from torchtpu import metrics

INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
GLOO = INTEGERS + FLOATS
MOVED = [*GLOO, torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn, torch.uint16]


def data(dtype: torch.dtype, *shape: int, seed: int = 0, rank: int | None = None) -> torch.Tensor:
    """Small numbers that differ from rank to rank, exact in every dtype."""
    generator = torch.Generator().manual_seed(100 * (dist.get_rank() if rank is None else rank) + seed)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def everyones(dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
    """What `data` gives each rank."""
    return [data(dtype, *shape, rank=rank) for rank in range(dist.get_world_size())]


def same(on_device: torch.Tensor, on_host: torch.Tensor, what: str) -> None:
    found = on_device.cpu()
    assert found.dtype == on_host.dtype and found.shape == on_host.shape, what
    bits, expected = (t.contiguous().view(-1).view(torch.uint8) for t in (found, on_host))
    assert torch.equal(bits, expected), f"{what}: {found} is not {on_host}"


def compare(what: str, run: Callable[[Any, Any], None], *tensors: Any, host: Any, device: Any) -> None:
    """Runs on clones of the tensors (lists of them too), on the device and on the CPU, and compares what they hold."""

    def clone(value: Any, where: str) -> Any:
        if isinstance(value, list):
            return [clone(v, where) for v in value]
        return value.clone().to(where) if where == "tpu" else value.clone()

    def leaves(value: Any) -> list[torch.Tensor]:
        return [leaf for v in value for leaf in leaves(v)] if isinstance(value, list) else [value]

    ours, theirs = clone(list(tensors), "tpu"), clone(list(tensors), "cpu")
    run(ours, device)
    run(theirs, host)
    for one, other in zip(leaves(ours), leaves(theirs), strict=True):
        same(one, other, what)


def all_reduce(t: Any, group: Any, op: Any) -> None:
    dist.all_reduce(t[0], op, group=group)


def reduce(t: Any, group: Any, op: Any) -> None:
    dist.reduce(t[0], 1, op, group=group)
    if dist.get_rank() != 1:
        t[0].zero_()  # whatever was left there


def reduce_scatter(t: Any, group: Any, op: Any) -> None:
    dist.reduce_scatter(t[0], t[1], op, group=group)


def reduce_scatter_single(t: Any, group: Any, op: Any) -> None:
    dist.reduce_scatter_single(t[0], torch.cat(t[1]), op, group=group)


def reductions(host: Any, device: Any) -> None:
    arithmetic = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
    bitwise = [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]

    def check(run: Any, op: Any, dtype: torch.dtype, *tensors: Any) -> None:
        what = f"{run.__name__} {op} {dtype}"
        compare(what, functools.partial(run, op=op), *tensors, host=host, device=device)

    for dtype, op in [*itertools.product(GLOO, arithmetic), *itertools.product(INTEGERS, bitwise)]:
        check(all_reduce, op, dtype, data(dtype, 3, 4))
    for dtype, op in itertools.product((torch.float32, torch.int64), arithmetic):
        parts = [data(dtype, 4, seed=i) for i in range(dist.get_world_size())]
        check(reduce, op, dtype, data(dtype, 6))
        check(reduce_scatter, op, dtype, torch.zeros(4, dtype=dtype), parts)
        check(reduce_scatter_single, op, dtype, torch.zeros(4, dtype=dtype), parts)


def reductions_without_gloo(device: Any) -> None:
    """Averages, factors and dtypes that gloo has not: compared with the formula."""
    size = dist.get_world_size()

    def reduced(x: torch.Tensor, op: Any) -> torch.Tensor:
        y = x.to("tpu")
        dist.all_reduce(y, op, group=device)
        return y

    for dtype in (*FLOATS, torch.int32):
        x = data(dtype, 5)
        total = torch.stack(everyones(dtype, 5)).to(torch.float64).sum(0)
        average = (total / size).to(dtype)
        same(reduced(x, ReduceOp.AVG), average, f"avg {dtype}")
    x = data(torch.float32, 5)
    for factor in (0.5, torch.tensor(0.25)):
        op = dist._make_nccl_premul_sum(factor if isinstance(factor, float) else factor.to("tpu"))
        expected = sum(t * factor for t in everyones(torch.float32, 5))
        assert isinstance(expected, torch.Tensor)
        same(reduced(x, op), expected, f"premul {factor}")
    x = data(torch.bool, 8)
    same(reduced(x, ReduceOp.SUM), torch.stack(everyones(torch.bool, 8)).any(0), "bool sum")
    same(reduced(x, ReduceOp.PRODUCT), torch.stack(everyones(torch.bool, 8)).all(0), "bool product")
    x = data(torch.complex64, 4) * (1 + 2j)
    same(reduced(x, ReduceOp.SUM), torch.stack(everyones(torch.complex64, 4)).sum(0) * (1 + 2j), "complex sum")
    x = data(torch.int16, 4)
    same(reduced(x, ReduceOp.MAX), torch.stack(everyones(torch.int16, 4)).amax(0), "int16 max")
    y = torch.zeros(2, device="tpu")
    dist.reduce_scatter_single(y, data(torch.float32, 2 * size).to("tpu"), ReduceOp.AVG, group=device)
    whole = torch.stack(everyones(torch.float32, 2 * size)).mean(0)
    same(y, whole.view(size, 2)[dist.get_rank()], "reduce_scatter avg")


def moves(host: Any, device: Any) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    both: Any = {"host": host, "device": device}
    for dtype in MOVED:
        x, parts = data(dtype, 2, 3), [data(dtype, 2, 3, seed=i + 1) for i in range(size)]

        def broadcast(t: Any, g: Any) -> None:
            dist.broadcast(t[0], 1, group=g)

        on_device = x.to("tpu")
        dist.broadcast(on_device, 1, group=device)
        expected = everyones(dtype, 2, 3)
        same(on_device, expected[1], f"broadcast {dtype}")
        gathered = [torch.zeros(2, 3).to(dtype).to("tpu") for _ in range(size)]
        dist.all_gather(gathered, x.to("tpu"), group=device)
        flat = torch.zeros(2 * size, 3).to(dtype).to("tpu")
        dist.all_gather_single(flat, x.to("tpu"), group=device)
        for i, one in enumerate(gathered):
            same(one, expected[i], f"all_gather {dtype}")
            same(flat[2 * i : 2 * i + 2], expected[i], f"all_gather_into_tensor {dtype}")
        for targets in (
            [(r + 1) % size for r in range(size)],
            [(r - 1) % size for r in range(size)],
            [*reversed(range(size))],
        ):
            source = targets.index(rank)
            sent, received = ([2 * (r == other) for r in range(size)] for other in (targets[rank], source))
            moved = torch.zeros(2, 3).to(dtype).to("tpu")
            dist.all_to_all_single(moved, x.to("tpu"), received, sent, group=device)
            same(moved, expected[source], f"all to {targets} {dtype}")
        if dtype in GLOO:
            compare(f"broadcast {dtype}", broadcast, x, **both)
            compare(
                f"gather {dtype}",
                lambda t, g: dist.gather(t[0], t[1] if rank == 0 else None, 0, group=g), x, parts, **both,
            )  # fmt: skip
            compare(
                f"scatter {dtype}",
                lambda t, g: dist.scatter(t[0], t[1] if rank == 1 else None, 1, group=g), x, parts, **both,
            )  # fmt: skip
            compare(
                f"all_to_all_single {dtype}",
                lambda t, g: dist.all_to_all_single(t[0], t[1], group=g), data(dtype, size, 2, seed=5),
                data(dtype, size, 2, seed=6), **both,
            )  # fmt: skip
    # Rank r sends r + 1 rows to rank 0 and none to the others.
    sent = [rank + 1] + [0] * (size - 1)
    received = [r + 1 for r in range(size)] if rank == 0 else [0] * size
    compare(
        "uneven all_to_all_single",
        lambda t, g: dist.all_to_all_single(t[0], t[1], received, sent, group=g),
        torch.zeros(sum(received), 2), data(torch.float32, rank + 1, 2), **both,
    )  # fmt: skip
    outputs = [torch.zeros(rank + 1, device="tpu") for _ in range(size)]
    dist.all_to_all(outputs, [torch.full((i + 1,), float(rank), device="tpu") for i in range(size)], group=device)
    for i, one in enumerate(outputs):
        same(one, torch.full((rank + 1,), float(i)), "all_to_all")
    uneven = [torch.zeros(i + 1, device="tpu") for i in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank), device="tpu"), group=device)
    for i, one in enumerate(uneven):
        same(one, torch.full((i + 1,), float(i)), "uneven all_gather")


def strides(host: Any, device: Any) -> None:
    both: Any = {"host": host, "device": device}
    x = torch.arange(24.0).view(4, 6) + dist.get_rank()
    on_device = x.to("tpu")
    view, transposed = on_device[1:3, 2:4], on_device.t()
    dist.all_reduce(view, group=device)
    expected = x.clone()
    piece = x[1:3, 2:4].contiguous()
    dist.all_reduce(piece, group=host)
    expected[1:3, 2:4] = piece
    same(on_device, expected, "all_reduce of a view")
    dist.broadcast(transposed, 0, group=device)
    compare("broadcast", lambda t, g: dist.broadcast(t[0], 0, group=g), expected, **both)
    dist.all_reduce(torch.zeros(0, device="tpu"), group=device)  # nothing, with everyone


def works(device: Any) -> None:
    x = torch.ones(4, device="tpu")
    before = metrics.snapshot()["cuts"].get("read", 0)
    work = dist.all_reduce(x, group=device, async_op=True)
    y = x * 2
    work.wait()
    (future,) = work.get_future().value()
    assert future is x or torch.equal(future, x)
    assert metrics.snapshot()["cuts"].get("read", 0) - before <= 1, "a wait is no read"
    assert y.tolist() == [2.0 * dist.get_world_size()] * 4
    assert work.is_completed()
    a, b = torch.ones(2, device="tpu"), torch.ones(3, device="tpu")
    with dist._coalescing_manager(group=device, device=torch.device("tpu"), async_ops=True) as manager:
        dist.all_reduce(a, group=device)
        dist.all_reduce(b, group=device)
    manager.wait()
    assert a.tolist() == [dist.get_world_size()] * 2 and b.tolist() == [dist.get_world_size()] * 3
    outs = [torch.zeros(2 * dist.get_world_size(), device="tpu") for _ in range(2)]
    with dist._coalescing_manager(group=device, device=torch.device("tpu")):
        for out in outs:
            dist.all_gather_single(out, a, group=device)
    assert outs[1].tolist() == a.tolist() * dist.get_world_size()


def point_to_point(device: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    mine, theirs = torch.full((3,), float(rank), device="tpu"), torch.zeros(3, device="tpu")
    ops = [dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, theirs, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert theirs.tolist() == [left] * 3
    received = torch.zeros(3, device="tpu")
    works = [dist.irecv(received, left), dist.isend(mine * 2, right)]  # crossed, and not in a batch
    for work in works:
        work.wait()
    assert received.tolist() == [2.0 * left] * 3
    if rank == 0:
        dist.send(torch.arange(5, device="tpu"), 1)
    elif rank == 1:
        numbers = torch.zeros(5, dtype=torch.int64, device="tpu")
        dist.recv(numbers, 0)
        assert numbers.tolist() == [0, 1, 2, 3, 4]
    first, second = torch.zeros(1, device="tpu"), torch.zeros(1, device="tpu")
    if rank == 0:
        dist.isend(torch.tensor([1.0], device="tpu"), 1, tag=1)
        dist.isend(torch.tensor([2.0], device="tpu"), 1, tag=2)
    elif rank == 1:
        works = [dist.irecv(second, 0, tag=2), dist.irecv(first, 0, tag=1)]
        for work in works:
            work.wait()
        assert (first.item(), second.item()) == (1.0, 2.0)
    assert metrics.snapshot()["collectives"]["send"] >= 2


def objects_and_groups(device: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    everything: list[Any] = [None] * size
    dist.all_gather_object(everything, {"rank": rank}, group=device)
    assert everything == [{"rank": r} for r in range(size)]
    items = ["one", 2] if rank == 0 else [None, None]
    dist.broadcast_object_list(items, 0, group=device)
    assert items == ["one", 2]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, list(range(size)) if rank == 0 else None, 0, group=device)
    assert mine == [rank]
    alone = [dist.new_group([r]) for r in range(size)]
    reverse = dist.new_group(list(reversed(range(size))))
    x = torch.full((2,), float(rank + 1), device="tpu")
    dist.all_reduce(x, group=alone[rank])
    assert x.tolist() == [rank + 1.0] * 2
    dist.all_reduce(x, group=reverse)
    assert x.tolist() == [sum(range(1, size + 1))] * 2
    dist.barrier(group=device)


def check_all(*, is_short: bool) -> None:
    """All of it, or what depends on how the backend was named."""
    device, host = dist.group.WORLD, dist.new_group(backend="gloo")
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [dist.get_world_size()] * 2, "CPU tensors are served too"
    point_to_point(device)
    works(device)
    strides(host, device)
    objects_and_groups(device)
    if not is_short:
        reductions(host, device)
        reductions_without_gloo(device)
        moves(host, device)
    assert not metrics.snapshot()["cpu_fallbacks"], metrics.snapshot()["cpu_fallbacks"]
