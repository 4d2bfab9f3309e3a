"""Functions and models under torch.compile give eager's numbers on tpu, in few programs and one launch per step."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from script import run_script
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from torchtpu import metrics
from torchtpu.compile import graphs

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
MODES = [None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 4))
    return made.to("tpu")


def batch(rows: int = 6, width: int = 8) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).to("tpu")


def gradients(module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The loss, and the gradients of parameters and input."""
    torch.manual_seed(7)
    module.zero_grad()
    x = x.detach().requires_grad_()
    loss = run(x).square().mean()
    loss.backward()
    assert x.grad is not None
    return loss.detach(), [x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def assert_equals_eager(function: Callable[..., Any], *inputs: Any, **options: Any) -> None:
    """Results, and the inputs afterwards, are eager's."""
    given = copy.deepcopy(inputs), copy.deepcopy(inputs)
    torch.manual_seed(7)
    expected = function(*given[0])
    torch.manual_seed(7)
    actual = torch.compile(function, **options)(*given[1])
    torch.testing.assert_close((actual, given[1]), (expected, given[0]), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"backend": "tpu"}, {"backend": "inductor"}], ids=str)
def test_a_model_computes_what_eager_computes(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    build = graphs.compile_graph
    monkeypatch.setattr(graphs, "compile_graph", lambda *a: seen.append(a) or build(*a))
    module, x = model(), batch()
    expected = gradients(module, module, x)
    torch.testing.assert_close(gradients(module, torch.compile(module, **options), x), expected, rtol=0, atol=1e-6)
    assert len(seen) == 2, "forward and backward are compiled by this backend"


def test_a_training_step_is_one_program_and_one_launch() -> None:
    module, x = model(), batch()
    optimizer = torch.optim.AdamW(module.parameters())
    compiled = torch.compile(module)

    def step() -> None:
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    torch.tpu.synchronize()
    metrics.reset()
    for _ in range(5):
        step()
    torch.tpu.synchronize()
    counts = metrics.snapshot()
    assert counts["launches"] == 5
    assert counts["programs_compiled"] == counts["trie_misses"] == 0
    assert counts["cpu_fallbacks"] == {}


OPTIMIZER = """
import copy, torch
from torch import nn
module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to("tpu")
reference = copy.deepcopy(module)
optimizers = [torch.optim.Adam(m.parameters()) for m in (module, reference)]
forward, step = torch.compile(module), torch.compile(optimizers[0].step)
x = torch.ones(6, 8, device="tpu")
for i in range(4):
    for run, model, advance in ((forward, module, step), (reference, reference, optimizers[1].step)):
        model.zero_grad()
        run(x).square().mean().backward()
        advance()
torch.testing.assert_close(list(module.parameters()), list(reference.parameters()), rtol=1e-5, atol=1e-6)
"""


def test_a_compiled_optimizer_joins_the_program() -> None:
    ended = run_script(OPTIMIZER, seconds=300, TORCHTPU_FALLBACK="error")  # dynamo keeps some of its tensors alive
    assert ended.status == 0, ended.err


def test_cpu_graphs_go_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    seen = []

    def spy(graph: Any, *args: Any, **kwargs: Any) -> Any:  # inductor itself starts threads that outlive the test
        seen.append(graph)
        return graph.forward

    monkeypatch.setattr(compile_fx, "compile_fx", spy)
    monkeypatch.setattr(graphs, "compile_graph", lambda *_: pytest.fail("a CPU graph came to this backend"))
    x = torch.randn(5)
    torch.testing.assert_close(torch.compile(lambda x: x.sin() * 2)(x), x.sin() * 2)
    assert len(seen) == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["inductor", "tpu"])
def test_every_mode_name_is_taken(mode: str | None, backend: str) -> None:
    x = batch()
    torch.testing.assert_close(torch.compile(lambda x: x.relu() + 1, mode=mode, backend=backend)(x), x.relu() + 1)


def test_an_unknown_mode_or_option_is_refused() -> None:
    x = batch()
    with pytest.raises(RuntimeError, match="Unrecognized mode=fast"):
        torch.compile(lambda x: x + 1, mode="fast")
    with pytest.raises(RuntimeError, match="Unrecognized mode=fast"):
        torch.compile(lambda x: x + 1, backend="tpu", mode="fast")(x)
    with pytest.raises(RuntimeError, match="Unexpected optimization option turbo"):
        torch.compile(lambda x: x + 1, backend="tpu", options={"turbo": True})(x)


