"""Factorizations, inverses, determinants and solutions of (batches of) matrices.

On the CPU platform XLA calls LAPACK, on TPU its own expansions; `info` outputs follow LAPACK's counting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torchtpu.ops.registry import jax, jax_dtype, jnp, lax, lowering, opmath

LinAlgError: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # torch's stubs lack it


def matmul(a: Any, b: Any) -> Any:
    """The product, in full precision on every platform."""
    return jnp.matmul(a, b, precision="highest")


def adjoint(a: Any) -> Any:
    """The conjugate transpose of the last two dimensions."""
    return jnp.conj(jnp.swapaxes(a, -1, -2))


def empty(ctx: Any, index: int) -> Any:
    """The result an op leaves without elements."""
    shape, dtype = ctx.results[index]
    return jnp.zeros(shape, jax_dtype(dtype))


def as_new(name: str) -> Callable[..., Any]:
    """Shape inference that says how new results lie in memory: resized out= arguments, which torch's Python code makes
    contiguous, lie as they do."""

    def infer(*values: Any) -> Any:
        operator = getattr(torch.ops.aten, name).default
        given = zip(operator._schema.arguments, values, strict=False)
        named = {argument.name: value for argument, value in given if argument.kwarg_only}
        return operator(*values[: len(values) - len(named)], **named)

    return infer


def _broadcast_batch(*arrays: tuple[Any, int]) -> list[Any]:
    """Arrays with the leading dimensions broadcast; each comes with the number of its trailing ones."""
    batch = jnp.broadcast_shapes(*(a.shape[: a.ndim - core] for a, core in arrays))
    return [jnp.broadcast_to(a, (*batch, *a.shape[a.ndim - core :])) for a, core in arrays]


def solve_triangle(a: Any, b: Any, *, lower: bool, left: bool = True, unit: bool = False, turned: bool = False) -> Any:
    """X with a X = b (`left`) or X a = b for a triangular `a`, or for its conjugate transpose where `turned`."""
    if 0 in b.shape:
        return b
    return lax.linalg.triangular_solve(
        a, b, left_side=left, lower=lower, transpose_a=turned, conjugate_a=turned, unit_diagonal=unit
    )


@lowering("linalg_solve_triangular")
def linalg_solve_triangular(self, B, *, upper, left=True, unitriangular=False):
    a, b = _broadcast_batch((self, 2), (B, 2))
    return solve_triangle(a, b, lower=not upper, left=left, unit=unitriangular)


@lowering("triangular_solve", infer=as_new("triangular_solve"))
def triangular_solve(self, A, upper=True, transpose=False, unitriangular=False):
    a, b = _broadcast_batch((A, 2), (self, 2))
    turned = jnp.swapaxes(a, -1, -2) if transpose else a
    return solve_triangle(turned, b, lower=upper == transpose, unit=unitriangular), a


# Cholesky


@lowering("linalg_cholesky_ex")
def linalg_cholesky_ex(self, *, upper=False, check_errors=False, ctx):
    if not self.size:
        return self, empty(ctx, 1)
    factor, info = _factor_cholesky(adjoint(self) if upper else self)
    if check_errors:
        _check_positive_definite(ctx, "linalg.cholesky_ex", info)
    return adjoint(factor) if upper else factor, info


@lowering("cholesky")
def cholesky(self, upper=False, *, ctx):
    if not self.size:
        return self
    factor, info = linalg_cholesky_ex(self, upper=upper, ctx=ctx)
    _check_positive_definite(ctx, "cholesky", info)
    return factor


def _check_positive_definite(ctx: Any, name: str, info: Any) -> None:
    message = f"{name}: The factorization could not be completed because the input is not positive-definite"
    ctx.check(info == 0, message, LinAlgError)


def _factor_cholesky(a: Any) -> tuple[Any, Any]:
    """The factor, and 0 or the order of the first leading minor that is not positive-definite, of which XLA makes NaNs.

    As LAPACK does, the factor then ends before that minor's last column: what is left on its diagonal stands there, and
    the rest is the array's.
    """
    size = a.shape[-1]
    factor = jnp.tril(lax.linalg.cholesky(a, symmetrize_input=False))
    failed = jnp.isnan(jnp.diagonal(factor, axis1=-2, axis2=-1).real).any(-1)

    def until_first_bad_minor() -> tuple[Any, Any]:
        def step(k: Any, state: Any) -> Any:
            rest, made, info = state
            pivot = rest[..., k, k].real
            bad = ~(pivot > 0)
            column = rest[..., :, k] / jnp.sqrt(jnp.where(bad, 1, pivot))[..., None]
            info = jnp.where((info == 0) & bad, k + 1, info)
            here = jnp.arange(size) == k
            is_made = (info == 0)[..., None, None] & here
            is_left = (info == k + 1)[..., None, None] & here & here[:, None]
            made = jnp.where(is_made, column[..., None], made)
            made = jnp.where(is_left, pivot[..., None, None].astype(made.dtype), made)
            return rest - column[..., None] * jnp.conj(column[..., None, :]), made, info

        lower = jnp.tril(a)
        full = lower + adjoint(jnp.tril(a, -1))
        _, made, info = lax.fori_loop(0, size, step, (full, lower, jnp.zeros(failed.shape, jnp.int32)))
        return jnp.where(failed[..., None, None], jnp.tril(made), factor), info

    return lax.cond(failed.any(), until_first_bad_minor, lambda: (factor, jnp.zeros(failed.shape, jnp.int32)))


@lowering("_cholesky_solve_helper")
def cholesky_solve_helper(self, A, upper):
    first = solve_triangle(A, self, lower=not upper, turned=upper)
    return solve_triangle(A, first, lower=not upper, turned=not upper)


@lowering("cholesky_inverse", infer=as_new("cholesky_inverse"))
def cholesky_inverse(self, upper=False, *, ctx):
    message = "cholesky_inverse: The diagonal element is zero, the inversion could not be completed because the input "
    ctx.check(jnp.diagonal(self, axis1=-2, axis2=-1) != 0, f"{message}matrix is singular.", LinAlgError)
    identity = jnp.broadcast_to(jnp.eye(self.shape[-1], dtype=self.dtype), self.shape)
    return cholesky_solve_helper(identity, self, upper)


# LU


def factor_lu(a: Any, pivot: bool = True) -> tuple[Any, Any, Any]:
    """(LU in one matrix, LAPACK's pivots counted from 1, info = the first zero on U's diagonal counted from 1)."""
    size = min(a.shape[-2:])
    if not a.size:
        pivots = jnp.broadcast_to(jnp.arange(1, size + 1, dtype=jnp.int32), (*a.shape[:-2], size))
        return a, pivots, jnp.zeros(a.shape[:-2], jnp.int32)
    if pivot:
        lu, pivots, _ = lax.linalg.lu(a)
        lu = _behind_nan_lost(lu)
    else:
        lu, pivots = _lu_without_pivots(a), jnp.broadcast_to(jnp.arange(size), (*a.shape[:-2], size))
    zero = jnp.diagonal(lu, axis1=-2, axis2=-1) == 0
    info = jnp.where(zero.any(-1), jnp.argmax(zero, -1) + 1, 0)
    return lu, pivots.astype(jnp.int32) + 1, info.astype(jnp.int32)


def _behind_nan_lost(lu: Any) -> Any:
    """LU with NaN in what a pivot of NaN is taken from; OpenBLAS takes such a pivot for zero."""
    is_nan = jnp.isnan(jnp.diagonal(lu, axis1=-2, axis2=-1))
    first = jnp.where(is_nan.any(-1), jnp.argmax(is_nan, -1), lu.shape[-1])[..., None, None]
    rows, columns = jnp.arange(lu.shape[-2])[:, None], jnp.arange(lu.shape[-1])
    return jnp.where((rows > first) & (columns >= first), jnp.nan, lu)


def _lu_without_pivots(a: Any) -> Any:
    rows, columns = jnp.arange(a.shape[-2]), jnp.arange(a.shape[-1])

    def step(k: Any, lu: Any) -> Any:
        multiplier = jnp.where(rows > k, lu[..., :, k] / lu[..., k, k, None], 0)
        lu = lu - multiplier[..., :, None] * jnp.where(columns > k, lu[..., k, :], 0)[..., None, :]
        return lu.at[..., :, k].set(jnp.where(rows > k, multiplier, lu[..., :, k]))

    return lax.fori_loop(0, min(a.shape[-2:]), step, a)


def _permutation(pivots: Any, size: int) -> Any:
    """The row order `p` with A[p] = L U."""
    return lax.linalg.lu_pivots_to_permutation(pivots.astype(jnp.int32) - 1, size)


def _take_rows(b: Any, order: Any) -> Any:
    return jnp.take_along_axis(b, order[..., None], axis=-2)


def solve_lu(lu: Any, pivots: Any, b: Any, *, turned: bool = False) -> Any:
    """X with A X = b, or with Aᴴ X = b where `turned`, for A = P L U."""
    order = _permutation(pivots, lu.shape[-1])
    if turned:
        first = solve_triangle(lu, b, lower=False, turned=True)
        return _take_rows(solve_triangle(lu, first, lower=True, unit=True, turned=True), jnp.argsort(order, -1))
    first = solve_triangle(lu, _take_rows(b, order), lower=True, unit=True)
    return solve_triangle(lu, first, lower=False)


def _check_invertible(ctx: Any, name: str, info: Any) -> None:
    ctx.check(info == 0, f"{name}: The diagonal element of U is zero, the matrix is singular", LinAlgError)


@lowering("linalg_lu_factor_ex", infer=as_new("linalg_lu_factor_ex"))
def linalg_lu_factor_ex(self, *, pivot=True, check_errors=False, ctx):
    lu, pivots, info = factor_lu(self, pivot)
    if check_errors:
        _check_invertible(ctx, "torch.linalg.lu_factor_ex", info)
    return lu, pivots, info


@lowering("linalg_lu")
def linalg_lu(self, *, pivot=True, ctx):
    lu, pivots, _ = factor_lu(self, pivot)
    return lu_unpack(lu, pivots, True, pivot, ctx=ctx)


@lowering("lu_unpack")
def lu_unpack(LU_data, LU_pivots, unpack_data=True, unpack_pivots=True, *, ctx):
    rows, columns = LU_data.shape[-2:]
    size = min(rows, columns)
    p, lower, upper = (empty(ctx, i) for i in range(3))
    if unpack_pivots:
        eye = jnp.eye(rows, dtype=LU_data.dtype)
        p = jnp.swapaxes(eye[_permutation(LU_pivots, rows)], -1, -2) if size else jnp.broadcast_to(eye, p.shape)
    if unpack_data:
        lower = jnp.tril(LU_data[..., :, :size], -1) + jnp.eye(rows, size, dtype=LU_data.dtype)
        upper = jnp.triu(LU_data[..., :size, :])
    return p, lower, upper


@lowering("linalg_lu_solve", infer=as_new("linalg_lu_solve"))
def linalg_lu_solve(LU, pivots, B, *, left=True, adjoint=False):
    lu, pivots, b = _broadcast_batch((LU, 2), (pivots, 1), (B, 2))
    if left:
        return solve_lu(lu, pivots, b, turned=adjoint)
    turn = lambda x: jnp.conj(jnp.swapaxes(x, -1, -2))
    return turn(solve_lu(lu, pivots, turn(b), turned=not adjoint))


@lowering("_linalg_solve_ex")
def linalg_solve_ex(A, B, *, left=True, check_errors=False, ctx):
    is_vector = B.ndim == 1 or (A.ndim - 1 == B.ndim and A.shape[:-1] == B.shape)
    lu, pivots, info = factor_lu(A)
    if check_errors:
        _check_invertible(ctx, "torch.linalg.solve_ex", info)
    solution = linalg_lu_solve(lu, pivots, B[..., None] if is_vector else B, left=left)
    return solution[..., 0] if is_vector else solution, lu, pivots, info


@lowering("linalg_inv_ex")
def linalg_inv_ex(A, *, check_errors=False, ctx):
    lu, pivots, info = factor_lu(A)
    if check_errors:
        _check_invertible(ctx, "linalg.inv_ex", info)
    identity = jnp.broadcast_to(jnp.eye(A.shape[-1], dtype=A.dtype), A.shape)
    return solve_lu(lu, pivots, identity), info


# Orthogonal factorizations


@lowering("linalg_qr", infer=as_new("linalg_qr"))
def linalg_qr(A, mode="reduced", *, ctx):
    if 0 in A.shape[-2:]:
        q, r = (empty(ctx, i) for i in range(2))
        return q if mode == "r" else _eye_like(q), r
    q, r = lax.linalg.qr(A, full_matrices=mode == "complete")
    return empty(ctx, 0) if mode == "r" else q, r


def _infer_geqrf(self: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if self.dim() < 2:
        raise RuntimeError("torch.geqrf: input must have at least 2 dimensions.")
    return torch.empty_like(self.mT.contiguous()).mT, self.new_empty((*self.shape[:-2], min(self.shape[-2:])))


@lowering("geqrf", infer=_infer_geqrf)
def geqrf(self):
    transposed, tau = jnp.linalg.qr(self, mode="raw")
    return jnp.swapaxes(transposed, -1, -2), tau


@lowering("linalg_householder_product", infer=as_new("linalg_householder_product"))
def linalg_householder_product(input, tau):
    return lax.linalg.householder_product(input, tau) if input.size else input


@lowering("ormqr", infer=as_new("ormqr"))
def ormqr(self, input2, input3, left=True, transpose=False):
    size = self.shape[-2]
    square = jnp.zeros((*self.shape[:-1], size), self.dtype).at[..., : self.shape[-1]].set(self[..., :size])
    q = lax.linalg.householder_product(square, input2)
    q = adjoint(q) if transpose else q
    return matmul(q, input3) if left else matmul(input3, q)


def _infer_svd(A: torch.Tensor, full_matrices: bool = False, compute_uv: bool = True, driver: Any = None) -> Any:
    """PyTorch's meta kernel lays Vh out as CUDA does; the CPU keeps its columns together."""
    u, s, vh = torch.ops.aten._linalg_svd(A, full_matrices, compute_uv, driver=driver)
    return u, s, vh.mT.contiguous().mT if compute_uv else vh


