"""Histograms with given edges: the weight in each bin, and the bins' edges."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from torchtpu.ops.composed import raise_as_cpu
from torchtpu.ops.registry import composed

aten: Any = torch.ops.aten

DTYPES = (torch.float32, torch.float64)


def _edges(name: str, x: Tensor, bins: list[int], bounds: list[float] | None) -> list[Tensor]:
    """Equal bins for each column, between the bounds given or those of the data."""
    made = []
    for d, count in enumerate(bins):
        if bounds:
            ends = x.new_tensor(bounds[2 * d : 2 * d + 2])
        elif x.shape[0] == 0:
            ends = x.new_tensor([0.0, 1.0])
        else:
            ends = torch.stack(torch.aminmax(x[:, d]))
        torch._assert_async(ends.isfinite().all(), f"torch.{name}: dimension {d}'s range is not finite")
        low, high = ends + (ends[0] == ends[1]) * x.new_tensor([-0.5, 0.5])
        place = torch.arange(count + 1, dtype=x.dtype, device=x.device)
        step = (high - low) / count
        made.append(torch.where(place < (count + 1) // 2, low + step * place, high - step * (count - place)))
    return made


def _histogram(x: Tensor, edges: list[Tensor], weight: Tensor | None, density: bool) -> Tensor:
    """The weight of the rows of `x` that fall into each bin; a last bin holds its right edge."""
    shape = [e.shape[0] - 1 for e in edges]
    flat = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    inside = torch.ones_like(flat, dtype=torch.bool)
    for column, e in zip(x.unbind(1), edges, strict=True):
        count = e.shape[0] - 1
        inside &= (column >= e[0]) & (column <= e[-1])
        place = torch.searchsorted(e, column.contiguous(), right=True) - 1
        flat = flat * count + place.clamp(0, count - 1)
    weighed = torch.where(inside, 1.0 if weight is None else weight.reshape(-1), 0.0).to(x.dtype)
    made = x.new_zeros(math.prod(shape)).scatter_add_(0, flat, weighed).view(shape)
    if density:
        made = made / made.sum()
        for d, e in enumerate(edges):
            made = made / e.diff().view([-1 if i == d else 1 for i in range(len(shape))])
    return made


def _check(op: Any, x: Tensor, bins: Any, weight: Tensor | None, bounds: list[float] | None = None) -> None:
    """Raises what PyTorch says to arguments that it refuses."""
    each = bins if isinstance(bins, (list, tuple)) else [bins]
    pairs = list(itertools.pairwise(bounds or []))[::2]
    is_fit = all(n.dim() == 1 if isinstance(n, Tensor) else n > 0 for n in each)
    is_fit &= all(math.isfinite(b - a) and a <= b for a, b in pairs)
    if op.name().startswith("aten::_histogramdd") and isinstance(bins, (list, tuple)):
        is_fit &= len(bins) == x.shape[-1]
    points = x.shape if op.name().startswith("aten::histogram.") else x.shape[:-1]
    is_weighed = weight is None or (weight.dtype == x.dtype and weight.shape == points)
    if not is_fit or not is_weighed or x.dtype not in DTYPES:
        raise_as_cpu(op, x, bins, weight=weight, **({} if bounds is None else {"range": bounds}))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@composed("_histogramdd_bin_edges")
def histogramdd_bin_edges(
    self: Tensor,
    bins: list[int],
    *,
    range: list[float] | None = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> list[Tensor]:
    _check(aten._histogramdd_bin_edges.default, self, bins, weight, range)
    return _edges("histogramdd", _rows(self), bins, range)


@composed("_histogramdd_from_bin_cts")
def histogramdd_from_bin_cts(
    self: Tensor, bins: list[int], *, weight: Tensor | None = None, density: bool = False, **bounds: Any
) -> Tensor:
    edges = histogramdd_bin_edges(self, bins, weight=weight, **bounds)
    return _histogram(_rows(self), edges, weight, density)


@composed("_histogramdd_from_bin_tensors")
def histogramdd_from_bin_tensors(
    self: Tensor, bins: list[Tensor], *, weight: Tensor | None = None, density: bool = False
) -> Tensor:
    _check(aten._histogramdd_from_bin_tensors.default, self, bins, weight)
    return _histogram(_rows(self), bins, weight, density)


@composed("histogram.bin_ct")
def histogram_bin_ct(
    self: Tensor,
    bins: int = 100,
    *,
    range: list[float] | None = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> tuple[Tensor, Tensor]:
    _check(aten.histogram.bin_ct, self, bins, weight, range)
    edges = _edges("histogram", self.reshape(-1, 1), [bins], range)
    return _histogram(self.reshape(-1, 1), edges, weight, density), edges[0]


@composed("histogram.bins_tensor")
def histogram_bins_tensor(
    self: Tensor, bins: Tensor, *, weight: Tensor | None = None, density: bool = False
) -> tuple[Tensor, Tensor]:
    _check(aten.histogram.bins_tensor, self, bins, weight)
    return _histogram(self.reshape(-1, 1), [bins], weight, density), bins.clone()
