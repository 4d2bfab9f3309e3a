"""Training under small memory limits and caps is the same as without, and says what was done and what is alive."""

from __future__ import annotations

import itertools
import json
import os
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import torch
from jax._src.interpreters.partial_eval import trace_to_jaxpr
from memory_script import Largest
from script import run_python, run_script

import torchtpu
from torchtpu import config, metrics, startup
from torchtpu.runtime.compile import capacity
from torchtpu.runtime.execute import fitting
from torchtpu.runtime.execute.memory import Memory, PendingLaunch
from torchtpu.runtime.lowering import learned_templates, tracing
from torchtpu.runtime.telemetry.counters import Counters

SCRIPT = Path(__file__).parent / "memory_script.py"
MB = 1 << 20


def child(cache: Path, *args: object, **variables: str) -> dict[str, Any]:
    given = {**os.environ, "TORCHTPU_CACHE_DIR": str(cache), **variables}
    done = run_python(SCRIPT, *map(str, args), environment=given)
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return made


def weights() -> list[torch.Tensor]:
    """No two of one shape, so that nothing repeats."""
    sizes = [256 + 8 * i for i in range(13)]
    return [torch.randn(m, n).div(16).to("tpu") for m, n in itertools.pairwise(sizes)]


def chain(x: torch.Tensor, layers: list[torch.Tensor]) -> torch.Tensor:
    """Much of it is alive at once: what is made first is read last."""
    made = [x]
    for w in layers:
        made.append(torch.tanh(made[-1] @ w))
    y = made.pop()
    for w in reversed(layers):
        y = torch.tanh(y @ w.t()) + made.pop()
    return y


def bytes_needed_by(call: Callable[[], object]) -> int:
    """Those of the largest program that a call makes."""
    largest = Largest()
    startup.observe(largest)
    call()
    startup.stop_observing(largest)
    return largest.bytes


def test_training_fits_into_60_percent_of_what_its_step_needs(tmp_path: Path) -> None:
    free = child(tmp_path, "train", 0, 2, TORCHTPU_CLUSTERS="0")  # the step is one program
    limit = int(0.6 * free["needed"])
    held = child(tmp_path, "train", limit, 2, TORCHTPU_CLUSTERS="0")
    assert free["regions_split"] == 0 < held["regions_split"]
    assert held["out_of_memory"] == 0
    torch.testing.assert_close(held["losses"], free["losses"], rtol=1e-5, atol=1e-6)
    assert free["held"] > limit
    assert held["held"] <= 1.1 * limit


def test_launches_that_have_not_run_are_waited_for_until_there_is_room() -> None:
    waited: list[int] = []
    client: Any = SimpleNamespace(
        devices=[None],
        uploaded_bytes=[0],
        memory_bytes=lambda device: 100,
        live_bytes=lambda device: 30,
        wait_for_launch=waited.append,
    )
    counters = Counters()
    memory = Memory(client, counters, {"memory_limit": 0}.__getitem__, lambda: None, lambda: None, lambda device: ())
    for token in range(3):
        memory.track(0, PendingLaunch(token, 20, (), lambda: None))
    assert memory.used(0) == 90
    assert memory.has_room(0, 25, "train.py:1")
    assert (waited, counters.memory_waits) == ([0], 1)
    memory.wait_until_idle(0)
    assert (waited, memory.used(0)) == ([0, 1, 2], 30)


def test_nothing_is_counted_while_all_that_was_made_since_the_last_count_fits() -> None:
    live = [30]
    counted: list[int] = []

    def live_bytes(device: int) -> int:
        counted.append(live[0])
        return live[0]

    client: Any = SimpleNamespace(
        devices=[None], uploaded_bytes=[0], memory_bytes=lambda device: 100, live_bytes=live_bytes
    )
    knobs = {"memory_limit": 0}
    memory = Memory(client, Counters(), knobs.__getitem__, lambda: None, lambda: None, lambda device: ())
    for _ in range(3):
        assert memory.has_room(0, 20, "train.py:1")
        memory.note_launch(0, 20)
    assert counted == [30], "once, before anything is known: 30, 50 and 70 are the most that may be in use"
    client.uploaded_bytes[0] += 5
    assert memory.has_room(0, 5, "train.py:1") and counted == [30], "95 at the most, and 5"
    assert memory.has_room(0, 10, "train.py:1") and counted == [30, 30], "most of it has been freed"
    live[0] = 95
    memory.note_launch(0, 65)
    assert not memory.has_room(0, 10, "train.py:1")
    live[0] = 50
    assert memory.has_room(0, 10, "train.py:1")


def test_a_region_that_does_not_fit_runs_in_parts_and_explain_says_so() -> None:
    x, layers = torch.randn(512, 256).to("tpu"), weights()
    want = chain(x, layers).cpu()
    limit = int(0.9 * bytes_needed_by(lambda: chain(x, layers).mul(2).cpu()))
    with config.using(memory_limit=limit), torchtpu.explain() as explained:
        got = chain(x, layers).mul(2).cpu()
    torch.testing.assert_close(got, want * 2)
    assert metrics.snapshot()["regions_split"] == 1
    assert "split" in {row["action"] for row in explained.data["room"]}
    assert "ops now run in" in str(explained)


