"""Run-time numbers: in come the floats or ints of a launch, out goes an array of them on its device, often a known one.

A copy to the device costs more than the launch of a small program, and loops hand over the same numbers lap by lap.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from torchtpu.runtime.device.client import Client

_MOST_ARRAYS = 1 << 12
_MOST_BYTES = 1 << 10  # of one that is kept


class RuntimeNumbers:
    """The arrays of one client; no program is given their memory."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()  # guards what follows
        self._known: OrderedDict[tuple[str, bytes, int], Any] = OrderedDict()

    def array(self, numbers: torch.Tensor, device: int) -> Any:
        """Of a float64 or int64 tensor, which nobody changes afterwards."""
        kind = "d" if numbers.dtype is torch.float64 else "q"
        return self._find(kind, numbers.numpy().tobytes(), device, numbers)

    def of_floats(self, numbers: Sequence[float], device: int) -> Any:
        """Of Python floats."""
        return self._find("d", array("d", numbers).tobytes(), device, None)

    def of_ints(self, numbers: Sequence[int], device: int) -> Any:
        """Of Python ints."""
        return self._find("q", array("q", numbers).tobytes(), device, None)

    def _find(self, kind: str, data: bytes, device: int, numbers: torch.Tensor | None) -> Any:
        key = kind, data, device
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
                return found
        if numbers is None:
            numbers = torch.frombuffer(bytearray(data), dtype=torch.float64 if kind == "d" else torch.int64)
        made = self._client.upload(numbers, device)
        if len(data) <= _MOST_BYTES:
            with self._lock:
                self._known[key] = made
                if len(self._known) > _MOST_ARRAYS:
                    self._known.popitem(last=False)
        return made
