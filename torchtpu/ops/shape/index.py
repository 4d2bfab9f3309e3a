"""Reads and writes of arrays at indices.

Every index is checked on the device (`ctx.check`): XLA clamps a read and drops a write that is out of range, and the
op's error is raised before anybody sees such a value.
"""

from __future__ import annotations

from typing import Any

import torch

from torchtpu.ops.registry import Context, jnp, like, lowering, opmath

PROMISED = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
DROPPED = {"mode": "drop", "wrap_negative_indices": False}


def checked(ctx: Context, index: Any, size: int, message: str, error: type[Exception] = IndexError) -> Any:
    """`index`, after a check that 0 <= index < size."""
    ctx.check((index >= 0) & (index < size), message, error)
    return index


def wrapped(ctx: Context, index: Any, size: int, message: str) -> Any:
    """`index` counted from 0, after a check that -size <= index < size."""
    return checked(ctx, _from_zero(index, size), size, message)


def _from_zero(index: Any, size: int) -> Any:
    return jnp.where(index < 0, index + size, index)


def out_of_bounds(dim: int, size: int) -> str:
    return f"index is out of bounds for dimension {dim} with size {size}"


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in (bool, jnp.uint8)


def _read_plainly(self: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor | None:
    """A read of a contiguous tensor at one index, or at several of one shape for dimensions in a row; None where the op
    is something else, or an error."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if not given or len(indices) > self.dim() or not self.is_contiguous() or self.numel() == 0:
        return None
    (first, index), (last, _) = given[0], given[-1]
    if any(i.dtype not in (torch.int64, torch.int32) or i.numel() == 0 for _, i in given):
        return None
    if last - first + 1 != len(given) or any(i.shape != index.shape or not i.is_contiguous() for _, i in given):
        return None
    shape = (*self.shape[:first], *index.shape, *self.shape[last + 1 :])
    return torch.empty(shape, dtype=self.dtype, device=self.device)


def _infer_index(self: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor:
    """What the meta kernel says, which is Python and slow."""
    found = _read_plainly(self, indices)
    return torch.ops.aten.index.Tensor(self, indices) if found is None else found


def _infer_masked_index(
    self: torch.Tensor, mask: torch.Tensor, indices: list[torch.Tensor | None], fill: Any
) -> torch.Tensor:
    found = None if mask.dtype is not torch.bool else _read_plainly(self, indices)
    if found is not None and torch.broadcast_shapes(found.shape, mask.shape) == found.shape:
        return found
    return torch.ops.aten._unsafe_masked_index(self, mask, indices, fill)


@lowering("index.Tensor")
@lowering("_unsafe_index.Tensor", infer=_infer_index)
def index_tensor(x, indices, *, ctx):
    assert not any(map(_is_mask, indices)), "the shape of a read at a mask depends on data"
    where = [None if i is None else _wrapped_at(ctx, i, x, d) for d, i in enumerate(indices)]
    return x.at[_slices(where)].get(**PROMISED)


def _wrapped_at(ctx: Context, index: Any, x: Any, dim: int) -> Any:
    return wrapped(ctx, index, x.shape[dim], out_of_bounds(dim, x.shape[dim]))


def _slices(where: list[Any]) -> tuple[Any, ...]:
    return tuple(slice(None) if i is None else i for i in where)


def _infer_put(x, indices, values, *flags):
    """A copy of `x`; raises where the values or a mask do not fit (torch's own meta kernel checks nothing)."""
    if x.dtype != values.dtype and not _fills(indices, values, *flags):
        raise RuntimeError("Index put requires the source and destination dtypes match")
    dim = 0
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        if is_mask and x.shape[dim : dim + index.ndim] != index.shape:
            raise IndexError(f"the mask {list(index.shape)} does not match {list(x.shape)} at dimension {dim}")
        dim += index.ndim if is_mask else 1
    # how many ones a mask has is not known: it fits if any number that the values may stand for does
    if not any(_fits(x, indices, values, ones) for ones in {1, *values.shape}):
        raise RuntimeError(f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast")
    return like(x)


def _fills(indices: Any, values: torch.Tensor, accumulate: bool = False, *flags: Any) -> bool:
    """Whether PyTorch takes the write for `masked_fill_`, which converts its number: that of one element to what a
    single mask takes."""
    given = [i for i in indices if i is not None]
    return values.numel() == 1 and not accumulate and len(given) == 1 and given[0].dtype in (torch.bool, torch.uint8)


def _fits(x: torch.Tensor, indices: Any, values: torch.Tensor, ones: int) -> bool:
    numbers: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            numbers.append(index)
        else:
            numbers += [torch.empty(ones, dtype=torch.int64, device="meta")] * index.ndim
    shape = torch.ops.aten.index.Tensor(x, numbers).shape
    tail = shape[max(len(shape) - values.ndim, 0) :]
    return values.ndim <= len(shape) and all(n in (1, m) for n, m in zip(values.shape, tail, strict=True))


@lowering("index_put", "_unsafe_index_put", infer=_infer_put)
def index_put(x, indices, values, accumulate=False, *, ctx):
    values, masks = converted(ctx, values, x.dtype), [i for i in indices if _is_mask(i)]
    if not masks:
        where = [None if i is None else _wrapped_at(ctx, i, x, d) for d, i in enumerate(indices)]
    elif len(masks) == 1 and all(i is None or i is masks[0] for i in indices):
        return _put_at_mask(ctx, x, indices, masks[0] != 0, values, accumulate)
    else:
        where = _positions_with_masks(ctx, x, indices, values)
    return (_accumulated if accumulate else _stored)(x, _slices(where), values)


def _stored(x: Any, where: Any, values: Any) -> Any:
    return x.at[where].set(values, **DROPPED)


def _accumulated(x: Any, where: Any, values: Any) -> Any:
    if x.dtype == bool:
        return x.at[where].max(values, **DROPPED)
    return opmath(x).at[where].add(values, **DROPPED)


@lowering("_index_put_impl", infer=_infer_put)
def index_put_impl(x, indices, values, accumulate=False, unsafe=False, *, ctx):
    return index_put(x, indices, values, accumulate, ctx=ctx)


# What an error calls the C++ types that are named otherwise here
_TYPES = {
    "float16": "c10::Half",
    "bfloat16": "c10::BFloat16",
    "float32": "float",
    "float64": "double",
    "int32": "int",
    "complex64": "c10::complex<float>",
    "complex128": "c10::complex<double>",
}


def converted(ctx: Context, values: Any, dtype: Any) -> Any:
    """`values` in another dtype, after a check that it holds them, as PyTorch converts a number."""
    if dtype in (values.dtype, bool):
        return values.astype(dtype)
    message = f"value cannot be converted to type {_TYPES.get(dtype.name, f'{dtype.name}_t')} without overflow"
    if jnp.issubdtype(values.dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        ctx.check(values.imag == 0, message, RuntimeError)
        values = values.real
    ctx.check(_holds(dtype, values), message, RuntimeError)
    return values.astype(dtype)


def filling(ctx: Context, value: Any, dtype: Any) -> Any:
    """A number to fill an array of this dtype with, a tensor's or a Python number."""
    number = jnp.asarray(value)
    # a Python number beyond these dtypes is refused by the call, so that no mask has to be checked
    is_wide = dtype in (jnp.float64, jnp.float32, jnp.bfloat16) and number.weak_type
    is_complex = jnp.issubdtype(number.dtype, jnp.complexfloating)
    is_looked_at = isinstance(value, int) or (is_wide and not is_complex)
    return number.astype(dtype) if is_looked_at else converted(ctx, number, dtype)


def _holds(dtype: Any, values: Any) -> Any:
    """Whether a number of the dtype is near each value; unsigned ones stand for negative integers as well."""
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        return _holds(dtype, values.real) & _holds(dtype, values.imag)
    if not jnp.issubdtype(dtype, jnp.integer):
        most = float(jnp.finfo(dtype).max)
        return (jnp.abs(values.astype(jnp.float64)) <= most) | ~jnp.isfinite(values)
    least, most = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
    if jnp.issubdtype(values.dtype, jnp.floating):
        wide = values.astype(jnp.float64)
        return (wide >= float(least)) & (wide <= float(most))
    if values.dtype == bool or dtype.itemsize >= 8:
        return True
    wide = values.astype(jnp.int64)
    return (wide >= (least or -most)) & (wide <= most)


def _put_at_mask(ctx: Context, x: Any, indices: Any, mask: Any, values: Any, accumulate: bool) -> Any:
    """x[:, ..., mask] = values without a scatter: the n-th one of the mask takes the n-th slice of the values."""
    lead = next(d for d, i in enumerate(indices) if i is not None)
    tail = x.ndim - lead - mask.ndim
    given = list(values.shape)
    values = values.reshape((1,) * (lead + 1 + tail - values.ndim) + values.shape)
    count = values.shape[lead]
    if count != 1:
        _check_values(ctx, jnp.sum(mask) == count, given, [*x.shape[:lead], "?", *x.shape[lead + mask.ndim :]])
        ordinal = jnp.cumsum(mask.reshape(-1), dtype=jnp.int64) - 1
        values = jnp.take(values, jnp.clip(ordinal, 0, count - 1), lead, mode="clip") if count else x.reshape(-1)[:0]
    if values.size == 0:
        return x
    spread = mask.shape if count != 1 else (1,) * mask.ndim
    values = values.reshape(values.shape[:lead] + spread + values.shape[lead + 1 :])
    return jnp.where(mask.reshape(mask.shape + (1,) * tail), x + values if accumulate else values, x)


def _positions_with_masks(ctx: Context, x: Any, indices: Any, values: Any) -> list[Any]:
    """Each mask as the positions of its ones: as many as the other indices or the values call for, or else padded with
    positions behind the end."""
    numbers = [i.shape for i in indices if i is not None and not _is_mask(i)]
    among = jnp.broadcast_shapes(*numbers) if numbers else ()
    beside = among[-1:]
    is_beside = beside not in ((), (1,))
    count = beside if is_beside else _values_beside_masks(x, indices, values)
    is_counted = count not in ((), (1,))
    totals = [jnp.sum(i != 0) for i in indices if _is_mask(i)]
    total = jnp.where(jnp.min(jnp.stack(totals)) == 0, 0, jnp.max(jnp.stack(totals)))
    size = count[0] if is_counted else max(i.size for i in indices if _is_mask(i))
    fits = [(ones == (size if is_beside else total)) | (ones == 1) for ones in totals]
    if is_beside or len(totals) > 1:
        shapes = [n for i in indices if i is not None for n in (["[?]"] * i.ndim if _is_mask(i) else [list(i.shape)])]
        message = f"shape mismatch: indexing tensors could not be broadcast together with shapes {_listed(shapes)}"
        ctx.check(jnp.stack(fits), f"{message}, where ? is the number of a mask's ones", IndexError)
    if is_counted and not is_beside:
        _check_values(ctx, total == size, values.shape, _shape_found(x, indices, [*among[:-1], "?"]))
    taken = jnp.arange(size) < (size if is_counted else total)
    where: list[Any] = []
    for index in indices:
        if _is_mask(index):
            # the only one of a mask serves all ones of another
            only = (jnp.sum(index != 0) == 1) & taken
            where.extend(jnp.where(only, o[:1], o) for o in jnp.nonzero(index, size=size, fill_value=max(x.shape)))
        else:
            where.append(None if index is None else _wrapped_at(ctx, index, x, len(where)))
    return where


def _shape_found(x: Any, indices: Any, among: list[Any]) -> list[Any]:
    """The shape of what is indexed, where that of the indices together is `among`."""
    taken = [d for d, is_taken in enumerate(_per_dim(indices)) if is_taken]
    is_adjacent = taken == list(range(taken[0], taken[-1] + 1))
    left = [n for d, n in enumerate(x.shape) if d not in taken]
    lead = taken[0] if is_adjacent else 0
    return [*left[:lead], *among, *left[lead:]]


def _values_beside_masks(x: Any, indices: Any, values: Any) -> tuple[int, ...]:
    """The size of `values` in the dimension that counts the ones of the masks."""
    taken = [d for d, is_taken in enumerate(_per_dim(indices)) if is_taken]
    is_adjacent = taken == list(range(taken[0], taken[-1] + 1))
    behind = x.ndim - 1 - taken[-1] if is_adjacent else x.ndim - len(taken)
    return tuple(values.shape[values.ndim - behind - 1 :][:1]) if values.ndim > behind else ()


def _per_dim(indices: Any) -> list[bool]:
    return [i is not None for i in indices for _ in range(i.ndim if _is_mask(i) else 1)]


def _check_values(ctx: Context, ok: Any, given: Any, found: list[Any]) -> None:
    """The count of a mask's ones is known where this is checked, not where its text is made."""
    message = f"shape mismatch: value tensor of shape [{_listed(given)}] cannot be broadcast to indexing result"
    ctx.check(ok, f"{message} of shape [{_listed(found)}], where ? is the number of a mask's ones", RuntimeError)


def _listed(values: Any) -> str:
    return ", ".join(map(str, values))


@lowering("_unsafe_masked_index", infer=_infer_masked_index)
def unsafe_masked_index(x, mask, indices, fill, *, ctx):
    fill = jnp.asarray(fill).astype(x.dtype)
    if x.size == 0:
        return jnp.broadcast_to(fill, ctx.results[0][0])
    return jnp.where(mask, x.at[_clamped(x, indices)].get(**PROMISED), fill)


@lowering("_unsafe_masked_index_put_accumulate")
def unsafe_masked_index_put_accumulate(x, mask, indices, values):
    if x.size == 0:
        return x
    return _accumulated(x, _clamped(x, indices), jnp.where(mask, values, 0).astype(x.dtype))


def _clamped(x: Any, indices: Any) -> tuple[Any, ...]:
    dims = zip(indices, x.shape, strict=False)
    return _slices([i if i is None else jnp.clip(_from_zero(i, size), 0, size - 1) for i, size in dims])


# One index along one dimension


def _infer_index_select(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    rank = max(self.dim(), 1)
    if index.dim() > 1 or not -rank <= dim < rank:
        raise IndexError(f"index_select(): dimension {dim}, or an index of {index.dim()} dimensions")
    if not self.dim() and index.numel() != 1:
        raise RuntimeError(f"index_select(): Index to scalar can have only 1 value, got {index.numel()} value(s)")
    return torch.ops.aten.index_select(self, dim, index)


@lowering("index_select", infer=_infer_index_select)
def index_select(x, dim, index, *, ctx):
    rows = x.reshape(1) if x.ndim == 0 else x
    dim %= rows.ndim
    index = checked(ctx, index.reshape(-1), rows.shape[dim], "index out of range in self")
    found = rows.at[(slice(None),) * dim + (index,)].get(**PROMISED)
    return found.reshape(x.shape) if x.ndim == 0 else found


@lowering("gather")
def gather(x, dim, index, *, sparse_grad=False, ctx):
    x, at = (x.reshape(1) if x.ndim == 0 else x), (index.reshape(1) if index.ndim == 0 else index)
    if at.size == 0:
        return jnp.zeros(index.shape, x.dtype)
    dim %= x.ndim
    checked(ctx, at, x.shape[dim], out_of_bounds(dim, x.shape[dim]), RuntimeError)
    # the index may be smaller than the array in the other dimensions
    x = x[tuple(slice(None) if d == dim else slice(n) for d, n in enumerate(at.shape))]
    return jnp.take_along_axis(x, at, dim, mode="promise_in_bounds").reshape(index.shape)


@lowering("take")
def take(x, index, *, ctx):
    return x.reshape(-1).at[_flat(ctx, x, index)].get(**PROMISED)


def _infer_flat_put(
    self: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    if source.numel() != index.numel() or source.dtype != self.dtype or index.dtype != torch.int64:
        raise IndexError("put_(): Expected source and index to have the same number of elements")
    return torch.ops.aten.put(self, index, source, accumulate)


@lowering("put", infer=_infer_flat_put)
def put(x, index, source, accumulate=False, *, ctx):
    where = _flat(ctx, x, index).reshape(-1)
    changed = (_accumulated if accumulate else _stored)(x.reshape(-1), where, source.reshape(-1))
    return changed.reshape(x.shape)


def _flat(ctx: Context, x: Any, index: Any) -> Any:
    return wrapped(ctx, index, x.size, f"out of range: tried to access index on a tensor of {x.size} elements.")


def _infer_masked_scatter(self: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        raise RuntimeError(f"masked_scatter_ only supports boolean masks, but got mask with dtype {mask.dtype}")
    return torch.ops.aten.masked_scatter(self, mask, source)


@lowering("masked_scatter", infer=_infer_masked_scatter)
def masked_scatter(x, mask, source, *, ctx):
    shape = jnp.broadcast_shapes(x.shape, mask.shape)
    x, mask, source = jnp.broadcast_to(x, shape), jnp.broadcast_to(mask, shape) != 0, source.reshape(-1)
    enough = jnp.sum(mask) <= source.size
    ctx.check(enough, "Number of elements of source < number of ones in mask", RuntimeError)
    if source.size == 0:
        return x
    ordinal = (jnp.cumsum(mask.reshape(-1), dtype=jnp.int64) - 1).reshape(shape)
    return jnp.where(mask, source.at[jnp.clip(ordinal, 0, source.size - 1)].get(**PROMISED), x)


@lowering("masked_scatter_backward")
def masked_scatter_backward(grad, mask, sizes):
    flat = jnp.zeros(sizes, grad.dtype).reshape(-1)
    chosen = jnp.broadcast_to(mask, grad.shape).reshape(-1) != 0
    ordinal = jnp.where(chosen, jnp.cumsum(chosen, dtype=jnp.int64) - 1, flat.size)
    return flat.at[ordinal].set(grad.reshape(-1), **DROPPED).reshape(sizes)


# The rows of a sparse matrix: one number per element, sorted, or where the elements of each row begin


@lowering("_convert_indices_from_coo_to_csr")
def rows_to_starts(rows, size, *, out_int32=False):
    return jnp.searchsorted(rows, jnp.arange(size + 1))


@lowering("_convert_indices_from_csr_to_coo")
def starts_to_rows(starts, columns, *, out_int32=False, transpose=False):
    *batch, count = columns.shape
    place = jnp.arange(count)
    rows = jnp.stack([jnp.searchsorted(s, place, side="right") - 1 for s in starts.reshape(-1, starts.shape[-1])])
    pair = (columns.reshape(-1), rows.reshape(-1))
    number = jnp.indices((*batch, count)).reshape(len(batch) + 1, -1)[:-1]
    return jnp.concatenate([number, jnp.stack(pair if transpose else pair[::-1])])
