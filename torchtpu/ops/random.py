"""Random numbers that depend on a generator's (seed, offset) and a shape, and on nothing else.

A draw is keyed by a hash of its seed and its offset, so two draws of one seed are independent whatever their sizes
and however the ops around them were cut; the recorder adds at least 1 to the offset for each op.  XLA's ThreeFry is a
counter generator like Philox and gives the same bits on every platform, but is 14 times faster on CPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from torchtpu.ops.registry import jax, jax_dtype, jnp, lax, like, lowering, opmath, torch_dtype

_GOLDEN = 0x9E3779B97F4A7C15


def bits(generator: Any, shape: tuple[int, ...], width: int = 32) -> Any:
    """Uniform unsigned integers of `width` (32 or 64) bits."""
    state = jnp.stack([_key(generator), jnp.zeros((), jnp.uint64)])
    dtype = jnp.uint64 if width == 64 else jnp.uint32
    # One flat draw: the numbers follow their linear index, not the shape.
    _, drawn = lax.rng_bit_generator(state, (math.prod(shape),), dtype, algorithm=lax.RandomAlgorithm.RNG_THREE_FRY)
    return drawn.reshape(shape)


def uniform(generator: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Uniform in [0, 1) with all the mantissa bits of the real floating `dtype` (a jax dtype)."""
    digits, drawn = _mantissa(generator, shape, dtype)
    return drawn.astype(dtype) * jnp.asarray(2.0**-digits, dtype)


def open_uniform(generator: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Uniform in (0, 1), symmetric around a half, in `dtype` or float32 if that is wider."""
    dtype = jnp.promote_types(dtype, jnp.float32)
    digits, drawn = _mantissa(generator, shape, dtype)
    return ((drawn >> 1).astype(dtype) + 0.5) * jnp.asarray(2.0 ** (1 - digits), dtype)


def normal(generator: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Standard normal numbers in `dtype` (complex: variance 1 in all), or float32 if that is wider."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = normal(generator, (2, *shape), jnp.finfo(dtype).dtype) * math.sqrt(0.5)
        return lax.complex(parts[0], parts[1])
    centred = open_uniform(generator, shape, dtype) * 2 - 1
    return lax.erf_inv(centred) * jnp.asarray(math.sqrt(2), centred.dtype)


def exponential(generator: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Exponential numbers of rate 1, never 0, in `dtype` or float32 if that is wider."""
    return -jnp.log(open_uniform(generator, shape, dtype))


def jax_key(generator: Any) -> Any:
    """The key of this draw for the samplers of `jax.random`."""
    words = lax.bitcast_convert_type(_key(generator), jnp.uint32)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _key(generator: Any) -> Any:
    seed, offset = (jnp.asarray(word).astype(jnp.uint64) for word in generator)
    return _mix(_mix(seed) + offset * jnp.uint64(_GOLDEN))


def _mix(word: Any) -> Any:
    # SplitMix64's finalizer: a bijection, so the keys of one seed never collide.
    word = (word ^ (word >> 30)) * jnp.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> 27)) * jnp.uint64(0x94D049BB133111EB)
    return word ^ (word >> 31)


def _mantissa(generator: Any, shape: tuple[int, ...], dtype: Any) -> tuple[int, Any]:
    digits = jnp.finfo(dtype).nmant + 1
    width = 64 if digits > 32 else 32
    return digits, bits(generator, shape, width) >> (width - digits)


