"""Max and average pooling of (…, channels, *space) over windows, and the gradients."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from torchtpu.ops.math.reduce import extreme
from torchtpu.ops.registry import jnp, lax, like, lowering, opmath, suggest_memory_format
from torchtpu.ops.sizes import is_known

_MOST_SLICES = 32


@dataclass(frozen=True)
class Windows:
    """The windows over one dimension: `count` of them, of `size` elements `dilation` apart, the first at `-padding`."""

    length: int
    count: int
    size: int
    stride: int
    padding: int
    dilation: int

    @property
    def span(self) -> int:
        return self.dilation * (self.size - 1) + 1

    @property
    def overhang(self) -> int:
        """How far the last one reaches beyond the dimension; negative, if at all, where sizes are not known."""
        beyond = (self.count - 1) * self.stride + self.span - self.padding - self.length
        return max(beyond, 0) if isinstance(beyond, int) else beyond

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the dimension."""
        return (self.count, self.padding, self.dilation) == (1, 0, 1) and bool(self.size == self.length)


def windows_of(
    rank: int, space: Any, counts: Any, kernel: Any, stride: Any, padding: Any, dilation: Any = (1,)
) -> list[Windows]:
    spread = lambda v: tuple(v) * rank if len(v) == 1 else tuple(v)
    columns = (spread(v) for v in (kernel, stride or kernel, padding, dilation))
    return [Windows(*row) for row in zip(space[-rank:], counts[-rank:], *columns, strict=True)]


def _slices(x: Any, axis: int, w: Windows, fill: Any) -> list[Any]:
    """For each element of the window, that element of every window along `axis` (`fill` outside)."""
    pads = [(0, 0, 0)] * x.ndim
    pads[axis] = (w.padding, w.overhang, 0)
    padded = lax.pad(x, jnp.asarray(fill, x.dtype), pads)
    reach = (w.count - 1) * w.stride + 1
    starts = range(0, w.span, w.dilation)
    return [lax.slice_in_dim(padded, start, start + reach, w.stride, axis) for start in starts]


def lowest(dtype: Any) -> Any:
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def best_of(candidates: Any) -> tuple[Any, Any]:
    """The largest of (value, place) pairs: the first of equals, the last NaN, and anything over the place -1."""
    best, place = next(candidates)
    for value, where in candidates:
        better = (value > best) | (value != value) | (place < 0)
        best, place = jnp.where(better, value, best), jnp.where(better, where, place)
    return best, place


def _best_of_all(x: Any, place: Any, axis: int, ctx: Any) -> tuple[Any, Any]:
    """What `best_of` gives for the elements along a dimension, whose places rise."""
    best = extreme(jnp.max, x, axis, ctx, keepdims=True)
    first = jnp.min(jnp.where(x == best, place, jnp.iinfo(jnp.int32).max), axis, keepdims=True)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return best, first
    last_nan = jnp.max(jnp.where(x != x, place, -1), axis, keepdims=True)
    return best, jnp.where(last_nan < 0, first, last_nan)


def places(x: Any, rank: int) -> Any:
    """The index of each element within its own plane, as PyTorch's pooling counts them."""
    space = x.shape[-rank:]
    return jnp.broadcast_to(lax.iota(jnp.int32, math.prod(space)).reshape(space), x.shape)


@lowering("max_pool2d_with_indices")
def max_pool2d(self, kernel_size, stride=(), padding=(0,), dilation=(1,), ceil_mode=False, *, ctx):
    return _max_pool(2, self, kernel_size, stride, padding, dilation, ctx)


def _infer_max_pool3d(self: torch.Tensor, *window: Any) -> tuple[torch.Tensor, ...]:
    """PyTorch's meta kernel forgets the memory format of a volume without a batch."""
    made = torch.ops.aten.max_pool3d_with_indices(self, *window)
    last = torch.channels_last_3d
    if self.dim() != 4 or self.is_contiguous() or not self.unsqueeze(0).is_contiguous(memory_format=last):
        return tuple(made)
    return tuple(like(each.unsqueeze(0), memory_format=last).squeeze(0) for each in made)


@lowering("max_pool3d_with_indices", infer=_infer_max_pool3d)
def max_pool3d(self, kernel_size, stride=(), padding=(0,), dilation=(1,), ceil_mode=False, *, ctx):
    return _max_pool(3, self, kernel_size, stride, padding, dilation, ctx)


