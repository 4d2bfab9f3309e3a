"""Random programs, another handful with each commit: what the device reads differs nowhere from what the CPU reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import program_fuzzer
import pytest
import torch
from program_fuzzer import Author, Program, difference, shrunk
from reference_engine import reference_engine

from torchtpu import config
from torchtpu.runtime import _C

PROGRAMS = 10
OF_THE_RECORDER = 100
MANY = 2000


@pytest.fixture(autouse=True)
def fallbacks_are_silent() -> Iterator[None]:
    with config.using(fallback="silent"):
        yield


def check(first: int, count: int, **options: bool) -> None:
    findings = [str(finding) for finding in program_fuzzer.search(first, count, **options) if finding is not None]
    assert not findings, "\n\n".join(findings)


def test_random_programs_read_what_the_cpu_reads(rotation: int) -> None:
    check(rotation * 1000, PROGRAMS)


def test_random_programs_are_recorded_right(rotation: int) -> None:
    with reference_engine():
        check(rotation * 1000 + 500, OF_THE_RECORDER, is_for_reference=True)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("fresh_dynamo")
def test_many_random_programs_read_what_the_cpu_reads(rotation: int) -> None:
    check(rotation * 1000, MANY, may_compile=True)


def test_the_same_seed_is_the_same_program() -> None:
    assert [Author(seed).program() for seed in range(20)] == [Author(seed).program() for seed in range(20)]


def test_a_wrong_read_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    body = ("x = data((n, 4), torch.float64, 1)", "y = x * 2", "read(y.sum())", "z = x.cumsum(0)", "read(z, 'z')")
    program = Program(0, ("s = data((3,), torch.float64, 0)",), body, (3, 4))
    assert difference(program) == ""
    read = program_fuzzer.Session.read

    def wrong(self: program_fuzzer.Session, value: torch.Tensor, label: str = "") -> object:
        return read(self, value + 1 if label == "z" and self.device == "tpu" else value, label)

    monkeypatch.setattr(program_fuzzer.Session, "read", wrong)
    assert difference(program).startswith("z: ")
    small = shrunk(program)
    assert small.before == ()
    assert small.body == (body[0], body[3], body[4])
    assert len(small.sizes) == 1


def test_strides_aliasing_and_errors_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(*body: str) -> Program:
        return Program(0, (), body, (4,))

    def differs(text: str) -> str:
        return difference(program("x = data((n, 3), torch.float32, 1)", text.replace("?", "device == 'tpu'")))

    assert "strides" in differs("read(x.t() if ? else x.t().contiguous())")
    assert differs("y = x[0] if ? else x[0].clone(); shared(dict(x=x, y=y))").startswith("shared")
    assert differs("x.view(2, 6) if ? else x.view(5, 5)").startswith("error")
    assert differs("refused(lambda: x[9 if ? else 0])").startswith("refused")
    assert differs("read(x); ? and read(x)").startswith("reads")
    assert differs("read(x.double() if ? else x)").startswith("read")
    with contextlib.suppress(RuntimeError):
        torch.tpu.synchronize()
    _C.forget_streams()
