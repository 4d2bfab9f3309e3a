"""Fourier transforms, scaled as PyTorch asks."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchtpu.ops.registry import jnp, lax, lowering


def _scale(x: Any, sizes: list[int], normalization: int) -> Any:
    """PyTorch's fft_norm_mode: 0 leaves the sum alone, 1 divides it by the root of the size, 2 by the size."""
    size = math.prod(sizes)
    if normalization == 0 or size == 0:
        return x
    return x * jnp.asarray(1 / (math.sqrt(size) if normalization == 1 else size), x.real.dtype)


def _over_last(x: Any, dims: list[int], transform: Any) -> Any:
    """Applies a transform of the last `len(dims)` dimensions to `dims`."""
    last = list(range(-len(dims), 0))
    return jnp.moveaxis(transform(jnp.moveaxis(x, dims, last)), last, dims)


def _c2c(x: Any, dims: list[int], forward: bool) -> Any:
    kind = lax.FftType.FFT if forward else lax.FftType.IFFT
    # XLA transforms at most three dimensions at once, and divides an inverse one by its size.
    for start in range(0, len(dims), 3):
        part = dims[start : start + 3]
        sizes = [x.shape[d] for d in part]
        x = _over_last(x, part, lambda y, sizes=sizes: lax.fft(y, kind, tuple(sizes)))
        x = x if forward else x * math.prod(sizes)
    return x


def _laid_out(self: torch.Tensor, dim: Any, sizes: Any, dtype: torch.dtype, keep_last: bool = False) -> torch.Tensor:
    """An array with the strides of the CPU; PyTorch's meta kernels answer for CUDA."""
    from torch._meta_registrations import _exec_fft, _sort_dims

    order = _sort_dims(self, dim, exclude_last=keep_last)
    made: torch.Tensor = _exec_fft(self.new_empty(sizes, dtype=dtype), self, sizes, order, forward=True)
    return made


def _infer_c2c(self: torch.Tensor, dim: Any, normalization: int, forward: bool) -> torch.Tensor:
    made = torch.ops.aten._fft_c2c(self, dim, normalization, forward)
    return _laid_out(self, dim, made.shape, made.dtype) if dim else made


def _infer_r2c(self: torch.Tensor, dim: Any, normalization: int, onesided: bool) -> torch.Tensor:
    made = torch.ops.aten._fft_r2c(self, dim, normalization, onesided)
    return _laid_out(self, dim, made.shape, made.dtype, keep_last=True)


def _infer_c2r(self: torch.Tensor, dim: Any, normalization: int, last_dim_size: int) -> torch.Tensor:
    made = torch.ops.aten._fft_c2r(self, dim, normalization, last_dim_size)
    half = _infer_c2c(self, dim[:-1], normalization, forward=False)
    return _laid_out(half, dim[-1:], made.shape, made.dtype)


@lowering("_fft_c2c", infer=_infer_c2c)
def fft_c2c(self, dim, normalization, forward):
    if not dim or not self.size:
        return self
    return _scale(_c2c(self, list(dim), forward), [self.shape[d] for d in dim], normalization)


@lowering("_fft_r2c", infer=_infer_r2c)
def fft_r2c(self, dim, normalization, onesided):
    dims = list(dim)
    sizes = [self.shape[d] for d in dims]
    if not onesided:
        whole = lax.complex(self, jnp.zeros_like(self))
        return _scale(_c2c(whole, dims, True), sizes, normalization)
    half = _over_last(self, dims[-1:], lambda y: lax.fft(y, lax.FftType.RFFT, (sizes[-1],)))
    return _scale(_c2c(half, dims[:-1], True), sizes, normalization)


@lowering("_fft_c2r", infer=_infer_c2r)
def fft_c2r(self, dim, normalization, last_dim_size):
    dims = list(dim)
    sizes = [self.shape[d] for d in dims[:-1]] + [last_dim_size]
    half = _c2c(self, dims[:-1], False)
    whole = _over_last(half, dims[-1:], lambda y: _irfft(y, last_dim_size))
    return _scale(whole, sizes, normalization)


def _irfft(x: Any, size: int) -> Any:
    x = lax.slice_in_dim(x, 0, min(x.shape[-1], size // 2 + 1), axis=-1)
    missing = size // 2 + 1 - x.shape[-1]
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return lax.fft(x, lax.FftType.IRFFT, (size,)) * size
