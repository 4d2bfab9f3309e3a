"""Listens to the engine's steps while a block runs, and makes an `Explanation` of them.

Nothing listens outside of a block, and the recorder's hit path never knows.
"""

from __future__ import annotations

import atexit
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchtpu import config, startup
from torchtpu.diagnostics import page, report
from torchtpu.diagnostics.listener import Listener


@dataclass
class Explanation:
    """The report of one block; complete once the block has ended."""

    data: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return report.text(self.data)

    def json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.data, indent=1)

    def html(self) -> str:
        """The report as one page that needs nothing else."""
        return page.render(self.data)

    def save(self, path: str | Path) -> None:
        """Writes the report: as a page to `.html`, as JSON to `.json`, else as text."""
        made = {".html": self.html, ".json": self.json}.get(Path(path).suffix, self.__str__)
        Path(path).write_text(made())


@contextlib.contextmanager
def explain() -> Iterator[Explanation]:
    """Explains what the block does on the device; blocks may nest."""
    explanation, listener = Explanation(), Listener()
    startup.observe(listener)
    try:
        yield explanation
        torch.tpu.synchronize()  # type: ignore[attr-defined]
    finally:
        startup.stop_observing(listener)
        listener.close()
        explanation.data = report.build(listener)


def explain_process() -> None:
    """Explains this process from now to its exit, as TORCHTPU_EXPLAIN asks: files, separated by commas, or "-"."""
    stack = contextlib.ExitStack()
    explanation = stack.enter_context(explain())

    def write() -> None:
        stack.close()
        for path in filter(None, config.get("explain").split(",")):
            if path == "-":
                print(explanation)
            else:
                explanation.save(path)

    atexit.register(write)
