"""Profiled blocks give traces with rows of the device on PyTorch's clock, as viewers demand them."""

from __future__ import annotations

import gzip
import itertools
import json
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from script import run_script
from torch.cuda import _memory_viz
from torch.profiler import ProfilerActivity, profile, record_function

from torchtpu import startup, xprof

Event = dict[str, Any]


def trace_of(path: Path) -> list[Event]:
    data = path.read_bytes()
    events = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    assert isinstance(events, list)
    return events


def work() -> None:
    x = torch.ones(16, 16, device="tpu")
    for _ in range(3):
        x = (x @ x).sigmoid()
        torch.tpu.synchronize()


def by_kind(events: list[Event], kind: str) -> list[Event]:
    return [e for e in events if e.get("cat") == kind]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_has_rows_of_the_device(tmp_path: Path, name: str) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("the block"):
        work()
    profiler.export_chrome_trace(str(tmp_path / name))
    events = trace_of(tmp_path / name)
    (block,) = [e for e in by_kind(events, "user_annotation") if e["name"] == "the block"]
    regions, launches = by_kind(events, "tpu_region"), by_kind(events, "tpu_launch")
    assert len(regions) == len(launches) == 3
    for event in regions:
        assert event["args"]["Call stack"].count(f"{__file__}:") >= 1
        assert event["args"]["cut"] == "synchronize"
        assert abs(event["ts"] - block["ts"]) < 60e6, "they share a clock"  # whatever the machine does meanwhile
    assert {(e["ph"], e["id"]) for e in by_kind(events, "tpu_flow")} >= {
        (phase, region["id"]) for phase in "sf" for region in by_kind(events, "tpu_flow")
    }
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] >= regions[0]["pid"] - 1}
    assert rows >= {"region", "collective", "compile", "launch", "wait"}


REQUIRED = {
    "X": {"name": str, "ts": (int, float), "dur": (int, float)},
    "M": {"name": str, "args": dict},
    "i": {"name": str, "ts": (int, float), "s": str},
    "s": {"name": str, "cat": str, "ts": (int, float), "id": (int, str)},
    "f": {"name": str, "cat": str, "ts": (int, float), "id": (int, str)},
}


def rows(events: list[Event]) -> dict[tuple[Any, Any], list[Event]]:
    """The slices of each row, the outer ones first."""
    found: dict[tuple[Any, Any], list[Event]] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])):
        found.setdefault((event["pid"], event["tid"]), []).append(event)
    return found


def assert_slices_nest(slices: dict[tuple[Any, Any], list[Event]]) -> None:
    for row in slices.values():
        open_until: list[float] = []
        for event in row:
            while open_until and open_until[-1] <= event["ts"] + 0.002:  # times are written to the nanosecond
                open_until.pop()
            end = event["ts"] + event["dur"]
            assert not open_until or end <= open_until[-1] + 0.002, "within the outer one, to the last digit"
            open_until.append(end)


