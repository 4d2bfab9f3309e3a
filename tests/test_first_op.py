"""What a first op imports and infers: nothing that a script does not need, and each signature once."""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
from script import run_script

from torchtpu import metrics
from torchtpu.compat import concrete_sizes
from torchtpu.ops.nn.batch_norm import _infer_batch_norm, _infer_batch_norm_backward

HEAVY = ("sympy", "torch._dynamo", "torch._inductor")

SCRIPT = """
    import sys, torch
    from torch import nn
    from torch.nn import functional as F

    torch.manual_seed(0)
    x = torch.randn(4, 36, device="tpu", requires_grad=True)
    print(torch.ones(2, device="tpu") + 1)
    mixed = nn.Sequential(nn.Linear(36, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(), nn.Linear(8, 5)).to("tpu")
    table = nn.Embedding(7, 5).to("tpu")
    rows = torch.tensor([1, 2, 3, 4], device="tpu")
    for _ in range(2):
        scores = mixed(x.relu()) + table(rows)
        loss = F.cross_entropy(scores, rows) + F.mse_loss(scores, torch.zeros_like(scores))
        loss = loss + torch.where(scores > 0, scores, 0).softmax(-1).masked_fill(scores > 3, 0).mean()
        loss.backward()
    print(loss.item())
    print([name for name in HEAVY if name in sys.modules])
"""

STEP = """
    import sys, torch
    from torch import nn
    from torch.nn import functional as F

    torch.manual_seed(0)
    MODEL
    model.to("tpu")
    classes = torch.tensor([1, 2, 3, 4], device="tpu")
    for _ in range(2):
        loss = F.cross_entropy(model(x), classes)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    print(loss.item())
    with torch.no_grad():
        print(model.eval()(x).sum().item())
    print([name for name in HEAVY if name in sys.modules])
"""

CNN = """
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
    )
    x = torch.randn(4, 3, 16, 16, device="tpu")
"""

ATTENTION = """
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 5)

        def forward(self, x):
            q, k, v = self.qkv(self.norm(x)).view(4, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)
            made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(made.transpose(1, 2).reshape(4, 6, 16)).mean(1)

    model = Attention()
    x = torch.randn(4, 6, 16, device="tpu")
"""


@pytest.mark.parametrize(
    "script", [SCRIPT, STEP.replace("    MODEL\n", CNN[1:]), STEP.replace("    MODEL\n", ATTENTION[1:])]
)
def test_ordinary_ops_import_no_symbolic_shapes_and_no_compiler_of_torch(script: str) -> None:
    ended = run_script(script.replace("HEAVY", repr(HEAVY)))
    assert ended.status == 0, ended.err
    assert ended.out.splitlines()[-1] == "[]"


MADE_THERE = """
    import sys, torch
    from torch import nn
    from torch.nn import functional as F

    with torch.device("tpu"):
        image, rows = torch.randn(2, 4, 8, 8), torch.randn(2, 6, 16)
        for module in (nn.Conv2d(4, 4, 3), nn.ConvTranspose2d(4, 4, 2)):
            module(image).sum().item()
        for module in (nn.LSTM(16, 8, batch_first=True), nn.GRU(16, 8, batch_first=True)):
            module(rows)[0].sum().item()
        heads = rows.unflatten(-1, (2, 8)).transpose(1, 2)
        F.scaled_dot_product_attention(heads, heads, heads).sum().item()
        torch.randint(5, (3,)).tolist()
    print([name for name in HEAVY if name in sys.modules])
"""


def test_modules_made_on_the_device_import_no_symbolic_shapes_either() -> None:
    ended = run_script(MADE_THERE.replace("HEAVY", repr(HEAVY)))
    assert ended.status == 0, ended.err
    assert ended.out.splitlines()[-1] == "[]"


IN_PYTHON = """
    import sys, torch
    from torch import nn
    from torch.nn import functional as F

    with torch.device("tpu"):
        x, image, rows = torch.randn(4, 8), torch.randn(2, 4, 8, 8), torch.randn(2, 6, 16)
        nn.MultiheadAttention(16, 2, batch_first=True)(rows, rows, rows)[0].sum().item()
        for module in (nn.GroupNorm(2, 4), nn.PReLU()):
            module(image).sum().item()
        made = nn.RMSNorm(16)(rows), x.std(1), x.logsumexp(1), x[x > 0], x.nonzero(), x.roll(1, 1), F.hardswish(x)
        made += F.binary_cross_entropy_with_logits(x, x.sigmoid()), torch.diag(x[0]), torch.linalg.inv(x @ x.T + 9)
        [m.sum().item() for m in made]
        net = nn.Linear(8, 2)
        for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.LBFGS):
            optimizer = kind(net.parameters(), lr=0.1)
            def loss():
                optimizer.zero_grad()
                loss = net(x).square().sum()
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                return loss
            optimizer.step(loss)
            optimizer.load_state_dict(optimizer.state_dict())
            assert torch.is_grad_enabled()
        net.weight[0, 1].sum().backward()
        print(x.sort(1).values.sum().item(), net.weight.sum().item())
    print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])

    @torch.compile
    def doubled_spread(x):
        return x.std(1) * 2

    torch.testing.assert_close(doubled_spread(x), x.std(1) * 2)
    from torchtpu.compat import compiler_imports as own
    functions = list(own._functions())
    print([f for f in own._disabled(functions) if f.__dict__.get("__dynamo_disable") is f])
    print([f for f in functions if {"torchtpu.compat.concrete_sizes", "SymInt"} & {*f.__code__.co_names}
           and f.__name__ in ("_broadcast_shapes", "elementwise_dtypes")])
    print([f for f in functions if f.__name__ == "_use_grad" and "graph_break" not in f.__code__.co_names])
"""


