"""Scripts written for CUDA run on tpu through `torchtpu run`, which lists what was mapped."""

from __future__ import annotations

import os
import subprocess
import sys
import venv

import pytest
from script import run_python

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
    return run_python("-m", "torchtpu.cli", *map(str, arguments), folder=cwd)


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


LEGACY = """
import torch

x = torch.cuda.FloatTensor([[1, 2], [3, 4]])
assert x.is_cuda and x.dtype == torch.float32 and x.tolist() == [[1, 2], [3, 4]]
assert torch.cuda.LongTensor(3, 2).shape == (3, 2) and torch.cuda.HalfTensor().numel() == 0
assert torch.cuda.ByteTensor(x.size()).shape == (2, 2)
assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(x, torch.cuda.LongTensor)
assert not isinstance(x.cpu(), torch.cuda.FloatTensor)
same = torch.cuda.FloatTensor(x)
same[0, 0] = 9
assert x[0, 0].item() == 9
try:
    torch.cuda.LongTensor(x)
except TypeError:
    pass
else:
    raise AssertionError
for kind in (torch.cuda.DoubleTensor, "torch.cuda.DoubleTensor"):
    y = torch.ones(2).type(kind)
    assert y.is_cuda and y.dtype == torch.float64
torch.set_default_tensor_type(torch.cuda.DoubleTensor)
assert torch.ones(2).is_cuda and torch.ones(2).dtype == torch.float64
torch.set_default_tensor_type(torch.FloatTensor)
assert torch.ones(2).device.type == "cpu" and torch.ones(2).dtype == torch.float32
"""


def test_legacy_types_of_cuda_make_tensors_of_tpu(tmp_path):
    (tmp_path / "old.py").write_text(LEGACY)
    result = run("run", "old.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "torch.cuda.FloatTensor()" in result.stderr


def test_a_library_may_take_what_only_a_cuda_build_has(tmp_path):
    """bitsandbytes does so at its import, which transformers and peft import."""
    (tmp_path / "train.py").write_text("import torch\nassert torch._C._cuda_getCurrentRawStream(0) == 0\n")
    assert run("run", "train.py", cwd=tmp_path).returncode == 0


def test_the_package_is_the_command():
    command = [sys.executable, "-m", "torchtpu", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Usage: torchtpu" in result.stdout


@pytest.mark.parametrize("subcommand", ["explain", "warm"])
def test_a_command_whose_python_lacks_torch_is_refused_with_what_helps(subcommand, tmp_path):
    bare = tmp_path / "bin" / "python3"
    venv.create(tmp_path, with_pip=False, symlinks=True)
    (tmp_path / "train.py").write_text("import torch")
    result = run(subcommand, "--", str(bare), "train.py", cwd=tmp_path)
    assert result.returncode == 1
    assert f"the command runs {bare}, where torch and torchtpu cannot be imported" in result.stderr
    assert sys.executable in result.stderr
    assert "Traceback" not in result.stderr


def test_a_command_that_is_not_there_is_named(tmp_path):
    result = run("explain", "--", "no-such-command", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr == "torchtpu: there is no command 'no-such-command'\n"


@pytest.mark.parametrize(
    ("typed", "completed"),
    [("torchtpu wa", ["warm"]), ("torchtpu warm --ta", ["--target"]), ("torchtpu cache i", ["info", "import"])],
)
def test_the_shell_completes_commands_and_options(typed, completed):
    """As the script of `torchtpu --install-completion` asks for it."""
    asked = {"_TORCHTPU_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    command = [sys.executable, "-m", "torchtpu.cli"]
    result = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, check=True)
    assert result.stdout.split() == completed
