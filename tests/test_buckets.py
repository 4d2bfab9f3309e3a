"""In: compiled graphs whose sizes change. Out: the CPU's numbers from few programs, whatever stands in the surplus."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtpu import config, metrics
from torchtpu.compile import buckets
from torchtpu.compile.bucket_dims import Unsafe, regrouped
from torchtpu.runtime import _C

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
B, S = sympy.symbols("b s", integer=True, positive=True)
Inputs = tuple[Tensor, ...]


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 20, shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture
def loud_surplus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pads an input would show in every result that it reached."""

    def widen(x: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, bool]:
        values = _C.to_host(x)
        room = values.new_full(shape, float("nan") if x.is_floating_point() else 10**6 if x.dtype == torch.int64 else 1)
        room[tuple(slice(n) for n in x.shape)] = values
        return room.to(x.device), False

    monkeypatch.setattr(buckets, "_widen", widen)


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each graph that was asked about may be padded."""
    found: list[bool] = []
    annotate = buckets.annotate

    def spy(graph: Any) -> bool:
        found.append(annotate(graph))
        return found[-1]

    monkeypatch.setattr(buckets, "annotate", spy)
    return found


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


@pytest.mark.usefixtures("loud_surplus")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_surplus_changes_nothing(function: Callable[..., Any], verdicts: list[bool]) -> None:
    compiled, q = torch.compile(function), torch.tensor(2.0)
    for rows, length in ((3, 5), (2, 9), (9, 6), (7, 8)):
        x = floats(rows, length, 8)
        assert_as_on_cpu(compiled(*moved((q, x))), function(q, x))
    assert verdicts == [False, True], "the first graph is of one size"


def gradients(module: nn.Module, run: Any, inputs: Inputs) -> tuple[Any, list[Tensor]]:
    module.zero_grad()
    made = run(*inputs)
    made[0].backward()
    return made, [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.usefixtures("loud_surplus")
@pytest.mark.parametrize("make", [Language, Images])
def test_training_with_a_surplus_has_the_true_gradients(make: Callable[[], nn.Module], verdicts: list[bool]) -> None:
    torch.manual_seed(0)
    module = make()
    on_tpu = copy.deepcopy(module).to("tpu")
    compiled = torch.compile(on_tpu)
    for rows, length in ((3, 5), (2, 9), (9, 6)):
        inputs = (tokens(rows, length), tokens(rows, length)) if make is Language else (floats(rows, 3, 6, 6),)
        expected = gradients(module, module, inputs)
        made = gradients(on_tpu, compiled, moved(inputs))
        assert_as_on_cpu(made, torch.utils._pytree.tree_map(torch.Tensor.detach, expected))
    assert verdicts == [False, True], "the first graph is of one size"


@pytest.fixture
def in_one_tier() -> Iterator[None]:
    """Each region is one program: in the first tier it may be several, which others share."""
    _C.forget_streams()
    with config.using(tiers="off"):
        yield


@pytest.mark.usefixtures("in_one_tier")
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


@pytest.mark.usefixtures("in_one_tier")
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


def test_what_follows_is_no_part_of_the_padded_program() -> None:
    module = Language().to("tpu").eval()
    compiled = torch.compile(module)
    counts = []
    for length in (5, 9, 10, 11, 12):
        torch.tpu.synchronize()
        metrics.reset()
        with torch.no_grad():
            compiled(*moved((tokens(4, length), tokens(4, length))))[1].argmax(-1).sum().item()
        counts.append(metrics.snapshot()["cuts"].get("bucket", 0))
    assert counts == [0, 1, 1, 1, 1]


def test_what_the_device_made_is_padded_there() -> None:
    compiled = torch.compile(lambda x: x.softmax(0) * 2, dynamic=True)
    for rows in (3, 5, 6):
        x = floats(rows, 4).to("tpu") + 1
        assert_as_on_cpu(compiled(x), (floats(rows, 4) + 1).softmax(0) * 2)


def test_a_graph_that_draws_is_not_padded(verdicts: list[bool]) -> None:
    compiled = torch.compile(lambda x: F.dropout(x, 0.5) + 1, dynamic=True)
    for rows in (3, 5):
        x = floats(rows, 4).to("tpu")
        torch.manual_seed(1)
        made = compiled(x)
        torch.manual_seed(1)
        torch.testing.assert_close(made, F.dropout(x, 0.5) + 1, rtol=0, atol=0)
    assert verdicts == [False]


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


def test_the_knob_leaves_sizes_as_they_are(verdicts: list[bool]) -> None:
    with config.using(buckets=False):
        torch.compile(lambda x: x + 1, dynamic=True)(floats(3, 4).to("tpu"))
    assert verdicts == [False]


def test_a_size_keeps_its_bucket() -> None:
    sizes = buckets._Sizes()
    assert [sizes.bucket(n) for n in (3, 9, 100, 30, 3, 20, 33)] == [8, 16, 128, 32, 8, 32, 128]


def test_views_keep_symbols_whole() -> None:
    dims = ((B,), (S,), (12,))
    assert regrouped(dims, (B * S, 12)) == ((B, S), (12,))
    assert regrouped(dims, (B, S, 3, 4)) == ((B,), (S,), (3,), (4,))
    assert regrouped(((B, S), (3,), (4,)), (B, S, 12)) == ((B,), (S,), (12,))
    assert regrouped(dims, (B, 1, S * 12)) == ((B,), (), (S, 12))
    assert regrouped(dims, (B, S * 6, 2)) == ((B,), (S, 6), (2,))
    assert regrouped(dims, (B * S * 4, 3)) == ((B, S, 4), (3,))
    for shape in ((S, B, 12), (12, B * S), (B, S * 5, 12)):
        with pytest.raises(Unsafe):
            regrouped(dims, shape)
