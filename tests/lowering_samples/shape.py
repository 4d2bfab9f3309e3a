"""Calls of pads, windows and copies of views that no OpInfo makes."""

import torch

aten = torch.ops.aten


def samples(dtype):
    torch.manual_seed(2)
    x = torch.randn(3, 4, 6).to(dtype)
    yield "alias", lambda: (aten.detach_copy(x), aten.lift_fresh_copy(x), aten._reshape_copy(x, [4, -1]))
    yield "select_copy", lambda: (aten.select_copy.int(x, 1, 2), aten.select_copy.int(x, -1, -1))
    yield (
        "slice_copy",
        lambda: (
            aten.slice_copy.Tensor(x, 1, 1, -1),
            aten.slice_copy.Tensor(x, 2, 1, 99, 2),
            aten.slice_copy.Tensor(x),
        ),
    )
    yield "split_copy", lambda: (aten.split_copy.Tensor(x, 4, 2), aten.split_copy.Tensor(x, 2, 0))
    yield (
        "squeeze_copy.dims",
        lambda: (aten.squeeze_copy.dims(x[:1], [0, 1]), aten.squeeze_copy.dims(x[:1, :, :1], [0, 2])),
    )
    yield "_stack", lambda: (aten._stack([x, x], 1), aten._stack([x, x], -1))
    yield (
        "cat",
        lambda: (aten.cat([x, x[0, 0, :0]], 1), aten.cat([x, x.to(torch.float32)], -1), aten.cat([x[0, 0, :0]])),
    )
    yield "block", lambda: (aten.roll(x, [1, -2], [0, 2]), aten.roll(x, [7]), aten.rot90(x, -1, [2, 0]))
    yield (
        "slice_backward",
        lambda: [aten.slice_backward(x, [3, 20, 6], 1, s, e, p) for s, e, p in ((0, 4, 1), (2, 10, 2), (-8, 99, 2))],
    )
    yield (
        "select_backward",
        lambda: (aten.select_backward(x, [3, 4, 5, 6], -2, -1), aten.select_backward(x, [3, 4, 6, 2], 3, 0)),
    )
    yield (
        "slice_scatter",
        lambda: (aten.slice_scatter(x, x[:, :2], 1, 1, -1), aten.slice_scatter(x, x[..., :3], 2, 0, 99, 2)),
    )
    for size, step in ((3, 1), (3, 2), (2, 3), (60, 1), (4, 4)):
        line = x.reshape(1, 72)[:, :71]
        yield "unfold_copy", lambda n=size, s=step, line=line: aten.unfold_copy(line, 1, n, s)
        if dtype is not torch.bool:
            yield (
                "unfold_backward",
                lambda n=size, s=step, line=line: aten.unfold_backward(line.unfold(1, n, s), [1, 71], 1, n, s),
            )
    if dtype.is_complex:
        yield "view_as_real_copy", lambda: aten.view_as_real_copy(x)
    if dtype is torch.float32:
        yield "view_as_complex_copy", lambda: aten.view_as_complex_copy(x.reshape(3, 12, 2))
    if not dtype.is_floating_point:
        return
    image, volume = x.reshape(1, 3, 4, 6), x.reshape(1, 1, 3, 4, 6)
    yield "im2col", lambda: [aten.im2col(image, [2, 3], [1, d], [1, 2], [s, 1]) for d in (1, 2) for s in (1, 2)]
    yield (
        "im2col",
        lambda: (aten.im2col(x, [2, 2], [1, 1], [0, 0], [1, 2]), aten.im2col(image, [1, 1], [1, 1], [0, 0], [2, 2])),
    )
    columns = aten.im2col(image, [2, 3], [1, 2], [1, 2], [2, 1])
    yield (
        "col2im",
        lambda: (
            aten.col2im(columns, [4, 6], [2, 3], [1, 2], [1, 2], [2, 1]),
            aten.col2im(columns[0], [4, 6], [2, 3], [1, 2], [1, 2], [2, 1]),
        ),
    )
    for name, inputs in (("1d", x), ("2d", image), ("3d", volume)):
        rank = int(name[0])
        for padding in ([1, 2, 2, 1, 1, 0], [0, 0, 1, 1, 2, 1], [2, -1, -1, 2, 0, 1]):
            for kind in ("reflection", "replication"):
                yield f"{kind}_pad{name}", lambda k=kind, n=name, i=inputs, p=padding[: 2 * rank]: _padded(k, n, i, p)


def _padded(kind, name, x, padding):
    x = x.detach().clone().requires_grad_()
    out = getattr(aten, f"{kind}_pad{name}")(x, padding)
    out.backward(torch.ones_like(out))
