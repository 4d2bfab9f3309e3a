"""Samples for network ops that no OpInfo reaches."""

import torch

aten = torch.ops.aten


def samples(dtype):
    if not dtype.is_floating_point:
        return
    made = lambda *shape: torch.randn(*shape, dtype=dtype)
    scores, grad = made(2, 3, 4, 4), made(2, 3, 4, 4)
    same, keys = torch.rand(2, 3, 4, 4) < 0.3, torch.rand(2, 4) < 0.3
    yield "masked_softmax", lambda: aten._masked_softmax(scores, same, 3, 2)
    yield "masked_softmax keys", lambda: aten._masked_softmax(scores, keys, 3, 1)
    yield "masked_softmax square", lambda: aten._masked_softmax(scores, torch.ones(4, 4).triu(1).bool(), 3, 0)
    output = scores.softmax(3)
    yield "masked_softmax_backward", lambda: aten._masked_softmax_backward(grad, output.masked_fill(same, 0), same, 3)
    v, g = made(3, 4), made(3, 1).abs()
    if dtype == torch.float32:
        yield "weight_norm", lambda: aten._weight_norm_interface(v, g, 0)
        norms = aten._weight_norm_interface(v, g, 0)[1]
        yield "weight_norm_backward", lambda: aten._weight_norm_interface_backward(made(3, 4), v, g, norms, 0)
        yield "rms_norm", lambda: aten._fused_rms_norm(made(2, 3, 4), [4], made(4), 1e-5)
        yield "rms_norm plain", lambda: aten._fused_rms_norm(made(2, 3, 4), [3, 4], None, None)
        row, taps, window = made(2, 3, 70), made(6, 1, 102), ([2], [60], [1], False, [0], 3)
        yield "long taps", lambda: aten.convolution(row, taps, None, *window)
        image, tile, window = made(2, 2, 21, 24), made(2, 1, 9, 12), ([2, 1], [5, 3], [1, 2], False, [0, 0], 2)
        yield "large tiles", lambda: aten.convolution(image, tile, None, *window)
        made_of = made(2, 2, 12, 8)
        yield (
            "large tiles grad",
            lambda: aten.convolution_backward(made_of, image, tile, None, *window, [True, True, False]),
        )
    yield "addmm_activation", lambda: aten._addmm_activation(made(4), made(2, 3), made(3, 4), use_gelu=True)
    yield "euclidean_dist", lambda: aten._euclidean_dist(made(2, 3), made(4, 3))
    yield "int_mm", lambda: aten._int_mm(torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8))
    running = [made(3), made(3).abs()]
    yield (
        "eval batch norm",
        lambda: aten._native_batch_norm_legit_no_training(scores, made(3), made(3), *running, 0.1, 1e-5),
    )
    yield "bicubic aa", lambda: aten._upsample_bicubic2d_aa(made(1, 2, 7, 6), [3, 4], False)
    yield "bicubic aa grad", lambda: aten._upsample_bicubic2d_aa_backward(made(1, 2, 3, 9), [3, 9], [1, 2, 7, 6], False)
    yield "lanczos aa", lambda: aten._upsample_lanczos2d_aa(made(1, 2, 7, 6), [3, 9], False)
    yield "lanczos aa grad", lambda: aten._upsample_lanczos2d_aa_backward(made(1, 2, 3, 9), [3, 9], [1, 2, 7, 6], True)
    ends = torch.tensor([0, 3, 3, 8])
    yield "jagged to padded", lambda: aten._jagged_to_padded_dense_forward(made(8, 2), [ends], [4], 1.5)
    yield "add relu", lambda: aten._add_relu(made(3, 4), made(4), alpha=2.5)
    yield "add relu number", lambda: aten._add_relu(made(3, 4), 1.5, 2.5)
    yield "linear combination", lambda: aten._compute_linear_combination(made(3, 2, 4), made(5, 3))
