"""Explanations of programs with a planted fault name its line and what to do about it."""

from __future__ import annotations

import html.parser
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchtpu
from torchtpu import config, metrics, startup
from torchtpu.diagnostics.session import Explanation
from torchtpu.runtime import _C


def line_of(function: Callable[..., Any], text: str) -> str:
    """file:line of the line of the function that holds the text."""
    lines, first = inspect.getsourcelines(function)
    found = [first + i for i, line in enumerate(lines) if text in line]
    assert len(found) == 1, text
    return f"{__file__}:{found[0]}"


def bake_a_number() -> None:
    x = torch.ones(8, device="tpu")
    torch.tpu.synchronize()
    for i in range(1, 4):
        x = x + torch.linalg.vector_norm(x, i + 0.5)
        torch.tpu.synchronize()


def feed_ragged_batches() -> None:
    weight = torch.ones(4, 4, device="tpu")
    for rows in (8, 8, 5):
        x = torch.ones(rows, 4).to("tpu")
        (x @ weight).relu().sum()
        torch.tpu.synchronize()


def read_in_a_loop() -> None:
    x = torch.ones(8, device="tpu")
    for _ in range(5):
        x = x + 1
        x.sum().item()


def fall_back() -> None:
    x = torch.ones(4, 4, device="tpu")
    with pytest.warns(UserWarning, match="no lowering"):
        torch.ops.torchtpu_test.unknown(x)


LIBRARY = torch.library.Library("torchtpu_test", "FRAGMENT")
LIBRARY.define("unknown(Tensor x) -> Tensor")
LIBRARY.impl("unknown", lambda x: x + 1, "CPU")


def explained(function: Callable[[], Any]) -> Explanation:
    with torchtpu.explain() as explanation:
        function()
    return explanation


def test_a_number_in_the_program_is_named() -> None:
    explanation = explained(bake_a_number)
    differences = [r["difference"] for r in explanation.data["recompilations"]]
    assert len(differences) == 2
    for found, (before, after) in zip(differences, (("1.5", "2.5"), ("2.5", "3.5")), strict=True):
        assert found["kind"] == "scalar"
        assert (found["op"], found["argument"]) == ("aten::linalg_vector_norm", "ord")
        assert (found["before"], found["after"]) == (before, after)
        assert found["line"] == line_of(bake_a_number, "vector_norm")
        assert "Keep it in a tensor" in found["advice"]


def test_a_ragged_batch_is_named() -> None:
    (row,) = explained(feed_ragged_batches).data["recompilations"]
    found = row["difference"]
    assert found["kind"] == "dimension"
    assert found["what"].startswith("dimension 0 of shape [5, 4]")
    assert (found["before"], found["after"]) == ("8", "5")
    assert found["line"] == line_of(feed_ragged_batches, "x @ weight")
    assert "drop_last" in found["advice"]


def test_a_read_in_a_loop_is_named() -> None:
    (row,) = [r for r in explained(read_in_a_loop).data["reads"] if r["bytes"]]
    assert row["line"] == line_of(read_in_a_loop, ".item()")
    assert row["count"] == 5
    assert row["waited_ms"] > 0
    assert "after the loop" in row["advice"]


def test_an_op_without_a_lowering_is_named() -> None:
    (row,) = explained(fall_back).data["fallbacks"]
    assert row["op"] == "torchtpu_test::unknown"
    assert row["line"] == line_of(fall_back, "unknown(x)")
    assert row["count"] == 1
    assert row["bytes"] == 64


def test_a_step_of_many_programs_is_one_step() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(4, 8, device="tpu")).square().mean().backward()
            optimizer.step()
            torch.tpu.synchronize()

    _C.forget_streams()
    with config.using(tiers="pieces"):
        data = explained(train).data
    assert data["launches"] > 10
    assert data["steps"]["unit"] == "optimizer.step"
    assert data["steps"]["count"] == 4  # between five
    _C.forget_streams()


def test_nothing_is_recompiled_where_nothing_changes() -> None:
    def steady() -> None:
        x = torch.ones(8, device="tpu")
        for i in range(4):
            x = x * (0.1 + i)
            torch.tpu.synchronize()

    explained(steady)
    assert explained(steady).data["recompilations"] == []


