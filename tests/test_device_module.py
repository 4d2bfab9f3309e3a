"""torch.tpu answers what scripts call on torch.cuda and torch.accelerator."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from script import run_script
from torch import nn

from torchtpu import config, metrics
from torchtpu.api import fallback

EXPECTED = (
    "is_available device_count current_device set_device device device_of synchronize get_device_properties "
    "get_device_name get_device_capability is_bf16_supported Stream Event stream set_stream current_stream "
    "default_stream manual_seed manual_seed_all seed seed_all initial_seed get_rng_state get_rng_state_all "
    "set_rng_state set_rng_state_all default_generators memory_allocated max_memory_allocated memory_reserved "
    "max_memory_reserved reset_peak_memory_stats memory_stats memory_summary mem_get_info empty_cache amp init "
    "is_initialized ipc_collect cpu_fallback_counts OutOfMemoryError StreamContext"
)
PROMISED = (
    "ops_recorded trie_hits trie_misses regions cuts programs_compiled plan_hits_disk fragment_traces "
    "cache_hits_memory cache_hits_disk launches cpu_fallbacks live_buffers live_nodes bytes_uploaded bytes_downloaded"
)


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", EXPECTED.split())
def test_torch_tpu_has(name):
    assert hasattr(torch.tpu, name)


def test_the_device_is_the_accelerator():
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("tpu")
    assert torch.accelerator.device_count() == torch.tpu.device_count()
    assert torch.accelerator.current_device_index() == torch.tpu.current_device() == 0
    torch.accelerator.synchronize()
    with pytest.raises(RuntimeError, match=r"The device index is out of range\. It must be in"):
        torch.accelerator.set_device_index(torch.tpu.device_count())


def test_submodules_import_as_on_cuda():
    import torch.tpu.amp
    from torch.tpu import amp
    from torch.tpu.memory import memory_allocated
    from torch.tpu.random import manual_seed_all

    assert amp is torch.tpu.amp
    assert torch.tpu.memory_allocated is memory_allocated
    assert torch.tpu.manual_seed_all is manual_seed_all


def test_tensors_modules_and_storages_have_tpu_methods():
    x = torch.ones(2, 3)
    assert not x.is_tpu
    assert x.tpu().is_tpu
    assert nn.Linear(2, 2).tpu().weight.device == torch.device("tpu:0")
    storage = x.untyped_storage().tpu()
    assert storage.is_tpu
    assert storage.device == torch.device("tpu:0")
    assert storage.nbytes() == 24


def test_tied_weights_stay_tied_through_to():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.to("tpu")
    assert first.weight is second.weight
    assert first.weight.is_tpu
    assert any(p is first.weight for group in optimizer.param_groups for p in group["params"])
    model(torch.ones(1, 2, device="tpu")).sum().backward()
    before = first.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(first.weight.cpu(), before.cpu())


def test_memory_follows_the_buffers():
    torch.tpu.synchronize()
    torch.tpu.reset_peak_memory_stats()
    before = torch.tpu.memory_allocated()
    x = torch.ones(1024, device="tpu")
    torch.tpu.synchronize()
    assert torch.tpu.memory_allocated() == before + 4096
    del x
    assert torch.tpu.memory_allocated() == before
    assert torch.tpu.max_memory_allocated() >= before + 4096
    stats = torch.tpu.memory_stats()
    assert stats["allocated_bytes.all.current"] == before
    assert stats["allocated_bytes.all.peak"] == torch.tpu.max_memory_allocated()
    free, total = torch.tpu.mem_get_info()
    assert free == total - before
    assert f"tpu:{torch.tpu.current_device()}" in torch.tpu.memory_summary()
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated("tpu:0") == torch.tpu.max_memory_allocated()


def test_caches_of_the_device_and_of_pinned_memory_can_be_emptied():
    for memory in (torch.tpu, torch.accelerator, torch.accelerator.memory):
        memory.empty_cache()
        memory.empty_host_cache()


def test_the_memory_fraction_becomes_a_limit():
    total = torch.tpu.mem_get_info()[1]
    with config.using(memory_limit=0):
        torch.tpu.set_per_process_memory_fraction(0.5)
        assert torch.tpu.mem_get_info()[1] == total // 2
    with pytest.raises(ValueError, match="Invalid fraction"):
        torch.tpu.set_per_process_memory_fraction(2)


def test_events_measure_time_in_order():
    start, end = torch.tpu.Event(enable_timing=True), torch.tpu.Event(enable_timing=True)
    start.record()
    x = torch.ones(64, 64, device="tpu")
    y = x @ x
    end.record()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    assert y[0, 0].item() == 64
    untimed = torch.tpu.Event()
    untimed.record()
    untimed.wait(torch.tpu.Stream())
    torch.tpu.Stream().record_event(untimed)
    untimed.synchronize()
    assert isinstance(untimed, torch.tpu.Event)
    with pytest.raises(ValueError, match="enable_timing=True"):
        untimed.elapsed_time(end)


def test_streams_are_distinct_and_become_current():
    default = torch.tpu.current_stream()
    assert default == torch.tpu.default_stream()
    other = torch.tpu.Stream()
    assert other != default
    with torch.tpu.stream(other):
        assert torch.tpu.current_stream() == other
        x = torch.ones(3, device="tpu") + 1
    assert torch.tpu.current_stream() == default
    default.wait_stream(other)
    other.record_event().synchronize()
    other.synchronize()
    assert other.query()
    assert x.tolist() == [2, 2, 2]


def test_properties_name_the_device():
    properties = torch.tpu.get_device_properties()
    assert properties.name == torch.tpu.get_device_name("tpu:0")
    assert properties.total_memory > 0
    assert torch.tpu.get_device_capability() == (properties.major, properties.minor)
    assert torch.bfloat16 in torch.accelerator.get_device_capability()["supported_dtypes"]


def test_a_device_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="Expected a tpu device"):
        torch.tpu.memory_allocated("cpu")
    with pytest.raises(RuntimeError, match="out of range"):
        torch.tpu.set_device(99)


@pytest.mark.parametrize("shape", [(3,), (0,), (2, 2)])
def test_pinned_memory_says_so(shape):
    x = torch.ones(shape).pin_memory()
    assert x.is_pinned() == bool(x.numel())
    assert torch.equal(x.to("tpu", non_blocking=True).cpu(), torch.ones(shape))


def test_views_and_storages_of_pinned_memory_are_pinned():
    x = torch.arange(6.0).pin_memory()
    assert x[2:].is_pinned()
    assert x.untyped_storage().is_pinned()
    assert torch.arange(6.0).untyped_storage().pin_memory().is_pinned()
    assert not torch.arange(6.0).is_pinned()


def test_dataloader_pins_batches():
    loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=4, pin_memory=True)
    batches = list(loader)
    assert all(batch.is_pinned() for batch in batches)
    assert [b.to("tpu").sum().item() for b in batches] == [6, 22]


def test_default_device_and_current_device_are_honoured():
    torch.set_default_device("tpu")
    try:
        assert torch.ones(2).is_tpu
        assert torch.get_default_device() == torch.device("tpu:0")
    finally:
        torch.set_default_device(None)
    with torch.device("tpu"):
        assert torch.zeros(2).is_tpu


def test_several_devices_are_separate():
    code = """if 1:
        import torch
        assert torch.tpu.device_count() == 3
        torch.tpu.set_device(1)
        x = torch.ones(4, device="tpu")
        assert x.device.index == 1 and torch.ones(1).tpu().device.index == 1
        with torch.tpu.device(2):
            y = torch.ones(4, device="tpu")
        assert y.device.index == 2 and torch.tpu.current_device() == 1
        with torch.tpu.device_of(y):
            assert torch.tpu.current_device() == 2
        try:
            x + y
        except RuntimeError as error:
            assert "Expected all tensors to be on the same device" in str(error), error
        else:
            raise SystemExit("mixed devices were accepted")
        assert (x + y.to("tpu:1")).tolist() == [2] * 4
        torch.tpu.synchronize(1), torch.tpu.synchronize("tpu:2")
        assert torch.tpu.memory_allocated(0) == 0 < torch.tpu.memory_allocated(1)
        torch.tpu.manual_seed_all(3)
        a, b = torch.rand(4, device="tpu:1"), torch.rand(4, device="tpu:2")
        assert a.tolist() == b.tolist()
    """
    result = run(code, TORCHTPU_NUM_DEVICES="3")
    assert result.returncode == 0, result.stderr


def test_importing_torch_imports_no_jax():
    code = (
        "import sys, torch; torch.empty(2, device='tpu'); print('jax' in sys.modules, 'torch._dynamo' in sys.modules)"
    )
    result = run(code)
    assert result.stdout.split() == ["False", "False"], result.stderr


def test_a_forked_child_is_told_to_spawn():
    code = """if 1:
        import os, torch
        torch.ones(2, device="tpu").sum().item()
        child = os.fork()
        if child == 0:
            bad = torch.tpu._is_in_bad_fork()
            torch.manual_seed(1)
            try:
                torch.ones(2, device="tpu").sum().item()
            except RuntimeError as error:
                os._exit(0 if bad and "'spawn' start method" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    result = run(code)
    assert result.returncode == 0, result.stderr


def test_exit_with_work_pending_is_quiet():
    result = run("import torch; x = torch.ones(64, 64, device='tpu'); y = x @ x")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.fixture(scope="module")
def unlowered():
    """An op that has a CPU kernel and no lowering."""
    library = torch.library.Library("torchtpu_test", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    yield torch.ops.torchtpu_test.twice
    library._destroy()


def test_a_fallback_is_counted_and_warned_once(unlowered):
    x = torch.tensor([3.0, 1.0, 2.0], device="tpu")
    fallback.reset()
    with pytest.warns(
        UserWarning, match=r"\S+::twice.*: no lowering; ran on CPU \(12 B moved\) at .*\.py:\d+"
    ) as caught:
        unlowered(x)
    assert caught[0].filename == __file__
    assert unlowered(x).tolist() == [6, 2, 4]
    counts = torch.tpu.cpu_fallback_counts()
    assert [n for name, n in counts.items() if "twice" in name] == [2]
    assert metrics.snapshot()["cpu_fallbacks"] == counts
    with config.using(fallback="error"), pytest.raises(NotImplementedError, match=r"twice.*no lowering"):
        unlowered(x)


def test_strided_nested_tensors_are_refused_in_plain_words_and_jagged_ones_work():
    parts = [torch.arange(6.0).view(2, 3), torch.ones(3, 3)]
    message = "strided nested tensors are not supported on tpu; make them with layout=torch.jagged"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls them a prototype
        nested = torch.nested.nested_tensor(parts)
        for use in (
            lambda: nested.to("tpu"),
            lambda: torch.nested.nested_tensor(parts, device="tpu").sum(),
            lambda: repr(torch.nested.nested_tensor(parts, device="tpu")),
        ):
            with pytest.raises(NotImplementedError, match=message):
                use()
        jagged = torch.nested.nested_tensor(parts, layout=torch.jagged, device="tpu", requires_grad=True)
        expected = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    weight = torch.arange(12.0).view(3, 4)
    for made, by in ((jagged, weight.to("tpu")), (expected, weight)):
        (torch.nn.functional.gelu(made) @ by).to_padded_tensor(0.0).square().sum().backward()
    assert jagged.grad.device.type == "tpu"
    torch.testing.assert_close(jagged.grad.values().cpu(), expected.grad.values())


def test_a_strided_nested_tensor_of_what_requires_grad_ends_no_process():
    parts = [torch.ones(n, 3, device="tpu", requires_grad=True) for n in (2, 4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.as_nested_tensor(parts)
    with pytest.raises(NotImplementedError, match="strided nested tensors are not supported on tpu"):
        nested.sum()


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_of_jagged_tensors(is_causal):
    lengths = [(3, 3), (5, 5), (2, 2)] if is_causal else [(3, 4), (5, 1), (2, 6)]
    rows = [(torch.randn(q, 8), torch.randn(k, 8)) for q, k in lengths]
    heads = lambda x: x.unflatten(-1, [2, 4]).transpose(-3, -2)
    attend = torch.nn.functional.scaled_dot_product_attention
    ours = [
        torch.nested.nested_tensor([part.to("tpu") for part in parts], layout=torch.jagged, requires_grad=True)
        for parts in zip(*rows, strict=True)
    ]
    query, key = map(heads, ours)
    attended = attend(query, key, key, is_causal=is_causal)
    assert attended.shape[:2] == (3, 2)
    assert attended.transpose(1, 2).is_contiguous()
    found = attended.transpose(1, 2).flatten(-2).values()
    found.sin().sum().backward()
    expected = [[part.clone().requires_grad_() for part in parts] for parts in zip(*rows, strict=True)]
    made = [attend(heads(q), heads(k), heads(k), is_causal=is_causal) for q, k in zip(*expected, strict=True)]
    flat = torch.cat([one.transpose(0, 1).flatten(1) for one in made])
    flat.sin().sum().backward()
    torch.testing.assert_close(found.cpu(), flat)
    for one, parts in zip(ours, expected, strict=True):
        torch.testing.assert_close(one.grad.values().cpu(), torch.cat([part.grad for part in parts]))


def test_attention_of_jagged_tensors_that_do_not_know_their_longest_sequence():
    values, offsets = torch.randn(9, 2, 4), torch.tensor([0, 3, 4, 9])
    found = []
    for device in ("cpu", "tpu"):
        x = values.to(device).detach().requires_grad_()
        heads = torch.nested.nested_tensor_from_jagged(x, offsets.to(device)).transpose(1, 2)
        made = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).values()
        (grad,) = torch.autograd.grad(made.sin().sum(), x)
        found.append((made.detach().cpu(), grad.cpu()))
    torch.testing.assert_close(*reversed(found))


def test_jagged_tensors_of_empty_sequences():
    x = torch.randn(0, 2, 4, device="tpu", requires_grad=True)
    jagged = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 0, 0], device="tpu"))
    jagged.to_padded_tensor(0.0).sum().backward()
    heads = jagged.transpose(1, 2)
    assert torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).values().cpu().numel() == 0
    assert x.grad.cpu().shape == (0, 2, 4)


