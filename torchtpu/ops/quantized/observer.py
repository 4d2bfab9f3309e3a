"""The observer of quantization-aware training: fake-quantizes a tensor and updates the range, the scale and the zero
point."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchtpu.ops.registry import composed

aten: Any = torch.ops.aten

LEAST_SCALE = 6.1e-5  # PyTorch widens ranges that ask for a smaller one


@composed("_fused_moving_avg_obs_fq_helper")
def fused_moving_average(
    self: Tensor,
    observer_on: Tensor,
    fake_quant_on: Tensor,
    running_min: Tensor,
    running_max: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row_fake_quant: bool = False,
    symmetric_quant: bool = False,
) -> tuple[Tensor, Tensor]:
    if per_row_fake_quant and running_min.numel() == 0:
        for tensor, start in ((running_min, math.inf), (running_max, -math.inf), (scale, 1), (zero_point, 0)):
            tensor.resize_(self.shape[ch_axis]).fill_(start)
    observes, quantizes = (switch.reshape(()) != 0 for switch in (observer_on, fake_quant_on))
    rows = self.movedim(ch_axis, 0).flatten(1) if per_row_fake_quant else self.reshape(1, -1)
    for running, seen in ((running_min, rows.amin(1)), (running_max, rows.amax(1))):
        seen = seen.view_as(running)
        moved = torch.where(running.isinf(), seen, running + averaging_const * (seen - running))
        running.copy_(torch.where(observes, moved, running))
    found = _parameters(running_min.double(), running_max.double(), quant_min, quant_max, symmetric_quant)
    for tensor, value in zip((scale, zero_point), found, strict=True):
        tensor.copy_(torch.where(quantizes, value.view_as(tensor), tensor))
    if not per_row_fake_quant:
        made: tuple[Tensor, Tensor] = aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
            self, scale, zero_point, fake_quant_on, quant_min, quant_max
        )
        return made
    values, mask = aten.fake_quantize_per_channel_affine_cachemask(
        self, scale, zero_point, ch_axis, quant_min, quant_max
    )
    return torch.where(quantizes, values, self), mask | ~quantizes


def _parameters(low: Tensor, high: Tensor, least: int, most: int, is_symmetric: bool) -> tuple[Tensor, Tensor]:
    """The scale and zero point with which the integers from `least` to `most` stand for the range and for 0."""
    straddles = (low < 0) & (high > 0) & is_symmetric
    half = (most - least) // 2
    reach = torch.maximum((low / (half + 1)).abs(), (high / half).abs())
    low = torch.where(straddles, -reach * (half + 1), low).clamp(max=0).float().double()
    high = torch.where(straddles, reach * half, high).clamp(min=0).float().double()
    scale = (high - low) / (most - least)
    scale = torch.where((scale.float() == 0) | (1 / scale.float()).isinf(), 0.1, scale)
    grown = (LEAST_SCALE / scale).clamp(min=1)
    scale, low, high = scale.clamp(min=LEAST_SCALE), low * grown, high * grown
    from_low, from_high = least - low / scale, most - high / scale
    is_low_nearer = abs(least) - (low / scale).abs() < abs(most) - (high / scale).abs()
    zero = torch.where(is_low_nearer, from_low, from_high)
    zero = torch.where(straddles, (least + most) / 2, zero)
    return scale, zero.clamp(least, most).round()
