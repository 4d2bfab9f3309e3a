"""Convolutions of (batch, channels, *space) with one to three spatial dimensions, and their gradients.

A transposed convolution is the gradient of a plain one, and every gradient is the linear transpose of a plain one, so
the choice of a formulation is made in `_convolve` alone.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch

from torchtpu.ops.linalg.matmul import contract, precision_of
from torchtpu.ops.registry import jax, jnp, lax, like, lowering, opmath, suggest_memory_format
from torchtpu.ops.sizes import is_known, transpose

# Below this many output pixels XLA:CPU's convolution costs up to 140 times torch's, while copied patches and one dot
# cost the same; above, the patches no longer fit the cache.
_SMALL_IMAGE = 64
_MOST_TAPS = 49
_MOST_SHIFTS = 99  # unrolled; a gradient of 9 x 9 then compiles for 3 s, one of 17 x 17 took 11 s
_MOST_SPLITS = 32
_LARGE_STRIDE = 16


class _Window(NamedTuple):
    """The window of a plain convolution: one entry per spatial dimension, the padding as (low, high)."""

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]


def _window(rank: int, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any) -> _Window:
    stride, padding, dilation, extra = (
        tuple(v) * rank if len(v) == 1 else tuple(v) for v in (stride, padding, dilation, output_padding)
    )
    # An output padding of a stride or more adds whole pixels, which the plain convolution must not look at.
    reach = [p - e if transposed and e >= s else p for p, e, s in zip(padding, extra, stride, strict=True)]
    return _Window(stride, tuple(zip(padding, reach, strict=True)), dilation)


def _convolve(x: Any, weight: Any, window: _Window, groups: int, ctx: Any) -> Any:
    if not is_known(*itertools.chain(*window.padding)):  # jax's convolution takes ints
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *((*p, 0) for p in window.padding)])
        window = window._replace(padding=((0, 0),) * len(window.padding))
    if ctx.platform == "cpu" and not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _convolve_on_cpu(x, weight, window, groups, ctx)
    return _xla(x, weight, window, groups, ctx)


def _convolve_on_cpu(x: Any, weight: Any, window: _Window, groups: int, ctx: Any) -> Any:
    # Chosen by measurement against XLA:CPU's own convolution, which is naive where the image is small, for three
    # dimensions (10 to 28 times torch) and for the weight gradient of groups (190 times).
    if groups > 1 and weight.shape[1] == 1:
        return _depthwise(x, weight, window)
    if 1 < groups <= _MOST_SPLITS:
        parts = zip(jnp.split(x, groups, 1), jnp.split(weight, groups, 0), strict=True)
        return jnp.concatenate([_convolve_on_cpu(part, kernel, window, 1, ctx) for part, kernel in parts], 1)
    taps = math.prod(weight.shape[2:])
    space = _output_space(x, weight, window)
    if groups == 1 and _is_of_blocks(x, weight, window):
        return _blocks(x, weight, window, ctx)
    has_few = isinstance(taps, int) and 1 < taps <= _MOST_TAPS
    small = has_few and is_known(*space) and math.prod(space) <= _SMALL_IMAGE
    if groups > 1 or small:
        return _patches_dot(x, weight, window, groups)
    if x.ndim == 5:
        return _folded(x, weight, window, ctx)
    return _xla(x, weight, window, groups, ctx)


def _xla(x: Any, weight: Any, window: _Window, groups: int, ctx: Any) -> Any:
    return lax.conv_general_dilated(
        x,
        weight,
        window.stride,
        window.padding,
        rhs_dilation=window.dilation,
        feature_group_count=groups,
        dimension_numbers=lax.ConvDimensionNumbers(*[tuple(range(x.ndim))] * 3),
        precision=precision_of(x.dtype, ctx.precision),
    )


def _output_space(x: Any, weight: Any, window: _Window) -> tuple[int, ...]:
    shape = zip(x.shape[2:], weight.shape[2:], *window, strict=True)
    return tuple((n + low + high - d * (k - 1) - 1) // s + 1 for n, k, s, (low, high), d in shape)


def _taps(x: Any, weight: Any, window: _Window) -> list[Any]:
    """For each element of the kernel the part of the padded image it meets, all of the output's size."""
    space = _output_space(x, weight, window)
    padded = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *((*p, 0) for p in window.padding)])
    taps = []
    for place in itertools.product(*map(range, weight.shape[2:])):
        start = [i * d for i, d in zip(place, window.dilation, strict=True)]
        stop = [b + (n - 1) * s + 1 for b, n, s in zip(start, space, window.stride, strict=True)]
        taps.append(lax.slice(padded, (0, 0, *start), (*x.shape[:2], *stop), (1, 1, *window.stride)))
    return taps


