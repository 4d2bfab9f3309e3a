"""The examples for several ranks, at a small size, have the losses of one process."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch
from script import torchrun
from torch.nn import functional as F

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SMALL = ["--steps", "6", "--context", "16", "--batch", "4", "--width", "32", "--layers", "2"]

pytestmark = pytest.mark.timeout(600)


def losses_alone(script: str, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The training of an example in this process on the CPU."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import tensor_parallel
    import train_gpt

    torch.manual_seed(0)
    corpus = train_gpt.read_corpus()
    if script == "tensor_parallel.py":
        model: torch.nn.Module = tensor_parallel.GPT(16, 32, 2)
    else:
        model = train_gpt.GPT(16, 32, 2, heads=4, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    for step in range(6):
        if script == "fsdp2.py":
            torch.manual_seed(step)
        x, y = train_gpt.draw_batch(corpus, 4, 16, "cpu")
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        if script == "fsdp2.py":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("script", ["fsdp2.py", "tensor_parallel.py", pytest.param("ddp.py", marks=pytest.mark.full)])
def test_losses_equal_those_of_one_process(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "losses"
    ended = torchrun(str(EXAMPLES / script), *SMALL, "--losses", str(file))
    assert ended.status == 0, ended.err
    found = [float(line) for line in file.read_text().splitlines()]
    assert found == pytest.approx(losses_alone(script, monkeypatch), rel=1e-5)


@pytest.mark.full
def test_a_restarted_job_resumes_from_its_checkpoint_to_the_same_loss(tmp_path: Path) -> None:
    """One rank of the first start kills itself in the fifth step; torchrun starts all ranks again."""
    arguments = [*SMALL[2:], "--steps", "8", "--every", "3", "--checkpoint", str(tmp_path / "checkpoints")]
    whole, again = tmp_path / "whole", tmp_path / "again"
    ended = torchrun(str(EXAMPLES / "fsdp2.py"), *arguments[:-2], "--losses", str(whole))
    assert ended.status == 0, ended.err
    script = f"""
    import os, runpy, sys
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    sys.path.insert(0, {str(EXAMPLES)!r})
    steps = 0
    def count(*_):
        global steps
        steps += 1
        if steps == 5 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), 9)
    register_optimizer_step_pre_hook(count)
    runpy.run_path({str(EXAMPLES / "fsdp2.py")!r}, run_name="__main__")
    """
    ended = torchrun(textwrap.dedent(script), *arguments, "--losses", str(again), restarts=1)
    assert ended.status == 0, ended.err
    assert re.search("steps 3 to 8, last loss", ended.out), ended.out
    expected = [float(line) for line in whole.read_text().splitlines()]
    found = [float(line) for line in again.read_text().splitlines()]
    assert found == pytest.approx(expected[3:], rel=1e-5)
