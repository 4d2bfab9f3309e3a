"""The workloads' training steps as a PyTorch user writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        q, k, v = self._split(x)
        return self._finish(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def decode(self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        """One token; its key and value enter the caches."""
        q, k, v = self._split(x)
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        return self._finish(x, F.scaled_dot_product_attention(q, keys, values, attn_mask=mask))

    def _split(self, x: Tensor) -> list[Tensor]:
        batch, length, width = x.shape
        return [
            t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for t in self.qkv(self.ln1(x)).split(width, dim=2)
        ]

    def _finish(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.proj(y.transpose(1, 2).contiguous().view(x.shape))
        return x + self.out(F.gelu(self.fc(self.ln2(x))))


class GPT(nn.Module):
    def __init__(
        self, vocabulary: int = 1000, width: int = 256, heads: int = 4, layers: int = 4, length: int = 128
    ) -> None:
        super().__init__()
        self.token_embedding, self.position_embedding = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.lnf, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.token_embedding(ids) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.lnf(x))

    def decode(self, token: Tensor, position: Tensor, caches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """The scores of what follows one token of each sequence."""
        x = self.token_embedding(token) + self.position_embedding(position)
        mask = (torch.arange(self.position_embedding.num_embeddings, device=token.device) <= position)[None]
        for block, (keys, values) in zip(self.blocks, caches, strict=True):
            x = block.decode(x, keys, values, position, mask)
        return self.head(self.lnf(x))


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.down = None
        if stride != 1:
            self.down = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.down is None else self.down(x)))


class ResNet18(nn.Module):
    def __init__(self, classes: int = 100) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        widths = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2))
        self.layers = nn.Sequential(*[ResidualBlock(*width) for width in (*widths, (512, 512, 1))])
        self.fc = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        return self.fc(self.layers(x).mean((2, 3)))


def make_model(workload: str, device: str) -> nn.Module:
    """The workload's model with the numbers that every backend has."""
    if workload in ("gpt2", "gpt2-short"):
        dtype = torch.bfloat16 if workload == "gpt2" else torch.float32
        model: nn.Module = GPT(50304, 768, 12, 12, 1024).to(dtype)
    else:
        model = {"w3": GPT, "w4": ResNet18, "decode": GPT}.get(workload, MLP)()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(data.parameter(name, tuple(parameter.shape))))
    return model.to(device)


def build_decode(device: str) -> Callable[[int], Tensor]:
    """step(i) returns the scores after one more token of each sequence, unread."""
    model = make_model("decode", device)
    token, position = (torch.from_numpy(array).to(device) for array in data.tokens())
    caches = [tuple(torch.zeros(8, 4, 128, 64, device=device) for _ in range(2)) for _ in model.blocks]

    def step(i: int) -> Tensor:
        with torch.no_grad():
            return model.decode(token, position, caches)

    return step


def build(workload: str, device: str, *, is_compiled: bool = False, copies: int = 1) -> Callable[[int], Tensor]:
    """step(i) trains once, on so many copies of the batch, and returns the loss, unread."""
    model = make_model(workload, device)
    x, y = (torch.cat([torch.from_numpy(array)] * copies).to(device) for array in data.batch(workload))
    parameters = list(model.parameters())

    def loss_of() -> Tensor:
        scores = model(x)
        return F.cross_entropy(scores.view(-1, scores.shape[-1]), y.view(-1))

    if is_compiled:
        loss_of = torch.compile(loss_of)
    if workload == "w8":

        def step(i: int) -> Tensor:
            loss = loss_of()
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.add_(gradient, alpha=-data.learning_rate(i))
            return loss.detach()

        return step
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, 1e-3)
    if workload == "w4":
        optimizer = torch.optim.SGD(parameters, 0.01, momentum=0.9)

    def optimizer_step(i: int) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return optimizer_step
