"""New programs are compiled quickly, and well once launches have paid for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, wait
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from engine_support import KNOBS, Plan, Work, make_engine, plan_of, text_of
from record_support import Record
from torch.nn import functional as F

from torchtpu import config, metrics, startup
from torchtpu.compiler_cache import DirectoryStore
from torchtpu.runtime import _C
from torchtpu.runtime import engine as engines
from torchtpu.runtime.compile.tiers import FIRST_TIERS
from torchtpu.runtime.device.client import Client, Options
from torchtpu.runtime.partition import clusters
from torchtpu.runtime.partition.clusters import COSTS

FIRST = FIRST_TIERS["cpu"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tier of each program that is compiled."""
    made: list[str] = []
    compile_ = Client.compile

    def noted(client: Client, text: str, device: int, homes: Any = (), more: Options = ()) -> Any:
        made.append("first" if more == FIRST.options else "usual")
        return compile_(client, text, device, homes, more)

    monkeypatch.setattr(Client, "compile", noted)
    return made


class Loop:
    """One region that is launched again and again, as in a process of its own."""

    def __init__(self, directory: Path, layers: int = 1, **knobs: Any) -> None:
        self.knobs = {**KNOBS, "tiers": "on", **knobs}
        self.engine = make_engine(knob=self.knobs.__getitem__, store=DirectoryStore(directory))
        with Record() as record:
            y, w = record.input(torch.randn(4, 3)), record.input(torch.randn(3, 3))
            for _ in range(layers):
                y = torch.relu(torch.mm(y, w.t()))
        self._inputs, self._expected = record.inputs, record.expected(y)
        self._program = record.program(y)
        self.plan_again()

    def plan_again(self) -> None:
        """As where the region was forgotten."""
        self.plan = Plan(self._program)
        self.engine.plan(self.plan)

    def run(self) -> None:
        work: Any = Work(self.plan.wait(), [self.engine.upload(tensor.clone(), 0) for tensor in self._inputs])
        self.engine.launch(work)
        assert work.error is None, work.error
        torch.testing.assert_close([self.engine.download(array) for array in work.outputs], self._expected)

    def launch(self, count: int) -> None:
        for _ in range(count):
            self.run()
            wait(self.engine.compiler.outstanding())


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Callable[..., Loop]]:
    made: list[Loop] = []

    def make(**knobs: Any) -> Loop:
        made.append(Loop(tmp_path, **knobs))
        return made[-1]

    yield make
    for each in made:
        each.engine.close()


def paid_after(monkeypatch: pytest.MonkeyPatch, launches: float) -> None:
    """A program of two ops has then paid for its usual form."""
    tier = FIRST._replace(program_ms=2e-3 * launches, kilobyte_ms=0.0, op_us=1.0, element_ns=0.0)
    monkeypatch.setattr(engines, "FIRST_TIERS", {"cpu": tier})


def test_launches_pay_for_the_usual_form(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str], loop: Callable[..., Loop]
) -> None:
    paid_after(monkeypatch, 5)
    hot = loop()
    hot.launch(4)
    assert compiled == ["first"]
    hot.launch(1)
    assert compiled == ["first", "usual"]
    hot.launch(20)
    assert compiled == ["first", "usual"]
    counters = hot.engine.counters
    assert (counters.regions_in_first_tier, counters.regions_promoted) == (1, 1)


def test_what_has_to_be_deterministic_is_compiled_with_options_for_it(
    monkeypatch: pytest.MonkeyPatch, loop: Callable[..., Loop]
) -> None:
    options, made = (("xla_cpu_enable_fast_math", False),), []
    monkeypatch.setattr(engines, "DETERMINISTIC", {"cpu": options})
    compile_ = Client.compile

    def noted(client: Client, text: str, device: int, homes: Any = (), more: Options = ()) -> Any:
        made.append(more)
        return compile_(client, text, device, homes, more)

    monkeypatch.setattr(Client, "compile", noted)
    loop(deterministic=True).launch(2)
    assert made == [options]
    loop(tiers="off").launch(2)
    assert made == [options, ()], "another program, with another key"
    loop(deterministic=True).launch(1)
    assert made == [options, ()], "found on disk"


def test_what_is_repeated_is_paid_for_once(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str], loop: Callable[..., Loop]
) -> None:
    small = COSTS["cpu"]._replace(least_lines=1, least_saving_ms=0.0, most_carried=1.0)
    monkeypatch.setattr(clusters, "COSTS", {"cpu": small})
    paid_after(monkeypatch, 24)
    hot = loop(layers=12)
    hot.launch(1)
    assert compiled == ["first"]
    hot.launch(1)  # a twelfth of 24
    assert compiled == ["first", "usual"]


def test_what_one_launch_pays_for_is_compiled_well_at_once(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str], loop: Callable[..., Loop]
) -> None:
    paid_after(monkeypatch, 1)
    loop().launch(3)
    assert compiled == ["usual"]


