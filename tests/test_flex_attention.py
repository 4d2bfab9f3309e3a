"""flex_attention has the formula's numbers and gradients, stores no scores, and compiles for TPUs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from script import compiled_for
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from torchtpu import metrics
from torchtpu.compile import flex
from torchtpu.ops import Context
from torchtpu.ops.attention import flex_tiles
from torchtpu.ops.attention.flex_attention import backward, forward
from torchtpu.ops.attention.flex_mods import Mod

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]

LENGTH = 160


class Case(NamedTuple):
    """A call: how its functions are made of the buffers, what else it is given, and how near the result has to be."""

    score: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    buffers: tuple[Callable[[], Tensor], ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012 -- read only
    batch: int = 2
    heads: int = 4
    key_heads: int = 4
    key_batch: int = 2
    width: int = LENGTH
    value_size: int = 16
    dtype: torch.dtype = torch.float32
    mask_heads: tuple[int | None, int | None] = (None, None)
    tolerance: float = 2e-5


def seeded(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def documents() -> Tensor:
    return torch.arange(LENGTH) // 37


def relative(table: Tensor) -> Any:
    return lambda score, b, h, i, j: score + table[h, i - j + LENGTH - 1]


def embedded(table: Tensor) -> Any:
    return lambda score, b, h, i, j: score + (table[i] * table[j]).sum(-1)


def causal(*_: Tensor) -> Any:
    return lambda b, h, i, j: i >= j


CASES = {
    "plain": Case(),
    "scaled": Case(options={"scale": 0.3}),
    "capped": Case(lambda: lambda score, b, h, i, j: 5 * torch.tanh(score / 5), causal),
    "slopes": Case(lambda slopes: lambda score, b, h, i, j: score + slopes[h] * (j - i), causal, (seeded(4),)),
    "relative": Case(relative, None, (seeded(4, 2 * LENGTH),)),
    "two tables": Case(
        lambda x, y: lambda score, b, h, i, j: score * x[b, h] + y[j] * x[b, 0 * h],
        None,
        (seeded(2, 4), seeded(LENGTH)),
    ),
    "number": Case(lambda x: lambda score, b, h, i, j: score * x, causal, (seeded(),)),
    "vectors": Case(embedded, None, (seeded(LENGTH, 3),), tolerance=1e-4),
    "masked by score": Case(lambda: lambda score, b, h, i, j: torch.where(j - i < 9, score, -float("inf"))),
    "parity": Case(lambda: lambda score, b, h, i, j: torch.where((i + j) % 2 == 0, score.abs(), score.clamp(-1, 1))),
    "window": Case(None, lambda: lambda b, h, i, j: (i >= j) & (i - j <= 20)),
    "documents": Case(None, lambda ids: lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j), (documents,)),
    "dead rows": Case(None, lambda: lambda b, h, i, j: (i >= 30) & (j < 60 + i)),
    "of each head": Case(None, lambda: lambda b, h, i, j: (i - j) % (h + 1) <= b, mask_heads=(2, 4)),
    "grouped": Case(None, causal, options={"enable_gqa": True}, key_heads=2),
    "one batch of keys": Case(None, causal, key_batch=1, mask_heads=(2, None)),
    "longer keys": Case(None, lambda: lambda b, h, i, j: i + 41 >= j, width=LENGTH + 41, value_size=24),
    "bfloat16": Case(relative, causal, (seeded(4, 2 * LENGTH),), dtype=torch.bfloat16, tolerance=4e-2),
    "float64": Case(relative, causal, (seeded(4, 2 * LENGTH),), dtype=torch.float64, tolerance=1e-10),
}


def arguments(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """Queries, keys and values; buffers."""
    shapes = (
        (case.batch, case.heads, LENGTH, 16),
        (case.key_batch, case.key_heads, case.width, 16),
        (case.key_batch, case.key_heads, case.width, case.value_size),
    )
    given = [torch.randn(s, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(shapes)]
    buffers = [make() for make in case.buffers]
    wide = [b.double() if case.dtype == torch.float64 and b.is_floating_point() else b for b in buffers]
    return [g.to(case.dtype) for g in given], wide


def differentiated(tensors: list[Tensor]) -> list[Tensor]:
    return [t.requires_grad_() for t in tensors if t.is_floating_point()]


def formula(case: Case, given: list[Tensor], buffers: list[Tensor]) -> list[Tensor]:
    """Output, log-sum-exp and largest scores, with the functions given all indices at once."""
    query, key, value = (t.double() for t in given)
    key, value = (t.repeat_interleave(case.heads // case.key_heads, 1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) * case.options.get("scale", 1 / math.sqrt(16))
    sizes = scores.shape
    b, h, i, j = (torch.arange(n).view([-1 if d == k else 1 for d in range(4)]) for k, n in enumerate(sizes))
    if case.score is not None:
        scores = case.score(*buffers)(scores, b, h, i, j)
    if case.mask is not None:
        scores = scores.masked_fill(~case.mask(*buffers)(b, h, i, j), float("-inf"))
    is_dead = (scores == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(is_dead, 0), -1).masked_fill(is_dead, 0)
    return [weights @ value, scores.logsumexp(-1).masked_fill(is_dead[..., 0], float("-inf")), scores.amax(-1)]


def call(case: Case, given: list[Tensor], buffers: list[Tensor], attend: Any = flex_attention) -> list[Tensor]:
    mask = None
    if case.mask is not None or case.mask_heads != (None, None):
        function = (lambda b, h, i, j: i >= 0) if case.mask is None else case.mask(*buffers)
        mask = create_block_mask(function, *case.mask_heads, LENGTH, case.width, device="tpu", BLOCK_SIZE=32)
    score = None if case.score is None else case.score(*buffers)
    wanted = AuxRequest(lse=True, max_scores=True)
    made, more = attend(*given, score_mod=score, block_mask=mask, return_aux=wanted, **case.options)
    return [made, more.lse, more.max_scores]


def assert_equal_to_formula(case: Case, attend: Any) -> None:
    """Results, and gradients that also come through the log-sum-exp."""
    results, grads = [], []
    for place, run in (("cpu", formula), ("tpu", lambda *x: call(*x, attend))):
        given, buffers = ([t.to(place) for t in part] for part in arguments(case))
        leaves = differentiated([*given, *buffers])
        made = run(case, given, buffers)
        loss = made[0].double().square().sum() + made[1].double().masked_fill(made[1] < -1e30, 0).sin().sum()
        loss.backward()
        results.append([m.detach().cpu() for m in made])
        grads.append([leaf.grad.cpu() for leaf in leaves])
    limits = {"rtol": case.tolerance, "atol": case.tolerance, "check_dtype": False}
    torch.testing.assert_close(results[1], results[0], **limits)
    torch.testing.assert_close(grads[1], grads[0], rtol=10 * case.tolerance, atol=10 * case.tolerance)


@pytest.mark.parametrize("name", CASES)
def test_compiled_numbers_and_gradients_are_the_formulas(name: str) -> None:
    assert_equal_to_formula(CASES[name], torch.compile(flex_attention))
    counts = metrics.snapshot()
    assert counts["cpu_fallbacks"] == {}
    assert counts["ops_recorded"] < 150, "the dense form takes some 200"


@pytest.mark.parametrize("name", ["slopes", "of each head", "grouped", "bfloat16"])
def test_eager_numbers_and_gradients_are_the_formulas(name: str) -> None:
    assert_equal_to_formula(CASES[name], flex_attention)


def test_what_has_no_text_runs_in_the_dense_form() -> None:
    case = Case(lambda x: lambda score, b, h, i, j: score + x.cumsum(0)[h], causal, (seeded(4),))
    assert not flex.flex_mods.knows("cumsum")
    assert_equal_to_formula(case, torch.compile(flex_attention))


def test_an_index_out_of_bounds_is_an_error() -> None:
    table = torch.zeros(100, device="tpu")
    query = torch.ones(1, 1, LENGTH, 16, device="tpu")
    made = torch.compile(flex_attention)(query, query, query, lambda score, b, h, i, j: score + table[i])
    with pytest.raises(IndexError, match="out of bounds"):
        made.cpu()


def test_a_training_step_is_one_program_and_one_launch() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64, device="tpu")
    slopes = torch.nn.Parameter(torch.rand(4, device="tpu"))
    optimizer = torch.optim.SGD([*layer.parameters(), slopes], lr=0.1)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device="tpu")
    x = torch.randn(2, LENGTH, 64, device="tpu")

    @torch.compile(fullgraph=True)
    def loss_of(x: Tensor) -> Tensor:
        query = layer(x).view(2, LENGTH, 4, 16).transpose(1, 2)
        bias = lambda score, b, h, i, j: score + slopes[h] * (j - i)
        return flex_attention(query, query, query, bias, mask).square().mean()

    losses = []
    for step in range(6):
        if step == 3:
            torch.tpu.synchronize()
            metrics.reset()
        optimizer.zero_grad()
        loss = loss_of(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.tpu.synchronize()
    counts = metrics.snapshot()
    assert (counts["launches"], counts["programs_compiled"], counts["trie_misses"]) == (3, 0, 0)
    read = torch.stack(losses).tolist()
    assert read == sorted(read, reverse=True), "it learns"


def test_lengths_that_change_give_the_formulas_numbers() -> None:
    attend = torch.compile(lambda q, k, v, mask: flex_attention(q, k, v, block_mask=mask), fullgraph=True)
    for length in (64, 96, 160, 100):
        given = [torch.randn(2, 4, length, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="tpu", BLOCK_SIZE=32)
        made = attend(*(g.to("tpu") for g in given), mask)
        expected = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True)
        torch.testing.assert_close(made.cpu(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_autocast_casts_queries_keys_and_values(is_compiled: bool) -> None:
    given = [torch.randn(1, 2, 64, 16, device="tpu", requires_grad=True) for _ in range(3)]

    def attend(*given: Tensor) -> Tensor:
        with torch.autocast("tpu", torch.bfloat16):
            return flex_attention(*given)

    made = (torch.compile(attend) if is_compiled else attend)(*given)
    expected = torch.nn.functional.scaled_dot_product_attention(*given)
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(made.float(), expected, rtol=3e-2, atol=3e-2)
    made.float().sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in given)


# ---- tiles

INDEX = (torch.int32,) * 4
CONTEXT = Context("flex_attention", "cpu", (), "highest")
ROWS, COLUMNS = 200, 230
TILED: dict[str, tuple[Callable[..., Any], int]] = {
    "causal": (lambda b, h, i, j: i >= j, 32),
    "window": (lambda b, h, i, j: (i - j).abs() < 20, 16),
    "dead rows": (lambda b, h, i, j: (i > 90) & (j < 60), 32),
    "of each head": (lambda b, h, i, j: (j // 40) % (h + 1) == b, 40),
    "large blocks": (lambda b, h, i, j: (i + 64 >= j) & (j != 3), 96),
    "odd blocks": (lambda b, h, i, j: (i + 64 >= j) & (j != 3), 23),
    "everything": (lambda b, h, i, j: i >= 0, 0),
}


def text(function: Callable[..., Any], *leading: torch.dtype, buffers: tuple[tuple[int, ...], ...] = ()) -> str:
    return flex._trace(function, [(d, ()) for d in leading], [(torch.float32, shape) for shape in buffers])


def bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, table: Tensor) -> Tensor:
    return score + table[h, i]


def slope_of_bias(score: Tensor, b: Any, h: Any, i: Any, j: Any, grad: Tensor, table: Tensor) -> tuple[Any, ...]:
    summed = torch.ops.flex_lib.zeros_and_scatter(list(table.shape), [h, i], grad)
    return grad, None, None, None, None, summed


def tables(mask: BlockMask) -> list[Any]:
    return [jnp.asarray(t.numpy()) for t in mask.as_tuple()[2:6]]


def attend_with_gradients(name: str, *, has_blocks: bool = True) -> list[Any]:
    """All results of the lowerings, whose tiles are as large as the module says."""
    function, size = TILED[name]
    rng = np.random.default_rng(0)
    query, key, value, grad = (
        jnp.asarray(rng.standard_normal(s), jnp.float32)
        for s in ((2, 4, ROWS, 16), (2, 2, COLUMNS, 16), (2, 2, COLUMNS, 8), (2, 4, ROWS, 8))
    )
    table = jnp.asarray(rng.standard_normal((4, ROWS)), jnp.float32)
    made = create_block_mask(function, 2, 4, ROWS, COLUMNS, device="cpu", BLOCK_SIZE=size or 128)
    blocks = tables(made) if size and has_blocks else []
    score = text(bias, torch.float32, *INDEX, buffers=((4, ROWS),))
    joint = text(slope_of_bias, torch.float32, *INDEX, torch.float32, buffers=((4, ROWS),))
    mask = text(function, *INDEX)
    rest = {"scale": 0.25, "block_size": [size, size], "ctx": CONTEXT}

    def both(query: Any, key: Any, value: Any, grad: Any, table: Any, blocks: Any) -> list[Any]:
        results = forward(query, key, value, [table], [], blocks, score, mask, **rest)
        given = query, key, value, *results[:2], grad, None
        return [*results, *backward(*given, [table], [], blocks, score, joint, mask, **rest)]

    return jax.jit(both)(query, key, value, grad, table, blocks)


def test_a_constant_index_is_part_of_the_function() -> None:
    said = text(lambda score, b, h, i, j, table: score + table[h, 3], torch.float32, *INDEX, buffers=((4, 5),))
    with jax.enable_x64(True):
        table, places = jnp.arange(20.0).reshape(4, 5), [jnp.arange(n, dtype=jnp.int32) for n in (1, 4, 2, 2)]
        made, _, is_in_bounds = Mod(said, CONTEXT).on_tile([jnp.zeros((1, 4, 2, 2))], places, [table])
    np.testing.assert_array_equal(made, np.broadcast_to(table[None, :, 3, None, None], (1, 4, 2, 2)))
    assert is_in_bounds


@pytest.mark.parametrize("name", TILED)
def test_tiles_compute_what_the_whole_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        expected = attend_with_gradients(name, has_blocks=False)
        for knob, value in (("_STORED", 2**16), ("_LEAST_ROWS", 32), ("_COLUMNS", 64)):
            monkeypatch.setattr(flex_tiles, knob, value)
        actual = attend_with_gradients(name)
    assert len(actual) == 7
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5)


def test_tiles_that_the_block_mask_leaves_out_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN in keys that nobody attends to reaches only those rows whose tiles have them."""
    for knob, value in (("_STORED", 2**16), ("_LEAST_ROWS", 32), ("_COLUMNS", 64)):
        monkeypatch.setattr(flex_tiles, knob, value)
    function = lambda b, h, i, j: i >= j
    blocks = tables(create_block_mask(function, None, None, 256, 256, device="cpu", BLOCK_SIZE=32))
    query, key = jnp.ones((1, 4, 256, 16)), jnp.ones((1, 4, 256, 16)).at[:, :, 192:].set(jnp.nan)
    score, mask = text(lambda score, *_: score, torch.float32, *INDEX), text(function, *INDEX)
    made = forward(query, key, key, [], [], blocks, score, mask, 1.0, [32, 32], ctx=CONTEXT)[0]
    assert not jnp.isnan(made[:, :, :192]).any()
    assert jnp.isnan(made[:, :, 192:]).all()


