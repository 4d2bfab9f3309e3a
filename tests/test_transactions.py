"""Training steps of which one fails: what is left is what PyTorch on the CPU has where the op raises.

The CPU's run raises at the op that fails on the device; what it has then, and after further steps, is compared.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from typing import Any

import pytest
import torch
from torch import nn

import torchtpu
from torchtpu import metrics, startup

LIMIT = 32 << 20
TOO_LARGE = 1 << 24  # floats
BATCH = 8


class Trap(nn.Module):
    """What may take all memory, in the forward pass or in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.springs: str | None = None
        self.taken: list[torch.Tensor] = []

    def spring(self, x: torch.Tensor) -> None:
        if x.device.type == "cpu":
            raise torch.OutOfMemoryError
        self.taken.append(torch.ones((), device=x.device).expand(TOO_LARGE).cosh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.springs == "forward":
            self.spring(x)
        if self.springs == "backward" and x.requires_grad:
            x.register_hook(self.spring)
        return x


def perceptron() -> nn.Sequential:
    layers = [[nn.Linear(24, 24), Trap(), nn.Tanh()] for _ in range(3)]
    return nn.Sequential(*(module for layer in layers for module in layer))


def transformer() -> nn.Sequential:
    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    return nn.Sequential(nn.Embedding(11, 16), Trap(), layer(), Trap(), layer(), Trap(), nn.Linear(16, 11), Trap())


def convolutions() -> nn.Sequential:
    layers = [[nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), Trap(), nn.ReLU()] for _ in range(3)]
    return nn.Sequential(*(module for layer in layers for module in layer))


MODELS: dict[str, tuple[Callable[[], nn.Sequential], Callable[[torch.Generator], torch.Tensor]]] = {
    "perceptron": (perceptron, lambda seed: torch.randn(BATCH, 24, generator=seed)),
    "transformer": (transformer, lambda seed: torch.randint(11, (BATCH, 6), generator=seed)),
    "convolutions": (convolutions, lambda seed: torch.randn(BATCH, 3, 6, 6, generator=seed)),
}


class Training:
    """A model of a kind on a device; the same everywhere."""

    def __init__(self, kind: str, device: str) -> None:
        torch.manual_seed(0)
        make, self.inputs = MODELS[kind]
        self.model = make().to(device)
        self.device = device
        self.traps = [module for module in self.model if isinstance(module, Trap)]
        # Its step count is on the device: what Python itself counts is not undone.
        # A gradient that is zero but for rounding, as that of a key's bias, must not become a step.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2, eps=1e-3, capturable=device == "tpu")
        self.step(-1)  # what Python makes in a first step that fails stays too

    def step(self, number: int, batch: int = BATCH, trap: int | None = None, springs: str = "") -> torch.Tensor:
        x = self.inputs(torch.Generator().manual_seed(1 + number))[:batch].to(self.device)
        if trap is not None:
            self.traps[trap].springs = springs
        self.optimizer.zero_grad()
        try:
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
        finally:
            for module in self.traps:
                module.springs = None
        return loss.detach()

    def steps(self, numbers: range, failing: int, trap: int, springs: str) -> None:
        """Steps of which one fails, and then a read, which may take the loss alone, beside what takes the memory."""
        for number in numbers:
            loss = self.step(number, trap=trap if number == failing else None, springs=springs)
        loss.item()
        torch.tpu.synchronize()

    def go_on(self) -> None:
        for module in self.traps:
            module.taken.clear()

    def state(self) -> dict[str, torch.Tensor]:
        saved = io.BytesIO()
        torch.save((self.model.state_dict(), self.optimizer.state_dict()["state"]), saved)
        saved.seek(0)
        model, optimizer = torch.load(saved, map_location="cpu")
        return {**model, **{f"{n}.{name}": value for n, own in optimizer.items() for name, value in own.items()}}


def assert_alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            value, other[name], rtol=2e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.fixture
def little_memory() -> Iterator[None]:
    with torchtpu.config.using(memory_limit=LIMIT):
        yield


