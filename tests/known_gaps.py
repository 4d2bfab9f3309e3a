"""Lowerings that differ from PyTorch's CPU kernels: dtype -> op -> why. A gap that has closed fails the run."""

from __future__ import annotations

import torch

_SAVED_STATISTICS = "PyTorch's meta kernel promises (C,) saved statistics in eval mode, its CPU kernel returns (0,)"
_LOG_ALPHA = "log_alpha beyond a label row is left unset by PyTorch"

KNOWN_GAPS: dict[torch.dtype, dict[str, str]] = {
    torch.float32: {
        "_native_batch_norm_legit_no_training": _SAVED_STATISTICS,
        "_ctc_loss": _LOG_ALPHA,
        "_ctc_loss_backward": _LOG_ALPHA,
        "_ctc_loss.Tensor": _LOG_ALPHA,
        "_ctc_loss_backward.Tensor": _LOG_ALPHA,
        "grid_sampler_2d_backward": "off by 1.4e-5 where many samples meet in one pixel",
    },
    torch.int64: {
        "avg_pool2d": "integer means round down, PyTorch's towards zero",
        "avg_pool3d": "integer means round down, PyTorch's towards zero",
        "convolution": "transposed convolutions of integers: jax.linear_transpose takes floating types only",
    },
    torch.bfloat16: {
        "_native_batch_norm_legit_no_training": _SAVED_STATISTICS,
        "linalg_matrix_exp": "jax.scipy.linalg.expm takes no bfloat16",
    },
    torch.complex64: {"uniform": "the random op has no complex form"},
}
