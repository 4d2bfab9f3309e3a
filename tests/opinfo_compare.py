"""The first difference between two results that PyTorch's tests would see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only


def difference(ours: Any, theirs: Any) -> str | None:
    """What differs in structure, dtype, shape or strides."""
    (mine, my_spec), (yours, your_spec) = tree_flatten(ours), tree_flatten(theirs)
    if my_spec != your_spec:
        return f"returned {my_spec}, not {your_spec}"
    for index, (m, y) in enumerate(zip(mine, yours, strict=True)):
        if isinstance(m, torch.Tensor) != isinstance(y, torch.Tensor):
            return f"result {index} is {type(m).__name__}, not {type(y).__name__}"
        if not isinstance(y, torch.Tensor):
            continue
        for name in ("dtype", "shape", "layout"):
            if getattr(m, name) != getattr(y, name):
                return f"result {index} has {name} {getattr(m, name)}, not {getattr(y, name)}"
        if y.layout == torch.strided and y.numel() > 1 and strides_that_matter(m) != strides_that_matter(y):
            return f"result {index} of shape {tuple(y.shape)} has strides {m.stride()}, not {y.stride()}"
    return None


def strides_that_matter(tensor: torch.Tensor) -> list[int]:
    """Those of dimensions with more than one element: PyTorch's kernels differ in the others."""
    return [stride for stride, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]


def to_host(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.detach().cpu().resolve_conj().resolve_neg(), value)


def value_difference(
    ours: Any, theirs: Any, truth: Callable[[], Any], tolerance: tuple[float, float] | None
) -> str | None:
    """What differs in value; all on the host.

    Where both dtypes round, `truth` (the same call in the next wider dtype) decides: the device may err as far as the
    tolerance, or twice as far as the CPU does.
    """
    mine, yours = tree_flatten(ours)[0], tree_flatten(theirs)[0]
    for index, (m, y) in enumerate(zip(mine, yours, strict=True)):
        if not isinstance(y, torch.Tensor):
            if m != y and not (m != m and y != y):
                return f"result {index} is {m}, not {y}"
            continue
        problem = _close(m, y, tolerance)
        if problem is None:
            continue
        if y.dtype.is_floating_point or y.dtype.is_complex:
            wide = tree_flatten(truth())[0][index]
            if _close(m.to(wide.dtype), wide, tolerance or _tolerance(y.dtype)) is None or errs_like(m, y, wide):
                continue
        return f"result {index}: {problem}"
    return None


def _tolerance(dtype: torch.dtype) -> tuple[float, float]:
    rtol, atol = torch.testing._comparison.default_tolerances(dtype)
    return atol, rtol


def _close(m: torch.Tensor, y: torch.Tensor, tolerance: tuple[float, float] | None) -> str | None:
    allowed = _tolerance(y.dtype)
    if tolerance is not None:
        allowed = max(allowed[0], tolerance[0]), max(allowed[1], tolerance[1])
    try:
        torch.testing.assert_close(m, y, atol=allowed[0], rtol=allowed[1], equal_nan=True)
    except AssertionError as error:
        return " ".join(line for line in str(error).splitlines()[2:6] if line.strip())
    return None


def errs_like(m: torch.Tensor, y: torch.Tensor, wide: torch.Tensor) -> bool:
    """Whether `m` is at most twice as far from `wide`, the result in a wider dtype, as `y` is."""
    m, y = m.to(wide.dtype), y.to(wide.dtype)
    if wide.is_complex():
        m, y, wide = map(torch.view_as_real, (m, y, wide))
    same = (m == wide) | (m.isnan() & wide.isnan())
    if not bool((same | (m.isfinite() & wide.isfinite())).all()):
        return False
    error = lambda t: (t - wide).abs().nan_to_num(0.0, 0.0, 0.0).max()
    return bool(error(m) <= 2 * error(y))