def _patches_dot(x: Any, weight: Any, window: _Window, groups: int) -> Any:
    batch, outputs = x.shape[0], weight.shape[0]
    depth = math.prod(weight.shape[1:])
    taps = _taps(x, weight, window)
    space = taps[0].shape[2:]
    if groups == 1:
        patches = jnp.stack(taps, 2).reshape(batch, depth, math.prod(space))
        made = lax.dot_general(weight.reshape(outputs, depth), patches, (((1,), (1,)), ((), ())))
    else:
        patches = jnp.stack(taps, 2).reshape(batch, groups, depth, math.prod(space))
        kernels = weight.reshape(groups, outputs // groups, depth)
        made = lax.dot_general(kernels, patches, (((2,), (2,)), ((0,), (1,))))
    return made.reshape(outputs, batch, *space).swapaxes(0, 1)


def _is_of_blocks(x: Any, weight: Any, window: _Window) -> bool:
    """Whether the kernel is a block of the stride's size, as where an image is cut into patches, or several large ones.

    With smaller strides XLA:CPU's own convolution of several blocks is the faster one.
    """
    kernel, stride = tuple(weight.shape[2:]), window.stride
    if not is_known(*kernel) or any(k < s for k, s in zip(kernel, stride, strict=True)):
        return False
    if set(window.dilation) != {1} or math.prod(stride) == 1 or not is_known(*x.shape):
        return False
    return kernel == stride or (
        max(stride) >= _LARGE_STRIDE and all(k % s == 0 for k, s in zip(kernel, stride, strict=True))
    )


def _blocks(x: Any, weight: Any, window: _Window, ctx: Any) -> Any:
    """A convolution without strides of an image whose channels are the pixels of a block.

    Its gradient is one of images, where that of strides looks for a pixel among as many zeros as a block has pixels.
    """
    space, rank = _output_space(x, weight, window), x.ndim - 2
    reach = [k // s for k, s in zip(weight.shape[2:], window.stride, strict=True)]
    counts = [n + m - 1 for n, m in zip(space, reach, strict=True)]
    sizes = zip(x.shape[2:], counts, window.stride, window.padding, strict=True)
    rims = [(low, n * s - length - low, 0) for length, n, s, (low, _) in sizes]
    padded = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *rims])
    image, kernel = (_into_blocks(a, n, window.stride) for a, n in ((padded, counts), (weight, reach)))
    if max(reach) == 1:
        made = lax.dot_general(kernel.reshape(kernel.shape[:2]), image, (((1,), (1,)), ((), ())))
        return made.swapaxes(0, 1)
    return _convolve_on_cpu(image, kernel, _Window((1,) * rank, ((0, 0),) * rank, (1,) * rank), 1, ctx)


def _into_blocks(x: Any, counts: Any, stride: tuple[int, ...]) -> Any:
    """(first, channels, *space) with space = counts * stride as (first, channels * block, *counts)."""
    split = x.reshape(*x.shape[:2], *itertools.chain(*zip(counts, stride, strict=True)))
    order = (0, 1, *range(3, split.ndim, 2), *range(2, split.ndim, 2))
    return split.transpose(order).reshape(x.shape[0], x.shape[1] * math.prod(stride), *counts)


