"""Ops that differ from PyTorch on the CPU: (name, dtype) -> a mode that shows it, and why. A closed gap fails the run.

A name is one of `opinfo_checks.txt`, or that of a lowering with "aten::" before it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Gap(NamedTuple):
    """Why an op differs, and a mode in which it does; no mode where this machine does not show it."""

    reason: str
    mode: str = "forward"


HAS_BFLOAT16, HAS_FLOAT16 = (
    torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    torch.ops.mkldnn._is_mkldnn_fp16_supported(),
)
HALF = "bfloat16 float16"
FLOATING = f"float32 float64 {HALF}"
ALL = f"{FLOATING} int64 int32 int16 int8 uint8 bool complex64 complex128"

STRIDED_OUT = Gap("CPUs that compute in this dtype do not write an out= whose rows are not contiguous", "out")
SPARSE = Gap("sparse tensors have no storage on the device")
NO_COMPLEX32 = Gap("XLA has no complex32")
STATISTICS = Gap("in eval mode statistics are returned, as on CUDA; the CPU returns none")
WIDE_STATISTICS = Gap("the statistics of half precision are float32, as on CUDA; the CPU rounds them")

_BY_NAME: tuple[tuple[str, str, Gap], ...] = (
    ("sparse.sampled_addmm", "float32 float64 complex64 complex128", SPARSE),
    ("sparse.mm.reduce", FLOATING, SPARSE),
    ("to_sparse", ALL, SPARSE),
    ("chalf", ALL, NO_COMPLEX32),
    ("complex", "float16", NO_COMPLEX32),
    ("native_batch_norm", "float32", STATISTICS),
    ("native_batch_norm", HALF, WIDE_STATISTICS),
    ("_native_batch_norm_legit", "float32", STATISTICS),
    ("_native_batch_norm_legit", HALF, WIDE_STATISTICS),
    ("_batch_norm_with_update", HALF, WIDE_STATISTICS),
    ("native_layer_norm", HALF, WIDE_STATISTICS),
    ("nn.functional.gelu", "bfloat16", STRIDED_OUT._replace(mode="out" if HAS_BFLOAT16 else "")),
    ("nn.functional.gelu", "float16", STRIDED_OUT._replace(mode="out" if HAS_FLOAT16 else "")),
    ("nn.functional.avg_pool3d", "float32 float64 int64", Gap("the CPU writes wrongly into a strided out=", "out")),
    ("special.bessel_j0", "float64", Gap("the CPU is off by 4e-7 near 5")),
    ("special.bessel_y1", "float64", Gap("the CPU is off by 8e-7 near 5")),
    ("matrix_exp", "float16", Gap("the CPU overflows on its way and returns NaN")),
    ("SparseAdam", "float32 float64", SPARSE._replace(mode="loop")),
    ("aten::_native_batch_norm_legit_no_training", "float32 bfloat16", STATISTICS),
)

KNOWN_GAPS: dict[tuple[str, str], Gap] = {
    (name, dtype): gap for name, dtypes, gap in _BY_NAME for dtype in dtypes.split()
}
