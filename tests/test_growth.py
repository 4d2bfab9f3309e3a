"""Loops whose tensors get longer compute what the CPU computes, in few programs."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from script import run_script
from torch import Tensor
from torch.nn import functional as F

import torchtpu
from torchtpu import config, metrics, startup
from torchtpu.runtime.ir.calls import operator_of
from torchtpu.runtime.ir.program import Program
from torchtpu.runtime.lowering.templates import Templates
from torchtpu.runtime.padding import arrays, ask, evaluate
from torchtpu.runtime.padding.ask import Quotient
from torchtpu.runtime.padding.layout import PaddedForm, Size, padded_capacity

pytestmark = pytest.mark.usefixtures("in_one_tier")

LENGTHS = [3, 4, 5, 6, 7, 9, 12, 20, 31, 32, 33, 40, 8]


def counted(name: str) -> int:
    found: int = metrics.snapshot()[name]
    return found


def same_on_both(loop: Callable[[str], list[Tensor]], **tolerances: float) -> tuple[int, int]:
    """Runs the loop on the CPU and on tpu; the programs compiled, and the regions that were given room."""
    torch.manual_seed(0)
    expected = loop("cpu")
    torch.manual_seed(0)
    compiled, grown = counted("programs_compiled"), counted("regions_padded")
    found = loop("tpu")
    for e, f in zip(expected, found, strict=True):
        torch.testing.assert_close(f, e, **(tolerances or {"rtol": 2e-5, "atol": 2e-6}))
    return counted("programs_compiled") - compiled, counted("regions_padded") - grown


@contextlib.contextmanager
def padded_forms() -> Iterator[list[PaddedForm]]:
    """The form of each region that is padded in the block."""
    forms: list[PaddedForm] = []
    engine = startup.engine()
    made = engine._builder.padded
    engine._builder.padded = lambda padded, executable: forms.append(padded.form) or made(padded, executable)
    try:
        yield forms
    finally:
        del engine._builder.padded


# ---- one op that sees what grows

WEIGHT = torch.linspace(-1, 1, 12).reshape(3, 4)
OPS: dict[str, Callable[[Tensor], Any]] = {
    "elementwise": lambda x: (x * 2 + x.exp()) / x,
    "compared": lambda x: (x > 0) & (x < 1),
    "where": lambda x: torch.where(x > 0, x, -x),
    "masked": lambda x: x.masked_fill(x < 0, 2.0),
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.log().sum(0),
    "sum of columns": lambda x: x.sum(1, keepdim=True),
    "largest": lambda x: x.log().amax(0),
    "least": lambda x: (1 / x).amin(0),
    "place of the largest": lambda x: x.argmax(0),
    "place among all": lambda x: x.argmax(),
    "place among all of columns": lambda x: x.t().contiguous().argmin() + (1 / x.t()).argmax(),
    "softmax": lambda x: (1 / x).softmax(0),
    "log_softmax of rows": lambda x: x.log_softmax(1),
    "linear": lambda x: F.linear(x, WEIGHT.to(x.device)),
    "product": lambda x: x.t() @ (1 / x),
    "product of what stays": lambda x: x @ WEIGHT.to(x.device).t(),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "mean of rows": lambda x: x.mean(1),
    "cumsum": lambda x: x.cumsum(0),
    "tril": lambda x: (x @ x.t()).tril().sum(0),
    "last": lambda x: x[-1] * 2,
    "first": lambda x: x[0] + x[2],
    "all but the last": lambda x: x[:-1].sum(0) + 1,
    "all but the first": lambda x: x[1:] * 2,
    "every second": lambda x: x[::2] * 2,
    "transposed": lambda x: x.t().contiguous() + 1,
    "reshaped": lambda x: x.reshape(-1, 2, 2) * 3,
    "flat": lambda x: x.reshape(-1).exp(),
    "filled": lambda x: x.clone().fill_(3.0),
    "written": lambda x: (x + 0).mul_(2).add_(x),
    "written in part": lambda x: put(x + 0),
    "stacked": lambda x: torch.stack([x, x + 1]),
    "joined columns": lambda x: torch.cat([x, x * 2], 1),
    "joined rows": lambda x: torch.cat([x, x[:1]], 0),
    "joined with itself": lambda x: torch.cat([x, x], 0),
    "joined behind": lambda x: torch.cat([x[:1], x], 0),
    "range": lambda x: torch.arange(len(x), device=x.device) * 2,
    "range in the middle": lambda x: torch.arange(len(x), len(x) + 3, device=x.device).float().exp(),
    "embedding": lambda x: F.embedding((x * 0).long() + 1, WEIGHT.to(x.device)),
    "index_select": lambda x: WEIGHT.to(x.device).index_select(0, (x[:, 0] * 0).long() + 2),
    "indexed": lambda x: WEIGHT.to(x.device)[(x[:, 0] * 0).long() - 1],
    "indexed from the end": lambda x: x[torch.tensor([0, -1, 2], device=x.device)],
    "indexed all over": lambda x: x[torch.arange(len(x), device=x.device) - 1, torch.tensor([1], device=x.device)],
    "what stays in what grows": lambda x: torch.isin(x[-1], WEIGHT.to(x.device)),
    "compared with the length": lambda x: (x * 2).sum(1) == len(x),
    "expanded": lambda x: x[:, :1].expand(-1, 4) + x,
    "sorted": lambda x: x.sort(0).values,
    "flipped": lambda x: x.flip(0),
    "variance": lambda x: x.var(0),
    "dropout of nothing": lambda x: F.dropout(x, 0.5, training=False) + 1,
    "bytes": lambda x: x.view(torch.int32) ^ 1,
    "attention": lambda x: attend(x, x, is_causal=False),
    "causal attention": lambda x: attend(x, x, is_causal=True),
    "attention of one": lambda x: attend(x[-1:], x, is_causal=False),
    "attention with a bias": lambda x: attend(x, x, attn_mask=(x @ x.t())[None, None]),
    "attention with a mask": lambda x: attend(x, x, attn_mask=(x @ x.t() > 0)[None, None]),
    "attention with a mask for all": lambda x: attend(x, x, attn_mask=(x.sum() + x[:, 0, None] - x[:, 0]).tril() != 0),
    "causal attention of more queries": lambda x: attend(torch.cat([x, WEIGHT.to(x.device)]), x, is_causal=True),
}  # fmt: skip


def put(x: Tensor) -> Tensor:
    x[-2] = 7.0
    x[:, 1] += 1
    return x


def attend(query: Tensor, key: Tensor, **options: Any) -> Tensor:
    query, key = query[None, None], key[None, None]
    return F.scaled_dot_product_attention(query, key, 1 / key, **options)


@pytest.mark.parametrize("name", OPS)
def test_an_op_on_what_grows_computes_what_the_cpu_computes(name: str) -> None:
    def loop(device: str) -> list[Tensor]:
        found = []
        for n in LENGTHS:
            x = (torch.arange(n * 4, dtype=torch.float32).reshape(n, 4) % 7 / 4 + 0.125).to(device)
            found.append(OPS[name](x).cpu())
        return found

    assert same_on_both(loop)[0] <= 6, "of 13 lengths: two as they are, two capacities, and the sizes that are none"


def test_a_cache_that_grows_is_a_program_for_each_room() -> None:
    def loop(device: str) -> list[Tensor]:
        steps = torch.randn(60, 1, 2, 1, 8)
        keys, values = (t.to(device) for t in torch.randn(2, 1, 2, 4, 8))
        found = []
        for step in steps.to(device):
            keys, values = torch.cat([keys, step], 2), torch.cat([values, step * 2], 2)
            found.append(F.scaled_dot_product_attention(step, keys, values).cpu())
        return [*found, keys.cpu(), values.cpu()]

    assert same_on_both(loop) == (3, 58)  # two as they are, then 128
    assert same_on_both(loop)[0] == 0


def test_a_cache_read_up_to_a_position_is_a_program_for_each_room() -> None:
    def loop(device: str) -> list[Tensor]:
        cache = torch.zeros(1, 2, 48, 8, device=device)
        found = []
        for place, step in enumerate(torch.randn(40, 1, 2, 1, 8).to(device), 3):
            cache[:, :, place : place + 1] = step
            places = torch.arange(place, place + 1, device=device)
            seen = cache[:, :, : place + 1]
            found.append((F.scaled_dot_product_attention(step, seen, seen) + places).cpu())
        return [*found, cache.cpu()]

    compiled, grown = same_on_both(loop)
    assert grown >= 35
    assert compiled <= 6


def test_what_grows_is_read_and_used_elsewhere_as_it_counts() -> None:
    def loop(device: str) -> list[Tensor]:
        x, found = torch.ones(3, 4, device=device), []
        for i in range(12):
            x = torch.cat([x.exp().log(), torch.full((1, 4), float(i), device=device)])
            x.sum().item()
            found += [x.cpu(), x.flip(0).cpu(), x[1:].t().cpu(), x.unfold(0, 2, 1).sum(-1).cpu()]
        return found

    moved = counted("arrays_moved")
    same_on_both(loop)
    assert counted("arrays_moved") > moved


def test_two_sizes_that_change_are_padded_both() -> None:
    def loop(device: str) -> list[Tensor]:
        sizes = [(3, 7), (4, 9), (5, 6), (6, 12), (7, 3), (8, 5), (9, 11)]
        return [((torch.ones(n, m, device=device) * 3).sum(0) + n).cpu() for n, m in sizes]

    compiled, padded = same_on_both(loop)
    assert padded >= 4
    assert compiled <= 4


@pytest.mark.parametrize("op", [Tensor.sum, Tensor.mean, Tensor.amax, Tensor.argmin, Tensor.softmax, Tensor.cumsum])
def test_a_dimension_that_changes_with_the_sizes_is_no_size(op: Callable[..., Tensor]) -> None:
    def loop(device: str) -> list[Tensor]:
        return [op(torch.randn(5 + i, 5 + i, 8).to(device), i % 2).cpu() for i in range(6)]

    same_on_both(loop)


def test_integers_in_the_surplus_that_are_no_numbers_as_floats_change_nothing() -> None:
    one, nan = (torch.tensor(x).view(torch.int32).item() for x in (1.0, float("nan")))

    def loop(device: str) -> list[Tensor]:
        found = []
        for n in range(3, 9):
            bits = torch.ones(n, 4, dtype=torch.int32).to(device) * (one - nan) + nan  # NaN where there was 0
            bits[0].sum().item()
            found.append((torch.ones(n, 4).to(device).t() @ bits.view(torch.float32)).cpu())
        return found

    assert same_on_both(loop)[1] > 0


def test_where_an_op_cannot_be_padded_the_others_are_shared() -> None:
    weights = torch.randn(12, 4, 4) / 2

    def loop(device: str) -> list[Tensor]:
        found, layers = [], weights.to(device)
        for n in range(3, 13):
            x = torch.ones(4, 4, device=device)
            for layer in layers:
                x = (x @ layer).tanh() * 2 + layer.sin()
            seen = torch.fft.fft(torch.cat([x, torch.ones(n, 4, device=device)]), dim=0).real.mean(0)
            for layer in layers:
                x = (x @ layer).tanh() * 2 + seen
            found.append(x.cpu())
        return found

    compiled, padded = same_on_both(loop, rtol=1e-4, atol=1e-5)
    assert padded == 0
    assert compiled <= 8 + 2 * 10, "the pieces of a layer, and for each length those of the op and around it"
    assert metrics.snapshot()["regions_not_padded"]


# ---- what rules written for each op had wrong


@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_the_place_of_the_largest_of_all_is_where_it_is_in_what_counts(name: str) -> None:
    def loop(device: str) -> list[Tensor]:
        found = []
        for n in (40, 41, 42, 44, 47):
            x = torch.randn(4, n).to(device)
            found += [getattr(x, name)().cpu(), getattr(x.t() @ x, name)().cpu()]
        return found

    assert same_on_both(loop)[1] > 0


@torch.no_grad()
def test_causal_attention_of_more_queries_than_keys_computes_what_the_cpu_computes() -> None:
    def loop(device: str) -> list[Tensor]:
        found = []
        for n in (5, 6, 7, 9, 12):
            query, key = torch.randn(1, 2, n + 8, 8).to(device), torch.randn(1, 2, n, 8).to(device)
            found.append(F.scaled_dot_product_attention(query, key, key, is_causal=True).cpu())
        return found

    assert same_on_both(loop)[1] > 0


@torch.no_grad()
def test_attention_with_a_mask_that_grows_computes_what_the_cpu_computes() -> None:
    def loop(device: str) -> list[Tensor]:
        found = []
        for n in (5, 6, 7, 9, 12):
            x, mask = torch.randn(1, 2, n, 8).to(device), torch.ones(n, n, dtype=torch.bool).tril().to(device)
            found.append(F.scaled_dot_product_attention(x, x, x, attn_mask=mask).cpu())
        return found

    assert same_on_both(loop)[1] > 0


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "amin"])
def test_an_argument_that_changes_with_the_sizes_is_no_error(name: str) -> None:
    def loop(device: str) -> list[Tensor]:
        made = [torch.ones(5 + i, 5 + i, 8, device=device) for i in range(4)]
        return [getattr(x, name)(i % 2).cpu() for i, x in enumerate(made)]

    same_on_both(loop)


# ---- training


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = torch.nn.Embedding(11, 16), torch.nn.LayerNorm(16)
        self.first, self.last = torch.nn.Linear(16, 48, bias=False), torch.nn.Linear(16, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        count, length, _ = x.shape
        parts = self.first(self.norm(x)).chunk(3, -1)
        query, key, value = (part.view(count, length, 2, 8).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits: Tensor = self.last(x + seen.transpose(1, 2).reshape(count, length, 16))
        return logits


@pytest.mark.parametrize("changing", ["batch", "length", "both"])
def test_training_where_sizes_change_compiles_four_programs(changing: str) -> None:
    sizes = [(n if changing != "length" else 3, (7 * n) % 13 + 3 if changing == "both" else n) for n in range(5, 31)]
    sizes = [(n, 10 if changing == "batch" else m) for n, m in sizes]

    def loop(device: str) -> list[Tensor]:
        torch.manual_seed(1)
        model = Attention().to(device)
        optimizer, found = torch.optim.AdamW(model.parameters(), 1e-2), []
        for size in sizes:
            tokens = torch.randint(11, size).to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            found.append(loss.detach().cpu())
        return [*found, *(p.detach().cpu() for p in model.parameters())]

    compiled, padded = same_on_both(loop, rtol=2e-3, atol=2e-4)
    assert compiled <= 4 + (changing == "both")
    assert padded >= len(sizes) - 5


def test_sizes_in_other_relations_than_before_are_padded_otherwise_or_not_at_all() -> None:
    """The first lengths are twice one another, the later ones are not."""

    def loop(device: str) -> list[Tensor]:
        sizes = [(3, 6), (4, 8), (5, 10), (6, 12), (7, 11), (8, 8), (9, 5), (10, 20)]
        return [(torch.ones(n, 4).to(device) @ torch.ones(4, m).to(device)).sum(1).cpu() for n, m in sizes]

    assert same_on_both(loop)[1] > 0


def test_nothing_grows_in_deterministic_mode_or_without_padding() -> None:
    def loop(device: str) -> list[Tensor]:
        return [torch.ones(n, 5, device=device).exp().sum(0).cpu() for n in range(3, 9)]

    with config.using(deterministic=True):
        assert same_on_both(loop)[1] == 0
    with config.using(padding=False):
        assert same_on_both(loop)[1] == 0
    assert same_on_both(lambda device: [x * 2 for x in loop(device)])[1] == 0, "these lengths have programs"


def test_a_value_that_failed_fails_what_grows_from_it() -> None:
    table = torch.ones(4, 3, device="tpu")
    for n in range(3, 9):
        places = torch.zeros(n, dtype=torch.int64)
        places[-1] = 9 if n == 8 else 1
        made = F.embedding(places.to("tpu"), table).exp()
        if n == 8:
            with pytest.raises(IndexError, match="index out of range"):
                made.cpu()
        else:
            assert made.shape == (n, 3)
            made.cpu()


def test_an_index_that_is_too_large_for_what_counts_is_refused() -> None:
    for n in range(3, 9):
        x, place = torch.ones(n, 4, device="tpu"), torch.tensor([n - 1 if n < 8 else n], device="tpu")
        if n == 8:
            with pytest.raises(IndexError, match="index is out of bounds for dimension 0"):
                x[place].cpu()
        else:
            x[place].cpu()


def test_capacities_are_few_and_not_much_longer_than_what_counts() -> None:
    capacities = {padded_capacity(n) for n in range(1, 100_000)}
    assert len(capacities) < 70
    assert all(n <= padded_capacity(n) <= max(32, 2 * n) for n in range(1, 2000))
    assert all(n <= padded_capacity(n) <= 1.25 * n for n in range(1025, 100_000, 7))


def test_where_arrays_are_small_sizes_take_fewer_programs() -> None:
    """A network of 64 units, on batches of 20 to 90 rows, has one capacity."""

    def loop(device: str) -> list[Tensor]:
        torch.manual_seed(3)
        rng, layers = random.Random(4), [torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)]
        model = torch.nn.Sequential(*layers).to(device)
        return [model(torch.rand(rng.randint(20, 90), 16).to(device)).detach().cpu() for _ in range(30)]

    compiled, padded = same_on_both(loop)
    assert compiled == 2 + 1  # the first two as they are
    assert padded >= 25


def rows_of(device: str, sizes: Sequence[int], columns: int) -> list[Tensor]:
    """Something of rows that are not few elements."""
    weight = (0.05 * torch.randn(columns, 8, generator=torch.Generator().manual_seed(0))).to(device)
    return [torch.tanh(torch.rand(size, columns).to(device) @ weight).cpu() for size in sizes]


def test_sizes_take_the_form_of_larger_ones_that_is_not_much_larger() -> None:
    sizes = [100, 90, 200, 70, 130, 64, 256, 60]
    assert same_on_both(lambda device: rows_of(device, sizes, 300)) == (2 + 1, 6)
    assert same_on_both(lambda device: rows_of(device, [20, 300, 33], 300)) == (2, 3)


def test_a_form_that_many_programs_would_have_is_made() -> None:
    sizes = [100, 90, 200, *range(34, 64)]
    assert same_on_both(lambda device: rows_of(device, sizes, 301)) == (2 + 2, len(sizes) - 2)


LARGER = """
    import torch
    from torchtpu import config, metrics
    config.set(policy="{policy}", tiers="off")
    weight = torch.randn(300, 8, generator=torch.Generator().manual_seed(0)).to("tpu")
    for size in {sizes}:
        x = torch.full((size, 300), 0.01)
        torch.testing.assert_close(torch.tanh(x.to("tpu") @ weight).cpu(), torch.tanh(x @ weight.cpu()))
    print(metrics.snapshot()["programs_compiled"])
