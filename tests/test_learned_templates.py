"""Templates that are made of the sizes that came: what is filled in is what tracing gives, on PyTorch's own samples.

Every run checks a part of all ops, another one with each commit; `--full` checks all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import engine_support
import numpy as np
import pytest
import torch
from record_support import Record
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchtpu import startup
from torchtpu.ops.registry import LOWERINGS
from torchtpu.runtime.engine import Engine
from torchtpu.runtime.ir.program import Op
from torchtpu.runtime.lowering.learned_templates import SENTINELS
from torchtpu.runtime.lowering.tracing import Fragment

PARTS = 60
SIZES = (5, 6, 9, 4, 33, 7, 130)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = engine_support.make_engine(lowerings=startup.lowerings()._replace(templates=None))
    yield made
    made.close()


def recorded(function: Callable[..., Any], *tensors: torch.Tensor) -> list[Op]:
    with Record() as record:
        for tensor in tensors:
            record.input(tensor)
        function(*tensors)
    multiplies = {op.name for op in record.ops if getattr(LOWERINGS.get(op.name), "multiplies", False)}
    return [dataclasses.replace(op, settings="highest") if op.name in multiplies else op for op in record.ops]


def traced_in_turn(engine: Engine, ops: list[Op]) -> int:
    """How many of the ops were filled in; each is compared with what tracing gives."""
    filled = 0
    for op in ops:
        before = engine.counters.fragment_traces
        ((fragment, _),) = engine.fragments.find([op])
        filled += engine.counters.fragment_traces == before
        assert fragment == exactly(engine, op), op
    return filled


def exactly(engine: Engine, op: Op) -> Fragment:
    fragments = engine.fragments
    (made,) = fragments._tracer.trace([(op, fragments._lowerings.entry(op.name, fragments.platform))])
    return made


def test_a_decomposition_of_wide_matrices_says_nothing_of_tall_ones(engine: Engine) -> None:
    ops = [op for shape in ((3, 8), (8, 144), (8, 3)) for op in recorded(_complete_qr, torch.ones(shape))]
    assert traced_in_turn(engine, ops) == 0


def _complete_qr(x: torch.Tensor) -> Any:
    return torch.linalg.qr(x, mode="complete")


def test_the_third_size_of_a_kind_is_filled_in(engine: Engine) -> None:
    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cumprod(x, 1).logaddexp(y)

    ops = [op for n in (5, 6, 9, 4) for op in recorded(compute, torch.ones(n, 20), torch.ones(20))]
    assert traced_in_turn(engine, ops) == 4


def test_all_sizes_of_a_region_need_two_traces_and_one_of_all_sizes(engine: Engine) -> None:
    ops = [op for n in range(3, 19) for op in recorded(lambda x: torch.cumprod(x, 1), torch.ones(n, 41))]
    found = engine.fragments.find(ops)
    assert engine.counters.fragment_traces == 2
    assert [fragment for fragment, _ in found] == [exactly(engine, op) for op in ops]


@pytest.mark.parametrize("function", [lambda x: x.var(0), lambda x: x.cumsum(0), lambda x: x.median(0)[0]])
def test_a_size_that_templates_are_made_with_comes_first(engine: Engine, function: Callable[..., Any]) -> None:
    """What follows from 211 in a text is told from what is always 210."""
    shapes = [(SENTINELS[0], 50), (SENTINELS[0], 60), (20, 70), (21, 71), (50, SENTINELS[0])]
    traced_in_turn(engine, [op for shape in shapes for op in recorded(function, torch.rand(shape))])


def test_an_op_of_more_sizes_than_letters_is_traced(engine: Engine) -> None:
    def unscale(*tensors: torch.Tensor) -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(tensors[2:], *tensors[:2])

    for sizes in ((100, 61), (101, 61), (102, 61), (103, 61), (103, 62)):
        lengths = (sizes[0], *range(30, 42), sizes[1], 17)
        traced_in_turn(engine, recorded(unscale, torch.zeros(()), torch.ones(()), *map(torch.ones, lengths)))


def test_a_size_that_follows_from_others_is_filled_in(engine: Engine) -> None:
    """The results' own sizes, here n + 3, are no sizes of arguments."""
    ops = [op for n in SIZES for op in recorded(lambda *x: torch.cat(x), torch.ones(n, 2), torch.ones(3, 2))]
    assert traced_in_turn(engine, ops) >= len(SIZES) - 4  # n may be 3 or 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mean(0),  # a number that is a size, by which the text divides
        lambda x: torch.nn.functional.adaptive_avg_pool1d(x[None], 4),  # windows that hang on the size
        lambda x: torch.cumprod(x, 1),
        lambda x: x.flatten() * 2,  # a product of sizes
        lambda x: torch.nn.functional.pad(x, (1, 2)),
        lambda x: x.unfold(1, 3, 1).mul(2.5),
        torch.linalg.qr,
        lambda x: x.var(1),
        lambda x: torch.nn.functional.conv1d(x[None], torch.ones(7, x.shape[0], 3)),
        lambda x: x.sort(1),
        torch.fft.rfft,
        torch.diag_embed,
    ],
)
def test_what_is_decided_by_a_size_is_traced_for_each(engine: Engine, function: Callable[..., Any]) -> None:
    for height in (11, 12):
        traced_in_turn(engine, [op for n in SIZES for op in recorded(function, torch.rand(height, n + 2))])


