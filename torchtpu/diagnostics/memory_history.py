"""Records who holds the memory, as PyTorch's memory snapshots.

Their form is that of torch.cuda.memory._snapshot(), which PyTorch's memory_viz page reads. Addresses stand for buffers:
each has its own range, never used again. Nothing is noted where history is not recorded.
"""

from __future__ import annotations

import itertools
import pickle
import sys
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchtpu import startup
from torchtpu.runtime import _C
from torchtpu.runtime.device.sizes import nbytes_of
from torchtpu.runtime.ir.calls import full_name
from torchtpu.runtime.telemetry.observers import Called, Launched

Entry = dict[str, Any]
_ALIGNMENT = 512


class _Recording:
    """The observer. Buffers come from any thread and die in any."""

    def __init__(self, max_entries: int) -> None:
        self.held: dict[int, Entry] = {}  # the entry of each live array, by its id
        self.entries: deque[Entry] = deque(maxlen=min(max_entries, 1 << 24))
        self._makers: dict[str, list[list[Entry]]] = {}  # by program: the frames of each output
        self._lock = threading.Lock()  # guards _end
        self._end = _ALIGNMENT

    def planned(self, program: Any, about: Any, flight: Future[Any]) -> None:
        from torchtpu.diagnostics.differences import makers

        made = makers(program)
        ops = [made.get(value) for value in program.outputs]
        self._makers[about.identity] = [_frames(full_name(op.name), op.line) if op else [] for op in ops]

    def launched(self, launch: Launched) -> None:
        about = launch.about
        known = self._makers.get(about.identity, [])
        for array, frames in itertools.zip_longest(launch.outputs, known[: len(launch.outputs)]):
            self._note(array, launch.device, frames or _frames("region", about.line))

    def called(self, call: Called) -> None:
        """Its results are uploaded."""

    def uploaded(self, array: Any, device: int) -> None:
        self._note(array, device, _frames("upload", ""))

    def was_read(self, line: str, started: float, seconds: float, nbytes: int) -> None:
        """Reads hold nothing."""

    def fell_back(self, name: str, dtype: torch.dtype | None, line: str, nbytes: int) -> None:
        """Its results are uploaded."""

    def made_room(self, action: str, line: str, detail: str) -> None:
        """What is let go then is noted as it dies."""

    def _note(self, array: Any, device: int, frames: list[Entry]) -> None:
        entry = self._entry("alloc", self.place(nbytes_of(array)), nbytes_of(array), device, frames)
        self.held[id(array)] = entry
        self.entries.append(entry)
        weakref.finalize(array, partial(self._free, id(array))).atexit = False

    def place(self, nbytes: int) -> int:
        """An address for a buffer."""
        with self._lock:
            address = self._end
            self._end += _aligned(nbytes)
        return address

    def _free(self, key: int) -> None:
        e = self.held.pop(key)
        for action in ("free_requested", "free_completed"):
            self.entries.append(self._entry(action, e["addr"], e["size"], e["device"], e["frames"]))

    @staticmethod
    def _entry(action: str, address: int, nbytes: int, device: int, frames: list[Entry]) -> Entry:
        now = time.time_ns() // 1000
        facts = {"action": action, "addr": address, "size": nbytes, "stream": 0, "time_us": now, "frames": frames}
        return {**facts, "device": device}


class _HistoryState:
    """The recording that listens, if any."""

    recording: _Recording | None = None


def _record_memory_history(
    enabled: str | None = "all",
    context: str | None = "all",
    stacks: str = "python",
    max_entries: int = sys.maxsize,
    device: Any = None,
    clear_history: bool = False,
) -> None:
    """Notes from now on which line makes which buffer, and when it dies; None ends it.

    "state" keeps what is alive, "all" and "python" also what was: the last `max_entries` changes, of every device.
    """
    if enabled not in (None, "state", "all"):
        raise ValueError(f"enabled is None, 'state' or 'all', not {enabled!r}")
    before = _HistoryState.recording
    if before is not None:
        startup.stop_observing(before)
        _HistoryState.recording = None
    if enabled is not None:
        _HistoryState.recording = _Recording(0 if enabled == "state" else max_entries)
        startup.observe(_HistoryState.recording)


def _snapshot(device: Any = None, augment_with_fx_traces: bool = False) -> dict[str, Any]:
    """What is alive, one segment per buffer, and what became alive and died since history is recorded."""
    torch.tpu.synchronize()  # type: ignore[attr-defined]
    _C.drain()  # of what died in threads without Python
    recording = _HistoryState.recording or _Recording(0)
    traces: list[list[Entry]] = [[] for _ in range(_C.device_count())]
    for entry in list(recording.entries):
        traces[entry["device"]].append(entry)
    arrays = [(a, i) for i in range(len(traces)) for a in startup.engine().client.live_arrays(i)]
    return {
        "segments": [_segment(recording, array, index) for array, index in arrays],
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }


def _dump_snapshot(filename: str | Path = "dump_snapshot.pickle", augment_with_fx_traces: bool = False) -> None:
    """Writes `_snapshot()` to a file that PyTorch's memory_viz page opens."""
    with Path(filename).open("wb") as file:
        pickle.dump(_snapshot(), file)


def _segment(recording: _Recording, array: Any, device: int) -> Entry:
    """An array's; it has no frames where it was made before history was recorded."""
    known = recording.held.get(id(array))
    address = known["addr"] if known else recording.place(nbytes_of(array))
    frames = known["frames"] if known else []
    size = _aligned(nbytes_of(array))
    block = {
        "address": address,
        "size": size,
        "requested_size": nbytes_of(array),
        "state": "active_allocated",
        "frames": frames,
    }
    return {
        "device": device,
        "address": address,
        "total_size": size,
        "allocated_size": size,
        "active_size": size,
        "requested_size": nbytes_of(array),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": frames,
        "blocks": [block],
    }


def _aligned(nbytes: int) -> int:
    return max(1, -(-nbytes // _ALIGNMENT)) * _ALIGNMENT


def _frames(op: str, line: str) -> list[Entry]:
    file, _, number = line.rpartition(":")
    return [{"filename": file, "line": int(number) if number.isdigit() else 0, "name": op}]
