"""The command line: in come a subcommand and its arguments, out goes its exit status.

torchtpu run script.py --its-own args
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status."""
    parser = argparse.ArgumentParser(prog="torchtpu", description="PyTorch on XLA devices.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="run a script written for CUDA on the tpu device",
        description="Runs a Python script with every 'cuda' in it meaning tpu, and lists at the end what was mapped.",
    )
    run.add_argument("-m", dest="is_module", action="store_true", help="the script is a module name, as in python -m")
    run.add_argument("script", help="a Python file, or with -m a module")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    run.set_defaults(function=_run)
    options = parser.parse_args(argv)
    status: int = options.function(options)
    return status


def _run(options: argparse.Namespace) -> int:
    from torchtpu import cuda_names

    mapped = cuda_names.install()
    sys.argv = [options.script, *options.arguments]
    try:
        if options.is_module:
            sys.path.insert(0, "")
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(options.script).resolve().parent))
            runpy.run_path(options.script, run_name="__main__")
    finally:
        print(_report(mapped), file=sys.stderr)
    return 0


def _report(mapped: Counter[str]) -> str:
    if not mapped:
        return "torchtpu run: the script named no CUDA device; nothing was mapped"
    width = max(map(len, mapped))
    rows = [f"  {name:<{width}}  {count:>8} x" for name, count in sorted(mapped.items())]
    return "\n".join(["torchtpu run: mapped to tpu", *rows])


if __name__ == "__main__":
    sys.exit(main())
