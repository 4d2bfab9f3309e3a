"""Tensors and modules are the same after save, load, pickle, copy, DLPack, numpy or another process."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from torchtpu import metrics


def saved(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_save_and_load_keep_device_values_and_aliases(zipped):
    x = torch.arange(6.0, device="tpu").reshape(2, 3)
    loaded = torch.load(saved({"x": x, "view": x[1]}, _use_new_zipfile_serialization=zipped))
    assert loaded["x"].device == torch.device("tpu:0")
    assert torch.equal(loaded["x"].cpu(), x.cpu())
    loaded["x"][1, 0] = 9
    assert loaded["view"].tolist() == [9, 4, 5]


def test_map_location_goes_both_ways():
    x = torch.ones(3, device="tpu")
    assert torch.load(saved(x), map_location="cpu").device.type == "cpu"
    assert torch.load(saved(x.cpu()), map_location="tpu").device == torch.device("tpu:0")
    assert torch.load(saved(x), map_location={"tpu:0": "cpu"}).device.type == "cpu"
    assert torch.load(saved(x), map_location=lambda storage, tag: storage).device.type == "cpu"
    assert torch.load(saved(x), map_location="meta").is_meta
    with pytest.raises(RuntimeError, match=r"TPU device 99 but torch.tpu.device_count\(\) is"):
        torch.load(saved(x), map_location="tpu:99")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_every_dtype_survives(dtype):
    x = torch.tensor([0, 1, 1]).to(dtype).to("tpu")
    y = torch.load(saved(x), weights_only=True)
    assert y.dtype == dtype
    assert torch.equal(y.cpu(), x.cpu())


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_keeps_views(protocol):
    x = torch.arange(8.0, device="tpu").reshape(2, 4).t()[1:]
    y = pickle.loads(pickle.dumps(x, protocol))
    assert (y.device, y.stride()) == (x.device, x.stride())
    assert torch.equal(y.cpu(), x.cpu())


def test_deepcopy_separates_and_keeps_ties():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to("tpu")
    model[1].weight = model[0].weight
    twin = copy.deepcopy(model)
    assert twin[0].weight is twin[1].weight
    with torch.no_grad():
        twin[0].weight.zero_()
    assert model[0].weight.abs().sum().item() > 0
    assert copy.copy(model[0].weight) is not model[0].weight


def test_state_dicts_load_across_devices():
    on_cpu, on_tpu = nn.Linear(2, 2), nn.Linear(2, 2).to("tpu")
    on_tpu.load_state_dict(on_cpu.state_dict())
    assert torch.equal(on_tpu.weight.cpu(), on_cpu.weight)
    optimizer = torch.optim.Adam(on_tpu.parameters())
    on_tpu(torch.ones(1, 2, device="tpu")).sum().backward()
    optimizer.step()
    state = torch.load(saved(optimizer.state_dict()))
    again = torch.optim.Adam(on_tpu.parameters())
    again.load_state_dict(state)
    assert torch.equal(again.state[on_tpu.weight]["exp_avg"].cpu(), optimizer.state[on_tpu.weight]["exp_avg"].cpu())


def test_safetensors_round_trip(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    x = torch.arange(4.0, device="tpu")
    safetensors.save_file({"x": x}, tmp_path / "x.safetensors")
    assert torch.equal(safetensors.load_file(tmp_path / "x.safetensors", device="cpu")["x"], x.cpu())
    for device in ("tpu", "tpu:0", torch.device("tpu"), torch.device("tpu", 0), 0):
        assert torch.equal(safetensors.load_file(tmp_path / "x.safetensors", device=device)["x"], x)


def test_safetensors_opens_a_file_on_the_current_device(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    pytest.importorskip("safetensors.torch").save_file({"x": torch.arange(4.0)}, tmp_path / "x.safetensors")
    with safetensors.safe_open(tmp_path / "x.safetensors", framework="pt", device="tpu") as opened:
        assert isinstance(opened, safetensors.safe_open)
        assert opened.get_slice("x")[1:3].device == torch.device("tpu", 0)
    with pytest.raises(safetensors.SafetensorError, match="tpux is invalid"):
        safetensors.safe_open(tmp_path / "x.safetensors", framework="pt", device="tpux")


def test_numpy_and_lists_come_in_and_out():
    x = torch.from_numpy(np.arange(3.0)).to("tpu")
    assert x.cpu().numpy().tolist() == x.tolist() == [0, 1, 2]
    assert torch.tensor(np.ones((2, 2)), device="tpu").sum().item() == 4
    assert torch.asarray(np.ones(2), device="tpu").is_tpu


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_dlpack_refuses_what_would_lose_its_gradient_or_its_conjugation(device: str) -> None:
    for x in (torch.ones(2, device=device, requires_grad=True), torch.ones(2, device=device).cfloat().conj()):
        with pytest.raises(BufferError, match="Can't export tensors"):
            torch.from_dlpack(x)


def test_dlpack_exports_a_private_host_array():
    x = torch.arange(6.0, device="tpu").reshape(2, 3).t()
    array = np.from_dlpack(x)
    assert array.tolist() == x.tolist()
    np.from_dlpack(x, copy=True)[0, 0] = 7
    assert x[0, 0].item() == 0
    with pytest.raises(BufferError, match="without a copy"):
        x.__dlpack__(copy=False)
    with pytest.raises(BufferError, match="require gradient"):
        torch.ones(1, device="tpu", requires_grad=True).__dlpack__()


def test_dlpack_imports_into_tpu():
    assert torch.from_dlpack(np.arange(3.0)).device.type == "cpu"
    y = torch.from_dlpack(np.arange(3.0), device="tpu")
    assert y.is_tpu
    assert y.tolist() == [0, 1, 2]
    x = torch.ones(2, device="tpu")
    shared = torch.from_dlpack(x)
    shared.add_(1)
    assert x.tolist() == [2, 2]
    capsule = torch.utils.dlpack.to_dlpack(x)
    assert torch.from_dlpack(capsule).tolist() == [2, 2]


def test_a_capsule_of_a_part_of_a_tensor_is_that_part():
    """What it becomes is a tensor over an address within another's storage."""

    def exchanged(device: str) -> list[torch.Tensor]:
        exchange = lambda x: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))
        x, unread = torch.arange(24.0, device=device).view(4, 6), torch.arange(9, dtype=torch.int16, device=device)
        exchange(x[1:, 2:5])[1:].add_(100)  # through a view that nothing looked at before
        torch.add(x[0], 1, out=exchange(x[2]))
        exchange(x.t()[3:]).mul_(2)
        torch.empty(0, device=device).set_(exchange(x[3])).neg_()
        return [x, exchange(x[2, 3]), exchange(x[3]).resize_(3), exchange(x[1:, 1:]).clone(), exchange(unread[3:])]

    for own, expected in zip(exchanged("tpu"), exchanged("cpu"), strict=True):
        assert own.tolist() == expected.tolist()


