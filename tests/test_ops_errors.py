"""Calls that the CPU refuses, and calls that mix devices, give the CPU's error, or its result on the device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F


def ones(on: str, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.ones(shape, device=on) for shape in shapes]


def into(on: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=on)


def ctc(on: str, *lengths: tuple[int, ...], blank: int = 0) -> torch.Tensor:
    return F.ctc_loss(torch.zeros(5, 2, 4, device=on), torch.ones(2, 3, device=on).long(), *lengths, blank=blank)


def attend(on: str, *mask: int) -> torch.Tensor:
    query, key, bias = ones(on, (1, 2, 3, 4), (1, 2, 5, 4), mask)
    return F.scaled_dot_product_attention(query, key, key, bias)


REFUSED: dict[str, Callable[[str], Any]] = {
    "an output padding below 0": lambda on: F.conv_transpose1d(*ones(on, (2, 4, 7), (4, 3, 3)), output_padding=-1),
    "an unknown reduction of segments": lambda on: torch.segment_reduce(
        ones(on, (6,))[0], "foo", lengths=torch.tensor([2, 4], device=on)
    ),
    "counts and probabilities of two shapes": lambda on: torch.binomial(*ones(on, (3,), (5,))),
    "counts and probabilities of two dtypes": lambda on: torch.binomial(ones(on, (3,))[0], into(on, torch.double, 3)),
    "randint beyond the dtype": lambda on: torch.randint(0, 300, (2,), dtype=torch.uint8, device=on),
    "random_ below the dtype": lambda on: torch.zeros(3, dtype=torch.int8, device=on).random_(-200, 3),
    "random_ beyond half": lambda on: torch.zeros(3, dtype=torch.half, device=on).random_(0, 70000),
    "a number beyond half": lambda on: torch.full((2,), -7e4, dtype=torch.half, device=on),
    "a number beyond bfloat16": lambda on: torch.zeros(2, dtype=torch.bfloat16, device=on).fill_(1e39),
    "floor_divide of complex numbers": lambda on: torch.floor_divide(*[t.cfloat() for t in ones(on, (2,), (2,))]),
    "silu of unsigned integers": lambda on: F.silu(into(on, torch.uint16, 3)),
    "glu of unsigned integers": lambda on: F.glu(into(on, torch.uint64, 4)),
    "index_fill of unsigned integers": lambda on: into(on, torch.uint16, 3).index_fill(0, ones(on, (2,))[0].long(), -1),
    "cholesky of unsigned integers": lambda on: torch.linalg.cholesky(into(on, torch.uint32, 3, 3)),
    "householder_product of unsigned integers": lambda on: torch.linalg.householder_product(
        into(on, torch.uint32, 3, 3), into(on, torch.uint32, 3)
    ),
    "erfc in eight bits": lambda on: into(on, torch.float8_e4m3fn, 3).erfc(),
    "index_add in eight bits": lambda on: into(on, torch.float8_e4m3fn, 3).index_add(
        0, ones(on, (2,))[0].long(), into(on, torch.float8_e4m3fn, 2)
    ),
    "normal in eight bits": lambda on: torch.randn(3, dtype=torch.float8_e4m3fn, device=on),
    "linspace in eight bits": lambda on: torch.linspace(0, 1, 3, dtype=torch.float8_e5m2, device=on),
    "linspace of unsigned integers": lambda on: torch.linspace(0, 4, 3, dtype=torch.uint16, device=on),
    "a number beyond eight bits": lambda on: torch.zeros(2, 2, dtype=torch.float8_e5m2, device=on).fill_(1e5),
    "a search in a number": lambda on: torch.searchsorted(torch.tensor(3.0, device=on), torch.ones(3, device=on)),
    "a search for a number in a number": lambda on: torch.searchsorted(torch.tensor(3.0, device=on), 2.0),
    "a histogram whose edges are a number": lambda on: torch.histogram(
        torch.ones(3, device=on), torch.tensor(3.0, device=on)
    ),
    "random_ of no numbers": lambda on: torch.zeros(3, device=on).random_(5, 5),
    "more samples than there are": lambda on: torch.multinomial(ones(on, (3,))[0], 4),
    "softmax into doubles": lambda on: torch.softmax(ones(on, (2, 2))[0], 0, out=into(on, torch.double, 2, 2)),
    "all into floats": lambda on: torch.all(ones(on, (2,))[0], 0, out=into(on, torch.float)),
    "isin into floats": lambda on: torch.isin(*ones(on, (2,), (2,)), out=into(on, torch.float, 2)),
    "amax into doubles": lambda on: torch.amax(ones(on, (2,))[0], 0, out=into(on, torch.double)),
    "tril into doubles": lambda on: torch.tril(ones(on, (2, 2))[0], out=into(on, torch.double, 2, 2)),
    "searchsorted into int32": lambda on: torch.searchsorted(*ones(on, (2,), (2,)), out=into(on, torch.int32, 2)),
    "searchsorted by a sorter of int32": lambda on: torch.searchsorted(
        *ones(on, (2,), (2,)), sorter=torch.tensor([1, 0], dtype=torch.int32, device=on)
    ),
    "solve into floats": lambda on: torch.linalg.solve(
        *[torch.eye(3, device=on).double()] * 2, out=into(on, torch.float, 3, 3)
    ),
    "lu_solve into doubles": lambda on: torch.linalg.lu_solve(
        *torch.linalg.lu_factor(torch.eye(3, device=on)), *ones(on, (3, 2)), out=into(on, torch.double, 3, 2)
    ),
    "histc of booleans": lambda on: torch.histc(ones(on, (2,))[0].bool(), 4),
    "histc up to infinity": lambda on: torch.histc(ones(on, (2,))[0], 4, 0, math.inf),
    "floor_divide of booleans": lambda on: torch.floor_divide(*[t.bool() for t in ones(on, (2,), (2,))]),
    "floor_divide of a boolean on the host": lambda on: torch.tensor(True) // ones(on, (2,))[0].bool(),
    "histc of complex numbers": lambda on: torch.histc(ones(on, (2,))[0].cfloat(), 4, 0, 2),
    "normal with a complex deviation": lambda on: torch.normal(ones(on, (2,))[0], ones(on, (2,))[0].cfloat()),
    "slogdet of what is not square": lambda on: torch.slogdet(ones(on, (2, 3))[0]),
    "mm of booleans": lambda on: torch.mm(*[ones(on, (2, 2))[0].bool()] * 2),
    "celu without a slope": lambda on: F.celu(*ones(on, (2,)), alpha=0.0),
    "grid_sample of volumes by cubes": lambda on: F.grid_sample(
        *ones(on, (1, 1, 2, 2, 2), (1, 2, 2, 2, 3)), mode="bicubic", align_corners=False
    ),
    "grid_sample of integers": lambda on: F.grid_sample(
        *[t.long() for t in ones(on, (1, 1, 2, 2), (1, 2, 2, 2))], align_corners=False
    ),
    "nll_loss of integers": lambda on: F.nll_loss(*[t.long() for t in ones(on, (2, 3), (2,))]),
    "nll_loss of images of complex numbers": lambda on: F.nll_loss(
        ones(on, (2, 3, 2, 2))[0].cfloat(), ones(on, (2, 2, 2))[0].long()
    ),
    "multi_margin_loss of integers": lambda on: F.multi_margin_loss(*[t.long() for t in ones(on, (2, 3), (2,))]),
    "multilabel_margin_loss of integers": lambda on: F.multilabel_margin_loss(*[ones(on, (2, 3))[0].long()] * 2),
    "prelu of integers": lambda on: F.prelu(*[t.long() for t in ones(on, (2, 3), (3,))]),
    "batch_norm of complex numbers": lambda on: F.batch_norm(ones(on, (2, 3))[0].cfloat(), None, None, training=True),
    "group_norm of complex numbers": lambda on: F.group_norm(ones(on, (2, 4, 3))[0].cfloat(), 2),
    "max_unpool2d of integers": lambda on: F.max_unpool2d(*[torch.zeros(1, 1, 2, 2, device=on).long()] * 2, 2),
    "index_reduce of booleans": lambda on: torch.index_reduce(
        ones(on, (3,))[0].bool(), 0, torch.zeros(3, device=on).long(), ones(on, (3,))[0].bool(), "amax"
    ),
    "scatter_reduce of complex numbers": lambda on: torch.scatter_reduce(
        ones(on, (3,))[0].cfloat(), 0, torch.zeros(3, device=on).long(), ones(on, (3,))[0].cfloat(), "amax"
    ),
    "bucketize of booleans": lambda on: torch.bucketize(*[t.bool() for t in ones(on, (3,), (2,))]),
    "segment_reduce of integers": lambda on: torch.segment_reduce(
        ones(on, (3,))[0].long(), "sum", lengths=torch.tensor([1, 2], device=on), unsafe=True
    ),
    "solve_triangular of integers": lambda on: torch.linalg.solve_triangular(
        *[torch.eye(3, device=on).long()] * 2, upper=True
    ),
    "aminmax of complex numbers": lambda on: torch.aminmax(ones(on, (3,))[0].cfloat()),
    "bernoulli of integers": lambda on: torch.bernoulli(ones(on, (3,))[0].long()),
    "normal of integers": lambda on: torch.normal(ones(on, (3,))[0].long(), 1.0),
    "gradients of softmax of integers": lambda on: torch.ops.aten._softmax_backward_data(
        *[ones(on, (3,))[0].long()] * 2, 0, torch.int64
    ),
    "kaiser_window of a negative length": lambda on: torch.kaiser_window(-1, device=on),
    "addr_ of a vector": lambda on: ones(on, (3,))[0].addr_(*ones(on, (2,), (3,))),
    "addr_ of fewer rows": lambda on: ones(on, (1, 3))[0].addr_(*ones(on, (2,), (3,))),
    "masked_scatter_ with a larger mask": lambda on: ones(on, (3,))[0].masked_scatter_(
        torch.ones(2, 3, device=on, dtype=torch.bool), *ones(on, (6,))
    ),
    "heaviside_ of two dtypes": lambda on: torch.zeros(3, device=on).heaviside_(torch.ones(3, device=on).double()),
    "gradients of rrelu_ with a negative slope": lambda on: (
        F.rrelu_(torch.ones(2, device=on, requires_grad=True).clone(), -5.0, 1.0).sum().backward()
    ),
    "ctc_loss of more steps than there are": lambda on: ctc(on, (5, 6), (3, 3)),
    "ctc_loss of more labels than there are": lambda on: ctc(on, (5, 5), (3, 4)),
    "ctc_loss of fewer lengths than samples": lambda on: ctc(on, (5,), (3, 3)),
    "ctc_loss with a blank that is no label": lambda on: ctc(on, (5, 5), (3, 3), blank=4),
    "index_select of a number twice": lambda on: ones(on, ())[0].index_select(0, torch.zeros(2, device=on).long()),
    "grid_sample at points in double": lambda on: F.grid_sample(
        torch.ones(1, 1, 2, 2, device=on), torch.ones(1, 2, 2, 2, device=on).double(), align_corners=False
    ),
    "grid_sample of another batch": lambda on: F.grid_sample(
        *ones(on, (1, 1, 2, 2), (2, 2, 2, 2)), align_corners=False
    ),
    "grid_sample at points of more coordinates": lambda on: F.grid_sample(
        *ones(on, (1, 1, 2, 2), (1, 2, 2, 3)), align_corners=False
    ),
    "grid_sample of images at points of volumes": lambda on: F.grid_sample(
        *ones(on, (1, 1, 2, 2), (1, 2, 2, 2, 2)), align_corners=False
    ),
    "attention with a mask of more rows": lambda on: attend(on, 4, 5),
    "attention with a mask of fewer columns": lambda on: attend(on, 3, 4),
    "attention with a mask of more samples": lambda on: attend(on, 2, 1, 3, 5),
    "attention with a mask of more dimensions": lambda on: attend(on, 7, 1, 1, 3, 5),
    "attention that drops more than all": lambda on: F.scaled_dot_product_attention(
        *ones(on, *[(1, 2, 3, 4)] * 3), dropout_p=1.5
    ),
    "lstsq with another driver": lambda on: torch.linalg.lstsq(*[torch.eye(3, device=on)] * 2, driver="gauss"),
    "lstsq of integers": lambda on: torch.linalg.lstsq(*[torch.eye(3, device=on).int()] * 2),
    "lstsq of two dtypes": lambda on: torch.linalg.lstsq(torch.eye(3, device=on), torch.eye(3, device=on).double()),
    "lstsq of a batch for one matrix": lambda on: torch.linalg.lstsq(*ones(on, (2, 4, 3), (4, 2))),
    "lstsq of two dimensions of batches for one": lambda on: torch.linalg.lstsq(*ones(on, (2, 1, 3, 3), (2, 3, 3))),
    "lstsq of other batches": lambda on: torch.linalg.lstsq(
        torch.zeros(2, 3, 3, device=on), torch.zeros(3, 3, 3, device=on)
    ),
    "addmm of more dimensions": lambda on: torch.addmm(*ones(on, (2, 3, 4), (3, 5), (5, 4))),
    "addmm of nothing of more dimensions": lambda on: torch.addmm(*ones(on, (1, 3, 4), (3, 5), (5, 4)), beta=0),
    "addmm with an activation of more dimensions": lambda on: torch._addmm_activation(
        *ones(on, (2, 3, 4), (3, 5), (5, 4))
    ),
    "linear with a bias of more dimensions": lambda on: F.linear(*ones(on, (3, 5), (4, 5), (1, 1, 4))),
    "linear with a bias of more rows": lambda on: F.linear(*ones(on, (1, 5), (4, 5), (2, 4))),
    "linear of batches with a larger bias": lambda on: F.linear(*ones(on, (2, 3, 5), (4, 5), (1, 2, 3, 4))),
    "linear of a vector with a larger bias": lambda on: F.linear(*ones(on, (5,), (4, 5), (2, 4))),
    "conv of groups that the channels are no multiple of": lambda on: F.conv2d(
        *ones(on, (1, 4, 4, 4), (3, 2, 3, 3)), groups=2
    ),
    "transposed conv of groups likewise": lambda on: F.conv_transpose2d(
        *ones(on, (1, 4, 4, 4), (4, 3, 3, 3)), groups=3
    ),
    "transposed conv of other channels": lambda on: F.conv_transpose2d(*ones(on, (1, 4, 4, 4), (3, 3, 3, 3))),
    "conv with paddings of another rank": lambda on: F.conv2d(*ones(on, (1, 4, 4, 4), (3, 4, 3, 3)), padding=(1, 1, 1)),
    "conv with a bias of more dimensions": lambda on: F.conv2d(*ones(on, (1, 3, 4, 4), (3, 3, 3, 3), (1, 3))),
    "transposed conv with a large output padding": lambda on: F.conv_transpose1d(
        *ones(on, (1, 3, 4), (3, 3, 3)), stride=2, output_padding=9
    ),
    "cross_entropy of other images": lambda on: F.cross_entropy(*ones(on, (2, 3, 1, 2)), ones(on, (2, 1, 1))[0].long()),
    "index_select of no dimension": lambda on: torch.index_select(*ones(on, ()), 50, ones(on, (1,))[0].long()),
    "index_select by a matrix": lambda on: torch.index_select(*ones(on, (3,)), 0, ones(on, (1, 1))[0].long()),
    "put of fewer": lambda on: torch.put(*ones(on, (3, 3)), ones(on, (2,))[0].long(), *ones(on, (3,))),
    "renorm of no dimension": lambda on: torch.renorm(*ones(on, (5, 5)), 2, 9, 0.5),
    "masked_fill by numbers": lambda on: ones(on, (3,))[0].masked_fill(*ones(on, (3,)), 1),
    "layer_norm of two dtypes": lambda on: F.layer_norm(ones(on, (2, 4))[0].double(), (4,), *ones(on, (4,), (4,))),
    "layer_norm by half precision": lambda on: F.layer_norm(*ones(on, (2, 4)), (4,), ones(on, (4,))[0].bfloat16()),
    "group_norm of two dtypes": lambda on: F.group_norm(ones(on, (2, 4))[0].double(), 2, *ones(on, (4,), (4,))),
    "batch_norm of two dtypes": lambda on: F.batch_norm(ones(on, (2, 4))[0].double(), *ones(on, (4,), (4,))),
    "batch_norm by a matrix": lambda on: F.batch_norm(*ones(on, (5, 5), (1, 5), (5,)), training=True),
    "select_scatter into a number": lambda on: torch.select_scatter(*ones(on, (), (3,)), 0, 2),
    "select_scatter beyond the rows": lambda on: torch.select_scatter(*ones(on, (4, 3), (3,)), 0, 5),
    "select_scatter of another shape": lambda on: torch.select_scatter(*ones(on, (4, 3), (4,)), 0, 1),
    "slice_scatter of another shape": lambda on: torch.slice_scatter(*ones(on, (4, 3), (3, 3)), 0, 2),
    "slice_scatter by no steps": lambda on: torch.slice_scatter(*ones(on, (4, 3), (2, 3)), 0, 2, 4, 0),
    "conv by a weight of more dimensions": lambda on: F.conv1d(*ones(on, (1, 4, 5), (1, 4, 3, 1))),
    "conv by booleans": lambda on: F.conv1d(*ones(on, (1, 4, 5)), ones(on, (1, 4, 3))[0].bool()),
    "lstsq of fewer dimensions": lambda on: torch.linalg.lstsq(
        torch.eye(3, device=on).expand(2, 3, 3), *ones(on, (3, 2, 3, 3))
    ),
    "logsumexp over no dimensions": lambda on: torch.logsumexp(*ones(on, (2, 3)), ()),
    "index_select by booleans": lambda on: torch.index_select(*ones(on, (2, 3)), 0, ones(on, (2,))[0].bool()),
    "index_fill by numbers": lambda on: torch.index_fill(*ones(on, (2, 3)), 0, *ones(on, (2,)), 1.0),
    "rsub of booleans": lambda on: torch.rsub(ones(on, (2,))[0].bool(), *ones(on, (2,))),
    "polar of two dtypes": lambda on: torch.polar(ones(on, (2,))[0].double(), *ones(on, (2,))),
    "mse_loss of integers": lambda on: F.mse_loss(*[ones(on, (2,))[0].long()] * 2),
    "binary_cross_entropy with a larger weight": lambda on: F.binary_cross_entropy(
        *ones(on, (2, 3), (2, 3)), weight=ones(on, (4, 2, 3))[0]
    ),
    "mv of booleans by numbers": lambda on: torch.mv(ones(on, (2, 3))[0].bool(), *ones(on, (3,))),
    "matmul of batches of booleans and numbers": lambda on: ones(on, (2, 2, 3))[0].bool() @ ones(on, (2, 3, 2))[0],
    "mm of numbers and int32": lambda on: torch.mm(*ones(on, (2, 3)), ones(on, (3, 2))[0].int()),
    "addmm of bytes": lambda on: ones(on, (2, 2))[0].addmm_(*ones(on, (2, 3)), ones(on, (3, 2))[0].byte()),
    "cross of two dtypes": lambda on: torch.linalg.cross(*ones(on, (3,)), ones(on, (3,))[0].double()),
    "kthvalue of complex numbers": lambda on: torch.kthvalue(ones(on, (3,))[0].cfloat(), 2),
    "median of booleans": lambda on: torch.median(ones(on, (3,))[0].bool(), 0),
    "min of complex numbers": lambda on: torch.min(ones(on, (3,))[0].cfloat()),
    "cholesky of integers": lambda on: torch.linalg.cholesky(torch.eye(3, device=on).long()),
    "max_pool2d of complex numbers": lambda on: F.max_pool2d(ones(on, (1, 4, 4))[0].cfloat(), 2),
    "avg_pool3d of bytes": lambda on: F.avg_pool3d(ones(on, (1, 4, 4, 4))[0].byte(), 2),
    "unfold of integers": lambda on: F.unfold(ones(on, (1, 3, 4, 4))[0].long(), 2),
    "adaptive_avg_pool2d of integers": lambda on: F.adaptive_avg_pool2d(ones(on, (1, 3, 4, 4))[0].long(), 2),
    "shifts of bfloat16": lambda on: ones(on, (3,))[0].bfloat16() << ones(on, (3,))[0].bfloat16(),
    "gcd of half precision": lambda on: torch.gcd(*[ones(on, (3,))[0].half()] * 2),
    "nansum of a dimension of 65": lambda on: torch.nansum(torch.ones([1] * 65, device=on), 0),
    "a number where there are bytes": lambda on: ones(on, (3,))[0].__setitem__(into(on, torch.uint8, 3), 1.0),
    "multinomial of more than 2^24 categories": lambda on: torch.multinomial(
        torch.ones(1, device=on).expand(2**24 + 1), 1
    ),
    "diagonal_scatter of another length": lambda on: torch.diagonal_scatter(*ones(on, (3, 3), (2,))),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_the_cpu_refuses_is_refused_in_its_words(call: Callable[[str], Any]) -> None:
    with pytest.raises((RuntimeError, IndexError)) as expected:
        call("cpu")
    with pytest.raises(type(expected.value)) as found:
        call("tpu")
    assert str(found.value) == str(expected.value)


WRITTEN: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "nonzero": lambda x, out: torch.nonzero(x, out=out),
    "masked_select": lambda x, out: torch.masked_select(x, x.bool(), out=out),
    "take": lambda x, out: torch.take(x, x, out=out),
}


@pytest.mark.parametrize("call", WRITTEN.values(), ids=WRITTEN)
def test_a_result_is_not_written_to_another_device(call: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    x, out = torch.ones(2, dtype=torch.int64, device="tpu"), torch.full((7,), 5)
    with pytest.raises(RuntimeError, match="device"):
        call(x, out)
    assert out.tolist() == [5] * 7


OF_THE_HOST: dict[str, Callable[[torch.Tensor], Any]] = {
    "a packed matrix": torch.fbgemm_pack_gemm_matrix_fp16,
    "a quantized weight": torch.fbgemm_linear_quantize_weight,
    "a product with a packed matrix": lambda x: torch.fbgemm_linear_fp16_weight(x, x, x[0]),
    "a scale": lambda x: torch.choose_qparams_optimized(x, 256, 10, 0.16, 8),
    "a weight within half precision": torch._saturate_weight_to_fp16,
    "a Sobol sequence": lambda x: torch.ops.aten._sobol_engine_initialize_state_(x.long(), 4),
}


@pytest.mark.parametrize("call", OF_THE_HOST.values(), ids=OF_THE_HOST)
def test_what_works_on_the_memory_of_the_host_is_refused(call: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(NotImplementedError, match="works on the memory of the host only"):
        call(torch.ones(16, 16, device="tpu"))


LISTED: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "sqrt": torch._foreach_sqrt,
    "mul by a number": lambda x: torch._foreach_mul(x, 2),
    "mul by numbers": lambda x: torch._foreach_mul(x, [2, 3]),
    "add": lambda x: torch._foreach_add(x, x, alpha=3),
    "addcmul": lambda x: torch._foreach_addcmul(x, x, x, value=2),
    "norm": torch._foreach_norm,
    "sub in place": lambda x: torch._foreach_sub_(x, 1) or x,
    "lerp in place": lambda x: torch._foreach_lerp_(x, [t + 1 for t in x], 0.5) or x,
}


@pytest.mark.parametrize("call", LISTED.values(), ids=LISTED)
def test_each_element_of_a_list_may_be_on_another_device(call: Callable[[list[torch.Tensor]], Any]) -> None:
    x, expected = ([torch.full((2,), 4.0, device=on), torch.ones(3)] for on in ("tpu", "cpu"))
    for ours, theirs in zip(call(x), call(expected), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)
        assert ours._version == theirs._version
    assert [t.device.type for t in call(x)] == ["tpu", "cpu"]


def test_lstsq_takes_one_matrix_for_a_batch_of_as_many_as_it_has_rows() -> None:
    a, b = torch.randn(1, 3, 3), torch.randn(3, 3)
    found = torch.linalg.lstsq(a.to("tpu"), b.to("tpu"), driver="gelsd")
    torch.testing.assert_close(
        [t.cpu() for t in found], list(torch.linalg.lstsq(a, b, driver="gelsd")), rtol=1e-3, atol=1e-3
    )


def test_a_driver_of_lstsq_may_be_in_capitals() -> None:
    a, b = torch.randn(4, 3), torch.randn(4, 2)
    found = torch.linalg.lstsq(a.to("tpu"), b.to("tpu"), driver="GELSD")
    expected = torch.linalg.lstsq(a, b, driver="GELSD")
    torch.testing.assert_close(found.solution.cpu(), expected.solution)
    torch.testing.assert_close(found.singular_values.cpu(), expected.singular_values)


def test_an_index_of_index_fill_may_be_a_number_on_the_host() -> None:
    before = torch.tpu.cpu_fallback_counts()
    for index in (0, 2, -1):
        found = torch.zeros(3, 2, device="tpu").index_fill(0, torch.tensor(index), 2.0)
        assert torch.equal(found.cpu(), torch.zeros(3, 2).index_fill(0, torch.tensor(index), 2.0))
        found.index_fill_(1, torch.tensor(0), torch.tensor(7.0))
        assert found[:, 0].tolist() == [7.0] * 3
    assert torch.tpu.cpu_fallback_counts() == before


def test_a_lazy_clone_lies_as_its_source_and_is_its_own() -> None:
    whole = torch.arange(12.0, device="tpu")
    x = whole.view(3, 4).t()[1:]
    clone = torch._lazy_clone(x)
    assert (clone.stride(), clone.storage_offset(), clone.shape) == (x.stride(), x.storage_offset(), x.shape)
    assert torch.equal(clone, x)
    clone.add_(1)
    assert whole.tolist() == list(range(12))
    assert torch.equal(clone, x + 1)
    bits = torch._lazy_clone(whole.view(torch.int32)[1::2])
    assert torch.equal(bits.cpu(), torch.arange(12.0).view(torch.int32)[1::2])


LOSSES = ("huber_loss", "soft_margin_loss", "binary_cross_entropy", "smooth_l1_loss", "mse_loss", "l1_loss")


def lost(on: str, name: str, dtypes: tuple[torch.dtype, torch.dtype], shapes: Any, reduction: str) -> Any:
    """What a loss and its gradient are, or the error."""
    torch.manual_seed(0)
    x, y = (torch.rand(shape).mul(0.9).add(0.05).to(dtype).to(on) for shape, dtype in zip(shapes, dtypes, strict=True))
    x.requires_grad_()
    try:
        loss = getattr(F, name)(x, y, reduction=reduction)
        loss.sum().backward()
    except (RuntimeError, ValueError) as error:
        return type(error), str(error).partition("\n")[0].partition(" (aten::")[0]
    assert x.grad is not None
    return loss.dtype, loss.shape, loss.stride(), x.grad.dtype, loss.detach().cpu(), x.grad.cpu()


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shapes", [((3, 4), (3, 4)), ((3, 4), (4,)), ((4,), (3, 4))], ids=str)
def test_losses_of_two_dtypes_are_what_the_cpu_makes_of_them(name: str, shapes: Any) -> None:
    for dtypes in ((torch.float32, torch.float64), (torch.float64, torch.float32), (torch.float32, torch.float32)):
        for reduction in ("none", "mean"):
            expected, found = (lost(on, name, dtypes, shapes, reduction) for on in ("cpu", "tpu"))
            assert found[:4] == expected[:4]
            torch.testing.assert_close(found[4:], expected[4:], rtol=1e-5, atol=1e-5)


def test_singular_values_of_what_is_not_finite_are_refused() -> None:
    x = torch.full((3, 3), float("nan"), device="tpu")
    with pytest.raises(torch.linalg.LinAlgError, match="contained non-finite values"):  # type: ignore[attr-defined]
        torch.linalg.svd(x)[1].cpu()


@pytest.mark.parametrize("uplo", ["L", "U"])
def test_eigenvalues_of_what_is_not_finite_are_refused(uplo: str) -> None:
    x = torch.eye(3, device="tpu")
    x[(2, 0) if uplo == "L" else (0, 2)] = torch.nan
    with pytest.raises(torch.linalg.LinAlgError, match="eigh: The algorithm failed to converge"):  # type: ignore[attr-defined]
        torch.linalg.eigvalsh(x, UPLO=uplo).tolist()
    assert torch.linalg.eigvalsh(x.mT, UPLO=uplo).tolist() == [1, 1, 1]
    assert torch.linalg.eigvalsh(x[1:, 1:] * torch.nan, UPLO=uplo).isnan().all()


def test_a_generator_of_the_device_draws_nothing_on_the_host() -> None:
    generator = torch.Generator("tpu")
    for x in (torch.zeros(()), torch.zeros(3)):
        with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'tpu'"):
            x.uniform_(generator=generator)


@pytest.mark.parametrize("given", [(10,), (7, False), (12, True, 3.5), (1,), (0,)])
def test_kaiser_windows_are_those_of_the_cpu(given: Any) -> None:
    torch.testing.assert_close(torch.kaiser_window(*given, device="tpu").cpu(), torch.kaiser_window(*given))


def test_the_least_common_multiple_wraps_as_on_the_cpu() -> None:
    a, b = torch.tensor([2**31 - 1, 12], dtype=torch.int32), torch.tensor([2, 18], dtype=torch.int32)
    assert torch.lcm(a.to("tpu"), b.to("tpu")).tolist() == torch.lcm(a, b).tolist()


BAD_BAGS: dict[str, dict[str, Any]] = {
    "weights of samples in double": {"per_sample_weights": torch.ones(3, dtype=torch.double)},
    "weights of samples of a mean": {"per_sample_weights": torch.ones(3), "mode": 1},
    "integers": {"weight": torch.ones(5, 2, dtype=torch.int32)},
    "a table of three dimensions": {"weight": torch.ones(5, 2, 1)},
    "offsets in rows": {"offsets": torch.zeros(2, 1, dtype=torch.int64)},
    "offsets in float": {"offsets": torch.zeros(2)},
}


@pytest.mark.parametrize("bad", BAD_BAGS.values(), ids=BAD_BAGS)
@pytest.mark.parametrize("on", ["cpu", "tpu"])
def test_bags_that_the_cpu_refuses_are_refused_when_called(on: str, bad: dict[str, Any]) -> None:
    zeros = torch.zeros(3, dtype=torch.int64)
    given = {"weight": torch.ones(5, 2), "indices": zeros, "offsets": zeros[:2], **bad}
    on_device = {name: value.to(on) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    with pytest.raises(RuntimeError):
        torch.ops.aten._embedding_bag(**on_device)


def test_indices_and_offsets_of_a_bag_may_differ_in_dtype() -> None:
    def run(on: str, mode: int) -> list[torch.Tensor]:
        weight = torch.arange(12.0, device=on).view(4, 3).requires_grad_()
        indices, offsets = torch.tensor([1, 2, 3, 1], device=on), torch.tensor([0, 1], device=on, dtype=torch.int32)
        out = torch.ops.aten._embedding_bag(weight, indices, offsets, mode=mode)
        out[0].sum().backward()
        return [weight.grad, *out]

    for mode in (0, 1, 2):
        for expected, got in zip(run("cpu", mode), run("tpu", mode), strict=True):
            assert got.dtype == expected.dtype
            torch.testing.assert_close(got.cpu(), expected)


def test_integers_to_negative_powers_are_refused_in_place_as_well() -> None:
    x = torch.tensor([1, 2, 3], device="tpu")
    for _ in range(2):
        for exponent in (0, 2):
            x.pow_(exponent)
        with pytest.raises(RuntimeError, match="Integers to negative integer powers"):
            x.pow_(-1)


WARNED: dict[str, tuple[str, Callable[[str], Any]]] = {
    "index_fill_ of one element": (
        "Use of index_fill_ on expanded",
        lambda on: torch.ones(1, device=on).expand(3).index_fill_(0, torch.tensor([0, 1], device=on), 2.0),
    ),
    "index_put_ of one element": (
        "Use of index_put_ on expanded",
        lambda on: torch.ones(1, device=on).expand(3).index_put_((torch.tensor([0, 1], device=on),), *ones(on, (2,))),
    ),
    "masked_fill_ of one element": (
        "Use of masked_fill_ on expanded",
        lambda on: torch.ones(1, device=on).expand(3).masked_fill_(torch.ones(3, device=on).bool(), 2.0),
    ),
    "the deviation of nothing": ("degrees of freedom", lambda on: torch.var(torch.ones(0, 3, device=on), 0)),
    "the deviation of one element": ("degrees of freedom", lambda on: torch.std(*ones(on, (1,)))),
    "the variance of rows of five": (
        r"^var_mean\(\): degrees of freedom",
        lambda on: torch.var_mean(*ones(on, (4, 5)), 1, correction=5),
    ),
    "_aminmax": ("_aminmax is deprecated", lambda on: torch._aminmax(*ones(on, (3,)))),
    "cholesky": ("torch.cholesky is deprecated", lambda on: torch.cholesky(torch.eye(3, device=on))),
    "triangular_solve": (
        "torch.triangular_solve is deprecated",
        lambda on: torch.triangular_solve(*ones(on, (3, 1)), torch.eye(3, device=on)),
    ),
    "index_reduce": (
        "in beta",
        lambda on: torch.index_reduce(*ones(on, (3, 2)), 0, torch.tensor([2], device=on), *ones(on, (1, 2)), "prod"),
    ),
    "searchsorted of values with gaps": (
        "input value tensor is non-contiguous",
        lambda on: torch.searchsorted(*ones(on, (4,)), ones(on, (2, 6))[0][:, ::2]),
    ),
    "bucketize by boundaries with gaps": (
        "boundary tensor is non-contiguous",
        lambda on: torch.bucketize(*ones(on, (4,)), ones(on, (6,))[0][::2]),
    ),
    "writes where there are bytes": (
        "indexing with dtype torch.uint8",
        lambda on: ones(on, (3,))[0].__setitem__(
            torch.tensor([1, 0, 1], dtype=torch.uint8, device=on), *ones(on, (2,))
        ),
    ),
    "where of bytes": (
        "uint8 condition",
        lambda on: torch.where(torch.ones(3, dtype=torch.uint8, device=on), *ones(on, (3,), (3,))),
    ),
    "a cast of complex numbers": ("discards the imaginary part", lambda on: torch.ones(3, device=on).cfloat().float()),
    "a copy of complex numbers": (
        "discards the imaginary part",
        lambda on: torch.ones(3, device=on).copy_(torch.ones(3, device=on).cfloat()),
    ),
}


@pytest.fixture
def warn_always() -> Iterator[None]:
    """A process warns of some things once."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.mark.usefixtures("warn_always")