"""


def test_frozen_takes_the_form_of_larger_sizes_that_another_process_made(tmp_path: Path) -> None:
    where = {"TORCHTPU_CACHE_DIR": str(tmp_path)}
    for policy, sizes, compiled in (("background", [100, 90, 200, 70], "3\n"), ("frozen", [60, 70, 100], "0\n")):
        ended = run_script(LARGER.format(policy=policy, sizes=sizes), **where)
        assert (ended.status, ended.out) == (0, compiled), ended.err


@pytest.mark.parametrize("sizes", [[64, 40, 52, 46], [9, 33, 65, 29]], ids=str)
def test_how_sizes_follow_is_asked_of_the_ops(sizes: list[int]) -> None:
    """Where several quotients fit what was seen, the first guess is right."""

    def loop(device: str, sizes: Sequence[int]) -> list[Tensor]:
        torch.manual_seed(5)
        layers = [torch.nn.Conv1d(2, 4, 5, 3, 1), torch.nn.MaxPool1d(2), torch.nn.Conv1d(4, channels, 4, 2)]
        net = torch.nn.Sequential(*layers).to(device)
        return [net(torch.rand(2, 2, 40 + size).to(device)).cpu() for size in sizes]

    channels = sizes[0]
    same_on_both(lambda device: loop(device, sizes), rtol=1e-4, atol=1e-5)
    more = [77, 43, 80, 71, 55, 62, 38, 74]
    assert same_on_both(lambda device: loop(device, more), rtol=1e-4, atol=1e-5) == (0, len(more))


@pytest.mark.parametrize(
    "given", [Quotient(2, 3, -1), Quotient(0, 1, 4), Quotient(9, 20, -2), Quotient(31, 32, 0)], ids=str
)
def test_a_quotient_is_found_from_a_few_sizes(given: Quotient) -> None:
    for n in range(40, 80):
        found = ask.quotient_of(given.of, n)
        assert found is not None
        assert [found.of(k) for k in range(40, 200)] == [given.of(k) for k in range(40, 200)]


def test_ops_without_tensors_are_asked_without_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU `tril_indices` would fill 20 GB for the sizes that are tried."""
    devices = []

    def on_meta(name: str) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            devices.append(named["device"])
            return operator_of(name)(*args, **{**named, "device": "meta"})

        return call

    monkeypatch.setattr(ask, "operator_of", on_meta)
    same_on_both(lambda device: [torch.tril_indices(n, n, device=device).cpu() for n in (5, 9, 6, 7)])
    assert set(devices) == {torch.device("meta")}


