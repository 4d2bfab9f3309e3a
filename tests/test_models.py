"""Unmodified models, plain PyTorch's and the libraries', give the CPU's numbers with no op on the CPU."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any, NamedTuple

import pytest
import torch
from models import ALWAYS, MODELS, OFTEN, build, in_full, moved, tensors
from opinfo_compare import strides_that_matter
from torch import Tensor, nn

from torchtpu import config, metrics

GENERATES = ["gpt2", "llama", "qwen2", "qwen3", "mixtral", "t5", "whisper", "mamba"]
# Where the exact gradient is zero only rounding is left of it: what is below this part of the largest one is not held.
ROUNDING = 1e-6


@pytest.fixture(autouse=True)
def no_op_runs_on_the_cpu():
    yield
    assert metrics.snapshot()["cpu_fallbacks"] == {}


class Trained(NamedTuple):
    """What a training step made, by name, on the CPU."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def train(name: str, device: str, dtype: torch.dtype = torch.float32, rounded: torch.dtype | None = None) -> Trained:
    """One AdamW step; with `rounded` the weights and inputs are first rounded to that dtype."""
    model, inputs = build(name)
    model.train().to(rounded or dtype).to(dtype).to(device)
    inputs = moved(moved(inputs, "cpu", rounded or dtype), device, dtype)
    # A large eps: where a gradient is rounding alone, AdamW would make a whole step of its sign.
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-3)
    outputs = model(**inputs)
    outputs["loss"].backward()
    optimizer.step()
    return Trained(
        tensors(outputs),
        {key: p.grad.cpu() for key, p in model.named_parameters() if p.grad is not None},
        {key: value.cpu() for key, value in model.state_dict().items()},
    )


def layout(tensor: Tensor) -> tuple[torch.dtype, torch.Size, list[int]]:
    return tensor.dtype, tensor.shape, strides_that_matter(tensor)


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    """Each tensor within `relative` of its own largest value, up to rounding of the largest of all."""
    assert actual.keys() == expected.keys()
    largest = max((float(t.abs().max()) for t in expected.values() if t.numel()), default=0.0)
    for name, value in expected.items():
        made = actual[name]
        assert layout(made) == layout(value), name
        if value.numel():
            bound = relative * float(value.abs().max()) + ROUNDING * largest
            assert float((made.double() - value.double()).abs().max()) <= bound, name


def distance(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The relative distance of all values together."""

    def flat(values: dict[str, Tensor]) -> Tensor:
        return torch.cat([values[name].double().flatten() for name in expected])

    return float((flat(actual) - flat(expected)).norm() / flat(expected).norm())


@pytest.mark.parametrize("name", in_full(MODELS, lambda name: not MODELS[name].is_long))
def test_a_training_step_equals_the_cpu(name: str) -> None:
    for actual, expected in zip(train(name, "tpu"), train(name, "cpu"), strict=True):
        assert_near(actual, expected, 1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_equals_the_cpu(name: str) -> None:
    made = []
    for device in ("cpu", "tpu"):
        model, inputs = build(name)
        model.eval().to(device)
        with torch.no_grad():
            made.append(tensors(model(**moved(inputs, device))))
    assert_near(made[1], made[0], 1e-4)


@pytest.mark.parametrize("name", in_full(MODELS, OFTEN.__contains__))
def test_bfloat16_is_as_near_to_float32_as_on_the_cpu(name: str) -> None:
    """Within 2 %, or within 1.5 times the CPU's own distance where a ReLU or a short norm makes bfloat16 rough."""
    exact = train(name, "cpu", torch.float32, torch.bfloat16)
    on_cpu, made = train(name, "cpu", torch.bfloat16), train(name, "tpu", torch.bfloat16)
    for actual, reference, expected in zip(made, on_cpu, exact, strict=True):
        assert {key: t.dtype for key, t in actual.items()} == {key: t.dtype for key, t in reference.items()}
        assert distance(actual, expected) <= max(2e-2, 1.5 * distance(reference, expected))


def prompt(name: str, device: str) -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = build(name)
    inputs.pop("labels")
    return model.eval().to(device), moved(inputs, device)


@pytest.mark.parametrize("name", in_full(GENERATES, OFTEN.__contains__))
def test_greedy_generation_equals_the_cpu(name: str) -> None:
    made = []
    for device in ("cpu", "tpu"):
        model, inputs = prompt(name, device)
        made.append(model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False).tolist())
    assert made[0] == made[1]


