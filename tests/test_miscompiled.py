"""Programs that XLA:CPU compiles wrongly are found, and compiled again in another way."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from torchtpu import config
from torchtpu.runtime.device import miscompiled

PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "summed": lambda x, one: (x @ one.expand(64, 64)).sum(),
    "largest": lambda x, one: (x @ one.expand(64, 64)).amax(1),
    "activated": lambda x, one: F.linear(x, one.expand(64, 64), one[0].expand(64)).relu().sum(1),
    "batched": lambda x, one: torch.bmm(x[None], one.expand(1, 64, 64)).square().mean(),
    "of a product": lambda x, one: ((x @ x.T) @ one.expand(128, 32)).sum(),
    "of one number alone": lambda x, one: (one.expand(128, 64) @ one.expand(64, 32)).sum(),
    "differentiated": lambda x, one: torch.autograd.grad((x @ one.expand(64, 64)).sum(), x)[0].norm(),
}


@pytest.mark.parametrize("tiers", ["on", "off"])
@pytest.mark.parametrize("is_constant", [False, True], ids=["given", "constant"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_with_one_number(name: str, is_constant: bool, tiers: str) -> None:
    torch.manual_seed(0)
    x, one = torch.randn(128, 64, dtype=torch.float64).requires_grad_(), torch.ones(1, 1, dtype=torch.float64)
    sent = one.to("tpu")
    sent.cpu()  # else it is a constant of the region
    given = torch.ones(1, 1, dtype=torch.float64, device="tpu") if is_constant else sent
    with config.using(tiers=tiers):
        found = PRODUCTS[name](x.detach().to("tpu").requires_grad_(), given).cpu()
    torch.testing.assert_close(found, PRODUCTS[name](x, one))


@pytest.mark.parametrize("tiers", ["on", "off"])
@pytest.mark.parametrize("name", ["rows", "other rows", "batches", "added", "gradient", "in company"])
def test_products_of_bfloat16_over_a_size_that_changes(name: str, tiers: str) -> None:
    products: dict[str, Callable[[Tensor], Tensor]] = {
        "rows": lambda x: x.T @ x,
        "other rows": lambda x: x.T @ x.cos()[:, :5],
        "batches": lambda x: torch.einsum("bni,bnj->bij", *[torch.stack([x, x + 1])] * 2),
        "added": lambda x: x.new_zeros(16, 16).addmm_(x.T, x),
        "gradient": lambda x: torch.autograd.grad((x @ (w := x[:3].T.clone().requires_grad_())).abs().sum(), w)[0],
        "in company": lambda x: (x * 2).T.float().relu().bfloat16() @ (x + 1).softmax(-1),
    }
    with config.using(tiers=tiers):
        for rows in (3, 4, 5, 7, 40, 41, 130):
            x = (torch.arange(rows * 16).view(rows, 16) % 7 - 3).bfloat16()
            torch.testing.assert_close(products[name](x.to("tpu")).cpu(), products[name](x))


HLO = """HloModule region

%fused_computation (param_0: f32[128,64]) -> f32[] {
  %param_0 = f32[128,64]{1,0} parameter(0)
  %constant.1 = f32[] constant(1)
  %ones = f32[64,64]{1,0} broadcast(%constant.1), dimensions={DIMENSIONS}, metadata={op_name="a{b}"}
  %turned = f32[64,64]{0,1} bitcast(%ones)
  %dot.1 = f32[128,64]{1,0} dot(%param_0, %turned), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %reduce.1 = f32[] reduce(%dot.1, %constant.1), dimensions={0,1}, to_apply=%add
}

ENTRY %main (x: f32[128,64]) -> f32[] {
  %x = f32[128,64]{1,0} parameter(0)
  ROOT %it = f32[] fusion(%x), kind=kCustom, calls=%fused_computation, backend_config={"fusion_config":{"kind":"KIND"}}
}
"""


@pytest.mark.parametrize(
    ("dimensions", "kind", "expected"),
    [("", "__ynn_fusion", True), ("1", "__ynn_fusion", False), ("", "__other", False)],
)
def test_a_fusion_is_told_by_its_operands(dimensions: str, kind: str, expected: bool) -> None:
    text = HLO.replace("{DIMENSIONS}", f"{{{dimensions}}}").replace("KIND", kind)
    assert miscompiled.is_miscompiled(text) is expected


HIDES_NAN: dict[str, Callable[[Tensor], Tensor]] = {
    "largest": lambda x: x.amax(1),
    "largest, where it is": lambda x: x.max(1)[0],
    "largest of all": lambda x: x.max(),
    "smallest": lambda x: x.amin(0),
    "both": lambda x: torch.stack(torch.aminmax(x)),
    "norm": lambda x: x.norm(math.inf, 1),
    "least norm": lambda x: torch.linalg.vector_norm(x, -math.inf, 1),
    "activated": lambda x: x.relu().sum(1),
    "clamped": lambda x: x.clamp(min=0).mean(1),
    "smaller of two": lambda x: torch.min(x, 2 * x).mean(),
    "normalized": lambda x: F.batch_norm(x, None, None, training=True).relu().mean(0),
    "pooled": lambda x: F.max_pool1d(x, x.shape[1])[:, 0],
    "places": lambda x: F.max_pool1d(x[None], x.shape[1], return_indices=True)[1][0, :, 0].double(),
}


@pytest.mark.parametrize("tiers", ["on", "off"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", HIDES_NAN)
def test_nan_is_the_largest_and_the_smallest(name: str, dtype: torch.dtype, tiers: str) -> None:
    torch.manual_seed(0)
    with config.using(tiers=tiers):
        for rows, columns in ((128, 64), (200, 77)):
            x = torch.randn(rows, columns).to(dtype)
            x[1], x[2, 3] = math.nan, math.nan
            expected = HIDES_NAN[name](x)
            torch.testing.assert_close(
                HIDES_NAN[name](x.to("tpu")).cpu(), expected, equal_nan=True, rtol=2e-2, atol=2e-2
            )


@pytest.mark.parametrize("tiers", ["on", "off"])
def test_reductions_of_bfloat16_times_a_number(tiers: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(128, 64).bfloat16()
    with config.using(tiers=tiers):
        for f in (lambda x: F.gelu(x).sum(1), lambda x: (x / 3).exp().sum(0), lambda x: (x * 0.5).float().erf().mean()):
            for _ in range(5):
                torch.testing.assert_close(f(x.to("tpu")).cpu(), f(x), rtol=2e-2, atol=6e-2)


def test_maxima_are_written_as_what_they_choose() -> None:
    text = """  func.func public @main(%in0: tensor<4x3xf32>, %in1: tensor<4x3xf32>, %in2: tensor<4xi32>) {
    %0 = stablehlo.maximum %in0, %in1 : tensor<4x3xf32>
    %r1 = stablehlo.minimum %0, %in1 : tensor<4x3xf32>
    %2 = stablehlo.maximum %in2, %in2 : tensor<4xi32>
    %3 = stablehlo.reduce(%r1 init: %cst) applies stablehlo.maximum across dimensions = [1] : (tensor<4x3xf32>)
"""
    chosen = miscompiled.with_choices(text).splitlines()
    assert [line for line in chosen if "imum" in line] == text.splitlines()[3:]
    assert sum("stablehlo.select" in line for line in chosen) == 2
    assert any(line.startswith("    %r1 = stablehlo.select %one_") for line in chosen)