@pytest.mark.parametrize("size", [lambda n: 3 * n, lambda n: 100 - n, lambda n: 7, lambda n: n // 13], ids=range(4))
def test_what_is_no_quotient_is_none(size: Callable[[int], int]) -> None:
    assert ask.quotient_of(size, 50) is None


def test_rows_of_two_sizes_taken_together_are_their_product() -> None:
    """What a backward reads of (rows, columns, 8) as (rows * columns, 8) is no third size that changes."""

    def loop(device: str) -> list[Tensor]:
        rng, weight = random.Random(5), torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).to(device)
        found = []
        for _ in range(12):
            rows, columns = rng.randint(9, 30), rng.randint(9, 30)
            both = torch.ones(rows, columns, 8).to(device)
            flat = (both.flatten(0, 1) @ weight).clone()
            flat.sum().item()
            found.append((both * flat.unflatten(0, (rows, columns))).cpu())
        return found

    with padded_forms() as forms:
        same_on_both(loop, rtol=1e-5, atol=1e-5)
    inputs = {base.shape for form in forms for base in form.program.inputs}
    assert (32 * 32, 8) in inputs
    assert all(rows in (8, 32 * 32) for rows, *rest in inputs if rest == [8])


@pytest.mark.parametrize("shift", [-1, 1, -3], ids=["shorter", "longer", "shorter by three"])
def test_the_variable_is_as_long_as_most_arrays_are(shift: int) -> None:
    """What a model of language makes of `x[:, :-1]`, and what a step of generation makes of a cache and a token more,
    are computed by the programs of other loops."""

    def loop(device: str) -> list[Tensor]:
        found = []
        for n in (9, 12, 10, 15, 11, 30):
            x = torch.arange(8.0 * n).view(8, n).to(device)
            y = x[:, :shift] if shift < 0 else torch.cat([x, x[:, :shift]], 1)
            found.append((y.sin().exp() * 2 + y).cumsum(1).cpu())
        return found

    with padded_forms() as forms:
        same_on_both(loop, rtol=1e-5, atol=1e-5)
    assert forms
    ops = [op for form in forms for op in form.program.ops if op.name in {"sin", "exp", "cumsum"}]
    assert {extent.sizes for op in ops for extent in (*op.padding.reads, *op.padding.made)} == {(8, "a")}


def test_a_size_that_follows_from_another_is_no_variable_besides() -> None:
    """What takes two values does not tell whether it follows from another size; what its neighbour is, is known."""

    def loop(device: str) -> list[Tensor]:
        found = []
        for n, m in ((6, 5), (7, 9), (6, 12), (7, 30), (6, 9), (7, 14)):
            x = torch.linspace(0, 1, n * m, dtype=torch.float64).view(m, n).to(device)
            y = torch.cat([x, torch.ones(m, 14, dtype=torch.float64).to(device)], 1).sqrt().cumsum(1)
            steps = torch.cat([y[:, 1:] - y[:, :-1], torch.full_like(y[:, :1], 3.0)], 1)
            found.append((y * steps).cumsum(1).sin().cpu())
        return found

    assert same_on_both(loop, rtol=1e-12, atol=1e-12)[1] >= 3


def test_what_is_behind_a_stride_is_a_size_of_its_own() -> None:
    """What a second layer is given need not be known as half of what the first one is."""

    def loop(device: str) -> list[Tensor]:
        found = []
        for n in (40, 52, 45, 60, 38, 63, 41):
            x = torch.arange(6.0 * n).view(2, 3, n).sin().to(device)
            once = F.max_pool1d(x, 2).cumsum(2)
            found.append(F.max_pool1d(once, 3, 2, 1).cumsum(2).sum(1).cpu())
        return found

    with padded_forms() as forms:
        same_on_both(loop, rtol=1e-5, atol=1e-5)
    assert forms
    ops = [op for form in forms for op in form.program.ops if op.name in {"cumsum", "max_pool2d_with_indices"}]
    made = {(op.name, extent.sizes) for op in ops for extent in op.padding.made}
    assert made == {
        ("cumsum", (2, 3, "a")),
        ("max_pool2d_with_indices", (2, 3, 1, "floordiv(a, 2)")),
        ("max_pool2d_with_indices", (2, 3, 1, "floordiv(a + 1, 2)")),
    }


@pytest.mark.parametrize("seed", range(4))
def test_a_size_in_terms_of_another_is_the_same(seed: int) -> None:
    dice, found = random.Random(seed), 0
    for _ in range(2000):
        one, other = (
            Size(
                ((dice.choice((1, 1, 2, -1)), (("x", dice.randint(-1, 1)),)),),
                dice.randint(-6, 6),
                dice.choice((1, 1, 2, 3, 4, 6)),
                dice.randint(-3, 3),
            )
            for _ in range(2)
        )
        of_other = one.in_terms_of(other)
        if of_other is not None:
            found += 1
            for x in range(40):
                assert one.value({"x": x}) == of_other.value({"": other.value({"x": x})})
    assert found > 50


def test_ops_on_elements_know_nothing_of_what_counts() -> None:
    """They are lowered as where the arrays are just so long; what takes a part of an array is not."""

    def loop(device: str) -> list[Tensor]:
        found = []
        for n in (9, 12, 10, 15, 11, 30):
            x = torch.linspace(0.1, 1, n * 5).view(n, 5).to(device)
            found.append(((x * torch.ones(5).to(device) + 1).sqrt() + x.t().contiguous().t() + x.cumsum(0)).cpu())
        return found

    with padded_forms() as forms:
        same_on_both(loop)
    ops = [op for form in forms for op in form.program.ops if op.padding is not None]
    asked = startup.engine().fragments.describe(ops, "off")
    names = {(op.name, " padding " in text) for op, (text, _) in zip(ops, asked, strict=True)}
    assert names >= {("mul.Tensor", False), ("sqrt", False), ("cumsum", True)}, names
    assert ("sqrt", True) not in names
    watched = startup.engine().fragments.describe(ops, "nan")
    assert all(" padding " in text for text, _ in watched), "what does not count may be NaN"


def test_sizes_that_come_while_their_form_is_made_wait_for_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, may_compile, made, noted = startup.engine(), threading.Event(), [], []
    form, compile_, note = engine._form, engine.client.compile, engine.plans.note_samples
    padded = counted("regions_padded")

    def counted_form(program: Program, *rest: Any) -> Any:
        made.append(any(op.padding is not None for op in program.ops))
        return form(program, *rest)

    monkeypatch.setattr(engine, "_form", counted_form)
    monkeypatch.setattr(engine.plans, "note_samples", lambda samples: noted.append(samples) or note(samples))
    monkeypatch.setattr(engine.client, "compile", lambda *given: may_compile.wait(60) and compile_(*given))
    reads = [torchtpu.async_read(torch.ones(n, 5, device="tpu").cosh().atan().sum()) for n in range(40, 60)]
    for _ in range(600):
        if counted("regions_padded") - padded >= 10:
            break
        time.sleep(0.1)
    may_compile.set()
    sums = torch.stack([read.result() for read in reads])
    torch.testing.assert_close(sums, torch.arange(40.0, 60) * 5 * torch.ones(()).cosh().atan())
    assert (made.count(True), len(noted)) == (1, 1)


@pytest.mark.bailouts("padding")
def test_a_form_that_fails_fails_none_of_the_sizes_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, made = startup.engine(), list[Future[Any]]()
    form, padded, failed = engine._form, counted("regions_padded"), metrics.snapshot()["bailouts"]

    def failing_form(program: Program, *rest: Any) -> Any:
        if all(op.padding is None for op in program.ops):
            return form(program, *rest)
        made.append(Future())
        return made[-1]

    monkeypatch.setattr(engine, "_form", failing_form)
    reads = [torchtpu.async_read(torch.ones(n, 5, device="tpu").sinh().atan().sum()) for n in range(40, 46)]
    for _ in range(600):
        if counted("regions_padded") - padded >= 4:
            break
        time.sleep(0.1)
    monkeypatch.undo()
    (waiting,) = made
    waiting.set_exception(RuntimeError("no such form"))
    expected = torch.ones(()).sinh().atan() * 5
    torch.testing.assert_close(torch.stack([read.result() for read in reads]), torch.arange(40.0, 46) * expected)
    what = "padding: RuntimeError"
    assert metrics.snapshot()["bailouts"][what] - failed.get(what, 0) == 4
    compiled = counted("programs_compiled")
    for n in (47, 51):
        torch.testing.assert_close(torch.ones(n, 5, device="tpu").sinh().atan().sum().cpu(), n * expected)
    assert counted("programs_compiled") == compiled + 1


NUMBERS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "a bound of random integers": lambda x, i: torch.randint(0, i + 1, (8,), device=x.device) // (i + 1),
    "both bounds": lambda x, i: torch.randint(i + 1, 2 * i + 2, (8,), device=x.device) // (i + 1),
    "a diagonal": lambda x, i: x.triu(i - 12) + x.tril(i - 9),
    "a rank": lambda x, i: x.kthvalue(i + 1, 0).values,
    "shifts": lambda x, i: x.roll((7 * i - 60, i), (0, 1)) - x.roll(30 - i),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_keeps_changing_compiles_nothing(name: str) -> None:
    on_cpu = torch.rand(20, 20, generator=torch.Generator().manual_seed(0))
    x = on_cpu.to("tpu")
    compiled = []
    for i in range(20):
        torch.testing.assert_close(NUMBERS[name](x, i).cpu(), NUMBERS[name](on_cpu, i))
        compiled.append(counted("programs_compiled"))
    assert compiled[-1] == compiled[7]


def _written_at_its_end(h: Tensor) -> Tensor:
    h = h.clone()
    h[len(h) :] = 5
    h[:0] += 1
    h.view(-1)[3 * len(h) :].zero_()
    return h


def test_a_convolution_may_be_padded_by_a_size_that_changes() -> None:
    """As where it is causal, or is an autocorrelation."""

    def loop(device: str) -> list[Tensor]:
        rng, weight = random.Random(5), torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0)).to(device)
        weight.requires_grad_()
        found = []
        for _ in range(14):
            x = torch.rand(2, 3, rng.randint(3, 30), generator=torch.Generator().manual_seed(len(found))).to(device)
            made = F.conv1d(x, weight, padding=x.shape[2] - 1)
            found += [made.detach().cpu(), torch.autograd.grad(made.square().sum(), weight)[0].cpu()]
            found.append(F.conv1d(x, x.flip(-1), padding=x.shape[2] - 1).cpu())
        return found

    compiled, padded = same_on_both(loop, rtol=1e-4, atol=1e-4)
    assert compiled <= 12
    assert padded >= 24


