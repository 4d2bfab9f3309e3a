"""Errors in plain words for ops whose results have no storage here, and for those that read the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torchtpu.ops.registry import composed


def _refuse(*names: str, reason: str) -> None:
    for name in names:
        composed(name)(_refusal(f"aten::{name}: {reason}"))


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
    reason="sparse tensors are not supported on tpu; use dense tensors, or move to the CPU first",
)
_refuse(
    "_make_per_channel_quantized_tensor",
    "_make_per_tensor_quantized_tensor",
    "quantize_per_channel",
    "quantize_per_tensor",
    "quantize_per_tensor.tensor_qparams",
    "quantize_per_tensor.tensors",
    "quantize_per_tensor_dynamic",
    reason="quantized tensors are not supported on tpu; use torch.fake_quantize_per_tensor_affine and its relatives, "
    "or move to the CPU first",
)
# PyTorch composes these for any device, of code that takes every address for one of the host.
_refuse(
    "_saturate_weight_to_fp16",
    "_sobol_engine_draw",
    "_sobol_engine_ff_",
    "_sobol_engine_initialize_state_",
    "_sobol_engine_scramble_",
    "choose_qparams_optimized",
    "fbgemm_linear_fp16_weight",
    "fbgemm_linear_fp16_weight_fp32_activation",
    "fbgemm_linear_int8_weight",
    "fbgemm_linear_int8_weight_fp32_activation",
    "fbgemm_linear_quantize_weight",
    "fbgemm_pack_gemm_matrix_fp16",
    "fbgemm_pack_quantized_matrix",
    "fbgemm_pack_quantized_matrix.KN",
    reason="works on the memory of the host only; move to the CPU first",
)
