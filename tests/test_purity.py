"""Which programs there are hangs on the ops alone: in come runs of one script at different paces, out go their keys."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from script import run_python

SCRIPT = Path(__file__).parent / "purity_script.py"


@pytest.mark.timeout(900)
def test_runs_of_one_script_at_different_paces_ask_for_the_same_programs(tmp_path: Path, rotation: int) -> None:
    runs = []
    for number in range(3):
        environment = {**os.environ, "TORCHTPU_CACHE_DIR": str(tmp_path / str(number))}
        done = run_python(SCRIPT, str(3 * rotation + number), environment=environment)
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    for run in runs:
        assert run["counts"]["regions_in_pieces"] > 0
        assert run["counts"]["regions_promoted"] > 0
    keys = [set(run["keys"]) for run in runs]
    assert keys[0] == keys[1] == keys[2], [len(own ^ keys[0]) for own in keys]