def test_shape_functions_and_optimizers_do_without_dynamo_and_sympy_until_the_program_imports_them() -> None:
    ended = run_script(IN_PYTHON)
    assert ended.status == 0, ended.err
    assert ended.out.splitlines()[1:] == ["[]"] * 4


SIZES: list[Any] = [True, False, 0, 3, (2, 3), [2, 3], (2, (3, 4)), (), 1.5, torch.ones(2, 3)]


@pytest.mark.filterwarnings("ignore:guard_size_oblivious will be removed:FutureWarning")
@pytest.mark.parametrize(
    "name", [n for n, f in vars(concrete_sizes).items() if isinstance(f, FunctionType) and n[0] != "_"]
)
def test_sizes_that_are_numbers_compare_as_symbolic_ones_do(name: str) -> None:
    def outcome(module: Any, *given: Any) -> Any:
        try:
            return getattr(module, name)(*given)
        except (AssertionError, TypeError, NotImplementedError) as error:
            return type(error)

    symbolic = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    count = 2 if name in ("sym_eq", "sym_and", "sym_or") else 1
    for given in itertools.product(SIZES, repeat=count):
        assert outcome(concrete_sizes, *given) == outcome(symbolic, *given), given


def looks(made: Any) -> list[Any]:
    """Shapes, strides and dtypes of an op's results."""
    return [t if not isinstance(t, torch.Tensor) else (tuple(t.shape), t.stride(), t.dtype) for t in made]


def images() -> Iterator[torch.Tensor]:
    """Of every layout that an image may have, and of none."""
    for shape in ((2, 4, 6, 5), (1, 4, 6, 5), (2, 4, 1, 1), (2, 1, 3, 3)):
        x = torch.randn(shape)
        yield from (x, x.to(memory_format=torch.channels_last), x.transpose(2, 3), x.permute(1, 0, 2, 3).contiguous()
                    .permute(1, 0, 2, 3), torch.randn(*shape[:3], 2 * shape[3])[..., ::2])  # fmt: skip


@pytest.mark.parametrize("is_training", [True, False])
def test_batch_norm_looks_as_pytorchs_meta_function_says(*, is_training: bool) -> None:
    """But for images of one pixel, which lie as on the CPU."""
    for image in images():
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            x = image.to("meta", dtype)
            given = [torch.ones(x.shape[1], dtype=torch.promote_types(dtype, torch.float32), device="meta")] * 4
            arguments = *given, is_training, 0.1, 1e-5
            made = _infer_batch_norm(x, *arguments)
            expected = torch.ops.aten.native_batch_norm(x, *arguments)
            rest = given[0], *given[2:], *made[1:], is_training, 1e-5, [True, True, True]
            grads = _infer_batch_norm_backward(x, x, *rest)
            expected_grads = torch.ops.aten.native_batch_norm_backward(x, x, *rest)
            if x.is_contiguous():
                assert made[0].is_contiguous()
                assert made[0].stride() == image.new_empty(image.shape).stride()
                made, expected, grads, expected_grads = made[1:], expected[1:], grads[1:], expected_grads[1:]
            assert looks(made) == looks(expected)
            assert looks(grads) == looks(expected_grads)


def test_stack_looks_as_on_the_cpu() -> None:
    for image in [*images(), torch.randn(3, 4).t(), torch.randn(3, 1).expand(3, 4), torch.randn(2, 0)]:
        for dim in range(-image.dim() - 1, image.dim() + 1):
            made = torch.stack([image, image.clone()], dim)
            on_tpu = torch.stack([image.to("tpu"), image.clone().to("tpu")], dim)
            assert looks([on_tpu]) == looks([made])


