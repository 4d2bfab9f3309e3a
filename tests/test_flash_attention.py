"""The Pallas form of attention equals the composite form, and takes less memory on TPUs."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from script import compiled_for

from torchtpu.ops import Context
from torchtpu.ops.attention import attention, attention_blocked, attention_flash

KERNELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "grouped": {"key_heads": 1},
    "bfloat16": {"dtype": jnp.bfloat16},
    "longer keys": {"width": 384},
}
BLOCKS: dict[str, dict[str, Any]] = {
    "mask": {"mask": (1, 1, 1)},
    "mask of each head": {"mask": (1, 2, 1), "is_causal": True},
    "mask of keys": {"mask": (1, 1, 0)},
    "dead rows": {"mask": (1, 1, 1), "dead_rows": 3},
    "grouped": {"mask": (1, 1, 1), "key_heads": 1},
    "odd lengths": {"length": 251, "width": 131, "is_causal": True},
    "odd lengths, mask": {"length": 251, "width": 131, "mask": (1, 1, 1)},
    "bfloat16": {"mask": (1, 1, 1), "dtype": jnp.bfloat16},
}
CONTEXT = Context("attention", "cpu", (), "highest")
DRAW = (np.uint64(3), np.int64(0))


class Given(NamedTuple):
    """Arguments of one call, the output's gradient among them."""

    query: Any
    key: Any
    value: Any
    mask: Any
    grad: Any


def arguments(
    *, key_heads: int = 2, mask: tuple[int, int, int] | None = None, dead_rows: int = 0, dtype: Any = jnp.float32,
    length: int = 256, width: int = 256, **options: Any,
) -> tuple[Given, dict[str, Any]]:  # fmt: skip
    """The tensors, and what else the op takes. `mask` says of batch, heads and rows whether the mask has them."""
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    query, key, value = make(1, 2, length, 64), make(1, key_heads, width, 64), make(1, key_heads, width, 64)
    bias = None
    if mask is not None:
        kept = rng.random((1, mask[1], length if mask[2] else 1, width)) < 0.7
        kept[..., 0] = True
        kept[:, :, :dead_rows] = False
        bias = jnp.where(jnp.asarray(kept), 0.0, -jnp.inf).astype(dtype)
    return Given(query, key, value, bias, make(1, 2, length, 64)), {"is_causal": False, "scale": None, **options}


def call(form: Any, given: Given, *, is_causal: bool, scale: float | None, dropout_p: float = 0.0) -> list[Any]:
    """Output, log-sum-exp and gradients of one form (its forward and backward)."""
    forward, backward = form
    query, key, value, mask, grad = given
    made = forward(query, key, value, mask, dropout_p, is_causal, False, scale=scale, generator=DRAW, ctx=CONTEXT)
    wanted = (True, True, True, mask is not None)
    grads = backward(
        grad, query, key, value, mask, wanted, made[0], made[1], None, None, 256, 256, dropout_p, is_causal, *DRAW,
        scale=scale, ctx=CONTEXT,
    )  # fmt: skip
    return [made[0], made[1], *(g for g in grads if g is not None)]


def assert_near(actual: list[Any], expected: list[Any], limit: float) -> None:
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(e, np.float32), rtol=limit, atol=limit)


FLASH = attention_flash.flash_forward, attention_flash.flash_backward
COMPOSITE = attention.attention, attention.attention_backward


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_compute_what_the_composite_form_computes(name: str) -> None:
    facts = KERNELS[name]
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]), pltpu.force_tpu_interpret_mode(True):
        given, options = arguments(**facts)
        assert attention_flash._fits(*given[:4], 0.0)
        actual, expected = call(FLASH, given, **options), call(COMPOSITE, given, **options)
    assert_near(actual, expected, 3e-2 if facts.get("dtype") == jnp.bfloat16 else 2e-5)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_blocked, "_STORED", 2**16)  # bytes, of a matrix of at least twice as many


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_compute_what_the_composite_form_computes(name: str) -> None:
    facts = BLOCKS[name]
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        given, options = arguments(**facts)
        assert not attention_flash._fits(*given[:4], 0.0)
        assert attention_blocked._Blocks(given.query, given.key).count > 1
        actual, expected = call(FLASH, given, **options), call(COMPOSITE, given, **options)
    assert_near(actual, expected, 3e-2 if facts.get("dtype") == jnp.bfloat16 else 2e-5)


@pytest.mark.usefixtures("small_blocks")
def test_blocks_drop_in_the_backward_pass_what_they_dropped_before() -> None:
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        given, options = arguments(mask=(1, 1, 1))
        found = call(FLASH, given, **options, dropout_p=0.25)
        forward = lambda *x: attention_flash.flash_forward(*x, 0.25, False, generator=DRAW, ctx=CONTEXT)[0]
        made, pull = jax.vjp(forward, *given[:4])
        assert_near([found[0], *found[2:]], [made, *pull(given.grad)], 2e-5)
        ones = jnp.ones_like(given.value)
        kept = forward(jnp.zeros_like(given.query), jnp.zeros_like(given.key), ones, None)
    assert float(kept.mean()) == pytest.approx(1, abs=0.01), "a quarter is dropped, the rest grows by a third"
    assert len(np.unique(np.asarray(kept[0, 0, :, 0]))) > 20, "each row draws for itself"


COMPILE = """
import json, sys
import jax, jax.numpy as jnp
from torchtpu.ops import Context
from torchtpu.ops.attention import attention, attention_flash
from torchtpu.runtime.compile.aot import AotClient

client = AotClient(sys.argv[1])
context = Context("attention", "tpu", ())
struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)

def step(forward, backward, key_heads=8, length=2048, has_mask=False, is_causal=False, dropout_p=0.0):
    def attend(query, key, value, grad, mask):
        draw = jnp.uint64(0), jnp.int64(0)
        made = forward(query, key, value, mask, dropout_p, is_causal, False, scale=None, generator=draw, ctx=context)
        return made[0], *backward(grad, query, key, value, mask, (True, True, True, False), made[0], made[1], None,
                                  None, length, length, dropout_p, is_causal, *draw, scale=None, ctx=context)[:3]
    query, key = struct(2, 8, length, 128), struct(2, key_heads, length, 128)
    mask = struct(1, 1, length, length) if has_mask else None
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):  # as the engine traces
        text = jax.jit(attend).trace(query, key, key, query, mask).lower(lowering_platforms=("tpu",)).as_text()
    return client.compile(text).cost.temporary_bytes, text.count("tpu_custom_call")

found = {}
for name, facts in json.loads(sys.argv[2]).items():
    fused = step(attention_flash.flash_forward, attention_flash.flash_backward, **facts)
    found[name] = fused, step(attention.attention, attention.attention_backward, **facts)
print(json.dumps(found))
"""
ON_TPUS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "grouped": {"is_causal": True, "key_heads": 2},
    "mask": {"has_mask": True},
    "odd length": {"is_causal": True, "length": 2047},
}


@pytest.mark.parametrize("target", ["v5e:2x2", pytest.param("v6e:2x2", marks=pytest.mark.full)])
def test_attention_compiles_for_tpus_and_stores_no_scores(target: str) -> None:
    pytest.importorskip("libtpu")
    scores = 2 * 8 * 2048 * 2048 * 4
    for name, ((fused_bytes, kernels), (plain_bytes, none)) in compiled_for(target, COMPILE, ON_TPUS).items():
        assert (kernels, none) == (3 if name in ("causal", "grouped") else 0, 0), "forward, and backward in two kernels"
        assert plain_bytes >= scores * 0.9, name
        assert fused_bytes < scores / (4 if kernels else 1.5), name
