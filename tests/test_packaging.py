"""A wheel holds an extension for each torch, from which `torchtpu.runtime` chooses, and asks for those torches only."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from torchtpu.runtime import _C

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "packaging"))
MAJOR, MINOR = map(int, torch.__version__.split(".")[:2])

build_wheel = importlib.import_module("build_wheel")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `python -m build` left a wheel and the sources that it was made from.

    This process's extension stands for that of the next torch too; nothing is compiled.
    """
    source = tmp_path_factory.mktemp("source") / "torchtpu"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.so", "*.egg-info", "build", "site-packages")
    shutil.copytree(ROOT, source, ignore=left_out)
    extensions = tmp_path_factory.mktemp("extensions")
    for minor in (MINOR, MINOR + 1):
        (extensions / f"torch{MAJOR}_{minor}").mkdir()
        shutil.copy(_C.__file__, extensions / f"torch{MAJOR}_{minor}")
    out = tmp_path_factory.mktemp("wheel")
    build_wheel.pack(sys.executable, extensions, out, source)
    return out


@pytest.fixture(scope="module")
def wheel(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That wheel, as it is published."""
    (plain,) = made.glob("*.whl")
    repaired: Path = build_wheel.repair(plain, tmp_path_factory.mktemp("repaired"))
    return repaired


def test_a_source_distribution_holds_what_a_build_takes(made: Path) -> None:
    (path,) = made.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "runtime" / "csrc").rglob("*") if p.suffix in (".cpp", ".h")}
    assert sources
    assert names >= sources | {"setup.py", "pyproject.toml", "README.md", "LICENSE", "runtime/_C.pyi"}


def test_a_wheel_holds_extensions_and_no_sources(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    folders = sorted(Path(name).parent.name for name in names if name.endswith(".so"))
    assert folders == [f"torch{MAJOR}_{MINOR}", f"torch{MAJOR}_{MINOR + 1}"]
    assert not any(name.endswith((".cpp", ".h", ".o")) for name in names)
    assert any(name.endswith("runtime/_C.pyi") for name in names)
    assert f"cp{sys.version_info[0]}{sys.version_info[1]}-manylinux" in wheel.name


def test_a_wheel_asks_for_the_torches_that_it_is_built_for(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    asked = [line.partition(": ")[2] for line in archive.read(name).decode().splitlines() if "Requires-Dist" in line]
    (torchs,) = (line for line in asked if line.startswith(("torch>", "torch<")))
    assert set(torchs.removeprefix("torch").split(",")) == {f">={MAJOR}.{MINOR}", f"<{MAJOR}.{MINOR + 2}"}
    assert any(line.startswith("jax") for line in asked)


def run(installed: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Runs a script where only that folder has a torchtpu."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    path = f"sys.path.insert(0, {str(installed)!r})"
    own = "sys.meta_path[:] = [finder for finder in sys.meta_path if 'Editable' not in repr(finder)]"
    text = f"import sys; {path}; {own}; import torch; {text}"
    return subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=False)


def test_what_a_wheel_installs_runs(wheel: Path, tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(tmp_path)]
    subprocess.run([*install, str(wheel)], check=True)
    done = run(tmp_path, "import torchtpu; print(torchtpu.__file__, (torch.ones(2, device='tpu') + 1).tolist())")
    assert done.stdout.split(maxsplit=1) == [str(tmp_path / "torchtpu" / "__init__.py"), "[2.0, 2.0]\n"], done.stderr


def test_another_torch_is_refused_with_what_helps(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    other = f"torch.__version__ = '{MAJOR}.{MINOR + 1}.0'; import torchtpu"
    assert f"was built against torch {MAJOR}.{MINOR}." in run(tmp_path, other).stderr
    unknown = f"torch.__version__ = '{MAJOR}.{MINOR + 2}.0'; import torchtpu"
    done = run(tmp_path, unknown)
    assert f"does not load with torch {MAJOR}.{MINOR + 2}.0" in done.stderr
    assert "Rebuild torchtpu" in done.stderr
