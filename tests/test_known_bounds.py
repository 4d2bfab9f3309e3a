"""Padded ops between other bounds than they were traced for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine_support
import pytest
import torch
from record_support import Record

from torchtpu import startup
from torchtpu.compiler_cache import DirectoryStore
from torchtpu.runtime.engine import Engine
from torchtpu.runtime.ir.program import Lifted, Op, PaddedExtent, Padding
from torchtpu.runtime.lowering.fragments import Fragments

Bounds = tuple[tuple[int, int, int], ...]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[], Engine]]:
    """Engines with one cache."""
    made = []

    def make() -> Engine:
        lowerings = startup.lowerings()._replace(templates=None)
        made.append(engine_support.make_engine(store=DirectoryStore(tmp_path), lowerings=lowerings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def product(bounds: Bounds) -> Op:
    """A product of so many rows."""
    with Record() as record:
        x, w = record.input(torch.ones(128, 8)), record.input(torch.ones(8, 3))
        torch.mm(x, w)
    (op,) = record.ops
    rows = [PaddedExtent(("a", size), ("a", size)) for size in (8, 3)]
    padding = Padding((Lifted("i", 0),), bounds, (rows[0], None), (rows[1],))
    return dataclasses.replace(op, settings="highest", padding=padding)


def traces(fragments: Fragments, *bounds: Bounds) -> list[int]:
    """How many ops are traced for products between these bounds, one after the other."""
    found = []
    for each in bounds:
        before = fragments._counters.fragment_traces
        fragments.find([product(each)])
        found.append(fragments._counters.fragment_traces - before)
    return found


def test_what_is_traced_serves_narrower_bounds_and_what_comes_next_is_traced_for_both(
    make: Callable[[], Engine],
) -> None:
    asked: list[Bounds] = [((2, 127, 128),), ((5, 120, 128),), ((3, 128, 128),), ((2, 128, 128),), ((4, 128, 128),)]
    asked.append(((2, 127, 256),))  # as long in memory as none before
    engine = make()
    assert traces(engine.fragments, *asked) == [1, 0, 1, 0, 0, 1]
    texts = {engine.fragments.find([product(each)])[0][0].text for each in asked[:-1]}
    assert len(texts) == 1, "bounds are not part of this one"
    again = make()
    assert traces(again.fragments, *asked) == [0] * 6, "each is in the cache as it was asked for"


def test_what_cannot_be_traced_for_both_is_traced_for_its_own_bounds(
    make: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    fragments = make().fragments
    trace, asked = fragments._tracer.trace, list[Bounds]()

    def refusing(ops: Any, watched: str = "off") -> Any:
        for op, _ in ops:
            ((least, most, _),) = op.padding.bounds
            asked.append(op.padding.bounds)
            if least < 5 and most > 9:
                raise ValueError("InconclusiveDimensionOperation")
        return trace(ops, watched)

    monkeypatch.setattr(fragments._tracer, "trace", refusing)
    assert traces(fragments, ((2, 9, 128),), ((5, 128, 128),), ((6, 99, 128),), ((1, 3, 128),)) == [1, 1, 0, 1]
    assert asked == [((2, 9, 128),), ((2, 128, 128),), ((5, 128, 128),), ((1, 3, 128),)]
