"""In: scripts written for CUDA. Out: the same scripts on tpu through `torchtpu run`, and a list of what was mapped."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import torch
from torch.cuda.amp import GradScaler, autocast

assert sys.argv[1:] == ["--steps", "2"] and __name__ == "__main__"
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
assert device.type == "tpu" and isinstance(device, torch.device)
model = torch.nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler()
for step in range(2):
    x = torch.ones(3, 4).to("cuda:0", non_blocking=True)
    with autocast(dtype=torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16 and y.is_cuda
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(y.float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
torch.cuda.synchronize()
torch.cuda.manual_seed_all(0)
torch.cuda.set_device(0)
assert torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
assert torch.cuda.max_memory_allocated() > 0 and torch.cuda.get_device_name() and torch.cuda.is_bf16_supported()
g = torch.Generator(device="cuda").manual_seed(1)
assert torch.randn(2, device="cuda", generator=g).is_cuda and torch.zeros(2, device=device).is_cuda
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record(); end.record(); torch.cuda.synchronize()
assert start.elapsed_time(end) >= 0
with torch.cuda.stream(torch.cuda.Stream()), torch.device("cuda"):
    assert torch.ones(1).is_cuda
torch.save(model.state_dict(), "model.pt")
assert all(v.is_cuda for v in torch.load("model.pt", map_location="cuda").values())
print("finished on", y.device)
"""


def run(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "torchtpu.cli", *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_a_cuda_script_runs_and_lists_what_was_mapped(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    result = run("run", "train.py", "--steps", "2", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "finished on tpu:0\n"
    rows = dict(line.strip().removesuffix(" x").rsplit(maxsplit=1) for line in result.stderr.splitlines()[1:])
    assert rows["'cuda:0'"] == "2"
    assert rows["torch.cuda.is_available()"] == "1"
    assert rows["Linear.cuda()"] == "1"
    assert "torch.cuda.synchronize()" in rows


def test_the_scripts_own_failure_is_passed_on(tmp_path):
    (tmp_path / "fail.py").write_text("import sys, helper\nsys.exit(helper.STATUS)")
    (tmp_path / "helper.py").write_text("STATUS = 3")
    result = run("run", str(tmp_path / "fail.py"), cwd="/")
    assert result.returncode == 3
    assert "nothing was mapped" in result.stderr


def test_a_missing_subcommand_shows_usage(tmp_path):
    result = run(cwd=tmp_path)
    assert result.returncode == 2
    assert "Usage: torchtpu" in result.stdout + result.stderr
