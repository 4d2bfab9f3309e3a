"""Scripts for CUDA that leave the loop to a trainer library run on `tpu` by `torchtpu run`.

They need the extra `models`, which `test` has.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import regression

SCRIPTS = {
    "transformers": """
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

        config = GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0)
        rows = [{"input_ids": ids, "labels": ids} for ids in ([(i + j) % 50 for j in range(16)] for i in range(64))]
        arguments = TrainingArguments("out", max_steps=12, per_device_train_batch_size=8, logging_steps=3, report_to=[],
                                      learning_rate=1e-2, save_strategy="no", disable_tqdm=True)
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows)
        trainer.train()
        device = next(trainer.model.parameters()).device
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    """,
    "accelerate": """
        from accelerate import Accelerator
        from regression import prepared, step

        accelerator = Accelerator()
        model, optimizer, data = prepared(accelerator)
        losses = [step(accelerator, model, optimizer, *batch).item() for _ in range(5) for batch in data]
        device = next(model.parameters()).device
    """,
    "lightning": """
        import lightning as L
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        losses, devices = [], []

        class Regression(L.LightningModule):
            def __init__(self):
                super().__init__()
                self.model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

            def training_step(self, batch, index):
                loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
                losses.append(loss.detach())
                devices.append(batch[0].device)
                return loss

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), 1e-2)

        torch.manual_seed(0)
        x = torch.randn(64, 8)
        data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 16)
        trainer = L.Trainer(accelerator="cuda", devices=1, max_epochs=5, logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(Regression(), data)
        device, losses = devices[-1], [float(loss) for loss in losses]
    """,
}


@pytest.mark.parametrize("library", SCRIPTS)
def test_a_trainer_library_trains_on_tpu(library: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: the extra `models`")
    script = tmp_path / "script.py"
    ending = 'print("device", device.type, "losses", losses[0], losses[-1])'
    script.write_text(f"{textwrap.dedent(SCRIPTS[library])}\n{ending}\n")
    command = [sys.executable, "-m", "torchtpu.cli", "run", str(script)]
    environment = {**os.environ, "PYTHONPATH": regression.PYTHONPATH}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = re.search(r"device tpu losses (\S+) (\S+)", done.stdout)
    assert found, done.stdout
    assert float(found[2]) < 0.9 * float(found[1])
    assert "mapped to tpu" in done.stderr