def test_a_block_mask_without_a_function_counts() -> None:
    count, indices = torch.tensor([[[1, 1]]], dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(count.to("tpu"), indices.to("tpu"), BLOCK_SIZE=64, seq_lengths=(128, 128))
    given = [torch.randn(1, 2, 128, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    made = torch.compile(flex_attention)(*(g.to("tpu") for g in given), block_mask=mask)
    same_half = torch.arange(128)[:, None] // 64 == torch.arange(128) // 64
    expected = torch.nn.functional.scaled_dot_product_attention(*given, attn_mask=same_half)
    torch.testing.assert_close(made.cpu(), expected, rtol=2e-5, atol=2e-5)


def test_long_sequences_have_the_formulas_numbers() -> None:
    """End to end, with tiles of the size that the lowering chooses."""
    length, heads = 2048, 8
    given = [torch.randn(1, heads, length, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    slopes = torch.rand(heads)
    on_cpu = [t.clone().requires_grad_() for t in (*given, slopes)]
    on_tpu = [t.to("tpu").requires_grad_() for t in (*given, slopes)]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="tpu")

    @torch.compile(fullgraph=True)
    def attend(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
        return flex_attention(query, key, value, lambda score, b, h, i, j: score + slopes[h] * (j - i), mask)

    made = attend(*on_tpu)
    made.square().mean().backward()
    ahead = torch.arange(length) - torch.arange(length)[:, None]
    offsets = (on_cpu[3].view(heads, 1, 1) * ahead).masked_fill(ahead > 0, float("-inf"))
    expected = torch.nn.functional.scaled_dot_product_attention(*on_cpu[:3], attn_mask=offsets)
    expected.square().mean().backward()
    torch.testing.assert_close(made.cpu(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close([t.grad.cpu() for t in on_tpu], [t.grad for t in on_cpu], rtol=1e-3, atol=1e-6)


COMPILE = """
import json, sys
import jax, jax.numpy as jnp, torch
from torchtpu.compile import flex
from torchtpu.ops import Context
from torchtpu.ops.attention.flex_attention import backward, forward
from torchtpu.ops.attention.flex_mods import Mod
from torchtpu.runtime.compile.aot import AotClient

client = AotClient(sys.argv[1])
context = Context("flex_attention", "tpu", (), "highest")
index = [(torch.int32, ())] * 4
score_aval, table = (torch.float32, ()), [(torch.float32, (8,))]
score = flex._trace(lambda s, b, h, i, j, t: s + t[h] * (j - i), [score_aval, *index], table)
scatter = torch.ops.flex_lib.zeros_and_scatter
slope = lambda s, b, h, i, j, g, t: (g, None, None, None, None, scatter([8], [h], g * (j - i)))
joint = flex._trace(slope, [score_aval, *index, score_aval], table)
mask = flex._trace(lambda b, h, i, j: i >= j, index, [])

def step(length, has_blocks, key_heads):
    blocks = []
    if has_blocks:
        count = -(-length // 128)
        blocks = [jax.ShapeDtypeStruct((1, 1, count, *n), jnp.int32) for n in ((), (count,), (), (count,))]
    def attend(query, key, value, grad, table, *blocks):
        rest = {"scale": 0.1, "block_size": [128, 128], "ctx": context}
        made = forward(query, key, value, [table], [], blocks, score, mask, **rest)
        given = query, key, value, *made[:2], grad, None
        return made[0], *backward(*given, [table], [], blocks, score, joint, mask, **rest)
    struct = lambda heads: jax.ShapeDtypeStruct((2, heads, length, 128), jnp.bfloat16)
    given = struct(8), struct(key_heads), struct(key_heads), struct(8), jax.ShapeDtypeStruct((8,), jnp.float32)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):  # as the engine traces
        text = jax.jit(attend).trace(*given, *blocks).lower(lowering_platforms=("tpu",)).as_text()
    return client.compile(text).cost.temporary_bytes

print(json.dumps({name: step(*facts) for name, facts in json.loads(sys.argv[2]).items()}))
"""
ON_TPUS = {"grouped": (2048, True, 2), "odd length": (2047, False, 8)}


@pytest.mark.parametrize("target", ["v5e:2x2", pytest.param("v6e:2x2", marks=pytest.mark.full)])
def test_it_compiles_for_tpus_and_stores_no_scores(target: str) -> None:
    pytest.importorskip("libtpu")
    scores = 2 * 8 * 2048 * 2048 * 4
    for name, nbytes in compiled_for(target, COMPILE, ON_TPUS).items():
        assert nbytes < scores / 2, name
