"""What scripts written for CUDA do around their models gives what it gives on the CPU."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest
import torch
import torch.distributions as D
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.optim import lr_scheduler, swa_utils
from torch.overrides import TorchFunctionMode
from torch.profiler import profile, record_function
from torch.utils._pytree import tree_map
from torch.utils.benchmark import Timer
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, checkpoint_sequential
from torch.utils.checkpoint import create_selective_checkpoint_contexts as selective
from torch.utils.data import DataLoader, TensorDataset

from torchtpu import metrics


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def gradients(*modules: nn.Module) -> list[Tensor]:
    return [p.grad for module in modules for p in module.parameters() if p.grad is not None]


def assert_as_on_cpu(function: Callable[[str], Any], rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Values, dtypes and strides; and no op ran on the CPU."""

    def found(device: str) -> Any:
        return tree_map(lambda x: x.detach().cpu() if isinstance(x, Tensor) else x, function(device))

    made = found("tpu")
    assert metrics.snapshot()["cpu_fallbacks"] == {}
    torch.testing.assert_close(made, found("cpu"), rtol=rtol, atol=atol, check_stride=True)


def per_sample_gradients(device: str) -> Any:
    model, x, y = mlp().to(device), values(6, 8).to(device), (torch.arange(6) % 4).to(device)

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x[None],)), y[None])

    return torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(dict(model.named_parameters()), x, y)


def model_ensemble(device: str) -> Any:
    models = [mlp().to(device) for _ in range(3)]
    state = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    call = lambda p, b, x: torch.func.functional_call(base, (p, b), (x,))
    return torch.func.vmap(call, (0, 0, None))(*state, values(5, 8).to(device))


def jacobians(device: str) -> Any:
    weight, x = values(4, 3).to(device), values(4, seed=1).to(device)
    function = lambda x: torch.tanh(x @ weight)
    pull = torch.func.vjp(function, x)[1](torch.ones(3, device=device))
    return torch.func.jacrev(function)(x), torch.func.jacfwd(function)(x), pull


def normalised_weights(device: str) -> Any:
    torch.manual_seed(0)
    modules = [
        parametrizations.weight_norm(nn.Linear(5, 4)).to(device),
        parametrizations.orthogonal(nn.Linear(4, 4)).to(device),
        parametrizations.spectral_norm(nn.Linear(4, 4)).to(device),
        nn.utils.spectral_norm(nn.Linear(4, 4)).to(device),
    ]
    y = nn.Sequential(*modules)(values(3, 5).to(device))
    y.square().sum().backward()
    return y, gradients(*modules)


def pruned_weights(device: str) -> Any:
    model = mlp().to(device)
    prune.l1_unstructured(model[0], "weight", 0.4)
    prune.ln_structured(model[2], "weight", 0.5, n=2, dim=0)
    model(values(3, 8).to(device)).sum().backward()
    masks = model[0].weight_mask, model[2].weight_mask
    prune.remove(model[0], "weight")
    return masks, gradients(model), model[0].weight


def parameters_as_a_vector(device: str) -> Any:
    model = mlp().to(device)
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())
    return vector, model[2].weight


