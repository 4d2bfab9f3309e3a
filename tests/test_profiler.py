"""In: profiled blocks. Out: traces with rows of the device, on PyTorch's own clock."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from torchtpu import startup


def trace_of(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    events = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    assert isinstance(events, list)
    return events


def work() -> None:
    x = torch.ones(16, 16, device="tpu")
    for _ in range(3):
        x = (x @ x).sigmoid()
        torch.tpu.synchronize()


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_has_rows_of_the_device(tmp_path: Path, name: str) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with record_function("the block"):
            work()
    path = tmp_path / name
    profiler.export_chrome_trace(str(path))
    events = trace_of(path)
    (block,) = [e for e in events if e.get("name") == "the block" and e.get("cat") == "user_annotation"]
    device = [e for e in events if e.get("cat") == "tpu_device"]
    assert len(device) == 3
    for event in device:
        assert __file__ in event["name"] or "test_profiler.py" in event["name"]
        assert block["ts"] - 1e3 <= event["ts"] <= event["ts"] + event["dur"] <= block["ts"] + block["dur"] + 1e3
    assert {e["args"]["name"] for e in events if e["pid"] == "tpu" and e["name"] == "thread_name"} >= {
        "record", "compile", "launch", "device", "wait",
    }  # fmt: skip


def test_nothing_listens_after_a_profile() -> None:
    with profile(activities=[ProfilerActivity.CPU]):
        work()
    assert startup._lazy.observers == []


def test_a_schedule_profiles_each_of_its_windows(tmp_path: Path) -> None:
    counts = []

    def export(profiler: Any) -> None:
        path = tmp_path / f"{len(counts)}.json"
        profiler.export_chrome_trace(str(path))
        counts.append(len([e for e in trace_of(path) if e.get("cat") == "tpu_device"]))

    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=2)
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule, on_trace_ready=export) as profiler:
        for _ in range(7):
            work()
            profiler.step()
    assert counts == [3, 3]
