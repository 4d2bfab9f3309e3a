"""Runs parts of the distributed tests on this rank, in one world, under torchrun."""

from __future__ import annotations

import datetime as dt
import functools
import os
import sys

import distributed_attention
import distributed_clients
import distributed_collectives
import distributed_divergence
import distributed_fusion
import distributed_interrupts
import distributed_vocabulary
import torch.distributed as dist

BACKENDS = {"short": "cpu:gloo,tpu:tpu"}


def main() -> None:
    folder, *parts = sys.argv[1:]
    if parts == ["load_alone"]:
        distributed_clients.load_alone(folder)
        return
    dist.init_process_group(BACKENDS.get(parts[0]), timeout=dt.timedelta(seconds=120))
    checks = {
        "collectives": functools.partial(distributed_collectives.check_all, is_short=False),
        "short": functools.partial(distributed_collectives.check_all, is_short=True),
        "fusion": functools.partial(distributed_fusion.check_all, 20),
        "divergence": functools.partial(distributed_divergence.check_all, 20),
        "long divergence": functools.partial(distributed_divergence.check_all, 1000),
        "thousand": functools.partial(distributed_fusion.check_all, 1000),
        "interrupts": functools.partial(distributed_interrupts.check_all, 30),
        "five hundred interrupts": functools.partial(distributed_interrupts.check_all, 500),
        "attention": distributed_attention.check_all,
        "vocabulary": distributed_vocabulary.check_all,
        "clients": functools.partial(distributed_clients.check_all, folder),
        "reshard": functools.partial(distributed_clients.reshard, folder, f"{folder}/{os.environ['WORLD_SIZE']}"),
    }
    for part in parts:
        checks[part]()
        print(f"rank {os.environ['RANK']}: {part} passed", distributed_fusion.counts(), flush=True)
    if parts[0] not in BACKENDS:  # there the script ends without it
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
