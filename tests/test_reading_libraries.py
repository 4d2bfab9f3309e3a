"""Library code that reads values in its loops settles, and every read has its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributions as D
from torch import Tensor, nn
from torch.nn import functional as F
from training_support import scaled_step

from torchtpu import metrics, startup


class Reads:
    """An observer that keeps the line of each read."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def was_read(self, line: str, started: float, seconds: float, nbytes: int) -> None:
        if nbytes:
            self.lines.append(line)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def mlp(out: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, out)).to("tpu")


def batch(seed: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)).to("tpu")


def scaled_training() -> Callable[[int], None]:
    model = mlp(4)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("tpu", init_scale=8.0, growth_interval=2)  # never so large that a step is left out

    def step(i: int) -> None:
        with torch.autocast("tpu", torch.float16):
            loss = F.cross_entropy(model(batch(i)), torch.arange(6, device="tpu") % 4)
        scaled_step(scaler, optimizer, model, loss)

    return step


def clipped_training() -> Callable[[int], None]:
    model = mlp(4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(i: int) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(batch(i)), torch.ones(6, 4, device="tpu")).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()

    return step


def ppo() -> Callable[[int], None]:
    actor, critic = mlp(3), mlp(1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()])

    def step(i: int) -> None:
        states, actions, scores = [], [], []
        with torch.no_grad():
            for t in range(3):
                state = batch(10 * i + t)
                policy = D.Categorical(logits=actor(state), validate_args=True)
                action = policy.sample()
                states.append(state)
                actions.append(action)
                scores.append(policy.log_prob(action))
        state, action, score = torch.cat(states), torch.cat(actions), torch.cat(scores)
        reward = torch.where(action == 0, 1.0, -1.0)
        for _ in range(2):
            policy = D.Categorical(logits=actor(state), validate_args=True)
            value = critic(state).squeeze(-1)
            ratio = (policy.log_prob(action) - score).exp()
            gain = (reward - value).detach()
            loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() + F.mse_loss(value, reward)
            loss = loss - 0.01 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return step


def generation() -> Callable[[int], None]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=40, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).to("tpu").eval()

    def step(i: int) -> None:
        prompt = torch.full((1, 4), i + 1, device="tpu")
        mask = torch.ones_like(prompt)
        model.generate(prompt, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)

    return step


@pytest.mark.parametrize("make", [scaled_training, clipped_training, ppo, generation])
def test_library_code_that_reads_settles(make: Callable[[], Callable[[int], None]]) -> None:
    reads: Any = Reads()
    step = make()
    programs = []
    startup.observe(reads)
    try:
        for i in range(8):
            step(i)
            torch.tpu.synchronize()
            programs.append(metrics.snapshot()["regions_planned"])
    finally:
        startup.stop_observing(reads)
    assert programs[2:] == programs[2:3] * 6
    assert reads.lines, "nothing was read"
    assert all(":" in line for line in reads.lines)
