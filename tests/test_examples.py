"""The example scripts, at a small size, have the losses of the CPU, and equal losses in two seeded runs."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SMALL = {
    "train_gpt.py": ["--context", "16", "--batch", "4", "--width", "32", "--layers", "2", "--sample", "0"],
    "cnn.py": ["--batch", "8", "--width", "8", "--workers", "2", "--lr", "0.02"],
    "lstm.py": ["--batch", "8", "--width", "32"],
}


def losses_of(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[float]:
    """Runs the script as `python script arguments` does, in this process."""
    file = tmp_path / "losses"
    command = [str(EXAMPLES / script), *SMALL[script], "--losses", str(file), *arguments]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(command[0], run_name="__main__")
    return [float(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("script", ["train_gpt.py", "lstm.py"])
def test_losses_over_50_steps_equal_the_cpu(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--steps", "50", "--dropout", "0"]
    expected = losses_of(script, tmp_path, monkeypatch, *arguments, "--device", "cpu")
    found = losses_of(script, tmp_path, monkeypatch, *arguments, "--device", "tpu")
    assert len(found) == 50
    assert found == pytest.approx(expected, rel=1e-4)


def test_losses_of_a_convolutional_network_equal_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In float32 so small a network is chaotic: another rounding switches a ReLU, and after 25 steps losses part by a
    # thousandth, on the CPU with other vector instructions, too.
    for dtype, steps, rel in ("float64", 50, 1e-9), ("float32", 15, 1e-5):
        arguments = ["--steps", "50", "--dropout", "0", "--dtype", dtype]
        expected = losses_of("cnn.py", tmp_path, monkeypatch, *arguments, "--device", "cpu")
        found = losses_of("cnn.py", tmp_path, monkeypatch, *arguments, "--device", "tpu")
        assert len(found) == 50
        assert found[:steps] == pytest.approx(expected[:steps], rel=rel)


@pytest.mark.parametrize("script", SMALL)
def test_a_seed_gives_the_same_bits_with_dropout(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--steps", "12", "--dropout", "0.3", "--seed", "5"]
    first = losses_of(script, tmp_path, monkeypatch, *arguments)
    assert losses_of(script, tmp_path, monkeypatch, *arguments) == first
    assert losses_of(script, tmp_path, monkeypatch, *arguments, "--seed", "6") != first


def test_the_main_job_ends_with_its_counts(tmp_path: Path) -> None:
    command = [sys.executable, "train_gpt.py", *SMALL["train_gpt.py"], "--steps", "30", "--sample", "20"]
    # A warm cache compiles nothing; in the first tier a region is many small programs.
    env = {**os.environ, "TORCHTPU_CACHE_DIR": str(tmp_path), "TORCHTPU_TIERS": "off"}
    done = subprocess.run(command, cwd=EXAMPLES, env=env, capture_output=True, text=True, check=True)
    *_, text_end, last = done.stdout.splitlines()
    assert text_end == "-" * 80
    counts = re.fullmatch(r"(\d+) ops recorded, (\d+) regions run, (\d+) programs compiled, (\d+) fallbacks", last)
    assert counts, last
    ops, regions, programs, fallbacks = map(int, counts.groups())
    assert ops > 30 * 50
    assert regions >= 30
    assert 0 < programs < 30
    assert fallbacks == 0
