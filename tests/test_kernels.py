"""JAX functions and Pallas kernels as ops have JAX's own numbers and gradients, recorded in the region."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl
from torch import Tensor

from torchtpu import metrics
from torchtpu.kernels import jax_kernel
from torchtpu.runtime.compile.aot import environment


@jax_kernel
def scale(x: Any, factor: float = 2.0) -> Any:
    return jnp.sin(x) * factor


@jax_kernel
def both(pair: dict[str, Any], *, flip: bool) -> Any:
    a, b = pair["a"], pair["b"]
    return {"sum": a + b, "rest": [b - a, a * b]} if flip else {"sum": a + b, "rest": []}


def add_one_kernel(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] + 1


@functools.partial(jax_kernel, backward=lambda arguments, outputs, gradients: gradients)
def add_one(x: Any) -> Any:
    return pl.pallas_call(add_one_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def matmul_kernel(x_ref: Any, y_ref: Any, o_ref: Any) -> None:
    o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32).astype(o_ref.dtype)


def matmul_by_blocks(x: Any, y: Any) -> Any:
    (m, k), n = x.shape, y.shape[1]
    rows, columns = min(m, 8), min(n, 128)  # whole tiles of a TPU
    return pl.pallas_call(
        matmul_kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid=(m // rows, n // columns),
        in_specs=[pl.BlockSpec((rows, k), lambda i, j: (i, 0)), pl.BlockSpec((k, columns), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((rows, columns), lambda i, j: (i, j)),
    )(x, y)


def matmul_backward(arguments: list[Any], outputs: list[Any], gradients: list[Any]) -> list[Any]:
    (x, y), (g,) = arguments, gradients
    return [matmul_by_blocks(g, y.T), matmul_by_blocks(x.T, g)]


matmul = jax_kernel(matmul_by_blocks, backward=matmul_backward)


@functools.partial(jax_kernel, aliases={"cache": 0})
def append(cache: Any, row: Any, at: int) -> Any:
    return cache.at[at].set(row), cache.sum()


def batch(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to("tpu")


def test_a_function_is_recorded_in_the_region() -> None:
    x = batch(4, 8)
    for _ in range(2):
        torch.tpu.synchronize()
        metrics.reset()
        y = (scale(x * 2, factor=3.0) + 1).cpu()
    torch.testing.assert_close(y, (x.cpu() * 2).sin() * 3 + 1)
    counts = metrics.snapshot()
    assert counts["launches"] == 1
    assert counts["trie_misses"] == 0


def test_each_static_argument_is_a_call_of_its_own() -> None:
    x = batch(4)
    for factor in (1.0, 2.0, 1.0):
        torch.testing.assert_close(scale(x, factor).cpu(), x.cpu().sin() * factor)
    with pytest.raises(TypeError, match="static arguments of a kernel have to be hashable"):
        scale(x, {1, 2})


def test_arguments_and_results_keep_their_structure() -> None:
    pair = {"a": batch(3), "b": batch(3) + 1}
    made = both(pair, flip=True)
    torch.testing.assert_close(made["sum"], pair["a"] + pair["b"])
    torch.testing.assert_close(made["rest"], [pair["b"] - pair["a"], pair["a"] * pair["b"]])
    assert both(pair, flip=False)["rest"] == []


def test_pallas_kernels_run_interpreted_on_the_cpu() -> None:
    x, y = batch(16, 24), batch(24, 256)
    torch.testing.assert_close(add_one(x), x + 1)
    torch.testing.assert_close(matmul(x, y), x @ y, rtol=1e-4, atol=1e-5)


def test_the_gradient_is_jaxs() -> None:
    x = batch(4, 8).requires_grad_()
    scale(x, 3.0).sum().backward()
    torch.testing.assert_close(x.grad, 3 * x.detach().cos())


def test_a_given_backward_replaces_jaxs() -> None:
    x, y = batch(16, 24).requires_grad_(), batch(24, 8).requires_grad_()
    matmul(x, y).square().sum().backward()
    a, b = (t.detach().clone().requires_grad_() for t in (x, y))
    (a @ b).square().sum().backward()
    torch.testing.assert_close((x.grad, y.grad), (a.grad, b.grad), rtol=1e-4, atol=1e-4)


def test_second_derivatives_exist() -> None:
    x = batch(5).requires_grad_()
    (first,) = torch.autograd.grad(scale(x, 1.0).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, -x.detach().sin())


def test_an_alias_writes_its_argument() -> None:
    cache, row = torch.zeros(3, 4, device="tpu"), batch(4)
    view = cache[1]
    result, total = append(cache, row, at=1)
    assert result is cache
    torch.testing.assert_close(view.cpu(), row.cpu())
    assert total.item() == 0
    assert cache._version == 1


def test_vmap_maps_a_kernel() -> None:
    x = batch(5, 4)
    torch.testing.assert_close(torch.vmap(lambda r: scale(r, 2.0))(x), x.sin() * 2)
    torch.testing.assert_close(torch.vmap(lambda r: scale(r, 2.0), in_dims=1, out_dims=1)(x), x.sin() * 2)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_kernel_compiles_without_a_graph_break(dynamic: bool | None) -> None:
    x, y = batch(16, 24).requires_grad_(), batch(24, 8)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return scale(matmul(x + 1, y), 0.5).sum()

    step(x, y).backward()
    expected, x.grad = x.grad, None
    torch.compile(step, fullgraph=True, dynamic=dynamic)(x, y).backward()
    torch.testing.assert_close(x.grad, expected)


def test_sixty_four_bit_arrays_narrow_as_in_jax() -> None:
    x = torch.arange(4, device="tpu")
    assert scale(x.double()).dtype == torch.float32
    with jax.enable_x64(True):
        assert scale(x.double()).dtype == torch.float64


def test_tensors_elsewhere_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="scale: a kernel runs on tpu; an argument is on cpu"):
        scale(torch.ones(3))


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_custom_op_takes_a_kernel_for_tpu() -> None:
    @torch.library.custom_op("torchtpu_test::doubled", mutates_args=(), device_types="cpu")
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    doubled.register_kernel("tpu")(jax_kernel(lambda x: x + x))
    doubled.register_fake(torch.empty_like)
    x = batch(3)
    torch.testing.assert_close(doubled(x).cpu(), doubled(x.cpu()))
    torch.testing.assert_close(torch.compile(doubled, fullgraph=True)(x), x * 2)


def test_an_error_of_the_function_is_raised_at_the_call() -> None:
    with pytest.raises(TypeError, match="add got incompatible shapes"):
        jax_kernel(lambda x, y: x + y)(batch(3), batch(4))


ON_TPU = """
import json, sys
from pathlib import Path
import torch
import torch.nn.functional as F
from test_kernels import add_one, matmul
from torchtpu import startup
from torchtpu.cli.worker import WarmWorker
from torchtpu.runtime.ir.manifest import decode_recorded

