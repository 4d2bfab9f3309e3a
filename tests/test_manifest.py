"""Recorded programs are the same when read from a manifest, and journals survive a kill."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from program_samples import OP, PROGRAM

from torchtpu.runtime.ir import manifest
from torchtpu.runtime.ir.manifest import (
    Journal,
    ManifestError,
    ProgramOutcome,
    RecordedProgram,
    decode_recorded,
    read_lines,
    write_lines,
)


def test_a_program_is_what_it_was(tmp_path: Path) -> None:
    recorded = RecordedProgram(PROGRAM, is_flat=True, guessed_since="train.py:1")
    journal = Journal(tmp_path)
    journal.program(PROGRAM)
    (line,) = list(read_journal(tmp_path))
    assert decode_recorded(line["program"]).program == PROGRAM
    assert math.copysign(1, decode_recorded(line["program"]).program.ops[0].args[4]) == -1
    write_lines(tmp_path / "manifest", [{"identity": "", "program": manifest._encode_recorded(recorded)}], {})
    (read,) = list(read_lines(tmp_path / "manifest"))
    assert decode_recorded(read["program"]) == recorded
    assert read["identity"] == recorded.identity


def read_journal(folder: Path) -> list[dict[str, manifest.Any]]:
    (path,) = folder.glob("*.jsonl")
    return [manifest.json.loads(line) for line in path.read_text().splitlines()]


def test_identity_is_what_is_compiled() -> None:
    recorded = RecordedProgram(PROGRAM)
    moved = replace(PROGRAM, line="model.py:1", ops=(replace(OP, line="model.py:2"),))
    assert RecordedProgram(moved, guessed_since="x").identity == recorded.identity
    for other in (
        RecordedProgram(replace(PROGRAM, ops=(replace(OP, settings="medium"),))),
        RecordedProgram(PROGRAM, is_flat=True),
        RecordedProgram(replace(PROGRAM, outputs=(1,))),
        RecordedProgram(replace(PROGRAM, ops=(replace(OP, name="sub_.Tensor"),))),
    ):
        assert other.identity != recorded.identity


def test_a_journal_tells_each_program_once_and_every_outcome(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    identity = journal.program(PROGRAM)
    assert journal.program(PROGRAM) == identity
    journal.outcome(ProgramOutcome(identity, "compiled", "abc", 5.0))
    journal.guessed("train.py:4")
    journal.guessed("train.py:5")
    journal.program(replace(PROGRAM, outputs=(1,)))
    journal.note(fallbacks={"aten::x": 1})
    kinds = [next(iter(set(line) - {"identity"})) for line in read_journal(tmp_path)]
    assert kinds == ["program", "outcome", "guessed", "program", "facts"]
    assert read_journal(tmp_path)[3]["program"]["guessed_since"] == "train.py:4"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}\n",
        "[]\n",
        '{"format": "torchtpu manifest 0"}\n',
        '{"format": "torchtpu manifest 2"}\n{}\n',
        '{"format": ' + "[" * 100_000,
        '{"format": "torchtpu manifest 2"}\n' + "[" * 100_000,
        '{"format": "torchtpu manifest 2"}\n{"program": Infinity}\n',
        '{"format": "torchtpu manifest 2"}\n{"program": {"program": {"Program": []}}}\n',
        '{"format": "torchtpu manifest 2"}\n{"program": {"program": {"dtype": "manual_seed"}}}\n',
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest").write_text(text)
    with pytest.raises(ManifestError):
        list(read_lines(tmp_path / "manifest"))


def altered(**changes: manifest.Any) -> manifest.Any:
    """The line of a program, with other values in it; a name is where one stands: `ops_0_0` is the first op's name."""
    line = manifest._encode_recorded(RecordedProgram(PROGRAM))
    for where, value in changes.items():
        at: manifest.Any = [line["program"]["Program"]]
        *path, last = where.split("_")
        inside = at[0]
        for name in path:
            inside = inside[int(name)]
            inside = next(iter(inside.values())) if isinstance(inside, dict) else inside
        inside[int(last)] = value
    return line


@pytest.mark.parametrize(
    "changes",
    [
        {"5": 2**40},
        {"5": float("inf")},
        {"4": True},
        {"2": [7]},
        {"3": [1]},
        {"1_0": {"Base": [[2**40, 2**40], {"dtype": "float32"}]}},
        {"1_0": {"Base": [[-1], {"dtype": "float32"}]}},
        {"1_0": {"Base": [[2, 3], {"dtype": "manual_seed"}]}},
        {"1_0": {"Base": [[3, 2], {"dtype": "float32"}]}},
        {
            "0_0_1_0": {
                "Operand": [5, [3, 2], [1, 3], 0, {"dtype": "float32"}, {"Base": [[2, 3], {"dtype": "float32"}]}]
            }
        },
        {"0_0_1_3": 2**70},
        {"0_0_1_11": {"device": "nowhere:99"}},
        {"0_0_1_12": {"Scalar": [{"Lifted": ["f", 3]}, {"dtype": "float64"}, True]}},
        {"0_0_2_0_0": 1},
        {"0_0_2_0_1": [2, 2]},
        {"0_0_3_0_0": 1},
    ],
    ids=str,
)
def test_a_program_that_nothing_records_is_refused(changes: dict[str, manifest.Any]) -> None:
    assert decode_recorded(altered()).program == PROGRAM
    with pytest.raises(ValueError, match=r"\w"):
        decode_recorded(altered(**changes))