def test_a_jagged_length_that_no_op_takes_leaves_the_other_arguments_alone():
    """In a process of its own: what is freed too often ends it."""
    ended = run_script(
        """
        import gc, torch
        offsets = torch.tensor([0, 3, 4, 9], device="tpu")
        jagged = torch.nested.nested_tensor_from_jagged(torch.randn(9, 4, device="tpu"), offsets)
        x = torch.ones(3, 5, 4, device="tpu")
        for _ in range(20):
            try:
                torch.ops.aten.native_layer_norm(x, jagged.shape[1:], None, None, 1e-5)
            except RuntimeError as error:
                assert "concrete integers" in str(error), error
            else:
                raise AssertionError
        gc.collect()
        print(x.sum().item())
        """
    )
    assert (ended.status, ended.out) == (0, "60.0\n"), ended.err


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_attention_under_vmap_and_gradients_per_sample():
    batch = torch.randn(3, 1, 2, 4, 4)

    def loss(x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x).sin().sum()

    grad = torch.func.grad
    for transform in (torch.vmap(loss), torch.vmap(grad(loss)), grad(lambda x: torch.vmap(loss)(x).sum())):
        torch.testing.assert_close(transform(batch.to("tpu")).cpu(), transform(batch))


def test_the_backend_has_the_name_that_transformers_asks_for_too():
    backends = torch.distributed.Backend
    assert backends("tpu_dist") == "tpu_dist"
    assert backends._plugins["TPU_DIST"].creator_fn is backends._plugins["TPU"].creator_fn
    assert backends.default_device_backend_map["tpu"] == "tpu"