def _depthwise(x: Any, weight: Any, window: _Window) -> Any:
    """Groups of one channel: a sum of scaled shifts, which XLA:CPU fuses into one vectorised loop."""
    each = weight.shape[0] // x.shape[1]
    space = _output_space(x, weight, window)
    if math.prod(weight.shape[2:]) > _MOST_SHIFTS:
        made = _sum_by_rows(x, weight.reshape(x.shape[1], each, *weight.shape[2:]), window, space)
    else:
        kernel = weight.reshape(x.shape[1], each, -1, *[1] * (x.ndim - 2))
        made = sum(tap[:, :, None] * kernel[:, :, i] for i, tap in enumerate(_taps(x, weight, window)))
    return made.reshape(x.shape[0], weight.shape[0], *space)


def _sum_by_rows(x: Any, kernel: Any, window: _Window, space: tuple[int, ...]) -> Any:
    """The sum of scaled shifts as a loop over rows of a large kernel: what is compiled is one row."""
    *leading, last = kernel.shape[2:]
    width = max(n for n in range(1, min(last, _MOST_SHIFTS) + 1) if last % n == 0)
    places = itertools.product(*map(range, leading), range(0, last, width))
    starts = jnp.asarray([[i * d for i, d in zip(place, window.dilation, strict=True)] for place in places], jnp.int32)
    rows = kernel.reshape(*kernel.shape[:2], -1, width, *[1] * len(space))
    padded = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *((*p, 0) for p in window.padding)])
    reach = [(n - 1) * s + 1 for n, s in zip(space, window.stride, strict=True)]
    step = window.dilation[-1]

    def add_row(made: Any, at: tuple[Any, Any]) -> tuple[Any, None]:
        start, row = at
        zero = jnp.zeros((), start.dtype)
        met = lax.dynamic_slice(
            padded, (zero, zero, *start), (*x.shape[:2], *reach[:-1], reach[-1] + (width - 1) * step)
        )
        for i in range(width):
            low = [0] * (x.ndim - 1) + [i * step]
            high = [b + n for b, n in zip(low, (*x.shape[:2], *reach), strict=True)]
            made = made + lax.slice(met, low, high, (1, 1, *window.stride))[:, :, None] * row[:, :, i]
        return made, None

    first = jnp.zeros((*x.shape[:2], kernel.shape[1], *space), x.dtype)
    return lax.scan(add_row, first, (starts, jnp.moveaxis(rows, 2, 0)))[0]


def _folded(x: Any, weight: Any, window: _Window, ctx: Any) -> Any:
    """A volume as a batch of images whose channels are the slices that the kernel's depth meets."""
    batch, channels = x.shape[:2]
    outputs, _, depth, *kernel = weight.shape
    across = _Window(window.stride[:1] + (1, 1), window.padding[:1] + ((0, 0),) * 2, window.dilation[:1] + (1, 1))
    images = jnp.stack(_taps(x, weight[..., :1, :1], across), 2).transpose(0, 3, 1, 2, 4, 5)
    slices = images.shape[1]
    within = _Window(window.stride[1:], window.padding[1:], window.dilation[1:])
    flat = images.reshape(batch * slices, channels * depth, *x.shape[3:])
    made = _xla(flat, weight.reshape(outputs, channels * depth, *kernel), within, 1, ctx)
    return made.reshape(batch, slices, *made.shape[1:]).swapaxes(1, 2)


def _computed(ctx: Any, *arrays: Any) -> Any:
    """XLA:CPU convolves half precision in float32; an accelerator accumulates in float32 by itself."""
    return [opmath(a) for a in arrays] if ctx.platform == "cpu" else arrays


