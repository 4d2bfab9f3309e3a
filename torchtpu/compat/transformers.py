"""Makes transformers find tpu in the places that do not ask for one though the library knows it.

Each function names the part of transformers that it stands in for.
"""

from __future__ import annotations

import functools
import inspect
import os
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch


def place_pipelines(base: ModuleType) -> None:
    """Pipeline.__init__, in pipelines/base.py: a device that is a number, or none, is the CPU there."""
    initialize = base.Pipeline.__init__
    signature = inspect.signature(initialize)
    assert "device" in signature.parameters

    @functools.wraps(initialize)
    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        given = signature.bind(self, *arguments, **options).arguments
        placed = getattr(given["model"], "hf_device_map", None)
        device = next(iter(placed.values())) if placed else given.get("device")
        if device is None:
            device = torch.accelerator.current_device_index()
        if isinstance(device, int) and device >= 0:
            device = torch.device("tpu", device)
        if placed:  # which is refused together with a device
            initialize(self, *arguments, **options)
            self.device = torch.device(device)
        else:
            more = given.pop("kwargs", {})
            initialize(**{**given, "device": device}, **more)

    base.Pipeline.__init__ = __init__


def keep_generators(trainer: ModuleType) -> None:
    """Trainer._save_rng_state and _load_rng_state, in trainer.py."""
    save, load = trainer.Trainer._save_rng_state, trainer.Trainer._load_rng_state

    def path(self: Any, folder: str) -> str:
        rank = f"_{self.args.process_index}" if self.args.world_size > 1 else ""
        return os.path.join(folder, f"rng_state{rank}.pth")

    @functools.wraps(save)
    def _save_rng_state(self: Any, output_dir: str) -> None:
        save(self, output_dir)
        with trainer.safe_globals():
            kept = torch.load(path(self, output_dir), weights_only=True)
        torch.save({**kept, "tpu": torch.tpu.get_rng_state_all()}, path(self, output_dir))  # type: ignore[attr-defined]

    @functools.wraps(load)
    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        load(self, checkpoint)
        if checkpoint is None:
            return
        with suppress(OSError, KeyError), trainer.safe_globals():  # saved elsewhere, or for other processes
            kept = torch.load(path(self, checkpoint), weights_only=True)
            torch.tpu.set_rng_state_all(kept["tpu"])  # type: ignore[attr-defined]

    trainer.Trainer._save_rng_state = _save_rng_state
    trainer.Trainer._load_rng_state = _load_rng_state
