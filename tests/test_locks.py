"""Threads may use each other's values, storages of any size, and plans that the trie gave up; nothing is torn."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from reference_engine import ReferenceEngine, reference_engine
from thread_support import run_all
from torch import Tensor

from torchtpu import config, metrics
from torchtpu.runtime import _C

GIB = 1 << 30


# ---- threads


def test_values_of_a_thread_that_records_are_read_by_others() -> None:
    """Each read ends a region, or a speculative tail, of the recorder that another thread is in."""
    published: list[tuple[int, Tensor]] = [(0, torch.zeros(3, device="tpu"))]
    is_done = threading.Event()

    def record() -> None:
        try:
            x = torch.zeros(3, device="tpu")
            for lap in range(1, 601):
                for _ in range(5):
                    x = x + 0.25
                x.sub_(0.25)
                published.append((lap, x.clone()))
                if lap % 50 == 0:
                    assert x.tolist() == [float(lap)] * 3
        finally:
            is_done.set()

    def read() -> None:
        seen = 0
        while not is_done.is_set():
            lap, x = published[-1]
            assert x.tolist() == [float(lap)] * 3
            seen += 1
        assert seen > 0

    run_all(record, read, read, read)


def test_threads_that_draw_from_one_generator_never_share_a_draw() -> None:
    generator = torch.Generator("tpu").manual_seed(3)
    drawn: list[list[float]] = []

    def draw() -> None:
        drawn.extend(torch.rand(2, device="tpu", generator=generator).tolist() for _ in range(40))

    run_all(draw, draw, lambda: [generator.get_state() for _ in range(400)])
    assert len(drawn) == len({tuple(pair) for pair in drawn}) == 80


def test_an_uploaded_value_that_python_has_seen_may_die_in_any_op() -> None:
    """The host copy of an upload has a Python object: whoever lets go of it last takes the GIL."""

    def overwrite() -> None:
        for _ in range(300):
            x = torch.ones(64).tpu()
            y = x + 1
            torch.tpu.synchronize()
            x.copy_(y)
            del y
            x.zero_()

    run_all(overwrite, overwrite)


# ---- addresses


def range_of(storage: torch.UntypedStorage) -> tuple[int, int]:
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def assert_apart(tensors: list[Tensor]) -> None:
    ranges = sorted(range_of(t.untyped_storage()) for t in tensors)
    for (_, end), (begin, _) in itertools.pairwise(ranges):
        assert end <= begin, (hex(end), hex(begin))
    for begin, end in ranges:  # no page table of x86-64 or aarch64 leads a process there
        assert begin >> 55 == (end - 1 if end > begin else begin) >> 55 == 0b11


def test_storages_of_any_size_are_apart_from_each_other_and_from_memory() -> None:
    sizes = [0, 1, 511, 512, 513, 4096, GIB, 64 * GIB, 64 * GIB + 1, 100 * GIB, 1024 * GIB]
    choose = random.Random(0)
    alive: list[Tensor] = []
    for _ in range(400):
        if len(alive) > 60:
            del alive[choose.randrange(len(alive))]
        alive.append(torch.empty(choose.choice(sizes), dtype=torch.uint8, device="tpu"))
    assert_apart(alive)


def test_a_storage_that_outgrows_its_address_gets_another() -> None:
    tensors = [torch.zeros(100, dtype=torch.uint8, device="tpu") for _ in range(3)]
    tensors[0].resize_(1 << 16)
    tensors[1].untyped_storage().resize_(1 << 20)
    torch.add(torch.ones(5000, device="tpu"), 1, out=tensors[2].view(torch.float32)[:0])
    assert_apart(tensors)
    before = tensors[1].untyped_storage().data_ptr()
    tensors[1].untyped_storage().resize_(0)
    tensors[1].untyped_storage().resize_(1 << 20)
    assert tensors[1].untyped_storage().data_ptr() == before
    assert tensors[0][:100].tolist() == [0] * 100


def test_what_no_address_range_can_hold_has_none() -> None:
    x = torch.empty(1 << 60, dtype=torch.uint8, device="tpu")
    with pytest.raises(RuntimeError, match="data pointer"):
        x.untyped_storage().data_ptr()
    assert x.numel() == 1 << 60


def test_addresses_are_used_again() -> None:
    def address() -> int:
        return torch.empty(100 * GIB, dtype=torch.uint8, device="tpu").data_ptr()

    assert len({address() for _ in range(100)}) == 1


# ---- plans


@pytest.fixture
def engine() -> Iterator[ReferenceEngine]:
    with reference_engine() as engine:
        yield engine


def test_a_plan_that_was_given_up_keeps_its_ops(engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that failed to build is dropped at the next visit; whoever still asks what it was is told."""
    failed: list[Any] = []
    plan = engine.plan

    def fail_once(new: Any) -> None:
        if failed:
            plan(new)
        else:
            failed.append(new)
            new.failed(RuntimeError("not this time"))

    x = torch.ones(2, device="tpu")
    torch.tpu.synchronize()
    monkeypatch.setattr(engine, "plan", fail_once)
    with pytest.raises(RuntimeError, match="not this time"):
        (x * 2 + 3).sqrt().tolist()
    names, run = [op.name for op in failed[0].program.ops], failed[0].run
    assert (x * 2 + 3).sqrt().tolist() == pytest.approx([5**0.5] * 2)  # the same ops, another plan
    with config.using(max_trie_nodes=1, max_programs=1):
        for _ in range(3):
            assert (x - 1).tolist() == [0, 0]
            (x / 2).tolist()
        assert metrics.snapshot()["trie_nodes"] >= len(names)
        assert [op.name for op in failed[0].program.ops] == names
        assert failed[0].run == run
        failed[:] = [None]
        for _ in range(3):
            (x - 1).tolist()
            (x / 2).tolist()
        assert metrics.snapshot()["trie_nodes"] < len(names)
    _C.forget_streams()
