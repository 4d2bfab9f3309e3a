"""What libtpu must be told about ranks and chips, from torchrun's environment and a slice's metadata."""

from __future__ import annotations

import pytest

from torchtpu.distributed.chips import chip_environment, rank_environment

# name: chips of a host, hosts, processes of the slice
SLICES = {
    "v4-8": ("2,2,1", "1,1,1", "2,2,1"),
    "v5e-4": ("2,2,1", "1,1,1", "2,2,1"),
    "v5e-8": ("2,4,1", "1,1,1", "2,4,1"),
    "v5e-16": ("2,2,1", "2,2,1", "4,4,1"),
    "v5p-16": ("2,2,1", "1,1,2", "2,2,2"),
    "v5p-128": ("2,2,1", "2,2,4", "4,4,4"),
    "v6e-8": ("2,4,1", "1,1,1", "2,4,1"),
}


def product(bounds: str) -> int:
    x, y, z = map(int, bounds.split(","))
    return x * y * z


def metadata(name: str, worker: int, slice_id: int = 0, num_slices: int = 1) -> dict[str, str]:
    chips, hosts, _ = SLICES[name]
    made = {
        "TPU_CHIPS_PER_HOST_BOUNDS": chips,
        "TPU_HOST_BOUNDS": hosts,
        "TPU_WORKER_ID": str(worker),
        "TPU_WORKER_HOSTNAMES": ",".join(f"s{slice_id}w{i}" for i in range(product(hosts))),
    }
    if num_slices > 1:
        made |= {
            "MEGASCALE_NUM_SLICES": str(num_slices),
            "MEGASCALE_SLICE_ID": str(slice_id),
            "MEGASCALE_COORDINATOR_ADDRESS": "s0w0:8080",
        }
    return made


def torchrun(name: str, node: int, local_rank: int, num_slices: int = 1) -> dict[str, str]:
    chips, hosts, _ = SLICES[name]
    local, nodes = product(chips), product(hosts) * num_slices
    return {
        "RANK": str(node * local + local_rank),
        "WORLD_SIZE": str(nodes * local),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local),
    }


@pytest.mark.parametrize("name", SLICES)
def test_every_rank_of_a_slice_has_a_chip_of_its_own(name: str) -> None:
    chips, hosts, processes = SLICES[name]
    local = product(chips)
    seen = set()
    for worker in range(product(hosts)):
        for local_rank in range(local):
            made = chip_environment(torchrun(name, worker, local_rank), metadata(name, worker))
            assert made["TPU_PROCESS_BOUNDS"] == processes
            assert made["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,1,1"
            addresses = made["TPU_PROCESS_ADDRESSES"].split(",")
            assert len(addresses) == product(processes) == product(chips) * product(hosts)
            task = int(made["CLOUD_TPU_TASK_ID"])
            assert addresses[task] == f"s0w{worker}:{made['TPU_PROCESS_PORT']}"
            assert made["TPU_VISIBLE_CHIPS"] == str(local_rank)
            seen.add(task)
    assert seen == set(range(product(processes)))


def test_the_environment_of_one_rank_of_v5e_16() -> None:
    assert chip_environment(torchrun("v5e-16", 2, 1), metadata("v5e-16", 2)) == {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "CLOUD_TPU_TASK_ID": "9",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_ADDRESSES": ",".join(f"s0w{w}:{p}" for w in range(4) for p in range(8476, 8480)),
        "TPU_PROCESS_BOUNDS": "4,4,1",
        "TPU_PROCESS_PORT": "8477",
        "TPU_VISIBLE_CHIPS": "1",
    }


def test_two_slices_number_their_tasks_apart_and_their_ranks_together() -> None:
    made = chip_environment(torchrun("v5e-16", 4 + 3, 2, num_slices=2), metadata("v5e-16", 3, 1, num_slices=2))
    assert made["CLOUD_TPU_TASK_ID"] == "14"
    assert made["MEGASCALE_SLICE_ID"] == "1" and made["MEGASCALE_NUM_SLICES"] == "2"
    assert made["MEGASCALE_COORDINATOR_ADDRESS"] == "s0w0:8080"
    assert made["TPU_PROCESS_ADDRESSES"].startswith("s1w0:8476,")


def test_what_does_not_fit_says_what_to_pass_to_torchrun() -> None:
    with pytest.raises(ValueError, match="4 chips and 2 ranks: use --nproc-per-node=4"):
        chip_environment({**torchrun("v4-8", 0, 0), "LOCAL_WORLD_SIZE": "2"}, metadata("v4-8", 0))
    with pytest.raises(ValueError, match="use --nnodes=4"):
        chip_environment({**torchrun("v5e-16", 0, 0), "WORLD_SIZE": "4"}, metadata("v5e-16", 0))
    with pytest.raises(ValueError, match="rank 4 runs where rank 8 belongs: use --node-rank=2 here"):
        chip_environment(torchrun("v5e-16", 1, 0), metadata("v5e-16", 2))
    with pytest.raises(ValueError, match="TPU_WORKER_HOSTNAMES names 1"):
        chip_environment(torchrun("v5e-16", 0, 0), {**metadata("v5e-16", 0), "TPU_WORKER_HOSTNAMES": "one"})


def test_plain_torchrun_on_one_host_needs_no_preparation() -> None:
    made = rank_environment(torchrun("v6e-8", 0, 5), num_chips=8)
    assert (made["TPU_VISIBLE_CHIPS"], made["TPU_PROCESS_BOUNDS"]) == ("5", "2,4,1")
    assert made["TPU_PROCESS_ADDRESSES"].split(",")[5] == "localhost:8481"
    assert rank_environment({}, num_chips=4) == {}
    assert rank_environment({**torchrun("v4-8", 0, 1), "TPU_VISIBLE_CHIPS": "3"}, num_chips=4) == {}


def test_several_hosts_need_the_metadata() -> None:
    found = torchrun("v5p-16", 1, 3)
    assert rank_environment({**found, **metadata("v5p-16", 1)}, 4) == chip_environment(found, metadata("v5p-16", 1))
    with pytest.raises(ValueError, match="set TPU_CHIPS_PER_HOST_BOUNDS, TPU_HOST_BOUNDS, TPU_WORKER_ID"):
        rank_environment(found, num_chips=4)
