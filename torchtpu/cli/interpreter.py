"""Refuses a command whose Python has no torchtpu."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

from torchtpu.cli.output import fail

_PYTHON = re.compile(r"python[\d.]*")
_MISSING = """
import importlib.util
print(*(name for name in ("torch", "torchtpu") if importlib.util.find_spec(name) is None))
"""


def check(command: Sequence[str]) -> None:
    """Ends this command where the other one's Python lacks torch or torchtpu, or does not exist."""
    found = shutil.which(command[0])
    if found is None:
        fail(f"there is no command {command[0]!r}")
    if not _PYTHON.fullmatch(os.path.basename(found)) or os.path.abspath(found) == os.path.abspath(sys.executable):
        return
    asked = subprocess.run([found, "-c", _MISSING], capture_output=True, text=True, check=False)
    missing = asked.stdout.split()
    if asked.returncode == 0 and missing:
        fail(
            f"the command runs {found}, where {' and '.join(missing)} cannot be imported. This is torchtpu of "
            f"{sys.executable}: name that Python, or activate its environment"
        )
