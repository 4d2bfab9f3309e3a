"""The command line: runs a subcommand and exits with its status.

0: done; 1: what was asked for failed in part or in whole; 2: the command line is wrong; `run` and `warm` pass on the
status of the user's own command.
"""

from __future__ import annotations

import sys

import typer

from torchtpu._autoload import failure
from torchtpu.cli import cache, doctor, explain, run, warm

app = typer.Typer(
    name="torchtpu",
    help="PyTorch on XLA devices.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_OTHERS_OPTIONS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
app.command(context_settings=_OTHERS_OPTIONS)(run.run)
app.command(context_settings=_OTHERS_OPTIONS)(warm.warm)
app.command(context_settings=_OTHERS_OPTIONS)(explain.explain)
app.add_typer(cache.cache, name="cache")
app.command()(doctor.doctor)


def main() -> None:
    """Runs the subcommand that sys.argv names, and exits."""
    error = failure()
    if error is not None and "doctor" not in sys.argv[1:2]:
        sys.exit(f"torchtpu: {error}")
    app(prog_name="torchtpu")
