"""What libraries' own tests pass on the CPU passes on tpu.

The long form runs files of the libraries' source distributions; the short one the scripts that accelerate ships to
test an installation. They need the extra `models`, which `test` has; the long form parameterized and torchdata too.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import library_suites
import pytest

needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="not installed: accelerate (the extra `models`)"
)


def run(folder: Path, *command: str, devices: int = 1) -> str:
    """What a process on tpu prints, which runs no op on the CPU."""
    environment = {**library_suites.environment("tpu", devices, folder), "TORCHTPU_FALLBACK": "error"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@needs_accelerate
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("script", "last"),
    [
        ("test_script", "Test reinstantiated state"),
        ("test_ops", "sending tensors across devices"),
        ("test_sync", "with optimizer and scheduler"),
    ],
)
def test_the_scripts_with_which_accelerate_tests_an_installation_pass(script: str, last: str, tmp_path: Path) -> None:
    code = f"""
from accelerate import PartialState
from accelerate.test_utils.scripts import {script}
{script}.main()
print(PartialState())
"""
    printed = run(tmp_path, "-c", code)
    assert last in printed
    assert "Device: tpu" in printed


@needs_accelerate
@pytest.mark.timeout(600)
def test_a_script_with_which_accelerate_tests_an_installation_passes_in_two_ranks(tmp_path: Path) -> None:
    launch = ("-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes=2")
    printed = run(tmp_path, *launch, "-m", "accelerate.test_utils.scripts.test_ops", devices=2)
    assert "sending tensors across devices" in printed
    assert "Num processes: 2" in printed


@needs_accelerate
@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_long_script_passes_in_two_ranks_but_for_its_check_of_cudas_generators(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from accelerate.test_utils.scripts import test_script\n"
        "test_script.rng_sync_check = lambda: test_script.synchronize_rng_states(['torch'])\n"
        "test_script.main()\n"
    )
    launch = ("-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes=2")
    printed = run(tmp_path, *launch, str(script), devices=2)
    assert "Num processes: 2" in printed
    assert "Training yielded the same results" in printed
    assert "Test reinstantiated state" in printed


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_what_fails_on_tpu_alone_in_the_libraries_own_tests_has_a_known_cause(tmp_path: Path) -> None:
    if not library_suites.is_possible():
        pytest.skip(f"not installed: one of {', '.join(library_suites.NEEDS)}")
    try:
        for library in {suite.library for suite in library_suites.SUITES}:
            library_suites.fetch(library, tmp_path)
    except OSError as error:
        pytest.skip(str(error))
    unknown = {}
    for compared in library_suites.comparisons(library_suites.SUITES, tmp_path):
        assert compared.passed, compared.suite
        for name, why in compared.failed_alone.items():
            if why == library_suites.UNKNOWN:
                unknown[name] = compared.said[name][-2000:]
    assert unknown == {}
