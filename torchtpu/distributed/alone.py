"""A job of which one rank is there, and meets nobody.

`torchtpu warm --world-size` records a rank's programs so: they depend on the number of ranks, not on what others send.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch._C._distributed_c10d import HashStore
from torch.distributed.rendezvous import _rendezvous_handlers

from torchtpu import config


def install() -> None:
    """From now on `init_process_group` waits for no other rank. Called once, at import."""
    for scheme in ("env", "tcp", "file"):
        _rendezvous_handlers[scheme] = _meet_nobody


def homes(ranks: list[int], size: int) -> tuple[int, ...]:
    """The devices of a group: a rank's number is its device's; () where programs are not for a TPU's topology."""
    return tuple(ranks or range(size)) if config.get("target") else ()


def _meet_nobody(url: str, *_: Any, **__: Any) -> Iterator[tuple[Any, int, int]]:
    yield HashStore(), int(os.environ["RANK"]), config.get("world_size")