def test_fake_tensors_are_on_the_current_device_from_the_start():
    code = """if True:
        import torch
        from torch._subclasses import FakeTensorMode
        torch.accelerator.set_device_index(1)
        with FakeTensorMode():
            print(torch.empty(2, device="tpu").device)
        torch.ones(1, device="tpu").item()
        with FakeTensorMode():
            print(torch.empty(2, device="tpu").device)
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, env={**os.environ, "TORCHTPU_NUM_DEVICES": "2"},
    )  # fmt: skip
    assert done.stdout.split() == ["tpu:1", "tpu:1"]


def test_sparse_tensors_are_refused_in_plain_words():
    with pytest.raises(NotImplementedError, match=r"sparse tensors are not supported on tpu"):
        torch.sparse_coo_tensor([[0]], [1.0], (2,), device="tpu")


def test_metrics_have_the_promised_names():
    (torch.ones(3, device="tpu") * 2).sum().item()
    snapshot = metrics.snapshot()
    for name in PROMISED.split():
        assert name in snapshot
    assert snapshot["ops_recorded"] >= 2
    metrics.reset()
    assert metrics.snapshot()["ops_recorded"] == 0


BESIDE_CUDA = """
import pathlib, sys
find = pathlib.Path.glob

def glob(path, names):
    if str(path) != "/dev":
        return find(path, names)
    sys.modules["torch"].version.cuda = "13.0"
    return iter([path / "nvidia0"])