def test_values_are_made_again_where_parts_alone_do_not_fit() -> None:
    x, layers = torch.randn(512, 256).to("tpu"), weights()
    want = chain(x, layers).cpu()
    needed = bytes_needed_by(lambda: chain(x, layers).neg().cpu())
    for percent in (90, 80, 75, 70, 65):
        with config.using(memory_limit=needed * percent // 100):
            torch.testing.assert_close(chain(x, layers).neg().cpu(), -want)
        if metrics.snapshot()["ops_repeated"]:
            return
    pytest.fail("nothing was made again")


def test_programs_of_a_refused_split_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "_TRIES", ((100.0, 0.85), *fitting._TRIES))  # all in one part, which does not fit
    x, layers = torch.randn(512, 256).to("tpu"), weights()
    needed = bytes_needed_by(lambda: chain(x, layers).abs().cpu())
    known, before = len(startup.engine().compiler.digests()), metrics.snapshot()
    with config.using(memory_limit=needed * 8 // 10):
        chain(x, layers).abs().cpu()
    now = metrics.snapshot()
    made = now["programs_compiled"] + now["cache_hits_disk"] - before["programs_compiled"] - before["cache_hits_disk"]
    assert now["regions_split"] > before["regions_split"]
    assert now["memory_collections"] == before["memory_collections"], "everything was let go"
    assert len(startup.engine().compiler.digests()) < known + made


def test_out_of_memory_lists_what_is_alive_and_what_was_tried() -> None:
    x = torch.randn(1024, 512, device="tpu")
    y = torch.exp(x)
    torch.tpu.synchronize()
    with config.using(memory_limit=5 * MB), pytest.raises(torch.OutOfMemoryError) as failure:
        torch.sort(y).values.cpu()
    text = str(failure.value)
    assert "Tried: waited for launches to end, dropped caches, collected garbage" in text
    assert "The largest of " in text and "live tensors:" in text
    line = f"{__file__}:{test_out_of_memory_lists_what_is_alive_and_what_was_tried.__code__.co_firstlineno + 2}"
    assert "2.10 MB  float32[1024, 512], " in text and f"s old, exp at {line}" in text
    assert metrics.snapshot()["out_of_memory"] == 1
    torch.testing.assert_close(y.cpu(), torch.exp(x.cpu()))  # nothing else is lost


def test_live_tensors_have_shapes_ages_and_lines() -> None:
    from torchtpu.runtime import _C

    before = len(_C.live_tensors(0))
    x = torch.randn(256, 256).to("tpu")
    y = x * 2
    torch.tpu.synchronize()
    found = sorted(_C.live_tensors(0), key=lambda t: t["age"])
    assert len(found) == before + 2
    assert [(t["shape"], t["dtype"], t["nbytes"], t["op"]) for t in found[:2]] == [
        ((256, 256), torch.float32, 1 << 18, "mul.Tensor"),
        ((256, 256), torch.float32, 1 << 18, ""),
    ]
    assert all(t["line"].startswith(__file__) and t["age"] >= 0 for t in found[:2])
    del y


@pytest.fixture
def small_caps() -> Any:
    with config.using(max_trie_nodes=60, max_programs=8, max_fragments=32):
        yield
    torchtpu.runtime._C.forget_streams()


def distinct_regions(count: int, record: Callable[[int], torch.Tensor]) -> None:
    for i in range(count):
        record(i).cpu()


def test_a_thread_that_makes_many_regions_keeps_within_its_caps(small_caps: None) -> None:
    x = torch.arange(64.0, device="tpu")
    for i in range(40):
        got = (x[: i + 1] + 1).mul(2).sub(1).neg().cpu()
        torch.testing.assert_close(got, -((torch.arange(i + 1.0) + 1) * 2 - 1))
        now = metrics.snapshot()
        assert now["trie_nodes"] <= 60 + 8
        assert now["trie_plans"] <= 2 * 8  # those in flight stay
    assert metrics.snapshot()["streams_forgotten"] >= 30
    assert len(startup.engine().compiler.digests()) <= 8
    kept = startup.engine().fragments
    assert len(kept._known) + len(kept._older) <= 32


def test_programs_go_before_the_process_has_no_memory_maps_left() -> None:
    used, limit = capacity.memory_maps()
    assert 0 < used < limit
    ended = run_script(
        """
        import torch
        from torchtpu import config, metrics, startup
        from torchtpu.runtime.compile import capacity

        config.set(max_programs=64)
        x = torch.arange(64.0, device="tpu")
        for i in range(64):
            capacity.memory_maps = lambda: (800 if i == 40 else 700, 1000)
            assert torch.equal((x[: i + 1] + 1).neg().cpu(), -(torch.arange(i + 1.0) + 1))
            startup.engine().compiler._capacity._unseen = 0
        now = metrics.snapshot()
        assert now["memory_map_collections"] == 1, now
        assert now["trie_plans"] < 30 and now["streams_forgotten"] > 30, now
        assert len(startup.engine().compiler.digests()) < 30
        config.set(max_trie_nodes=1000)
        """,
        TORCHTPU_PADDING="0",
    )
    assert ended.status == 0, ended.err
    assert re.search(r"800 of 1000 memory maps are in use; from now on at most (19|2\d) programs stay", ended.err)


def test_what_is_used_stays_while_other_regions_come_and_go(small_caps: None) -> None:
    x = torch.arange(64.0, device="tpu")

    def often() -> torch.Tensor:
        return (x * 3 + 1).tanh().cpu()

    torch.tpu.synchronize()
    want = often()
    compiled = []
    for i in range(12):
        (x[: i + 1] + 1).mul(2).cpu()
        before = metrics.snapshot()["trie_misses"]
        assert torch.equal(often(), want)
        compiled.append(metrics.snapshot()["trie_misses"] - before)
    assert not any(compiled)


def test_a_forgotten_region_is_learned_again(small_caps: None) -> None:
    x = torch.arange(64.0, device="tpu")
    first = (x[:5] + 1).mul(2).cpu()
    for i in range(20, 40):
        (x[:i] + 1).mul(2).cpu()
    before = metrics.snapshot()["trie_misses"]
    assert torch.equal((x[:5] + 1).mul(2).cpu(), first)
    assert metrics.snapshot()["trie_misses"] > before


def test_metrics_name_the_op_the_dimension_and_the_line_that_varied() -> None:
    def step(rows: int) -> None:
        torch.tanh(torch.ones(rows, 7).to("tpu")).cpu()

    for rows in (11, 12, 13):
        step(rows)
    line = f"{__file__}:{step.__code__.co_firstlineno + 1}"
    assert metrics.snapshot()["recompilations"] == {f"aten::tanh at {line}: dimension 0 of argument 'self'": 2}


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        pytest.param("stream", 20, id="short"),
        pytest.param("record", 20, id="short without a compiler"),
        pytest.param("stream", 1800, id="long", marks=[pytest.mark.full, pytest.mark.timeout(3600)]),
        pytest.param("record", 600, id="long without a compiler", marks=[pytest.mark.full, pytest.mark.timeout(3600)]),
    ],
)
def test_random_shapes_and_ops_leave_nothing_behind(tmp_path: Path, kind: str, seconds: int) -> None:
    caps = {"TORCHTPU_MAX_TRIE_NODES": "500", "TORCHTPU_MAX_PROGRAMS": "40", "TORCHTPU_MAX_FRAGMENTS": "200"}
    made = child(tmp_path, kind, seconds, 0, TORCHTPU_CACHE="off", **caps)
    assert made["streams_forgotten"] > 0
    assert made["settled_nodes"] <= 500 and made["trie_plans"] <= 80
    assert made["trie_nodes"] <= 2 * 500  # with those of regions that are compiled or run
    assert made["array_shapes"] <= 4096
    if seconds > 60:  # by then every cache is full
        resident = made["resident"][10:]
        assert max(resident) - resident[0] <= 64 * MB
        for costs in (made["new_us"], made["known_us"]):
            assert statistics.median(costs[-5:]) <= 1.5 * statistics.median(costs[1:6])