@lowering("_linalg_svd", infer=_infer_svd)
def linalg_svd(A, full_matrices=False, compute_uv=True, *, driver=None, ctx):
    if not A.size:
        made = [empty(ctx, i) for i in range(3)]
        return [x if i == 1 or not x.size else _eye_like(x) for i, x in enumerate(made)]
    message = "linalg.svd: The algorithm failed to converge because the input matrix contained non-finite values."
    ctx.check(~jnp.isnan(A), message, LinAlgError)
    if not compute_uv:
        return empty(ctx, 0), _svd(A, ctx, compute_uv=False), empty(ctx, 2)
    return _svd(A, ctx, full_matrices=full_matrices)


def _svd(x: Any, ctx: Any, **options: bool) -> Any:
    x = jnp.where(jnp.isinf(x), jnp.nan, x)  # at infinity LAPACK may never end, NaN it returns
    svd = functools.partial(lax.linalg.svd, **options)
    if ctx.platform != "tpu" or x.dtype != jnp.float32:
        return svd(x)
    # With 64-bit types on, JAX's algorithm for TPUs multiplies float32 by int64, which their compiler refuses.
    with jax.enable_x64(False):
        exported = jax.export.export(jax.jit(svd), platforms=["tpu"])(jax.ShapeDtypeStruct(x.shape, x.dtype))
    return exported.call(x)


