"""Numpy arrays for each workload, the same numbers for every backend."""

from __future__ import annotations

import zlib

import numpy as np

WORKLOADS = {
    "w2": "MLP, AdamW",
    "w3": "GPT of 4 layers, AdamW",
    "w4": "ResNet-18 on small images, SGD with momentum",
    "w8": "MLP, hand-written SGD with a new learning rate every step",
    "gpt2-short": "GPT of 12 layers, 768 wide, float32, AdamW, one sequence of 64 tokens",
}
SEQUENCES = {"w3": (1000, (8, 128)), "gpt2": (50304, (8, 1024)), "gpt2-short": (50304, (1, 64))}


def batch(workload: str) -> tuple[np.ndarray, np.ndarray]:
    """The one batch a workload trains on."""
    random = np.random.default_rng(0)
    if workload in SEQUENCES:
        vocabulary, shape = SEQUENCES[workload]
        return random.integers(0, vocabulary, shape), random.integers(0, vocabulary, shape)
    if workload == "w4":
        return random.standard_normal((8, 3, 64, 64)).astype("float32"), random.integers(0, 100, 8)
    return random.standard_normal((64, 256)).astype("float32"), random.integers(0, 10, 64)


def parameter(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Zeros for biases, ones for norm weights, scaled normals else."""
    if name.endswith("bias"):
        return np.zeros(shape, "float32")
    if len(shape) == 1:
        return np.ones(shape, "float32")
    scale = 0.02 if "embedding" in name else float(np.prod(shape[1:])) ** -0.5
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return (random.standard_normal(shape) * scale).astype("float32")


def tokens() -> tuple[np.ndarray, np.ndarray]:
    """The one token of each sequence that a decode step takes, and its position."""
    return np.random.default_rng(1).integers(0, 1000, (8, 1)), np.array([100])


def learning_rate(step: int) -> float:
    return 0.01 / (1 + 0.001 * step)