def _real(dtype: Any) -> Any:
    """The dtype to sample in for a tensor of `dtype`."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else jnp.dtype(jnp.float64)


def _scaled(x: Any, factor: Any, shift: Any) -> Any:
    return x * jnp.asarray(factor, x.dtype) + jnp.asarray(shift, x.dtype)


def _of(*kinds: str) -> Any:
    """Shape inference for draws into a tensor; raises where its dtype is none of "real", "complex" and "integer"."""

    def infer(self: torch.Tensor, *_: Any) -> torch.Tensor:
        kind = "real" if self.is_floating_point() else "complex" if self.is_complex() else "integer"
        if kind not in kinds:
            raise NotImplementedError(f"no random numbers of {self.dtype}")
        return like(self)

    return infer


def _require(ctx: Any, ok: Any, message: str) -> None:
    """Checks numbers that are inputs of the program; shape inference has seen the literal ones and the first of these.

    `ok` is False or True where all the numbers that it depends on are literal.
    """
    if not isinstance(ok, bool):
        ctx.check(ok, message, RuntimeError)


def _infer_uniform(self: torch.Tensor, low: float = 0.0, high: float = 1.0, *_: Any) -> torch.Tensor:
    made: torch.Tensor = _of("real", "complex")(self)
    if not 0 <= high - low <= torch.finfo(self.dtype).max:
        raise RuntimeError(f"uniform_ expects to return a [from, to) range, but found from={low} > to={high}")
    return made


@lowering("uniform", lifts=True, infer=_infer_uniform)
def uniform_op(self, low=0.0, high=1.0, *, generator, ctx):
    _require(ctx, low <= high, "uniform_ expects to return a [from, to) range, but found from > to")
    if jnp.iscomplexobj(self):
        parts = _uniform(jnp.stack([self.real, self.imag], -1), low, high, generator)
        return lax.complex(parts[..., 0], parts[..., 1])
    return _uniform(self, low, high, generator)


def _uniform(self: Any, low: Any, high: Any, generator: Any) -> Any:
    drawn = opmath(uniform(generator, self.shape, self.dtype))
    low, high = (jnp.asarray(v, self.dtype) for v in (low, high))
    inside = (drawn * (high - low).astype(drawn.dtype) + low.astype(drawn.dtype)).astype(self.dtype)
    # Rounding may reach `to`, which the interval excludes.
    return jnp.minimum(inside, lax.nextafter(high, low))


def _infer_normal(self: torch.Tensor, mean: float = 0.0, std: float = 1.0, *rest: Any) -> torch.Tensor:
    if std < 0 or not (self.is_floating_point() or self.is_complex()):
        raise RuntimeError("normal expects std >= 0.0")
    return self


@lowering("normal_functional", lifts=True)
@lowering("normal_", lifts=True, infer=_infer_normal)
def normal_op(self, mean=0.0, std=1.0, *, generator, ctx):
    _require(ctx, std >= 0, "normal expects std >= 0.0")
    return _scaled(normal(generator, self.shape, self.dtype), std, mean)


@lowering("normal.Tensor_float", lifts=True)
def normal_mean(mean, std=1.0, *, generator, ctx):
    _require(ctx, std >= 0, "normal expects std >= 0.0")
    shape = ctx.results[0][0]  # that of an out= argument, which may be larger
    return normal(generator, shape, mean.dtype) * std + mean


@lowering("normal.float_Tensor", lifts=True)
def normal_std(mean, std, *, generator, ctx):
    return normal_mean_std(jnp.asarray(mean, std.dtype), std, generator=generator, ctx=ctx)


def _infer_normal_mean_std(mean: torch.Tensor, std: torch.Tensor, *rest: Any) -> torch.Tensor:
    if std.is_complex():
        raise RuntimeError("normal expects standard deviation to be non-complex")
    return torch.ops.aten.normal.Tensor_Tensor(mean, std)


@lowering("normal.Tensor_Tensor", infer=_infer_normal_mean_std)
def normal_mean_std(mean, std, *, generator, ctx):
    ctx.check(std >= 0, "normal expects all elements of std >= 0.0", RuntimeError)
    shape = jnp.broadcast_shapes(mean.shape, std.shape)
    return normal(generator, shape, mean.dtype) * std + mean


@lowering("log_normal", lifts=True)
def log_normal(self, mean=1.0, std=2.0, *, generator, ctx):
    _require(ctx, std > 0, "log_normal_ expects std > 0.0")
    return jnp.exp(_scaled(normal(generator, self.shape, self.dtype), std, mean))


@lowering("exponential", lifts=True)
def exponential_op(self, lambd=1.0, *, generator, ctx):
    _require(ctx, lambd > 0, "exponential_ expects lambda > 0.0")
    drawn = exponential(generator, self.shape, _real(self.dtype))
    return drawn / jnp.asarray(lambd, drawn.dtype)


@lowering("cauchy", lifts=True)
def cauchy(self, median=0.0, sigma=1.0, *, generator, ctx):
    _require(ctx, sigma > 0, "cauchy_ expects sigma > 0.0")
    angle = (open_uniform(generator, self.shape, self.dtype) - 0.5) * math.pi
    return _scaled(jnp.tan(angle), sigma, median)


@lowering("geometric", lifts=True)
def geometric(self, p, *, generator, ctx):
    _require(ctx, (p > 0) & (p < 1), "geometric_ expects p to be in (0, 1)")
    drawn = open_uniform(generator, self.shape, _real(self.dtype))
    return jnp.maximum(jnp.ceil(jnp.log(drawn) / jnp.log1p(-jnp.asarray(p, drawn.dtype))), 1)


def _integers(generator: Any, shape: tuple[int, ...], low: Any, end: Any) -> Any:
    """Integers in [low, end): remainders, like PyTorch's, so that small ones are likelier by span / 2**64. The bounds
    may be inputs of the program, which draws the same."""
    if not (isinstance(low, int) and isinstance(end, int)):
        return _integers_between(generator, shape, low, _modulo_2_64(end) - _modulo_2_64(low))
    span = end - low
    if span == 1 << 64:
        return lax.bitcast_convert_type(bits(generator, shape, 64), jnp.int64)
    if span < 1 << 16:
        return (bits(generator, shape) % jnp.uint32(span)).astype(jnp.int64) + low
    return lax.bitcast_convert_type(bits(generator, shape, 64) % jnp.uint64(span), jnp.int64) + low


def _integers_between(generator: Any, shape: tuple[int, ...], low: Any, span: Any) -> Any:
    """The same where the span is an input, in which 2**64 is 0."""

    def few() -> Any:
        return (bits(generator, shape) % span.astype(jnp.uint32)).astype(jnp.int64)

    def many() -> Any:
        drawn = bits(generator, shape, 64)
        return lax.bitcast_convert_type(jnp.where(span == 0, drawn, drawn % jnp.maximum(span, 1)), jnp.int64)

    return lax.cond((span > 0) & (span < 1 << 16), few, many) + jnp.where(span == 0, 0, low)


def _modulo_2_64(value: Any) -> Any:
    return jnp.uint64(value % (1 << 64)) if isinstance(value, int) else jnp.asarray(value).astype(jnp.uint64)


def _largest(dtype: Any) -> int:
    """The largest integer `random_` draws into a dtype: for floats the last one before integers have gaps."""
    if dtype == jnp.bool_:
        return 1
    if jnp.issubdtype(dtype, jnp.floating):
        return 1 << (jnp.finfo(dtype).nmant + 1)
    return int(jnp.iinfo(dtype).max)


@lowering("random", infer=_of("real", "integer"))
def random(self, *, generator):
    return _integers(generator, self.shape, 0, _largest(self.dtype) + 1)


def _infer_random_to(self: torch.Tensor, to: int, *_: Any) -> torch.Tensor:
    return _infer_random_from(self, 0, to)


def _infer_random_from(self: torch.Tensor, low: int, to: int | None, *_: Any) -> torch.Tensor:
    torch.empty(0, dtype=self.dtype).random_(low, to)  # raises PyTorch's error where these are no bounds of the dtype
    made: torch.Tensor = _of("real", "integer")(self)
    return made


@lowering("random.to", ints=("to",), infer=_infer_random_to)
def random_to(self, to, *, generator, ctx):
    _require_bounds(ctx, self.dtype, 0, to)
    return _integers(generator, self.shape, 0, to)


@lowering("random.from", ints=("from", "to"), infer=_infer_random_from)
def random_from(self, low, to, *, generator, ctx):
    _require_bounds(ctx, self.dtype, low, to)
    return _integers(generator, self.shape, low, _largest(self.dtype) + 1 if to is None else to)


def _require_bounds(ctx: Any, dtype: Any, low: Any, to: Any) -> None:
    if to is not None:
        _require(ctx, low < to, "random_ expects 'from' to be less than 'to'")
    if not jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 8:
        least = 0 if dtype == jnp.bool_ else int(jnp.iinfo(dtype).min)
        _require(ctx, low >= least, f"from is out of bounds for {dtype}")
        if to is not None:
            _require(ctx, to - 1 <= _largest(dtype), f"to - 1 is out of bounds for {dtype}")


# Behind these, integers have gaps; PyTorch does not look at bfloat16.
_MOST_PLACES = {
    torch.float16: (2**11 + 1, "Half"),
    torch.float32: (2**24 + 1, "Float"),
    torch.float64: (2**53 + 1, "Double"),
}


def _infer_randperm(n: int, _generator: Any, given: torch.Tensor | torch.dtype | None, *_: Any) -> torch.Tensor:
    dtype = (given.dtype if isinstance(given, torch.Tensor) else given) or torch.int64
    most, name = _MOST_PLACES.get(dtype, (n, ""))
    if n > most:
        raise RuntimeError(f"n cannot be greater than {most} for {name} type.")
    if not dtype.is_floating_point and n - 1 > torch.iinfo(dtype).max:
        raise RuntimeError(f"value cannot be converted to type {dtype} without overflow")
    return given.resize_(n) if isinstance(given, torch.Tensor) else torch.empty(n, dtype=dtype, device="meta")


@lowering("randperm.generator", "randperm.generator_out", infer=_infer_randperm)
def randperm(n, *, generator, **_):
    # A third key keeps equal draws in order; with 64 random bits they do not occur.
    high, low = bits(generator, (2, n))
    return lax.sort((high, low, jnp.arange(n, dtype=jnp.int64)), num_keys=2)[2]


def _below(generator: Any, shape: tuple[int, ...], p: Any) -> Any:
    """True with probability `p`."""
    p = jnp.asarray(p)
    drawn = uniform(generator, shape, jnp.float64 if p.dtype == jnp.float64 and p.ndim else jnp.float32)
    return drawn < p.astype(drawn.dtype)


@lowering("bernoulli")
def bernoulli(self, *, generator, ctx):
    return _bernoulli(self.shape, self, generator, ctx)


@lowering("bernoulli.Tensor")
def bernoulli_tensor(self, p, *, generator, ctx):
    return _bernoulli(self.shape, p, generator, ctx)


def _infer_bernoulli(self: torch.Tensor, p: float = 0.5, *_: Any) -> torch.Tensor:
    if not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    made: torch.Tensor = _of("real", "integer")(self)
    return made


@lowering("bernoulli.p", "bernoulli_.float", lifts=True, infer=_infer_bernoulli)
def bernoulli_p(self, p=0.5, *, generator, ctx):
    _require(ctx, (p >= 0) & (p <= 1), "bernoulli_ expects p to be in [0, 1]")
    return _below(generator, self.shape, p)


def _bernoulli(shape: tuple[int, ...], p: Any, generator: Any, ctx: Any) -> Any:
    ctx.check((p >= 0) & (p <= 1), "Expected p_in >= 0 && p_in <= 1 to be true, but got false.", RuntimeError)
    return _below(generator, shape, p)


def _infer_dropout(input: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    if not 0 <= p <= 1 or not (input.is_floating_point() or input.is_complex()):
        raise RuntimeError(f"dropout of {input.dtype} with probability {p}")
    return like(input), like(input, dtype=torch.bool)


@lowering("native_dropout", structural={"p": (0.0, 1.0)}, lifts=True, random=True, infer=_infer_dropout)
def native_dropout(input, p, train, *, generator):
    if train is False:
        return input, jnp.ones(input.shape, jnp.bool_)
    keep = 1.0 - p
    mask = _below(generator, input.shape, keep)
    if isinstance(p, float) and p == 1.0:
        return jnp.zeros_like(input), mask
    kept = opmath(input)
    scaled = kept * jnp.asarray(1.0 / keep, kept.dtype)
    return jnp.where(mask, scaled, scaled * jnp.zeros_like(kept)), mask  # NaN and infinity stay, or become NaN


@lowering("native_dropout_backward", lifts=True, elementwise=True)
def native_dropout_backward(grad_output, mask, scale):
    grad = opmath(grad_output)
    grad = grad if jnp.issubdtype(grad.dtype, jnp.inexact) else grad.astype(jnp.float32)
    return grad * (mask.astype(grad.dtype) * jnp.asarray(scale, grad.dtype))


@lowering("rrelu_with_noise", "rrelu_with_noise_", infer=_of("real"))
def rrelu_with_noise(self, noise, lower=0.125, upper=1 / 3, training=False, generator=None):
    x = opmath(self)
    if not training:
        return jnp.where(x > 0, x, x * jnp.asarray((lower + upper) / 2, x.dtype)), noise
    slope = _scaled(uniform(generator, self.shape, x.dtype), upper - lower, lower)
    slope = jnp.where(x <= 0, slope, jnp.ones_like(slope))
    return x * slope, slope


def _infer_rrelu_backward(
    grad_output: torch.Tensor, self: torch.Tensor, noise: torch.Tensor, lower: float, upper: float, training: bool,
    self_is_result: bool,
) -> torch.Tensor:  # fmt: skip
    if self_is_result and lower + upper < 0 and not (training and upper - lower > 1e-6):
        empty = torch.empty(0, device="cpu")  # whose kernel refuses such slopes, as the meta kernel does not
        torch.ops.aten.leaky_relu_backward(empty, empty, (lower + upper) / 2, self_is_result)
    return torch.ops.aten.rrelu_with_noise_backward(grad_output, self, noise, lower, upper, training, self_is_result)


@lowering("rrelu_with_noise_backward", structural={"lower": None, "upper": None}, infer=_infer_rrelu_backward)
def rrelu_with_noise_backward(grad_output, self, noise, lower, upper, training, self_is_result):
    grad = opmath(grad_output)
    if training and upper - lower > 1e-6:
        return grad * noise
    return jnp.where(self > 0, grad, grad * jnp.asarray((lower + upper) / 2, grad.dtype))


def _infer_multinomial(self: torch.Tensor, num_samples: int, replacement: bool = False, *_: Any) -> torch.Tensor:
    if not self.is_floating_point():
        raise RuntimeError(f"multinomial only supports floating-point dtypes for input, got: {self.dtype}")
    if num_samples <= 0:
        raise RuntimeError("cannot sample n_sample <= 0 samples")
    if not replacement and self.ndim and num_samples > self.size(-1):
        raise RuntimeError("cannot sample n_sample > prob_dist.size(-1) samples without replacement")
    return torch.ops.aten.multinomial(self, num_samples, replacement)


@lowering("multinomial", infer=_infer_multinomial)
def multinomial(self, num_samples, replacement=False, *, generator, ctx):
    p = opmath(self)
    valid = (p >= 0) & (p < jnp.inf)
    ctx.check(valid, "probability tensor contains either `inf`, `nan` or element < 0", RuntimeError)
    total = p.sum(-1)
    ctx.check(total > 0, "invalid multinomial distribution (sum of probabilities <= 0)", RuntimeError)
    if not replacement or num_samples == 1:
        race = p / exponential(generator, p.shape, p.dtype)
        return lax.top_k(race, num_samples)[1].astype(jnp.int64)
    flat = p.reshape(-1, p.shape[-1])
    drawn = uniform(generator, (flat.shape[0], num_samples), flat.dtype)
    cdf = jnp.cumsum(flat, -1)
    found = jax.vmap(lambda c, u: jnp.searchsorted(c, u * c[-1], side="right"))(cdf, drawn)
    # u * total may round up to the total: the answer is then the last category of positive probability.
    last = p.shape[-1] - 1 - jnp.argmax(flat[:, ::-1] > 0, -1)
    return jnp.minimum(found, last[:, None]).astype(jnp.int64).reshape(*p.shape[:-1], num_samples)


@lowering("poisson", infer=_of("real"))
def poisson(self, generator=None, *, ctx):
    ctx.check(self >= 0, "invalid Poisson rate, expected rate to be non-negative", RuntimeError)
    return jax.random.poisson(jax_key(generator), opmath(self), self.shape, jnp.int64)


def _like_first(first: torch.Tensor, *_: Any) -> torch.Tensor:
    return like(first)


def _infer_binomial(count: torch.Tensor, prob: torch.Tensor, generator: Any = None) -> torch.Tensor:
    if count.dtype != prob.dtype:
        raise NotImplementedError("binomial of two dtypes")  # the CPU's kernel says it best
    return count.new_empty(torch.broadcast_shapes(count.shape, prob.shape))


@lowering("binomial", infer=_infer_binomial)
def binomial(count, prob, generator=None):
    dtype = jax_dtype(torch.promote_types(torch_dtype(_real(count.dtype)), torch_dtype(_real(prob.dtype))))
    shape = jnp.broadcast_shapes(count.shape, prob.shape)
    return jax.random.binomial(jax_key(generator), count.astype(dtype), prob.astype(dtype), shape, dtype)


@lowering("_standard_gamma", infer=_of("real"))
def standard_gamma(self, generator=None):
    return _gamma(generator, self)


@lowering("_sample_dirichlet", infer=_like_first)
def sample_dirichlet(self, generator=None):
    # In logarithms: for small concentrations every gamma number of a row may underflow.
    logs = jax.random.loggamma(jax_key(generator), opmath(self), self.shape, opmath(self).dtype)
    limits = jnp.finfo(self.dtype)
    return jnp.clip(jax.nn.softmax(logs, -1), limits.tiny, 1 - limits.epsneg)  # of these logarithms are finite


def _gamma(generator: Any, alpha: Any) -> Any:
    alpha = opmath(alpha)
    drawn = jax.random.gamma(jax_key(generator), alpha, alpha.shape, alpha.dtype)
    return jnp.maximum(drawn, jnp.finfo(alpha.dtype).tiny)


@lowering("_standard_gamma_grad", infer=_like_first)
def standard_gamma_grad(self, output):
    return lax.random_gamma_grad(opmath(self), opmath(output))


@lowering("_dirichlet_grad", infer=_like_first)
def dirichlet_grad(x, alpha, total):
    # -dF/da / (f (1 - x)) for the distribution function F and the density f of Beta(a, b): the integral of
    # (log t - c) f(t) from 0 to x, or from x to 1, over whichever side does not hold the peak.
    x, alpha, total = (jnp.asarray(v, jnp.float64) for v in (x, alpha, total))
    beta = total - alpha
    c = lax.digamma(alpha) - lax.digamma(total)

    def add(index: Any, sums: tuple[Any, Any]) -> tuple[Any, Any]:
        t = index * 0.125 - 4.5  # a double exponential rule on the half line
        v = jnp.exp(t - jnp.exp(-t))
        weight = v * (1 + jnp.exp(-t)) * 0.125
        left = (jnp.log(x) - v / alpha - c) * jnp.exp(
            (beta - 1) * (jnp.log1p(-x * jnp.exp(-v / alpha)) - jnp.log1p(-x)) - v
        )
        log_right = jnp.log1p((x - 1) * jnp.exp(-v / beta))
        right = (log_right - c) * jnp.exp((alpha - 1) * (log_right - jnp.log(x)) - v)
        return sums[0] + weight * left, sums[1] + weight * right

    left, right = lax.fori_loop(0, 112, add, (jnp.zeros_like(x), jnp.zeros_like(x)))
    return jnp.where(x * total < alpha, -left * x / (alpha * (1 - x)), right / beta)