def _max_pool(rank: int, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ctx: Any) -> Any:
    place = places(x, rank)
    windows = windows_of(rank, x.shape, ctx.results[0][0], kernel, stride, padding, dilation)
    # One dimension after the other, the innermost first, keeps PyTorch's choice among equals.
    for axis in range(x.ndim - 1, x.ndim - rank - 1, -1):
        w = windows[axis - x.ndim]
        if w.is_whole:
            x, place = _best_of_all(x, place, axis, ctx)
            continue
        pairs = zip(_slices(x, axis, w, lowest(x.dtype)), _slices(place, axis, w, -1), strict=True)
        x, place = best_of(pairs)
    return x, place


@lowering("max_pool2d_with_indices_backward")
def max_pool2d_backward(grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices):
    return _max_pool_backward(2, grad_output, self, kernel_size, stride, padding, dilation, indices)


@lowering("max_pool3d_with_indices_backward")
def max_pool3d_backward(grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices):
    return _max_pool_backward(3, grad_output, self, kernel_size, stride, padding, dilation, indices)


def _max_pool_backward(
    rank: int, grad: Any, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, indices: Any
) -> Any:
    """Each element gathers from the few windows that hold it: scatters are slow on every platform but this is not.

    The plane is cut into blocks of one stride: block q is met by window q and by the `reach - 1` before it.
    """
    windows = windows_of(rank, x.shape, grad.shape, kernel, stride, padding, dilation)
    lead = x.shape[:-rank]
    windows = [replace(w, stride=w.length) if w.is_whole else w for w in windows]
    reach = [1 if w.is_whole else -(-w.span // w.stride) for w in windows]
    blocks = [1 if w.is_whole else -(-(w.length + w.padding) // w.stride) for w in windows]
    pads = [(0, 0, 0)] * len(lead)
    pads += [(r - 1, b - w.count, 0) for r, b, w in zip(reach, blocks, windows, strict=True)]
    grads = lax.pad(opmath(grad), jnp.zeros((), opmath(grad).dtype), pads)
    chosen = lax.pad(indices.astype(jnp.int32), jnp.int32(-1), pads)
    space = x.shape[-rank:]
    place = lax.pad(
        lax.iota(jnp.int32, math.prod(space)).reshape(space),
        jnp.int32(-2),
        [(w.padding, b * w.stride - w.length - w.padding, 0) for w, b in zip(windows, blocks, strict=True)],
    )
    split = [n for w, b in zip(windows, blocks, strict=True) for n in (b, w.stride)]
    place = place.reshape(split)
    widened = [n for b in blocks for n in (b, 1)]
    made = jnp.zeros((*lead, *split), grads.dtype)
    for back in itertools.product(*map(range, reach)):
        start = (*[0] * len(lead), *back)
        stop = (*lead, *(a + b for a, b in zip(back, blocks, strict=True)))
        part, where = (lax.slice(a, start, stop).reshape(*lead, *widened) for a in (grads, chosen))
        made = made + jnp.where(where == place, part, 0)
    made = made.reshape(*lead, *(b * w.stride for b, w in zip(blocks, windows, strict=True)))
    start = (*[0] * len(lead), *(w.padding for w in windows))
    return lax.slice(made, start, [a + n for a, n in zip(start, x.shape, strict=True)])


@lowering("avg_pool2d")
def avg_pool2d(
    self, kernel_size, stride=(), padding=(0,), ceil_mode=False, count_include_pad=True, divisor_override=None, *, ctx
):
    windows = windows_of(2, self.shape, ctx.results[0][0], kernel_size, stride, padding)
    return _avg_pool(self, windows, count_include_pad, divisor_override)


@lowering("avg_pool3d")
def avg_pool3d(
    self, kernel_size, stride=(), padding=(0,), ceil_mode=False, count_include_pad=True, divisor_override=None, *, ctx
):
    windows = windows_of(3, self.shape, ctx.results[0][0], kernel_size, stride, padding)
    return _avg_pool(self, windows, count_include_pad, divisor_override)


def _avg_pool(x: Any, windows: list[Windows], count_include_pad: bool, divisor: Any) -> Any:
    total = opmath(x)
    for axis, w in zip(range(-len(windows), 0), windows, strict=True):
        total = _window_sums(total, axis % x.ndim, w)
    return _divide(total, windows, count_include_pad, divisor)


def _window_sums(x: Any, axis: int, w: Windows) -> Any:
    if w.is_whole:
        return jnp.sum(x, axis, keepdims=True, dtype=x.dtype)
    if w.size <= _MOST_SLICES:
        return sum(_slices(x, axis, w, 0))
    shape, strides, pads = [1] * x.ndim, [1] * x.ndim, [(0, 0, 0)] * x.ndim
    shape[axis], strides[axis], pads[axis] = w.size, w.stride, (w.padding, w.overhang, 0)
    zero = jnp.zeros((), x.dtype)
    sums = lax.reduce_window(lax.pad(x, zero, pads), zero, lax.add, shape, strides, [(0, 0)] * x.ndim)
    return lax.slice_in_dim(sums, 0, w.count, 1, axis)


def _divide(x: Any, windows: list[Windows], count_include_pad: bool, divisor: Any) -> Any:
    """`x` over the sizes of the windows, cut at the edges as PyTorch cuts them."""
    if divisor is None:
        divisor = np.ones(())
        for w in windows:
            known = np if is_known(w.count, w.length) else jnp
            start = known.arange(w.count) * w.stride - w.padding
            padded = known.minimum(start + w.size, known.asarray(w.length + w.padding)) - start
            inside = known.minimum(start + w.size, known.asarray(w.length)) - known.maximum(start, 0)
            divisor = divisor[..., None] * (padded if count_include_pad else inside)
    return lax.div(x, jnp.broadcast_to(jnp.asarray(divisor, x.dtype), x.shape))  # integers round towards zero


@lowering("avg_pool2d_backward")
def avg_pool2d_backward(
    grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
):
    windows = windows_of(2, self.shape, grad_output.shape, kernel_size, stride, padding)
    return _avg_pool_backward(grad_output, windows, count_include_pad, divisor_override)


@lowering("avg_pool3d_backward")
def avg_pool3d_backward(
    grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
):
    windows = windows_of(3, self.shape, grad_output.shape, kernel_size, stride, padding)
    return _avg_pool_backward(grad_output, windows, count_include_pad, divisor_override)


def _avg_pool_backward(grad: Any, windows: list[Windows], count_include_pad: bool, divisor: Any) -> Any:
    made = _divide(opmath(grad), windows, count_include_pad, divisor)
    for axis, w in zip(range(-len(windows), 0), windows, strict=True):
        axis %= grad.ndim
        if w.is_whole:
            made = jnp.broadcast_to(made, (*made.shape[:axis], w.length, *made.shape[axis + 1 :]))
            continue
        # The gradients, a stride apart, summed over the windows that hold each element.
        pads = [(0, 0, 0)] * grad.ndim
        reach = (w.count - 1) * w.stride + 1
        pads[axis] = (w.size - 1 - w.padding, w.length + w.padding - reach, w.stride - 1)
        spread = lax.pad(made, jnp.zeros((), made.dtype), pads)
        made = _window_sums(spread, axis, Windows(spread.shape[axis], w.length, w.size, 1, 0, 1))
    return made


def _infer_unpool2d(self: torch.Tensor, indices: torch.Tensor, output_size: Any) -> torch.Tensor:
    """PyTorch's meta kernel forgets the memory format."""
    made = torch.ops.aten.max_unpool2d(self, indices, output_size)
    return made if self.dim() < 4 else made.contiguous(memory_format=suggest_memory_format(self))


@lowering("max_unpool2d", infer=_infer_unpool2d)
def max_unpool2d(self, indices, output_size, *, ctx):
    return _max_unpool(2, self, indices, output_size, ctx)


@lowering("max_unpool3d")
def max_unpool3d(self, indices, output_size, stride, padding, *, ctx):
    return _max_unpool(3, self, indices, output_size, ctx)


def _max_unpool(rank: int, x: Any, indices: Any, size: Any, ctx: Any) -> Any:
    lead, plane = x.shape[:-rank], math.prod(size)
    ctx.check((indices >= 0) & (indices < plane), "Found an invalid max index", RuntimeError)
    rows, pooled = math.prod(lead), math.prod(x.shape[-rank:])
    where = jnp.arange(rows)[:, None], indices.reshape(rows, pooled)
    made = jnp.zeros((rows, plane), x.dtype).at[where].set(x.reshape(rows, pooled), mode="drop")
    return made.reshape(*lead, *size)
