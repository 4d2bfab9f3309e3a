"""The documentation site builds in strict mode, so that no page is missing and no link or heading leads nowhere."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import torchtpu

ROOT = Path(__file__).resolve().parent.parent
MISSING = [name for name in ("mkdocs", "material", "mkdocstrings") if importlib.util.find_spec(name) is None]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if MISSING:
        pytest.skip(f"pip install 'torchtpu[docs]': {', '.join(MISSING)} cannot be imported")
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(built)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return built


def test_the_site_builds_in_strict_mode(site: Path) -> None:
    for name in ("", "get_started", "troubleshooting", "walk", "contributing", "benchmarks"):
        assert (site / name / "index.html").exists(), name


def test_the_site_has_a_page_for_each_file_that_is_linked(site: Path) -> None:
    page = site / "source" / "runtime" / "engine.py" / "index.html"
    assert "class</span>" in page.read_text() or "Engine" in page.read_text()
    assert "source/runtime/engine.py/" in (site / "walk" / "index.html").read_text()


def test_the_reference_has_every_public_name(site: Path) -> None:
    page = (site / "api" / "torchtpu" / "index.html").read_text()
    modules = {"__version__", "config", "kernels", "metrics"}  # pages of their own, or no function
    for name in set(torchtpu.__all__) - modules:
        assert f".{name}" in page, name
    assert "TORCHTPU_POLICY" in (site / "api" / "config" / "index.html").read_text()
    assert 'id="torchtpu-cache-import"' in (site / "api" / "cli" / "index.html").read_text()