def test_another_process_begins_with_the_best_that_is_there(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str], loop: Callable[..., Loop]
) -> None:
    paid_after(monkeypatch, 5)
    loop().launch(2)
    again = loop()
    again.launch(2)
    assert compiled == ["first"]
    assert again.engine.counters.cache_hits_disk == 1
    again.launch(10)
    assert compiled == ["first", "usual"]
    third = loop()
    third.launch(20)
    assert compiled == ["first", "usual"]
    assert third.engine.counters.regions_in_first_tier == 0


@pytest.mark.parametrize("knobs", [{"policy": "block"}, {"deterministic": True}, {"tiers": "off"}])
def test_where_nothing_may_stand_in_for_the_usual_form_there_is_one_tier(
    compiled: list[str], loop: Callable[..., Loop], knobs: dict[str, Any]
) -> None:
    loop(**knobs).launch(3)
    assert compiled == ["usual"]


def test_in_deterministic_mode_the_first_tier_steps_aside(compiled: list[str], loop: Callable[..., Loop]) -> None:
    begun = loop()
    begun.launch(2)
    begun.knobs["deterministic"] = True
    begun.launch(2)
    assert compiled == ["first", "usual"]
    begun.knobs["deterministic"] = False
    begun.launch(2)
    assert begun.engine.counters.regions_promoted == 1


def test_a_region_begins_in_the_tier_that_it_would_have_begun_in_before_another_was_promoted(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str], loop: Callable[..., Loop]
) -> None:
    paid_after(monkeypatch, 3)
    begun = loop()
    begun.launch(1)
    begun.plan_again()
    begun.launch(5)
    assert begun.engine.counters.regions_promoted == 1
    begun.plan_again()  # what is compiled well by now is a matter of the clock
    begun.launch(1)
    assert begun.engine.counters.regions_in_first_tier == 3
    assert compiled == ["first", "usual"]


def test_a_region_that_is_forgotten_is_not_compiled_well(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str], loop: Callable[..., Loop]
) -> None:
    paid_after(monkeypatch, 3)
    begun, released = loop(), threading.Event()
    begun.launch(2)
    compiler = begun.engine.compiler
    real = compiler._load_or_compile

    def build(plan: Any, *rest: Any) -> Any:
        assert released.wait(60)
        return real(plan, *rest)

    monkeypatch.setattr(compiler, "_load_or_compile", build)
    with Record() as record:
        z = record.input(torch.zeros(3)) * 2
    held = compiler.submit(plan_of(text_of(begun.engine, record.program(z))), 0)
    begun.run()  # pays
    (wished,) = set(compiler.outstanding()) - {held}
    begun.plan.executable = None
    released.set()
    held.result(60)
    with pytest.raises(CancelledError):
        wished.result(60)
    assert begun.engine.counters.compiles_abandoned == 1
    assert compiled == ["first", "usual"]  # of which this held up the other


def test_a_frozen_process_runs_either_tier(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str], loop: Callable[..., Loop]
) -> None:
    loop().launch(1)
    loop(policy="frozen").launch(3)
    assert compiled == ["first"]


@pytest.mark.bailouts("variants")
def test_a_usual_form_that_cannot_be_compiled_leaves_the_first_tier_in_use(
    monkeypatch: pytest.MonkeyPatch, loop: Callable[..., Loop]
) -> None:
    paid_after(monkeypatch, 3)
    compile_ = Client.compile

    def refuse(client: Client, text: str, device: int, homes: Any = (), more: Options = ()) -> Any:
        if not more:
            raise RuntimeError("no such luck")
        return compile_(client, text, device, homes, more)

    monkeypatch.setattr(Client, "compile", refuse)
    hot = loop()
    hot.launch(10)
    assert hot.engine.counters.regions_promoted == 0
    assert hot.engine.counters.bailouts.counts()


def test_large_programs_pay_sooner_than_small_ones() -> None:
    def launches(size: int) -> float:
        with Record() as record:
            y = torch.relu(record.input(torch.zeros(size)))
        program = record.program(y)
        return FIRST.price_ms(1000) / FIRST.loss_ms(program)

    assert launches(1 << 24) < 1
    assert launches(64) > 100


IMAGES = 2, 8, 32, 32
WORK: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], float]] = {
    "convolution": (lambda x, w: F.conv2d(x, w, padding=1), (IMAGES, (8, 8, 3, 3)), 1),
    "depthwise": (lambda x, w: F.conv2d(x, w, padding=3, groups=8), (IMAGES, (8, 1, 7, 7)), 49),
    "of small images": (lambda x, w: F.conv2d(x, w, padding=1), ((2, 8, 4, 4), (8, 8, 3, 3)), 27),
    "in three dimensions": (lambda x, w: F.conv3d(x, w, padding=1), ((1, 2, 4, 8, 8), (2, 2, 3, 3, 3)), 15),
    "of a line": (lambda x, w: F.conv1d(x, w, groups=4), ((2, 4, 90), (4, 1, 5)), 5),
    "pooling": (lambda x: F.max_pool2d(x, 3, 2), (IMAGES,), 27),
    "rows": (lambda x: x.argmax(1), ((64, 512),), 4 * 512),
    "both of a row": (lambda x: x.max(1), ((64, 512),), 5 * 512 / 2),
    "pointwise": (torch.tanh, ((64, 512),), 1),
}


