"""torch.profiler: in comes a profiled block, out goes its Chrome trace with rows of what the device did.

Regions, their builds and the reads that waited stand beside PyTorch's own rows, with the user's lines.
"""

from __future__ import annotations

import functools
import gzip
import json
import time
from pathlib import Path
from typing import Any

import torch

from torchtpu import startup

_ROWS = {"record": 0, "compile": 1, "launch": 2, "device": 3, "wait": 4}
_PROCESS = "tpu"


def install() -> None:
    """Adds the device's rows to the traces of torch.profiler."""
    kineto: Any = torch.profiler.profiler._KinetoProfile
    start, stop, export = kineto.start_trace, kineto.stop_trace, kineto.export_chrome_trace

    @functools.wraps(start)
    def start_trace(self: Any) -> None:
        from torchtpu.explaining.session import Listener

        self._tpu_listener = Listener()
        startup.observe(self._tpu_listener)
        start(self)

    @functools.wraps(stop)
    def stop_trace(self: Any) -> None:
        from torchtpu.explaining import report

        torch.tpu.synchronize()  # type: ignore[attr-defined]
        stop(self)
        listener = self.__dict__.pop("_tpu_listener")
        startup.stop_observing(listener)
        listener.close()
        self._tpu_timeline = listener.started, report.build(listener)["timeline"]

    @functools.wraps(export)
    def export_chrome_trace(self: Any, path: str) -> Any:
        result = export(self, path)
        timeline = getattr(self, "_tpu_timeline", None)
        if timeline is not None:
            _add_rows(path, *timeline)
        return result

    kineto.start_trace, kineto.stop_trace, kineto.export_chrome_trace = start_trace, stop_trace, export_chrome_trace


def _add_rows(path: str, started: float, timeline: dict[str, list[list[Any]]]) -> None:
    """Writes the timeline into a trace file."""
    is_packed = path.endswith(".gz")
    data = Path(path).read_bytes()
    trace = json.loads(gzip.decompress(data) if is_packed else data)
    # Kineto counts microseconds from a base in the time of day.
    base = int(trace.get("baseTimeNanoseconds", 0))
    origin = (time.time_ns() - time.perf_counter_ns() + started * 1e9 - base) / 1e3
    events = trace["traceEvents"]
    events.append({"ph": "M", "name": "process_name", "pid": _PROCESS, "tid": 0, "args": {"name": "tpu"}})
    for row, number in _ROWS.items():
        events.append({"ph": "M", "name": "thread_name", "pid": _PROCESS, "tid": number, "args": {"name": row}})
        for begin, end, label in timeline[row]:
            events.append(
                {
                    "ph": "X",
                    "cat": f"tpu_{row}",
                    "name": label,
                    "pid": _PROCESS,
                    "tid": number,
                    "ts": origin + begin * 1e3,
                    "dur": (end - begin) * 1e3,
                }
            )
    text = json.dumps(trace).encode()
    Path(path).write_bytes(gzip.compress(text) if is_packed else text)