def add_in_place(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


def return_views(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.t(), x[1:], x.view(-1)


def write_through_view(x: Tensor) -> Tensor:
    y = x[:, 1]
    y.mul_(3)
    return x.sum() + y.sum()


def return_input(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.detach()


def alias_of_result(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    return y, y.t()


def resize(x: Tensor) -> Tensor:
    y = torch.empty(0, device=x.device)
    return torch.cat([x, x], out=y)


def draw(x: Tensor) -> tuple[Tensor, ...]:
    return (
        torch.rand_like(x),
        torch.randn(3, device=x.device),
        F.dropout(x, 0.4),
        torch.bernoulli(x.sigmoid()),
        x.clone().normal_(),
        torch.randint(9, (4,), device=x.device),
        torch.randperm(7, device=x.device),
    )


def split(x: Tensor) -> tuple[Tensor, ...]:
    a, b = x.chunk(2, 1)
    values, indices = x.topk(3)
    return a + b, values, indices, torch.var_mean(x, 1)[0], *torch.unbind(x)[:2]


def branch(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x.sin()
    return x.cos()


def with_constant(x: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], device=x.device)


def condition(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (x,))


PROGRAMS = [
    add_in_place, return_views, write_through_view, return_input, alias_of_result, resize, draw, split, branch,
    with_constant, condition,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_a_program_does_what_eager_does(program: Callable[..., Any], dynamic: bool | None) -> None:
    assert_equals_eager(program, batch(), dynamic=dynamic)


@pytest.mark.parametrize("program", [add_in_place, write_through_view, draw], ids=lambda p: p.__name__)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("tpu")])
def test_a_program_runs_under_a_context(program: Callable[..., Any], context: Callable[[], Any]) -> None:
    with context():
        assert_equals_eager(program, batch())


def test_a_written_input_counts_a_version() -> None:
    x = batch()
    torch.compile(add_in_place)(x)
    assert x._version == 1


def test_autocast_casts_as_in_eager() -> None:
    module, x = model(), batch()

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("tpu", dtype=torch.bfloat16):
            return module(x)

    expected = gradients(module, forward, x)
    actual = gradients(module, torch.compile(forward), x)
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-3)
    assert torch.compile(forward)(x).dtype == torch.bfloat16


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_draw_eagers_numbers(use_reentrant: bool) -> None:
    module, x = model(), batch()
    forward = lambda x: checkpoint(module, x, use_reentrant=use_reentrant).relu()
    expected = gradients(module, forward, x)
    torch.testing.assert_close(gradients(module, torch.compile(forward), x), expected, rtol=0, atol=1e-6)


def test_a_graph_break_continues_in_the_same_region() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    x = batch()
    compiled = torch.compile(function)
    compiled(x)
    torch.tpu.synchronize()
    metrics.reset()
    torch.testing.assert_close(compiled(x).cpu(), x.sin().cos().cpu())
    assert metrics.snapshot()["launches"] == 2, "one region for the compiled call, one for eager's"
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(function, fullgraph=True)(x)


def test_sizes_of_data_are_traced_where_asked() -> None:
    def function(x: Tensor) -> Tensor:
        count = x.sum().item()
        return x * count

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        x = torch.arange(4, device="tpu")
        torch.testing.assert_close(torch.compile(function, fullgraph=True)(x), x * 6)


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_changing_sizes_are_right_and_compile_as_often_as_aot_eager(dynamic: bool | None) -> None:
    module = model().eval()
    counts = []
    for backend in ("aot_eager", "tpu"):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        compiled = torch.compile(lambda x: module(x).view(-1, 2, x.shape[0]).sum(0), backend=counter, dynamic=dynamic)
        for rows in (3, 5, 7, 12):
            x = batch(rows)
            torch.testing.assert_close(compiled(x), module(x).view(-1, 2, rows).sum(0), rtol=1e-5, atol=1e-6)
        counts.append(counter.frame_count)
    assert counts[0] == counts[1]


def test_dynamic_sizes_train() -> None:
    module = model()
    compiled = torch.compile(module, dynamic=True)
    for rows in (3, 5, 8):
        x = batch(rows)
        expected = gradients(module, module, x)
        torch.testing.assert_close(gradients(module, compiled, x), expected, rtol=1e-5, atol=1e-6)


def test_a_changing_number_compiles_no_program() -> None:
    compiled = torch.compile(lambda x, s: x * s + s)
    x = batch()
    expected = x.cpu()
    for i in range(4):
        compiled(x, 0.1 + i).cpu()
    metrics.reset()
    for i in range(4, 8):
        torch.testing.assert_close(compiled(x, 0.1 + i).cpu(), expected * (0.1 + i) + (0.1 + i))
    assert metrics.snapshot()["programs_compiled"] == 0


def test_a_stance_is_followed() -> None:
    x = batch()
    compiled = torch.compile(lambda x: x + 1)
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(compiled(x), x + 1)
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="fail_on_recompile"):
        compiled(x)
    compiled(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(compiled(x), x + 1)


def test_an_error_is_eagers() -> None:
    x, y = batch(), batch(3, 3)
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes|a and b must have same") as raised:
        torch.compile(lambda x, y: x @ y)(x, y)
    raised.value.__traceback__ = None  # it holds the tensors


def test_an_exported_program_runs() -> None:
    module, x = model().eval(), batch()
    exported = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    torch.testing.assert_close(exported.module()(batch(9)), module(batch(9)), rtol=1e-5, atol=1e-6)
    compiled = torch.compile(exported.module(), fullgraph=True)
    torch.testing.assert_close(compiled(batch(9)), module(batch(9)), rtol=1e-5, atol=1e-6)


SAVES = """
import sys, torch
from pathlib import Path
path = Path(sys.argv[1])
if path.exists():
    torch.compiler.load_cache_artifacts(path.read_bytes())
x = torch.ones(3, device="tpu")
print(torch.compile(lambda x: x.sin() * 3.25)(x).sum().item())
from torchtpu import metrics
print(metrics.snapshot()["programs_compiled"])
if not path.exists():
    path.write_bytes(torch.compiler.save_cache_artifacts()[0])
"""


def test_saved_artifacts_spare_another_process_its_compiles(tmp_path: Path) -> None:
    outputs = []
    for folder in ("first", "second"):
        environment = {"TORCHTPU_CACHE": "on", "TORCHTPU_CACHE_DIR": str(tmp_path / folder)}
        done = subprocess.run(
            [sys.executable, "-c", SAVES, str(tmp_path / "artifacts")],
            capture_output=True, text=True, env={**os.environ, **environment}, timeout=300, check=True,
        )  # fmt: skip
        outputs.append(done.stdout.split())
    assert outputs[0][0] == outputs[1][0]
    assert int(outputs[0][1]) == 1
    assert int(outputs[1][1]) == 0


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_runs_score_and_mask_functions(is_compiled: bool) -> None:
    attend = torch.compile(flex_attention) if is_compiled else flex_attention
    given = [torch.randn(1, 2, 128, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    on_tpu = [t.to("tpu").requires_grad_() for t in given]
    on_cpu = [t.clone().requires_grad_() for t in given]
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 128, 128, device="tpu")
    made = attend(*on_tpu, score_mod=lambda score, b, h, i, j: score + (i - j) * 0.01, block_mask=mask)
    bias = (torch.arange(128)[:, None] - torch.arange(128)) * 0.01
    bias = bias.masked_fill(torch.ones(128, 128).triu(1).bool(), float("-inf"))
    expected = F.scaled_dot_product_attention(*on_cpu, attn_mask=bias)
    made.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(made.cpu(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close([t.grad.cpu() for t in on_tpu], [t.grad for t in on_cpu], rtol=1e-3, atol=1e-4)


GROUPED = {
    "rows": ((12, 16), (3, 16, 8)),
    "depth": ((8, 12), (12, 16)),
    "columns": ((3, 8, 16), (16, 12)),
    "batch": ((3, 8, 16), (3, 16, 8)),
}


@pytest.mark.parametrize("form", GROUPED)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_products_of_groups_are_the_cpus_and_read_nothing(form: str, is_compiled: bool) -> None:
    def multiply(a: Tensor, b: Tensor, ends: Tensor | None) -> list[Tensor]:
        made = run(a, b, offs=ends)
        made.square().sum().backward()
        return [made.detach(), a.grad, b.grad]

    given = [torch.randn(s, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(GROUPED[form])]
    ends = None if form == "batch" else torch.tensor([3, 3, 12], dtype=torch.int32)
    run = F.grouped_mm
    expected = multiply(*(t.clone().requires_grad_() for t in given), ends)
    on_tpu = None if ends is None else ends.to("tpu")
    run = torch.compile(F.grouped_mm, fullgraph=True) if is_compiled else F.grouped_mm
    made = multiply(*(t.to("tpu").requires_grad_() for t in given), on_tpu)
    counts = metrics.snapshot()
    assert counts["cuts"].get("read", 0) == 0
    assert counts["cpu_fallbacks"] == {}
    torch.testing.assert_close([t.cpu() for t in made], expected, rtol=1e-4, atol=1e-5)


def test_a_vmapped_and_differentiated_function_compiles() -> None:
    function = torch.func.vmap(torch.func.grad(lambda x: (x.sin() * x).sum()))
    assert_equals_eager(function, batch())


def test_compile_may_be_imported_by_name_and_called_again() -> None:
    ended = run_script(
        """
    from torch import compile
    import torch
    x = torch.ones(2, device="tpu")
    print(compile(lambda x: x + 1)(x).tolist(), compile(lambda x: x * 3)(x).tolist())
    """
    )
    assert (ended.status, ended.out) == (0, "[2.0, 2.0] [3.0, 3.0]\n"), ended.err
