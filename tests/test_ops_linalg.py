"""The linear algebra lowerings where a plain comparison cannot tell: signs of eigenvectors, info, singular matrices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from script import run_script

from torchtpu import metrics
from torchtpu.ops.linalg import linalg as _linalg  # noqa: F401  (registers the lowerings)
from torchtpu.ops.registry import LOWERINGS, Context, jax, jnp

DTYPES = [torch.float32, torch.complex128]


def lower(name: str, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Runs a lowering beside PyTorch's meta kernel, which gives the shapes."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    made = op(*[a.to("meta") if isinstance(a, torch.Tensor) else a for a in args], **kwargs)
    results = tuple((tuple(t.shape), t.dtype) for t in (made if isinstance(made, (tuple, list)) else [made]))
    with jax.enable_x64(True):
        ctx = Context(name, "cpu", results)
        function = LOWERINGS[name].function
        if LOWERINGS[name].takes_context:
            kwargs["ctx"] = ctx
        arrays = [jnp.asarray(a.contiguous().numpy()) if isinstance(a, torch.Tensor) else a for a in args]
        out = function(*arrays, **kwargs)
        out = out if isinstance(out, (tuple, list)) else [out]
        return [torch.from_numpy(jax.device_get(x).copy()) for x in out]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("uplo", ["L", "U"])
def test_eigh_reads_one_triangle_and_rebuilds_the_matrix(dtype: torch.dtype, uplo: str) -> None:
    a = torch.randn(2, 5, 5, dtype=dtype)
    whole = a.tril() + a.tril(-1).mH if uplo == "L" else a.triu() + a.triu(1).mH
    whole = (
        whole
        - torch.diag_embed(whole.diagonal(dim1=-2, dim2=-1))
        + torch.diag_embed(a.diagonal(dim1=-2, dim2=-1).real.to(dtype))
    )
    values, vectors = lower("_linalg_eigh", a, uplo, True)
    torch.testing.assert_close(vectors @ torch.diag_embed(values).to(dtype) @ vectors.mH, whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(values, torch.linalg.eigvalsh(whole), rtol=1e-4, atol=1e-4)
    values, vectors = lower("_linalg_eigh", a, uplo, False)
    assert vectors.shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (2, 4, 4)])
@pytest.mark.parametrize("full", [True, False])
def test_svd_rebuilds_the_matrix(dtype: torch.dtype, shape: tuple[int, ...], full: bool) -> None:
    a = torch.randn(shape, dtype=dtype)
    u, s, vh = lower("_linalg_svd", a, full, True)
    k = s.shape[-1]
    torch.testing.assert_close((u[..., :k] * s[..., None, :]) @ vh[..., :k, :], a, rtol=1e-4, atol=1e-4)
    identity = torch.eye(u.shape[-1], dtype=dtype).expand(*shape[:-2], -1, -1)
    torch.testing.assert_close(u.mH @ u, identity, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lower("_linalg_svd", a, full, False)[1], s, rtol=1e-4, atol=1e-4)


def test_cholesky_info_is_the_order_of_the_first_bad_minor() -> None:
    a = torch.eye(4).repeat(4, 1, 1)
    a[1, 2, 2] = -1
    a[2, 0, 0] = 0
    a[3] = torch.ones(4, 4)
    for upper in (False, True):
        _, info = lower("linalg_cholesky_ex", a, upper=upper)
        assert info.tolist() == torch.linalg.cholesky_ex(a, upper=upper).info.tolist() == [0, 3, 1, 2]


def test_lu_info_is_the_first_zero_pivot() -> None:
    a = torch.stack([torch.eye(3), torch.diag(torch.tensor([1.0, 0.0, 2.0])), torch.ones(3, 3)])
    assert lower("linalg_lu_factor_ex", a)[2].tolist() == torch.linalg.lu_factor_ex(a).info.tolist()
    assert lower("linalg_inv_ex", a)[1].tolist() == torch.linalg.inv_ex(a).info.tolist()


def test_factors_are_written_into_empty_tensors() -> None:
    a = torch.randn(3, 4, 4, dtype=torch.float64)
    lu, pivots = torch.linalg.lu_factor(a)
    for call, count in (
        (lambda *given, out: torch.lu_unpack(*given, out=out), 3),
        (lambda *given, out: torch.linalg.lu_solve(*given, a.to(given[0].device), out=out[0]), 1),
    ):
        want = call(lu, pivots, out=[a.new_empty(0) for _ in range(count)])
        got = call(lu.to("tpu"), pivots.to("tpu"), out=[a.new_empty(0, device="tpu") for _ in range(count)])
        torch.testing.assert_close(got, want, check_device=False)


@pytest.mark.parametrize("shape", [(4, 4), (2, 5, 3), (3, 5)])
def test_lu_without_pivots_multiplies_back(shape: tuple[int, ...]) -> None:
    a = torch.randn(shape, dtype=torch.float64)
    p, lower_part, upper = lower("linalg_lu", a, pivot=False)
    assert p.numel() == 0
    torch.testing.assert_close(lower_part @ upper, a)
    assert (
        lower("linalg_lu_factor_ex", a, pivot=False)[1].tolist()
        == torch.arange(1, min(shape[-2:]) + 1).expand(*shape[:-2], -1).tolist()
    )


def test_lstsq_solves_full_and_deficient_systems() -> None:
    for m, n in ((6, 3), (3, 6)):
        a, b = torch.randn(2, m, n, dtype=torch.float64), torch.randn(2, m, 2, dtype=torch.float64)
        a[1, :, 0] = a[1, :, 1]
        for driver in ("gelss", "gelsd"):
            want = torch.linalg.lstsq(a, b, driver=driver)
            ctx = SimpleNamespace(platform="cpu", results=[(tuple(t.shape), t.dtype) for t in want])
            with jax.enable_x64(True):
                got = LOWERINGS["linalg_lstsq"].function(jnp.asarray(a), jnp.asarray(b), driver=driver, ctx=ctx)
            torch.testing.assert_close(torch.from_numpy(jax.device_get(got[0]).copy()), want.solution)
            assert got[2].tolist() == want.rank.tolist()


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cholesky_ends_before_the_first_bad_minor(dtype: torch.dtype, upper: bool) -> None:
    good = torch.tensor([[4.0, 1, 0], [1, 5, 1], [0, 1, 6]])
    bad = [[[4, 2, 3], [2, -5, 6], [3, 6, 9]], [[-1, 2, 3], [2, 5, 6], [3, 6, 9]], [[4, 2, 3], [2, 5, 6], [3, 6, 1]]]
    a = torch.stack([good, *map(torch.tensor, bad), torch.zeros(3, 3)]).to(dtype)
    factor, info = lower("linalg_cholesky_ex", a, upper=upper)
    expected = torch.linalg.cholesky_ex(a, upper=upper)
    torch.testing.assert_close(factor, expected.L, rtol=1e-5, atol=1e-6)
    assert info.tolist() == expected.info.tolist() == [0, 2, 1, 3, 1]


def test_cholesky_inverse_refuses_a_zero_on_the_diagonal() -> None:
    for device in ("cpu", "tpu"):
        with pytest.raises(torch.linalg.LinAlgError, match="is zero, the inversion could not be completed"):
            torch.cholesky_inverse(torch.diag(torch.tensor([1.0, 0.0])).to(device)).cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [(0, 0), (1, 1), (0, 2)])
def test_what_is_taken_from_a_pivot_of_nan_is_nan(place: tuple[int, int], dtype: torch.dtype) -> None:
    a = torch.tensor([[4.0, 2, 3, 1], [2, 5, 6, 1], [3, 6, 9, 2]]).to(dtype)
    a[place] = torch.nan
    for each in (a, a[:, :3]):
        lu, pivots, info = lower("linalg_lu_factor_ex", each)
        expected = torch.linalg.lu_factor_ex(each.contiguous())
        assert lu.isnan().tolist() == expected.LU.isnan().tolist()
        assert (pivots.tolist(), info.item()) == (expected.pivots.tolist(), 0)


def test_ldl_stops_at_a_pivot_of_nan() -> None:
    a = torch.tensor([[4.0, 2, 3], [2, 5, 6], [3, 6, torch.nan]])
    (factor, pivots, info), expected = lower("linalg_ldl_factor_ex", a), torch.linalg.ldl_factor_ex(a)
    torch.testing.assert_close(factor, expected.LD, equal_nan=True)
    assert (pivots.tolist(), info.item()) == (expected.pivots.tolist(), expected.info.item()) == ([1, 2, 3], 3)


def test_singular_values_of_infinities_end() -> None:
    a = torch.tensor([[torch.inf, 2, 3], [2, 5, 6], [3, 6, 9]])
    assert torch.linalg.lstsq(a.to("tpu"), torch.eye(3, device="tpu")).solution.isnan().all()
    assert torch.linalg.svd(a.to("tpu")).S.isnan().all()


VALUES: dict[str, Any] = {
    "svd": lambda a: torch.linalg.svd(a).S,
    "svdvals": torch.linalg.svdvals,
    "eigh": lambda a: torch.linalg.eigh(a)[0],
    "eigh of the other half": lambda a: torch.linalg.eigh(a, UPLO="U")[0],
    "eigvalsh": torch.linalg.eigvalsh,
    "eig": lambda a: torch.linalg.eig(a)[0],
    "eigvals": torch.linalg.eigvals,
}


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("size", [1, 2, 3, 9, 30])
@pytest.mark.parametrize("name", VALUES)
def test_values_of_matrices_that_are_not_finite_are_those_of_the_cpu(name: str, size: int, bad: float) -> None:
    for at in ((size // 2, size // 2), (size - 1, 0), (0, size - 1)):
        a = torch.randn(size, size, generator=torch.Generator().manual_seed(size))
        a = a + a.mT
        a[at] = bad
        if name == "eigvals" and a.isnan().any():
            continue  # the CPU's routine ends the process
        if name == "svd" and size == 30 and not a.isnan().any():
            continue  # some of the CPU's are infinite
        found = []
        for device in ("cpu", "tpu"):
            try:
                values = VALUES[name](a.to(device)).cpu()
                found.append("infinite" if values.isinf().any() else "NaN" if values.isnan().any() else "finite")
            except RuntimeError as error:
                found.append(f"{type(error)} {error}".partition(" (aten")[0].partition(" (error code")[0])
        assert found[0] == found[1], at


def test_orders_of_what_does_not_converge_are_those_of_the_cpu() -> None:
    a = torch.full((4, 4), torch.nan)
    for name in ("eigh", "eigvalsh"):
        texts = []
        for device in ("cpu", "tpu"):
            with pytest.raises(torch.linalg.LinAlgError) as raised:
                str(VALUES[name](a.to(device)))
            texts.append(str(raised.value).partition(" (aten")[0])
        assert texts[0] == texts[1]


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.complex128, 1e-12)])
def test_matrix_exp_is_exact_for_all_norms(dtype: torch.dtype, rtol: float) -> None:
    a = torch.tensor([[4.0, 1, 0], [1, 5, 1], [0, 1, 6]], dtype=torch.float64)
    scales = torch.tensor([0, 0.01, 0.6, 1, 2, 4, 10, -3])[:, None, None]
    (made,) = lower("linalg_matrix_exp", (a * scales).to(dtype))
    expected = torch.matrix_exp(a * scales)
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other.to(dtype), rtol=rtol, atol=rtol * other.abs().max().item())


RESIZED: dict[str, tuple[Any, int]] = {
    "linalg_eigh": (lambda x, a, out: torch.linalg.eigh(a, out=out), 2),
    "linalg_qr": (lambda x, a, out: torch.linalg.qr(x, out=out), 2),
    "linalg_lu_factor": (lambda x, a, out: torch.linalg.lu_factor(a, out=out), 2),
    "linalg_ldl_factor": (lambda x, a, out: torch.linalg.ldl_factor(a, out=out), 2),
    "triangular_solve": (lambda x, a, out: torch.triangular_solve(a, a, out=out), 2),
    "linalg_lu_solve": (lambda x, a, out: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), a, out=out[0]), 1),
    "linalg_eig": (lambda x, a, out: torch.linalg.eig(a, out=[each.cfloat() for each in out]), 2),
    "geqrf": (lambda x, a, out: torch.geqrf(x, out=out), 2),
    "linalg_lstsq": (
        lambda x, a, out: torch.linalg.lstsq(a, x, driver="gelsd", out=(*out[:2], out[2].long(), out[3])),
        4,
    ),
    "linalg_lstsq of a vector": (
        lambda x, a, out: torch.linalg.lstsq(a, x[:, 0], out=(*out[:2], out[2].long(), out[3])),
        4,
    ),
    "cholesky_inverse": (lambda x, a, out: torch.cholesky_inverse(a, out=out[0]), 1),
    "linalg_householder_product": (
        lambda x, a, out: torch.linalg.householder_product(*torch.geqrf(x.mT), out=out[0]),
        1,
    ),
    "ormqr": (lambda x, a, out: torch.ormqr(*torch.geqrf(x.mT), x.mT, out=out[0]), 1),
    "ormqr of the right": (lambda x, a, out: torch.ormqr(*torch.geqrf(x.mT), x, False, True, out=out[0]), 1),
    "fft_ihfft2": (lambda x, a, out: torch.fft.ihfft2(x, out=out[0].cfloat()), 1),
    "fft_hfft": (lambda x, a, out: torch.fft.hfft(x.cfloat(), dim=0, out=out[0]), 1),
}


@pytest.mark.parametrize("shape", [(0,), (2,), (7, 3)])
@pytest.mark.parametrize("name", RESIZED)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized", "ignore:torch.triangular_solve")
def test_outputs_that_are_resized_lie_as_on_the_cpu(name: str, shape: tuple[int, ...]) -> None:
    call, count = RESIZED[name]

    def strides(device: str) -> list[tuple[int, ...]]:
        x, a = torch.ones(3, 4, device=device), 2 * torch.eye(3, device=device)
        out = [torch.empty(shape, device=device) for _ in range(count)]
        if name in ("linalg_lu_factor", "linalg_ldl_factor"):
            out[1] = out[1].int()
        made = call(x, a, out)
        return [each.stride() for each in (made if isinstance(made, tuple) else [made])]

    assert strides("tpu") == strides("cpu")
    assert not metrics.snapshot()["cpu_fallbacks"]


@pytest.mark.parametrize("shape", [(0,), (2,), (50,)])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_solutions_that_are_a_part_of_their_storage_are_written_into_outputs(shape: tuple[int, ...]) -> None:
    x, y = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1))
    dtypes = (torch.float, torch.float, torch.long, torch.float)
    out = tuple(torch.empty(shape, device="tpu", dtype=dtype) for dtype in dtypes)
    torch.linalg.lstsq(x.to("tpu"), y.to("tpu"), driver="gelsd", out=out)
    for found, expected in zip(out, torch.linalg.lstsq(x, y, driver="gelsd"), strict=True):
        torch.testing.assert_close(found.cpu(), expected)
    assert not metrics.snapshot()["cpu_fallbacks"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("place", ["input", "factor"])
def test_scales_of_zero_ignore_nan_where_the_cpu_does(place: str, dtype: torch.dtype) -> None:
    def call(op: Any, beta: float, alpha: float, device: str) -> torch.Tensor:
        x, a = torch.ones(40, 40, dtype=dtype), torch.ones(40, 40, dtype=dtype)
        if dtype.is_floating_point:
            (x if place == "input" else a)[0, 0] = torch.nan
        return op(x.to(device), a.to(device), beta, alpha).cpu()

    def batched(x: torch.Tensor, a: torch.Tensor, beta: float, alpha: float) -> torch.Tensor:
        return torch.baddbmm(x[None], a[None], a[None], beta=beta, alpha=alpha)

    for op in (
        lambda x, a, beta, alpha: torch.addmm(x, a, a, beta=beta, alpha=alpha),
        lambda x, a, beta, alpha: torch.addmv(x[0], a, a[1], beta=beta, alpha=alpha),
        lambda x, a, beta, alpha: torch.addr(x, a[0], a[1], beta=beta, alpha=alpha),
        lambda x, a, beta, alpha: torch.addbmm(x, a[None], a[None], beta=beta, alpha=alpha),
        # in half precision the CPU's kernel is another one on processors with AVX-512
        *([] if dtype is torch.bfloat16 else [batched]),
    ):
        for scales in ((0, 1), (1, 0), (0, 0), (2, 0)):
            expected = call(op, *scales, "cpu")
            torch.testing.assert_close(call(op, *scales, "tpu"), expected, equal_nan=True)


INDEPENDENT = {
    "solved": "torch.linalg.solve(a, a.sin()).sum()",
    "factored": "torch.linalg.cholesky(a @ a.mT + 9 * torch.eye(40, device=a.device)).sum()",
    "inverted": "torch.linalg.inv(a).sum()",
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_batches_that_are_factored_side_by_side_end(name: str) -> None:
    """LAPACK's calls for batches wait for threads that others of them hold, where a program makes several at once."""
    ended = run_script(
        f"""
        import torch
        torch.manual_seed(0)
        given = [(torch.randn(40, 40, 40) + 9 * torch.eye(40)).to("tpu").requires_grad_() for _ in range(3)]
        for _ in range(40):
            loss = sum({INDEPENDENT[name]} for a in given)
            gradients = torch.autograd.grad(loss, given)
            found = loss.item(), [g.sum().item() for g in gradients]
        expected = [a.detach().cpu().double().requires_grad_() for a in given]
        loss = sum({INDEPENDENT[name]} for a in expected)
        assert abs(found[0] - loss.item()) < 1e-2 * abs(loss.item()), (found, loss)
        print("ended")
        """
    )
    assert (ended.status, ended.out) == (0, "ended\n"), ended.err


def test_lapack_is_called_for_one_op_after_the_other_whatever_the_dtype() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        given = [torch.randn(5, 6, 6, dtype=dtype) + 6 * torch.eye(6) for _ in range(3)]
        sent = [a.to("tpu") for a in given]

        def made(matrices: list[torch.Tensor]) -> list[torch.Tensor]:
            return [
                torch.linalg.inv(matrices[0]),
                torch.linalg.solve(*matrices[1:]),
                torch.linalg.lu_factor(matrices[0])[1],
            ]

        for found, expected in zip(made(sent), made(given), strict=True):
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