def _eye_like(x: Any) -> Any:
    return jnp.broadcast_to(jnp.eye(*x.shape[-2:], dtype=x.dtype), x.shape)


@lowering("_linalg_eigh", infer=as_new("_linalg_eigh"))
def linalg_eigh(A, UPLO="L", compute_v=True, *, ctx):
    if not A.size:
        return empty(ctx, 0), empty(ctx, 1)
    is_lower = UPLO.upper() == "L"
    half = jnp.tril(A) if is_lower else jnp.triu(A)
    _check_convergence(ctx, half, compute_v)
    is_endless = jnp.isinf(half).any((-2, -1)) & (A.shape[-1] > 1)
    A = jnp.where(is_endless[..., None, None] & jnp.isinf(A), jnp.nan, A)
    vectors, values = lax.linalg.eigh(A, lower=is_lower, symmetrize_input=False)
    values = jnp.where(is_endless[..., None], jnp.nan, values)
    return values, vectors if compute_v else empty(ctx, 1)


def _check_convergence(ctx: Any, half: Any, compute_v: bool) -> None:
    """Raises where PyTorch's LAPACK does not converge. The eigenvalues of other matrices that are not finite are NaN:
    of small ones and, where eigenvectors are computed, of large ones and of those with infinity on the diagonal."""
    size = half.shape[-1]
    if size < 3 or (compute_v and size > 25):
        return
    inside = jnp.where(jnp.eye(size, dtype=bool), 0, half) if compute_v else half
    message = (
        "linalg.eigh: The algorithm failed to converge because the input matrix is ill-conditioned or has too many "
        f"repeated eigenvalues (error code: {size - 1 if compute_v else size - 2})."
    )
    ctx.check(jnp.isfinite(inside) & ~jnp.isnan(half), message, LinAlgError)