def averaged_weights(device: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    average, schedule = swa_utils.AveragedModel(model), swa_utils.SWALR(optimizer, 0.05, anneal_epochs=3)
    data = [values(6, 8, seed=i).to(device) for i in range(3)]
    for x in data:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
        schedule.step()
    swa_utils.update_bn(data, average)
    return dict(average.state_dict()), average(data[0])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


def scheduled_steps(device: str) -> Any:
    made = []
    for make in SCHEDULERS.values():
        model = mlp().to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        schedule = make(optimizer)
        for i in range(4):
            optimizer.zero_grad()
            loss = model(values(6, 8, seed=i).to(device)).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step(*([loss.detach()] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
        made.append(model[0].weight)
    return made


def packed_sequences(device: str) -> Any:
    torch.manual_seed(0)
    model = nn.GRU(4, 5, batch_first=True, bidirectional=True).to(device)
    lengths = torch.tensor([3, 5, 2])
    packed = nn.utils.rnn.pack_padded_sequence(values(3, 5, 4).to(device), lengths, True, enforce_sorted=False)
    y, found = nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
    y.square().sum().backward()
    return y, found, gradients(model)


PADDING = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)


def attention_without_gradients(device: str) -> Any:
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(8, 2, batch_first=True).to(device).eval(), values(2, 5, 8).to(device)
    causal = nn.Transformer.generate_square_subsequent_mask(5, device=device)
    with torch.no_grad():
        return [
            model(x, x, x),
            model(x, x, x, need_weights=False)[0],
            model(x, x, x, key_padding_mask=PADDING.to(device)),
            model(x, x, x, attn_mask=causal, is_causal=True),
        ]


def an_encoder_without_gradients(device: str) -> Any:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).to(device).eval(), values(2, 5, 8).to(device)
    with torch.no_grad():
        padded = model(x, src_key_padding_mask=PADDING.to(device)).cpu()
        return model(x), padded[~PADDING]


def hooked_modules(device: str) -> Any:
    model, seen = mlp().to(device), []
    model[0].register_forward_hook(lambda module, inputs, y: y * 2)
    model[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    model[0].register_full_backward_hook(lambda module, into, out: seen.append(out[0]))
    model[2].register_full_backward_pre_hook(lambda module, out: (out[0] * 3,))
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    x = values(3, 8).to(device).requires_grad_()
    x.register_hook(seen.append)
    model(x).square().sum().backward()
    return seen, x.grad, gradients(model)


def steps_inside_backward(device: str) -> Any:
    model = mlp().to(device)
    optimizers = {p: torch.optim.SGD([p], 0.1, momentum=0.9) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    hooks = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    for i in range(3):
        model(values(6, 8, seed=i).to(device)).square().mean().backward()
    for hook in hooks:  # PyTorch frees no parameter that its own hook refers to
        hook.remove()
    return list(model.parameters())


def checkpointed(device: str) -> Any:
    keep = functools.partial(selective, lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE)
    made = []
    for run in (
        lambda model, x: checkpoint_sequential(model, 2, x, use_reentrant=False),
        lambda model, x: checkpoint(model, x, use_reentrant=False, context_fn=keep),
    ):
        model, x = mlp().to(device), values(3, 8).to(device).requires_grad_()
        run(model, x).square().sum().backward()
        made.append((x.grad, gradients(model)))
    return made


def log_probabilities(device: str) -> Any:
    a, x = torch.tensor([0.5, 1.5, 3.0], device=device), torch.tensor([0.2, 0.3, 0.5], device=device)
    count = torch.tensor([0.0, 1.0, 2.0], device=device)
    spread = 2 * torch.eye(3, device=device)
    continuous = [D.Normal(a, a), D.Gamma(a, a), D.Beta(a, a), D.Laplace(a, a), D.StudentT(a), D.Gumbel(a, a)]
    return [
        *(d.log_prob(x) for d in continuous),
        D.Dirichlet(a).log_prob(x),
        D.Poisson(a).log_prob(count),
        D.Binomial(torch.tensor(3.0, device=device), x).log_prob(count),
        D.Categorical(x).log_prob(count.long()),
        D.MultivariateNormal(a, spread).log_prob(x),
        D.kl_divergence(D.Gamma(a, a), D.Gamma(x, x)),
        D.MixtureSameFamily(D.Categorical(x), D.Normal(a, a)).log_prob(x),
        D.Categorical(x).entropy(),
    ]


PATTERNS = (
    per_sample_gradients,
    model_ensemble,
    jacobians,
    normalised_weights,
    pruned_weights,
    parameters_as_a_vector,
    averaged_weights,
    scheduled_steps,
    packed_sequences,
    attention_without_gradients,
    an_encoder_without_gradients,
    hooked_modules,
    steps_inside_backward,
    checkpointed,
    log_probabilities,
)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.__name__)
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
def test_a_pattern_gives_what_it_gives_on_the_cpu(pattern: Callable[[str], Any]) -> None:
    assert_as_on_cpu(pattern)


@pytest.mark.parametrize("name", ["Normal", "Exponential", "Bernoulli", "Poisson"])
def test_samples_of_a_distribution_have_its_mean(name: str) -> None:
    torch.manual_seed(0)
    x = torch.tensor([0.2, 0.5, 0.9], device="tpu")
    distribution = D.Normal(x, x) if name == "Normal" else getattr(D, name)(x)
    drawn = distribution.sample((4000,))
    assert drawn.device.type == "tpu"
    error = (drawn.mean(0) - distribution.mean).abs() / (distribution.stddev / 4000**0.5)
    assert error.max().item() < 5


class Training:
    """Dropout, AdamW, a schedule, a scaler, a shuffling loader: everything a run has to resume."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.GELU(), nn.Linear(16, 4)).to("tpu")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.schedule = lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.scaler = torch.amp.GradScaler("tpu", init_scale=256.0, growth_interval=2)
        self.order = torch.Generator().manual_seed(1)

    def parts(self) -> Iterator[tuple[str, Any]]:
        for name in ("model", "optimizer", "schedule", "scaler"):
            yield name, getattr(self, name)

    def save(self, file: Any) -> None:
        state = {name: part.state_dict() for name, part in self.parts()}
        random = {"cpu": torch.get_rng_state(), "tpu": torch.tpu.get_rng_state(), "order": self.order.get_state()}
        torch.save({**state, "random": random}, file)

    def load(self, file: Any) -> None:
        state = torch.load(file, map_location="cpu", weights_only=True)
        for name, part in self.parts():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["random"]["cpu"])
        torch.tpu.set_rng_state(state["random"]["tpu"])
        self.order.set_state(state["random"]["order"])

    def epoch(self) -> list[Tensor]:
        data = TensorDataset(values(12, 8), torch.arange(12) % 4)
        for x, y in DataLoader(data, 4, shuffle=True, generator=self.order, pin_memory=True):
            self.optimizer.zero_grad()
            with torch.autocast("tpu", torch.bfloat16):
                loss = F.cross_entropy(self.model(x.to("tpu", non_blocking=True)), y.to("tpu", non_blocking=True))
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedule.step()
        return [loss.detach().cpu(), *(p.detach().cpu() for p in self.model.parameters())]


def test_a_resumed_run_gives_the_same_bits(tmp_path: Any) -> None:
    run = Training()
    run.epoch()
    run.save(tmp_path / "run.pt")
    expected = run.epoch()
    resumed = Training()
    torch.tpu.manual_seed(99)
    resumed.load(tmp_path / "run.pt")
    assert resumed.optimizer.state[resumed.model[0].weight]["exp_avg"].device.type == "tpu"
    assert all(torch.equal(a, b) for a, b in zip(resumed.epoch(), expected, strict=True))


def test_workers_and_pinned_memory_feed_the_device() -> None:
    data = TensorDataset(values(32, 8), torch.arange(32))
    total = torch.zeros((), dtype=torch.long, device="tpu")
    for x, y in DataLoader(data, 8, num_workers=2, pin_memory=True, shuffle=True, persistent_workers=True):
        assert x.is_pinned()
        total += y.to("tpu", non_blocking=True).sum()
    assert total.item() == 496


def test_a_non_blocking_upload_has_read_its_source() -> None:
    host = torch.ones(1000).pin_memory()
    made = host.to("tpu", non_blocking=True)
    host.zero_()
    assert made.sum().item() == 1000
    host.copy_(made, non_blocking=True)
    torch.tpu.synchronize()
    assert host.sum().item() == 1000


class Wrapped(torch.Tensor):
    """A tensor that holds another one, as DTensor and torchao's tensors do."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, cls) else x, (args, kwargs or {}))
        return tree_map(lambda x: cls(x) if isinstance(x, Tensor) else x, function(*args, **kwargs))


def test_a_wrapper_subclass_computes_with_what_it_holds() -> None:
    model = nn.Linear(3, 2).to("tpu")
    x = torch.ones(1, 3, device="tpu")
    plain = torch.addmm(model.bias, x, model.weight.t()).detach()
    model.weight = nn.Parameter(Wrapped(model.weight.detach()))
    made = model(x)
    assert type(made) is Wrapped
    assert made.device.type == "tpu"
    assert torch.equal(made.inner.detach(), plain)
    moved = Wrapped(torch.ones(3)).to("tpu")
    assert moved.inner.device.type == "tpu"


def test_a_function_mode_sees_every_call() -> None:
    class Names(TorchFunctionMode):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(function.__name__)
            return function(*args, **(kwargs or {}))

    with Names() as names:
        assert (torch.ones(2, device="tpu") + 1).tolist() == [2.0, 2.0]
    assert names.seen == ["ones", "add", "tolist"]


def test_a_subclass_stays_one() -> None:
    class Named(torch.Tensor):
        pass

    x = torch.ones(3, device="tpu").as_subclass(Named)
    y = nn.Parameter(x * 2)
    y.sum().backward()
    assert type(x.sin()) is Named
    assert y.grad.tolist() == [1.0] * 3


def test_assert_close_compares_on_the_device() -> None:
    x = torch.arange(3.0, device="tpu")
    torch.testing.assert_close(x, x.clone())
    torch.testing.assert_close(x, x.cpu(), check_device=False)
    with pytest.raises(AssertionError, match="Mismatched elements: 1 / 3"):
        torch.testing.assert_close(x, torch.tensor([0.0, 1.0, 5.0], device="tpu"))
    with pytest.raises(AssertionError, match="tpu:0 != cpu"):
        torch.testing.assert_close(x, x.cpu())


def test_a_sparse_embedding_says_what_to_do() -> None:
    embedding = nn.Embedding(5, 3, sparse=True).to("tpu")
    with pytest.raises(NotImplementedError, match="sparse tensors are not supported on tpu; use dense tensors"):
        embedding(torch.tensor([1, 2], device="tpu")).sum().backward()


@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0:UserWarning")
def test_anomaly_mode_names_the_backward_that_made_a_nan() -> None:
    x = torch.zeros(2, device="tpu", requires_grad=True)
    with (
        pytest.warns(UserWarning, match="Anomaly Detection has been enabled"),
        pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan values"),
        torch.autograd.detect_anomaly(),
    ):
        (x.sqrt() * 0).sum().backward()


def test_the_profiler_names_the_ops_and_the_users_ranges(tmp_path: Any) -> None:
    x = torch.ones(10, 10, device="tpu")
    with profile(record_shapes=True) as found, record_function("mine"):
        (x @ x).sum().item()
    names = {event.key for event in found.key_averages()}
    assert {"mine", "aten::mm", "aten::sum"} <= names
    found.export_chrome_trace(str(tmp_path / "trace.json"))
    assert (tmp_path / "trace.json").stat().st_size > 0


def test_the_benchmark_timer_runs() -> None:
    x = torch.ones(4, 4, device="tpu")
    assert Timer("(x @ x).sum().item()", globals={"x": x}).timeit(3).mean > 0
