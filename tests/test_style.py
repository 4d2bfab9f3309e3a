"""ruff, mypy and clang-format would change and refuse nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def check(*command: str, cwd: Path = ROOT) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing() -> None:
    check(sys.executable, "-m", "ruff", "check", "--no-cache", ".")


def test_clang_format_changes_nothing() -> None:
    sources = sorted(map(str, (ROOT / "runtime" / "csrc").glob("*/*.*")))
    check(str(Path(sys.executable).parent / "clang-format"), "--dry-run", "--Werror", *sources)


@pytest.mark.timeout(900)
def test_strict_mypy_finds_nothing(tmp_path: Path) -> None:
    """mypy cannot follow an editable install's import hook: it sees the folders as an installed package has them."""
    package = tmp_path / "torchtpu"
    package.mkdir()
    for entry in (ROOT / "torchtpu").iterdir():
        (package / entry.name).symlink_to(entry)
    for name in ("runtime", "compiler_cache"):
        (package / name).symlink_to(ROOT / name)
    cache = ROOT / ".mypy_cache"
    command = (sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir", cache)
    check(*map(str, command), "-p", "torchtpu", cwd=tmp_path)
