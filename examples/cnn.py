"""Trains a small ResNet to read digits in a 5 x 7 dot font, turned, scaled and blurred.

An ordinary PyTorch script (DataLoader workers, BatchNorm, SGD with momentum): `--device cuda` or `--device cpu` run
the same lines.

    python examples/cnn.py
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

# Each digit is seven rows of five dots, one hexadecimal pair a row.
FONT = [
    "0e 11 13 15 19 11 0e", "04 0c 04 04 04 04 0e", "0e 11 01 02 04 08 1f", "1f 02 04 02 01 11 0e",
    "02 06 0a 12 1f 02 02", "1f 10 1e 01 01 11 0e", "06 08 10 1e 11 11 0e", "1f 01 02 04 08 08 08",
    "0e 11 11 0e 11 11 0e", "0e 11 11 0f 01 02 0c",
]  # fmt: skip
SIDE = 28


class Digits(Dataset[tuple[Tensor, int]]):
    """`count` images (1, 28, 28) and their digits; image i is the same in every process and on every run."""

    def __init__(self, count: int, first: int = 0) -> None:
        rows = [[int(row, 16) for row in digit.split()] for digit in FONT]
        self.glyphs = torch.tensor([[[r >> b & 1 for b in (4, 3, 2, 1, 0)] for r in d] for d in rows]).float()
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if i >= self.count:
            raise IndexError(i)
        generator = torch.Generator().manual_seed(self.first + i)
        digit = int(torch.randint(10, (), generator=generator))
        turn, scale, right, down, contrast = torch.rand(5, generator=generator).tolist()
        turn, scale = (turn - 0.5) * 0.8, 1.2 + 0.8 * scale
        cos, sin = math.cos(turn) * scale, math.sin(turn) * scale
        affine = torch.tensor([[[cos, -sin, right - 0.5], [sin, cos, down - 0.5]]])
        grid = F.affine_grid(affine, [1, 1, SIDE, SIDE], align_corners=False)
        glyph = F.pad(self.glyphs[digit][None, None], (2, 2, 1, 1))
        image = F.grid_sample(glyph, grid, align_corners=False)[0] * (0.5 + contrast)
        return image + 0.3 * torch.randn(image.shape, generator=generator), digit


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.body = nn.Sequential(
            ResidualBlock(width, width, 1), ResidualBlock(width, 2 * width, 2), ResidualBlock(2 * width, 2 * width, 1)
        )
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(2 * width, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader[tuple[Tensor, Tensor]], device: str, dtype: torch.dtype) -> float:
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=device)
    for images, digits in loader:
        right += (model(images.to(device, dtype)).argmax(1) == digits.to(device)).sum()
    model.train()
    return right.item() / len(loader.dataset)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="tpu")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--losses", type=Path, help="write the loss of every step to this file")
    a = parser.parse_args()

    torch.manual_seed(a.seed)
    dtype = getattr(torch, a.dtype)
    training = DataLoader(
        Digits(a.steps * a.batch), a.batch, num_workers=a.workers, pin_memory=a.device != "cpu", drop_last=True
    )
    held_out = DataLoader(Digits(512, first=10**9), 128, num_workers=a.workers)
    model = ResNet(a.width, a.dropout).to(a.device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=a.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, a.steps)
    losses = torch.zeros(a.steps, device=a.device, dtype=dtype)

    started = time.perf_counter()
    for step, (images, digits) in enumerate(training):
        images, digits = images.to(a.device, dtype, non_blocking=True), digits.to(a.device, non_blocking=True)
        loss = F.cross_entropy(model(images), digits)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses[step] = loss.detach()
        if step % 25 == 0 or step == a.steps - 1:
            print(f"step {step:4d}  loss {loss.item():.4f}  {time.perf_counter() - started:6.1f} s", flush=True)

    if a.losses:
        a.losses.write_text("\n".join(map(repr, losses.tolist())) + "\n")
    else:
        print(f"{100 * accuracy(model, held_out, a.device, dtype):.1f} % of 512 unseen digits read correctly")


if __name__ == "__main__":
    main()
