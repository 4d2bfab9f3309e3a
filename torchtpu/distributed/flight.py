"""The flight recorder: writes this process's calls to a file that PyTorch's `flight_recorder` tool reads.

The file is written when a collective has failed here or on another rank, where TORCH_FR_DUMP_TEMP_FILE says where;
TORCH_FR_BUFFER_SIZE is the number of calls that are kept.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .call import CollectiveCall

_VERSION = "2.10"
_FRAME = "a line of the user"


class FlightRecorder:
    """The last calls of this process. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._calls: deque[tuple[int, CollectiveCall, dict[str, Any]]] = deque(maxlen=_size())
        self._num_seen = 0
        self._groups: dict[str, list[int]] = {}
        self._rank = 0

    def join(self, name: str, ranks: Sequence[int], rank: int) -> None:
        """A group was made; `rank` is this process among all."""
        with self._lock:
            self._groups[name] = list(ranks)
            self._rank = rank

    def record(self, call: CollectiveCall, group: str, tensor: torch.Tensor, sizes: Sequence[int]) -> None:
        """A call was recorded."""
        dtype = str(tensor.dtype).removeprefix("torch.").capitalize()
        facts = {
            "process_group": (group, _description(group)),
            "input_sizes": [list(tensor.shape)],
            "input_dtypes": [dtype],
            "output_sizes": [list(sizes)],
            "output_dtypes": [dtype],
            "time_created_ns": time.time_ns(),
        }
        with self._lock:
            self._calls.append((self._num_seen, call, facts))
            self._num_seen += 1

    def dump(self) -> None:
        """Writes the file, where one is wanted."""
        prefix = os.environ.get("TORCH_FR_DUMP_TEMP_FILE")
        if not prefix:
            return
        with self._lock:
            entries = [_entry(number, call, facts) for number, call, facts in self._calls]
            config = {
                name: {"name": name, "desc": _description(name), "ranks": str(ranks)}
                for name, ranks in self._groups.items()
            }
            rank = self._rank
        path = Path(f"{prefix}{rank}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps({"version": _VERSION, "entries": entries, "pg_config": config}))


def _entry(number: int, call: CollectiveCall, facts: dict[str, Any]) -> dict[str, Any]:
    is_peer_to_peer = call.name in ("send", "recv")
    file, _, line = call.line.rpartition(":")
    is_over = call.finished.is_set() and call.error is None
    return {
        **facts,
        "record_id": number,
        "profiling_name": f"gloo:{call.name}{call.route}",  # of backends the tool knows PyTorch's own
        "collective_seq_id": 0 if is_peer_to_peer else call.sequence,
        "p2p_seq_id": number if is_peer_to_peer else 0,
        "is_p2p": is_peer_to_peer,
        "state": "completed" if is_over else "started" if call.is_started else "scheduled",
        "frames": [{"name": _FRAME, "filename": file, "line": int(line or 0)}],
    }


def _description(group: str) -> str:
    return "default_pg" if group == "0" else "undefined"


def _size() -> int:
    return int(os.environ.get("TORCH_FR_BUFFER_SIZE", "2000"))


recorder = FlightRecorder()