@pytest.mark.parametrize("name", WORK)
def test_what_ops_compute_is_counted(name: str) -> None:
    function, shapes, times = WORK[name]
    with Record() as record:
        made = function(*[record.input(torch.zeros(shape)) for shape in shapes])
    program = record.program(*(made if isinstance(made, tuple) else (made,)))
    (op,) = program.ops
    assert FIRST.computed(op) == times * FIRST_TIERS["tpu"].computed(op)


def test_of_an_image_that_is_a_run_of_an_array_no_dimension_is_asked() -> None:
    with Record() as record:
        y = F.conv2d(record.input(torch.zeros(2, 8, 4, 4)), record.input(torch.zeros(8, 8, 3, 3)), padding=1)
    (op,) = record.program(y).ops
    flat = replace(op, args=(replace(op.args[0], sizes=(256,), strides=(1,)), *op.args[1:]))
    assert FIRST.computed(flat) == FIRST_TIERS["tpu"].computed(op)


def test_what_gradients_compute_is_counted() -> None:
    _C.forget_streams()
    x = torch.randn(2, 16, 9, 13).to("tpu").requires_grad_()
    weight = torch.randn(16, 1, 5, 5).to("tpu").requires_grad_()
    lost: list[float] = []
    genuine = type(FIRST).loss_ms
    with mock.patch.object(
        type(FIRST), "loss_ms", lambda self, program: lost.append(genuine(self, program)) or lost[-1]
    ):
        torch.autograd.grad(F.max_pool2d(F.conv2d(x, weight, groups=16), 2).square().sum(), [x, weight])[0].cpu()
    assert max(lost) > 4 * 25 * x.numel() * FIRST.element_ns * 1e-6
    _C.forget_streams()


@pytest.mark.parametrize("size", [12, 15])
def test_a_window_that_changes_is_not_counted(size: int) -> None:
    for height in (9, 11, size):
        x = torch.randn(2, 3, height, 8)
        found = F.max_pool2d(x.to("tpu"), (height, 2)).cpu()
        torch.testing.assert_close(found, F.max_pool2d(x, (height, 2)))


def test_regions_are_divided_once_they_have_cost_twice_that() -> None:
    whole = FIRST.work([100])
    assert FIRST.is_divided([10] * 4, whole, 0.0)
    assert not FIRST.is_divided([10] * 8, whole, 0.0)
    assert not FIRST.is_divided([10] * 8, whole, whole)
    assert FIRST.is_divided([10] * 8, whole, 2 * whole)
    assert not FIRST.is_divided([1] * 60, whole, whole)  # a program costs more than an op


def test_pieces_of_large_arrays_are_compiled_well_from_the_beginning(compiled: list[str]) -> None:
    _C.forget_streams()
    with config.using(tiers="pieces"):
        for size, tier in ((11, "first"), (1 << 20, "usual")):
            x = torch.zeros(size, device="tpu")
            compiled.clear()
            for i in range(4):
                x = torch.softmax(x * (i + 5), 0) + x.relu()
            x[:4].tolist()
            assert tier in compiled
            assert size < 100 or compiled.count("usual") > compiled.count("first")
    _C.forget_streams()


def test_a_loop_ends_in_its_usual_form_and_computes_the_same() -> None:
    def run(device: str) -> torch.Tensor:
        x = torch.linspace(-1, 1, 400_000, device=device)
        for i in range(40):
            x = torch.tanh(x * 1.1) + 0.1
            x[0].item()
            if i == 20 and device == "tpu":
                wait(startup.engine().compiler.outstanding())
        return x.cpu()

    torch.testing.assert_close(run("tpu"), run("cpu"))
    assert metrics.snapshot()["regions_promoted"] >= 1


def test_deterministic_bits_do_not_hang_on_what_was_compiled_before() -> None:
    def run() -> torch.Tensor:
        x = torch.linspace(-1, 1, 1000, device="tpu")
        for _ in range(3):
            x = torch.tanh(x * 1.1) + x.std()
        return x.cpu()

    with config.using(deterministic=True):
        cold = run()
    run()
    with config.using(deterministic=True):
        assert torch.equal(run(), cold)


def test_what_another_region_was_promoted_to_is_taken_at_the_first_launch(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str], loop: Callable[..., Loop]
) -> None:
    """As laps of a loop are that are read after ever other numbers of them."""
    paid_after(monkeypatch, 3)
    begun = loop()
    begun.launch(6)
    begun.plan_again()
    begun.launch(1)
    assert begun.engine.counters.regions_promoted == 2
    assert begun.engine.counters.regions_in_first_tier == 2
    assert compiled.count("usual") == 1