def run_out_of_memory(training: Training, ours: Training, chance: random.Random, number: int, reads_every: int) -> int:
    """Steps, of which one fails at a random op, and then the same with half the batch; the number of the next step."""
    failing = number + chance.randrange(reads_every)
    trap, springs = chance.randrange(len(ours.traps)), chance.choice(["forward", "backward"])
    for device in (training, ours):
        before = device.state() if reads_every == 1 and device is ours else {}
        with pytest.raises(torch.OutOfMemoryError):
            device.steps(range(number, number + reads_every), failing, trap, springs)
        device.go_on()
        after = device.state()  # at once
        for name, value in before.items():
            if "running" not in name and "tracked" not in name:
                assert torch.equal(value, after[name]), name
    assert_alike(after, training.state())
    for device in (training, ours):
        losses = [device.step(step, BATCH // 2) for step in range(failing, number + reads_every)]
        losses[-1].item()
    assert_alike(ours.state(), training.state())
    return number + reads_every


@pytest.mark.parametrize("reads_every", [1, 5])
@pytest.mark.parametrize("kind", MODELS)
def test_out_of_memory_at_a_random_op_leaves_what_was_there_before_it(
    kind: str, reads_every: int, little_memory: None
) -> None:
    training, ours, chance = Training(kind, "cpu"), Training(kind, "tpu"), random.Random(f"{kind} {reads_every}")
    number = 0
    for _ in range(3):
        number = run_out_of_memory(training, ours, chance, number, reads_every)
    assert metrics.snapshot()["out_of_memory"] == 3


@pytest.mark.full
@pytest.mark.parametrize("reads_every", [1, 10])
@pytest.mark.parametrize("kind", MODELS)
def test_out_of_memory_fifty_times(kind: str, reads_every: int, little_memory: None) -> None:
    chance = random.Random(f"{kind} {reads_every} long")
    for _ in range(10):  # short runs: the CPU's and the device's last bits drift apart
        training, ours = Training(kind, "cpu"), Training(kind, "tpu")
        number = 0
        for _ in range(5):
            number = run_out_of_memory(training, ours, chance, number, reads_every)


def test_a_batch_drawn_on_the_device_that_does_not_fit_fails_alone(
    little_memory: None, capfd: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(16, 16).to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: int) -> float:
        loss = model(torch.randn(batch, 16, device="tpu")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    step(BATCH)
    before = model.weight.detach().cpu()
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="normal_"):
            step(TOO_LARGE // 8)
        assert torch.equal(model.weight.detach().cpu(), before)
    assert step(BATCH // 2) > 0
    assert "taken apart" not in capfd.readouterr().err


def refuse(*args: Any, **named: Any) -> Any:
    raise ValueError("refused by the test")


def test_a_future_that_raises_tells_the_thread_that_asks_it_and_no_read_raises_the_error_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, x = torch.ones(3, device="tpu"), torch.zeros(3, device="tpu")
    torch.tpu.synchronize()
    with monkeypatch.context() as patch:
        patch.setattr(startup.engine().client, "execute", refuse)
        read = torchtpu.async_read(x.cosh())
        wait([read], 60)
    weight.mul_(2)  # eager PyTorch would raise before it
    with pytest.raises(RuntimeError, match="refused by the test"):
        read.result(60)
    assert weight.add(1).tolist() == [2.0] * 3
    torch.tpu.synchronize()


def refuse_cosh(stage: str, patch: pytest.MonkeyPatch) -> None:
    """What the stage does with regions that hold this op fails."""
    engine = startup.engine()
    owner, name, is_refused = {
        "lower": (engine.fragments, "find", lambda ops: any("cosh" in op.name for op in ops)),
        "compile": (engine.compiler, "_load_or_compile", lambda plan, *rest: "cosh" in plan.text()),
        "launch": (engine._executor, "run", lambda work, *rest: any("cosh" in op.name for op in work.program.ops)),
    }[stage]
    works = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **more: refuse() if is_refused(*args) else works(*args, **more))


@pytest.mark.bailouts("padding")  # the launch that is refused may be a padded program's
@pytest.mark.parametrize(("stage", "settled"), [("lower", 0), ("compile", 0), ("launch", 0), ("launch", 3)])
def test_a_fault_leaves_what_pytorch_on_the_cpu_has_before_the_op(
    stage: str, settled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"lower": 17, "compile": 19, "launch": 23 + settled}[stage]
    ours, reference = torch.full((rows,), 0.01, device="tpu"), torch.full((rows,), 0.01)

    def step(weight: torch.Tensor, fails: bool = False) -> torch.Tensor:
        weight.mul_(2)
        if fails and weight.device.type == "cpu":
            return weight
        made = weight.cosh()
        weight.add_(made)
        return made

    for _ in range(settled):
        step(reference)
        step(ours).sum().item()
    torch.tpu.synchronize()
    with monkeypatch.context() as patch:
        refuse_cosh(stage, patch)
        made, weight = step(ours), step(reference, fails=True)
        with pytest.raises(RuntimeError, match="refused by the test"):
            made.cpu()
        torch.testing.assert_close(ours.cpu(), weight)
        torch.tpu.synchronize()  # the error was raised once
    step(ours)
    step(reference)
    torch.testing.assert_close(ours.cpu(), reference)


class Storages:
    """Tensors that are there before an op fails, and what is done to them before and behind it."""

    def __init__(self, device: str) -> None:
        self.whole = torch.arange(4.0, device=device)
        self.rows = torch.zeros(6, 3, device=device)
        self.sums = torch.ones(5, dtype=torch.bfloat16, device=device)
        self.places = torch.tensor([1, 3], device=device)
        self.turned = torch.ones(2, 3, device=device).t()
        self.filled = torch.zeros(3, device=device)

    def before(self) -> None:
        self.whole.add_(1)
        self.rows[1:2].add_(5)
        self.sums.index_add_(0, self.places, torch.ones(2, dtype=torch.bfloat16, device=self.sums.device))
        self.turned.mul_(2)
        self.filled.fill_(1)
        self.fresh = torch.zeros(2, device=self.whole.device)

    def behind(self) -> None:
        self.whole.mul_(2).sub_(self.rows[0, 0])
        self.rows[2:4].fill_(7)
        self.rows[:, 1].copy_(self.rows[:, 0] + 1)
        self.rows.index_copy_(0, self.places[:1], torch.full((1, 3), 9.0, device=self.rows.device))
        self.rows.index_copy_(0, self.places, torch.full((2, 3), 8.0, device=self.rows.device))
        self.sums[self.places] = 4
        self.sums.index_add_(0, self.places, torch.ones(2, dtype=torch.bfloat16, device=self.sums.device))
        self.turned[0].zero_()
        self.filled.fill_(3)
        self.fresh.add_(1)

    def state(self) -> list[torch.Tensor]:
        tensors = [self.whole, self.rows, self.sums, self.turned, self.filled, self.fresh]
        return [tensor.detach().cpu() for tensor in tensors]


CHECKED: dict[str, tuple[type[Exception], Callable[[torch.Tensor], torch.Tensor]]] = {
    "a read out of range": (IndexError, lambda x: x[torch.tensor([9], device=x.device)]),
    "an embedding": (IndexError, lambda x: nn.functional.embedding(torch.tensor([9], device=x.device), x[:, None])),
    "an assertion": (RuntimeError, lambda x: torch._assert_async(x.sum() > 1e6) or x.sum()),
    "a write out of range": (
        (IndexError, RuntimeError),
        lambda x: x.clone().index_add_(0, torch.tensor([9], device=x.device), x[:1]),
    ),
}


@pytest.mark.parametrize("settled", [0, 3])
@pytest.mark.parametrize("kind", CHECKED)
def test_a_check_that_fails_on_the_device_leaves_what_was_there_before_its_op(kind: str, settled: int) -> None:
    error, fails = CHECKED[kind]
    ours, reference = Storages("tpu"), Storages("cpu")
    torch.tpu.synchronize()
    for raises in [*["made"] * settled, "made", "written", "synchronize"]:
        ours.before()
        made = fails(ours.whole)
        ours.behind()
        reference.before()
        with pytest.raises(error):
            {"made": made.cpu, "written": ours.rows.cpu, "synchronize": torch.tpu.synchronize}[raises]()
        del made
        for own, other in zip(ours.state(), reference.state(), strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=0)
        torch.tpu.synchronize()  # the error was raised once
    for storages in (ours, reference):
        storages.before()
        storages.behind()
    for own, other in zip(ours.state(), reference.state(), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0)


def test_each_write_is_undone_that_follows_a_check_that_fails_and_none_before_it() -> None:
    """In a region of several checks, of which another one fails each time."""

    def run(weight: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        total = weight.sum()
        for n in range(4):
            weight.mul_(2)
            total = total + weight[places[n]].sum()
            weight[n].add_(total)
        return total

    places = torch.zeros(4, 1, dtype=torch.int64)
    for bad in (*range(4), None):
        given = places.clone()
        if bad is not None:
            given[bad] = 11
        ours, reference = torch.ones(4, 3, device="tpu"), torch.ones(4, 3)
        given_to_ours = given.to("tpu")
        torch.tpu.synchronize()
        total = run(ours, given_to_ours)
        if bad is None:
            assert total.item() == run(reference, given).item()
        else:
            with pytest.raises(IndexError):
                run(reference, given)
            with pytest.raises(IndexError, match="aten::index"):
                total.item()
        assert torch.equal(ours.cpu(), reference)


def test_what_was_overwritten_before_the_check_is_of_no_account() -> None:
    x, places = torch.ones(3, device="tpu"), torch.tensor([1, 9], device="tpu")
    torch.tpu.synchronize()
    for place, left in ((places[:1], 3.0), (places[1:], 2.0)):
        made = torch.empty(3, device="tpu").zero_().fill_(2)
        picked = x[place]
        made.add_(1)
        if left == 3.0:
            assert picked.item() == 1
        else:
            with pytest.raises(IndexError):
                picked.item()
        assert made.tolist() == [left] * 3


@pytest.mark.parametrize("reads_every", [1, 4])
def test_training_goes_on_after_a_batch_with_an_index_that_is_out_of_range(reads_every: int) -> None:
    def step(training: Training, number: int, bad: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(11, (BATCH, 5), generator=generator)
        tokens[-1, -1] += bad
        x, targets = tokens.to(training.device), tokens.roll(1, 1).clamp(max=10).to(training.device)
        training.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(training.model(x).flatten(0, 1), targets.flatten())
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    ours, reference = Training("transformer", "tpu"), Training("transformer", "cpu")
    for first in range(0, 12, 4):
        for number in range(first, first + 3):
            step(ours, number)
            step(reference, number)
        torch.tpu.synchronize()
        before = ours.state()
        for number in range(reads_every):
            failed = step(ours, 100 + number, bad=99 if number == 0 else 0)
        with pytest.raises(IndexError):
            step(reference, 100, bad=99)
        with pytest.raises(IndexError, match="aten::embedding"):
            failed.item()
        after = ours.state()
        assert all(torch.equal(before[name], after[name]) for name in before)
        torch.tpu.synchronize()
        assert_alike(after, reference.state())


@pytest.mark.parametrize("bad_step", [0, 31, 59])
def test_steps_by_hand_without_a_read_hold_what_was_there_before_an_index_out_of_range(bad_step: int) -> None:
    torch.manual_seed(0)
    start = [torch.randn(20, 64), torch.randn(64, 64) * 0.1, torch.zeros(64, 64)]
    tokens = torch.randint(20, (60, 16))
    tokens[bad_step, 3] = 99

    def train(embedding: torch.Tensor, weight: torch.Tensor, momentum: torch.Tensor) -> None:
        for number, batch in enumerate(tokens.to(weight.device)):
            loss = torch.tanh(nn.functional.embedding(batch, embedding) @ weight).square().mean()
            of_embedding, of_weight = torch.autograd.grad(loss, (embedding, weight))
            with torch.no_grad():
                momentum.mul_(0.9).add_(of_weight)
                weight.sub_(momentum, alpha=0.1 + 0.001 * number)
                embedding.sub_(of_embedding, alpha=0.1)
        loss.item()

    def left(device: str) -> list[torch.Tensor]:
        tensors = [t.to(device) for t in start]
        for t in tensors[:2]:
            t.requires_grad_()
        with pytest.raises(IndexError):
            train(*tensors)
        return [t.detach().cpu() for t in tensors]

    for ours, reference in zip(left("tpu"), left("cpu"), strict=True):
        torch.testing.assert_close(ours, reference)


@pytest.mark.parametrize("is_given", [False, True])
def test_random_numbers_of_ops_that_did_not_run_are_drawn_by_those_that_do(is_given: bool) -> None:
    torch.manual_seed(5)
    generator = torch.Generator(device="tpu").manual_seed(5) if is_given else None
    x, bad = torch.ones(3, device="tpu"), torch.tensor([9], device="tpu")

    def draw(count: int) -> list[torch.Tensor]:
        return [torch.rand(4, device="tpu", generator=generator) for _ in range(count)]

    expected = [drawn.cpu() for drawn in draw(3)]
    state = torch.tpu.get_rng_state()
    torch.manual_seed(5)
    if generator is not None:
        generator.manual_seed(5)
    for _ in range(2):
        (first,) = draw(1)
        failed = x[bad]
        drawn = draw(2)
        with pytest.raises(IndexError):
            failed.cpu()
        assert torch.equal(first.cpu(), expected[0])
        assert all(torch.equal(own.cpu(), other) for own, other in zip(draw(2), expected[1:], strict=True))
        assert torch.equal(torch.tpu.get_rng_state(), state)
        del failed, drawn
        torch.manual_seed(5)
        if generator is not None:
            generator.manual_seed(5)


def test_a_step_that_failed_counts_for_no_schedule_of_the_optimizer() -> None:
    """Neither where it would have been the first, nor for a parameter that took no part in it."""
    parameters = [nn.Parameter(torch.ones(3, device="tpu")) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters)
    bad = torch.tensor([9], device="tpu")

    def step(used: int, index: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(parameter[index].square().sum() for parameter in parameters[:used])
        loss.backward()
        optimizer.step()
        return loss.detach()

    for steps, used in ((0, 2), (1, 1), (2, 2)):
        with pytest.raises(IndexError):
            step(used, bad).item()
        counted = [int(optimizer.state[parameter]["step"]) for parameter in parameters if optimizer.state[parameter]]
        assert counted == {0: [], 1: [1, 1], 2: [2, 1]}[steps]
        step(2 if steps == 0 else 1).item()


def test_a_step_that_failed_leaves_no_state_for_a_name() -> None:
    class Averaged(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            self.state.setdefault("seen", torch.zeros(()))
            self.state[parameter].setdefault("average", parameter.grad.clone())

    parameter = nn.Parameter(torch.ones(3, device="tpu"))
    optimizer = Averaged([parameter], {})

    def step(index: torch.Tensor | slice) -> torch.Tensor:
        optimizer.zero_grad()
        loss = parameter[index].square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with pytest.raises(IndexError):
        step(torch.tensor([9], device="tpu")).item()
    assert not optimizer.state
    assert step(slice(None)).item() == 3
    assert list(optimizer.state) == ["seen", parameter]


def test_a_step_made_of_two_that_failed_takes_back_what_it_counted() -> None:
    class Twice(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            super().step()
            return super().step()

    parameter = nn.Parameter(torch.ones(3, device="tpu"))
    torch.optim.Adam([parameter])  # gives Adam.step hooks of its own
    optimizer = Twice([parameter])
    for index in (torch.arange(3), torch.tensor([9, 0, 0])):
        parameter.grad = torch.ones(3, device="tpu")[index.to("tpu")]
        optimizer.step()
        if 9 in index:
            with pytest.raises(IndexError):
                parameter.sum().item()
        assert optimizer.state[parameter]["step"] == 2
