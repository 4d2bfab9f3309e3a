"""Calls of reductions, scans and sorts that no OpInfo makes."""

import math

import torch

aten = torch.ops.aten


def samples(dtype):
    if dtype.is_complex:
        return
    x = torch.randn(4, 5).to(dtype)
    odd = torch.tensor([[3, 1, math.nan, 1, math.inf], [2, math.nan, math.nan, -math.inf, 2], [0, 0, 0, 0, 0]])
    odd = odd.to(dtype) if dtype.is_floating_point else torch.arange(15).reshape(3, 5).remainder(4).to(dtype)
    yield (
        "_aminmax",
        lambda: (aten._aminmax(x), aten._aminmax(odd), aten._aminmax.dim(odd, 1), aten._aminmax.dim(odd, 0, True)),
    )
    for op in (aten.amax, aten.amin):
        yield "nan extremes", lambda op=op: (op(odd, [1]), op(odd, [0], True), op(odd))
    for op in (aten.argmax, aten.argmin, aten.max, aten.min, aten.aminmax):
        yield "nan extremes", lambda op=op: (op(odd), op(odd, dim=1), op(odd, dim=0, keepdim=True))
    yield "all.dims", lambda: (aten.all.dims(odd, [0, 1]), aten.any.dims(odd, [0, -1], True), aten.any.dims(odd, None))
    yield (
        "empty",
        lambda: (aten.sum(x[:0]), aten.prod(x[:0]), aten.sum(x[:0], [0]), aten.any(x[:0]), aten.all(x[:0], 0)),
    )
    for op in (aten.cummax, aten.cummin):
        yield "ties", lambda op=op: (op(odd, 1), op(odd, 0), op(x[:0], 0), op(x[0, 0], 0))
    yield (
        "sort",
        lambda: [aten.sort.stable(odd, stable=True, dim=d, descending=o) for d in (0, 1) for o in (False, True)],
    )
    yield (
        "median",
        lambda: (aten.median(odd), aten.nanmedian(odd), aten.median.dim(x, 0), aten.nanmedian.dim(x, 1, True)),
    )
    ties = torch.arange(15).reshape(3, 5).remainder(4).to(dtype)
    yield "mode", lambda: (aten.mode(ties, 1), aten.mode(ties, 0, True))
    sequence = x.reshape(-1).to(torch.float32).sort().values.to(dtype)
    if dtype is not torch.bool:
        large = torch.arange(3000).remainder(100).sort().values.to(dtype)
        wanted = torch.arange(1000).remainder(120).to(dtype)
        for right in (False, True):
            yield "searchsorted.Scalar", lambda r=right: aten.searchsorted.Scalar(sequence, 1, right=r)
            yield (
                "searchsorted.Scalar",
                lambda r=right: aten.searchsorted.Scalar(sequence, 0.5, right=r, out_int32=True),
            )
            yield "bucketize.Scalar", lambda r=right: aten.bucketize.Scalar(1, sequence, right=r)
            yield "searchsorted large", lambda r=right: aten.searchsorted(large, wanted, right=r)
            yield "bucketize large", lambda r=right: aten.bucketize(wanted, large, right=r)
            yield (
                "searchsorted rows",
                lambda r=right: aten.searchsorted(large.expand(3, -1), wanted.expand(3, -1), right=r),
            )
        yield "isin.Tensor_Scalar", lambda: (aten.isin.Tensor_Scalar(x, 1), aten.isin.Tensor_Scalar(x, 1, invert=True))
        yield "isin.Scalar_Tensor", lambda: aten.isin.Scalar_Tensor(1, x)
        yield (
            "isin large",
            lambda: (aten.isin(wanted, large), aten.isin(wanted, large[:0]), aten.isin(wanted, large, invert=True)),
        )
    yield "hash_tensor", lambda: (aten.hash_tensor(x), aten.hash_tensor(x, [1], keepdim=True))
    yield (
        "asserts",
        lambda: (
            aten._assert_async(x.new_ones(())),
            aten._assert_async.msg(x.new_ones(()), "no"),
            aten._functional_assert_async.msg(x.new_ones(()), "no", x),
        ),
    )
    if not dtype.is_floating_point:
        return
    for p in (0, 0.5, 1, 2, 3):
        yield (
            "linalg__powsum",
            lambda p=p: (aten.linalg__powsum(x, p), aten.linalg__powsum(x, p, [1], True, dtype=torch.float32)),
        )
    yield "topk", lambda: [aten.topk(odd[:2], k, 1, o)[0] for k in (1, 3, 5) for o in (False, True)]
    yield "kthvalue", lambda: [aten.kthvalue(odd[0], k) for k in (4, 5)]
    yield "searchsorted nan", lambda: aten.searchsorted(sequence, odd)
    for p in (0, 0.5, 1, 2, 3, math.inf, -math.inf):
        yield "norm.Scalar", lambda p=p: (aten.norm.Scalar(x, p), aten.norm.Scalar(odd, p))
        yield "norm.ScalarOpt_dtype", lambda p=p: aten.norm.ScalarOpt_dtype(x, p, dtype=torch.float32)
        yield (
            "norm.ScalarOpt_dim_dtype",
            lambda p=p: aten.norm.ScalarOpt_dim_dtype(x, p, [1], True, dtype=torch.float32),
        )
        yield "linalg_vector_norm", lambda p=p: aten.linalg_vector_norm(odd, p, [1], dtype=torch.float32)
    yield "var", lambda: [aten.var.correction(x[:2], [0], correction=c) for c in (0, 1, 2, 3, 0.5)]
    yield (
        "logsumexp",
        lambda: (aten.logsumexp(odd, [1]), aten.logsumexp(-odd, [0, 1], True), aten.logsumexp(x[:0], [0])),
    )
    yield "_logcumsumexp", lambda: (aten._logcumsumexp(x, 1), aten._logcumsumexp(odd, 0))
    yield "renorm", lambda: [aten.renorm(x, p, 1, 0.7) for p in (1, 2, math.inf)]
    yield (
        "histc",
        lambda: (aten.histc(odd, 4, -1, 3), aten.histc(x, 3), aten.histc(x[:1, :1], 3), aten.histc(x, 5, 1, 1)),
    )
