"""torch.distributed on the device: process groups whose collectives are recorded.

Data passes group (what c10d calls) → calls (recorded, then run in the launch order) → lowering (a part of programs
that all ranks launch together) or gloo (through the hosts); process group makes the ranks one client; peers says what
the other ranks do when a call fails, and that one has ended, as links between the ranks tell. attention teaches DTensor
and context parallel the device's attention.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from torchtpu import config
from torchtpu.runtime import _C

from . import alone, attention, calls
from .calls import RecordedCollectives, reset, snapshot
from .group import Group
from .process_group import Ranks, Start

__all__ = ["RecordedCollectives", "install", "reset", "snapshot"]

_EXIT_SECONDS = 60.0
_groups: weakref.WeakSet[Group] = weakref.WeakSet()


def install(start_engine: Start, is_free: Callable[[], bool]) -> None:
    """Makes `tpu` a backend of torch.distributed, and the default one of tpu tensors. Called once, at import.

    `start_engine` starts the engine among those of other ranks, which `is_free` says can still be done.
    """
    if not dist.is_available():
        return
    calls.install()
    attention.install()
    if config.get("world_size"):
        alone.install()
    make = functools.partial(_make_backend, Ranks(start_engine, is_free))
    for name in ("tpu", "tpu_dist"):  # the second is what transformers asks for
        dist.Backend.register_backend(name, make, extended_api=True, devices=["tpu", "cpu"])
    distributed_c10d._new_process_group_helper = _naming_the_backend(distributed_c10d._new_process_group_helper)
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=_groups.clear)


def _naming_the_backend(make: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch gives a group without a named backend a default one of gloo, which the group may not have."""

    @functools.wraps(make)
    def make_group(size: int, rank: int, ranks: Any, backend: Any, *arguments: Any, **options: Any) -> Any:
        if str(backend) == dist.Backend.UNDEFINED:
            backend = dist.Backend("tpu")
        return make(size, rank, ranks, backend, *arguments, **options)

    return make_group


def _make_backend(everyone: Ranks, options: Any, backend_options: Any) -> Any:
    rank, size, ranks = options.group_rank, options.group_size, list(options.global_ranks_in_group)
    # torchrun's store outlives a restart, and with it the addresses of processes that have ended.
    store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), options.store)
    is_alone = bool(config.get("world_size"))
    if not ranks and not is_alone:
        everyone.join(store, rank, size, is_wanted=config.get("fuse_collectives"))
    homes = alone.homes(ranks, size) if is_alone else everyone.homes(ranks)
    group = Group(store, rank, size, options.timeout, options.group_id, ranks, homes)
    _groups.add(group)
    return _C.make_backend(group, rank, size, options.timeout)


def _at_exit() -> None:
    """Peers may wait for what is recorded here and has not run; after an exception they are told at once."""
    error = getattr(sys, "last_value", None)
    for group in list(_groups):
        if error is not None:
            group.abort(f"has ended with {traceback.format_exception_only(error)[-1].strip()}")
        elif not group.drain(_EXIT_SECONDS):
            group.abort("has ended with collectives that others have not joined")
        group.close()
    calls.close(_EXIT_SECONDS)
