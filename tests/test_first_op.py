"""What a first op imports and infers: nothing that a script does not need, and each signature once."""

from __future__ import annotations

import pytest
import torch
from script import run_script

from torchtpu import metrics

HEAVY = ("sympy", "torch._dynamo", "torch._inductor")

# No optimizer: PyTorch's own import torch._dynamo, on every device.
SCRIPT = """
    import sys, torch
    from torch import nn
    from torch.nn import functional as F

    torch.manual_seed(0)
    x = torch.randn(4, 36, device="tpu", requires_grad=True)
    print(torch.ones(2, device="tpu") + 1)
    mixed = nn.Sequential(nn.Linear(36, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(), nn.Linear(8, 5)).to("tpu")
    table = nn.Embedding(7, 5).to("tpu")
    rows = torch.tensor([1, 2, 3, 4], device="tpu")
    for _ in range(2):
        scores = mixed(x.relu()) + table(rows)
        loss = F.cross_entropy(scores, rows) + F.mse_loss(scores, torch.zeros_like(scores))
        loss = loss + torch.where(scores > 0, scores, 0).softmax(-1).masked_fill(scores > 3, 0).mean()
        loss.backward()
    print(loss.item())
    print([name for name in HEAVY if name in sys.modules])
"""


def test_ordinary_ops_import_no_symbolic_shapes_and_no_compiler_of_torch() -> None:
    ended = run_script(SCRIPT.replace("HEAVY", repr(HEAVY)))
    assert ended.status == 0, ended.err
    assert ended.out.splitlines()[-1] == "[]"


def inferred() -> int:
    return int(metrics.snapshot()["shapes_inferred"])


def test_an_op_is_inferred_once_wherever_it_stands_in_a_stream() -> None:
    x = torch.ones(3, 37, device="tpu")
    torch.sin(torch.cos(x)).cpu()
    before = inferred()
    y = torch.cos(torch.sin(torch.sin(x)))
    assert inferred() == before
    assert torch.equal(y.cpu(), torch.ones(3, 37).sin().sin().cos())
    torch.sin(x.t())
    assert inferred() == before + 1  # it lies otherwise


@pytest.mark.parametrize("written", ["self", "alias"])
def test_an_answer_is_no_answer_for_tensors_that_share_otherwise(written: str) -> None:
    """A write over what is read elsewhere is refused, though each tensor looks as it did in a call that was not."""

    def add(device: str) -> str:
        whole = torch.arange(8.0, device=device)
        apart = torch.arange(8.0, device=device)
        apart[:4].add_(whole[:4])
        try:
            whole[1:5].add_(whole[:4] if written == "alias" else apart[:4])
        except RuntimeError as error:
            return str(error)
        return str(whole.tolist())

    assert add("tpu") == add("cpu")


def test_errors_are_raised_each_time() -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="must match"):
            torch.ones(3, device="tpu") + torch.ones(4, device="tpu")
        with pytest.raises(RuntimeError, match="can't be cast"):
            torch.ones(3, dtype=torch.long, device="tpu").add_(1.5)


def test_the_default_dtype_is_part_of_the_question() -> None:
    x = torch.ones(3, dtype=torch.long, device="tpu")
    assert (x / 2).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (x / 2).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