def test_room_is_given_by_what_is_read_of_arrays_too() -> None:
    """Few elements on a line may be many as a square that is long either way."""

    def loop(device: str) -> list[Tensor]:
        rng, generator = random.Random(1), torch.Generator().manual_seed(0)
        found = []
        for _ in range(8):
            a = rng.randint(2, 7)
            x = torch.rand(a * (a + 4), generator=generator).to(device)
            found.append(x.view(a, a + 4).sum(0).cpu())
        return found

    with padded_forms() as forms:
        same_on_both(loop)
    bounds = [op.padding.bounds for form in forms for op in form.program.ops if op.padding is not None]
    assert bounds
    assert all(math.prod(capacity for *_, capacity in each) <= 1 << 13 for each in bounds)


def test_small_sizes_are_short_where_many_of_them_make_much() -> None:
    def loop(device: str) -> list[Tensor]:
        rng, generator = random.Random(2), torch.Generator().manual_seed(0)
        found = []
        for _ in range(8):
            x = torch.rand([rng.randint(2, 4) for _ in range(6)], generator=generator).to(device)
            found.append(x.cos().cumsum(1).sum((0, 2)).cpu())
        return found

    with padded_forms() as forms:
        same_on_both(loop)
    shapes = [base.shape for form in forms for base in form.program.inputs]
    assert shapes
    assert all(math.prod(shape) < 8**6 for shape in shapes)


WITHOUT_ELEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "put together": lambda h: torch.cat([h[:0], h, h[len(h) :]]),
    "columns": lambda h: (h[:0] * 2)[:, 1:].sum(0) + h[:, 1:],
    "split": lambda h: torch.cat(h.split([0, len(h)])) + F.pad(h[:0], (1, 1)).sum(),
    "written": _written_at_its_end,
    "added": lambda h: h.index_add(0, torch.zeros(0, dtype=torch.long, device=h.device), h[:0]),
    "at a place that changes": lambda h: h + h[len(h) // 2 : len(h) // 2].sum(0),
}


@pytest.mark.parametrize("name", WITHOUT_ELEMENTS)
def test_tensors_without_elements_are_padded_beside_others(name: str) -> None:
    def loop(device: str) -> list[Tensor]:
        rng, weight = random.Random(3), torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).to(device)
        weight.requires_grad_()
        found = []
        for _ in range(12):
            x = torch.rand(rng.randint(2, 30), 4, generator=torch.Generator().manual_seed(len(found))).to(device)
            made = WITHOUT_ELEMENTS[name](torch.tanh(x @ weight))
            found += [made.detach().cpu(), torch.autograd.grad(made.square().sum(), weight)[0].cpu()]
        return found

    compiled, padded = same_on_both(loop, rtol=1e-4, atol=1e-5)
    assert compiled <= 8
    assert padded >= 14


def test_a_product_of_less_than_a_size_is_written_without_parentheses() -> None:
    """`jax.export.symbolic_shape` reads none."""
    size = Size(((16, (("x", 0), ("y", -1), ("y", 2))),), 3)
    found = size.text({"x": "a", "y": "b"}.__getitem__)
    assert found == "16*a*b*b + 16*a*b + -32*a + 3"
    assert eval(found, {"a": 5, "b": 7}) == size.value({"x": 5, "y": 7})


def test_all_but_the_last_of_ever_longer_rows_are_padded_together() -> None:
    """As where a model of language is trained on the tokens that follow."""

    def loop(device: str) -> list[Tensor]:
        rng, weight = random.Random(7), torch.randn(8, 5, generator=torch.Generator().manual_seed(0)).to(device)
        weight.requires_grad_()
        found = []
        for _ in range(14):
            rows, columns = rng.randint(2, 7), rng.randint(9, 30)
            x, ids = torch.rand(rows, columns, 8), torch.randint(5, (rows, columns))
            logits = x.to(device) @ weight
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].to(device).flatten())
            found += [loss.detach().cpu(), torch.autograd.grad(loss, weight)[0].cpu()]
        return found

    before = counted("bailouts")
    compiled, padded = same_on_both(loop, rtol=1e-4, atol=1e-5)
    assert compiled <= 20
    assert padded >= 14
    assert counted("bailouts") == before


# ---- random programs