def test_jax_reads_a_tpu_tensor():
    jax = pytest.importorskip("jax")
    x = torch.arange(3.0, device="tpu")
    assert jax.numpy.from_dlpack(x).tolist() == [0, 1, 2]
    assert torch.from_dlpack(jax.numpy.arange(3), device="tpu").tolist() == [0, 1, 2]


def send(queue):
    queue.put(torch.ones(2, device="tpu") + 1)
    queue.get()


def test_tensors_travel_between_spawned_processes():
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=send, args=(queue,))
    process.start()
    try:
        received = queue.get(timeout=120)
        queue.put("done")
    finally:
        process.join(30)
    assert received.device == torch.device("tpu:0")
    assert received.tolist() == [2, 2]


def test_dataloader_workers_leave_the_device_alone():
    torch.ones(2, device="tpu").sum().item()
    loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=4, num_workers=1)
    assert [b.to("tpu").sum().item() for b in loader] == [6, 22]


def test_what_storages_do_by_address_is_done_on_the_device():
    def swap(device):
        x, y = torch.arange(4.0, device=device), torch.ones(2, device=device, dtype=torch.complex64)
        x.untyped_storage().byteswap(x.dtype)
        y.untyped_storage().byteswap(y.dtype)
        empty = x.untyped_storage().new()
        swapped = x.untyped_storage()._swap_data_ptr_(y.untyped_storage())
        made = [x.tolist(), y.tolist(), empty.nbytes(), swapped]
        y.untyped_storage()._swap_data_ptr_(empty)
        return [*made, y.untyped_storage().nbytes(), empty.tolist()]

    assert swap("tpu") == swap("cpu")