pathlib.Path.glob = glob
WORDS
print("torchtpu" in sys.modules)
import torch, torchtpu
print((torch.ones(2, device="tpu") + 1).tolist(), torchtpu.metrics.snapshot()["launches"], torchtpu.explain.__name__)
"""


@pytest.mark.parametrize(
    ("words", "platform", "is_there"),
    [("import torch", "", False), ("import torch", "cpu", True), ("import torchtpu", "", True)],
)
def test_beside_cuda_devices_somebody_has_to_ask_for_the_device(words: str, platform: str, is_there: bool) -> None:
    """PyTorch would take it for the only accelerator of the process, and CUDA's backward would fail."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment.pop("TORCHTPU_PLATFORM", None)
    environment |= {"TORCHTPU_PLATFORM": platform} if platform else {}
    code = BESIDE_CUDA.replace("WORDS", words)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{is_there}\n[2.0, 2.0] 1 explain\n", "")


def test_tensor_types_make_and_name_tensors_of_the_device() -> None:
    tpu: Any = torch.tpu  # type: ignore[attr-defined]
    x = tpu.FloatTensor([[1, 2], [3, 4]])
    assert (x.type(), x.dtype, x.tolist()) == ("torch.tpu.FloatTensor", torch.float32, [[1, 2], [3, 4]])
    assert tpu.LongTensor(3, 2).shape == (3, 2)
    assert isinstance(x, tpu.FloatTensor)
    assert not isinstance(x, tpu.HalfTensor)
    assert not isinstance(x.cpu(), tpu.FloatTensor)
    for kind in (tpu.HalfTensor, "torch.tpu.HalfTensor"):
        y = torch.ones(2).type(kind)
        assert (y.device.type, y.dtype) == ("tpu", torch.float16)
    assert (tpu.HalfTensor.__name__, repr(tpu.HalfTensor)) == ("HalfTensor", "<class 'torch.tpu.HalfTensor'>")
    assert pickle.loads(pickle.dumps(tpu.HalfTensor)) is tpu.HalfTensor
    with pytest.raises(TypeError, match=r"expected torch.tpu.HalfTensor \(got torch.tpu.FloatTensor\)"):
        tpu.HalfTensor(x)


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_the_default_tensor_may_be_one_of_the_device(is_named: bool) -> None:
    tpu: Any = torch.tpu  # type: ignore[attr-defined]
    try:
        torch.set_default_tensor_type("torch.tpu.DoubleTensor" if is_named else tpu.DoubleTensor)
        assert torch.ones(2).type() == "torch.tpu.DoubleTensor"
        with pytest.raises(TypeError, match="only floating-point types are supported as the default type"):
            torch.set_default_tensor_type(tpu.LongTensor)
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)
    assert torch.ones(2).type() == "torch.FloatTensor"
