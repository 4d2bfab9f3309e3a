"""The worker pool: in come programs that somebody waits for and others, out goes what is compiled first, or never."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from engine_support import make_engine, plan_of, text_of
from record_support import Record

from torchtpu.runtime.compile.plan_cache import Plan
from torchtpu.runtime.engine import Engine

PATIENCE = 60
LARGE = 10_000  # ops, as its note says


class Wisher:
    """For whom a program is compiled at leisure."""


class Pool:
    """A compiler of one worker, and of programs that are done when they are told."""

    def __init__(self) -> None:
        self.engine: Engine = make_engine(knobs={"num_compile_threads": 1})
        self.built: list[str] = []
        self._begun: dict[str, threading.Event] = {}
        self._released: dict[str, threading.Event] = {}
        self._real = self.engine.compiler._load_or_compile
        self.engine.compiler._load_or_compile = self._build  # type: ignore[method-assign]

    def plan(self, number: int) -> Plan:
        with Record() as record:
            y = record.input(torch.zeros(number)) + 1
        return plan_of(text_of(self.engine, record.program(y)))

    def hold(self, plan: Plan) -> None:
        self._begun[plan.key.digest], self._released[plan.key.digest] = threading.Event(), threading.Event()

    def wait_for_begin(self, plan: Plan) -> None:
        assert self._begun[plan.key.digest].wait(PATIENCE)

    def release(self, plan: Plan) -> None:
        self._released[plan.key.digest].set()

    def submit(self, plan: Plan, ops: int, wisher: object = None) -> Future[Any]:
        return self.engine.compiler.submit(plan, 0, {"ops": ops, "line": "test.py:1"}, wisher=wisher)

    def close(self) -> None:
        for released in self._released.values():
            released.set()
        self.engine.close()

    def _build(self, plan: Plan, *rest: Any) -> Any:
        digest = plan.key.digest
        if digest in self._begun:
            self._begun[digest].set()
            assert self._released[digest].wait(PATIENCE)
        self.built.append(digest)
        return self._real(plan, *rest)


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


def test_a_small_program_that_comes_with_a_large_one_is_compiled_beside_it(pool: Pool) -> None:
    large, small = pool.plan(3), pool.plan(4)
    pool.hold(large)
    pool.submit(pool.plan(5), 1).result(PATIENCE)  # the worker is there, and idle
    with pool.engine.compiler._lock:
        first, second = pool.submit(large, LARGE), pool.submit(small, 1)
    second.result(PATIENCE)
    assert not first.done()


def test_what_nobody_wants_any_more_is_not_compiled_until_somebody_asks_again(pool: Pool) -> None:
    held, abandoned, wanted = pool.plan(3), pool.plan(4), pool.plan(5)
    pool.hold(held)
    pool.submit(held, LARGE)
    pool.wait_for_begin(held)
    gone, others, stays = Wisher(), Wisher(), Wisher()
    dropped = [pool.submit(abandoned, LARGE, gone), pool.submit(abandoned, LARGE, others)]
    kept = [pool.submit(wanted, LARGE, gone), pool.submit(wanted, LARGE, stays)]
    del gone, others
    pool.release(held)
    kept[1].result(PATIENCE)
    assert kept[0] is kept[1]
    assert dropped[0].cancelled()
    assert pool.built == [plan.key.digest for plan in (held, wanted)]
    assert pool.engine.counters.compiles_abandoned == 1
    pool.submit(abandoned, LARGE).result(PATIENCE)


def test_a_wish_that_somebody_comes_to_need_is_compiled_though_who_wished_is_gone(pool: Pool) -> None:
    held, wish = pool.plan(3), pool.plan(4)
    pool.hold(held)
    pool.submit(held, LARGE)
    pool.wait_for_begin(held)
    wisher = Wisher()
    wished = pool.submit(wish, LARGE, wisher)
    assert pool.submit(wish, LARGE) is wished
    del wisher
    pool.release(held)
    wished.result(PATIENCE)
    assert pool.engine.counters.compiles_abandoned == 0
