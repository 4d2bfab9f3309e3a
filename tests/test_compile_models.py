"""Unmodified models under torch.compile give eager's numbers, in no more graphs and programs than inductor's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from models import ALWAYS, MODELS, MORE, build, in_full, moved, tensors
from torch import Tensor

from torchtpu import config, metrics
from torchtpu.compile import graphs

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
CALLS = 3


@pytest.fixture
def compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The forward and backward graphs that this backend was given: inductor makes a program of each."""
    seen: list[Any] = []
    build_graph = graphs.compile_graph
    monkeypatch.setattr(graphs, "compile_graph", lambda *a: seen.append(a[0]) or build_graph(*a))
    yield seen
    seen.clear()


def called(run: Any, inputs: dict[str, Any], trains: bool) -> dict[str, Tensor]:
    """The results of one call, gradients included."""
    run.zero_grad()
    with torch.set_grad_enabled(trains):
        outputs = run(**inputs)
    if trains:
        outputs["loss"].backward()
    made = tensors(outputs)
    return made | {f"{name}.grad": p.grad.cpu() for name, p in run.named_parameters() if p.grad is not None}


def frames(model: Any, inputs: dict[str, Any], backend: str, trains: bool) -> tuple[int, list[dict[str, Tensor]]]:
    """How many graphs dynamo makes of some calls with one backend, and their results."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    run = torch.compile(model, backend=counter)
    made = [called(run, inputs, trains) for _ in range(CALLS)]
    return counter.frame_count, [{name.removeprefix("_orig_mod."): t for name, t in m.items()} for m in made]


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    largest = max(float(t.abs().max()) for t in expected.values() if t.numel())
    for name, value in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (value.dtype, value.shape), name
        torch.testing.assert_close(
            actual[name], value, rtol=1e-4, atol=1e-4 * float(value.abs().max()) + 1e-6 * largest, msg=name
        )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")  # transformers'
@pytest.mark.parametrize("trains", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", in_full([*MODELS, *MORE], {*ALWAYS, "llama"}.__contains__))
def test_a_model_is_eagers_with_no_more_graphs_than_elsewhere(
    name: str, trains: bool, compiled_graphs: list[Any]
) -> None:
    model, inputs = build(name)
    model.train(trains)
    elsewhere, _ = frames(model, inputs, "eager", trains)
    model, _ = build(name)  # running statistics have moved
    model.train(trains).to("tpu")
    inputs = moved(inputs, "tpu")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    expected = [called(model, inputs, trains) for _ in range(CALLS)]
    model.load_state_dict(state)
    del state
    torch.tpu.synchronize()
    metrics.reset()
    with config.using(clusters=False, tiers="off"):  # a region is one program, not those of its parts
        count, made = frames(model, inputs, "tpu", trains)
    counts = metrics.snapshot()
    assert count <= elsewhere
    assert counts["programs_compiled"] <= len(compiled_graphs)
    assert counts["cpu_fallbacks"] == {}
    for actual, reference in zip(made, expected, strict=True):
        assert_near(actual, reference)
