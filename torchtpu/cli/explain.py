"""`torchtpu explain`: runs a command and reports what the device did and why."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Annotated

import typer

from torchtpu.cli import interpreter


def explain(
    command: Annotated[list[str], typer.Argument(help="The command, such as: -- python train.py --epochs 1")],
    save: Annotated[
        list[str] | None, typer.Option(help="Also write the report to this file: .html (a page), .json or text.")
    ] = None,
) -> None:
    """Run a command and explain it: recompilations, fallbacks, reads, what the host and the device waited for."""
    interpreter.check(command)
    where = ",".join(["-", *(os.path.abspath(path) for path in save or ())])
    done = subprocess.run(command, env={**os.environ, "TORCHTPU_EXPLAIN": where}, check=False)
    sys.exit(done.returncode)