CHOICES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "add": lambda x, y, c: x + y * c,
    "inverse": lambda x, y, c: 1 / (x + c),
    "exp": lambda x, y, c: (x * 0.1).exp(),
    "rows": lambda x, y, c: x - x.amax(1, keepdim=True) * c,
    "columns": lambda x, y, c: x / (1 + x.abs().sum(0, keepdim=True)),
    "softmax": lambda x, y, c: x.softmax(0) + x.softmax(1),
    "norm": lambda x, y, c: F.layer_norm(x, (4,)) + y,
    "mix": lambda x, y, c: (x @ y.t()).tanh() @ y / 8,
    "part": lambda x, y, c: torch.where(x > c, x, y),
    "write": lambda x, y, c: put(x + 0),
    "join": lambda x, y, c: torch.cat([x[:-1], y[-1:]]),
    "last": lambda x, y, c: x + y[-1] * c,
    "attend": lambda x, y, c: attend(x, y + 3, is_causal=c > 0.5)[0, 0],
    "turn": lambda x, y, c: x.t().contiguous().t() + c,
    "sort": lambda x, y, c: x.sort(0).values,
}


class Chain:
    """A random program of ops on tensors of which one dimension grows."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.steps = [self._draw.choice(sorted(CHOICES)) for _ in range(self._draw.randint(3, 9))]
        self.choices = [self._draw.random() for _ in self.steps]

    def run(self, x: Tensor) -> Tensor:
        earlier = [x, x * 0.5 + 1]
        for name, c in zip(self.steps, self.choices, strict=True):
            earlier.append(CHOICES[name](earlier[-1], earlier[-2], c))
        return earlier[-1]


def check_chain(seed: int) -> None:
    chain, lengths = Chain(seed), random.Random(seed).sample(range(2, 70), 7)

    def loop(device: str) -> list[Tensor]:
        found = []
        for n in lengths:
            x = torch.randn(n, 4).to(device)
            found.append(chain.run(x).cpu())
            x = torch.cat([x, chain.run(x)[:1].clone()])
            found += [chain.run(x).cpu(), x.sum(0).cpu()]
        return found

    same_on_both(loop, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_that_grow_compute_what_the_cpu_computes(seed: int) -> None:
    check_chain(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8, 200))
def test_many_random_programs_that_grow_compute_what_the_cpu_computes(seed: int) -> None:
    check_chain(seed)


def test_a_number_that_changes_what_an_op_means_is_no_size() -> None:
    numbers = torch.tensor([complex(a, b) for a in (1.0, float("inf"), float("nan")) for b in (0.0, float("inf"))])

    def loop(device: str) -> list[Tensor]:
        return [torch.view_as_real(numbers.to(device).pow(k)).cpu() for k in (-2, -1, 0, 1, 2, 3)]

    for mine, theirs in zip(loop("tpu"), loop("cpu"), strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


def lengthening(columns: int) -> list[Tensor]:
    return [(torch.ones(n, columns).to("tpu") * 0.5).exp().sum(0).cpu() for n in range(3, 8)]


def test_the_check_of_padding_names_the_line_of_a_rule_that_reads_the_surplus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(evaluate._RULES, "reduce_sum", evaluate._elementwise)
    monkeypatch.setattr(startup.engine().fragments, "_templates", Templates(None, "cpu"))  # which need no rule
    named = r"aten::sum.* recorded at .*test_growth\.py:"
    with config.using(check="padding"), pytest.raises(RuntimeError, match=named):
        lengthening(23)


def test_the_check_of_padding_finds_nothing_where_rules_are_right() -> None:
    with config.using(check="padding"):
        lengthening(29)
        weight = torch.ones(4, 4, device="tpu", requires_grad=True)
        for n in range(3, 9):
            x = torch.arange(n * 4.0).reshape(n, 4).to("tpu")
            (torch.softmax(x @ weight, 0).cumsum(0) * F.dropout(x, 0.5)).sum().backward()
            made = torch.cat([x, weight.grad]).sort(0).values
            F.embedding((made[:, 0] * 0).long(), weight).mean().item()
    counts = metrics.snapshot()
    assert counts["regions_padded"] > 4
    assert counts["launches"] >= 11 + counts["regions_padded"], "each padded program is launched twice"


def test_ops_are_traced_while_other_regions_may_be_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = startup.engine()._layouts
    pad, was_free = layouts.pad, []

    def spy(program: Any, others: Any, check: Callable[[Any], None]) -> Any:
        def checked(padded: Any) -> None:
            was_free.append(not layouts._lock.locked())
            check(padded)

        return pad(program, others, checked)

    monkeypatch.setattr(layouts, "pad", spy)
    lengthening(37)
    assert was_free
    assert all(was_free)


@pytest.mark.parametrize("pool", [F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
def test_pools_of_a_changing_batch_are_padded_forward_and_backward(pool: Callable[[Tensor, int], Tensor]) -> None:
    def loop(device: str) -> list[Tensor]:
        found = []
        for n in (3, 5, 6, 7, 9, 11):
            x = torch.randn(n, 4, 8, 8, generator=torch.Generator().manual_seed(n)).to(device).requires_grad_()
            made = pool(x, 2)
            made.square().sum().backward()
            found += [made.detach().cpu(), x.grad.cpu()]
        return found

    compiled, padded = same_on_both(loop)
    assert padded == 4
    assert compiled <= 3


# ---- loops that never read


def laps_cut() -> int:
    found: int = metrics.snapshot()["cuts"].get("lap", 0)
    return found


@torch.no_grad()
def generate(device: str, lengths: list[int]) -> list[Tensor]:
    """Tokens, of which none is read before the last one is made."""
    table = torch.linspace(-1, 1, 16 * 8).reshape(16, 8).to(device)
    weight, made = torch.linspace(-1, 1, 64).reshape(8, 8).to(device), []
    for length in lengths:
        tokens = torch.zeros(1, 3, dtype=torch.long, device=device)
        for _ in range(length):
            x = F.embedding(tokens, table) @ weight
            x = torch.softmax(x @ x.mT, -1) @ x
            tokens = torch.cat([tokens, (x[:, -1] @ table.t()).argmax(-1, keepdim=True)], 1)
        made.append(tokens.cpu())
    return made


def test_a_loop_that_never_reads_is_cut_lap_by_lap_where_its_sizes_change() -> None:
    before = laps_cut()
    compiled, padded = same_on_both(lambda device: generate(device, [9, 12, 10, 14, 11]))
    assert laps_cut() - before >= 40
    assert compiled <= 8
    assert padded >= 8


def test_layers_of_different_widths_are_no_laps() -> None:
    before = laps_cut()

    def network(device: str) -> list[Tensor]:
        widths = [64, 48, 32, 24, 16, 12, 8, 6, 4, 2]
        x = torch.linspace(-1, 1, 3 * 64).reshape(3, 64).to(device)
        for rows, columns in itertools.pairwise(widths):
            weight = torch.linspace(-1, 1, rows * columns).reshape(columns, rows).to(device)
            x = (torch.tanh(F.linear(x, weight)) * 1.5).relu() + 0.1
        return [x.cpu()]

    same_on_both(network)
    assert laps_cut() == before


def test_laps_that_keep_all_they_make_for_later_are_one_region() -> None:
    before = laps_cut()

    def loop(device: str) -> list[Tensor]:
        weight = torch.linspace(-1, 1, 16).reshape(4, 4).to(device).requires_grad_()
        x = torch.linspace(-1, 1, 8).reshape(2, 4).to(device)
        for _ in range(10):
            y = torch.tanh(x @ weight).softmax(0) * 2
            x = torch.cat([x, y[-1:]])
        x.square().sum().backward()
        assert weight.grad is not None
        return [weight.grad.cpu()]

    same_on_both(loop, rtol=1e-4, atol=1e-5)
    assert laps_cut() == before


def test_a_region_in_which_a_size_keeps_growing_takes_a_few_programs() -> None:
    def loop(device: str) -> list[Tensor]:
        weight = torch.linspace(-0.4, 0.4, 24 * 8).reshape(24, 8).to(device).requires_grad_()
        x = torch.linspace(-1, 1, 8).reshape(1, 1, 8).to(device)
        for _ in range(12):
            q, k, v = F.linear(x, weight).split(8, 2)  # their places in the array change with its length
            y = torch.softmax(q @ k.mT, -1) @ v
            x = torch.cat([x, y[:, -1:].relu()], 1)
        x.square().sum().backward()
        assert weight.grad is not None
        return [weight.grad.cpu()]

    before = laps_cut()
    with config.using(tiers="pieces"):
        compiled, _ = same_on_both(loop, rtol=1e-4, atol=1e-5)
    assert laps_cut() == before
    assert compiled <= 50


def test_what_laps_draw_and_keep_is_what_the_whole_would() -> None:
    def loop(device: str, *, is_cut: bool) -> list[Tensor]:
        torch.manual_seed(3)
        x, kept = torch.ones(3, 4, device=device), []
        for i in range(12):
            noise = F.dropout(torch.exp(x * 0.1), 0.5)
            x = torch.cat([x, noise.sum(0, keepdim=True).clamp(max=2.0) * (1 + i)])
            kept.append(noise)
            if not is_cut:
                x[0, 0].item()
        return [x.cpu(), *(k.cpu() for k in kept)]

    before = laps_cut()
    found = loop("tpu", is_cut=True)
    assert laps_cut() > before
    for a, b in zip(found, loop("tpu", is_cut=False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_lap_that_fails_names_its_line_and_leaves_what_was_before() -> None:
    x, steps = torch.zeros(2, 4, device="tpu"), torch.zeros(4, device="tpu")
    for i in range(12):
        index = torch.full((1,), 40 if i == 8 else 0, device="tpu")
        row = torch.tanh(x).index_select(0, index).clone()
        x = torch.cat([x, row * 1.5 + 0.5])
        steps += 1
    with pytest.raises(IndexError, match=r"test_growth\.py:\d+"):
        x.sum().item()
    assert steps.tolist() == [8.0] * 4


@pytest.mark.parametrize("step", [1, 2])
def test_a_part_of_an_array_whose_length_changes_too_is_read_by_few_programs(step: int) -> None:
    dice = random.Random(0)
    cuts = [
        (n := dice.randrange(20, 90), first := dice.randrange(n - 9), dice.randrange(first + 8, n)) for _ in range(24)
    ]

    def loop(device: str) -> list[Tensor]:
        found = []
        for n, first, last in cuts:
            x = torch.arange(2.0 * n).view(n, 2).to(device)
            found.append((x[first:last:step] * 2).sum(0).cpu())
        return found

    compiled, padded = same_on_both(loop)
    assert compiled <= 10
    assert padded >= 16


def test_elements_that_a_mask_takes_of_ever_other_graphs_are_read_by_few_programs() -> None:
    """The edges of a graph that are no loops, as PyG's layers take them."""

    def loop(device: str) -> list[Tensor]:
        found, dice = [], torch.Generator().manual_seed(0)
        for i in range(24):
            n = 5 + (i * 7) % 23
            edges = torch.randint(0, n, (2, 3 * n), generator=dice).to(device)
            kept = edges[:, edges[0] != edges[1]]
            found += [kept[1].sum().cpu(), torch.zeros(n).to(device).index_add_(0, kept[0], kept[1].float()).cpu()]
        return found

    compiled, _ = same_on_both(loop)
    assert compiled <= 40


