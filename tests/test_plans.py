"""A plan comes from the store exactly where it is right."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import engine_support
import jax.numpy as jnp
import pytest
import torch
from program_samples import at_an_offset, recorded
from record_support import Record
from script import run_script

from torchtpu.compiler_cache import DirectoryStore, Store
from torchtpu.ops.registry import Context, Lowering
from torchtpu.runtime.compile import plan_cache as plans
from torchtpu.runtime.engine import Engine
from torchtpu.runtime.ir.program import Base, Lifted, Op, Operand, Program, Random, Result
from torchtpu.runtime.ir.values import operands
from torchtpu.runtime.lowering import fingerprint
from torchtpu.runtime.partition import clusters


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = engine_support.make_engine(store=DirectoryStore(tmp_path))
    yield engine
    engine.close()


def facts(plan: plans.Plan) -> dict[str, Any]:
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    return fields | {"text": plan.text()}


@pytest.mark.parametrize("make", [recorded, at_an_offset])
@pytest.mark.parametrize("is_flat", [False, True])
def test_a_stored_plan_says_what_lowering_says(engine: Engine, make: Callable[[], Program], is_flat: bool) -> None:
    program = make()
    made, found = (engine.plans.find(program, is_flat=is_flat) for _ in range(2))
    assert engine.counters.plan_hits_disk == 1
    assert facts(found) == facts(made)
    assert bool(found.checks) == (make is recorded)
    assert bool(found.offsets) == (make is at_an_offset and not is_flat)


def changed(value: Any) -> Iterator[Any]:
    """The value with one thing in it changed, for each thing that is no place in the user's code."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if field.name != "line":
                for other in changed(getattr(value, field.name)):
                    yield replace(value, **{field.name: other})
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            for other in changed(item):
                items = [*value[:i], other, *value[i + 1 :]]
                yield type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    elif isinstance(value, torch.dtype):
        yield torch.int16
    elif isinstance(value, str):
        yield f"{value}x"
    elif isinstance(value, bool):
        yield not value
    elif value is not None:
        yield value + 1


@pytest.mark.parametrize("make", [recorded, at_an_offset])
def test_everything_in_a_program_counts_but_places_in_code(make: Callable[[], Program]) -> None:
    fragments = engine_support.make_engine().fragments

    def stream(program: Program, *, is_flat: bool = False) -> bytes:
        return plans._stream(program, fragments.describe(program.ops, "off"), is_flat=is_flat)

    program = make()
    others = list(changed(program))
    streams = {stream(other) for other in others}
    assert len(others) > 60
    assert stream(program) not in streams
    assert stream(program, is_flat=True) not in streams | {stream(program)}
    moved = replace(program, line="b.py:9", ops=tuple(replace(op, line="b.py:8") for op in program.ops))
    assert stream(moved) == stream(program)


def test_a_random_draw_counts_by_the_numbers_that_it_takes() -> None:
    base = Base((2,), torch.float32)
    one = Operand(~0, (2,), (1,), 0, torch.float32, base)
    draws = [Random(Lifted("i", a), Lifted("i", b)) for a, b in ((0, 1), (2, 1), (0, 2))]
    ops = [
        Op("bernoulli", (one, draw), (Result(0, (2,), (1,), torch.float32, base),), (), "test.py:2") for draw in draws
    ]
    fragments = engine_support.make_engine().fragments
    found = [Program((op,), (base,), (0,), (), 0, 3, "test.py:1") for op in ops]
    assert len({plans._stream(p, fragments.describe(p.ops, "off"), is_flat=False) for p in found}) == 3


def repeating() -> Program:
    """Layers, of which the first results of one are not needed, and one takes another tensor's shape alone."""
    with Record() as record:
        x, shape = record.input(torch.randn(4, 8)), record.input(torch.randn(4, 8))
        target, one = record.input(torch.zeros(4, dtype=torch.int64)), record.input(torch.tensor(1.0))
        for _ in range(4):
            w = record.input(torch.randn(8, 8))
            slope = torch.ops.aten.nll_loss_backward(one, shape, target, None, 1, -100, one)
            x = torch.relu(torch.mm(x, w) + slope) * 0.5
            x * 2.0
        torch._foreach_add_([x, shape], [shape, x], alpha=2)
    return record.program(x, shape)


def slope(grad_output: Any, self: Any, *_: Any) -> Any:
    return jnp.zeros(self.shape, self.dtype)


