"""Modules exported by torch.export run on tpu, are saved and warmed, and equal the original module."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export.passes import move_to_device_pass
from torch.nn.attention.flex_attention import flex_attention

from torchtpu import metrics

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # torch's own, in its decompositions
]


class Model(nn.Module):
    """With parameters, a buffer that training writes, and a tensor made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x) * self.offset + torch.arange(4, device=x.device)
        return made


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = flex_attention(x, x, x, lambda score, b, h, i, j: score + (j - i) * 0.1)
        return made


def models() -> tuple[nn.Module, nn.Module]:
    """Equal ones on the CPU and on the device."""
    made = []
    for device in ("cpu", "tpu"):
        torch.manual_seed(0)
        made.append(Model().to(device))
    return made[0], made[1]


def batch(rows: int = 6) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(1))


def free(model: nn.Module) -> None:
    """Frees the memory of a model that PyTorch keeps, as it does of programs that were exported and then compiled."""
    for value in model.state_dict().values():
        value.untyped_storage().resize_(0)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-5)
    assert metrics.snapshot()["cpu_fallbacks"] == {}


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_an_exported_program_runs(is_strict: bool, is_compiled: bool) -> None:
    on_cpu, on_tpu = (model.eval() for model in models())
    program = torch.export.export(on_tpu, (batch().to("tpu"),), strict=is_strict).module()
    run = torch.compile(program, fullgraph=True) if is_compiled else program
    assert_same(run(batch().to("tpu")), on_cpu(batch()))
    free(on_tpu)


def test_a_saved_program_is_loaded_onto_the_device(tmp_path: Path) -> None:
    on_cpu, on_tpu = (model.eval() for model in models())
    torch.export.save(torch.export.export(on_tpu, (batch().to("tpu"),)), tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    assert {p.device.type for p in program.parameters()} == {"tpu"}
    assert_same(program(batch().to("tpu")), on_cpu(batch()))


def test_a_program_exported_on_the_cpu_moves_to_the_device() -> None:
    on_cpu, _ = (model.eval() for model in models())
    exported = torch.export.export(on_cpu, (batch(),))
    program = move_to_device_pass(exported, "tpu").module()
    assert_same(program(batch().to("tpu")), on_cpu(batch()))


@pytest.mark.parametrize("is_decomposed", [False, True])
def test_a_dynamic_dimension_stays_one(is_decomposed: bool) -> None:
    on_cpu, on_tpu = (model.eval() for model in models())
    sizes = {"x": {0: torch.export.Dim("rows", min=2, max=64)}}
    exported = torch.export.export(on_tpu, (batch().to("tpu"),), dynamic_shapes=sizes)
    program = (exported.run_decompositions() if is_decomposed else exported).module()
    for rows in (6, 17, 33):
        assert_same(program(batch(rows).to("tpu")), on_cpu(batch(rows)))
    with pytest.raises(AssertionError, match="Guard failed"):
        program(batch(65).to("tpu"))


def test_an_exported_program_trains_as_one_program() -> None:
    on_cpu, on_tpu = models()
    program = torch.export.export(on_tpu, (batch().to("tpu"),)).module()
    losses = []
    for device, run in (("cpu", on_cpu), ("tpu", program)):
        optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
        x, made = batch().to(device), []
        for step in range(5):
            if step == 3:
                torch.tpu.synchronize()
                metrics.reset()
            optimizer.zero_grad()
            loss = run(x).square().mean()
            loss.backward()
            optimizer.step()
            made.append(loss.detach())
        torch.tpu.synchronize()
        counts = metrics.snapshot()
        losses.append(torch.stack(made))
    assert (counts["launches"], counts["programs_compiled"]) == (2, 0)
    assert_same(losses[1], losses[0])
    assert_same(on_tpu.inner[1].running_mean, on_cpu.inner[1].running_mean)  # type: ignore[union-attr, arg-type]


def test_flex_attention_is_exported() -> None:
    x = torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(1))
    program = torch.export.export(Attention(), (x.to("tpu"),)).module()
    bias = (torch.arange(64) - torch.arange(64)[:, None]) * 0.1
    expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=bias)
    assert_same(program(x.to("tpu")), expected)
    assert metrics.snapshot()["ops_recorded"] < 20, "the dense form takes some 50"


def test_compiling_for_a_shared_library_is_refused_with_what_to_do() -> None:
    function = torch.compile(lambda x: x * 2, fullgraph=True)
    with pytest.raises(NotImplementedError, match="torchtpu warm"):
        function.aot_compile(((torch.ones(3, device="tpu"),), {}))  # type: ignore[attr-defined]
    model = nn.Linear(8, 4, device="tpu")
    exported = torch.export.export(model, (torch.ones(6, 8, device="tpu"),))
    with pytest.raises(torch._inductor.exc.InductorError, match="Device tpu not supported"):
        torch._inductor.aoti_compile_and_package(exported)
    free(model)


SERVE = """
import sys, torch
from torchtpu import metrics
program = torch.export.load(sys.argv[1]).module()
for _ in range(3):
    answer = program(torch.ones(6, 8, device="tpu")).sum().item()
print(answer, metrics.snapshot()["programs_compiled"])
"""


def test_what_a_program_needs_is_warmed(tmp_path: Path) -> None:
    on_cpu, on_tpu = (model.eval() for model in models())
    torch.export.save(torch.export.export(on_tpu, (batch().to("tpu"),)), tmp_path / "model.pt2")
    (tmp_path / "serve.py").write_text(SERVE)
    (tmp_path / "cache").mkdir(0o700)
    command = [sys.executable, "serve.py", "model.pt2"]
    given = {**os.environ, "TORCHTPU_CACHE_DIR": str(tmp_path / "cache")}

    def run(*words: str) -> str:
        return subprocess.run(words, cwd=tmp_path, env=given, capture_output=True, text=True, check=True).stdout

    warmed = json.loads(run(sys.executable, "-m", "torchtpu.cli", "warm", "--json", "--", *command))
    assert warmed["compiled"] == warmed["programs"] > 0
    answer, compiled = run(*command).split()
    assert float(answer) == pytest.approx(on_cpu(torch.ones(6, 8)).sum().item(), rel=1e-5)
    assert int(compiled) == 0


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("where", ["cpu", "tpu"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_graph_traced_by_torchscript_convolves_what_it_is_given(where: str, *, needs_grad: bool) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 2, 3, stride=2), nn.ReLU()).requires_grad_(needs_grad)
    traced = torch.jit.trace(net.to(where), torch.rand(1, 3, 8, 8, device=where))
    saved = io.BytesIO()
    torch.jit.save(traced, saved)
    saved.seek(0)
    loaded = torch.jit.load(saved, map_location="tpu")
    x = torch.rand(2, 3, 9, 8)
    expected, found = net.cpu()(x), loaded(x.to("tpu"))
    torch.testing.assert_close(found.cpu(), expected)
    if needs_grad:
        expected.sum().backward()
        found.sum().backward()
        for ours, theirs in zip(loaded.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