def test_a_count_that_is_a_size_of_buffers_takes_no_program_of_its_own() -> None:
    """Elements lie in buffers of more, however many; 64 of them are of another capacity than their buffer."""
    compiled = []

    def loop(device: str) -> list[Tensor]:
        x, found = torch.arange(300.0).to(device), []
        for count in (130, 200, 150, 195, 170, 128, 160, 192):
            taken = x[x < torch.tensor(count).to(device)]
            found.append(((taken * 2).sin().exp() + taken.sum()).cpu())
            compiled.append(counted("programs_compiled"))
        return found

    same_on_both(loop)
    assert compiled[-4] == compiled[-1] > compiled[-8]


@pytest.mark.parametrize("self_loops", [False, True])
def test_edges_of_ever_other_graphs_are_listed_by_few_programs(self_loops: bool) -> None:
    """What `nonzero` and masks make lies one after the other at the beginning of a longer array."""

    def loop(device: str) -> list[Tensor]:
        found, dice = [], torch.Generator().manual_seed(0)
        for i in range(24):
            n = 8 + (i * 7) % 23
            edges = (torch.rand(n, n, generator=dice) < 0.4).to(device).nonzero().t()
            if self_loops:
                nodes = torch.arange(n, device=device)
                edges = torch.cat([edges[:, edges[0] != edges[1]], torch.stack([nodes, nodes])], 1)
            x = torch.rand(n, 3, generator=dice).to(device)
            found.append(torch.zeros(n, 3).to(device).index_add_(0, edges[1], x[edges[0]]).cpu())
        return found

    compiled, _ = same_on_both(loop)
    assert compiled <= 30


TAKEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda x, places: x.gather(0, places[:, None]),
    "index": lambda x, places: x[places],
    "embedding_bag": lambda x, places: F.embedding_bag(places[None], x),
}


@pytest.mark.parametrize("op", TAKEN)
def test_an_error_of_a_padded_program_names_the_size_that_it_has(op: str) -> None:
    padded = counted("regions_padded")
    for n in (5, 6, 7, 9, 11):
        x, places = torch.ones(n, 3).to("tpu"), (torch.arange(4) + n - 4).to("tpu")
        if n < 9:
            TAKEN[op](x, places).sum().cpu()
            continue
        with pytest.raises((IndexError, RuntimeError), match=rf"(size|0,) {n}\b"):
            TAKEN[op](x, places + 1).sum().cpu()
    assert counted("regions_padded") > padded


def suppressed(boxes: Tensor, order: Tensor) -> Tensor:
    """The boxes that none of a higher score overlaps, as torchvision's reference does it."""
    area, keep = (boxes[:, 2:] - boxes[:, :2]).prod(1), []
    while order.numel() > 1:
        best, order = order[0], order[1:]
        keep.append(best)
        low = torch.maximum(boxes[order, :2], boxes[best, :2])
        high = torch.minimum(boxes[order, 2:], boxes[best, 2:])
        shared = (high - low).clamp(min=0).prod(1)
        order = order[shared / (area[best] + area[order] - shared) <= 0.3]
    return torch.stack([*keep, *order]).cpu()


def test_a_size_that_stays_through_a_loop_is_no_constant_of_the_next_one() -> None:
    counts = []

    def loop(device: str) -> list[Tensor]:
        rng, found = random.Random(0), []
        for _ in range(20):
            counts.append(counted("programs_compiled"))
            corner = torch.rand(rng.randint(12, 30), 2)
            boxes = torch.cat([corner, corner + torch.rand(len(corner), 2) * 0.7], 1).to(device)
            found.append(suppressed(boxes, torch.rand(len(corner)).to(device).argsort()))
        return found

    same_on_both(loop)
    assert counted("programs_compiled") - counts[-8] <= 14, "of some 100 regions, 8 with a list of its own"


@pytest.mark.parametrize("name", ["element", "row", "written"])
def test_places_in_arrays_whose_lengths_change_too_are_run_time_numbers(name: str) -> None:
    def of(x: Tensor, at: int) -> Tensor:
        if name == "written":
            x = x * 2
            x[at] = 7.0
            return x + 1
        return x.clamp(min=x[at, 1]) if name == "element" else x - x[at]

    def loop(device: str) -> list[Tensor]:
        rng = random.Random(1)
        found = []
        for _ in range(40):
            n = rng.randint(5, 30)
            found.append(of(torch.randn(n, 4).to(device), rng.randrange(n)).cpu())
        return found

    programs, padded = same_on_both(loop)
    assert padded >= 20
    assert programs <= 8


PARTS: dict[
    str, tuple[Callable[[int], tuple[int, ...]], Callable[[Tensor, int], Tensor], Callable[[Tensor], Tensor]]
] = {
    "of rows": (lambda n: (n, 3, 4), lambda x, e: x[:, e], torch.exp),
    "first": (lambda n: (3, n, 4), lambda x, e: x[e], torch.sin),
    "of an inner dimension": (lambda n: (4, n, 3), lambda x, e: x[..., e], torch.cos),
    "at a changing place": (lambda n: (3, n, 4), lambda x, e: x[:, x.shape[1] - 1 - e], torch.tanh),
    "in part": (lambda n: (3, n, 4), lambda x, e: x[e, :, 1:3], torch.sigmoid),
    "two, turned": (lambda n: (4, n, 4), lambda x, e: x[e : e + 2].transpose(0, 1), torch.square),
    "permuted": (lambda n: (n, 2, 3), lambda x, e: x.permute(2, 1, 0)[e], torch.atan),
}


def test_parts_of_other_elements_are_read_as_what_they_are() -> None:
    """The real parts of complex numbers, one row after the other, and whole numbers as floats."""

    def loop(device: str) -> list[Tensor]:
        rng = random.Random(1)
        found = []
        for _ in range(20):
            n = rng.randint(9, 50)
            x, w = (
                torch.rand(3, n, 4).to(device).cfloat(),
                torch.randint(0, 2**30, (3, n, 4), dtype=torch.int32).to(device),
            )
            for e in range(3):
                x.real[e].mul_(2.0)
                found += [x.imag[e].sum(0).cpu(), x.real[e].sum(0).cpu(), w.view(torch.float32)[e].sum(0).cpu()]
        return found

    with config.using(check="padding"):
        same_on_both(loop)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("is_written", [False, True], ids=["read", "written"])
def test_parts_that_a_loop_takes_one_by_one_of_ever_other_arrays_are_few_programs(name: str, is_written: bool) -> None:
    """Each is read before the next is taken, as experts are given their tokens: where it begins is a run-time int."""
    shape, part, function = PARTS[name]  # one for each name: no outline is that of another

    def loop(device: str) -> list[Tensor]:
        rng = random.Random(1)
        found = []
        for _ in range(30):
            x = torch.rand(shape(rng.randint(9, 50))).to(device)
            for e in range(3):
                if is_written:
                    part(x, e).add_(0.5).tanh_()
                found.append(function(part(x, e) * 2).sum(0).cpu())
            found.append(x.cpu())
        return found

    with config.using(check="padding"):
        programs, padded = same_on_both(loop)
    assert padded >= 35
    assert programs <= 8


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.0, float("inf")])
def test_distances_of_ever_other_rows(p: float) -> None:
    """Of more than 25 rows PyTorch takes those of p = 2 by one product, and so does a program for both."""

    def loop(device: str) -> list[Tensor]:
        found = []
        for i in range(24):
            x = torch.randn(5 + i * 7 % 41, 4, dtype=torch.float64).to(device).requires_grad_()
            distances = torch.cdist(x, torch.randn(8, 4, dtype=torch.float64).to(device), p=p)
            found += [distances.detach().cpu(), torch.autograd.grad(distances.square().sum(), x)[0].cpu()]
        return found

    programs, _ = same_on_both(loop)
    assert programs <= 14, "of 48 regions"


