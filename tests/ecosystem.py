"""Writes docs/ecosystem.md: what each installed library did on `tpu` and on the CPU.

`python tests/ecosystem.py` runs all and writes the page; `python tests/ecosystem.py NAME` runs one and prints JSON.
"""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from regression import prepared, step

PAGE = Path(__file__).resolve().parent.parent / "docs" / "ecosystem.md"
TOLERANCE = 1e-3  # of a loss after some steps, relative

HEAD = """# Frameworks

What libraries of the ecosystem do in plain `python train.py`, on tiny models made from configurations.
`python tests/ecosystem.py` writes this page: it runs each line on the CPU and on `tpu`, there three times.
*equal* says that all losses are the CPU's, to one part in a thousand; *programs* were compiled in the first run,
*later* in the third; *fallbacks* are ops that ran on the CPU instead.
`tests/test_ecosystem.py` runs the same, and `tests/test_frameworks.py` asks how each library finds the device.

| library | version | what ran | equal | programs | later | fallbacks | date |
|---|---|---|---|---|---|---|---|
"""

FOOT = """
transformers, datasets, torchmetrics, diffusers, peft, trl, Ignite and TensorBoard ask PyTorch for the device, which is
`tpu`.
accelerate, Lightning, safetensors and transformers' pipelines and checkpoints have lists of devices of their own.
torchtpu adds to these when they are imported (`torchtpu/compat/`), for the versions that `torchtpu doctor` names.
"""

SUITES = "\n## The libraries' own tests\n"  # the page's second part, which tests/library_suites.py writes


class Program(NamedTuple):
    """One line of the page."""

    library: str
    needs: tuple[str, ...]
    what: str
    run: Callable[[str], list[float]]


def _rows() -> list[dict[str, list[int]]]:
    ids = [[(first + place) % 50 for place in range(16)] for first in range(64)]
    return [{"input_ids": row, "labels": row} for row in ids]


def _llama() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=32, bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def _trainer(device: str) -> list[float]:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=8, per_device_train_batch_size=8, logging_steps=1, report_to=[], learning_rate=1e-2,
            save_strategy="no", disable_tqdm=True, use_cpu=device == "cpu",
        )  # fmt: skip
        trainer = Trainer(_llama(), arguments, train_dataset=_rows())
        trainer.train()
    assert trainer.model.device.type == device
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _generate(device: str) -> list[float]:
    import torch

    prompts = torch.arange(12, device=device).view(3, 4)
    made = _llama().eval().to(device).generate(prompts, max_new_tokens=12, do_sample=False, pad_token_id=0)
    return [float(token) for token in made.flatten().tolist()]


def _adapter(device: str) -> list[float]:
    import torch
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(_llama().to(device), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 1e-2)
    ids = torch.arange(32, device=device).view(4, 8)
    losses = []
    for _ in range(6):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def _accelerator(device: str) -> list[float]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=device == "cpu", gradient_accumulation_steps=2)
    assert accelerator.device.type == device
    model, optimizer, data = prepared(accelerator, 8)
    losses = []
    for _ in range(2):
        for inputs, targets in data:
            with accelerator.accumulate(model):
                losses.append(step(accelerator, model, optimizer, inputs, targets))
    return [loss.item() for loss in losses]


def _lightning(device: str) -> list[float]:
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    losses = []

    class Regression(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

        def training_step(self, batch: Any, index: int) -> Any:
            loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
            losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    torch.manual_seed(0)
    x = torch.randn(64, 8)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 16)
    trainer = Trainer(
        accelerator="cpu" if device == "cpu" else "auto", max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Regression(), data)
    assert trainer.strategy.root_device.type == device
    return [loss.item() for loss in losses]


