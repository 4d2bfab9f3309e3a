"""Random view chains, writes through views and views of another dtype give what torch gives on the CPU."""

from __future__ import annotations

import math
import random

import pytest
import torch

from torchtpu.runtime.device.client import Client
from torchtpu.runtime.ir.program import Base
from torchtpu.runtime.ir.strided_access import find_access
from torchtpu.runtime.ir.types import tensor_type
from torchtpu.runtime.lowering import views
from torchtpu.runtime.lowering.views import View

BATCH = 60
LENGTHS = [2, pytest.param(30, marks=pytest.mark.full)]
KINDS = (
    "transpose", "narrow", "step", "select", "unsqueeze", "expand", "flatten", "split", "diagonal", "unfold", "strided",
)  # fmt: skip


@pytest.fixture(scope="module")
def client() -> Client:
    return Client("cpu")


class Cases:
    """Collects view programs with their expected results and runs them as one program."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.inputs: list[torch.Tensor] = []
        self.expected: list[torch.Tensor] = []
        self.results: list[tuple[str, str]] = []

    def input(self, tensor: torch.Tensor) -> str:
        self.inputs.append(tensor)
        return f"%in{len(self.inputs) - 1}"

    def add(self, snippet: views.Snippet, expected: torch.Tensor, **names: str) -> None:
        text, result = snippet.paste(f"%v{len(self.results)}_", **names)
        self.lines.append(text)
        self.results.append((result, tensor_type(tuple(expected.shape), expected.dtype)))
        self.expected.append(expected)

    def check(self, client: Client) -> None:
        heads = ", ".join(f"%in{i}: {tensor_type(tuple(t.shape), t.dtype)}" for i, t in enumerate(self.inputs))
        names, types = ", ".join(n for n, _ in self.results), ", ".join(t for _, t in self.results)
        body = "\n".join(filter(None, self.lines))
        main = f"func.func public @main({heads}) -> ({types}) {{\n{body}\n    return {names} : {types}\n  }}"
        text = f"module @m {{\n  {main}\n}}"
        executable = client.compile(text, 0)
        avals = [(tuple(t.shape), t.dtype) for t in self.expected]
        outputs, _ = client.execute(executable, [client.upload(t, 0) for t in self.inputs], client.handlers(avals, 0))
        for expected, output in zip(self.expected, outputs, strict=True):
            actual = client.download(output)
            assert actual.dtype == expected.dtype
            assert torch.equal(_bits(actual), _bits(expected))


def _bits(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(t.numel(), dtype=t.dtype).copy_(t.reshape(-1)).view(torch.uint8)


def _flipped(t: torch.Tensor) -> torch.Tensor:
    """The elements in reverse order, contiguous; `flip` itself knows no float8."""
    flat = torch.empty(t.shape, dtype=t.dtype).copy_(t).view(-1, 1)
    return flat.view(torch.uint8).flip(0).reshape(-1).view(t.dtype).view(t.shape)


def _base(t: torch.Tensor) -> Base:
    return Base(tuple(t.shape), t.dtype)


def _view(t: torch.Tensor) -> View:
    return View(tuple(t.shape), tuple(t.stride()), t.storage_offset(), t.dtype)


def random_base(rng: random.Random, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = [rng.choice([1, 2, 3, 4, 6, 8]) for _ in range(rng.randint(0, 4))]
    return torch.arange(math.prod(shape)).to(dtype).view(shape)


def random_view(x: torch.Tensor, rng: random.Random, length: int, may_expand: bool = True) -> torch.Tensor:
    for _ in range(length):
        dim = rng.randrange(x.dim()) if x.dim() else 0
        size = x.shape[dim] if x.dim() else 1
        match rng.choice(KINDS):
            case "transpose" if x.dim() > 1:
                x = x.transpose(*rng.sample(range(x.dim()), 2))
            case "narrow" if x.dim() and size:
                low = rng.randrange(size)
                x = x.narrow(dim, low, rng.randint(1, size - low) if rng.random() < 0.98 else 0)
            case "step" if x.dim() and size:
                start = rng.randrange(min(size, 3))
                x = x[(slice(None),) * dim + (slice(start, None, rng.choice([1, 2, 3])),)]
            case "select" if x.dim() > 1 and size:
                x = x.select(dim, rng.randrange(size))
            case "unsqueeze":
                x = x.unsqueeze(rng.randrange(x.dim() + 1))
            case "expand" if may_expand and x.dim() and size == 1:
                x = x.expand([3 if d == dim else n for d, n in enumerate(x.shape)])
            case "flatten" if x.dim() > 1 and dim + 1 < x.dim():
                shape = [*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :]]
                try:
                    x = x.view(shape)
                except RuntimeError:
                    continue
            case "split" if x.dim() and size > 3:
                factor = rng.choice([f for f in range(1, size) if size % f == 0])
                x = x.view([*x.shape[:dim], factor, size // factor, *x.shape[dim + 1 :]])
            case "diagonal" if x.dim() > 1 and rng.random() < 0.3:
                x = x.diagonal(0, *rng.sample(range(x.dim()), 2))
            case "unfold" if may_expand and x.dim() and size > 2 and rng.random() < 0.3:
                x = x.unfold(dim, 2, rng.choice([1, 2]))
            case "strided" if (
                may_expand and rng.random() < 0.1 and x.untyped_storage().nbytes() >= 40 and x.dtype.itemsize == 4
            ):
                x = torch.as_strided(x, (2, 2), (rng.choice([2, 3, 5]), rng.choice([1, 2])), rng.randrange(2))
            case _:
                continue
    return x


@pytest.mark.parametrize("batches", LENGTHS)
def test_random_reads_equal_torch(client: Client, batches: int) -> None:
    rng = random.Random(0)
    boxes = 0
    for _ in range(batches):
        cases = Cases()
        for _ in range(BATCH):
            base = random_base(rng)
            view = random_view(base, rng, rng.randint(1, 6))
            cases.add(views.read(_base(base), _view(view)), view.clone(), array=cases.input(base))
            boxes += 0 in view.shape or find_access(*_base(base)[:1], *_view(view)[:3]) is not None
        cases.check(client)
    assert boxes > batches * BATCH * 0.9


@pytest.mark.parametrize("batches", LENGTHS)
def test_random_writes_equal_torch(client: Client, batches: int) -> None:
    rng = random.Random(1)
    for _ in range(batches):
        cases = Cases()
        for _ in range(BATCH):
            base = random_base(rng)
            array = cases.input(base)
            written = base.clone()
            view = random_view(written, rng, rng.randint(1, 5), may_expand=False)
            new = -torch.arange(1.0, view.numel() + 1).view(view.shape)
            view.copy_(new)
            snippet = views.write(_base(base), _view(view))
            cases.add(snippet, written, array=array, new=cases.input(new))
        cases.check(client)


def test_writes_into_a_fresh_array_leave_zeros_elsewhere(client: Client) -> None:
    rng = random.Random(2)
    cases = Cases()
    for _ in range(BATCH):
        written = torch.zeros_like(random_base(rng))
        view = random_view(written, rng, rng.randint(1, 4), may_expand=False)
        new = torch.arange(1.0, view.numel() + 1).view(view.shape)
        view.copy_(new)
        cases.add(views.write(_base(written), _view(view), is_fresh=True), written, new=cases.input(new))
    cases.check(client)


@pytest.mark.parametrize("is_flat", [True, False])
def test_run_time_offsets_equal_torch(client: Client, is_flat: bool) -> None:
    rng = random.Random(3)
    cases, boxes = Cases(), 0
    for _ in range(BATCH):
        base = random_base(rng)
        view = random_view(base, rng, rng.randint(1, 5), may_expand=False)
        geometry = _view(view)._replace(offset=None)
        start = view.storage_offset()
        digits = views.digits(_base(base), geometry)
        if view.numel() == 0 or not (is_flat or all(start // w % size <= limit for w, size, limit in digits)):
            continue
        boxes += bool(digits)
        array, offset = cases.input(base), cases.input(torch.tensor(start))
        cases.add(views.read(_base(base), geometry, is_flat=is_flat), view.clone(), array=array, offset=offset)
        written = base.clone()
        new = -torch.arange(1.0, view.numel() + 1).view(view.shape)
        written.as_strided(view.shape, view.stride(), start).copy_(new)
        snippet = views.write(_base(base), geometry, is_flat=is_flat)
        cases.add(snippet, written, array=array, new=cases.input(new), offset=offset)
    cases.check(client)
    assert boxes > BATCH * 0.6


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.bfloat16, torch.float16, torch.int32, torch.float32,
    torch.int64, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.full)])
def test_reads_and_writes_through_another_dtype_equal_torch(client: Client, rounds: int) -> None:
    rng = random.Random(4)
    for _ in range(rounds):
        cases = Cases()
        for have in DTYPES:
            for want in DTYPES:
                total = rng.choice([16, 32, 48]) + rng.choice([0, 0, 0, 1])
                base = (
                    torch.randint(2, (total,), dtype=torch.uint8)
                    if torch.bool in (have, want)
                    else (torch.randint(56, (total,), dtype=torch.uint8))
                )
                base = base[: total // have.itemsize * have.itemsize].view(have)
                if total % 2 == 0 and base.numel() % 4 == 0 and rng.random() < 0.7:
                    base = base.view(-1, rng.choice([2, 4]))
                flat = base.clone().view(-1)
                count = flat.nbytes // want.itemsize
                written = flat.view(torch.uint8)[: count * want.itemsize].view(want)
                view = random_view(written, rng, rng.randint(0, 3), may_expand=False)
                array = cases.input(base.clone())
                cases.add(views.read(_base(base), _view(view)), view.clone(), array=array)
                new = _flipped(view)
                view.copy_(new)
                cases.add(
                    views.write(_base(base), _view(view)),
                    flat.view(base.shape),
                    array=array,
                    new=cases.input(new),
                )
        cases.check(client)


def test_zero_dim_arrays_are_read_through_another_dtype(client: Client) -> None:
    cases = Cases()
    base = torch.tensor(1.5)
    cases.add(
        views.read(_base(base), View((4,), (1,), 0, torch.uint8)),
        base.view(1).view(torch.uint8),
        array=cases.input(base),
    )
    z = torch.tensor(1 + 2j)
    cases.add(views.read(_base(z), View((2,), (1,), 0, torch.float32)), torch.view_as_real(z), array=cases.input(z))
    cases.check(client)


def test_a_view_that_is_the_whole_array_costs_no_line() -> None:
    base = Base((2, 3), torch.float32)
    assert views.read(base, View((2, 3), (3, 1), 0, torch.float32)).text == ""
    assert views.write(base, View((2, 3), (3, 1), 0, torch.float32)).text == ""


def test_a_transposed_view_is_one_transpose() -> None:
    text = views.read(Base((2, 3), torch.float32), View((3, 2), (1, 3), 0, torch.float32)).text
    assert text.count("stablehlo.") == 1
    assert "stablehlo.transpose" in text


def test_a_slice_keeps_the_dimensions_of_its_array() -> None:
    text = views.read(Base((8, 16, 32), torch.float32), View((8, 4, 32), (512, 32, 1), 64, torch.float32)).text
    assert text.split(" = ")[1].startswith("stablehlo.slice %X [0:8, 2:6, 0:32]")


def test_rows_that_a_view_takes_are_sliced_before_they_are_reshaped() -> None:
    base = torch.empty(2, 5, 24)
    heads = base[:, :, 8:16].view(2, 5, 4, 2).transpose(1, 2)
    read = views.read(_base(base), _view(heads)).text.splitlines()
    assert "stablehlo.slice %X [0:2, 0:5, 8:16]" in read[0]
    assert not any("stablehlo.slice" in line for line in read[1:])
    written = views.write(_base(base), _view(heads)).text.splitlines()
    assert "stablehlo.dynamic_update_slice %X" in written[-1]