@pytest.mark.parametrize("name", WARNED)
def test_calls_warn_of_what_the_cpu_warns_of(name: str) -> None:
    words, call = WARNED[name]
    for on in ("cpu", "tpu"):
        with pytest.warns(UserWarning, match=words) as caught:
            call(on)
        assert len(caught) == 1


def test_complex_numbers_become_booleans_without_a_warning() -> None:
    assert torch.ones(3, device="tpu").cfloat().bool().all()


@pytest.mark.usefixtures("warn_always")
def test_a_result_that_is_resized_warns_once() -> None:
    x = torch.ones(4, device="tpu")
    with pytest.warns(UserWarning, match="resized") as caught:
        torch.add(x[:0], 1, out=x)
    assert len(caught) == 1


RESIZED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda x, out: torch.add(x, 1, out=out),
    "sum": lambda x, out: torch.sum(x, 1, out=out),
    "std": lambda x, out: torch.std(x, 1, out=out),
    "mm": lambda x, out: torch.mm(x, x, out=out),
    "sort": lambda x, out: torch.sort(x, out=(out, out.new_ones(7, dtype=torch.int64))),
    "histc": lambda x, out: torch.histc(x, 5, out=out),
    "mvlgamma": lambda x, out: torch.mvlgamma(x + 5, 2, out=out),
    "addbmm": lambda x, out: torch.addbmm(x, x[None], x[None], out=out),
    "eye": lambda x, out: torch.eye(2, out=out),
    "narrow_copy": lambda x, out: torch.narrow_copy(x, 0, 1, 2, out=out),
    "randperm": lambda x, out: torch.randperm(3, out=out),
    "bernoulli": lambda x, out: torch.bernoulli(x, out=out),
    "adaptive_avg_pool2d": lambda x, out: torch.ops.aten.adaptive_avg_pool2d(x[None], [2, 2], out=out),
}


