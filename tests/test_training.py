"""Training loops as users write them give the CPU's numbers, and compile no new program once they are warm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training_support import scaled_step

from torchtpu import metrics

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p, **k: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-2, **k),
    "Adam": lambda p, **k: torch.optim.Adam(p, 1e-2, amsgrad=True, **k),
    "AdamW": lambda p, **k: torch.optim.AdamW(p, 1e-2, **k),
    "Adagrad": lambda p, **k: torch.optim.Adagrad(p, 1e-2, **k),
    "RMSprop": lambda p, **k: torch.optim.RMSprop(p, 1e-2, momentum=0.5, centered=True, **k),
    "Adadelta": lambda p, **k: torch.optim.Adadelta(p, 1.0, **k),
    "Adamax": lambda p, **k: torch.optim.Adamax(p, 1e-2, **k),
    "NAdam": lambda p, **k: torch.optim.NAdam(p, 1e-2, **k),
    "RAdam": lambda p, **k: torch.optim.RAdam(p, 1e-2, **k),
    "Rprop": lambda p, **k: torch.optim.Rprop(p, 1e-2, **k),
    "ASGD": lambda p, **k: torch.optim.ASGD(p, 1e-2, **k),
}
FORMS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
FUSED = ("SGD", "Adam", "AdamW")


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


def batches(count: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(6, 8, generator=generator)
        y = torch.randint(4, (6,), generator=generator)
        yield x.to(device), y.to(device)


def train(
    device: str,
    make_optimizer: Callable[..., torch.optim.Optimizer],
    steps: int = 8,
    after_backward: Callable[[nn.Module], Any] = lambda _: None,
) -> tuple[list[float], list[Tensor]]:
    """Losses and final parameters."""
    model = mlp().to(device)
    optimizer = make_optimizer(model.parameters())
    losses = []
    for x, y in batches(steps, device):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        after_backward(model)
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().cpu() for p in model.parameters()]


def assert_trains_as_on_cpu(make_optimizer: Callable[..., torch.optim.Optimizer], **arguments: Any) -> None:
    expected = train("cpu", make_optimizer, **arguments)
    torch.testing.assert_close(train("tpu", make_optimizer, **arguments), expected, rtol=1e-4, atol=1e-5)


def programs_compiled() -> int:
    torch.tpu.synchronize()
    return int(metrics.snapshot()["programs_compiled"])


@pytest.mark.parametrize(
    ("name", "form"), [(n, f) for n in OPTIMIZERS for f in FORMS if f != "fused" or n in FUSED], ids=str
)
def test_an_optimizer_steps_as_on_the_cpu(name: str, form: str) -> None:
    assert_trains_as_on_cpu(lambda p: OPTIMIZERS[name](p, **FORMS[form]))


class Named(torch.optim.Optimizer):
    """One that keeps states for names beside those for parameters, and counts the steps of a part of these."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state.setdefault("count", torch.zeros(()))
        self.state["count"] += 1
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                own = self.state[parameter]
                own.setdefault("average", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.3)
                if number % 2 == 0:
                    own["step"] = own.get("step", torch.zeros(())) + 1
                parameter.sub_(own["average"], alpha=group["lr"] / float(self.state["count"]))


def test_an_optimizer_that_keeps_states_for_names_steps_as_on_the_cpu() -> None:
    assert_trains_as_on_cpu(Named)


@pytest.mark.parametrize(
    "clip",
    [
        lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05),
        lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05, norm_type=float("inf"), foreach=False),
        lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01),
    ],
    ids=["norm", "inf-norm", "value"],
)
def test_clipped_gradients_equal_the_cpu(clip: Callable[[nn.Module], Any]) -> None:
    assert_trains_as_on_cpu(lambda p: torch.optim.SGD(p, 0.5), after_backward=clip)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize("form", FORMS)
def test_a_schedule_compiles_nothing_once_warm(name: str, form: str) -> None:
    model = mlp().to("tpu")
    optimizer = OPTIMIZERS[name](model.parameters(), **FORMS[form])
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50),
    ]
    warm = 0
    for step, (x, y) in enumerate(batches(16, "tpu")):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        if step == 4:
            warm = programs_compiled()
    assert programs_compiled() == warm


def test_a_new_learning_rate_every_step_compiles_at_most_four_programs() -> None:
    model = mlp().to("tpu")
    parameters = list(model.parameters())
    data = next(batches(1, "tpu"))
    torch.tpu.synchronize()
    before = programs_compiled()
    for step in range(12):
        loss = F.cross_entropy(model(data[0]), data[1])
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p.add_(g, alpha=-0.1 / (step + 1))
        loss.item()
    assert programs_compiled() - before <= 4


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).tanh())


def test_tied_weights_stay_tied_and_train_as_on_the_cpu() -> None:
    ids = torch.arange(10)
    final = []
    for device in ("cpu", "tpu"):
        torch.manual_seed(0)
        model = Tied().to(device)
        assert model.head.weight is model.embedding.weight
        assert len(list(model.parameters())) == 1
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(5):
            optimizer.zero_grad()
            F.cross_entropy(model(ids.to(device)), ids.roll(1).to(device)).backward()
            optimizer.step()
        final.append(model.head.weight.detach().cpu())
    torch.testing.assert_close(final[1], final[0], rtol=1e-4, atol=1e-5)