target, journal = sys.argv[1:]

def elementwise(x, y):
    return add_one(x * 2) - 1

def product(x, y):
    return matmul(x, y).relu()

def half_product(x, y):
    return matmul(x.bfloat16(), y.bfloat16()).float()

def attention(x, y):
    heads = x.view(1, 2, 128, 128)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)

def half_attention(x, y):
    return attention(x.bfloat16(), y).float()

worker, found = WarmWorker(target, startup.open_store()), {}
for step in (elementwise, product, half_product, attention, half_attention):
    x, y = (torch.randn(256, 128).to("tpu").requires_grad_() for _ in range(2))
    y = y.detach().view(128, 256).requires_grad_()
    step(x, y).square().sum().backward()
    x.grad.sum().item()
    torch.tpu.synchronize()
    lines = [json.loads(line) for file in Path(journal).iterdir() for line in file.read_text().splitlines()]
    for file in Path(journal).iterdir():
        file.unlink()
    kernels = 0
    for line in lines:
        if "program" in line:
            recorded = decode_recorded(line["program"])
            done = worker.compile(recorded)
            assert done.outcome == "compiled", done.error
            kernels += worker._plans.find(recorded.program, is_flat=recorded.is_flat).text().count("tpu_custom_call")
    found[step.__name__] = kernels
print(json.dumps(found))
"""


@pytest.mark.parametrize("target", ["v5e:2x2", "v6e:2x2"])
def test_kernels_and_their_gradients_compile_for_tpus(target: str, tmp_path: Path) -> None:
    pytest.importorskip("libtpu")
    knobs = {"TORCHTPU_TARGET": target, "TORCHTPU_READS": "standin", "TORCHTPU_JOURNAL": str(tmp_path / "journal")}
    knobs |= {"TORCHTPU_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(Path(__file__).parent)}
    (tmp_path / "journal").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", ON_TPU, target, str(tmp_path / "journal")],
        capture_output=True, text=True, env={**environment(), **knobs}, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    # The product's own backward is given the results, which its part of the program makes again.
    expected = {"elementwise": 1, "product": 4, "half_product": 4, "attention": 3, "half_attention": 3}
    assert json.loads(done.stdout.splitlines()[-1]) == expected
