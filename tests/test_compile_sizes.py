"""Compiled graphs whose sizes change give the CPU's numbers in few programs."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtpu import config, metrics

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "in_one_tier")
Inputs = tuple[Tensor, ...]


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 20, shape, generator=torch.Generator().manual_seed(sum(shape)))


class Language(nn.Module):
    """An embedding, a transformer's layer, a head, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(self.layer(self.embedding(ids)))
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten()), scores


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.last(F.adaptive_avg_pool2d(self.norm(self.first(x)).relu(), 1).flatten(1))
        return scores.logsumexp(1).mean(), scores


def causal(q: Tensor, x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads * q, heads, heads, is_causal=True).transpose(1, 2).flatten(2)


def masked(q: Tensor, x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
    near = (torch.arange(x.shape[1], device=x.device)[:, None] - torch.arange(x.shape[1], device=x.device)).abs() < 3
    return F.scaled_dot_product_attention(heads * q, heads, heads, attn_mask=near)


def statistics(q: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return (
        x.sum(1),
        x.mean(),
        x.mean((0, 1)),
        x.amax(1),
        x.softmax(1),
        x.mean(1, keepdim=True) / x.shape[1],
        x[:, 0] + 1,
    )


def shapes(q: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = x.transpose(0, 1)
    return (
        y * q,
        x.flatten(0, 1) + q,
        y.flatten(0, 1)[..., :3].exp(),
        torch.cat([x, x], -1),
        (x @ x.transpose(1, 2)).exp(),
    )


FUNCTIONS = [causal, masked, statistics, shapes]


def assert_as_on_cpu(made: Any, expected: Any) -> None:
    found = torch.utils._pytree.tree_map(lambda t: t.detach().cpu(), made)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, check_stride=True)


def moved(inputs: Inputs) -> Inputs:
    return tuple(t.to("tpu") for t in inputs)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_surplus_changes_nothing(function: Callable[..., Any]) -> None:
    compiled, q = torch.compile(function), torch.tensor(2.0)
    for rows, length in ((3, 5), (2, 9), (9, 6), (7, 8)):
        x = floats(rows, length, 8)
        assert_as_on_cpu(compiled(*moved((q, x))), function(q, x))


def gradients(module: nn.Module, run: Any, inputs: Inputs) -> tuple[Any, list[Tensor]]:
    module.zero_grad()
    made = run(*inputs)
    made[0].backward()
    return made, [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("make", [Language, Images])
def test_training_with_a_surplus_has_the_true_gradients(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = make()
    on_tpu = copy.deepcopy(module).to("tpu")
    compiled = torch.compile(on_tpu)
    for rows, length in ((3, 5), (2, 9), (9, 6)):
        inputs = (tokens(rows, length), tokens(rows, length)) if make is Language else (floats(rows, 3, 6, 6),)
        expected = gradients(module, module, inputs)
        made = gradients(on_tpu, compiled, moved(inputs))
        assert_as_on_cpu(made, torch.utils._pytree.tree_map(torch.Tensor.detach, expected))


def test_forty_batch_sizes_and_lengths_take_eight_programs() -> None:
    torch.manual_seed(0)
    module = Language().eval()
    compiled = torch.compile(copy.deepcopy(module).to("tpu"))
    dice = random.Random(0)
    sizes = [(dice.randrange(2, 41), dice.randrange(8, 129)) for _ in range(40)]
    metrics.reset()
    with torch.no_grad():
        for rows, length in sizes:
            inputs = tokens(rows, length), tokens(rows, length)
            assert_as_on_cpu(compiled(*moved(inputs)), module(*inputs))
    counts = metrics.snapshot()
    assert counts["programs_compiled"] + counts["cache_hits_disk"] <= 8
    assert counts["launches"] == 40
    assert counts["cpu_fallbacks"] == {}


def test_a_training_step_of_any_size_is_one_launch_of_a_few_programs() -> None:
    torch.manual_seed(0)
    module = Language().to("tpu")
    compiled = torch.compile(lambda ids, targets: module(ids, targets)[0])
    optimizer = torch.optim.SGD(module.parameters(), 0.1)

    def step(rows: int, length: int) -> None:
        loss = compiled(*moved((tokens(rows, length), tokens(rows, length))))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for rows, length in ((2, 7), (4, 9), (5, 10)):
        step(rows, length)
    torch.tpu.synchronize()
    metrics.reset()
    for rows, length in ((5, 11), (6, 16), (3, 12), (8, 14)):
        step(rows, length)
    torch.tpu.synchronize()
    counts = metrics.snapshot()
    assert counts["launches"] == 4
    assert counts["programs_compiled"] + counts["cache_hits_disk"] <= 1


class Words(nn.Module):
    """An embedding, a norm, a head, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 20)

    def forward(self, ids: Tensor) -> Tensor:
        scores = self.head(self.norm(self.embedding(ids)).cumsum(1))
        return F.cross_entropy(scores.flatten(0, 1), ids.flip(1).flatten())


@pytest.mark.parametrize("changing", ["rows", "length", "both"])
def test_training_with_forty_sizes_takes_four_programs(changing: str) -> None:
    torch.manual_seed(0)
    module = Words()
    on_tpu = copy.deepcopy(module).to("tpu")
    compiled = torch.compile(on_tpu)
    optimizers = [torch.optim.SGD(of.parameters(), 0.1) for of in (module, on_tpu)]
    dice = random.Random(0)
    metrics.reset()
    for _ in range(40):
        rows = dice.randrange(2, 61) if changing == "rows" else dice.randrange(2, 31) if changing == "both" else 5
        length = dice.randrange(8, 61) if changing == "length" else dice.randrange(8, 31) if changing == "both" else 12
        ids, losses = tokens(rows, length), []
        for place, run, optimizer in zip(("cpu", "tpu"), (module, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            loss = run(ids.to(place))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert_as_on_cpu(dict(on_tpu.named_parameters()), dict(module.named_parameters()))
    counts = metrics.snapshot()
    assert counts["programs_compiled"] + counts["cache_hits_disk"] <= 4
    assert counts["launches"] == 40


def test_what_follows_a_graph_is_part_of_its_program() -> None:
    compiled = torch.compile(Language().to("tpu").eval())
    metrics.reset()
    for length in range(5, 15):
        with torch.no_grad():
            compiled(*moved((tokens(4, length), tokens(4, length))))[1].argmax(-1).sum().item()
    counts = metrics.snapshot()
    assert counts["launches"] == 10
    assert counts["programs_compiled"] + counts["cache_hits_disk"] <= 3


def test_a_result_of_changing_size_serves_other_graphs() -> None:
    first, second = torch.compile(lambda x: x.softmax(0) * 2), torch.compile(lambda x: x.flip(0).cumsum(0) + len(x))
    for rows in range(3, 12):
        x = floats(rows, 4)
        made = first(x.to("tpu"))
        torch.tpu.synchronize()
        assert_as_on_cpu((made, second(made)), (x.softmax(0) * 2, (x.softmax(0) * 2).flip(0).cumsum(0) + rows))


@pytest.mark.parametrize("function", [lambda x: F.dropout(x, 0.5) + 1, lambda x: x + torch.rand_like(x)])
def test_a_graph_that_draws_draws_what_eager_draws(function: Callable[[Tensor], Tensor]) -> None:
    compiled = torch.compile(function, dynamic=True)
    for rows in range(3, 9):
        x = floats(rows, 4).to("tpu")
        torch.manual_seed(1)
        made = compiled(x).cpu()
        torch.manual_seed(1)
        with config.using(padding=False):
            torch.testing.assert_close(made, function(x).cpu(), rtol=0, atol=0)
    assert metrics.snapshot()["regions_padded"] > 0


def test_a_buffer_that_is_written_up_to_a_changing_length_is_padded() -> None:
    def fill(x: Tensor, buffer: Tensor) -> Tensor:
        buffer[: len(x)].add_(x.sum(1))
        buffer[len(x) :] = 1
        return x.flatten().view(-1, 2) * len(x)

    compiled, mine, theirs = torch.compile(fill, dynamic=True), torch.zeros(64), torch.zeros(64, device="tpu")
    for rows in (3, 5, 6, 9, 12, 30):
        assert_as_on_cpu(compiled(floats(rows, 4).to("tpu"), theirs), fill(floats(rows, 4), mine))
    assert_as_on_cpu(theirs, mine)
    assert metrics.snapshot()["regions_padded"] >= 3


def test_a_dimension_that_is_marked_is_compiled_for_many_sizes_at_once() -> None:
    compiled = torch.compile(lambda x: (x.sin() @ x.t()).sum(0))
    for rows in (3, 5, 6, 9, 12):
        x = floats(rows, 4).to("tpu")
        torch._dynamo.mark_dynamic(x, 0)
        assert_as_on_cpu(compiled(x), (floats(rows, 4).sin() @ floats(rows, 4).t()).sum(0))
    assert metrics.snapshot()["programs_compiled"] <= 3


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.flip(0),
        lambda x: x.flip([1]) + 1,
        lambda x: x.sort()[0],
        lambda x: torch.sort(x, stable=True)[0],
        lambda x: x.argsort(),
        lambda x: x.roll(2),
        lambda x: x.roll(1, 1) * 2,
        lambda x: torch.cumsum(x, dim=-1),
    ],
)
def test_arguments_that_are_left_out_have_their_defaults(function: Callable[[Tensor], Tensor]) -> None:
    compiled = torch.compile(function)
    for rows in (3, 5, 6, 9):
        x = floats(rows, 4)
        assert_as_on_cpu(compiled(x.to("tpu")), function(x))


def test_gradients_that_are_scaled_by_frequency_do_not_count_the_surplus() -> None:
    table = nn.Embedding(20, 4, scale_grad_by_freq=True)
    on_tpu = copy.deepcopy(table).to("tpu")
    compiled = torch.compile(lambda ids: [on_tpu(ids).sum()])
    for rows in (3, 5, 9, 12):
        ids = tokens(rows, 2) // 4
        expected = gradients(table, lambda ids: [table(ids).sum()], (ids,))[1]
        assert_as_on_cpu(gradients(on_tpu, compiled, moved((ids,)))[1], expected)
