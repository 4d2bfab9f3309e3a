"""Images and signals of ever other sizes: layers compute what the CPU computes, in programs that all sizes share."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtpu import metrics

Layer = Callable[[Tensor], Tensor]

LAPS = 14
SETTLED = 9  # laps after which nothing new is compiled

LAYERS: dict[str, Layer] = {
    "max pool": nn.MaxPool2d(2),
    "max pool, overlapping": nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    "average pool": nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
    "average pool of large windows": nn.AvgPool2d(9, 3, 4),
    "power pool": nn.LPPool2d(2, 3, 2),
    "adaptive pool": nn.AdaptiveAvgPool2d((3, 5)),
    "convolution with a stride": nn.Conv2d(4, 6, 3, 2, 1, groups=2),
    "convolution with holes": nn.Conv2d(4, 6, 3, 1, 2, dilation=2),
    "depthwise convolution": nn.Conv2d(4, 4, 5, 2, 2, groups=4),
    "transposed convolution": nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1),
    "batch norm": nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU()),
    "nearest pixels": lambda x: F.interpolate(x, size=(x.shape[2] + 5, x.shape[3] * 2)),
    "nearest exact": lambda x: F.interpolate(x, size=(20, x.shape[3] - 7), mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"),
    "bilinear, corners aligned": lambda x: F.interpolate(
        x, size=(x.shape[2] * 2, 17), mode="bilinear", align_corners=True
    ),
    "bicubic": lambda x: F.interpolate(x, size=(x.shape[2] * 2, x.shape[3] + 3), mode="bicubic"),
    "reflected pad": lambda x: F.pad(x, (1, 2, 3, 1), mode="reflect"),
    "circular pad": lambda x: F.pad(x, (1, 2, 3, 1), mode="circular"),
    "patches": lambda x: F.unfold(x, 3, padding=1, stride=2),
    "patches put together": lambda x: F.fold(F.unfold(x, 2), x.shape[2:], 2),
}


def test_signals_of_ever_other_lengths_share_programs() -> None:
    dice, programs = random.Random(0), []
    for _ in range(LAPS):
        x = torch.randn(2, dice.randint(300, 500))
        for t, made in ((x.to("tpu"), found := []), (x, expected := [])):
            window = torch.hann_window(16, device=t.device)
            made += [torch.stft(t, 16, 5, window=window, return_complex=True).abs(), t.unfold(1, 8, 3).amax(-1)]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)
        programs.append(metrics.snapshot()["programs_compiled"])
    assert programs[-1] == programs[SETTLED], programs


@pytest.mark.parametrize("name", LAYERS)
def test_images_of_ever_other_sizes_share_programs(name: str) -> None:
    dice = random.Random(0)
    torch.manual_seed(0)
    on_cpu = copy.deepcopy(LAYERS[name])
    on_tpu = copy.deepcopy(on_cpu).to("tpu") if isinstance(on_cpu, nn.Module) else on_cpu
    programs = []
    for _ in range(LAPS):
        x = torch.randn(dice.randint(2, 3), 4, dice.randint(17, 27), dice.randint(17, 27))
        sent = x.to("tpu").requires_grad_()
        expected, found = on_cpu(x.requires_grad_()), on_tpu(sent)
        (expected * expected.detach().sin()).sum().backward()
        (found * found.detach().sin()).sum().backward()
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(sent.grad.cpu(), x.grad, rtol=1e-4, atol=1e-4)
        programs.append(metrics.snapshot()["programs_compiled"])
    if isinstance(on_cpu, nn.Module) and isinstance(on_tpu, nn.Module):
        for mine, theirs in zip(on_tpu.parameters(), on_cpu.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-3)
    assert programs[-1] == programs[SETTLED], programs


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_a_factor_that_leaves_a_size_as_it_is_copies_where_pytorch_does(mode: str) -> None:
    """Of one size and of both, known and changing."""
    for height, width in ((3, 3), (3, 7), (7, 3), (3, 11), (9, 3)):
        x = torch.rand(2, 3, height, width, dtype=torch.float64)
        results = []
        for given in (x, x.to("tpu")):
            leaf = given.clone().requires_grad_()
            made = F.interpolate(leaf, scale_factor=1.3, mode=mode)
            (made * made.detach().sin()).sum().backward()
            assert leaf.grad is not None
            results.append((made.detach().cpu(), leaf.grad.cpu()))
        for found, expected in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_position_is_at_the_same_pixel_wherever_it_is_computed_again() -> None:
    """Positions that are whole numbers but for how they are rounded, read and weighed in several loops of a program."""
    for height, width in ((27, 29), (5, 19), (35, 34), (9, 19), (12, 9)):
        x = torch.rand(2, 3, height, width, dtype=torch.float64)
        grids = [
            F.affine_grid(torch.eye(2, 3, dtype=x.dtype)[None].expand(2, 2, 3), list(x.shape), a) for a in (False, True)
        ]
        results = []
        for device in ("cpu", "tpu"):
            leaf = x.to(device).detach().requires_grad_()
            made = [F.interpolate(leaf, (width, height), mode=mode) for mode in ("bilinear", "bicubic")]
            made += [F.interpolate(leaf, scale_factor=1.5, mode=mode) for mode in ("bilinear", "bicubic")]
            made += [
                F.grid_sample(leaf, grid.to(device), mode, "border", align_corners=bool(aligned))
                for aligned, grid in enumerate(grids)
                for mode in ("bilinear", "bicubic")
            ]
            torch.stack([(each * each).sum() for each in made]).sum().backward()
            assert leaf.grad is not None
            results.append([t.detach().cpu() for t in (*made, leaf.grad)])
        for found, expected in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
