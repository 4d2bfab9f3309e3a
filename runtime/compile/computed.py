"""How many elements ops compute, where that is not about as many as they make: what a launch of the first tier of
platform cpu loses goes with it.

The lowerings there unroll windows, copy patches of small images, and search all of a row for one element. The factors
are measured by `benchmarks/compile_price.py ops`; `argmin`, `kthvalue` and others that work alike have those of their
like.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torchtpu.runtime.ir.calls import results_of
from torchtpu.runtime.ir.program import Lifted, Op, Operand, Symbolic

_SMALL_IMAGE = 64  # pixels of what is convolved as copied patches


def made(op: Op) -> int:
    """The elements of what an op makes."""
    return sum(math.prod(result.sizes) for result in results_of(op))


def computed(op: Op) -> float:
    """The elements that it computes on its way."""
    count = _COUNTS.get(op.name)
    return made(op) if count is None or _has_changing(op.args) else max(made(op), count(op, *op.args))


def _has_changing(arguments: tuple[Any, ...]) -> bool:
    """Whether an int among them is not known."""
    return any(
        _has_changing(each) if isinstance(each, tuple) else isinstance(each, (Symbolic, Lifted)) for each in arguments
    )


def _size(argument: Any) -> int:
    return math.prod(argument.sizes) if isinstance(argument, Operand) else 0


def _of_input(times: float) -> Callable[..., float]:
    return lambda op, given, *rest: times * _size(given)


def _of_result(times: float) -> Callable[..., float]:
    return lambda op, *rest: times * made(op)


def _is_depthwise(weight: Any, groups: int) -> bool:
    return groups > 1 and weight.sizes[1] == 1


def _unless_flat(count: Callable[..., float], tensors: int) -> Callable[..., float]:
    """A count that asks for dimensions of so many tensors: those of padded ops may be runs of an array."""

    def counted(op: Op, *args: Any) -> float:
        is_flat = any(isinstance(given, Operand) and len(given.sizes) == 1 for given in args[:tensors])
        return made(op) if is_flat else count(op, *args)

    return counted


def _convolved(op: Op, given: Any, weight: Any, *rest: Any) -> float:
    taps, results = math.prod(weight.sizes[2:]), results_of(op)
    space = math.prod(results[0].sizes[2:])
    if _is_depthwise(weight, rest[-1]):
        return float(taps * made(op))
    if taps > 1 and space <= _SMALL_IMAGE:
        return 3.0 * taps * given.sizes[0] * given.sizes[1] * space
    return 15.0 * made(op) if len(weight.sizes) == 5 and taps > 1 else made(op)


def _convolved_back(op: Op, grad: Any, given: Any, weight: Any, *rest: Any) -> float:
    taps = math.prod(weight.sizes[2:])
    if _is_depthwise(weight, rest[-2]):
        return 4.0 * taps * _size(given)
    return 5.0 * made(op) if taps > 1 and math.prod(grad.sizes[2:]) <= _SMALL_IMAGE else made(op)


def _taps(kernel: Any, rank: int) -> int:
    return math.prod(kernel) if len(kernel) == rank else int(kernel[0] ** rank)


def _pooled(rank: int) -> Callable[..., float]:
    return lambda op, given, kernel, *rest: 3.0 * _taps(kernel, rank) * made(op)


def _pooled_back(rank: int) -> Callable[..., float]:
    return lambda op, grad, given, kernel, *rest: 1.0 * _taps(kernel, rank) * made(op)


def _attended_back(op: Op, grad: Any, query: Any, key: Any, *rest: Any) -> float:
    return 9.0 * _size(query) / query.sizes[-1] * key.sizes[-2] if _size(query) else 0.0


_COUNTS: Mapping[str, Callable[..., float]] = {
    "convolution": _unless_flat(_convolved, 2),
    "convolution_backward": _unless_flat(_convolved_back, 3),
    "max_pool2d_with_indices": _pooled(2),
    "max_pool3d_with_indices": _pooled(3),
    "max_pool2d_with_indices_backward": _pooled_back(2),
    "max_pool3d_with_indices_backward": _pooled_back(3),
    "_scaled_dot_product_fused_attention_overrideable_backward": _unless_flat(_attended_back, 3),
    "argmax": _of_input(4.0),
    "argmin": _of_input(4.0),
    "max.dim": _of_input(5.0),
    "min.dim": _of_input(5.0),
    "topk": _of_input(1.0),
    "median.dim": _of_input(58.0),
    "kthvalue": _of_input(58.0),
    "cumsum": _of_result(3.0),
    "cumprod": _of_result(3.0),
    "logcumsumexp": _of_result(57.0),
    "im2col": _of_result(4.0),
    "upsample_bicubic2d": _of_result(9.0),
    "torchtpu::rnn_layer": _of_result(2.0),
    "torchtpu::rnn_layer_backward": _of_result(3.0),
    "grid_sampler_2d": _of_result(44.0),
}
