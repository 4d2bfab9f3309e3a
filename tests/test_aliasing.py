"""Random programs of views, writes, reads and deaths have the CPU's geometry, versions, values and errors.

Under the reference engine a difference is the recorder's; under XLA it may be the lowering's too.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import aliasing_steps
import pytest
from aliasing_programs import (
    DTYPES,
    SHAPES,
    Choices,
    Difference,
    Program,
    Step,
    World,
    actions,
    check,
    in_storage,
    same_values,
)
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from reference_engine import ReferenceEngine, SlowEngine, reference_engine

from torchtpu import config, metrics
from torchtpu.runtime import _C

THREADS = 4
BATCH = 500  # programs drawn from one seed: what hypothesis remembers of them goes when they are done
SHARDS = 8  # of the long versions

# What the CPU warns of (resized outputs, complex to real) is not the subject here.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]


def programs(length: int) -> st.SearchStrategy[list[Step]]:
    """Two new tensors, then up to `length` steps, all kinds equally likely; one seed stands for a whole program."""
    makes = [actions().index(a) for a in (aliasing_steps.make, aliasing_steps.make_on_device)]

    def expand(seed: int, count: int) -> list[Step]:
        source = random.Random(seed)
        kinds = [*source.choices(makes, k=2), *source.choices(range(len(actions())), k=count)]
        return [Step(kind, *(source.randrange(2**16) for _ in range(3))) for kind in kinds]

    return st.builds(expand, st.integers(0, 2**32 - 1), st.integers(length // 2, length))


@contextlib.contextmanager
def engine_of(name: str) -> Iterator[ReferenceEngine | None]:
    if name == "slow":
        slow = SlowEngine(1)
        try:
            with reference_engine(slow):
                yield slow
        finally:
            slow.close()
    else:
        with reference_engine() if name == "reference" else contextlib.nullcontext() as engine:
            yield engine


@contextlib.contextmanager
def old_objects_ignored() -> Iterator[None]:
    """The programs collect garbage time and again: all that has been imported need not be searched each time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class HurriedProgram(Program):
    """Ends regions and reads what they make between its steps."""

    def step(self, step: Step) -> None:
        super().step(step)
        choices = Choices(step.seed + 1)
        if choices.below(2):
            _C.cut("test")
        if self.cpu.tensors and choices.below(2):
            number = choices.below(len(self.cpu.tensors))
            x, y = self.cpu.tensors[number], self.tpu.tensors[number]
            if in_storage(x):
                check(f"tensor {number}, read early", x, y.cpu(), same_values)


def run_in_one_thread(kind: type[Program], count: int, length: int, mixes_kinds: bool, first_seed: int) -> None:
    def one(steps: list[Step]) -> None:
        try:
            kind(mixes_kinds=mixes_kinds).run(steps)
        except Difference as difference:
            raise shortest(kind, difference, steps, mixes_kinds) from None

    repeat(count, programs(length), one, first_seed)


def shortest(kind: type[Program], difference: Difference, steps: list[Step], mixes_kinds: bool) -> Difference:
    """The difference that is left when every step without which there still is one is left out."""
    for i in reversed(range(len(steps))):
        try:
            kind(mixes_kinds=mixes_kinds).run([*steps[:i], *steps[i + 1 :]])
        except Difference as still:
            difference = still
            del steps[i]
    return difference


def run_in_threads(kind: type[Program], count: int, length: int, mixes_kinds: bool, first_seed: int) -> None:
    """Each thread runs its own program, on its own tensors and on some that all of them read."""

    def one(many: list[list[Step]]) -> None:
        shared = World("cpu"), World("tpu")
        for world in shared:
            world.tensors = [world.make(dtype, shape) for dtype, shape in zip(DTYPES[1:4], SHAPES, strict=False)]
            world.tensors += [world.tensors[0] + 1, world.tensors[0].t()]
        failures: list[BaseException] = []
        start = threading.Barrier(THREADS)

        def work(steps: list[Step]) -> None:
            try:
                start.wait()
                kind(shared, mixes_kinds=mixes_kinds).run(steps)
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=work, args=(steps,)) for steps in many]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        drawn = st.lists(programs(length), min_size=THREADS, max_size=THREADS)
        repeat(max(1, count // THREADS), drawn, one, first_seed)
    finally:
        sys.setswitchinterval(interval)


def repeat(count: int, strategy: st.SearchStrategy[object], one: Callable[..., None], first_seed: int) -> None:
    @settings(max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @seed(first_seed)
    @given(strategy)
    def example(drawn: object) -> None:
        one(drawn)

    example()


# `capped`: regions end every few ops, wherever the cap's choice of place falls; `pieces`: compiled in small programs
MODES = ("deferred", "sync", "threads", "capped")
COMPILED_MODES = (*MODES, "pieces")


def run_programs(
    engine: str, mode: str, count: int, length: int, shard: int = 0, kind: type[Program] = Program
) -> None:
    """`count` programs that no other shard runs."""
    knobs: dict[str, Any] = {"capped": {"max_region_ops": 6}, "pieces": {"tiers": "pieces"}}.get(mode, {})
    run = run_in_threads if mode == "threads" else run_in_one_thread
    with (
        old_objects_ignored(),
        engine_of(engine) as reference,
        config.using(fallback="silent", sync=mode == "sync", **knobs),
    ):
        for done in range(0, count, BATCH):
            run(kind, min(BATCH, count - done), length, engine != "xla", shard * count + done)
            if reference is not None:
                reference.programs.clear()


@pytest.mark.parametrize("mode", MODES)
def test_the_recorder_does_what_the_cpu_does(mode: str, rotation: int) -> None:
    run_programs("reference", mode, 500, 14, SHARDS + rotation)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "sync"])
def test_what_overtakes_regions_that_take_long_to_compile_does_what_the_cpu_does(mode: str, rotation: int) -> None:
    run_programs("slow", mode, 200, 20, SHARDS + rotation, HurriedProgram)
    assert metrics.snapshot()["launched_ahead"] > 0


@pytest.mark.parametrize("mode", COMPILED_MODES)
def test_compiled_programs_do_what_the_cpu_does(mode: str, rotation: int) -> None:
    run_programs("xla", mode, 40, 12, SHARDS + rotation)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("mode", MODES)
def test_the_recorder_does_what_the_cpu_does_in_many_programs(mode: str, shard: int) -> None:
    run_programs("reference", mode, 20_000 // SHARDS, 20, shard)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", COMPILED_MODES)
def test_compiled_programs_do_what_the_cpu_does_in_many_programs(mode: str) -> None:
    run_programs("xla", mode, 500, 14)