def test_an_optimizer_built_before_the_move_still_updates_the_model() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.to("tpu")
    before = model[0].weight.detach().cpu().clone()
    model(torch.ones(2, 8, device="tpu")).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight.detach().cpu(), before)


def test_a_wgan_gp_step_equals_the_cpu() -> None:
    """The gradient penalty differentiates through a gradient."""
    found = []
    for device in ("cpu", "tpu"):
        torch.manual_seed(0)
        critic = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64, 1))
        generator = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Unflatten(1, (1, 4, 4)))
        real, noise, mix = torch.randn(3, 1, 4, 4), torch.randn(3, 5), torch.rand(3, 1, 1, 1)
        critic, generator = critic.to(device), generator.to(device)
        real, noise, mix = real.to(device), noise.to(device), mix.to(device)
        optimizer = torch.optim.Adam(critic.parameters(), 1e-3, betas=(0.0, 0.9))
        losses = []
        for _ in range(3):
            fake = generator(noise).detach()
            between = (mix * real + (1 - mix) * fake).requires_grad_()
            (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = ((gradient.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
            loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_replays_the_dropout_it_recomputes(use_reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 1)).to("tpu")
    gradients = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=use_reentrant)):
        x = torch.linspace(-1, 1, 64, device="tpu").view(8, 8).requires_grad_()
        torch.manual_seed(3)
        run(x).sum().backward()
        gradients.append(x.grad.cpu())
    assert torch.equal(gradients[0], gradients[1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}], ids=str)
def test_a_recurrent_module_equals_the_cpu(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = kind(3, 5, **options)
    x = torch.randn(4, 2, 3)
    results = []
    for device in ("cpu", "tpu"):
        moved = module.to(device)
        y, state = moved(x.to(device))
        gradients = torch.autograd.grad(y.square().sum(), list(moved.parameters()))
        states = state if isinstance(state, tuple) else (state,)
        results.append([t.detach().cpu() for t in (y, *states, *gradients)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_a_grad_scaler_trains(dtype: torch.dtype) -> None:
    model = mlp().to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("tpu", init_scale=256.0)
    x, y = next(batches(1, "tpu"))
    losses = []
    for _ in range(10):
        with torch.autocast("tpu", dtype=dtype):
            hidden = model[0](x)
            assert hidden.dtype == dtype
            scores = model[3](model[2](model[1](hidden)))
            loss = F.cross_entropy(scores, y)
        assert loss.dtype == torch.float32
        scaled_step(scaler, optimizer, model, loss)
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_grad_scaler_skips_the_step_after_an_overflow() -> None:
    model = mlp().to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("tpu", init_scale=1024.0)
    before = model[0].weight.detach().clone()
    loss = model(torch.ones(2, 8, device="tpu")).sum() * float("inf")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert torch.equal(model[0].weight, before)


def test_gradient_accumulation_equals_one_large_batch() -> None:
    x, y = torch.randn(8, 8), torch.arange(8) % 4
    model = mlp().to("tpu")
    F.cross_entropy(model(x.to("tpu")), y.to("tpu")).backward()
    whole = [p.grad.cpu() for p in model.parameters()]
    model.zero_grad()
    for part in range(4):
        rows = slice(2 * part, 2 * part + 2)
        (F.cross_entropy(model(x[rows].to("tpu")), y[rows].to("tpu")) / 4).backward()
    torch.testing.assert_close([p.grad.cpu() for p in model.parameters()], whole, rtol=1e-4, atol=1e-6)


def test_lbfgs_minimises_with_a_closure() -> None:
    point = torch.tensor([-1.5, 2.0], device="tpu", requires_grad=True)
    optimizer = torch.optim.LBFGS([point], max_iter=40, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (1 - point[0]) ** 2 + 10 * (point[1] - point[0] ** 2) ** 2
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(point.detach().cpu(), torch.ones(2), rtol=1e-3, atol=1e-3)


def test_an_averaged_model_follows_the_parameters() -> None:
    model = mlp().to("tpu")
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    first = model[0].weight.detach().cpu().clone()
    average.update_parameters(model)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    average.update_parameters(model)
    torch.testing.assert_close(average.module[0].weight.detach().cpu(), first + 0.5)


def test_batch_norm_keeps_its_running_statistics() -> None:
    x = torch.randn(16, 3, 4, 4)
    states = []
    for device in ("cpu", "tpu"):
        norm = nn.BatchNorm2d(3).to(device)
        for _ in range(3):
            norm(x.to(device))
        norm.eval()
        states.append([norm(x.to(device)).detach().cpu(), *(v.cpu() for v in norm.state_dict().values())])
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("needed", [[False, True, True], [True, False, True], [True, True, True]])
def test_batch_norm_has_the_gradients_that_are_asked_for_and_no_others(needed: list[bool]) -> None:
    """The input of a model whose first layer it is asks for none."""
    x = torch.randn(6, 3, 4, 5).permute(0, 1, 3, 2)
    found = []
    for device in ("cpu", "tpu"):
        norm = nn.BatchNorm2d(3).to(device)
        tensors = [x.to(device, copy=True).requires_grad_(needed[0]), norm.weight, norm.bias]
        for parameter, wanted in zip(tensors[1:], needed[1:], strict=True):
            parameter.requires_grad_(wanted)
        (norm(tensors[0]) ** 3).mean().backward()
        found.append([None if (g := t.grad) is None else (g.stride(), g.cpu().clone()) for t in tensors])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
