"""Which chip a rank has: libtpu's environment, from torchrun's environment and the slice's metadata.

One process per chip. libtpu reads these variables when it is loaded, and numbers processes as torchrun numbers ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

_FIRST_PORT = 8476
_ONE_HOST = {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}  # how the chips of a host are laid out


def rank_environment(environment: Mapping[str, str], num_chips: int) -> dict[str, str]:
    """What this process has to add to its environment on a machine with so many chips, before libtpu is loaded.

    Nothing where torchrun started no other rank here, or where TPU_VISIBLE_CHIPS says already which chip to take.
    """
    if int(environment.get("LOCAL_WORLD_SIZE", "1")) == 1 or environment.get("TPU_VISIBLE_CHIPS"):
        return {}
    if environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"]:
        if num_chips not in _ONE_HOST:
            raise ValueError(f"a host with {num_chips} chips: set TPU_VISIBLE_CHIPS for each rank")
        alone = {"TPU_CHIPS_PER_HOST_BOUNDS": _ONE_HOST[num_chips], "TPU_HOST_BOUNDS": "1,1,1"}
        return chip_environment(environment, alone)
    missing = [name for name in _OF_A_SLICE if name not in environment]
    if missing:
        raise ValueError(f"ranks on several hosts need the metadata of the slice: set {', '.join(missing)}")
    return chip_environment(environment, environment)


_OF_A_SLICE = ("TPU_CHIPS_PER_HOST_BOUNDS", "TPU_HOST_BOUNDS", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES")


def chip_environment(torchrun: Mapping[str, str], metadata: Mapping[str, str]) -> dict[str, str]:
    """The variables that give this rank its chip.

    `metadata` has, under the names that TPU machines use, TPU_CHIPS_PER_HOST_BOUNDS, TPU_HOST_BOUNDS and TPU_WORKER_ID,
    TPU_WORKER_HOSTNAMES where the slice has several hosts, and MEGASCALE_NUM_SLICES, MEGASCALE_SLICE_ID and
    MEGASCALE_COORDINATOR_ADDRESS where the job has several slices. ValueError says what does not fit together.
    """
    rank, local_rank = int(torchrun["RANK"]), int(torchrun["LOCAL_RANK"])
    size, local_size = int(torchrun["WORLD_SIZE"]), int(torchrun["LOCAL_WORLD_SIZE"])
    chips, hosts = (_bounds(metadata[f"TPU_{name}_BOUNDS"]) for name in ("CHIPS_PER_HOST", "HOST"))
    num_slices = int(metadata.get("MEGASCALE_NUM_SLICES") or 1)
    num_hosts, worker = math.prod(hosts), int(metadata.get("TPU_WORKER_ID") or 0)
    names = (metadata.get("TPU_WORKER_HOSTNAMES") or "localhost").split(",")
    if local_size != math.prod(chips):
        raise ValueError(
            f"this host has {math.prod(chips)} chips and {local_size} ranks: use --nproc-per-node={math.prod(chips)}"
        )
    if len(names) != num_hosts:
        raise ValueError(f"the slice has {num_hosts} hosts, TPU_WORKER_HOSTNAMES names {len(names)}")
    if size != local_size * num_hosts * num_slices:
        raise ValueError(
            f"{num_slices} slices of {num_hosts} hosts of {local_size} chips are not {size} ranks: "
            f"use --nnodes={num_hosts * num_slices}"
        )
    task = worker * local_size + local_rank
    slice_id = int(metadata.get("MEGASCALE_SLICE_ID") or 0)
    wanted = slice_id * num_hosts * local_size + task
    if rank != wanted:
        raise ValueError(
            f"rank {rank} runs where rank {wanted} belongs: use --node-rank={slice_id * num_hosts + worker} here"
        )
    made = {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "CLOUD_TPU_TASK_ID": str(task),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_ADDRESSES": ",".join(f"{name}:{_FIRST_PORT + i}" for name in names for i in range(local_size)),
        "TPU_PROCESS_BOUNDS": ",".join(str(c * h) for c, h in zip(chips, hosts, strict=True)),
        "TPU_PROCESS_PORT": str(_FIRST_PORT + local_rank),
        "TPU_VISIBLE_CHIPS": str(local_rank),
    }
    if num_slices > 1:
        made |= {
            "MEGASCALE_COORDINATOR_ADDRESS": metadata["MEGASCALE_COORDINATOR_ADDRESS"],
            "MEGASCALE_NUM_SLICES": str(num_slices),
            "MEGASCALE_SLICE_ID": str(slice_id),
        }
    return made


def _bounds(text: str) -> tuple[int, int, int]:
    x, y, z = map(int, text.split(","))
    return x, y, z