def _infer_lstsq(self: torch.Tensor, b: torch.Tensor, rcond: Any = None, driver: Any = None) -> Any:
    columns = b[..., None] if self.dim() - 1 == b.dim() and self.shape[:-1] == b.shape else b
    # One matrix for a batch of them is taken for vectors as far as the batch goes.
    batch = torch.broadcast_shapes(self.shape[:-2], b.shape[: self.dim() - 2])
    torch.broadcast_shapes(batch, columns.shape[:-2])
    if self.shape[-2] != columns.shape[-2] or self.dtype != b.dtype:
        raise RuntimeError("torch.linalg.lstsq: input.size(-2) should match other.size(-2)")
    if self.dtype not in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        raise RuntimeError("This function doesn't handle types other than float and double")
    driver = None if driver is None else driver.lower()
    if driver not in (None, "gels", "gelsy", "gelsd", "gelss"):
        raise RuntimeError("torch.linalg.lstsq: parameter `driver` should be one of (gels, gelsy, gelsd, gelss)")
    m, n = self.shape[-2:]
    real = torch.empty((), dtype=self.dtype, device="meta").real.dtype
    solution = self.new_empty((*batch, columns.shape[-1], max(m, n)))[..., :n].mT  # LAPACK overwrites b
    return (
        solution if columns is b else solution[..., 0],
        b.new_empty((*batch, columns.shape[-1]) if m > n and driver not in (None, "gelsy") else (0,), dtype=real),
        b.new_empty(self.shape[:-2] if driver != "gels" else (0,), dtype=torch.int64),
        b.new_empty((*self.shape[:-2], min(m, n)) if driver in ("gelsd", "gelss") else (0,), dtype=real),
    )


