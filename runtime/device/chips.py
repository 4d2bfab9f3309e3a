"""The kinds of TPU chips, by name and PCI device id, with the facts of one device of each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple


class Chip(NamedTuple):
    """One device of a kind of chip: what PyTorch and JAX count as one, which for TPU7x is half a chip.

    `kind` is what JAX calls it.  `clock_ghz` reproduces the published peak from the size of the matrix units,
    `link_bytes_per_second` is the published bandwidth of all its links to other chips.
    """

    name: str
    kind: str
    pci_id: str
    version: tuple[int, int]
    nbytes: int
    bytes_per_second: float
    clock_ghz: float
    peak_flops: float
    link_bytes_per_second: float
    topology: str  # of one host

    @property
    def seconds_per_cycle(self) -> float:
        return 1e-9 / self.clock_ghz


# The figures of memory, peak and links are those of https://docs.cloud.google.com/tpu/docs/ and the name, which gives
# them for a whole chip and, where it is a newer one, its links in both directions. PCI ids are jax's.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v3", "TPU v3", "0x0027", (3, 0), 16 << 30, 450e9, 0.94, 61.5e12, 82e9, "2x2x1"),
        Chip("v4", "TPU v4", "0x005e", (4, 0), 32 << 30, 1228e9, 1.05, 275e12, 300e9, "2x2x1"),
        Chip("v5e", "TPU v5 lite", "0x0063", (5, 0), 16 << 30, 819e9, 1.5, 197e12, 200e9, "2x2"),
        Chip("v5p", "TPU v5", "0x0062", (5, 1), 95 << 30, 2765e9, 1.75, 459e12, 600e9, "2x2x1"),
        Chip("v6e", "TPU v6 lite", "0x006f", (6, 0), 32 << 30, 1640e9, 1.75, 918e12, 448e9, "2x2"),
        Chip("tpu7x", "TPU7x", "0x0076", (7, 0), 96 << 30, 3690e9, 2.2, 1153e12, 600e9, "2x2x1"),
    )
}


def find_chip(target: str) -> tuple[Chip, str]:
    """The chip and topology of "v5e" (the topology of one host) or "v5e:4x4"; ValueError where there is none."""
    name, _, topology = target.partition(":")
    if name not in CHIPS or name == "v3":  # libtpu no longer compiles for it
        known = ", ".join(chip for chip in CHIPS if chip != "v3")
        raise ValueError(f"{target!r}: programs are compiled for {known}, as in v5e:2x2, not for {name!r}")
    chip = CHIPS[name]
    topology = topology or chip.topology
    if len(topology.split("x")) != len(chip.topology.split("x")) or not topology.replace("x", "").isdigit():
        raise ValueError(f"{target!r}: a topology of {name} is written as {chip.topology}")
    return chip, topology


def topology_of(devices: Iterable[Any]) -> str:
    """How far the coordinates of devices reach, as "2x2x1"; "" where they have none."""
    coordinates = [device.coords for device in devices if getattr(device, "coords", None) is not None]
    return "x".join(str(max(axis) + 1) for axis in zip(*coordinates, strict=True))


def devices_of_host(chip: Chip, topology: str) -> int:
    """The devices that a process on one host of this topology has, where it has the host to itself."""
    most = 8 if chip.name in ("v5e", "v6e") else 4
    per_chip = 2 if chip.name == "tpu7x" else 1
    return min(math.prod(map(int, topology.split("x"))), most) * per_chip
