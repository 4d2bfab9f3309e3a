"""What the recorder makes of small scripts on the device: programs, outputs, versions, errors."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from reference_engine import ReferenceEngine, reference_engine
from torch import Tensor, nn

from torchtpu import metrics
from torchtpu.runtime import _C


@pytest.fixture
def engine() -> Iterator[ReferenceEngine]:
    with reference_engine() as engine:
        yield engine


def on(device: str, *values: float) -> Tensor:
    return torch.tensor(values, device=device)


def both(f: Callable[[str], object]) -> tuple[object, object]:
    """What f gives on the CPU and on the device: values as lists, an exception as its type and text."""
    found = []
    for device in ("cpu", "tpu"):
        try:
            made = f(device)
        except Exception as error:
            made = (type(error), str(error).replace("tpu:0", "cpu"))
        found.append(made.tolist() if isinstance(made, Tensor) else made)
    return found[0], found[1]


def same(f: Callable[[str], object]) -> None:
    cpu, tpu = both(f)
    assert cpu == tpu


# ---- the trie


def test_a_loop_in_steady_state_adds_no_nodes(engine: ReferenceEngine) -> None:
    x = on("tpu", 1.0, 2.0)
    for i in range(50):
        if i == 10:
            before, programs = metrics.snapshot(), len(engine.programs)
        x = x * 0.5 + 1
        if i % 5 == 4:
            x.tolist()
    after = metrics.snapshot()
    assert after["trie_nodes"] == before["trie_nodes"]
    assert after["trie_misses"] == before["trie_misses"]
    assert len(engine.programs) == programs


def kv_cache(cache: Tensor, i: int) -> Tensor:
    cache[:, i] = cache.new_ones(2)
    return cache[:, i] * 2


@pytest.mark.parametrize(
    "step",
    [
        lambda x, i: x - (0.1 + i / 7) * x,  # a learning rate
        lambda x, i: x.add_(x, alpha=1 / (i + 3)),
        lambda x, i: x + (i + 5),
        lambda x, i: x[i] * 3,
        lambda x, i: x[:, i] * 3,
        lambda x, i: (x / (1.5 + i)).softmax(-1),  # a temperature
        lambda x, i: nn.functional.dropout(x, 0.1 + i / 100),
        lambda x, i: torch._foreach_mul([x, x + 1], [i + 3.5, i + 4.5])[1],
        lambda x, i: torch._foreach_add([x], float(i + 3))[0],
        lambda x, i: x.clamp(-3.0 - i, 3.0 + i),
        lambda x, i: torch.where(x > i + 3, x, i + 4.5),
        lambda x, i: x.masked_fill(x > 2, float(i + 5)),
        lambda x, i: torch.full_like(x, i + 5.5),
        lambda x, i: x * torch.tensor(i + 3.5),
        lambda x, i: torch.arange(i + 1, i + 5, device="tpu"),
        lambda x, i: torch.arange(7 * i, 7 * i + 9, 2, dtype=torch.int32, device="tpu"),
        lambda x, i: torch.ops.aten.select_backward(x[0], [8, 8], 0, i),
        lambda x, i: torch.ops.aten.select_backward(x[0], [8, 8], 1, -i),
        lambda x, i: torch.ops.aten.slice_backward(x[:2], [16, 8], 0, i, i + 2, 1),
        kv_cache,
    ],
)
def test_a_number_that_changes_compiles_twice_at_most(
    engine: ReferenceEngine, step: Callable[[Tensor, int], Tensor]
) -> None:
    """Once as it came, once with the number as an input."""
    x = torch.arange(64.0).view(8, 8).tpu()[:, :]
    x.sum().item()
    planned = []
    for i in range(2, 8):
        step(x.clone()[:2] if step is kv_cache else x, i).tolist()
        planned.append(len(engine.programs))
    assert planned[1:] == planned[1:2] * 5, planned


def test_an_optimizer_with_a_schedule_compiles_no_more_after_its_fourth_step(engine: ReferenceEngine) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).tpu()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))
    x = torch.ones(2, 4).tpu()
    planned = []
    for _ in range(8):
        loss = model(x).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        loss.item()
        planned.append(len(engine.programs))
    assert planned[3:] == planned[3:4] * 5, planned


def test_the_precision_of_a_product_is_that_of_its_call(engine: ReferenceEngine) -> None:
    x = torch.ones(2, 2).tpu()
    assert torch.get_float32_matmul_precision() == "highest"
    try:
        for _ in range(3):
            y = x @ x
            torch.backends.cuda.matmul.allow_tf32 = True
            z = (x @ x).relu()
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.set_float32_matmul_precision("medium")
            w = torch.nn.functional.linear(x, x)
            torch.set_float32_matmul_precision("highest")
            torch.stack([y, z, w]).cpu()
    finally:
        torch.set_float32_matmul_precision("highest")
    (program,) = engine.programs
    assert [op.settings for op in program.ops] == ["highest", "high", None, "medium", None]


def test_a_linear_layer_is_one_op_each_way(engine: ReferenceEngine) -> None:
    layer = nn.Linear(4, 3).tpu()
    x = torch.ones(2, 5, 4).tpu().requires_grad_()
    layer(x).sum().backward()
    torch.tpu.synchronize()
    names = [op.name for program in engine.programs for op in program.ops]
    assert (names.count("linear"), names.count("linear_backward")) == (1, 1)
    assert not {"addmm", "mm"}.intersection(names)
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[10.0] * 4] * 3


def test_zero_and_minus_zero_are_two_numbers(engine: ReferenceEngine) -> None:
    x = on("tpu", 1.0)
    for _ in range(3):
        assert torch.copysign(x, 0.0).item() == 1
        assert torch.copysign(x, -0.0).item() == -1
        assert (x * float("nan")).isnan().item()


def test_complex_numbers_are_told_apart_by_their_bits(engine: ReferenceEngine) -> None:
    x = torch.zeros(2, dtype=torch.complex64, device="tpu")
    for number in (0j, complex(0, -0.0), complex("nan"), complex("inf"), complex("nan+nanj")) * 2:
        assert repr(x.fill_(number).tolist()) == repr([number] * 2)
        found, expected = (torch._foreach_mul([on(device, 0.5)], [number])[0] for device in ("tpu", "cpu"))
        assert repr(found.tolist()) == repr(expected.tolist())


def test_forgotten_streams_free_their_plans(engine: ReferenceEngine) -> None:
    (on("tpu", 1.0) + 1).item()
    assert len(engine.executables) == 1
    _C.forget_streams()
    torch.tpu.synchronize()
    deadline = time.monotonic() + 10
    while engine.executables and time.monotonic() < deadline:  # the launcher may just be letting go of its work
        _C.drain()
        gc.collect()
    assert not engine.executables
    assert metrics.snapshot()["trie_nodes"] == 0


# ---- live sets and donation


def test_dead_values_are_no_outputs(engine: ReferenceEngine) -> None:
    x = on("tpu", 1.0, 2.0)
    y = x + 1
    y = y * 2
    y = y - 3
    assert y.tolist() == [1, 3]
    assert len(engine.programs[-1].ops) == 3
    assert len(engine.programs[-1].outputs) == 1


def test_gradients_freed_at_the_top_of_the_next_step_are_no_outputs(engine: ReferenceEngine) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).tpu()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.ones(2, 3).tpu()
    torch.tpu.synchronize()
    for _ in range(4):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    model.zero_grad()
    torch.tpu.synchronize()
    assert len(engine.programs[-1].outputs) == 4  # the parameters
    assert metrics.snapshot()["cuts"]["optimizer.step"] >= 3


def test_a_buffer_nobody_holds_is_donated_and_one_that_is_held_is_not(engine: ReferenceEngine) -> None:
    x, y = on("tpu", 1.0), on("tpu", 2.0)
    torch.tpu.synchronize()
    x.add_(y)
    torch.tpu.synchronize()
    (donated,) = engine.programs[-1].donated
    assert donated == 0
    assert (x.item(), y.item()) == (3, 2)


def test_a_buffer_whose_storage_grew_is_donated_once(engine: ReferenceEngine) -> None:
    x = on("tpu", 1.0, 2.0, 3.0)
    torch.tpu.synchronize()
    y = x + 1
    x.untyped_storage().resize_(16)
    x.add_(1)
    assert (x.tolist(), y.tolist()) == ([2, 3, 4], [2, 3, 4])


# ---- errors


def test_a_failed_call_leaves_the_region_as_it_was(engine: ReferenceEngine) -> None:
    x = on("tpu", 1.0, 2.0)
    x.tolist()
    for i in range(4):
        y = x + 1
        if i % 2:
            with pytest.raises(RuntimeError, match="must match the size"):
                y + torch.ones(3, device="tpu")
            with pytest.raises(RuntimeError, match="must match the size"):
                y.add_(torch.zeros(i + 3, device="tpu"))
        assert _C.dump(0) is not None
        assert y.tolist() == [2, 3]
    assert len(engine.programs[-1].inputs) == 1


def test_a_list_op_that_fails_leaves_the_region_as_it_was(engine: ReferenceEngine) -> None:
    """Its arguments had got numbers as inputs when the CPU refused them."""
    for i in range(4):
        x, y = torch.zeros(3, dtype=torch.bool, device="tpu"), torch.ones(2, device="tpu")
        torch.tpu.synchronize()
        z = torch.empty(2, device="tpu").fill_(1.0)
        if i % 2:
            with pytest.raises(RuntimeError, match="can't be cast"):
                torch._foreach_mul_([y, x], [2, 3])
        assert z.tolist() == [1, 1]
        assert y.tolist() == [1 + i % 2] * 2  # as on the CPU: what came before the error is done


@pytest.mark.parametrize(
    "call",
    [
        lambda d: torch.ones(2, device=d) + torch.ones(3, device=d),
        lambda d: torch.ones(2, device=d).add_(torch.ones(3, 2, device=d)),
        lambda d: torch.ones(3, device=d).expand(2, 3).add_(1),
        lambda d: (lambda x: x[1:].add_(x[:-1]))(torch.ones(4, device=d)),
        lambda d: (lambda x: torch.cat([x, x], out=x[:4]))(torch.ones(4, device=d)),
        lambda d: torch.ones(2, dtype=torch.bool, device=d).mul_(2),
        lambda d: torch.ones(2, dtype=torch.int64, device=d).mul_(0.5),
        lambda d: torch.neg(torch.ones(2, dtype=torch.int64, device=d), out=torch.ones(2, device=d)),
        lambda d: torch.ones(2, 3, device=d) @ torch.ones(2, 3, device=d),
        lambda d: torch.ones(2, 3, device=d).view(4),
        lambda d: torch.ones(2, device=d)[3],
        lambda d: bool(torch.ones(2, device=d)),
        lambda d: torch.ones(2, device=d).item(),
        lambda d: torch.ones(0, device=d).max(),
        lambda d: torch.ones(2, device=d).sum(3),
        lambda d: torch.ones(2, device=d).view(torch.complex64).view(torch.int16).view(2, 3),
        lambda d: torch.equal(torch.ones(2, device=d), torch.ones(3, dtype=torch.int64, device=d)),
    ],
)
def test_a_bad_call_raises_what_the_cpu_raises(engine: ReferenceEngine, call: Callable[[str], object]) -> None:
    for _ in range(2):
        same(call)


def test_tensors_of_two_devices_do_not_mix(engine: ReferenceEngine) -> None:
    x, y = torch.ones(2, device="tpu"), torch.ones(2)
    for call in (lambda: x + y, lambda: y + x, lambda: x.add_(y), lambda: torch.cat([x, y])):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            call()
    for call in (lambda: x.set_(y), lambda: y.set_(x), lambda: y.set_(x.untyped_storage())):
        with pytest.raises(RuntimeError, match="to a storage on different device"):
            call()
    assert y.device.type == "cpu" and y.tolist() == [1, 1]
    assert (x + torch.tensor(1.0)).tolist() == [2, 2]


def test_a_number_beside_a_write_to_its_storage_is_checked_each_time(engine: ReferenceEngine) -> None:
    """Overlap depends on offsets: those are compared, never lifted, where an op writes beside what it reads."""
    x = torch.arange(12.0).tpu()
    for i in (4, 6, 8):
        x[0:2].add_(x[i : i + 2])
    with pytest.raises(RuntimeError, match="single memory location"):
        x[0:2].add_(x[1:3])


# ---- aliasing


def test_a_resized_output_keeps_the_rest_of_its_storage(engine: ReferenceEngine) -> None:
    def small(device: str) -> list[object]:
        x = torch.arange(6.0, device=device)
        y = x.view(2, 3)
        torch.sum(torch.ones(2, 2, device=device), 0, out=x)
        return [x.tolist(), y.tolist(), x.untyped_storage().nbytes()]

    def large(device: str) -> list[object]:
        x = torch.arange(6.0, device=device)
        y = x[4:]
        torch.add(torch.ones(4, device=device), 1, out=y)
        return [x.tolist(), y.tolist(), y.storage_offset(), y.untyped_storage().nbytes()]

    for _ in range(2):
        with pytest.warns(UserWarning, match="resized"):
            same(small)
        with pytest.warns(UserWarning, match="resized"):
            same(large)


def test_list_ops_write_views_of_one_storage_one_after_the_other(engine: ReferenceEngine) -> None:
    def halves(device: str) -> Tensor:
        x = torch.arange(4.0, device=device)
        torch._foreach_add_([x[:2], x[2:]], 1)
        return x

    def twice(device: str) -> Tensor:
        x = torch.arange(4.0, device=device)
        torch._foreach_mul_([x, x[1:], x], [2, 3, 4])
        return x

    def crossed(device: str) -> Tensor:
        x = torch.arange(4.0, device=device)
        torch._foreach_add_([x[:2], x[2:]], [x[2:], x[:2]])
        return x

    def fresh(device: str) -> Tensor:
        x = torch.empty(4, device=device)
        torch._foreach_copy_([x[:2], x[2:]], [torch.ones(2, device=device), torch.ones(2, device=device)])
        return x

    for call in (halves, twice, crossed, fresh):
        for _ in range(2):
            same(call)


def test_list_ops_count_as_changes_for_autograd(engine: ReferenceEngine) -> None:
    def call(device: str) -> Tensor:
        x = torch.ones(2, device=device, requires_grad=True)
        y = x * 2
        z = y * y
        torch._foreach_zero_([y.detach()])
        z.sum().backward()
        return x.grad

    cpu, tpu = both(call)
    assert cpu[1].split(";")[0].replace("torch.FloatTensor", "") == tpu[1].split(";")[0].replace("tpuFloatType", "")


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x._neg_view().clone(),
        lambda x: x._neg_view().neg_(),
        lambda x: x.conj().clone(),
        lambda x: x.conj().conj_physical_(),
        lambda x: x.conj().imag + 1,
        lambda x: x.conj().mH.add_(x),
        lambda x: torch.mm(x.conj(), x),
        lambda x: torch.mm(x.mH, x, out=torch.empty_like(x)),
        lambda x: x.conj()._neg_view().fill_(2 + 3j),
        lambda x: torch._foreach_add([x.conj()], 1)[0],
        lambda x: x * torch.tensor(2 + 1j),
        lambda x: x.real * 2j,
    ],
)
def test_lazily_conjugated_and_negated_tensors_have_their_values(
    engine: ReferenceEngine, call: Callable[[Tensor], Tensor]
) -> None:
    def run(device: str) -> list[object]:
        x = torch.tensor([[1 + 2j, 3 - 1j], [2j, 1 + 0j]], device=device)
        made = call(x)
        return [made.tolist(), made.is_conj(), made.is_neg(), x.tolist(), x._version]

    for _ in range(2):
        same(run)
    assert not metrics.snapshot()["cpu_fallbacks"]


def test_copies_into_negated_tensors_convert_before_they_negate(engine: ReferenceEngine) -> None:
    def run(device: str) -> list[object]:
        x = torch.zeros(2, device=device)
        x._neg_view().copy_(torch.tensor([True, False], device=device))
        y = torch.zeros(2, device=device)
        y._neg_view().copy_(torch.tensor([1, 3], dtype=torch.uint8, device=device))
        return [x.tolist(), y.tolist()]

    same(run)


def test_a_resize_to_the_same_sizes_leaves_the_storage(engine: ReferenceEngine) -> None:
    def resized(device: str) -> object:
        x = torch.arange(4.0).to(device)
        x.as_strided((2, 3), (3, 0)).resize_(2, 3)
        return x.untyped_storage().nbytes()

    same(resized)


def test_set_with_the_same_sizes_keeps_strides_and_storage(engine: ReferenceEngine) -> None:
    def run(device: str) -> list[object]:
        x = torch.arange(6.0, device=device).view(2, 3)
        y = x[:, :2]
        y.set_(x.untyped_storage(), 1, (2, 2))
        z = torch.zeros(2, device=device).set_(x.untyped_storage(), 1, (2, 2))
        return [y.stride(), y.tolist(), z.stride(), z.tolist(), x.untyped_storage().nbytes()]

    same(run)


def test_tied_weights_stay_tied(engine: ReferenceEngine) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    for model in (Tied().to("tpu"), Tied().tpu(), copy.deepcopy(Tied().tpu())):
        assert model.head.weight is model.embed.weight
        with torch.no_grad():
            model.embed.weight.fill_(2)
        assert model.head.weight.sum().item() == 30
    optimizer = torch.optim.SGD((model := Tied()).parameters(), 1.0)
    model.to("tpu")
    model.head(torch.ones(1, 3, device="tpu")).sum().backward()
    before = model.embed.weight.detach().cpu()
    optimizer.step()
    assert torch.equal(model.embed.weight.detach().cpu(), before - 1)


def test_data_is_read_and_replaced(engine: ReferenceEngine) -> None:
    def run(device: str) -> list[object]:
        p = nn.Parameter(torch.ones(3, device=device))
        alias = p.data
        version = p._version
        alias.add_(1)
        first = p.tolist()
        p.data = torch.zeros(2, device=device)
        p.data.add_(5)
        return [first, p.tolist(), alias.tolist(), version, p._version, list(p.shape)]

    same(run)


def test_batch_norm_keeps_its_running_statistics(engine: ReferenceEngine) -> None:
    def run(device: str) -> list[object]:
        norm = nn.BatchNorm1d(2).to(device)
        alias = norm.running_mean[:1]
        for i in range(3):
            norm(torch.arange(8.0, device=device).view(4, 2) * (i + 1))
        norm.eval()
        norm(torch.ones(2, 2, device=device))
        return [norm.running_mean.tolist(), norm.running_var.tolist(), alias.tolist(), norm.num_batches_tracked.item()]

    same(run)
