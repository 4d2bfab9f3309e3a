"""Lowerings written another way for platform tpu, or for a common case, have the CPU's values.

Forms for a platform are run on the CPU by calling the lowering itself.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from torchtpu.ops.nn.loss import nll_loss
from torchtpu.ops.registry import Context


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("classes", [10, 3000])
def test_a_picked_score_is_the_one_of_its_class(reduction: int, classes: int) -> None:
    torch.manual_seed(0)
    scores = torch.randn(16, classes)
    scores[3] = torch.tensor([float("nan"), float("inf"), -float("inf"), *[2.0] * (classes - 3)])
    target = torch.randint(3, classes, (16,))
    target[5] = -100
    wanted = torch.ops.aten.nll_loss_forward(scores, target, None, reduction, -100)
    found = [
        nll_loss(jnp.asarray(scores.numpy()), jnp.asarray(target.numpy()), None, reduction, -100, ctx=ctx)
        for ctx in (Context("nll_loss_forward", platform, ()) for platform in ("tpu", "cpu"))
    ]
    for losses, total in found:
        np.testing.assert_allclose(losses, wanted[0], rtol=1e-6, atol=1e-6)  # sums near zero
        np.testing.assert_allclose(total, wanted[1])


def test_one_row_is_stored_where_the_index_says() -> None:
    cache, row = torch.randn(2, 8, 3), torch.randn(2, 1, 3)
    for place in (0, 4, 7):
        there = cache.to("tpu")
        there.index_copy_(1, torch.tensor([place], device="tpu"), row.to("tpu"))
        assert torch.equal(there.cpu(), cache.index_copy(1, torch.tensor([place]), row))
    for place in (8, -1):
        there = cache.to("tpu")
        there.index_copy_(1, torch.tensor([place], device="tpu"), row.to("tpu"))
        with pytest.raises(IndexError, match="out of"):
            there.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_that_is_masked_whole_attends_to_nothing(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    given = [torch.randn(2, 2, 4, 8, dtype=dtype) for _ in range(3)]
    mask = torch.zeros(4, 4, dtype=dtype)
    mask[1] = -float("inf")
    mask[2, 2:] = -float("inf")
    made = []
    for device in ("cpu", "tpu"):
        q, k, v = (t.to(device).detach().requires_grad_() for t in given)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(device))
        y.square().sum().backward()
        made.append([t.cpu() for t in (y, q.grad, k.grad, v.grad)])
    assert not made[1][0][:, :, 1].any()
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for ours, theirs in zip(made[1], made[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit)


def test_a_row_whose_only_key_is_masked_attends_to_nothing() -> None:
    q, k, v = (torch.ones(1, 1, n, 2, device="tpu", requires_grad=True) for n in (4, 1, 1))
    mask = torch.zeros(4, 1, dtype=torch.bool, device="tpu")
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    y.square().sum().backward()
    assert not any(t.detach().cpu().any() for t in (y, q.grad, k.grad, v.grad))
