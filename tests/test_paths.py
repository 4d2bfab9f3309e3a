"""A script in a path that is not UTF-8 runs, and its lines are named as Python's tracebacks name them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

CODE = """
    import warnings

    import torch

    import torchtpu

    warnings.simplefilter("ignore")
    model = torch.nn.Linear(4, 2).tpu()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        loss = model(torch.ones(3, 4).tpu()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
    torch.ones(2, 2, device="tpu").geqrf()  # on the CPU
    try:
        torch.arange(3.0).tpu()[torch.tensor([7]).tpu()].tolist()
    except IndexError:
        print("done")
"""


def test_a_script_in_a_path_that_is_not_utf8_runs_twice_and_its_lines_are_named(tmp_path: Path) -> None:
    script = os.path.join(os.fsencode(tmp_path), b"caf\xe9", b"train.py")
    os.mkdir(os.path.dirname(script))
    with open(script, "w") as file:
        file.write(textwrap.dedent(CODE))
    environment = {"TORCHTPU_LOG": "launch,cluster", "TORCHTPU_CACHE_DIR": str(tmp_path / "cache")}
    for _ in range(2):  # the second run finds its plans on disk
        done = subprocess.run(
            [sys.executable, script], env={**os.environ, **environment}, capture_output=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode(errors="replace")[-4000:]
        assert done.stdout == b"done\n"
        assert rb"caf\udce9/train.py:" in done.stderr
        assert b"Traceback" not in done.stderr, done.stderr.decode(errors="replace")[-4000:]