def test_storages_refuse_what_they_cannot_do():
    storage = torch.arange(4.0, device="tpu").untyped_storage()
    with pytest.raises(NotImplementedError, match="A slice of a storage shares its memory"):
        storage[0:4]
    storage[0:4] = 1
    assert storage.cpu()[0:4].tolist() == [1] * 4
    with pytest.raises(RuntimeError, match="elem_size must be 1, 2, 4, or 8"):
        storage._byteswap(3)
    for other in (torch.ones(1, device="tpu"), torch.ones(4)):
        with pytest.raises(RuntimeError, match="_swap_data_ptr_: storages must"):
            storage._swap_data_ptr_(other.untyped_storage())


def test_storages_take_files_with_all_that_is_to_be_known_of_them(tmp_path):
    storage = torch.arange(4.0, device="tpu").untyped_storage()
    for method in (storage._set_from_file, storage._write_file):
        with pytest.raises(TypeError, match="takes four arguments"):
            method()
    path = tmp_path / "numbers"
    with path.open("wb") as file:
        storage._write_file(file, True, True, 1)
    taken = torch.zeros(4, device="tpu")
    with path.open("rb") as file:
        taken.untyped_storage()._set_from_file(file, None, True, 1)
    assert taken.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int16, torch.complex64, torch.bool])
def test_loaded_bytes_are_read_and_written_as_what_was_saved(dtype):
    whole = torch.randn(6, 4).mul(3).to(dtype)
    state_file = saved({"row": whole[2], "whole": whole, "even": whole[:, ::2]})
    on_host = torch.load(state_file)
    state_file.seek(0)
    on_device = torch.load(state_file, map_location="tpu")
    for state in (on_host, on_device):
        row, all_bytes = state["row"], torch.empty(0, dtype=torch.uint8, device=state["row"].device)
        all_bytes.set_(row.untyped_storage())
        state["doubled"] = state["whole"].double() * 2 if not dtype.is_complex else state["whole"] * 2
        all_bytes[:8] = 1
        state["copy"] = copy.deepcopy(state["even"])
        state["even"][1] = 0
        state["bytes"] = all_bytes
        state["halves"] = state["whole"].view(torch.uint8)[:, 1:]
    for name, value in on_host.items():
        assert torch.equal(value, on_device[name].cpu()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_a_storage_that_was_written_by_a_copy_of_what_failed_is_restored(dtype):
    source, target = torch.arange(6, device="tpu").to(dtype), torch.full((6,), 4, dtype=dtype, device="tpu")
    source.add_(torch.ones(3, dtype=dtype, device="tpu")[torch.tensor([99], device="tpu")])
    target.untyped_storage().copy_(source.untyped_storage())
    target.add_(1)
    with pytest.raises(IndexError):
        target.cpu()
    assert (source.tolist(), target.tolist()) == ([0, 1, 2, 3, 4, 5], [4] * 6)
    assert target.add_(1).tolist() == [5] * 6


@pytest.mark.filterwarnings("ignore")
def test_a_deep_copy_of_complex32_is_made_on_the_host():
    given = torch.randn(6, dtype=torch.complex64).to(torch.complex32)
    before = metrics.snapshot()["cpu_fallbacks"]
    copied = copy.deepcopy(given.to("tpu"))
    assert torch.equal(torch.view_as_real(copied.cpu()), torch.view_as_real(given))
    assert metrics.snapshot()["cpu_fallbacks"] != before


def test_slices_of_what_was_loaded_share_programs():
    for load in (
        lambda given: torch.load(saved(given), map_location="tpu"),
        lambda given: copy.deepcopy(torch.load(saved(given), map_location="tpu")),
        lambda given: given.flatten().view(torch.uint8).to("tpu").view(torch.float32).view(given.shape),
    ):
        given = torch.randn(50, 3)
        loaded = load(given)
        before = 0
        for length in range(1, 40):
            total = (torch.ones(length, 3).to("tpu") + loaded[:length]).sum().item()
            assert total == pytest.approx((1 + given[:length]).sum().item(), abs=1e-4)
            before = before or (length == 10 and metrics.snapshot()["programs_compiled"])
        assert metrics.snapshot()["programs_compiled"] == before
