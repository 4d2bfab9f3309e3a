"""torch.profiler and its like: Chrome traces with rows of what the device did.

Regions, collectives, builds, launches and the reads that waited stand beside PyTorch's own rows, with the user's lines.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchtpu import startup
from torchtpu.runtime.device import jax_modules

if TYPE_CHECKING:
    from torchtpu.diagnostics.listener import Listener

__all__ = ["xprof"]

Event = dict[str, Any]
_FIRST_PID = 1 << 20  # processes of a trace: the runtime's threads, then the devices
_HOST_ROWS = ("compile", "launch", "wait")
_DEVICE_ROWS = ("region", "collective")
_LANES = 1 << 10  # thread ids of a row: slices of different threads may overlap, those of one id may not


def install() -> None:
    """Adds the device's rows to what torch.profiler exports."""
    kineto: Any = torch.profiler.profiler._KinetoProfile
    start, stop, export = kineto.start_trace, kineto.stop_trace, kineto.export_chrome_trace

    @functools.wraps(start)
    def start_trace(self: Any) -> None:
        from torchtpu.diagnostics.listener import Listener

        if self.with_stack:
            _import_all()
        start(self)
        self._tpu_listener = Listener()
        startup.observe(self._tpu_listener)

    @functools.wraps(stop)
    def stop_trace(self: Any) -> None:
        listener = self.__dict__.pop("_tpu_listener", None)
        if listener is not None:
            torch.tpu.synchronize()  # type: ignore[attr-defined]
            startup.stop_observing(listener)
            listener.close()
            self._tpu_events = _events(listener)
        stop(self)

    @functools.wraps(export)
    def export_chrome_trace(self: Any, path: str) -> Any:
        result = export(self, path)
        events = self.__dict__.get("_tpu_events")
        if events:
            _add(Path(path), events)
        return result

    kineto.start_trace, kineto.stop_trace, kineto.export_chrome_trace = start_trace, stop_trace, export_chrome_trace


def _import_all() -> None:
    """Imports what is imported when it is first used: PyTorch cannot name the frames of modules that are imported while
    it records stacks."""
    import torchtpu.diagnostics.report
    import torchtpu.runtime.padding.evaluate  # noqa: F401

    startup.engine()
    jax_modules.import_all()


def _events(listener: Listener) -> list[Event]:
    """The listener's notes as events of a Chrome trace, in nanoseconds of `time.perf_counter()`."""
    from torchtpu.diagnostics.report import device_spans

    host, found, launches = _FIRST_PID, [], []
    for build in listener.builds:
        if build.source in ("compile", "disk"):
            facts = {"line": build.program.line, "ops": len(build.program.ops), "program": build.identity[:8]}
            begin = build.finished - build.milliseconds / 1e3
            found.append(_event(host, "compile", build.source, begin, build.finished, facts))
    for run, (begin, end) in zip(listener.runs, device_spans(listener.runs), strict=True):
        launch, about = run.launch, run.launch.about
        facts = {
            "program": about.identity[:8],
            "ops": about.ops,
            "cut": launch.reason,
            "cut line": launch.line,
            "Call stack": "\n".join(about.lines),
        }
        name = f"{about.identity[:8]}: {about.ops} ops from {about.lines[0] if about.lines else about.line}"
        row = host + 1 + launch.device
        started = _event(host, "launch", name, launch.started, launch.ended, facts)
        ran = _event(row, "region", name, begin, end, facts)
        found += [started, ran]
        launches.append((started, ran))
    for call in listener.calls:
        name = call.op.removeprefix("torchtpu::")
        found.append(_event(host + 1 + call.device, "collective", name, call.started, call.ended, {"line": call.line}))
    for read in listener.reads:
        name = read.line or "synchronize"
        facts = {"line": read.line, "bytes": read.nbytes}
        found.append(_event(host, "wait", name, read.started, read.started + read.seconds, facts))
    _spread(found)
    arrows = [event for number, ends in enumerate(launches) for event in _arrow(number, *ends)]
    return [*_names(found), *found, *arrows] if found else []


def _spread(slices: list[Event]) -> None:
    """Moves each slice that overlaps an earlier one of its row, of another thread, to a lane of its own."""
    free: dict[tuple[int, int], list[float]] = {}  # when the last slice of each lane ends
    for event in sorted(slices, key=lambda e: float(e["ts"])):
        ends = free.setdefault((event["pid"], event["tid"]), [])
        lane = next((number for number, end in enumerate(ends) if end <= event["ts"]), len(ends))
        ends[lane : lane + 1] = [event["ts"] + event["dur"]]
        event["tid"] += lane


def _event(pid: int, row: str, name: str, begin: float, end: float, facts: dict[str, Any]) -> Event:
    tid = (_HOST_ROWS if row in _HOST_ROWS else _DEVICE_ROWS).index(row) * _LANES
    kind, nanoseconds = f"tpu_{row}", (end - begin) * 1e9
    return {
        "ph": "X", "cat": kind, "name": name, "pid": pid, "tid": tid, "ts": begin * 1e9, "dur": nanoseconds,
        "args": facts,
    }  # fmt: skip


def _arrow(number: int, begin: Event, end: Event) -> list[Event]:
    """From a launch to the region that it ran."""
    common = {"cat": "tpu_flow", "name": "launch", "id": _FIRST_PID + number, "bp": "e"}
    return [
        {**common, "ph": phase, "pid": e["pid"], "tid": e["tid"], "ts": e["ts"]}
        for phase, e in (("s", begin), ("f", end))
    ]


def _names(events: list[Event]) -> list[Event]:
    made = []
    for pid in sorted({event["pid"] for event in events}):
        name = "torchtpu" if pid == _FIRST_PID else f"tpu:{pid - _FIRST_PID - 1}"
        made.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}})
        rows = _HOST_ROWS if pid == _FIRST_PID else _DEVICE_ROWS
        lanes = {event["tid"] for event in events if event["pid"] == pid} | {n * _LANES for n in range(len(rows))}
        for tid in sorted(lanes):
            facts = {"name": rows[tid // _LANES]}
            made.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "ts": 0, "args": facts})
    return made


def _add(path: Path, events: list[Event]) -> None:
    """Writes the events into a trace file, whose times are microseconds after a base."""
    packed = path.suffix == ".gz"
    data = path.read_bytes()
    trace = json.loads(gzip.decompress(data) if packed else data)
    origin = time.time_ns() - time.perf_counter_ns() - int(trace.get("baseTimeNanoseconds", 0))
    for event in events:
        placed = {**event, "ts": (origin + event["ts"]) / 1e3 if event["ph"] != "M" else 0}
        trace["traceEvents"].append(placed | ({"dur": event["dur"] / 1e3} if "dur" in event else {}))
    text = json.dumps(trace).encode()
    path.write_bytes(gzip.compress(text) if packed else text)


@contextlib.contextmanager
def xprof(directory: str | Path) -> Iterator[None]:
    """Writes what XLA and the device did in the block as an XProf session, for TensorBoard's or XProf's viewer."""
    session = startup.engine().client.start_profile()
    try:
        yield
        torch.tpu.synchronize()  # type: ignore[attr-defined]
    finally:
        session.stop_and_export(str(directory))
