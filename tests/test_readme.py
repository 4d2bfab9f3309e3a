"""What README.md and the pages of docs/ promise: their code runs, their links lead somewhere, their commands exist."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from script import run_python

from torchtpu import config
from torchtpu.cli import app

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page: str) -> list[tuple[str, str | None]]:
    """The Python of a page, each block with the output that is shown right behind it (None: nothing is shown).

    A comment `<!-- python ... -->` holds code that readers do not need to see: what a fragment needs before it runs.
    """
    found = re.finditer(
        r"^(?:```python\n(?P<code>.*?)^```\n(?:\n```(?:text)?\n(?P<output>.*?)^```$)?"
        r"|<!-- python\n(?P<hidden>.*?)^-->)",
        page,
        re.DOTALL | re.MULTILINE,
    )
    return [(match["code"] or match["hidden"], match["output"]) for match in found]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks_of(p.read_text())], ids=lambda p: p.name)
def test_python_in_the_docs_runs_and_prints_what_is_shown(page: Path, tmp_path: Path) -> None:
    """The blocks of a page run in its order, as one script that says where each block's output ends."""
    blocks = blocks_of(page.read_text())
    end = "-- the end of a block --\n"
    script = tmp_path / f"{page.stem}.py"
    script.write_text("".join(f"{code}print({end!r}, end='')\n" for code, _ in blocks))
    environment = os.environ | {"TORCHTPU_CACHE_DIR": str(tmp_path / "cache")}
    done = run_python(script.name, folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    for (code, shown), printed in zip(blocks, done.stdout.split(end), strict=False):
        assert shown is None or printed == shown, code


def test_the_commands_of_the_docs_have_the_options_that_they_are_given() -> None:
    known = {name: option_names(command) for name, command in commands_of(typer.main.get_command(app), "torchtpu")}
    for page in PAGES:
        for words in re.findall(r"^(?:\$ )?(torchtpu .*)$", "\n".join(shell_of(page.read_text())), re.MULTILINE):
            own = re.sub(r"( -- |(?<=torchtpu run )\S+\.py).*", "", words)  # the rest is the user's own command
            given = shlex.split(own, comments=True)
            name = max((n for n in known if f"{' '.join(given)} ".startswith(f"{n} ")), key=len)
            assert name != "torchtpu" or len(given) < 3, f"{page.name}: there is no command {words!r}"
            used = {word.partition("=")[0] for word in given if word.startswith("-")}
            assert used <= known[name], f"{page.name}: {words}"


def shell_of(page: str) -> list[str]:
    """The blocks of a page that show commands."""
    return re.findall(r"^```(?:bash|shell)?\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def commands_of(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """A command and those below it, with the words that call them."""
    yield name, command
    for word, below in getattr(command, "commands", {}).items():
        yield from commands_of(below, f"{name} {word}")


def option_names(command: Any) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts} | {"-h", "--help"}


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


def test_the_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    section = re.search(r"^## Measured performance\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)
    assert section
    known = set(re.findall(r"[\d.]+", (ROOT / "benchmarks" / "README.md").read_text()))
    rows = [line.split("|")[2:5] for line in section[1].splitlines() if line.startswith("| ") and "---" not in line]
    figures = [re.match(r" ([\d.]+)(?: ms)? $", cell) for row in rows for cell in row]
    found = [figure[1] for figure in figures if figure]
    assert len(found) >= 8
    assert set(found) <= known


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


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_product() -> None:
    """Each heading of a message, apart from the dots for what differs, stands in the source."""
    said = "\n".join(messages())
    shown = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(shown) > 30
    for message in shown:
        for part in message.split("..."):
            assert part.strip(" .:,;()") in said, f"nothing says {part!r}"


def messages() -> Iterator[str]:
    """The texts in the product's source; what an f-string or a macro puts together counts as separate texts."""
    for folder in ("torchtpu", "runtime", "compiler_cache"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
    for path in (ROOT / "runtime" / "csrc").rglob("*.cpp"):
        yield re.sub(r'"\s*"', "", path.read_text()).replace('\\"', '"')