@lowering("linalg_lstsq", infer=_infer_lstsq)
def linalg_lstsq(self, b, rcond=None, *, driver=None, ctx):
    # One algorithm for all drivers: the solution of least norm.  gelsd and gelss return residuals for a deficient rank
    # too, since only the device knows it.
    is_vector = self.ndim - 1 == b.ndim and self.shape[:-1] == b.shape
    b = b[..., None] if is_vector else b
    u, s, vh = _svd(self, ctx, full_matrices=False)
    cut = jnp.finfo(s.dtype).eps * max(self.shape[-2:]) if rcond is None else rcond
    kept = s > jnp.asarray(cut, s.dtype) * s[..., :1]
    scaled = matmul(adjoint(u), b) * jnp.where(kept, 1 / jnp.where(kept, s, 1), 0)[..., None]
    x = matmul(adjoint(vh), scaled)
    residuals = (jnp.abs(b - matmul(self, x)) ** 2).sum(-2)
    shapes = [shape for shape, _ in ctx.results]
    made = (x[..., 0] if is_vector else x, residuals, kept.sum(-1), s)
    return tuple(
        empty(ctx, i) if shape == (0,) else jnp.broadcast_to(v, shape)
        for i, (shape, v) in enumerate(zip(shapes, made, strict=True))
    )


# Products


@lowering("linalg_matrix_exp")
def linalg_matrix_exp(self):
    if not self.size:
        return self
    flat = opmath(self).reshape(-1, *self.shape[-2:])
    with jax.default_matmul_precision("highest"):
        return jax.vmap(_exponential)(flat).reshape(self.shape)


def _exponential(a: Any) -> Any:
    # jax's own scaling leaves norms of up to twice what its approximations are for.
    most = 3.925724783138660 if a.dtype in (jnp.float32, jnp.complex64) else 5.371920351148152
    halvings = jnp.clip(jnp.ceil(jnp.log2(jnp.abs(a).sum(-2).max() / most)), 0, 64)
    made = jax.scipy.linalg.expm(a / 2**halvings)
    return lax.fori_loop(0, halvings.astype(jnp.int32), lambda _, x: matmul(x, x), made)


@lowering("linalg_cross")
def linalg_cross(self, other, *, dim=-1):
    a, b = jnp.broadcast_arrays(self, other)
    turn = lambda x, by: jnp.roll(x, by, axis=dim)
    return turn(a, -1) * turn(b, -2) - turn(a, -2) * turn(b, -1)