def test_clusters_from_the_store_are_those_that_were_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = clusters.COSTS["cpu"]._replace(least_lines=1, least_saving_ms=0.0)
    monkeypatch.setattr(clusters, "COSTS", {"cpu": small})
    monkeypatch.setattr(clusters, "_SHORTEST", 4)
    program = repeating()
    engine, again = (engine_with(DirectoryStore(tmp_path), nll_loss_backward=slope) for _ in range(2))
    made = engine.plans.clusters(program)
    assert made is not None
    monkeypatch.setattr(plans, "search", lambda *_: pytest.fail("it was searched again"))
    found = again.plans.clusters(program)
    assert found == made
    assert any(operand.value is None for part in found.parts for op in part.program.ops for operand in operands(op))
    assert [id(part.program) for part in found.parts].count(id(found.parts[1].program)) > 1
    assert (again.counters.fragment_traces, again.counters.fragment_hits_disk) == (0, 0)
    engine.close()
    again.close()


def test_that_a_program_has_no_clusters_is_kept(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.plans.clusters(recorded()) is None
    again = engine_support.make_engine(store=DirectoryStore(tmp_path))
    monkeypatch.setattr(plans, "search", lambda *_: pytest.fail("it was searched again"))
    assert again.plans.clusters(recorded()) is None
    again.close()


@pytest.mark.parametrize(
    "change",
    [
        {"program": "sha256:1"},
        {"kinds": ["f" * 100_000]},
        {"sources": [2**70]},
        {"checks": [["message", "os", "system", 0, "0"]]},
        {"checks": [["message", "this", "Error", 0, "0"]]},
        {"offsets": [[99, [[1, 0, 1]]]]},
        {"calls_lapack": float("inf")},
        {"more": 1},
        None,
    ],
)
def test_a_plan_that_says_what_none_can_is_a_miss(
    tmp_path: Path, engine: Engine, change: dict[str, Any] | None
) -> None:
    store, program = DirectoryStore(tmp_path), recorded()
    made = engine.plans.find(program, is_flat=False)
    changed = 0
    for file in list(store.entries()):
        entry = file.read()
        payload = json.dumps(json.loads(entry.payload) | change).encode() if change else b"[" * 100_000
        if entry.key.kind == "plan" or change is None:
            changed += store.put(entry.key, payload)
    fresh = engine_support.make_engine(store=store)
    try:
        assert facts(fresh.plans.find(program, is_flat=False)) == facts(made)
        assert fresh.counters.plan_hits_disk == 0
        assert store.stats().discarded == changed
        fresh.plans.find(program, is_flat=False)
        assert fresh.counters.plan_hits_disk == 1
    finally:
        fresh.close()
    assert "this" not in sys.modules


def test_an_error_of_a_check_names_the_line_of_this_run(engine: Engine) -> None:
    program = recorded()
    engine.plans.find(program, is_flat=False)
    moved = replace(program, ops=tuple(replace(op, line=f"moved.py:{i}") for i, op in enumerate(program.ops)))
    (check,) = engine.plans.find(moved, is_flat=False).checks
    assert (check.op, check.line) == ("index_select", "moved.py:2")
    assert engine.counters.plan_hits_disk == 1


def test_a_plan_without_its_program_compiles_it(tmp_path: Path, engine: Engine) -> None:
    with Record() as record:
        y = torch.neg(record.input(torch.arange(3.0)))
    engine_support.check(engine, record, y)
    for entry in DirectoryStore(tmp_path).entries():
        if entry.kind == "program":
            entry.path.unlink()
    again = engine_support.make_engine(store=DirectoryStore(tmp_path))
    engine_support.check(again, record, y)
    assert (again.counters.plan_hits_disk, again.counters.programs_compiled) == (1, 1)
    again.close()


def engine_with(store: Store, **lowerings: Callable[..., Any]) -> Engine:
    table = engine_support.TABLE | {name: Lowering(name, function) for name, function in lowerings.items()}
    return engine_support.make_engine(store=store, lowerings=table)


def test_a_patched_lowering_counts_at_once_and_for_its_programs_alone(tmp_path: Path) -> None:
    with Record() as patched:
        x = torch.neg(patched.input(torch.arange(3.0)))
    with Record() as other:
        y = torch.mm(other.input(torch.eye(3)), other.input(torch.ones(3, 3)))
    engine = engine_support.make_engine(store=DirectoryStore(tmp_path))
    engine_support.check(engine, patched, x)
    engine_support.check(engine, other, y)
    engine.close()
    engine = engine_with(DirectoryStore(tmp_path), neg=lambda x: x * -2)
    (negated,) = engine_support.run(engine, patched.program(x), patched.inputs)
    assert negated.tolist() == [0, -2, -4]
    assert (engine.counters.plan_hits_disk, engine.counters.programs_compiled) == (0, 1)
    engine_support.check(engine, other, y)
    assert (engine.counters.plan_hits_disk, engine.counters.programs_compiled) == (1, 1)
    engine.close()


STEPS = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 4)).to("tpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for i in range(3):
    x, y = torch.randn(16, 8, device="tpu"), torch.randint(4, (16,)).to("tpu")
    loss = torch.nn.functional.cross_entropy(model(x.double().to(torch.bfloat16).float()), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item(), x.long().sum().item(), torch.tpu.memory_allocated() > 0)
print(x.bfloat16().sum().item())
print("jax" in sys.modules)
"""


def test_a_process_whose_programs_are_cached_does_without_jax(tmp_path: Path) -> None:
    cold, warm = (run_script(STEPS, TORCHTPU_CACHE_DIR=str(tmp_path), TORCHTPU_PLATFORM="cpu") for _ in range(2))
    assert (cold.status, warm.status) == (0, 0), cold.err + warm.err
    *steps, has_jax = cold.out.splitlines()
    assert warm.out.splitlines() == [*steps, "False"]
    assert (has_jax, warm.err) == ("True", "")


def test_a_lowering_that_may_not_be_kept_makes_no_plan(tmp_path: Path) -> None:
    with Record() as record:
        y = torch.neg(record.input(torch.arange(3.0)))
    table = engine_support.TABLE | {"neg": Lowering("neg", lambda x: -x, persists=False)}
    engine = engine_support.make_engine(store=DirectoryStore(tmp_path), lowerings=table)
    engine_support.check(engine, record, y)
    assert {entry.kind for entry in DirectoryStore(tmp_path).entries()} == {"program"}
    engine.close()


# Fingerprints


SOURCE = """
import functools
from torchtpu.ops.registry import Context
LIMITS = {"a": (1, 2.5), "b": frozenset(("x", "y", "z"))}
def helper(x):
    return x + 1
class Table:
    step = 3
    @functools.lru_cache
    def rows(self, n):
        return [n * self.step for _ in range(n)]
def make(scale):
    def scaled(x, *, alpha=1):
        return helper(x) * scale * alpha
    return scaled
lowering = make(2)
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "module_with_a_fingerprint"

    def load(source: str) -> ModuleType:
        """Loaded as if no other version of it had been seen."""
        for cache in (fingerprint.of_function, fingerprint.of_modules, fingerprint._describe_module):
            cache.cache_clear()
        sys.modules.pop(name, None)
        Path(tmp_path, f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
        try:
            return importlib.import_module(name)
        finally:
            sys.dont_write_bytecode = before

    yield load
    sys.modules.pop(name, None)
    fingerprint._describe_module.cache_clear()


def of(module: ModuleType) -> str:
    return fingerprint.of_function(module.lowering, Context)


def test_comments_and_lines_change_no_fingerprint(load: Callable[[str], ModuleType]) -> None:
    before = of(load(SOURCE))
    assert of(load("# a comment\n\n" + SOURCE.replace("return scaled", "return scaled  # what a day"))) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x + 1", "x + 2"),
        ("x + 1", "x - 1"),
        ("make(2)", "make(3)"),
        ("alpha=1", "alpha=2"),
        ("step = 3", "step = 4"),
        ("n * self.step", "self.step * n"),
        ("2.5", "2.25"),
        ('"z"', '"w"'),
        ("helper(x) *", "helper(x) +"),
    ],
)
def test_code_and_tables_change_the_fingerprint(load: Callable[[str], ModuleType], old: str, new: str) -> None:
    before = of(load(SOURCE))
    assert SOURCE.count(old) == 1
    assert of(load(SOURCE.replace(old, new))) != before


