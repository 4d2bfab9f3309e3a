"""tpu tensors that are sent to other processes by torch.multiprocessing arrive as copies."""

from __future__ import annotations

import warnings
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool, torch.int8, torch.uint8,
    torch.int64, torch.float8_e4m3fn,
]  # fmt: skip


class Tied(torch.nn.Module):
    """With everything that a module has of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(5, 4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.norm(self.embedding(x) * self.frozen))
        return made


def sent(value: Any) -> Any:
    """What another process gets."""
    return ForkingPickler.loads(ForkingPickler.dumps(value))


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    assert (type(one), one.device, one.dtype, one.shape) == (type(other), other.device, other.dtype, other.shape)
    assert one.stride() == other.stride() and one.storage_offset() == other.storage_offset()
    bits = [t.detach().cpu().clone().contiguous().view(-1).view(torch.uint8) for t in (one, other)]
    assert torch.equal(*bits)


def aliases(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_any_dtype_and_strides_arrive(dtype: torch.dtype) -> None:
    x = torch.randint(0, 2, (4, 6)).to(dtype).to("tpu")
    for tensor in (x, x.t(), x[1:3, ::2], x[0, 0], x[:0], x.new_empty(0), x[0].expand(3, 6)):
        same(sent(tensor), tensor)


def test_views_of_conjugates_arrive_as_their_values() -> None:
    x = torch.randn(3, dtype=torch.complex64).to("tpu")
    assert sent(x.conj()).tolist() == x.conj().tolist()
    assert sent(x.conj().imag).tolist() == x.conj().imag.tolist()


def test_what_shares_a_storage_in_a_message_shares_one_where_it_arrives() -> None:
    x = torch.arange(6.0, device="tpu")
    whole, part, again, other = sent((x, x[2:4], x, x.clone()))
    part.mul_(10)
    assert whole.tolist() == [0, 1, 20, 30, 4, 5] and whole is again and not aliases(whole, other)
    assert x.tolist() == [0, 1, 2, 3, 4, 5]


def test_modules_keep_their_parameters_buffers_and_ties() -> None:
    module = Tied().to("tpu")
    found = sent(module)
    assert found.head.weight is found.embedding.weight
    assert [name for name, p in found.named_parameters() if not p.requires_grad] == ["frozen"]
    for one, other in zip(found.state_dict().values(), module.state_dict().values(), strict=True):
        same(one, other)
    assert all(type(p) is torch.nn.Parameter and p.is_leaf for p in found.parameters())
    optimizer = torch.optim.SGD(found.parameters(), 0.1)
    found(torch.tensor([1, 2], device="tpu")).sum().backward()
    optimizer.step()
    assert not torch.equal(found.head.weight.cpu(), module.head.weight.cpu())


def test_tensors_of_the_cpu_are_shared_as_before_and_results_of_ops_refused() -> None:
    x = torch.ones(3)
    found = sent(x)
    found.add_(1)
    resource_sharer.stop()  # the thread that hands on its memory
    assert x.tolist() == [2.0] * 3, "the CPU's are shared"
    with pytest.raises(RuntimeError, match="Cowardly refusing to serialize non-leaf tensor"):
        sent(torch.ones(2, device="tpu", requires_grad=True) * 2)


def test_sharing_memory_warns_that_updates_stay_where_they_are_made() -> None:
    with pytest.warns(UserWarning, match="tpu memory is not shared between processes"):
        Tied().to("tpu").share_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.nn.Linear(2, 2).share_memory()


def work(rank: int, model: Tied, inputs: torch.Tensor, queue: Any) -> None:
    """In a spawned process: a step, whose results go back."""
    model(inputs).square().sum().backward()
    queue.put((rank, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, inputs))


@pytest.mark.parametrize("starts", ["Process", "spawn"])
def test_spawned_processes_take_modules_and_tensors_and_send_some_back(starts: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Tied().to("tpu").share_memory()
    context = mp.get_context("spawn")
    queue, inputs = context.Queue(), torch.tensor([1, 2, 3], device="tpu")
    if starts == "Process":
        processes = [context.Process(target=work, args=(rank, model, inputs, queue)) for rank in range(2)]
        for process in processes:
            process.start()
    else:
        spawned: Any = mp.spawn
        processes = spawned(work, (model, inputs, queue), nprocs=2, join=False).processes
    try:
        received = [queue.get(timeout=240) for _ in processes]
    finally:
        for process in processes:
            process.join(60)
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    model(inputs).square().sum().backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert sorted(rank for rank, _, _ in received) == [0, 1]
    for _, grads, back in received:
        same(back, inputs)
        assert grads.keys() == wanted.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, wanted[name])
    assert model.seen.item() == 0 and model.norm.num_batches_tracked.item() == 1, "the children's updates are theirs"
