"""In: attention calls. Out: the Pallas form's numbers equal to the composite form's, and less memory on TPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from torchtpu.ops import Context, attention, attention_flash
from torchtpu.runtime.aot import environment

CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "grouped": {"key_heads": 1},
    "mask": {"has_mask": True},
    "dead rows": {"has_mask": True, "dead_rows": 3},
    "bfloat16": {"dtype": jnp.bfloat16},
    "longer keys": {"width": 384},
}


def call(
    form: Any, *, is_causal: bool = False, scale: float | None = None, key_heads: int = 2, has_mask: bool = False,
    dead_rows: int = 0, dtype: Any = jnp.float32, width: int = 256,
) -> list[Any]:  # fmt: skip
    """Output, log-sum-exp and gradients of one form (its forward and backward)."""
    forward, backward = form
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    query, key, value = make(1, 2, 256, 64), make(1, key_heads, width, 64), make(1, key_heads, width, 64)
    mask = None
    if has_mask:
        kept = rng.random((256, width)) < 0.7
        kept[:, 0] = True
        kept[:dead_rows] = False
        mask = jnp.where(jnp.asarray(kept), 0.0, -jnp.inf).astype(dtype)
    context = Context("attention", "cpu", (), "highest")
    draw = (jnp.uint64(0), jnp.int64(0))
    made = forward(query, key, value, mask, 0.0, is_causal, False, scale=scale, generator=draw, ctx=context)
    grad = make(*made[0].shape)
    grads = backward(
        grad, query, key, value, mask, (True, True, True, has_mask), made[0], made[1], None, None, 256, width, 0.0,
        is_causal, 0, 0, scale=scale, ctx=context,
    )  # fmt: skip
    return [made[0], made[1], *(g for g in grads if g is not None)]


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_compute_what_the_composite_form_computes(name: str) -> None:
    facts = CASES[name]
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]), pltpu.force_tpu_interpret_mode(True):
        actual = call((attention_flash.flash_forward, attention_flash.flash_backward), **facts)
        expected = call((attention.attention, attention.attention_backward), **facts)
    limit = 3e-2 if facts.get("dtype") == jnp.bfloat16 else 2e-5
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(e, np.float32), rtol=limit, atol=limit)


COMPILE = """
import json, sys
import jax, jax.numpy as jnp
from torchtpu.ops import Context, attention, attention_flash
from torchtpu.runtime.aot import AotClient

client = AotClient(sys.argv[1])
shape = jax.ShapeDtypeStruct((2, 8, 2048, 128), jnp.bfloat16)
context = Context("attention", "tpu", ())

def step(forward, backward):
    def attend(query, key, value, grad):
        draw = jnp.uint64(0), jnp.int64(0)
        made = forward(query, key, value, None, 0.0, True, False, scale=None, generator=draw, ctx=context)
        return made[0], *backward(grad, query, key, value, None, (True,) * 4, made[0], made[1], None, None, 2048, 2048,
                                  0.0, True, 0, 0, scale=None, ctx=context)[:3]
    with jax.enable_x64(True):
        text = jax.jit(attend).trace(*[shape] * 4).lower(lowering_platforms=("tpu",)).as_text()
    return client.compile(text).cost.temporary_bytes, text.count("tpu_custom_call")

fused = step(attention_flash.flash_forward, attention_flash.flash_backward)
plain = step(attention.attention, attention.attention_backward)
print(json.dumps({"fused": fused, "plain": plain}))
"""


@pytest.mark.parametrize("target", ["v5e:2x2", "v6e:2x2"])
def test_the_kernels_compile_for_tpus_and_store_no_scores(target: str) -> None:
    pytest.importorskip("libtpu")
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, target],
        capture_output=True, text=True, env=environment(), timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    (fused_bytes, kernels), (plain_bytes, none) = found["fused"], found["plain"]
    assert (kernels, none) == (3, 0), "forward, and backward in two kernels"
    scores = 2 * 8 * 2048 * 2048 * 4
    assert plain_bytes >= scores
    assert fused_bytes < scores / 4