def test_a_training_loop_is_explained() -> None:
    model = nn.Linear(8, 8).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(4, 8, device="tpu")).square().mean().backward()
            optimizer.step()

    train()
    explanation = explained(train)
    data = explanation.data
    assert data["steps"]["unit"] == "optimizer.step"
    assert data["steps"]["count"] >= 4
    assert 0 <= data["steps"]["host_bound"] <= 1
    assert data["steps"]["host_bound"] + data["steps"]["device_bound"] == pytest.approx(1, abs=2e-3)
    assert data["launches"] == sum(r["launches"] for r in data["regions"]) >= 6
    assert any("optimizer.step" in cut for r in data["regions"] for cut in r["cut"])
    assert data["memory"][0]["bytes"] >= 8 * 8 * 4
    assert len(data["timeline"]["device"]) == len(data["timeline"]["launch"]) == data["launches"]
    for begin, end, _ in [bar for bars in data["timeline"].values() for bar in bars]:
        assert begin <= end
    assert json.loads(explanation.json()) == data
    assert "of the time the device worked" in str(explanation)


def test_nothing_listens_outside_of_the_block() -> None:
    explanation = explained(read_in_a_loop)
    before = json.dumps(explanation.data)
    read_in_a_loop()
    assert json.dumps(explanation.data) == before
    assert startup._lazy.observers == []


def test_an_error_in_the_block_is_the_users_own() -> None:
    def fail() -> None:
        raise ZeroDivisionError(torch.ones(3, device="tpu") + 1)

    with pytest.raises(ZeroDivisionError):
        explained(fail)
    torch.tpu.synchronize()


class Page(html.parser.HTMLParser):
    """Collects ids, what is loaded from elsewhere, and the script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.add(given.get("id") or "")
        self.loaded += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith("#")]


def test_the_page_needs_nothing_else() -> None:
    page = Page(explained(read_in_a_loop).html())
    assert page.loaded == []
    assert {"timeline", "map", "recompilations", "fallbacks", "reads", "regions", "builds", "memory"} <= page.ids


@pytest.mark.full
def test_off_it_costs_the_recorder_no_instruction() -> None:
    command = [sys.executable, Path(__file__).parents[1] / "benchmarks" / "explain_cost.py", "--instructions"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    never, once = done.stdout.splitlines()[-1].split("|")[2:4]
    assert int(never) > 100
    assert int(once) == pytest.approx(int(never), rel=0.01)


def test_a_command_is_explained(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys, torch\nx = torch.ones(4, device='tpu')\nprint((x + 1).sum().item(), sys.argv[1:])\n")
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "torchtpu.cli", "explain", f"--save={report}", "--", sys.executable, str(script), "-x"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "8.0 ['-x']" in done.stdout
    (read,) = [r for r in json.loads(report.read_text())["reads"] if r["bytes"]]
    assert read["line"] == f"{script}:3"
    assert "torchtpu.explain:" in done.stdout


def test_explaining_costs_no_launch_and_no_program() -> None:
    read_in_a_loop()
    torch.tpu.synchronize()
    metrics.reset()
    explained(read_in_a_loop)
    counts = metrics.snapshot()
    assert counts["programs_compiled"] == counts["trie_misses"] == 0


def transform_what_grows() -> None:
    for rows in range(3, 8):
        torch.fft.fft(torch.ones(rows, 6, device="tpu"), dim=0).abs().sum().item()


def test_regions_that_are_compiled_for_each_size_are_named_with_line_and_cause() -> None:
    transform_what_grows()
    with torchtpu.explain() as explanation:
        transform_what_grows()
    assert explanation.data["not_padded"] == [], "their programs were there"
    with torchtpu.explain() as explanation:
        for rows in range(9, 12):
            torch.fft.fft(torch.ones(rows, 7, device="tpu"), dim=0).abs().mean().item()
    rows_of_report = explanation.data["not_padded"]
    assert sum(row["count"] for row in rows_of_report) == 1
    assert "a Fourier transform of changing length" in rows_of_report[0]["cause"]
    assert "test_explain.py" in rows_of_report[0]["line"]
    assert "Fourier transform of changing length" in str(explanation)
    assert "Regions compiled for each of their sizes" in explanation.html()