@pytest.mark.parametrize(
    "function",
    [
        torch.nn.functional.hardswish,
        lambda x: torch.nn.functional.hardsigmoid(x, inplace=True),
        lambda x: torch.xlogy(x, x),
        lambda x: x.lerp(x, x),
        lambda x: torch.where(x > 0, x, 1621.5),
    ],
)
def test_an_op_on_elements_is_traced_for_one_shape(engine: Engine, function: Callable[..., Any]) -> None:
    shapes = ((4, 16, 8, 8), (1,), (1621,), (0, 3), (3, 1, 2), (2, 2), (5, 7, 1621))
    ops = [op for shape in shapes for op in recorded(function, torch.rand(shape))]
    found = engine.fragments.find(ops)
    kinds = len({op.name for op in ops})
    assert engine.counters.fragment_traces == 2 * kinds  # one is of empty arrays
    assert [fragment for fragment, _ in found] == [exactly(engine, op) for op in ops]


def test_an_op_on_elements_whose_text_has_dimensions_is_traced_for_each(engine: Engine) -> None:
    """Until all elements are done."""
    shapes = ((4, 6), (3,), (2, 5, 3), (7, 1, 2, 3))
    numbers = [torch.arange(1, 1 + math.prod(shape)).view(shape) for shape in shapes]
    traced_in_turn(engine, [op for x in numbers for op in recorded(torch.gcd, x, x)])


@pytest.mark.bailouts("template")
def test_an_op_that_is_not_traced_on_a_line_is_traced(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no line")

    monkeypatch.setattr("torchtpu.runtime.lowering.fragments.with_shape", fail)
    ops = [op for n in (3, 4) for op in recorded(torch.nn.functional.hardswish, torch.ones(n, 43))]
    assert traced_in_turn(engine, ops) == 0
    assert engine.counters.bailouts.counts() == {"template: RuntimeError": 2}


def test_a_lowering_of_no_lasting_sources_is_traced_for_each(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a lowering takes from elsewhere may be another thing the next time."""
    fragments = engine.fragments
    (op,) = recorded(lambda x: torch.cumprod(x, 1), torch.ones(3, 4))
    entry = fragments._lowerings.entry(op.name, fragments.platform)
    monkeypatch.setattr(type(entry), "persists", property(lambda _: False))
    ops = [op for n in SIZES for op in recorded(lambda x: torch.cumprod(x, 1), torch.ones(n, 43))]
    assert traced_in_turn(engine, ops) == 0


@pytest.mark.bailouts("template")
def test_what_fails_is_traced(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no template")

    monkeypatch.setattr(engine.fragments._learned, "learn", fail)
    ops = [op for n in SIZES for op in recorded(lambda x: torch.cumprod(x, 1), torch.ones(n, 43))]
    assert traced_in_turn(engine, ops) == 0


def variants(sample: Any) -> Iterator[Any]:
    """The sample, with another length in place of the one that most of its arrays have."""
    leaves, tree = tree_flatten((sample.input, sample.args, sample.kwargs))
    lengths = Counter(n for leaf in leaves if isinstance(leaf, torch.Tensor) for n in leaf.shape if n >= 3)
    for size, _ in lengths.most_common(1):
        for length in (size, size + 1, size + 2, size + 4, size + 7):
            yield tree_unflatten([lengthened(leaf, size, length) for leaf in leaves], tree)


def lengthened(leaf: Any, size: int, length: int) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
        return leaf
    for axis, n in enumerate(leaf.shape):
        if n == size:
            leaf = leaf.index_select(axis, torch.from_numpy(np.arange(length) % size))
    return leaf.detach()


def check_samples(engine: Engine, number: int, of: int) -> tuple[int, int]:
    """How many ops of a part of all samples came, and how many of them were filled in."""
    came = filled = 0
    for info in op_db:
        if zlib.crc32(info.full_name.encode()) % of != number % of or torch.float32 not in info.dtypes:
            continue
        for sample, _ in zip(info.sample_inputs("cpu", torch.float32), range(6), strict=False):
            ops: list[Op] = []
            for given, args, kwargs in variants(sample):
                with contextlib.suppress(Exception):  # the call refuses this length, or `Record` does not know it
                    ops += recorded(functools.partial(_call, info.op, args, kwargs), given)
            lowered = [op for op in ops if has_lowering(engine, op)]
            came += len(lowered)
            filled += traced_in_turn(engine, lowered)
    return came, filled


def _call(op: Callable[..., Any], args: Any, kwargs: Any, given: Any) -> Any:
    return op(given, *args, **kwargs)


def has_lowering(engine: Engine, op: Op) -> bool:
    try:
        exactly(engine, op)
    except Exception:  # another op, or arguments of it that run on the CPU
        return False
    return True


@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")
def test_samples_of_this_commit_are_filled_in_as_traced(rotation: int, engine: Engine) -> None:
    check_samples(engine, rotation, PARTS)


@pytest.mark.full
@pytest.mark.timeout(3 * 3600)
@pytest.mark.filterwarnings("ignore")
def test_all_samples_are_filled_in_as_traced(engine: Engine) -> None:
    came, filled = check_samples(engine, 0, 1)
    print(f"{filled} of {came} filled in")
    assert filled > came / 4