def _diffusion(device: str) -> list[float]:
    import torch
    from diffusers import DDPMScheduler, UNet2DModel

    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).to(device)  # fmt: skip
    scheduler = DDPMScheduler(num_train_timesteps=10)
    optimizer = torch.optim.AdamW(unet.parameters(), 1e-3)
    images, noise = torch.randn(4, 1, 8, 8).to(device), torch.randn(4, 1, 8, 8).to(device)
    times = torch.arange(4, device=device)
    losses = []
    for _ in range(4):
        noisy = scheduler.add_noise(images, noise, times)
        loss = torch.nn.functional.mse_loss(unet(noisy, times).sample, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def _fine_tuning(device: str) -> list[float]:
    import datasets
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(50)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2")
    rows = [{"text": " ".join(f"w{3 + (first + place) % 40}" for place in range(12))} for first in range(32)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder, max_steps=6, per_device_train_batch_size=4, logging_steps=1, report_to=[], learning_rate=1e-2,
            save_strategy="no", disable_tqdm=True, use_cpu=device == "cpu", bf16=False, max_length=16,
            gradient_checkpointing=False,
        )  # fmt: skip
        trainer = SFTTrainer(
            _llama(), arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _classifier(device: str) -> list[float]:
    import timm
    import torch

    torch.manual_seed(0)
    model = timm.create_model("test_efficientnet", num_classes=4, drop_rate=0.0, drop_path_rate=0.0).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    images, labels = torch.randn(4, 3, 64, 64).to(device), torch.arange(4, device=device)
    losses = []
    for _ in range(4):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def _counted(device: str) -> list[float]:
    import torch
    from torchmetrics import MeanMetric, MetricCollection
    from torchmetrics.classification import (
        MulticlassAccuracy,
        MulticlassAUROC,
        MulticlassConfusionMatrix,
        MulticlassF1Score,
    )

    torch.manual_seed(0)
    counted = MetricCollection(
        [MulticlassAccuracy(5), MulticlassF1Score(5), MulticlassAUROC(5, thresholds=20), MulticlassConfusionMatrix(5)]
    ).to(device)
    mean = MeanMetric().to(device)
    for _ in range(4):
        scores, labels = torch.randn(16, 5).softmax(1).to(device), torch.randint(5, (16,)).to(device)
        counted.update(scores, labels)
        mean.update(scores.amax(1))
    found = {**counted.compute(), "mean": mean.compute()}
    return [float(number) for values in found.values() for number in values.flatten().tolist()]


def _reinforced(device: str) -> list[float]:
    import torch

    torch.manual_seed(0)
    policy = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)).to(device)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    drawing = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(3):
        state, chosen, rewards = torch.full((4,), 0.1), [], []
        for _ in range(8):  # an environment on the CPU, which each action moves
            likelihood = torch.distributions.Categorical(logits=policy(state.to(device)))
            action = int(torch.rand((), generator=drawing) < likelihood.probs[1].item())
            chosen.append(likelihood.log_prob(torch.tensor(action, device=device)))
            state = state.roll(1) * (0.9 if action else -0.5) + 0.1
            rewards.append(state.sum().item())
        returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0).to(device)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        loss = -(torch.stack(chosen) * returns).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _digits(device: str) -> list[float]:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(16 * 5 * 5, 32), nn.ReLU(), nn.Linear(32, 10), nn.LogSoftmax(1),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.Adadelta(model.parameters(), 1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    data = DataLoader(TensorDataset(torch.randn(40, 1, 14, 14), torch.arange(40) % 10), 8)
    losses = []
    for _ in range(2):
        for images, labels in data:
            optimizer.zero_grad()
            loss = nn.functional.nll_loss(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
    model.eval()
    with torch.no_grad():
        right = sum(
            model(images.to(device)).argmax(1, keepdim=True).eq(labels.to(device).view(-1, 1)).sum().item()
            for images, labels in data
        )
    return [*losses, float(right)]


def _acted(device: str) -> list[float]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    trunk, actor, critic = (m.to(device) for m in (nn.Linear(4, 32), nn.Linear(32, 2), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam([*trunk.parameters(), *actor.parameters(), *critic.parameters()], 1e-2)
    drawing = torch.Generator().manual_seed(0)
    losses = []
    for length in (5, 9, 7, 12, 6):  # of episodes
        state, kept, rewards = torch.full((4,), 0.1), [], []
        for _ in range(length):
            features = torch.relu(trunk(state.to(device)))
            likelihood = torch.distributions.Categorical(torch.softmax(actor(features), -1))
            action = int(torch.rand((), generator=drawing) < likelihood.probs[1].item())
            kept.append((likelihood.log_prob(torch.tensor(action, device=device)), critic(features)))
            state = state.roll(1) * (0.9 if action else -0.5) + 0.1
            rewards.append(state.sum().item())
        returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        of_policy = [-chosen * (r - value.item()) for (chosen, value), r in zip(kept, returns, strict=True)]
        of_values = [
            nn.functional.smooth_l1_loss(value, torch.tensor([float(r)], device=device))
            for (_, value), r in zip(kept, returns, strict=True)
        ]
        optimizer.zero_grad()
        loss = torch.stack(of_policy).sum() + torch.stack(of_values).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _language_model(device: str) -> list[float]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    embedding, lstm, head = (m.to(device) for m in (nn.Embedding(50, 32), nn.LSTM(32, 32, 2), nn.Linear(32, 50)))
    parameters = [p for module in (embedding, lstm, head) for p in module.parameters()]
    words = torch.randint(50, (12 * 4 + 6, 4)).to(device)
    state = tuple(torch.zeros(2, 4, 32, device=device) for _ in range(2))
    losses = []
    for start in range(0, len(words) - 1, 12):  # the last rows are fewer
        length = min(12, len(words) - 1 - start)
        state = tuple(part.detach() for part in state)
        made, state = lstm(embedding(words[start : start + length]), state)
        scores = nn.functional.log_softmax(head(made).view(-1, 50), 1)
        loss = nn.functional.nll_loss(scores, words[start + 1 : start + 1 + length].reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.25)
        for p in parameters:
            assert p.grad is not None
            p.data.add_(p.grad, alpha=-2.0)
            p.grad = None
        losses.append(loss.item())
    return losses


def _solved(device: str) -> list[float]:
    """Dormand and Prince's pair of order 5 (J. Comput. Appl. Math. 6, 1980), its steps as large as the error allows."""
    import torch
    from torch import Tensor, nn

    stages = (
        (1 / 5,), (3 / 40, 9 / 40), (44 / 45, -56 / 15, 32 / 9),
        (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
        (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
        (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
    )  # fmt: skip
    errors = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)
    torch.manual_seed(0)
    field = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)).double().to(device)
    optimizer = torch.optim.RMSprop(field.parameters(), 1e-2)

    def solve(y: Tensor, end: float) -> Tensor:
        t, h = 0.0, 0.1
        while t < end:
            h = min(h, end - t)
            slopes = [field(y)]
            for row in stages:
                reached = y + h * sum(a * k for a, k in zip(row, slopes, strict=True) if a)
                slopes.append(field(reached))
            error = (h * sum(e * k for e, k in zip(errors, slopes, strict=True) if e)).abs().max().item()
            if error <= 1e-5:
                y, t = reached, t + h
            h *= min(5.0, max(0.2, 0.9 * (1e-5 / max(error, 1e-12)) ** 0.2))
        return y

    losses = []
    for lap in range(5):
        start = torch.linspace(-1, 1, 12, dtype=torch.double).reshape(6, 2).to(device) * (1 + 0.1 * lap)
        loss = (solve(start, 1.0) - 0.5 * start.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _graphs(device: str) -> list[float]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = nn.ModuleList(
        nn.Sequential(nn.Linear(n, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16)) for n in (8, 16)
    ).to(device)
    head = nn.Linear(16, 2).to(device)
    optimizer = torch.optim.Adam([*layers.parameters(), *head.parameters()], 1e-2)
    losses = []
    for _ in range(8):  # batches of graphs, each of other sizes
        sizes = torch.randint(4, 12, (6,))
        nodes = int(sizes.sum())
        edges = torch.randint(nodes, (2, 2 * nodes + int(sizes[0]))).to(device)
        graph_of = torch.repeat_interleave(torch.arange(6), sizes).to(device)
        x, labels = torch.randn(nodes, 8).to(device), torch.randint(2, (6,)).to(device)
        for layer in layers:
            x = layer(x + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])).relu()
        pooled = torch.zeros(6, 16, device=device).index_add(0, graph_of, x)
        loss = nn.functional.cross_entropy(head(pooled), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _sampled(device: str) -> list[float]:
    """Deep Q-learning: half of the actions that are replayed are views of what the network chose."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    dice, state = random.Random(0), torch.randn(4)
    net, target = (nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).to(device) for _ in range(2))
    target.load_state_dict(net.state_dict())
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, amsgrad=True)
    replayed: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]] = []
    losses = []
    for _ in range(40):
        observed = state.tolist()
        here = torch.tensor(observed, device=device).unsqueeze(0)
        if dice.random() < 0.5:
            with torch.no_grad():
                action = net(here).max(1).indices.view(1, 1)
        else:
            action = torch.tensor([[dice.randrange(2)]], device=device)
        state = state.roll(1) * (0.9 if action.item() else -0.5) + 0.1 * torch.randn(4)
        there = None if dice.random() < 0.1 else torch.tensor(state.tolist(), device=device).unsqueeze(0)
        replayed.append((here, action, there, torch.tensor([observed[0]], device=device)))
        if len(replayed) < 8:
            continue
        states, actions, following, rewards = zip(*dice.sample(replayed, 8), strict=True)
        goes_on = torch.tensor([s is not None for s in following], device=device)
        chosen = net(torch.cat(states)).gather(1, torch.cat(actions))
        worth = torch.zeros(8, device=device)
        with torch.no_grad():
            worth[goes_on] = target(torch.cat([s for s in following if s is not None])).max(1).values
        expected = (worth * 0.99 + torch.cat(rewards)).unsqueeze(1)
        loss = nn.functional.smooth_l1_loss(chosen, expected)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(net.parameters(), 100)
        optimizer.step()
        own, theirs = net.state_dict(), target.state_dict()
        target.load_state_dict({name: own[name] * 0.005 + theirs[name] * 0.995 for name in own})
        losses.append(loss.item())
    return losses


def _linked(device: str) -> list[float]:
    """A graph convolution whose loops are taken out and put back, as PyG's add_remaining_self_loops does."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    first, second = nn.Linear(5, 16).to(device), nn.Linear(16, 2).to(device)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], 1e-2)
    losses = []
    for _ in range(16):
        nodes = int(torch.randint(8, 30, ()))
        edges = torch.randint(nodes, (2, 3 * nodes)).to(device)
        x, labels = torch.randn(nodes, 5).to(device), torch.randint(2, (nodes,)).to(device)
        all_nodes = torch.arange(nodes, device=device)
        edges = torch.cat([edges[:, edges[0] != edges[1]], torch.stack([all_nodes, all_nodes])], 1)
        degrees = torch.zeros(nodes, device=device).index_add(0, edges[1], torch.ones(edges.shape[1], device=device))
        weights = degrees.rsqrt()[edges[0]] * degrees.rsqrt()[edges[1]]
        for layer in (first, second):
            made = layer(x if layer is first else x.relu())
            x = torch.zeros_like(made).index_add(0, edges[1], made[edges[0]] * weights[:, None])
        loss = nn.functional.cross_entropy(x, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _private(device: str) -> list[float]:
    import torch
    from torch import nn
    from torch.func import functional_call, grad, vmap

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 5 * 5, 5)).to(device)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    images, labels = torch.randn(200, 1, 14, 14), torch.randint(5, (200,))

    def loss_of(given: dict[str, torch.Tensor], image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(model, given, (image[None],)), label[None])

    losses = []
    for _ in range(8):
        drawn = (torch.rand(200) < 0.1).nonzero()[:, 0]  # as many as it happens
        grads = vmap(grad(loss_of), (None, 0, 0))(parameters, images[drawn].to(device), labels[drawn].to(device))
        norms = sum(g.flatten(1).square().sum(1) for g in grads.values()).sqrt()
        shares = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, g in grads.items():
            noise = torch.randn(parameters[name].shape).to(device)
            parameters[name] = parameters[name] - 0.05 * (torch.einsum("b,b...->...", shares, g) + 0.1 * noise) / 20
        losses.append(norms.mean().item())
    return losses


def _written(device: str) -> list[float]:
    import torch
    from torch import nn
    from torch.nn.functional import gelu, scaled_dot_product_attention

    torch.manual_seed(0)
    make = lambda *sizes: nn.Linear(*sizes).to(device)
    layers = [(nn.LayerNorm(32).to(device), make(32, 96), make(32, 32), make(32, 64), make(64, 32)) for _ in range(3)]
    table, places, head = nn.Embedding(40, 32).to(device), nn.Embedding(64, 32).to(device), make(32, 40)
    made = []
    for _ in range(2):
        tokens = torch.zeros(1, 1, dtype=torch.long, device=device)
        with torch.no_grad():
            for _ in range(24):  # none of them is read
                x = table(tokens) + places(torch.arange(tokens.size(1), device=device))
                for norm, qkv, out, up, down in layers:
                    heads = (part.unflatten(2, (4, 8)).transpose(1, 2) for part in qkv(norm(x)).split(32, 2))
                    x = x + out(scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
                    x = x + down(gelu(up(norm(x))))
                scores = head(x[:, [-1]])[:, -1]
                least, _ = torch.topk(scores, 5)
                scores[scores < least[:, [-1]]] = -torch.inf
                tokens = torch.cat([tokens, torch.softmax(scores, -1).argmax(-1, keepdim=True)], 1)
        made += [float(token) for token in tokens[0].tolist()]
    return made


PROGRAMS = {
    "trainer": Program("transformers", ("accelerate",), "Trainer, a Llama of 2 layers, 8 steps", _trainer),
    "generate": Program("transformers", (), "generate, greedy, 12 tokens", _generate),
    "accelerator": Program("accelerate", (), "Accelerator, gradient accumulation, clipping, 16 batches", _accelerator),
    "lightning": Program("lightning", (), 'Trainer, accelerator="auto", 8 steps', _lightning),
    "adapter": Program("peft", ("transformers",), "LoRA on a Llama of 2 layers, 6 steps", _adapter),
    "fine_tuning": Program("trl", ("transformers", "datasets"), "SFTTrainer, 6 steps", _fine_tuning),
    "diffusion": Program("diffusers", (), "a UNet with attention, 4 training steps", _diffusion),
    "classifier": Program("timm", ("torchvision",), "a small EfficientNet, 4 training steps", _classifier),
    "counted": Program("torchmetrics", (), "a collection of four metrics and a mean, 4 batches", _counted),
    "reinforced": Program("torch", (), "REINFORCE as in pytorch/examples, 3 episodes of 8 actions", _reinforced),
    "acted": Program("torch", (), "actor and critic as in pytorch/examples, 5 episodes of 5 to 12 actions", _acted),
    "language_model": Program(
        "torch", (), "the LSTM of word_language_model of pytorch/examples, 5 steps", _language_model
    ),
    "solved": Program("torch", (), "an ODE solved by dopri5, in double precision, 5 training steps", _solved),
    "graphs": Program("torch", (), "a graph isomorphism network, 8 batches of other sizes", _graphs),
    "linked": Program("torch", (), "a graph convolution that selects edges by a mask, 16 graphs", _linked),
    "sampled": Program("torch", (), "deep Q-learning from a replay buffer, 33 steps", _sampled),
    "private": Program("torch", (), "DP-SGD with Poisson sampling, 8 steps", _private),
    "written": Program("torch", (), "a GPT of 3 layers, twice 24 tokens without a read", _written),
    "digits": Program("torch", (), "the MNIST example of pytorch/examples on random images, 2 epochs", _digits),
}


def is_installed(name: str) -> bool:
    """Whether a program's libraries are there."""
    program = PROGRAMS[name]
    return all(importlib.util.find_spec(library) is not None for library in (program.library, *program.needs))


def measure(name: str) -> dict[str, Any]:
    """Runs a program on the CPU and on tpu in this process."""
    import torch

    from torchtpu import metrics

    run = PROGRAMS[name].run
    expected = run("cpu")
    metrics.reset()
    found, programs = [], []
    for _ in range(3):
        before = metrics.snapshot()["programs_compiled"]
        found.append(run("tpu"))
        torch.tpu.synchronize()
        programs.append(metrics.snapshot()["programs_compiled"] - before)
    pairs = [pair for losses in found for pair in zip(losses, expected, strict=True)]
    return {
        "distance": max(abs(a - b) / max(abs(b), 1e-6) for a, b in pairs),
        "programs": programs[0],
        "later": programs[-1],
        "fallbacks": metrics.snapshot()["cpu_fallbacks"],
    }


def measured(name: str) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, name]
    paths = (str(Path(__file__).parent / "site"), os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "TORCHTPU_CACHE": "off", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _line(name: str) -> str:
    program, found = PROGRAMS[name], measured(name)
    equal = "yes" if found["distance"] <= TOLERANCE else f"no, {found['distance']:.1g}"
    fallbacks = ", ".join(found["fallbacks"]) or "0"
    version, today = importlib.metadata.version(program.library), dt.datetime.now(dt.UTC).date()
    cells = (program.library, version, program.what, equal, found["programs"], found["later"], fallbacks, today)
    return f"| {' | '.join(map(str, cells))} |\n"


def _write(programs: str, suites: str) -> None:
    PAGE.write_text(programs + SUITES + suites)


def write_programs(text: str) -> None:
    """Writes the page's first part."""
    _write(text, PAGE.read_text().partition(SUITES)[2])


def write_suites(text: str) -> None:
    """Writes the page's second part."""
    _write(PAGE.read_text().partition(SUITES)[0], text)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
    else:
        write_programs(HEAD + "".join(_line(name) for name in PROGRAMS if is_installed(name)) + FOOT)
