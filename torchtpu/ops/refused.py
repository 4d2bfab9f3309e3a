"""Errors in plain words for ops whose results have no storage here, sparse and quantized tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torchtpu.ops.registry import composed


def _refuse(*names: str, kind: str, advice: str) -> None:
    for name in names:
        composed(name)(_refusal(f"aten::{name}: {kind} tensors are not supported on tpu; {advice}"))


def _refusal(message: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(message)

    return refuse


_refuse(
    "_spdiags",
    "_to_sparse",
    "_to_sparse.sparse_dim",
    "_to_sparse_bsc",
    "_to_sparse_bsr",
    "_to_sparse_csc",
    "_to_sparse_csr",
    kind="sparse",
    advice="use dense tensors, or move to the CPU first",
)
_refuse(
    "_make_per_channel_quantized_tensor",
    "_make_per_tensor_quantized_tensor",
    "quantize_per_channel",
    "quantize_per_tensor",
    "quantize_per_tensor.tensor_qparams",
    "quantize_per_tensor.tensors",
    "quantize_per_tensor_dynamic",
    kind="quantized",
    advice="use torch.fake_quantize_per_tensor_affine and its relatives, or move to the CPU first",
)
