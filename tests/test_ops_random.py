"""Random lowerings give repeatable numbers of the right distribution."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

from torchtpu.ops import random as _random  # noqa: F401  (registers the lowerings)
from torchtpu.ops.registry import LOWERINGS, Context, jax, jnp

N = 20000
FLOATS = ["float64", "float32", "bfloat16", "float16"]


@pytest.fixture(autouse=True)
def exact() -> Any:
    with jax.enable_x64(True):
        yield


def draw(
    name: str,
    *args: Any,
    seed: int = 1,
    offset: int = 0,
    checks: list[Any] | None = None,
    results: Any = (),
    **kwargs: Any,
) -> Any:
    entry = LOWERINGS[name]
    ctx = Context(name, "cpu", results)

    def traced(seed: Any, offset: Any) -> Any:
        extra = {"ctx": ctx} if entry.takes_context else {}
        out = entry.function(*args, generator=(seed, offset), **extra, **kwargs)
        return out, [ok for ok, _, _ in ctx.checks]

    out, ok = jax.jit(traced)(jnp.uint64(seed), jnp.int64(offset))
    if checks is not None:
        checks += [message for fine, (_, message, _) in zip(ok, ctx.checks, strict=True) if not fine]
    return out


def zeros(shape: Any = (N,), dtype: str = "float32") -> Any:
    return jnp.zeros(shape, dtype)


def full(value: float, dtype: str = "float32", shape: Any = (N,)) -> Any:
    return jnp.full(shape, value, dtype)


def moments(x: Any) -> tuple[float, float]:
    x = jnp.asarray(x, jnp.float64)
    return float(x.mean()), float(x.std())


def close(x: Any, mean: float, std: float) -> bool:
    got, spread = moments(x)
    return abs(got - mean) < 5 * std / math.sqrt(N) + 1e-6 and abs(spread - std) < 0.06 * std + 1e-6


def test_same_seed_and_offset_give_the_same_numbers_and_others_do_not() -> None:
    first = draw("uniform", zeros(), seed=3, offset=7)
    assert (first == draw("uniform", zeros(), seed=3, offset=7)).all()
    for seed, offset in ((3, 8), (4, 7), (7, 3), (3, 7 + (1 << 33))):
        other = draw("uniform", zeros(), seed=seed, offset=offset)
        assert (first == other).mean() < 0.01
        assert abs(float(jnp.corrcoef(first, other)[0, 1])) < 0.03


def test_numbers_follow_the_linear_index() -> None:
    flat = draw("normal_functional", zeros((6000,)))
    assert (flat == draw("normal_functional", zeros((60, 100))).reshape(-1)).all()
    assert (flat[:100] == draw("normal_functional", zeros((100,)))).all()


def test_bits_are_these_numbers_on_every_machine() -> None:
    drawn = draw("random", zeros((3,), "int64"), seed=42, offset=5)
    assert drawn.tolist() == [1255694852705987505, 2476500428436554534, 5992997551841814979]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 3.0), (5.0, 5.0), (0.25, 0.26)])
def test_uniform_stays_in_the_half_open_interval(dtype: str, low: float, high: float) -> None:
    x = draw("uniform", zeros(dtype=dtype), low, high)
    low, high = (float(jnp.asarray(v, dtype)) for v in (low, high))
    assert x.dtype == dtype
    assert ((x >= low) & ((x < high) | (low == high))).all()
    assert low == high or high - low < 0.1 or close(x, (low + high) / 2, (high - low) / math.sqrt(12))


@pytest.mark.parametrize("dtype", FLOATS)
def test_continuous_distributions_have_their_moments(dtype: str) -> None:
    assert close(draw("normal_functional", zeros(dtype=dtype), 2.0, 0.5), 2.0, 0.5)
    assert close(draw("exponential", zeros(dtype=dtype), 4.0), 0.25, 0.25)
    assert close(jnp.log(draw("log_normal", zeros(dtype=dtype), 0.1, 0.3)), 0.1, 0.3)
    cauchy = jnp.asarray(draw("cauchy", zeros(dtype=dtype), 1.0, 2.0), jnp.float32)
    assert abs(float(jnp.median(cauchy)) - 1) < 0.1
    assert abs(float(jnp.quantile(cauchy, 0.75)) - 3) < 0.2


def test_normal_has_normal_tails() -> None:
    x = draw("normal_functional", zeros((1000000,)))
    for bound in (1, 2, 3, 4):
        want = math.erfc(bound / math.sqrt(2))
        assert abs(float((abs(x) > bound).mean()) - want) < 5 * math.sqrt(want / 1e6)
    assert jnp.isfinite(x).all()


def test_complex_normal_has_variance_one() -> None:
    x = draw("normal_functional", zeros(dtype="complex64"))
    assert close(x.real, 0, math.sqrt(0.5))
    assert close(x.imag, 0, math.sqrt(0.5))


def test_normal_takes_tensors_of_parameters() -> None:
    mean, std = full(3.0, shape=(N, 1)), full(2.0, shape=(1,))
    assert close(draw("normal.Tensor_Tensor", mean, std), 3, 2)
    assert close(draw("normal.Tensor_float", mean, 2.0, results=((mean.shape, torch.float32),)), 3, 2)
    assert close(draw("normal.float_Tensor", 3.0, full(2.0)), 3, 2)
    checks: list[str] = []
    draw("normal.float_Tensor", 3.0, full(-2.0), checks=checks)
    assert checks == ["normal expects all elements of std >= 0.0"]


@pytest.mark.parametrize("dtype", ["int64", "int32", "int16", "uint8", "float32", "bfloat16"])
def test_random_covers_its_range(dtype: str) -> None:
    x = draw("random.from", zeros(dtype=dtype), 3, 10)
    assert sorted(set(x.tolist())) == list(range(3, 10))
    assert close(x, 6, 2)
    assert set(draw("random.to", zeros(dtype=dtype), 2).tolist()) == {0, 1}
    full_range = draw("random", zeros(dtype=dtype))
    top = float(jnp.iinfo(dtype).max) if "int" in dtype else 2.0 ** (jnp.finfo(dtype).nmant + 1)
    assert float(full_range.min()) >= 0
    assert top * 0.95 < float(full_range.max()) <= top


def test_random_from_the_least_integer_draws_all_64_bits() -> None:
    x = draw("random.from", zeros(dtype="int64"), -(1 << 63), None)
    assert abs(float((x < 0).mean()) - 0.5) < 0.02
    wide = draw("random.from", zeros(dtype="int64"), -(1 << 62), 1 << 62)
    assert abs(float((wide < 0).mean()) - 0.5) < 0.02
    assert (abs(wide) <= 1 << 62).all()


@pytest.mark.parametrize(
    ("low", "to"),
    [(0, 10), (-7, 65529), (-7, 65530), (5, 1 << 40), (-(1 << 63), (1 << 63) - 1), (-(1 << 63), None), (0, None)],
)
def test_bounds_that_are_inputs_of_the_program_draw_what_literal_ones_draw(low: int, to: int | None) -> None:
    entry, x = LOWERINGS["random.from"], zeros(dtype="int64")

    def drawn(low: Any, to: Any) -> Any:
        seed = jnp.uint64(7), jnp.int64(4)
        return entry.function(x, low, to, generator=seed, ctx=Context("random.from", "cpu", ()))

    literal = jax.jit(lambda: drawn(low, to))()
    given = jax.jit(lambda low: drawn(low, to))(jnp.int64(low)) if to is None else jax.jit(drawn)(low, to)
    assert jnp.array_equal(literal, given)


def test_bernoulli_and_geometric_have_their_means() -> None:
    assert close(draw("bernoulli", full(0.3)), 0.3, math.sqrt(0.21))
    assert close(draw("bernoulli.p", zeros(), 0.3), 0.3, math.sqrt(0.21))
    assert close(draw("bernoulli_.float", zeros(dtype="int64"), 0.3), 0.3, math.sqrt(0.21))
    assert close(draw("bernoulli.Tensor", zeros(dtype="int64"), full(0.3, "float64")), 0.3, math.sqrt(0.21))
    assert draw("bernoulli.p", zeros(), 1.0).all()
    assert not draw("bernoulli.p", zeros(), 0.0).any()
    assert close(draw("geometric", zeros(), 0.25), 4, math.sqrt(0.75) / 0.25)
    assert (draw("geometric", zeros(dtype="int64"), 1.0) == 1).all()
    checks: list[str] = []
    draw("bernoulli", full(1.5), checks=checks)
    assert len(checks) == 1


@pytest.mark.parametrize("dtype", FLOATS)
def test_dropout_scales_what_it_keeps(dtype: str) -> None:
    x = full(3.0, dtype)
    out, mask = draw("native_dropout", x, 0.25, True)
    assert close(mask, 0.75, math.sqrt(0.75 * 0.25))
    assert ((out == 0) == ~mask).all()
    assert jnp.allclose(jnp.asarray(out[mask], jnp.float32), 4.0, rtol=1e-2)
    out, mask = draw("native_dropout", x, 1.0, True)
    assert not out.any()
    assert not mask.any()
    out, mask = draw("native_dropout", x, 0.5, False)
    assert (out == x).all()
    assert mask.all()


def test_randperm_is_a_uniform_permutation() -> None:
    assert sorted(draw("randperm.generator", 500).tolist()) == list(range(500))
    x = draw("randperm.generator", N)
    assert abs(float(jnp.corrcoef(x, jnp.arange(N))[0, 1])) < 5 / math.sqrt(N)
    assert abs(int((x == jnp.arange(N)).sum()) - 1) < 8
    assert draw("randperm.generator", 0).shape == (0,)


def test_multinomial_follows_the_weights() -> None:
    weights = jnp.asarray([[0.0, 1.0, 3.0, 0.0], [2.0, 0.0, 0.0, 2.0]])
    x = draw("multinomial", weights, N, True)
    assert x.shape == (2, N)
    assert set(x[0].tolist()) == {1, 2}
    assert set(x[1].tolist()) == {0, 3}
    assert abs(float((x[0] == 2).mean()) - 0.75) < 0.02
    single = draw("multinomial", jnp.tile(weights[0], (N, 1)), 1)
    assert abs(float((single == 2).mean()) - 0.75) < 0.02
    pairs = draw("multinomial", jnp.tile(weights[0], (100, 1)), 2)
    assert (jnp.sort(pairs, -1) == jnp.asarray([1, 2])).all()
    for bad in ([-1.0, 2.0], [math.nan, 1.0], [math.inf, 1.0], [0.0, 0.0]):
        checks: list[str] = []
        draw("multinomial", jnp.asarray(bad), 1, checks=checks)
        assert checks


def test_counting_distributions_have_their_moments() -> None:
    for rate in (0.5, 40.0):
        assert close(draw("poisson", full(rate)), rate, math.sqrt(rate))
    assert (draw("poisson", full(0.0)) == 0).all()
    assert close(draw("binomial", full(20.0), full(0.3)), 6, math.sqrt(4.2))


def test_gamma_and_dirichlet_have_their_moments() -> None:
    for alpha in (0.3, 4.0):
        assert close(draw("_standard_gamma", full(alpha)), alpha, math.sqrt(alpha))
    x = draw("_sample_dirichlet", jnp.tile(jnp.asarray([1.0, 2.0, 5.0]), (N, 1)))
    assert jnp.allclose(x.sum(-1), 1, atol=1e-5)
    assert jnp.allclose(x.mean(0), jnp.asarray([1 / 8, 2 / 8, 5 / 8]), atol=0.01)
    assert jnp.isfinite(draw("_sample_dirichlet", full(1e-4, shape=(10, 3)))).all()


def test_gamma_gradient_is_pytorchs() -> None:
    alpha = torch.tensor([0.05, 0.5, 1.0, 3.0, 9.0, 50.0], dtype=torch.float64).repeat_interleave(4)
    sample = alpha * torch.tensor([0.3, 0.9, 1.1, 2.0], dtype=torch.float64).repeat(6)
    want = torch._standard_gamma_grad(alpha, sample)
    got = LOWERINGS["_standard_gamma_grad"].function(jnp.asarray(alpha.numpy()), jnp.asarray(sample.numpy()))
    assert torch.allclose(torch.from_numpy(jax.device_get(got).copy()), want, rtol=2e-3)


def test_rrelu_draws_slopes_for_the_negative_side() -> None:
    x = jnp.where(jnp.arange(N) % 2 == 0, -2.0, 1.5).astype(jnp.float32)
    out, noise = draw("rrelu_with_noise", x, jnp.zeros_like(x), 0.1, 0.3, True)
    assert (noise[1::2] == 1).all()
    assert (out[1::2] == 1.5).all()
    assert ((noise[::2] >= 0.1) & (noise[::2] < 0.3)).all()
    assert jnp.allclose(out[::2], -2 * noise[::2])
    out, _ = draw("rrelu_with_noise", x, jnp.zeros_like(x), 0.1, 0.3, False)
    assert jnp.allclose(out[::2], -0.4)


def test_dirichlet_gradient_is_pytorchs_or_better() -> None:
    for alpha, beta in ((0.05, 0.3), (0.5, 0.5), (1.0, 1.0), (2.0, 5.0), (30.0, 40.0), (0.1, 50.0), (1000.0, 1000.0)):
        a, total = torch.full((8,), alpha, dtype=torch.float64), torch.full((8,), alpha + beta, dtype=torch.float64)
        x = torch.distributions.Beta(a, total - a).sample().clamp(1e-6, 1 - 1e-6)
        got = LOWERINGS["_dirichlet_grad"].function(jnp.asarray(x), jnp.asarray(a), jnp.asarray(total))
        want = torch._dirichlet_grad(x, a, total)  # itself good to 2e-3
        torch.testing.assert_close(torch.from_numpy(jax.device_get(got).copy()), want, rtol=4e-3, atol=1e-9)


def test_complex_uniform_numbers_fill_a_square() -> None:
    drawn = draw("uniform", zeros(dtype="complex64"), 2.0, 3.0)
    for part in (drawn.real, drawn.imag):
        assert 2 <= part.min() < 2.01
        assert 2.99 < part.max() < 3
    assert abs(float(jnp.corrcoef(drawn.real, drawn.imag)[0, 1])) < 0.03


def test_draws_into_a_dtype_that_has_none_are_refused_at_the_call() -> None:
    for name, dtype in (("uniform_", torch.int32), ("random_", torch.complex64), ("bernoulli_", torch.complex64)):
        with pytest.raises(NotImplementedError, match="not implemented for"):
            getattr(torch.zeros(3, dtype=dtype, device="tpu"), name)()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, ok: x.uniform_(0.5, 0.75 if ok else 0.25),
        lambda x, ok: x.normal_(0.0, 0.5 if ok else -0.5),
        lambda x, ok: x.exponential_(1.5 if ok else -1.5),
        lambda x, ok: x.geometric_(0.25 if ok else 1.25),
        lambda x, ok: x.bernoulli_(0.25 if ok else 1.25),
        lambda x, ok: x.random_(2, 5 if ok else 2),
        lambda x, ok: [x.long().random_(to) for to in (3, 4, 5 if ok else -2)][-1],
    ],
)
@pytest.mark.parametrize("visits", [0, 2])
def test_a_draw_refuses_what_the_cpu_refuses_on_the_first_visit_and_on_later_ones(call: Any, visits: int) -> None:
    for _ in range(visits):
        call(torch.ones(3, device="tpu"), True).cpu()
    with pytest.raises(RuntimeError, match="expects"):
        call(torch.ones(3, device="tpu"), False).cpu()


@pytest.mark.parametrize("shape", [(3,), (2, 3), (3, 1), (0,), (4,)])
@pytest.mark.parametrize("mean", [(3,), (2, 3), ()])
def test_normal_numbers_are_drawn_into_outputs_as_on_the_cpu(mean: tuple[int, ...], shape: tuple[int, ...]) -> None:
    calls: dict[str, Any] = {
        "mean": lambda x, out: torch.normal(x, 0.0, out=out),
        "deviation": lambda x, out: torch.normal(2.0, x - x, out=out),
        "both": lambda x, out: torch.normal(x, (x - x)[..., None], out=out),
    }

    def made(name: str, device: str) -> list[Any]:
        x, out = torch.ones(mean, device=device).cumsum(-1), torch.full(shape, 7.0, device=device)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                returned = calls[name](x, out)
                found = [returned is out, out.stride(), out.shape, out.tolist()]
            except RuntimeError as error:
                found = [str(error).partition(" (aten")[0]]
        return [*found, [str(each.message).partition(". This")[0] for each in caught]]

    for name in calls:
        assert made(name, "tpu") == made(name, "cpu"), name


def test_normal_numbers_are_refused_by_outputs_that_do_not_hold_them() -> None:
    for x, out in ((torch.ones(3), torch.ones(3).long()), (torch.ones(3).cfloat(), torch.ones(3))):
        texts = []
        for device in ("cpu", "tpu"):
            with pytest.raises((RuntimeError, NotImplementedError)) as raised:
                torch.normal(x.to(device), 1.0, out=out.to(device))
            texts.append(str(raised.value))
        assert texts[0] == texts[1]


def test_beta_numbers_have_a_finite_probability() -> None:
    beta = torch.distributions.Beta(torch.tensor(0.1, device="tpu"), torch.tensor(0.1, device="tpu"))
    drawn = beta.sample((20_000,))
    assert drawn.min().item() > 0.0
    assert drawn.max().item() < 1.0
    assert beta.log_prob(drawn).isfinite().all().item()


def test_a_count_is_drawn_for_each_of_more_probabilities() -> None:
    torch.manual_seed(0)
    drawn = torch.binomial(torch.full((3,), 10.0, device="tpu"), torch.rand(400, 3).to("tpu").round())
    assert drawn.shape == (400, 3)
    assert set(drawn.unique().tolist()) == {0.0, 10.0}


@pytest.mark.parametrize("on", ["cpu", "tpu"])
def test_dropout_hides_no_number_that_is_none(on: str) -> None:
    """What is dropped is multiplied by 0, as on the CPU and CUDA."""
    numbers = torch.tensor([float("nan")] * 8 + [float("inf")] * 8 + [-1.0] * 8).to(on)
    dropped = torch.nn.functional.dropout(numbers, 0.5).cpu()
    assert dropped[:8].isnan().all()
    assert not dropped[8:16].isfinite().any()
    assert dropped[16:].signbit().all()