def test_sampled_generation_follows_the_seed_and_the_filters() -> None:
    model, inputs = prompt("llama", "tpu")
    draw = functools.partial(model.generate, **inputs, max_new_tokens=4, min_new_tokens=4)
    torch.manual_seed(5)
    first = draw(do_sample=True, temperature=1.5, top_k=20, top_p=0.9).tolist()
    torch.manual_seed(5)
    assert draw(do_sample=True, temperature=1.5, top_k=20, top_p=0.9).tolist() == first
    assert draw(do_sample=True, top_k=1).tolist() == draw(do_sample=False).tolist()


def saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("name", ["torch.llama", "qwen2", "bert"])
def test_a_state_dict_and_a_copy_hold_the_same_model(name: str, in_one_tier: None) -> None:
    model, inputs = build(name)
    model.eval().to("tpu")
    inputs = moved(inputs, "tpu")
    with torch.no_grad():
        expected = model(**inputs)["loss"].item()
        state, whole = saved(model.state_dict()), saved(model)
        fresh, _ = build(name)
        for parameter in fresh.parameters():
            parameter.zero_()
        fresh.load_state_dict(torch.load(state, weights_only=True))
        for other in (fresh.eval().to("tpu"), torch.load(whole, weights_only=False), copy.deepcopy(model)):
            assert len(list(other.parameters())) == len(list(model.parameters()))
            assert {p.device.type for p in other.parameters()} == {"tpu"}
            assert other(**inputs)["loss"].item() == expected
        assert model.to("cpu")(**moved(inputs, "cpu"))["loss"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "t5"])
def test_tied_weights_stay_one_parameter(name: str) -> None:
    model, _ = build(name)
    ties = {id(p) for p in model.parameters()}
    model.to("tpu")
    assert len({id(p) for p in model.parameters()}) == len(ties)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_save_pretrained_and_from_pretrained_keep_the_weights(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("qwen2")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # a progress bar's thread would outlive the test
    model.eval().to("tpu").save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, device_map="tpu").eval()
    assert {p.device.type for p in loaded.parameters()} == {"tpu"}
    inputs = moved(inputs, "tpu")
    with torch.no_grad():
        assert loaded(**inputs)["loss"].item() == model(**inputs)["loss"].item()


@pytest.mark.parametrize("name", ["torch.llama", "llama"])
def test_autocast_with_a_grad_scaler_steps_as_on_the_cpu_in_float32(name: str) -> None:
    expected = train(name, "cpu")
    model, inputs = build(name)
    model.train().to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-3)
    scaler = torch.amp.GradScaler("tpu", init_scale=2.0**8)
    with torch.autocast("tpu", torch.bfloat16):
        outputs = model(**moved(inputs, "tpu"))
    scaler.scale(outputs["loss"]).backward()
    scaler.unscale_(optimizer)
    gradients = {key: p.grad.cpu() for key, p in model.named_parameters()}
    scaler.step(optimizer)
    scaler.update()
    assert {t.dtype for t in gradients.values()} == {torch.float32}
    assert distance(gradients, expected.gradients) <= 2e-2
    assert distance({key: p.cpu() for key, p in model.state_dict().items()}, expected.parameters) <= 1e-2


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_gradient_checkpointing_gives_the_same_gradients(use_reentrant: bool) -> None:
    expected = train("llama", "cpu").gradients
    model, inputs = build("llama")
    model.train().to("tpu")
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model(**moved(inputs, "tpu"))["loss"].backward()
    assert_near({key: p.grad.cpu() for key, p in model.named_parameters()}, expected, 1e-4)


@pytest.mark.parametrize("name", [*ALWAYS, "gpt2", "resnet"])
def test_steps_compile_nothing_once_warm(name: str, in_one_tier: None) -> None:
    model, inputs = build(name)
    model.train().to("tpu")
    inputs = moved(inputs, "tpu")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    counts = []
    with config.using(clusters=False):  # each region is one program
        for _ in range(6):
            optimizer.zero_grad()
            model(**inputs)["loss"].backward()
            optimizer.step()
            torch.tpu.synchronize()
            counts.append(metrics.snapshot()["programs_compiled"])
    assert counts[-1] == counts[2]
    assert counts[0] <= 2