def test_what_jax_traces_of_its_own_functions_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_MOST_TRACED", 8)
    monkeypatch.setattr(learned_templates, "_MOST_TRIED", 0)  # each size is traced
    theirs = jax.jit(lambda x: x + 1)
    theirs.lower(jax.ShapeDtypeStruct((3,), "float32"))
    traces = metrics.snapshot()["fragment_traces"]
    for n in range(3, 27):
        torch.fft.rfft(torch.ones(n, 41, device="tpu"), dim=0).abs().cpu()  # no length of it is padded
    assert metrics.snapshot()["fragment_traces"] - traces >= 24
    kept = [key[0]() for key in trace_to_jaxpr.cache_keys()]
    assert theirs.__wrapped__ in kept
    assert sum(function.__module__.startswith("jax.") for function in kept if function) < 60


def test_shapes_that_nobody_holds_are_forgotten() -> None:
    for n in range(1, 5000):
        torch.empty(n, device="tpu")
    assert metrics.snapshot()["array_shapes"] <= 2500


def test_a_shape_that_is_held_stays_the_same_while_others_go() -> None:
    x = torch.arange(7.0, device="tpu")

    def ends() -> int:
        (x * 3).cpu()
        return int(metrics.snapshot()["trie_misses"])

    ends()
    known = ends()
    for n in range(8, 5000):
        torch.empty(n, device="tpu")
    assert ends() == known