@pytest.mark.usefixtures("warn_always")
@pytest.mark.parametrize("name", RESIZED)
def test_a_result_is_resized_in_the_words_of_the_cpu_or_without_any(name: str) -> None:
    said = []
    for on in ("cpu", "tpu"):
        out = torch.ones(7, device=on)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            RESIZED[name](torch.full((3, 3), 1.0, device=on), out)
        said.append((out.shape, out.stride(), [str(w.message).partition(" (Triggered")[0] for w in caught]))
    assert said[1] == said[0]


def test_a_result_of_a_wrong_dtype_is_refused_though_it_has_another_shape() -> None:
    for on in ("cpu", "tpu"):
        out = torch.ones(7, dtype=torch.int64, device=on)
        with pytest.raises(RuntimeError, match="can't be cast to the desired output type"):
            torch.add(*ones(on, (3,), (3,)), out=out)
        assert out.tolist() == [1] * 7


def test_dtypes_that_cuda_alone_has_kernels_for_are_taken() -> None:
    x = torch.tensor([[1, 2], [2, 4]], device="tpu")
    assert torch.histc(x, 4, 1, 4).tolist() == [1, 2, 0, 1]
    assert torch.trace(x.bool()).item() == 2
    assert torch.nansum(x.cfloat()).item() == 9


