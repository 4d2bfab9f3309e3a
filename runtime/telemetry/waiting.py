"""What a long wait waits for: one line that goes away in a terminal or a notebook, a log line elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from dataclasses import dataclass, field
from typing import Any, TextIO

from . import log

_FIRST_LOG_SECONDS, _LOG_EVERY_SECONDS = 3, 10
_ERASE = "\r\x1b[K"


@dataclass
class Waits:
    """The waits that have been reported. `shown_by` is the thread whose wait the line on the screen is about.

    `next_log` has, for each thread that waits, the seconds after which it writes to the log. All guarded by `lock`.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    shown_by: int | None = None
    line: Line | None = None
    next_log: dict[int, float] = field(default_factory=dict)

    def report(self, text: str, seconds: float) -> None:
        """This thread has waited for `seconds` for what `text` names; told once a second."""
        thread = threading.get_ident()
        with self.lock:
            line = self.line or _line()
            if line is not None:
                if self.shown_by in (None, thread):
                    self.shown_by, self.line = thread, line
                    line.show(f"tpu: waiting for {seconds:.0f} s: {text}")
            elif seconds >= self.next_log.setdefault(thread, _FIRST_LOG_SECONDS):
                self.next_log[thread] += _LOG_EVERY_SECONDS
                log.write(f"tpu: waiting for {seconds:.0f} s: {text}")

    def end(self) -> None:
        """A wait of this thread that was reported is over."""
        thread = threading.get_ident()
        with self.lock:
            self.next_log.pop(thread, None)
            if self.shown_by == thread and self.line is not None:
                self.line.clear()
                self.shown_by = self.line = None


class Terminal:
    """The last line of a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, text: str) -> None:
        """Replaces the line."""
        width = shutil.get_terminal_size().columns
        self._write(_ERASE + (text if len(text) < width else text[: max(0, width - 4)] + "..."))

    def clear(self) -> None:
        """Leaves an empty line, with the cursor at its beginning."""
        self._write(_ERASE)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            return


class Notebook:
    """An output of the cell that is running."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        """Replaces the output's text."""
        from IPython.display import display

        if self._handle is None:
            self._handle = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": text}, raw=True)

    def clear(self) -> None:
        """Leaves an output without text."""
        self._handle.update({"text/plain": ""}, raw=True)


Line = Terminal | Notebook


def _line() -> Line | None:
    """Where a line can be shown that goes away; None where what is written stays."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None and hasattr(shell, "kernel"):
        return Notebook()
    stream = sys.stderr
    try:
        shows = stream.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):
        return None
    return Terminal(stream) if shows else None