def _negated(x: Tensor) -> Tensor:
    x.diagonal().neg_()
    return x


def _copied(x: Tensor) -> Tensor:
    x.diagonal().copy_(x[0])
    return x


def _turned(x: Tensor) -> Tensor:
    batch = x.expand(3, *x.shape).clone()
    batch.diagonal(dim1=2, dim2=1).mul_(2.0)
    return batch


def _beside(x: Tensor) -> Tensor:
    x.diagonal(1).fill_(3.0)
    x.diagonal(-1).add_(1.0)
    return x


DIAGONALS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "filled": (lambda x: x.fill_diagonal_(0.5), 6),
    "negated": (_negated, 6),
    "copied": (_copied, 6),
    "of a batch": (_turned, 6),
    "read": (lambda x: x.diagonal().exp(), 6),
    "beside": (_beside, 99),
}


@pytest.mark.parametrize("name", DIAGONALS)
def test_diagonals_of_ever_other_matrices(name: str) -> None:
    function, most = DIAGONALS[name]

    def loop(device: str) -> list[Tensor]:
        rng = random.Random(1)
        return [function(torch.rand((n := rng.randint(5, 40)), n).to(device) * 2).cpu() for _ in range(24)]

    with config.using(check="padding"):
        programs, _ = same_on_both(loop)
    assert programs <= most


def test_parts_whose_size_has_nothing_to_do_with_their_array() -> None:
    """Their surplus may lie behind the array's."""

    def loop(device: str) -> list[Tensor]:
        rng = random.Random(1)
        found = []
        for _ in range(30):
            n = rng.randint(30, 60)
            x, m = torch.rand(n, 4).to(device), rng.randint(9, 20)
            found += [(x[at : at + m] * 2).exp().sum(0).cpu() for at in (n - m, 3, n - m - 1)]
        return found

    with config.using(check="padding"):
        programs, _ = same_on_both(loop)
    assert programs <= 12


ACROSS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "tokens": lambda x, j: x.flatten(0, 1)[4 * j : 4 * j + 4],
    "elements": lambda x, j: x.view(-1)[5 * j : 5 * j + 4],
    "steps": lambda x, j: x.view(-1)[3 * j : 3 * j + 7 : 2],
    "of rows": lambda x, j: x.flatten(1)[:, 3 * j : 3 * j + 4],
}


@pytest.mark.parametrize("name", ACROSS)
@pytest.mark.parametrize("is_written", [False, True], ids=["read", "written"])
def test_parts_that_run_over_the_ends_of_rows(name: str, is_written: bool) -> None:
    """Whether they do hangs on where they begin, which is a run-time int."""

    def loop(device: str) -> list[Tensor]:
        found = []
        for n in (5, 9, 6, 11, 7, 10, 12, 8, 13):
            x = torch.rand(3, n, 2).to(device)
            for j in range(4):
                if is_written:
                    ACROSS[name](x, j).add_(0.5).tanh_()
                found.append((ACROSS[name](x, j) * 2).exp().sum(-1).cpu())
            found.append(x.cpu())
        return found

    with config.using(check="padding"):
        same_on_both(loop)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
@pytest.mark.parametrize("largest", [True, False])
def test_the_first_few_of_what_may_be_hardly_longer(dtype: torch.dtype, largest: bool) -> None:
    """Also where all are NaN, or the least that there is: what makes up for short sizes is never taken."""
    bounds = (-math.inf, math.inf, math.nan) if dtype.is_floating_point else torch.iinfo(dtype)
    extremes = bounds if isinstance(bounds, tuple) else (bounds.min, bounds.max)
    programs = []
    for lap in range(40):
        length = 3 + 7 * lap % 60
        x = (torch.arange(length * 2) * 37 % 11).view(length, 2).to(dtype)
        if lap % 2:
            x[lap % 3 :] = extremes[lap // 2 % len(extremes)]
        values, places = (each.cpu() for each in x.to("tpu").topk(3, 0, largest))
        expected = x.topk(3, 0, largest).values
        torch.testing.assert_close(values, expected, equal_nan=True)
        torch.testing.assert_close(x.gather(0, places), expected, equal_nan=True)
        programs.append(counted("programs_compiled"))
    assert programs[-1] - programs[20] <= 1


@pytest.mark.parametrize("indices", [torch.triu_indices, torch.tril_indices])
def test_pairs_of_ever_other_numbers(indices: Callable[..., Tensor]) -> None:
    programs = []
    for lap in range(30):
        count = 4 + 11 * lap % 70
        x = torch.arange(float(count))
        offset = 1 if indices is torch.triu_indices else -1
        (i, j), (k, m) = indices(count, count, offset, device="tpu"), indices(count, count, offset)
        sent = x.to("tpu")
        assert (sent[i] * 3 - sent[j]).sum().item() == (x[k] * 3 - x[m]).sum().item()
        programs.append(counted("programs_compiled"))
    assert programs[-1] - programs[15] <= 1


def gaussian_process(x: Tensor, kernel: Tensor) -> Tensor:
    factor = torch.linalg.cholesky(kernel)
    solved = torch.cholesky_solve(x[:, None], factor)
    loss = 0.5 * x @ solved[:, 0] + factor.diagonal().log().sum()
    return torch.cat([loss[None], *torch.autograd.grad(loss, [x, kernel])[:1]])


MATRICES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Gaussian process": gaussian_process,
    "solved": lambda x, a: torch.linalg.solve(a, x),
    "solved from the right": lambda x, a: torch.linalg.solve(a, torch.stack([x, x + 1]), left=False),
    "turned": lambda x, a: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), x[:, None], adjoint=True),
    "triangle": lambda x, a: torch.linalg.solve_triangular(
        a.mT, x[:, None].expand(-1, 3), upper=True, unitriangular=True
    ),
    "inverse": lambda x, a: torch.autograd.grad(torch.linalg.inv(a).diagonal() @ x, a)[0],
    "determinants": lambda x, a: torch.stack([torch.linalg.slogdet(a)[1], torch.logdet(a.mT @ a)]),
    "upper, of a batch": lambda x, a: torch.linalg.cholesky(torch.stack([a, 2 * a]), upper=True),
    "factors": lambda x, a: torch.linalg.multi_dot(torch.linalg.lu(a.flip(0))),  # which pivots are as good as others
    "no minor": lambda x, a: torch.linalg.cholesky_ex(a - 9 * torch.diag(x > 3).to(a) * a.diagonal()).info + 0 * x,
}


@pytest.mark.parametrize("name", MATRICES)
def test_square_matrices_of_ever_other_sizes(name: str) -> None:
    programs = []
    for lap in range(30):
        size = 3 + 7 * lap % 29
        x = torch.arange(1.0, size + 1, dtype=torch.float64) % 5
        a = x.outer(x) + torch.diag(x + 1) + (x[:, None] - x).sin().abs().mul(0.1)
        x, a = x.requires_grad_(), a.add(a.mT).requires_grad_()
        found = MATRICES[name](x.detach().to("tpu").requires_grad_(), a.detach().to("tpu").requires_grad_())
        torch.testing.assert_close(found.cpu(), MATRICES[name](x, a))
        programs.append(counted("programs_compiled"))
    assert programs[-1] - programs[14] <= 2


def test_errors_of_matrices_of_ever_other_sizes_name_their_minors() -> None:
    for size in range(3, 12):
        a = torch.eye(size).index_fill(0, torch.tensor(size - 2), 0.0).to("tpu")
        with pytest.raises(
            torch.linalg.LinAlgError, match=rf"leading minor of order {size - 1} is not positive-definite"
        ):
            torch.linalg.cholesky(a).cpu()
        with pytest.raises(torch.linalg.LinAlgError, match="singular"):
            torch.linalg.solve(a, a).cpu()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_integers_drawn_between_bounds_that_change_with_sizes(dtype: torch.dtype) -> None:
    """In the branches for few and for many numbers: what one knows of a size is not known in the other."""

    def drawn(rows: int) -> Tensor:
        torch.manual_seed(rows)
        return torch.zeros(rows, rows + 2, dtype=dtype, device="tpu").random_(5, 6 + rows).cpu()

    programs, made = [], {}
    for lap in range(24):
        rows = 3 + 5 * lap % 31
        made[rows] = drawn(rows)
        programs.append(counted("programs_compiled"))
    assert programs[-1] - programs[12] <= 1
    with config.using(padding=False):
        for rows in (3, 8, 27):
            assert drawn(rows).equal(made[rows])
            assert 5 <= made[rows].min() <= made[rows].max() <= 5 + rows


def test_quarters_of_a_turn_that_change_with_sizes() -> None:
    def loop(device: str) -> list[Tensor]:
        turns = [torch.rand(n, n, 2).to(device).mul(1).rot90(k) for k in (0, 1, 2, 3, 5, 2) for n in (5, 7, 4)]
        return [turn.cpu() for turn in turns]

    same_on_both(loop)


Crop = tuple[slice, slice, slice]