def test_convolution_looks_as_on_the_cpu() -> None:
    for image in images():
        for weight in (torch.randn(6, image.shape[1], 2, 1), torch.randn(6, image.shape[1], 1, 2)):
            for laid_out in (weight, weight.to(memory_format=torch.channels_last)):
                for is_transposed in (False, True):
                    w = laid_out.transpose(0, 1) if is_transposed else laid_out
                    arguments = (2, 1), (1, 1), (1, 2), is_transposed, (1, 0) if is_transposed else (0, 0), 1
                    try:
                        made = torch.convolution(image, w, None, *arguments)
                    except RuntimeError:
                        continue  # the errors have tests of their own
                    on_tpu = torch.convolution(image.to("tpu"), w.to("tpu"), None, *arguments)
                    assert looks([on_tpu])[0][0] == looks([made])[0][0]
                    torch.testing.assert_close(on_tpu.cpu(), made, rtol=1e-4, atol=1e-4)


def inferred() -> int:
    return int(metrics.snapshot()["shapes_inferred"])


def test_an_op_is_inferred_once_wherever_it_stands_in_a_stream() -> None:
    x = torch.ones(3, 37, device="tpu")
    torch.sin(torch.cos(x)).cpu()
    before = inferred()
    y = torch.cos(torch.sin(torch.sin(x)))
    assert inferred() == before
    assert torch.equal(y.cpu(), torch.ones(3, 37).sin().sin().cos())
    torch.sin(x.t())
    assert inferred() == before + 1  # it lies otherwise


@pytest.mark.parametrize("written", ["self", "alias"])
def test_an_answer_is_no_answer_for_tensors_that_share_otherwise(written: str) -> None:
    """A write over what is read elsewhere is refused, though each tensor looks as it did in a call that was not."""

    def add(device: str) -> str:
        whole = torch.arange(8.0, device=device)
        apart = torch.arange(8.0, device=device)
        apart[:4].add_(whole[:4])
        try:
            whole[1:5].add_(whole[:4] if written == "alias" else apart[:4])
        except RuntimeError as error:
            return str(error)
        return str(whole.tolist())

    assert add("tpu") == add("cpu")


@pytest.mark.parametrize("amsgrad", [False, True])
def test_optimizers_that_work_through_lists_ask_no_python_for_shapes(amsgrad: bool) -> None:
    shapes = [(3, 5), (7,), (), (2, 1, 4)]
    parameters = [torch.nn.Parameter(torch.rand(shape).to("tpu")) for shape in shapes]
    optimizer = torch.optim.AdamW(parameters, foreach=True, amsgrad=amsgrad)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    metrics.reset()
    optimizer.step()
    assert not [op for op in metrics.snapshot()["shapes_inferred_on_meta"] if op.startswith("_foreach")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64], ids=str)
@pytest.mark.parametrize("number", [2, 0.5, True, 1j], ids=str)
def test_lists_look_as_on_the_cpu(dtype: torch.dtype, number: complex) -> None:
    plain = [torch.ones(2, 3), torch.ones(4), torch.ones(2, 1)]
    for view in (lambda t: t, lambda t: t.mT if t.shape[-1] == 3 else t, lambda t: torch.cat([t, t], -1)[..., ::2]):
        for op in (torch._foreach_add, torch._foreach_add_, torch._foreach_clamp_min_, torch._foreach_mul_):
            found: list[Any] = []
            for device in ("cpu", "tpu"):
                given = [view(t.to(dtype)) for t in plain]
                given = [torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=device).copy_(t) for t in given]
                try:
                    made = op(given, number) or given
                    found.append([(t.stride(), t.dtype, t._version, t.tolist()) for t in made])
                except RuntimeError as error:
                    found.append(str(error))
            assert found[0] == found[1]
    with pytest.raises(RuntimeError, match="same"):
        torch._foreach_add_([torch.ones(2, device="tpu")], [torch.ones(2, device="tpu")] * 2)


def test_errors_are_raised_each_time() -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="must match"):
            torch.ones(3, device="tpu") + torch.ones(4, device="tpu")
        with pytest.raises(RuntimeError, match="can't be cast"):
            torch.ones(3, dtype=torch.long, device="tpu").add_(1.5)


def test_the_default_dtype_is_part_of_the_question() -> None:
    x = torch.ones(3, dtype=torch.long, device="tpu")
    assert (x / 2).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (x / 2).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


COLLECTED = """
    import gc, weakref
    import torch

    print(gc.get_freeze_count() > 100_000)
    held = torch.ones(3, device="tpu")
    held.itself = held
    gone = weakref.ref(held)
    del held
    print(gone() is not None)
    gc.collect()
    print(gone() is None)
"""


def test_garbage_is_not_looked_for_among_modules_and_is_found_elsewhere() -> None:
    """In a process that imports torch itself."""
    command = [sys.executable, "-c", textwrap.dedent(COLLECTED)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True"]
