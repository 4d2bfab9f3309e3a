"""Runs the tests that libraries have themselves, on `tpu` and on the CPU, and says what fails on `tpu` alone.

`python tests/library_suites.py [WORD]...` gets the source distributions of the installed versions with pip, runs all
suites, or those in whose description a word is, and writes their lines of docs/ecosystem.md.
It needs the extra `test`, parameterized and torchdata.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

import ecosystem

HERE = Path(__file__).resolve().parent
NEEDS = ("accelerate", "transformers", "parameterized", "torchdata", "pytest_timeout", "pip")
COMMANDS = {"accelerate": "accelerate.commands.accelerate_cli", "torchrun": "torch.distributed.run"}

HEAD = """
`python tests/library_suites.py` runs these on `tpu` and on the CPU, and writes this section: files of the source
distributions of the installed versions, without a network, at most two minutes a test.
Of transformers these are the tests that it has for all models, slow ones included, on the small models of
`tests/transformers_models.py`: its source distribution has no others.
`pytest --full tests/test_library_suites.py` fails where a test fails on `tpu` alone and no cause below explains it;
without `--full` it runs the scripts that accelerate ships to test an installation.

| library | version | tests | devices | passed | skipped | failed on both | failed on tpu alone |
|---|---|---|---|---|---|---|---|
"""

FOOT = """
- *names other devices*: the test expects one of a list of devices, or calls `torch.cuda`.
- *PyTorch's, for CUDA and XPU*: PyTorch refuses it on any other device.
- *the hub*: models or data sets are to be downloaded.
"""

# What is said where a test fails, and why it is not torchtpu that is to change.
CAUSES = {
    "names other devices": r"'tpu' in \['cuda'|Torch not compiled with CUDA enabled",
    "PyTorch's, for CUDA and XPU": r"communication hook required CUDA",
    "the hub": r"We couldn.t connect to|OfflineMode|LocalEntryNotFoundError|Repo for model",
}
UNKNOWN = "cause unknown"


class Suite(NamedTuple):
    """One line of the table: a file of a library's tests."""

    library: str
    file: str
    devices: int = 1
    selected: str = ""


class Outcome(NamedTuple):
    """What became of a test, and what it said if it failed."""

    result: str
    said: str


SUITES = (
    *(
        Suite("accelerate", f"test_{name}.py")
        for name in (
            "accelerator", "big_modeling", "compile", "data_loader", "dataclasses", "grad_sync", "hooks",
            "kwargs_handlers", "memory_utils", "modeling_utils", "offload", "optimizer", "scheduler",
            "state_checkpointing", "utils",
        )
    ),
    *(
        Suite("accelerate", f"test_{name}.py", 2)
        for name in ("big_modeling", "grad_sync", "hooks", "kwargs_handlers", "modeling_utils", "multidevice")
    ),
    *(Suite("transformers", "test_models.py", 1, name) for name in ("Llama", "GPT2", "Bert", "ViT", "T5")),
    Suite("transformers", "test_models.py", 2, "offload or parallelism"),
)  # fmt: skip


def is_possible() -> bool:
    """Whether what the suites need is installed; whether the source distributions can be got, `fetch` finds out."""
    return all(importlib.util.find_spec(name) is not None for name in NEEDS)


def fetch(library: str, folder: Path) -> Path:
    """The unpacked source distribution of the installed version."""
    version = importlib.metadata.version(library)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-binary", ":all:", "--no-deps"]
    more = ["--no-build-isolation", "-d", str(folder), f"{library}=={version}"]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=600, check=False)
    archive = folder / f"{library}-{version}.tar.gz"
    if done.returncode or not archive.exists():
        raise OSError(f"no source distribution of {library} {version}: {done.stderr[-500:]}")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    source = folder / f"{library}-{version}"
    if library == "transformers":
        _add_models(source / "tests")
    return source


def _add_models(tests: Path) -> None:
    """Adds our models, and what the tests for all models import though it is not distributed, without a test."""
    shutil.copy(HERE / "transformers_models.py", tests / "test_models.py")
    (tests / "__init__.py").touch()
    for module, mixin in (
        ("exporters/test_export.py", "ExportTesterMixin"),
        ("generation/test_utils.py", "GenerationTesterMixin"),
    ):
        (tests / module).parent.mkdir(exist_ok=True)
        (tests / module).parent.joinpath("__init__.py").touch()
        (tests / module).write_text(f"class {mixin}: ...\n")


