"""The libraries and versions that were tested on the device."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import NamedTuple

# The distribution -> the releases that tests/test_frameworks.py and docs/ecosystem.md are about.
TESTED = {
    "accelerate": ("1.15",),
    "bitsandbytes": ("0.50",),
    "datasets": ("5.2",),
    "diffusers": ("0.42",),
    "lightning": ("2.6",),
    "peft": ("0.21",),
    "pytorch-ignite": ("0.5",),
    "pytorch-lightning": ("2.6",),
    "safetensors": ("0.8",),
    "tensorboard": ("2.21",),
    "torchmetrics": ("1.9",),
    "transformers": ("5.23",),
    "trl": ("1.16",),
}


class Framework(NamedTuple):
    """A library that is installed."""

    name: str
    version: str
    is_tested: bool


def installed() -> Iterator[Framework]:
    """Those of the libraries that are installed."""
    for name, releases in TESTED.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        yield Framework(name, version, ".".join(version.split(".")[:2]) in releases)
