"""Hot programs are compiled with other options, and what is faster by a planted clock stays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_support import KNOBS, Plan, Work, make_engine
from record_support import Record

from torchtpu.compiler_cache import DirectoryStore, Store
from torchtpu.runtime import engine as engines
from torchtpu.runtime.compile import variants
from torchtpu.runtime.compile.tiers import SWEEPS, Sweep
from torchtpu.runtime.device.client import Client, Options, key_of
from torchtpu.runtime.execute import autotuner

VARIANTS: dict[str, Options] = {
    "narrow": (("xla_cpu_prefer_vector_width", 128),),
    "unknown": (("xla_cpu_of_another_version", True),),
    "small": (("xla_backend_optimization_level", 1),),
}


def name_of(options: Options) -> str:
    return " ".join(name for name, own in VARIANTS.items() if set(own) <= set(options)) or "usual"


class Clock:
    """Stands for the time: a launch takes what `seconds` says of the options that its program was compiled with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.seconds = {"usual": 1.0, "narrow": 1.0, "small": 1.0}
        self.launched: list[str] = []
        self.compiled: list[str] = []
        self._names: dict[int, str] = {}
        self._kept: list[Any] = []
        monkeypatch.setattr(Client, "compile", self._named(Client.compile, self.compiled))
        monkeypatch.setattr(Client, "deserialize", self._named(Client.deserialize, []))
        monkeypatch.setattr(Client, "execute", self._timed(Client.execute))
        monkeypatch.setattr(autotuner, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def _named(self, make: Any, made: list[str]) -> Any:
        def act(client: Client, content: Any, device: int, homes: Any = (), more: Options = ()) -> Any:
            made.append(name_of(more))
            executable = make(client, content, device, homes, more)
            self._kept.append(executable)  # no other gets its address
            self._names[id(executable)] = name_of(more)
            return executable

        return act

    def _timed(self, execute: Any) -> Any:
        def act(client: Client, executable: Any, *arguments: Any) -> Any:
            self.launched.append(self._names[id(executable)])
            self.now += self.seconds[self.launched[-1]]
            return execute(executable, *arguments)

        return act


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(engines, "SWEEPS", {"cpu": Sweep(VARIANTS, worth=1e-9, loading=1.0)})
    monkeypatch.setattr(autotuner, "_FIRST", 3)
    return Clock(monkeypatch)


class Loop:
    """One region that is launched again and again, as in a process of its own."""

    def __init__(self, clock: Clock, store: Store | None = None, **knobs: Any) -> None:
        self.knobs = {**KNOBS, "sweep": True, **knobs}
        self.engine = make_engine(knob=self.knobs.__getitem__, **({"store": store} if store else {}))
        self._clock = clock
        with Record() as record:
            x, w = record.input(torch.randn(4, 3)), record.input(torch.randn(5, 3))
            y = torch.relu(torch.mm(x, w.t()))
        self._inputs, self._expected = record.inputs, record.expected(y)
        plan = Plan(record.program(y))
        self.engine.plan(plan)
        self._executable = plan.wait()

    def launch(self, count: int) -> list[str]:
        """What each of so many launches was compiled with; all compute the same, and nothing is compiled meanwhile."""
        del self._clock.launched[:]
        for _ in range(count):
            work: Any = Work(self._executable, [self.engine.upload(tensor.clone(), 0) for tensor in self._inputs])
            self.engine.launch(work)
            assert work.error is None, work.error
            torch.testing.assert_close([self.engine.download(array) for array in work.outputs], self._expected)
            wait(self.engine.compiler.outstanding())
            while self.engine.compiler.describe():
                time.sleep(1e-3)
            candidate = getattr(self._executable, "_candidate", None)  # which hears of its programs after that
            wait([candidate] if candidate else [], timeout=60)
        return list(self._clock.launched)


@pytest.fixture
def loop(clock: Clock) -> Iterator[Callable[..., Loop]]:
    made: list[Loop] = []

    def make(*arguments: Any, **knobs: Any) -> Loop:
        made.append(Loop(clock, *arguments, **knobs))
        return made[-1]

    yield make
    for each in made:
        each.engine.close()


def test_what_is_faster_stays_and_is_built_on(clock: Clock, loop: Callable[..., Loop]) -> None:
    clock.seconds |= {"narrow": 0.9, "small": 0.5, "narrow small": 0.8}
    hot = loop()
    hot.launch(80)
    assert clock.compiled == ["usual", "narrow", "narrow unknown", "narrow small"]
    assert hot.launch(3) == ["narrow small"] * 3
    counters = hot.engine.counters
    assert (counters.programs_swept, counters.variants_kept, counters.programs_compiled) == (2, 2, 3)


def test_forms_take_turns(clock: Clock, loop: Callable[..., Loop]) -> None:
    turns = loop().launch(3 + 8 + 1 + 16)
    assert turns[:12] == ["usual"] * 12
    assert turns[12:] == ["narrow", "usual"] * 8


def test_what_was_faster_by_chance_goes(clock: Clock, loop: Callable[..., Loop]) -> None:
    hot = loop()
    hot.launch(12)
    for seconds in (0.1, 2.0) * 4:  # the least time of the rival is the smaller one
        clock.seconds["narrow"] = seconds
        assert hot.launch(2) == ["narrow", "usual"]
    assert hot.engine.counters.programs_swept == 1
    assert hot.launch(1) == ["usual"]


def test_what_is_hardly_faster_goes(clock: Clock, loop: Callable[..., Loop]) -> None:
    clock.seconds |= {"narrow": 0.98, "small": 1.5}
    hot = loop()
    hot.launch(80)
    assert clock.compiled == ["usual", "narrow", "unknown", "small"]
    assert hot.launch(3) == ["usual"] * 3
    assert (hot.engine.counters.programs_swept, hot.engine.counters.variants_kept) == (2, 0)
    assert len(hot.engine.compiler.digests()) == 1  # what lost is forgotten


def test_options_that_the_compiler_does_not_know_are_tried_once(clock: Clock, loop: Callable[..., Loop]) -> None:
    hot = loop()
    hot.launch(80)
    with Record() as record:
        x = record.input(torch.ones(3))
        y = torch.relu(x)
    other = Plan(record.program(y))
    hot.engine.plan(other)
    autotuner = other.wait()
    for _ in range(80):
        hot.engine.launch(Work(autotuner, [hot.engine.upload(torch.ones(3), 0)]))
        wait(hot.engine.compiler.outstanding())
    assert clock.compiled == ["usual", "narrow", "unknown", "small", "usual", "narrow", "small"]


def test_a_variant_that_does_not_compile_disturbs_nothing(
    clock: Clock, loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = Client.compile

    def compile_(client: Client, text: str, device: int, homes: Any = (), more: Options = ()) -> Any:
        if more:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return genuine(client, text, device, homes, more)

    monkeypatch.setattr(Client, "compile", compile_)
    hot = loop()
    assert hot.launch(80) == ["usual"] * 80
    assert hot.engine.counters.programs_swept == 0


@pytest.mark.parametrize(
    "knobs", [{"policy": "block"}, {"policy": "frozen"}, {"deterministic": True}, {"sweep": False}], ids=str
)
def test_nothing_is_swept_where_it_must_not_be(
    clock: Clock, loop: Callable[..., Loop], tmp_path: Path, knobs: dict[str, Any]
) -> None:
    loop(DirectoryStore(tmp_path)).launch(1)  # the usual form is there
    assert loop(DirectoryStore(tmp_path), **knobs).launch(80) == ["usual"] * 80
    assert clock.compiled == ["usual"]


def test_a_cold_region_is_not_swept(clock: Clock, loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "SWEEPS", {"cpu": Sweep(VARIANTS, worth=1e9, loading=1.0)})
    assert loop().launch(80) == ["usual"] * 80
    assert clock.compiled == ["usual"]


def test_each_variant_has_to_be_worth_what_was_spent() -> None:
    sweep = Sweep({}, worth=10.0, loading=1.0)
    assert [sweep.is_due(1001.0, 100.0, tried) for tried in range(2)] == [True, False]
    assert not sweep.is_due(0.0, 100.0, 0)


def test_the_next_process_starts_with_what_was_faster(clock: Clock, loop: Callable[..., Loop], tmp_path: Path) -> None:
    clock.seconds |= {"small": 0.5}
    first = loop(DirectoryStore(tmp_path))
    first.launch(80)
    del clock.compiled[:]
    next_one = loop(DirectoryStore(tmp_path))
    assert next_one.launch(80) == ["small"] * 80
    assert clock.compiled == []
    assert next_one.engine.counters.cache_hits_disk == 1
    assert next_one.engine.counters.programs_swept == 0
    assert loop(DirectoryStore(tmp_path), policy="frozen").launch(2) == ["small"] * 2


def test_the_next_process_does_not_sweep_again_in_vain(clock: Clock, loop: Callable[..., Loop], tmp_path: Path) -> None:
    loop(DirectoryStore(tmp_path)).launch(80)
    del clock.compiled[:]
    assert loop(DirectoryStore(tmp_path)).launch(80) == ["usual"] * 80
    assert clock.compiled == []


def test_deterministic_mode_is_not_told_what_was_faster(
    clock: Clock, loop: Callable[..., Loop], tmp_path: Path
) -> None:
    clock.seconds |= {"small": 0.5}
    loop(DirectoryStore(tmp_path)).launch(80)
    assert loop(DirectoryStore(tmp_path), deterministic=True).launch(2) == ["usual"] * 2
    late = loop(DirectoryStore(tmp_path))
    assert late.launch(2) == ["small"] * 2
    late.knobs["deterministic"] = True
    assert late.launch(2) == ["usual"] * 2
    late.knobs["deterministic"] = False
    assert late.launch(2) == ["small"] * 2


def test_frozen_runs_the_usual_form_where_the_faster_one_is_gone(
    clock: Clock, loop: Callable[..., Loop], tmp_path: Path
) -> None:
    clock.seconds |= {"small": 0.5}
    store = DirectoryStore(tmp_path)
    loop(store).launch(80)
    (faster,) = [
        file
        for file in store.entries()
        if b"xla_backend_optimization_level".hex() in str(store.find(file.kind, file.digest))
    ]
    faster.path.unlink()
    assert loop(DirectoryStore(tmp_path), policy="frozen").launch(2) == ["usual"] * 2


def test_options_are_part_of_the_key() -> None:
    client = Client("cpu")
    keys = {key_of("program", client, (), more).digest for more in [(), *VARIANTS.values()]}
    assert len(keys) == 1 + len(VARIANTS)


def test_options_in_the_table_are_known() -> None:
    """On the platform that is here."""
    client = Client("cpu")
    text = (
        "func.func @main() -> tensor<f32> { %0 = stablehlo.constant dense<1.0> : tensor<f32> return %0 : tensor<f32> }"
    )
    for options in SWEEPS["cpu"].options.values():
        client.compile(text, 0, (), options)


class Machine:
    """Stands for the clock and for what the process has computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.computed = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now, process_time=lambda: self.computed)
        monkeypatch.setattr(variants, "time", clock)

    def pass_time(self, seconds: float, computed: float) -> None:
        self.now += seconds
        self.computed += computed


def test_candidates_take_a_twentieth_of_what_the_process_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    time = variants.SpareTime(cores=8)
    assert time.has_room_for(50_000.0)
    assert not time.has_room_for(50_001.0)
    time.spend(30_000.0)
    assert time.has_room_for(20_000.0)
    assert not time.has_room_for(20_001.0)


def test_with_few_cores_candidates_wait_until_the_process_has_been_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    time = variants.SpareTime(cores=2)
    for _ in range(5):
        machine.pass_time(2.0, computed=1.9)
        assert not time.has_room_for(1.0)
    machine.pass_time(2.0, computed=0.1)
    assert [time.has_room_for(1.0) for _ in range(2)] == [True, True]
    machine.pass_time(2.0, computed=1.9)
    assert not time.has_room_for(1.0)


def test_hot_programs_are_compared_in_spare_time_unless_asked_for(clock: Clock, loop: Callable[..., Loop]) -> None:
    clock.seconds |= {"narrow": 0.5}
    hot = loop(compare="spare")
    hot.engine._variants.spare_time = variants.SpareTime(cores=1)
    assert hot.launch(80) == ["usual"] * 80
    assert clock.compiled == ["usual"]
