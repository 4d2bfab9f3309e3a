"""What the commands print: tables for people, or one JSON document for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NoReturn, TextIO

import typer
from rich.console import Console
from rich.table import Table

_WIDTH = 160  # where the output is no terminal


def _console(stream: TextIO, *, is_stderr: bool) -> Console:
    return Console(highlight=False, soft_wrap=True, stderr=is_stderr, width=None if stream.isatty() else _WIDTH)


out = _console(sys.stdout, is_stderr=False)
err = _console(sys.stderr, is_stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def print_json(document: Any) -> None:
    """Prints one JSON document."""
    print(json.dumps(document, indent=1))


def fail(message: str, status: int = 1) -> NoReturn:
    """Ends the command with a message on stderr."""
    err.print(f"torchtpu: {message}", markup=False)
    raise typer.Exit(status)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A plain table; columns whose cells are numbers or sizes are aligned right."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    cells = [[str(cell) for cell in row] for row in rows]
    for position, column in enumerate(columns):
        is_number = all(row[position][:1].isdigit() or row[position] in ("", "-") for row in cells)
        made.add_column(column, justify="right" if cells and is_number else "left", overflow="fold")
    for row in cells:
        made.add_row(*row)
    return made


def show_count(count: float) -> str:
    """`3.4 G`; powers of 1000."""
    for unit in ("", " K", " M", " G", " T"):
        if abs(count) < 1000:
            return f"{count:.0f}{unit}" if not unit else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f} P"


def show_seconds(seconds: float) -> str:
    """`12 us`, `3.4 ms` or `5.6 s`."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
