"""`torchtpu run`: runs a script written for CUDA on tpu, and lists what was mapped."""

from __future__ import annotations

import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer


def run(
    script: Annotated[str, typer.Argument(help="A Python file, or with -m a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    is_module: Annotated[bool, typer.Option("-m", help="The script is a module's name, as in python -m.")] = False,
) -> None:
    """Run a script written for CUDA on the tpu device.

    Every 'cuda' in it means tpu; what was mapped is listed at the end, on stderr.
    """
    from torchtpu.compat import cuda_names

    mapped = cuda_names.install()
    sys.argv = [script, *(arguments or ())]
    try:
        if is_module:
            sys.path.insert(0, "")
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
    finally:
        print(_report(mapped), file=sys.stderr)


def _report(mapped: Counter[str]) -> str:
    if not mapped:
        return "torchtpu run: the script named no CUDA device; nothing was mapped"
    width = max(map(len, mapped))
    rows = [f"  {name:<{width}}  {count:>8} x" for name, count in sorted(mapped.items())]
    return "\n".join(["torchtpu run: mapped to tpu", *rows])
