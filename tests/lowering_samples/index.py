"""Calls of indexing, scattering and embedding ops that no OpInfo makes."""

import torch

aten = torch.ops.aten


def samples(dtype):
    torch.manual_seed(1)
    x = torch.randn(4, 5, 6).to(dtype)
    rows, columns, other = torch.tensor([0, -1, 2]), torch.tensor([[1], [-2]]), torch.tensor(3)
    mask = torch.tensor([True, False, True, True])
    plane = (torch.arange(20) % 3 == 0).reshape(4, 5)
    for op in (aten.index.Tensor, aten._unsafe_index.Tensor):
        for index in (
            [rows],
            [None, rows],
            [rows, None, rows],
            [rows, columns],
            [None, rows, columns],
            [columns, None, rows],
            [rows, other],
            [other, None, other],
            [None, None, other],
            [other],
        ):
            yield "index", lambda op=op, index=index: op(x, index)
    for op in (aten.index_put, aten._unsafe_index_put, aten._index_put_impl):
        for accumulate in (False, True):
            for index, shape in (
                ([rows], (3, 5, 6)),
                ([None, rows], (1,)),
                ([rows, None, rows], (3, 5)),
                ([columns, rows], (6,)),
                ([mask], ()),
                ([mask], (3, 5, 6)),
                ([mask], (5, 6)),
                ([plane], (7, 6)),
                ([plane], (1, 6)),
                ([None, None, x[0, 0] == x[0, 0]], (4, 5, 6)),
                ([None, plane[0]], (4, 2, 6)),
                ([mask, rows], (3, 6)),
                ([mask, None, rows], (3, 5)),
                ([mask, other], (3, 6)),
                ([mask, other], ()),
                ([mask, None, other], (3, 1)),
                ([mask, plane[2]], (6,)),
                ([mask, columns], (2, 3, 6)),
                ([other, plane[0]], (2, 6)),
                ([mask, mask[[0, 1, 2, 3, 1]]], (3, 6)),
                ([plane, rows[:1]], (7,)),
                ([mask & False], (0, 5, 6)),
                ([mask & False, other], (1, 6)),
            ):
                values = torch.randn(shape).to(dtype)
                if not accumulate or dtype is not torch.bool:
                    yield "index_put", lambda op=op, i=index, v=values, a=accumulate: op(x, i, v, a)
    for reduce in ("add", "multiply"):
        at = torch.tensor([[0, 2, 1, 0, 3]])
        source = x[:, :, 0]
        yield "scatter.reduce", lambda r=reduce, at=at, s=source: aten.scatter.reduce(x[..., 1], 0, at, s, reduce=r)
        yield "scatter.value_reduce", lambda r=reduce, at=at: aten.scatter.value_reduce(x[..., 1], 0, at, 3, reduce=r)
    yield "put", lambda: (aten.put(x, rows, x[0, 0, :3]), aten.put(x, columns, x[0, 0, :2].reshape(2, 1), True))
    yield (
        "0-d",
        lambda: (aten.gather(x[0, 0, 0], 0, rows[0]), aten.index_select(x[0, 0, 0], 0, rows[:1]), aten.take(x, other)),
    )
    starts, numbers = torch.tensor([[0, 2, 3], [0, 1, 3]]), torch.tensor([[0, 1, 1], [2, 0, 1]])
    for transpose in (False, True):
        yield "coo", lambda t=transpose: aten._convert_indices_from_csr_to_coo(starts, numbers, transpose=t)
        yield "coo", lambda t=transpose: aten._convert_indices_from_csr_to_coo(starts[0], numbers[0], out_int32=t)
        yield "csr", lambda t=transpose: aten._convert_indices_from_coo_to_csr(torch.tensor([0, 0, 2]), 4, out_int32=t)
    if not dtype.is_floating_point:
        return
    weight, bags = x[0], torch.tensor([1, 2, 3, 2, 1, 4])
    for norm in (1.0, 2.0):
        yield "embedding_renorm", lambda n=norm: aten.embedding_renorm(weight, bags, 0.8, n)
    for scale in (False, True):
        grad = torch.ones(6, 6, dtype=dtype)
        yield "embedding_dense_backward", lambda g=grad, s=scale: aten.embedding_dense_backward(g, bags, 5, 2, s)
    for mode in (0, 1, 2):
        for last in (False, True):
            offsets = torch.tensor([0, 2, 2, 6][: 4 if last else 3])
            for padding in (-1, 2):
                for op in (aten._embedding_bag, aten._embedding_bag_forward_only)[: 1 if last else 2]:
                    yield (
                        "embedding_bag",
                        lambda o=op, f=offsets, m=mode, e=last, p=padding: o(
                            weight, bags, f, False, m, False, None, e, p
                        ),
                    )
                yield (
                    "embedding_bag_backward",
                    lambda f=offsets, m=mode, e=last, p=padding: _bag_gradient(weight, bags, f, m, e, p),
                )


def _bag_gradient(weight, bags, offsets, mode, last, padding):
    weight = weight.detach().clone().requires_grad_()
    scale = torch.ones(6, dtype=weight.dtype).requires_grad_() if mode == 0 else None
    out = aten._embedding_bag(weight, bags, offsets, False, mode, False, scale, last, padding)[0]
    out.backward(torch.ones_like(out))