@pytest.mark.parametrize("keepdim", [False, True])
def test_no_dimensions_are_all_dimensions_of_nansum(keepdim: bool) -> None:
    x = torch.tensor([[1.0, float("nan")], [3.0, 5.0]])
    for op in (torch.nansum, torch.nanmean):
        found, expected = op(x.to("tpu"), (), keepdim), op(x, (), keepdim)
        assert (found.shape, found.tolist()) == (expected.shape, expected.tolist())
    out = torch.empty(0, device="tpu")
    torch.nansum(x.to("tpu"), (), keepdim, out=out)
    assert out.sum().item() == 9


DECOMPOSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "cholesky": torch.linalg.cholesky,
    "qr": torch.linalg.qr,
    "svdvals": torch.linalg.svdvals,
    "eigvalsh": torch.linalg.eigvalsh,
    "eigvals": torch.linalg.eigvals,
    "solve": lambda x: torch.linalg.solve(x, x),
    "lu": torch.linalg.lu,
    "lu_factor": torch.linalg.lu_factor,
    "ormqr": lambda x: torch.ormqr(x, x[0], x),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", DECOMPOSED)
def test_matrices_of_half_precision_are_not_decomposed(name: str, dtype: torch.dtype) -> None:
    said = []
    for on in ("cpu", "tpu"):
        with pytest.raises(NotImplementedError) as caught:
            DECOMPOSED[name](torch.eye(3, dtype=dtype, device=on))
        said.append(str(caught.value))
    assert said[1] == said[0]