def _infer_convolution(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    if min(padding) < 0:
        raise RuntimeError("negative padding is not supported")
    if min(dilation) <= 0:
        raise RuntimeError("dilation should be greater than zero")
    if min(output_padding) < 0:
        raise RuntimeError("negative output_padding is not supported")
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    if bias is not None and bias.shape != (channels,):
        raise RuntimeError(f"expected bias to be 1-dimensional with {channels} elements")
    if transposed and any(e >= max(s, d) for e, s, d in zip(output_padding, stride, dilation, strict=False)):
        raise RuntimeError("output padding must be smaller than either stride or dilation")
    arguments = input, weight, bias, stride, padding, dilation, transposed, output_padding, groups
    shape = _shape_of(*arguments)
    if shape is None:
        _refuse(input, weight, (stride, padding, dilation, output_padding), transposed, groups)
    made = torch.convolution(*arguments) if shape is None else input.new_empty(shape)
    # As PyTorch's kernels, unlike its meta function; contiguous() would leave an image of one pixel.
    memory_format = _memory_format(input, weight)
    return made if memory_format is torch.contiguous_format else like(made, memory_format=memory_format)


def _refuse(input: torch.Tensor, weight: torch.Tensor, windows: tuple[Any, ...], transposed: bool, groups: int) -> None:
    """Raises where PyTorch's meta function takes what its kernels refuse."""
    rank = weight.dim() - 2
    if any(len(given) not in (1, rank) for given in windows):
        raise RuntimeError(f"expected a single integer value or a list of {rank} values")
    if groups > 0 and weight.shape[0] % groups:
        raise RuntimeError(f"expected weight to be divisible by {groups} at dimension 0")
    if transposed and input.shape[-rank - 1] != weight.shape[0]:
        raise RuntimeError(f"expected input to have {weight.shape[0]} channels")


def _memory_format(input: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    formats = [suggest_memory_format(input), suggest_memory_format(weight)]
    return next((found for found in formats if found is not torch.contiguous_format), torch.contiguous_format)


def _shape_of(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> tuple[int, ...] | None:
    """What a convolution makes that PyTorch refuses on no device; None of others, which its meta function judges."""
    rank = weight.dim() - 2
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    is_usual = (
        rank in (1, 2, 3)
        and input.dim() == weight.dim()
        and groups > 0
        and all(len(given) == rank for given in (stride, padding, dilation, output_padding))
        and min(*input.shape, *weight.shape, *stride) > 0
        and input.shape[1] == (weight.shape[0] if transposed else weight.shape[1] * groups)
        and weight.shape[0] % groups == 0
        and input.dtype == weight.dtype
        and (bias is None or (bias.shape == (channels,) and bias.dtype == weight.dtype))
        and all(0 <= extra < max(s, d) for extra, s, d in zip(output_padding, stride, dilation, strict=True))
    )
    if not is_usual:
        return None
    space = []
    windows = zip(input.shape[2:], weight.shape[2:], stride, padding, dilation, output_padding, strict=True)
    for size, taps, step, rim, gap, extra in windows:
        reach = gap * (taps - 1) + 1
        if transposed:
            space.append((size - 1) * step - 2 * rim + reach + extra)
        else:
            space.append((size + 2 * rim - reach) // step + 1)
    return (input.shape[0], channels, *space) if min(space) > 0 else None


def _infer_convolution_backward(
    grad_output: Any, input: Any, weight: Any, bias_sizes: Any, *rest: Any
) -> tuple[torch.Tensor | None, ...]:
    """Laid out as by PyTorch's kernels."""
    memory_format, output_mask = _memory_format(input, weight), rest[-1]
    grads = [
        like(grad_output.new_empty(given.shape), memory_format=memory_format) if is_wanted else None
        for given, is_wanted in zip((input, weight), output_mask, strict=False)
    ]
    return *grads, grad_output.new_empty(bias_sizes) if output_mask[2] else None


@lowering("convolution", infer=_infer_convolution, multiplies=True)
def convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups, *, ctx):
    channels = input.shape[1 - weight.ndim]
    if input.size == 0 or (is_known(channels) and channels == 0):  # of no images, or no channels, PyTorch makes none
        return jnp.zeros(ctx.results[0][0], opmath(input).dtype)
    window = _window(weight.ndim - 2, stride, padding, dilation, transposed, output_padding)
    x, w = _computed(ctx, input, weight)
    if transposed and jnp.issubdtype(x.dtype, jnp.integer):
        made = _transposed_integers(x, w, window, groups, ctx)
    elif transposed:
        image = jax.ShapeDtypeStruct(ctx.results[0][0], x.dtype)
        made = transpose(lambda image: _transposable(image, w, window, groups, ctx), image, x)
    else:
        made = _convolve(x, w, window, groups, ctx)
    return made if bias is None else made + bias.astype(made.dtype).reshape(-1, *[1] * (weight.ndim - 2))


def _transposable(x: Any, weight: Any, window: _Window, groups: int, ctx: Any) -> Any:
    """A convolution; where sizes are not known jax transposes none with strides, so that it is part of one without."""
    space = _output_space(x, weight, window)
    if set(window.stride) == {1} or is_known(*space):
        return _convolve(x, weight, window, groups, ctx)
    made = _convolve(x, weight, window._replace(stride=(1,) * len(space)), groups, ctx)
    stop = [(n - 1) * s + 1 for n, s in zip(space, window.stride, strict=True)]
    return lax.slice(made, [0] * made.ndim, (*made.shape[:2], *stop), (1, 1, *window.stride))


def _transposed_integers(x: Any, weight: Any, window: _Window, groups: int, ctx: Any) -> Any:
    """The sum over the kernel of shifted images a stride apart: jax transposes functions of floating numbers only."""
    shape = ctx.results[0][0]
    inputs = jnp.stack(jnp.split(x, groups, 1), 0)
    kernels = jnp.stack(jnp.split(weight, groups, 0), 0)
    reach = [
        max((n - 1) * s + (k - 1) * d + 1, o + low)
        for n, k, s, d, o, (low, _) in zip(
            x.shape[2:], weight.shape[2:], window.stride, window.dilation, shape[2:], window.padding, strict=True
        )
    ]
    made = jnp.zeros((*shape[:2], *reach), x.dtype)
    for place in itertools.product(*map(range, weight.shape[2:])):
        part = contract(inputs, kernels[(..., *place)], ((2,), (1,)), ((0,), (0,)), ctx)
        part = jnp.moveaxis(part, (0, -1), (1, 2))
        where = [
            slice(i * d, i * d + (n - 1) * s + 1, s)
            for i, d, n, s in zip(place, window.dilation, x.shape[2:], window.stride, strict=True)
        ]
        made = made.at[(..., *where)].add(part.reshape(x.shape[0], -1, *x.shape[2:]))
    starts = [low for low, _ in window.padding]
    return lax.slice(made, (0, 0, *starts), (*shape[:2], *(b + n for b, n in zip(starts, shape[2:], strict=True))))


@lowering("convolution_backward", infer=_infer_convolution_backward, multiplies=True)
def convolution_backward(
    grad_output,
    input,
    weight,
    bias_sizes,
    stride,
    padding,
    dilation,
    transposed,
    output_padding,
    groups,
    output_mask,
    *,
    ctx,
):
    channels = input.shape[1 - weight.ndim]
    if input.size == 0 or (is_known(channels) and channels == 0):
        zeros = (jnp.zeros(shape, opmath(grad_output).dtype) for shape, _ in ctx.results)
        return tuple(next(zeros) if is_wanted else None for is_wanted in output_mask)
    window = _window(weight.ndim - 2, stride, padding, dilation, transposed, output_padding)
    grad, x, w = _computed(ctx, grad_output, input, weight)
    image, made = (grad, x) if transposed else (x, grad)
    grad_input = grad_weight = grad_bias = None
    if output_mask[0] and transposed:
        grad_input = _convolve(grad, w, window, groups, ctx)
    elif output_mask[0]:
        grad_input = transpose(lambda x: _transposable(x, w, window, groups, ctx), x, grad)
    if output_mask[1]:
        grad_weight = transpose(lambda w: _transposable(image, w, window, groups, ctx), w, made)
    if output_mask[2]:
        grad_bias = opmath(grad_output).sum((0, *range(2, grad.ndim)))
    return grad_input, grad_weight, grad_bias
