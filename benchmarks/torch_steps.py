"""In: a workload and a device string. Out: its training step, written as a PyTorch user writes it."""

from __future__ import annotations

from collections.abc import Callable

import data
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MLP(nn.Module):
    def __init__(self, width: int = 256, outputs: int = 10) -> None:
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.l3(F.relu(self.l2(F.relu(self.l1(x)))))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for t in self.qkv(self.ln1(x)).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(batch, length, width))
        return x + self.out(F.gelu(self.fc(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 1000, width: int = 256, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.token_embedding, self.position_embedding = nn.Embedding(vocabulary, width), nn.Embedding(128, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.lnf, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.token_embedding(ids) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.lnf(x))


def build(workload: str, device: str) -> Callable[[int], Tensor]:
    """step(i) trains once and returns the loss, unread."""
    model = GPT() if workload == "w3" else MLP()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(data.parameter(name, tuple(parameter.shape))))
    model = model.to(device)
    x, y = (torch.from_numpy(array).to(device) for array in data.batch(workload))
    parameters = list(model.parameters())

    def loss_of() -> Tensor:
        scores = model(x)
        return F.cross_entropy(scores.view(-1, scores.shape[-1]), y.view(-1))

    if workload == "w8":

        def step(i: int) -> Tensor:
            loss = loss_of()
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.add_(gradient, alpha=-data.learning_rate(i))
            return loss.detach()

        return step
    optimizer = torch.optim.AdamW(parameters, 1e-3)

    def adamw_step(i: int) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return adamw_step
