"""`torch.tpu`'s random number functions: seeds, states and the devices' default generators.

A state is 16 bytes: the seed and the offset of the next draw, both int64.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from torchtpu.runtime import _C

__all__ = [
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]


@functools.cache
def generators() -> tuple[torch.Generator, ...]:
    """The default generator of each device."""
    return tuple(_C.default_generator(i) for i in range(_C.device_count()))


def device_index(device: Any = None) -> int:
    """The index of a device given as None (the current one), an int, a text or a torch.device.

    Raises ValueError for a device that is no tpu, RuntimeError for an index out of range.
    """
    if device is None:
        return int(_C.current_device())
    if isinstance(device, int):
        index: int | None = device
    else:
        device = torch.device(device)
        if device.type != "tpu":
            raise ValueError(f"Expected a tpu device, but got: {device}")
        index = device.index
    if index is None or index == -1:
        return int(_C.current_device())
    count = _C.device_count()
    if not 0 <= index < count:
        raise RuntimeError(f"The device index is out of range. It must be in [0, {count}), but got {index}.")
    return index


def get_rng_state(device: Any = "tpu") -> torch.Tensor:
    """The device's random state, a ByteTensor of 16 bytes."""
    return generators()[device_index(device)].get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """The random state of every device."""
    return [generator.get_state() for generator in generators()]


def set_rng_state(new_state: torch.Tensor, device: Any = "tpu") -> None:
    """Sets the device's random state to one that `get_rng_state` returned."""
    generators()[device_index(device)].set_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Sets the random state of every device, in order."""
    for generator, state in zip(generators(), new_states, strict=False):
        generator.set_state(state)


def manual_seed(seed: int) -> None:
    """Seeds the current device."""
    generators()[_C.current_device()].manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seeds every device."""
    for generator in generators():
        generator.manual_seed(int(seed))


def seed() -> None:
    """Seeds the current device with a random number."""
    generators()[_C.current_device()].seed()


def seed_all() -> None:
    """Seeds every device with one random number."""
    first, *others = generators()
    number = first.seed()
    for generator in others:
        generator.manual_seed(number)


def initial_seed() -> int:
    """The current device's seed."""
    return generators()[_C.current_device()].initial_seed()


def _get_rng_state_offset(device: Any = "tpu") -> int:
    return generators()[device_index(device)].get_offset()


def _set_rng_state_offset(offset: int, device: Any = "tpu") -> None:
    generators()[device_index(device)].set_offset(offset)