def test_what_was_patched_into_a_module_counts(load: Callable[[str], ModuleType]) -> None:
    module = load(SOURCE)
    before = of(module)
    module = load(SOURCE)
    module.helper = lambda x: x + 3
    assert of(module) != before


PRINT = """
import json, sys
from torchtpu import ops
from torchtpu.runtime.compile import plan_cache as plans
from torchtpu.runtime.lowering import fingerprint
ops.load()
found = {name: fingerprint.of_function(entry.function, ops.Context) for name, entry in ops.LOWERINGS.items()}
if sys.argv[1] == "later":  # what ran in between changes nothing
    import torch, torchtpu.kernels
    x = torch.randn(8, 8, device="tpu", requires_grad=True)
    torch.nn.functional.interpolate(torch.nn.functional.gelu(x @ x)[None, None], scale_factor=2).sum().backward()
    torch.tpu.synchronize()
    for cache in (fingerprint.of_function, fingerprint.of_modules, fingerprint._describe_module):
        cache.cache_clear()
    again = {name: fingerprint.of_function(ops.LOWERINGS[name].function, ops.Context) for name in found}
    assert found == again
print(json.dumps([found, fingerprint.of_modules(*plans._EMISSION, *plans._SEARCH)], sort_keys=True))
"""


def test_fingerprints_are_the_same_in_every_process(tmp_path: Path) -> None:
    printed = []
    for seed, moment in (("1", "now"), ("2", "later")):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "TORCHTPU_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", PRINT, moment]
        printed.append(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    assert printed[0] == printed[1]
    assert len(json.loads(printed[0])[0]) > 500