def test_a_trace_is_what_the_format_of_viewers_demands(tmp_path: Path) -> None:
    """https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: fields of each phase, slices of
    a row that nest, flows with both ends, each of them in a slice."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("block"):
        work()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = trace_of(tmp_path / "trace.json")
    for event in events:
        for name, kinds in REQUIRED[event["ph"]].items():
            assert isinstance(event[name], kinds), event
        assert event["ph"] == "M" or {"pid", "tid"} <= event.keys()
        assert event.get("dur", 0) >= 0
        assert event["ph"] != "i" or event["s"] in ("g", "p", "t")
    slices = rows(events)
    assert_slices_nest(slices)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    ours = {(e["pid"], e["tid"]) for e in events if str(e.get("cat", "")).startswith("tpu_")}
    assert ours
    assert ours <= named
    flows: dict[Any, list[Event]] = {}
    for event in events:
        if event["ph"] in "sf":
            flows.setdefault((event["cat"], event["name"], event["id"]), []).append(event)
            around = slices[event["pid"], event["tid"]]
            assert any(e["ts"] <= event["ts"] <= e["ts"] + e["dur"] for e in around), "it starts and ends at slices"
    assert flows
    for ends in flows.values():
        first, *others = sorted(ends, key=lambda e: e["ts"])
        assert first["ph"] == "s"
        assert {e["ph"] for e in others} == {"f"}


def test_compiles_of_several_threads_are_slices_that_do_not_overlap(tmp_path: Path) -> None:
    """Two compile threads and two readers: what happens at once stands in lanes of its row."""
    both = threading.Barrier(2, timeout=60)

    def build(number: int) -> None:
        x = torch.ones(31 + number, 29, device="tpu")
        for step in range(4):
            both.wait()
            x = (x * (number + step / 7)).erfc().logsumexp(0, keepdim=True).expand(31 + number, -1).sort(0).values
            x.cpu()

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        threads = [threading.Thread(target=build, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert_slices_nest(rows(trace_of(tmp_path / "trace.json")))


def test_nothing_listens_after_a_profile() -> None:
    with profile(activities=[ProfilerActivity.CPU]):
        work()
    assert startup._lazy.observers == []


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
def test_a_schedule_profiles_each_of_its_windows(tmp_path: Path) -> None:
    counts = []

    def export(profiler: Any) -> None:
        path = tmp_path / f"{len(counts)}.json"
        profiler.export_chrome_trace(str(path))
        counts.append(len(by_kind(trace_of(path), "tpu_region")))

    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=2)
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule, on_trace_ready=export) as profiler:
        for _ in range(7):
            work()
            profiler.step()
    assert counts == [3, 3]


def test_ranges_have_the_names_of_nvtx(tmp_path: Path) -> None:
    nvtx = torch.tpu.nvtx
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        assert nvtx.range_push("outer") == 0
        with nvtx.range("inner {}", 3):
            work()
        nvtx.mark("now")
        assert nvtx.range_pop() == 0
    assert nvtx.range_pop() == -1
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    names = [e["name"] for e in by_kind(trace_of(tmp_path / "trace.json"), "user_annotation")]
    assert {"outer", "inner 3", "now"} <= set(names)


def test_an_xprof_session_is_written(tmp_path: Path) -> None:
    with xprof(tmp_path):
        work()
    assert list(tmp_path.rglob("*.xplane.pb"))


@pytest.fixture
def recorded_history() -> Iterator[None]:
    torch.tpu.memory._record_memory_history()
    yield
    torch.tpu.memory._record_memory_history(None)


@pytest.mark.usefixtures("recorded_history")
def test_a_snapshot_is_what_memory_viz_reads(tmp_path: Path) -> None:
    kept = torch.ones(1000, device="tpu") * 3
    given = torch.arange(6.0).to("tpu")
    lost = kept @ kept + given.sum()
    torch.tpu.synchronize()
    del lost
    torch.tpu.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    blocks = [b for segment in snapshot["segments"] for b in segment["blocks"]]
    (mine,) = [b for b in blocks if b["requested_size"] == 4000]
    assert mine["frames"][0]["filename"] == __file__
    assert mine["frames"][0]["name"] == "aten::mul.Tensor"
    # Another array of this size may be older than the record: it has no frames.
    assert "upload" in {frame["name"] for b in blocks if b["requested_size"] == 24 for frame in b["frames"][:1]}
    actions = [e["action"] for e in snapshot["device_traces"][0]]
    assert actions.count("alloc") >= 3
    assert actions.count("free_completed") >= 1
    spans = sorted((s["address"], s["total_size"]) for s in snapshot["segments"])
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
    plain = lambda lines: lines  # instead of a flame graph
    assert "aten::mul" in _memory_viz.segments(snapshot, format_flamegraph=plain)
    assert "test_profiler.py" in _memory_viz.memory(snapshot, format_flamegraph=plain)
    assert "alloc" in _memory_viz.trace(snapshot) or "free" in _memory_viz.trace(snapshot)


def test_a_snapshot_without_history_holds_what_is_alive() -> None:
    kept = torch.ones(1000, device="tpu") * 3
    snapshot = torch.tpu.memory._snapshot()
    assert 4000 in [s["requested_size"] for s in snapshot["segments"]]
    assert snapshot["device_traces"] == [[]]
    assert startup._lazy.observers == []
    assert kept[0].item() == 3


def test_stacks_of_what_is_compiled_can_be_read() -> None:
    """PyTorch cannot name the frames of modules that are imported while it records stacks."""
    ended = run_script(
        """
    import torch
    from torch.profiler import ProfilerActivity, profile
    x = torch.ones(31, 31, device="tpu")
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as p:
        y = (x @ x + 1).sum().item()
    print(len(p.events()) > 0, len(p.key_averages()) > 0)
    """,
        TORCHTPU_CACHE="off",
    )
    assert (ended.status, ended.out) == (0, "True True\n"), ended.err
