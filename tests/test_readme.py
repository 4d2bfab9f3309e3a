"""In: README.md and the docs. Out: a failure where their code does not run or their links lead nowhere."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchtpu import config

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_python_in_the_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(block, "README.md", "exec"), {})
        assert out.getvalue() == "tensor([2., 2.], device='tpu:0')\n"


def test_the_log_in_the_readme_is_what_add_py_writes(tmp_path: Path) -> None:
    script, *_ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "add.py").write_text(script)
    environment = {"TORCHTPU_LOG": "cluster,stablehlo,launch", "TORCHTPU_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "add.py"]
    runs = [
        subprocess.run(command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    written = shape_of("".join(run.stderr for run in runs), tmp_path)
    shown = re.findall(r"```\n((?:region from|module|tpu:0).*?)```", README, re.DOTALL)
    assert len(shown) == 3
    for line in "".join(shown).splitlines():
        assert shape_of(line, tmp_path) in written


def shape_of(text: str, folder: Path) -> str:
    """Log text without what differs from run to run: identities, milliseconds, folders."""
    text = text.replace(f"{folder}/", "")
    text = re.sub(r"region [0-9a-f]{8}|_[0-9a-f]{12}\b", "#", text)
    return re.sub(r"[\d.]+ ms", "# ms", text)


def test_ci_runs_the_test_command_of_the_readme() -> None:
    command = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert f"```\n{command}\n```" in README


def test_the_functions_of_the_walk_stand_in_the_files_that_it_names() -> None:
    """Each step names functions or classes, each with a link to the file that defines it."""
    steps = re.findall(r"^\d+\. .*$", (ROOT / "docs" / "walk.md").read_text(), re.MULTILINE)
    assert len(steps) > 20
    for step in steps:
        named = re.findall(r"`(\w+)` in \[[^]]+\]\(\.\./([^)]+)\)", step)
        assert named, step
        for name, path in named:
            text = (ROOT / path).read_text()
            python = rf"^ *(?:def|class) {name}\b"
            cpp = rf"^[\w:<>*&, ]*\b{name}\(.*\{{$"
            assert re.search(python if path.endswith(".py") else cpp, text, re.MULTILINE), f"{name} is not in {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_variables_in_the_docs_are_knobs() -> None:
    known = {knob.variable for knob in config.KNOBS.values()} | {"TORCHTPU_CACHE_DIR"}
    for page in PAGES:
        assert set(re.findall(r"TORCHTPU_[A-Z_]+[A-Z]", page.read_text())) <= known, page.name
