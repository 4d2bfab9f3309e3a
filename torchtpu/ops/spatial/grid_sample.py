"""Samples (batch, channels, *space) at the points of a grid in [-1, 1], and the gradients.

`interpolation_mode` is 0 linear, 1 nearest, 2 bicubic; `padding_mode` is 0 zeros, 1 border, 2 reflection.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch

from torchtpu.ops.registry import jax, jnp, lowering, opmath


def _clip(x: Any, top: int) -> Any:
    # A NaN is 0.  The gradient of a clipped coordinate is 0 at the edges too, where jnp.clip's is a half.
    return jnp.where(x > 0, jnp.where(x >= top, top, x), 0)


def _reflect(x: Any, low: float, high: float) -> Any:
    if high <= low:
        return jnp.zeros_like(x)
    span = high - low
    away = jnp.abs(x - low)
    flips = jnp.floor(away / span)
    extra = away - flips * span
    return jnp.where(flips % 2 == 0, extra + low, span - extra + low)


def _padded(x: Any, size: int, padding_mode: int, align_corners: bool) -> Any:
    if padding_mode == 0:
        return x
    if padding_mode == 2:
        x = _reflect(x, 0.0, size - 1.0) if align_corners else _reflect(x, -0.5, size - 0.5)
    return _clip(x, size - 1)


def _read(x: Any, places: list[Any]) -> Any:
    """`x` at whole coordinates, (batch, channels, points); zero outside."""
    flat, inside = jnp.zeros((), jnp.int32), jnp.ones((), bool)
    for place, size in zip(places, x.shape[2:], strict=True):
        inside = inside & (place >= 0) & (place <= size - 1)
        flat = flat * size + jnp.clip(place, 0, size - 1).astype(jnp.int32)
    values = jnp.take_along_axis(x.reshape(*x.shape[:2], math.prod(x.shape[2:])), flat[:, None], 2, mode="clip")
    return jnp.where(inside[:, None], values, 0)


def _cubic(part: Any) -> list[Any]:
    a = -0.75
    near = lambda d: ((a + 2) * d - (a + 3)) * d * d + 1
    far = lambda d: ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return [far(part + 1), near(part), near(1 - part), far(2 - part)]


def _rounded(at: Any, product: Any) -> Any:
    """The product, which is NaN where `at` is. XLA computes a place anew for what reads at it and for its weights, and
    here and there rounds a product and a sum after it at once: what is chosen is rounded before, everywhere."""
    return jnp.where(jnp.isnan(at), at, product)


def _sample(x: Any, grid: Any, mode: int, padding_mode: int, align_corners: bool) -> Any:
    space = x.shape[2:]
    points = grid.reshape(grid.shape[0], math.prod(grid.shape[1:-1]), len(space))
    places = []
    for i, size in enumerate(space):  # the grid's last dimension runs x, y, z
        at = points[:, :, len(space) - 1 - i]
        places.append((at + 1) / 2 * (size - 1) if align_corners else (_rounded(at, (at + 1) * size) - 1) / 2)
    if len(space) == 3:  # PyTorch's kernel for volumes looks at corners inside alone, that for images multiplies with 0
        places = [jnp.where(jnp.isfinite(place), place, -2) if padding_mode == 0 else place for place in places]
    pad = functools.partial(_padded, padding_mode=padding_mode, align_corners=align_corners)
    if mode != 2:
        places = [pad(place, size) for place, size in zip(places, space, strict=True)]
    if mode == 1:
        made = _read(x, [jnp.round(place) for place in places])
    else:
        lows = [jax.lax.stop_gradient(jnp.floor(place)) for place in places]
        parts = [place - low for place, low in zip(places, lows, strict=True)]
        taps = range(-1, 3) if mode == 2 else range(2)
        weights = [_cubic(part) if mode == 2 else [1 - part, part] for part in parts]
        made = jnp.zeros((), x.dtype)
        for corner in itertools.product(range(len(taps)), repeat=len(space)):
            at = [low + taps[i] for low, i in zip(lows, corner, strict=True)]
            if mode == 2:
                at = [pad(place, size) for place, size in zip(at, space, strict=True)]
            weight = functools.reduce(lambda a, b: a * b, [w[i] for w, i in zip(weights, corner, strict=True)])
            made = made + _read(x, at) * weight[:, None]
    return made.reshape(*x.shape[:2], *grid.shape[1:-1])


def _infer_grid_sampler(input: torch.Tensor, grid: torch.Tensor, mode: int, *_: Any) -> torch.Tensor:
    if input.dtype != grid.dtype:
        raise RuntimeError(f"grid_sampler: expected the grid to be {input.dtype}, as the input is, got {grid.dtype}")
    dims = input.dim() - 2
    if grid.dim() != input.dim() or grid.shape[0] != input.shape[0] or grid.shape[-1] != dims:
        raise RuntimeError(
            f"grid_sampler(): expected a grid of {dims} coordinates for each point and the batch size of the input, "
            f"but got input with sizes {list(input.shape)} and grid with sizes {list(grid.shape)}"
        )
    if mode == 2 and dims != 2:
        raise RuntimeError("grid_sampler(): bicubic interpolation only supports 4D input")
    return input.new_empty((*input.shape[:2], *grid.shape[1:-1]))


@lowering("grid_sampler_2d", "grid_sampler_3d", infer=_infer_grid_sampler)
def grid_sampler(input, grid, interpolation_mode, padding_mode, align_corners):
    return _sample(opmath(input), opmath(grid), interpolation_mode, padding_mode, align_corners)


@lowering("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def grid_sampler_backward(
    grad_output, input, grid, interpolation_mode, padding_mode, align_corners, output_mask, *, ctx
):
    sample = functools.partial(_sample, mode=interpolation_mode, padding_mode=padding_mode, align_corners=align_corners)
    _, transpose = jax.vjp(sample, opmath(input), opmath(grid))
    grad_input, grad_grid = transpose(opmath(grad_output))
    return (grad_input if output_mask[0] else None), grad_grid
