"""The `*_copy` forms of views: what the view would show, as an array of its own."""

from __future__ import annotations

import itertools

from torchtpu.ops.registry import jnp, lax, lowering
from torchtpu.ops.shape.shape import windows


@lowering("alias_copy", "detach_copy", "lift_fresh_copy")
def alias_copy(x):
    return x


@lowering("expand_copy")
def expand_copy(x, size, *, implicit=False, ctx):
    return jnp.broadcast_to(x, ctx.results[0][0])


@lowering("view_copy", "_reshape_copy")
def view_copy(x, size, *, ctx):
    return x.reshape(ctx.results[0][0])


@lowering("squeeze_copy")
def squeeze_copy(x, *, ctx):
    return x.reshape(ctx.results[0][0])


@lowering("squeeze_copy.dim", "squeeze_copy.dims", "unsqueeze_copy")
def squeeze_copy_dim(x, dim, *, ctx):
    return x.reshape(ctx.results[0][0])


@lowering("permute_copy")
def permute_copy(x, dims):
    return jnp.transpose(x, [d % x.ndim for d in dims])


@lowering("transpose_copy.int")
def transpose_copy(x, dim0, dim1):
    return jnp.swapaxes(x, dim0, dim1) if x.ndim else x


@lowering("t_copy")
def t_copy(x):
    return x.T


@lowering("select_copy.int")
def select_copy(x, dim, index):
    return lax.index_in_dim(x, index, dim, keepdims=False)


@lowering("slice_copy.Tensor")
def slice_copy(x, dim=0, start=None, end=None, step=1):
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


@lowering("narrow_copy")
def narrow_copy(x, dim, start, length):
    first = start % x.shape[dim] if start < 0 else start
    return lax.slice_in_dim(x, first, first + length, axis=dim)


@lowering("diagonal_copy")
def diagonal_copy(x, offset=0, dim1=0, dim2=1, *, ctx):
    shape = ctx.results[0][0]
    return jnp.diagonal(x, offset, dim1, dim2) if shape[-1] else jnp.zeros(shape, x.dtype)


@lowering("unfold_copy")
def unfold_copy(x, dimension, size, step):
    if x.ndim == 0:
        return x.reshape(1)[:size]
    dimension %= x.ndim
    return jnp.moveaxis(windows(x, dimension, size, step), dimension + 1, -1)


@lowering("split_copy.Tensor", "split_with_sizes_copy")
def split_copy(x, sizes, dim=0, *, ctx):
    ends = itertools.accumulate((shape[dim] for shape, _ in ctx.results), initial=0)
    return [lax.slice_in_dim(x, start, end, axis=dim) for start, end in itertools.pairwise(ends)]


@lowering("unbind_copy.int")
def unbind_copy(x, dim=0):
    return [lax.index_in_dim(x, i, dim, keepdims=False) for i in range(x.shape[dim])]


@lowering("view_as_real_copy")
def view_as_real_copy(x):
    return jnp.stack([x.real, x.imag], -1)


@lowering("view_as_complex_copy")
def view_as_complex_copy(x):
    return lax.complex(x[..., 0], x[..., 1])
