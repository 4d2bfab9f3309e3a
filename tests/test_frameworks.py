"""In: plain `python train.py` for the libraries that choose a device themselves. Out: their work, done on `tpu`.

They need the extra: pip install -e '.[test,models]'.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from script import run_script

pytestmark = pytest.mark.timeout(600)


def needs(*libraries: str) -> pytest.MarkDecorator:
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (the extra `models`)")


def printed(code: str, **environment: str) -> list[str]:
    """The lines that a script prints, which runs no op on the CPU."""
    ended = run_script(code, seconds=500, TORCHTPU_FALLBACK="error", **environment)
    assert ended.status == 0, ended.err
    assert "torchtpu does not know" not in ended.err, ended.err
    return ended.out.splitlines()


def torchrun(code: str, folder: Path, *arguments: str) -> str:
    """What two ranks of a script print."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code))
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script), *arguments], cwd=folder, capture_output=True, text=True, timeout=500, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


ACCELERATE = """
    import sys
    from accelerate import Accelerator
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    plugin = None
    if "fsdp" in options:
        from accelerate import FullyShardedDataParallelPlugin
        plugin = FullyShardedDataParallelPlugin(fsdp_version=int(options["fsdp"]), auto_wrap_policy="no_wrap")
    accelerator = Accelerator(mixed_precision=options.get("precision", "no"), fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    x = torch.randn(64, 8)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 16)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for _ in range(4):
        for inputs, targets in data:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    assert losses[-1] < 0.9 * losses[0], losses
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        print(accelerator.device.type, inputs.device.type, accelerator.num_processes, f"{losses[-1]:.3f}", flush=True)
    accelerator.end_training()
"""


@needs("accelerate")
def test_an_accelerator_is_the_tpu_unless_the_cpu_is_asked_for() -> None:
    (found,) = printed(ACCELERATE)
    (expected,) = printed(ACCELERATE, ACCELERATE_USE_CPU="true")
    assert found.split()[:3] == ["tpu", "tpu", "1"]
    assert expected.split()[:3] == ["cpu", "cpu", "1"]
    assert found.split()[3] == expected.split()[3]


@needs("accelerate")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_accelerator_trains_in_mixed_precision(precision: str) -> None:
    code = ACCELERATE.replace("sys.argv[1::2], sys.argv[2::2]", f"['precision'], [{precision!r}]")
    assert printed(code)[0].startswith("tpu tpu 1")


@needs("accelerate")
@pytest.mark.parametrize("options", [(), ("fsdp", "2")], ids=["ddp", "fsdp2"])
def test_accelerators_under_torchrun_are_ranks_of_tpu(options: tuple[str, ...], tmp_path: Path) -> None:
    assert "tpu tpu 2" in torchrun(ACCELERATE, tmp_path, *options)


@needs("accelerate")
def test_accelerate_saves_and_loads_the_states_of_tpu_generators() -> None:
    code = """
        import tempfile
        from accelerate import Accelerator
        import torch

        accelerator = Accelerator()
        with tempfile.TemporaryDirectory() as folder:
            accelerator.save_state(folder)
            drawn = torch.rand(3, device=accelerator.device).tolist()
            accelerator.load_state(folder)
            print(torch.rand(3, device=accelerator.device).tolist() == drawn)
    """
    assert printed(code) == ["True"]


@needs("accelerate")
def test_a_device_map_fills_the_tpus_and_then_the_cpu() -> None:
    code = """
        from accelerate import dispatch_model, infer_auto_device_map
        from accelerate.utils import get_balanced_memory, get_max_memory
        import torch

        free = get_max_memory()
        print(list(free), all(size > 0 for size in free.values()))
        print(get_max_memory({"cpu": "1GB", 1: "1KB", 0: 2048}))
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(6)))
        x = torch.randn(4, 16)
        expected = model(x)
        placed = infer_auto_device_map(model, {0: 2600, 1: 2600, "cpu": "1GB"})
        print(sorted(set(map(str, placed.values()))))
        model = dispatch_model(model, placed)
        torch.testing.assert_close(model(x.to("tpu:0")).cpu(), expected)
        balanced = get_balanced_memory(torch.nn.Linear(4, 4))
        print(list(balanced))
    """
    assert printed(code, TORCHTPU_NUM_DEVICES="2") == [
        "[0, 1, 'cpu'] True",
        "{0: 2048, 1: 1000, 'cpu': 1000000000}",
        "['0', '1', 'cpu']",
        "[0, 1, 'cpu']",
    ]


@needs("accelerate")
def test_the_accelerate_command_configures_and_launches_on_tpu(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(ACCELERATE))
    command = [sys.executable, "-W", "ignore", "-m", "accelerate.commands.accelerate_cli"]

    def output(*arguments: str, **environment: str) -> str:
        done = subprocess.run(
            [*command, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False,
            env={**os.environ, "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", **environment},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "tpu tpu 2" in output("launch", "train.py", TORCHTPU_NUM_DEVICES="2")
    output("config", "default")
    assert "tpu tpu 1" in output("launch", "train.py")