def _pasted(x: Tensor, one: Crop, other: Crop) -> Tensor:
    x[one] = x[other].tanh()
    return x


def _erased(x: Tensor, one: Crop, other: Crop) -> Tensor:
    x[one] = 0.5
    x[other].neg_()
    return x


CROPS: dict[str, Callable[[Tensor, Crop, Crop], Tensor]] = {
    "read": lambda x, one, other: x[one].exp().sum(0).sum() + x[other].amax(),
    "multiplied": lambda x, one, other: (x[one] * x[other].flip(1)).sum(),
    "pasted": _pasted,
    "erased": _erased,
}


@pytest.mark.parametrize("name", CROPS)
def test_crops_of_any_size_at_any_place_of_an_image_are_few_programs(name: str) -> None:
    def loop(device: str) -> list[Tensor]:
        rng = random.Random(1)
        found = []
        for _ in range(60):
            x = torch.rand(3, 24, 20).to(device)
            h, w = rng.randint(2, 24), rng.randint(2, 20)
            corners = [(rng.randint(0, 24 - h), rng.randint(0, 20 - w)) for _ in range(2)]
            one, other = ((slice(0, 3), slice(y, y + h), slice(z, z + w)) for y, z in corners)
            found.append(CROPS[name](x, one, other).cpu())
        return found

    with config.using(check="padding"):
        programs, padded = same_on_both(loop)
    assert padded >= 40
    assert programs <= 14, "of 60 crops"


def test_every_other_row_of_crops() -> None:
    def loop(device: str) -> list[Tensor]:
        rng = random.Random(1)
        found = []
        for _ in range(40):
            x = torch.rand(40, 6).to(device)
            n = rng.randint(5, 30)
            at = rng.randint(0, 40 - n)
            found.append((x[at : at + n : 2] * 3).cumsum(0).sum(0).cpu())
        return found

    with config.using(check="padding"):
        programs, _ = same_on_both(loop)
    assert programs <= 10


def test_a_size_that_stays_short_is_short_in_memory() -> None:
    def loop(device: str) -> list[Tensor]:
        rng = random.Random(2)
        weight = torch.randn(64, 64).to(device)
        return [(torch.randn(rng.randint(2, 8), 16, 64).to(device) @ weight).relu().cpu() for _ in range(20)]

    kept: list[Any] = []
    engine = startup.engine()
    made = engine._builder.padded
    engine._builder.padded = lambda padded, executable: kept.append(padded) or made(padded, executable)
    try:
        same_on_both(loop)
    finally:
        del engine._builder.padded
    assert kept
    assert all(base.shape in ((8, 16, 64), (64, 64)) for padded in kept for base in padded.program.inputs)


class OnHost:
    """A client whose arrays are tensors."""

    def download(self, array: Any) -> Tensor:
        return array.values

    def upload(self, values: Tensor, device: int) -> Any:
        return HostArray(values)


class HostArray:
    def __init__(self, values: Tensor) -> None:
        self.values, self.aval, self.is_donated = values, values, False

    def is_deleted(self) -> bool:
        return self.is_donated


def test_a_copy_whose_memory_a_launch_was_given_is_made_anew() -> None:
    copies = arrays.Copies(OnHost(), startup.engine_counters())
    array = HostArray(torch.arange(3.0))
    longer = copies.padded(array, (5,), 0)
    assert copies.padded(array, (5,), 0) is longer
    longer.is_donated = True
    again = copies.padded(array, (5,), 0)
    assert again is not longer
    assert again.values.tolist() == [0, 1, 2, 0, 0]
    padded = arrays.PaddedArray(again, (3,))
    counting = copies.counting(padded, 0)
    assert copies.counting(padded, 0) is counting
    counting.is_donated = True
    assert copies.counting(padded, 0) is not counting


def test_copies_are_few_and_go_with_what_they_copy() -> None:
    copies = arrays.Copies(OnHost(), startup.engine_counters())
    kept = [HostArray(torch.zeros(2)) for _ in range(100)]
    for array in kept:
        copies.padded(array, (4,), 0)
    assert len(copies._known) == 64
    del array, kept
    gc.collect()
    assert not copies._known


def test_a_copy_that_goes_runs_no_bytecode() -> None:
    """In which the exception of a signal's handler would be lost, as in every callback of a weak reference."""
    copies, called = arrays.Copies(OnHost(), startup.engine_counters()), list[str]()
    array = HostArray(torch.zeros(2))
    copies.padded(array, (4,), 0)
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        del array
    finally:
        sys.setprofile(None)
    assert not copies._known
    assert called == []


def test_what_many_padded_programs_read_is_copied_once() -> None:
    def loop(device: str) -> list[Tensor]:
        found = []
        for n in (9, 12, 20, 15, 18, 11):
            rows = torch.randn(n, 4).to(device)
            found += [(rows[:k].sum(0) + rows.sum(0)).cpu() for k in range(2, 8)]
        return found

    same_on_both(loop)
    before = counted("arrays_moved")
    same_on_both(loop)
    assert counted("arrays_moved") - before <= 12, "of 36 regions"


def test_what_counts_of_an_array_that_a_piece_padded_further() -> None:
    kept: list[Any] = []
    work = SimpleNamespace(ints=None, keep=lambda output, array, guard: kept.append(array))
    padded = SimpleNamespace(executable=None, program=None, shapes=[], outputs={0: (2, 4)}, ints=lambda given: given)
    values = torch.arange(32.0).reshape(8, 4)
    arrays.PaddedWork(work, padded).keep(0, arrays.PaddedArray(HostArray(values), (3, 4)), None)
    assert torch.equal(arrays.download(OnHost(), kept[0]), values[:2])


NEXT_TOKENS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "shifted": lambda scores, x: F.cross_entropy(scores[:, :-1].reshape(-1, 9), x[:, 1:].reshape(-1)),
    "copied": lambda scores, x: F.cross_entropy(
        scores[..., :-1, :].contiguous().view(-1, 9), x[..., 1:].contiguous().view(-1)
    ),
    "two off": lambda scores, x: F.cross_entropy(scores[:, :-2].flatten(0, 1), x[:, 2:].flatten()),
}


@pytest.mark.parametrize("name", NEXT_TOKENS)
def test_the_next_tokens_of_batches_of_ever_other_sizes(name: str) -> None:
    """Rows of one size less than the batch has: `a*b - a` of its sizes."""

    def loop(device: str) -> list[Tensor]:
        dice, found = random.Random(0), []
        table = torch.randn(9, 9).to(device).requires_grad_()
        for _ in range(24):
            x = torch.randint(9, (dice.randint(2, 9), dice.randint(4, 30))).to(device)
            loss = NEXT_TOKENS[name](F.embedding(x, table).tanh(), x)
            (gradient,) = torch.autograd.grad(loss, table)
            with torch.no_grad():
                table -= 0.1 * gradient
            found.append(loss.detach().cpu())
        return found

    refused = dict(metrics.snapshot()["regions_not_padded"])
    programs, _ = same_on_both(loop)
    found = {k: v for k, v in metrics.snapshot()["regions_not_padded"].items() if v > refused.get(k, 0)}
    assert programs <= 12
    assert not any("inconclusive" in cause or "no bounds" in cause for cause in found), found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a*b - a", (4, 248)),
        ("2*a*b - 3*b + 1", (4, 417)),
        ("a - b", (-30, 5)),
        ("a*a - a", None),
        ("a*floordiv(b, 2)", None),
    ],
)
def test_bounds_of_what_is_linear_in_each_size(text: str, expected: tuple[int, int] | None) -> None:
    size = evaluate.Symbols([(2, 8, 8), (3, 32, 32)]).size(text)
    assert evaluate._bounds_at_corners(size) == expected


@pytest.mark.parametrize("pool", [F.max_pool1d, F.avg_pool1d])
def test_pooling_over_all_of_what_changes(pool: Callable[[Tensor, int], Tensor]) -> None:
    def loop(device: str) -> list[Tensor]:
        found = []
        weight = torch.randn(6, 4, 3).to(device).requires_grad_()
        for n in LENGTHS:
            made = F.conv1d(torch.randn(2, 4, n + 2).to(device), weight)
            loss = pool(made.relu(), made.shape[-1]).square().sum()
            found += [loss.detach().cpu(), torch.autograd.grad(loss, weight)[0].cpu()]
        return found

    refused = dict(metrics.snapshot()["regions_not_padded"])
    same_on_both(loop, rtol=1e-4, atol=1e-5)
    found = {k: v for k, v in metrics.snapshot()["regions_not_padded"].items() if v > refused.get(k, 0)}
    assert not any("pool" in cause for cause in found), found


def test_what_a_lowering_refuses_is_not_traced_for_such_sizes_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def refuse(self: PaddedForm, *_: Any) -> None:
        tried.append(1)
        raise RuntimeError("planted")

    monkeypatch.setattr(PaddedForm, "check", refuse)
    table = torch.randn(40, 4).to("tpu")
    for n in [18, 19, 20, 21, 22, 23, 24, 25] * 6:
        (table[:n].tanh().sum(0) + n).cpu()
    most = len(tried)
    for n in [26, 27, 28, 29, 30, 31] * 6:
        (table[:n].tanh().sum(0) + n).cpu()
    assert len(tried) < 1.5 * most + 12