def test_an_output_on_another_device_is_named() -> None:
    x, out = torch.ones(3), torch.ones(1, device="tpu")
    with pytest.raises(RuntimeError, match="Expected out tensor to have device cpu, but got tpu:0 instead"):
        torch.sum(x, [0], out=out)
    with pytest.raises(RuntimeError, match="Expected out tensor to have device tpu:0, but got cpu instead"):
        torch.sum(x.to("tpu"), [0], out=x)
    with pytest.raises(RuntimeError, match="expected device 'cpu' but got 'tpu:0' for values output"):
        torch.mode(x, 0, out=(out, torch.ones(1, dtype=torch.int64)))
    with pytest.raises(RuntimeError, match="expected device 'tpu:0' but got 'cpu' for indices output"):
        torch.mode(x.to("tpu"), 0, out=(out, torch.ones(1, dtype=torch.int64)))


DIVISIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fmod into nothing": lambda x: torch.fmod(x, x - 1, out=torch.empty(0, dtype=torch.int64, device=x.device)),
    "remainder into nothing": lambda x: torch.remainder(x, x - 1, out=torch.empty(0, dtype=x.dtype, device=x.device)),
    "div into nothing": lambda x: torch.div(
        x, x - 1, rounding_mode="floor", out=torch.empty(0, dtype=x.dtype, device=x.device)
    ),
    "remainder_ by itself": lambda x: x.remainder_(x),
    "floor_divide_ by itself": lambda x: x.floor_divide_(x),
    "fmod_ by a part of itself": lambda x: x[:1].fmod_(x[1:2]),
    "cholesky_inverse into nothing": lambda x: torch.cholesky_inverse(
        torch.diag(x.float()), out=torch.empty(0, device=x.device)
    ),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_the_trial_of_a_call_does_not_refuse_values_that_it_made_up(name: str) -> None:
    expected, found = (DIVISIONS[name](torch.tensor([4, 5, 7], device=on)) for on in ("cpu", "tpu"))
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("on", ["cpu", "tpu"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("is_last_included", [False, True])
@pytest.mark.parametrize("offsets", [[1, 2], [-1, 2], [0, 5], [0, 2, 9]])
def test_offsets_of_bags_are_checked(offsets: list[int], is_last_included: bool, mode: str, on: str) -> None:
    given = torch.tensor([0, 1, 2, 3], device=on), torch.ones(5, 2, device=on), torch.tensor(offsets, device=on)
    with pytest.raises(RuntimeError, match=r"offsets\[0\] has to be 0|offsets\[-1\] can not be greater"):
        F.embedding_bag(*given, mode=mode, include_last_offset=is_last_included).cpu()


@pytest.mark.parametrize("on", ["cpu", "tpu"])
@pytest.mark.parametrize("index", [[3], [-1]])
def test_what_index_add_raises_depends_on_the_dimensions(index: list[int], on: str) -> None:
    for shape, error, message in (
        ((3,), IndexError, "index out of range in self"),
        ((3, 2), RuntimeError, "is out of bounds for dimension 0 with size 3"),
    ):
        x = torch.zeros(shape, device=on)
        with pytest.raises(error, match=message):
            x.index_add(0, torch.tensor(index, device=on), torch.ones((1, *shape[1:]), device=on)).cpu()


@pytest.mark.parametrize("on", ["cpu", "tpu"])
@pytest.mark.parametrize(
    ("dtype", "n"), [(torch.uint8, 257), (torch.int8, 129), (torch.half, 2050), (torch.float, 2**24 + 2)]
)
def test_permutations_that_their_dtype_does_not_hold_are_refused(dtype: torch.dtype, n: int, on: str) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"n cannot be greater than|without overflow"):
            torch.randperm(n, dtype=dtype, device=on)
        with pytest.raises(RuntimeError, match=r"n cannot be greater than|without overflow"):
            torch.randperm(n, out=torch.empty(0, dtype=dtype, device=on))
    assert torch.randperm(n - 1, dtype=dtype, device=on).unique().numel() == n - 1


FILLS: dict[str, Callable[[torch.Tensor, float], Any]] = {
    "fill_": lambda x, value: x.fill_(value),
    "masked_fill": lambda x, value: x.masked_fill(x == x, value),
    "scatter": lambda x, value: x.scatter(0, torch.arange(3, device=x.device), value),
    "index_fill_": lambda x, value: x.index_fill_(0, torch.arange(3, device=x.device), value),
    "pad": lambda x, value: F.pad(x, (2, 1), value=value)[:3],
}


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
@pytest.mark.parametrize(
    ("dtype", "values", "is_refused"),
    [
        (torch.uint8, [3, 4, 5, 300, 256, 255, 6], [300, 256]),
        (torch.int8, [3.0, 4.5, 5.5, 300.5, 127.0], [300.5]),
        (torch.int32, [1.5, 5.0, 7.0, float("nan"), float("inf"), 2.0**40, 6.0], [float("inf"), 2.0**40]),
        (torch.half, [1.5, 2.5, 3.5, 1e5, -7e4, float("inf"), 65504.0], [1e5, -7e4]),
        (torch.bfloat16, [1.5, 2.5, 3.5, 1e39, 4.5], [1e39]),
        (torch.float32, [1.5, 2.5, 3.5, 1e300, 4.5], [1e300]),
    ],
)
def test_numbers_that_do_not_fit_are_refused_after_others_that_did(
    dtype: torch.dtype, values: list[float], is_refused: list[float], fill: Callable[[torch.Tensor, float], Any]
) -> None:
    x = torch.zeros(3, dtype=dtype, device="tpu")
    for value in values:
        if value in is_refused or value != value:
            with pytest.raises(RuntimeError, match="without overflow"):
                fill(x, value)
        else:
            assert fill(x, value).tolist()[1] in (value, torch.tensor(value).to(dtype).item())


@pytest.mark.filterwarnings("error")
def test_one_element_of_half_precision_takes_larger_numbers_as_infinity() -> None:
    x = torch.zeros(1, dtype=torch.half, device="tpu")
    assert [x.fill_(value).item() for value in (1.5, 2.5, 7e4, -8e4, 3.5)] == [1.5, 2.5, math.inf, -math.inf, 3.5]


@pytest.mark.parametrize("on", ["cpu", "tpu"])
def test_sides_of_a_search_are_checked(on: str) -> None:
    x = torch.arange(3.0, device=on)
    with pytest.raises(RuntimeError, match="side can only be 'left' or 'right' but got bad"):
        torch.searchsorted(x, x, side="bad")
    with pytest.raises(RuntimeError, match="side and right can't be set to opposites"):
        torch.searchsorted(x, 1.5, side="left", right=True)


@pytest.mark.parametrize("on", ["cpu", "tpu"])
def test_an_image_of_five_dimensions_is_not_reflected(on: str) -> None:
    with pytest.raises(RuntimeError, match="Expected 3D or 4D"):
        torch.ops.aten.reflection_pad2d(torch.zeros(2, 2, 5, 5, 5, device=on), (2, 2, 2, 2))


@pytest.mark.filterwarnings("ignore:.*no lowering")
def test_a_sparse_gradient_of_bags_is_refused() -> None:
    weight = torch.ones(5, 2, device="tpu", requires_grad=True)
    index, offsets = torch.tensor([3, 1, 1], device="tpu"), torch.tensor([0], device="tpu")
    made = torch.nn.functional.embedding_bag(index, weight, offsets, mode="sum", sparse=True)
    with pytest.raises(NotImplementedError, match="sparse tensors are not supported"):
        made.sum().backward()


@pytest.mark.parametrize("on", ["cpu", "tpu"])
def test_a_convolution_of_no_channels_makes_none(on: str) -> None:
    image, kernel, bias = (t.requires_grad_() for t in ones(on, (2, 0, 4, 4), (6, 0, 3, 3), (6,)))
    made = F.conv2d(image, kernel, bias)
    made.sum().backward()
    assert made.shape == (2, 0, 2, 2)
    assert (image.grad.shape, kernel.grad.shape, bias.grad.tolist()) == (image.shape, kernel.shape, [0.0] * 6)


@pytest.mark.parametrize("on", ["cpu", "tpu"])
@pytest.mark.parametrize("length", [0, 3])
def test_a_convolution_of_no_images_makes_none(length: int, on: str) -> None:
    image, kernel, bias = (t.requires_grad_() for t in ones(on, (0, 1, length), (1, 2, 3), (2,)))
    made = F.conv_transpose1d(image, kernel, bias, stride=2, output_padding=1)
    made.sum().backward()
    assert made.shape == (0, 2, 2 * length + 2)
    assert (image.grad.shape, kernel.grad.tolist(), bias.grad.tolist()) == (image.shape, [[[0.0] * 3] * 2], [0.0] * 2)


@pytest.mark.parametrize("reduce", ["sum", "mean", "prod", "max", "min", "amax", "amin"])
def test_segments_are_reduced_by_every_name(reduce: str) -> None:
    found = []
    for on in ("cpu", "tpu"):
        x = torch.tensor([1.0, 3.0, 3.0, 2.0, 4.0, 5.0]).to(on).detach().requires_grad_()
        made = torch.segment_reduce(x, reduce, lengths=torch.tensor([3, 3], device=on))
        made.sum().backward()
        found.append([made.detach().cpu(), x.grad.cpu()])
    torch.testing.assert_close(found[1], found[0])
