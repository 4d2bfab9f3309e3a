"""Programs that are compiled at leisure are compiled in a process of their own, and fall back to this one."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch
from engine_support import make_engine, plan_of, text_of
from record_support import Record

from torchtpu.runtime.compile.plan_cache import Plan
from torchtpu.runtime.device import compile_process
from torchtpu.runtime.engine import Engine

PATIENCE = 60
LARGE = 1000  # ops, as its note says

pytestmark = pytest.mark.compiles


class Wisher:
    """For whom a program is compiled at leisure."""


@pytest.fixture
def engine() -> Any:
    made = make_engine(knobs={"num_compile_threads": 1})
    yield made
    made.close()


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that were started."""
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            started.append(self)

    monkeypatch.setattr(compile_process.subprocess, "Popen", Noted)
    return started


def plan(engine: Engine, size: int) -> Plan:
    with Record() as record:
        y = record.input(torch.zeros(size)) + 1
    return plan_of(text_of(engine, record.program(y)))


def run(engine: Engine, loaded: Any, size: int) -> list[float]:
    array = engine.client.upload(torch.arange(size, dtype=torch.float32), 0)
    (made,) = loaded.executable.execute([array])
    return torch.from_dlpack(made).tolist()


def test_another_process_compiles_what_this_one_launches(
    engine: Engine, children: list[subprocess.Popen[bytes]]
) -> None:
    wisher = Wisher()
    loaded = engine.compiler.submit(plan(engine, 5), 0, {"ops": LARGE, "line": "test.py:1"}, wisher=wisher).result(
        PATIENCE
    )
    assert [child.returncode for child in children] == [0]
    assert loaded.source == "compile"
    torch.testing.assert_close(torch.tensor(run(engine, loaded, 5)), torch.arange(5) + 1.0)


def test_small_programs_and_those_that_are_needed_are_compiled_here(
    engine: Engine, children: list[subprocess.Popen[bytes]]
) -> None:
    wisher = Wisher()
    engine.compiler.submit(plan(engine, 3), 0, {"ops": 2, "line": "test.py:1"}, wisher=wisher).result(PATIENCE)
    engine.compiler.submit(plan(engine, 4), 0, {"ops": LARGE, "line": "test.py:1"}).result(PATIENCE)
    assert children == []


def test_what_nobody_wants_any_more_is_stopped(
    children: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_process, "_POLL_SECONDS", 1e-3)
    with pytest.raises(CancelledError):
        compile_process.compile_apart("", 0, 1, b"", lambda: len(children) == 0)
    assert [child.poll() is not None for child in children] == [True]


def test_a_program_that_is_wished_for_no_longer_is_counted_as_abandoned(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, wishers = threading.Event(), [Wisher()]

    def compile_apart(text: str, device: int, num_devices: int, options: bytes, is_wanted: Any) -> bytes:
        begun.set()
        wishers.clear()
        assert not is_wanted()
        raise CancelledError

    monkeypatch.setattr("torchtpu.runtime.device.client.compile_apart", compile_apart)
    flight = engine.compiler.submit(plan(engine, 3), 0, {"ops": LARGE, "line": "test.py:1"}, wisher=wishers[0])
    assert begun.wait(PATIENCE)
    with pytest.raises(CancelledError):
        flight.result(PATIENCE)
    assert engine.counters.compiles_abandoned == 1
    engine.compiler.submit(plan(engine, 3), 0, {"ops": LARGE, "line": "test.py:1"}).result(PATIENCE)


def test_who_comes_to_need_what_is_being_stopped_has_it_compiled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed, wishers, note = [], [Wisher()], {"ops": LARGE, "line": "test.py:1"}

    def compile_apart(*_: Any) -> bytes:
        wishers.clear()
        needed.append(engine.compiler.submit(plan(engine, 3), 0, note))
        raise CancelledError

    monkeypatch.setattr("torchtpu.runtime.device.client.compile_apart", compile_apart)
    flight = engine.compiler.submit(plan(engine, 3), 0, note, wisher=wishers[0])
    assert flight.result(PATIENCE).source == "compile"
    assert needed == [flight]
    assert engine.counters.compiles_abandoned == 0


@pytest.mark.parametrize("program", ["", "/no/such/python", "/bin/false"])
def test_where_no_process_compiles_this_one_does(engine: Engine, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(sys, "executable", program)
    wisher = Wisher()
    flight = engine.compiler.submit(plan(engine, 6), 0, {"ops": LARGE, "line": "test.py:1"}, wisher=wisher)
    assert flight.result(PATIENCE).source == "compile"
