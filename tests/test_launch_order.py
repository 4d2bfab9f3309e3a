"""In: regions that are being compiled and others behind them. Out: what overtakes, what does not, what stays exact."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from torchtpu import metrics, startup
from torchtpu.runtime import _C

PATIENCE = 60
SLOW = "stablehlo.rsqrt"  # what is held is a program with this op
_dimensions = itertools.count()


class Held:
    """Programs that have the slow op are compiled once they are released, or fail then."""

    def __init__(self) -> None:
        self.has_begun, self.released = threading.Event(), threading.Event()
        self.error: Exception | None = None


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, in_one_tier: None) -> Iterator[Held]:
    found, compiler = Held(), startup.engine().compiler
    real = compiler._load_or_compile

    def build(plan: Any, *rest: Any) -> Any:
        if SLOW in plan.text():
            found.has_begun.set()
            assert found.released.wait(PATIENCE)
            if found.error is not None:
                raise found.error
        return real(plan, *rest)

    monkeypatch.setattr(compiler, "_load_or_compile", build)
    yield found
    found.released.set()


def ready(*values: float) -> torch.Tensor:
    x = torch.tensor(values, device="tpu")
    x.cpu()
    return x


def slow_region(x: torch.Tensor) -> torch.Tensor:
    """One that no test before has had: what is compiled is known for as long as anything holds it."""
    made = x.view(*[1] * next(_dimensions), -1).rsqrt().flatten() + 1
    _C.cut("test")
    return made


class Reader:
    """A read in a thread of its own."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self.result: Any = None
        self._thread = threading.Thread(target=self._run, args=(read,))
        self._thread.start()

    def _run(self, read: Callable[[], Any]) -> None:
        try:
            self.result = read()
        except Exception as error:
            self.result = error

    def join(self) -> Any:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return self.result


def assert_waits(reader: Reader) -> None:
    """The launcher has looked at all that is queued, and the read has not returned."""
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        assert reader.result is None
        time.sleep(0.01)


def test_a_read_of_something_independent_returns_while_an_earlier_region_is_being_compiled(held: Held) -> None:
    x, y = ready(4.0, 16.0), ready(1.0, 2.0)
    slow = slow_region(x)
    assert (y + x).tolist() == [5.0, 18.0]
    assert repr(y * 3) == "tensor([3., 6.], device='tpu:0')"
    assert metrics.snapshot()["launched_ahead"] == 2
    assert metrics.snapshot()["queue"] == 3
    held.released.set()
    assert slow.tolist() == [1.5, 1.25]


def test_all_that_makes_the_value_overtakes_and_nothing_else(held: Held) -> None:
    x, y = ready(4.0, 16.0), ready(1.0, 2.0)
    slow = slow_region(x)
    first = y + 1
    _C.cut("test")
    other = y * 7
    _C.cut("test")
    second = first * 2
    assert second.tolist() == [4.0, 6.0]
    assert metrics.snapshot()["launched_ahead"] == 2
    held.released.set()
    assert (slow.tolist(), other.tolist()) == ([1.5, 1.25], [7.0, 14.0])


def test_what_depends_on_the_region_waits_for_it(held: Held) -> None:
    x, y = ready(4.0, 16.0), ready(1.0, 2.0)
    slow = slow_region(x)
    reader = Reader((y + slow).tolist)
    assert_waits(reader)
    held.released.set()
    assert reader.join() == [2.5, 3.25]
    assert metrics.snapshot()["launched_ahead"] == 0


def test_a_value_that_dies_is_not_taken_from_a_region_that_still_reads_it(held: Held) -> None:
    x = ready(4.0, 16.0)
    slow = slow_region(x)
    y = x + 1
    del x  # the next region takes its memory
    _C.cut("test")
    reader = Reader(y.tolist)
    assert_waits(reader)
    held.released.set()
    assert reader.join() == [5.0, 17.0]
    assert slow.tolist() == [1.5, 1.25]


def test_a_write_waits_and_is_undone_where_an_earlier_region_fails(held: Held) -> None:
    held.error = ValueError("no such code")
    x, y = ready(4.0, 16.0), ready(1.0, 2.0)
    slow = slow_region(x)
    before = y + 1
    assert before.tolist() == [2.0, 3.0]
    y.add_(1)
    _C.cut("test")
    reader = Reader(y.tolist)
    assert_waits(reader)
    held.released.set()
    assert "no such code" in str(reader.join())
    with pytest.raises(RuntimeError, match="no such code"):
        slow.tolist()
    assert y.tolist() == [1.0, 2.0]  # as it was before the op that failed
    assert before.tolist() == [2.0, 3.0]  # a read has seen it


def test_random_numbers_that_overtook_a_failed_region_are_drawn_again(held: Held) -> None:
    held.error = ValueError("no such code")
    torch.manual_seed(3)
    expected = torch.rand(3, device="tpu").tolist()
    torch.manual_seed(3)
    slow = slow_region(ready(4.0, 16.0))
    assert torch.rand(3, device="tpu").tolist() == expected
    assert metrics.snapshot()["launched_ahead"] == 1
    held.released.set()
    with pytest.raises(RuntimeError, match="no such code"):
        slow.tolist()
    assert torch.rand(3, device="tpu").tolist() == expected


def test_what_fails_before_its_turn_fails_in_its_turn(held: Held) -> None:
    x, table = ready(4.0, 16.0), ready(1.0, 2.0)
    index = torch.tensor([7], device="tpu")
    index.cpu()
    slow = slow_region(x)
    wrong = table[index]
    _C.cut("test")
    reader = Reader(wrong.tolist)
    assert_waits(reader)
    held.released.set()
    assert isinstance(reader.join(), IndexError)
    assert slow.tolist() == [1.5, 1.25]
    assert metrics.snapshot()["launched_ahead"] == 0
    with pytest.raises(IndexError):  # this thread's own
        (x + 1).tolist()


def test_what_fails_with_an_input_that_dies_fails_with_its_own_error(held: Held) -> None:
    x, table = ready(4.0, 16.0), ready(1.0, 2.0).double()
    index = ready(7.0).long()
    (table.cpu(), index.cpu())
    slow = slow_region(x)
    wrong = table[index]
    del index  # the region takes its memory
    _C.cut("test")
    reader = Reader(wrong.tolist)
    assert_waits(reader)
    held.released.set()
    assert isinstance(reader.join(), IndexError)
    assert slow.tolist() == [1.5, 1.25]
    with pytest.raises(IndexError):
        (x + 1).tolist()


def test_regions_behind_one_that_failed_wait_for_no_compile(held: Held) -> None:
    x, table = ready(4.0, 16.0), ready(1.0, 2.0)
    index = torch.tensor([7], device="tpu")
    wrong = table[index]
    _C.cut("test")
    slow = slow_region(x)
    assert held.has_begun.wait(PATIENCE)
    with pytest.raises(IndexError):
        wrong.tolist()  # a deadlock where the region behind it is compiled first
    with pytest.raises(IndexError):
        slow.tolist()
    assert x.tolist() == [4.0, 16.0]


def test_an_event_is_reached_after_all_that_was_recorded_before_it(held: Held) -> None:
    y = ready(1.0, 2.0)
    slow = slow_region(ready(4.0, 16.0))
    event = _C.record_marker(0)
    assert (y + 1).tolist() == [2.0, 3.0]
    assert _C.marker_time(event) < 0
    held.released.set()
    _C.wait_marker(event)
    assert _C.marker_time(event) > 0
    assert slow.tolist() == [1.5, 1.25]