def environment(device: str, devices: int, folder: Path) -> dict[str, str]:
    """Of a process that runs a library's tests: offline, with the library's commands, in a home of its own."""
    commands = folder / "commands"
    commands.mkdir(exist_ok=True)
    for name, module in COMMANDS.items():
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        (commands / name).chmod(0o755)
    paths = [str(HERE / "site"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(device == "tpu")),
        "TORCHTPU_NUM_DEVICES": str(devices),
        "TRANSFORMERS_TEST_DEVICE": device,
    }


def outcomes(suite: Suite, source: Path, device: str) -> dict[str, Outcome]:
    """Runs a suite; every test's outcome, by its name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = folder / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "--tb=short"]
        options = ["--timeout=120", f"--junitxml={report}", "-k", suite.selected, str(Path("tests", suite.file))]
        done = subprocess.run(
            [*command, *options], cwd=source, capture_output=True, text=True, timeout=3600, check=False,
            env={
                **environment(device, suite.devices, folder),
                "RUN_SLOW": str(int(suite.library == "transformers")),  # accelerate's would download models
            },
        )  # fmt: skip
        if not report.exists():
            raise RuntimeError(f"{suite} on {device}: {done.stdout[-4000:]}{done.stderr[-4000:]}")
        return _read(report)


def _read(report: Path) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        problems = [*case.iter("failure"), *case.iter("error")]
        if problems:
            said = "\n".join(f"{problem.get('message')}\n{problem.text}" for problem in problems)
            found[name] = Outcome("failed", said)
        elif name not in found or found[name].result != "failed":  # a subtest of its may have
            found[name] = Outcome("skipped" if case.find("skipped") is not None else "passed", "")
    return found


def cause(said: str) -> str:
    """Why a test fails on `tpu` alone."""
    return next((name for name, pattern in CAUSES.items() if re.search(pattern, said)), UNKNOWN)


class Comparison(NamedTuple):
    """What a suite did on tpu, beside the CPU."""

    suite: Suite
    passed: int
    skipped: int
    failed_on_both: list[str]
    failed_alone: dict[str, str]
    said: dict[str, str]


def compare(suite: Suite, source: Path) -> Comparison:
    """Runs a suite on both."""
    found, expected = outcomes(suite, source, "tpu"), outcomes(suite, source, "cpu")
    count = Counter(outcome.result for outcome in found.values())
    failed = {name: outcome.said for name, outcome in found.items() if outcome.result == "failed"}
    on_both = [name for name in failed if name in expected and expected[name].result == "failed"]
    alone = {name: cause(said) for name, said in failed.items() if name not in on_both}
    return Comparison(suite, count["passed"], count["skipped"], on_both, alone, failed)


def comparisons(suites: Iterable[Suite], folder: Path) -> Iterator[Comparison]:
    """Runs suites of source distributions that lie in the folder, or are put there."""
    sources: dict[str, Path] = {}
    for suite in suites:
        if suite.library not in sources:
            source = folder / f"{suite.library}-{importlib.metadata.version(suite.library)}"
            sources[suite.library] = source if source.exists() else fetch(suite.library, folder)
        yield compare(suite, sources[suite.library])


def description(suite: Suite) -> str:
    """The first cells of a suite's line."""
    tests = f"{suite.file}, {suite.selected}" if suite.selected else suite.file
    return f"| {suite.library} | {importlib.metadata.version(suite.library)} | {tests} | {suite.devices} |"


def line(compared: Comparison) -> str:
    """Of the table."""
    causes = Counter(compared.failed_alone.values())
    alone = ", ".join(f"{count} ({name})" for name, count in causes.items()) or "0"
    counts = f"{compared.passed} | {compared.skipped} | {len(compared.failed_on_both)} | {alone}"
    return f"{description(compared.suite)} {counts} |\n"


def write(new: str) -> None:
    """Writes a line of the page, whose other lines stay."""
    lines = [*ecosystem.PAGE.read_text().partition(ecosystem.SUITES)[2].splitlines(keepends=True), new]
    begun = {suite: description(suite) for suite in SUITES}
    found = {suite: text for suite, start in begun.items() for text in lines if text.startswith(start)}
    ecosystem.write_suites(HEAD + "".join(found[suite] for suite in SUITES if suite in found) + FOOT)


if __name__ == "__main__":
    chosen = [suite for suite in SUITES if any(word in description(suite) for word in sys.argv[1:] or [""])]
    with tempfile.TemporaryDirectory() as temporary:
        for compared in comparisons(chosen, Path(temporary)):
            write(line(compared))
            print(line(compared), end="", flush=True)
            for name, why in compared.failed_alone.items():
                print(f"  {name}: {why}: {compared.said[name][:300]}", flush=True)
            for name in compared.failed_on_both:
                print(f"  {name}: on both", flush=True)
