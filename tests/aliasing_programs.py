"""Random programs over aliasing tensors, made from lists of numbers and run on the CPU and on the device.

A program is a list of `Step`s. Each is run on the CPU first; what it does depends on the CPU's geometry alone, so that
the device gets the very same call. After each step both worlds must agree on everything but values; values are compared
where the program reads and at its end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_TENSORS = 7
MAX_ELEMENTS = 36
RESIZES = ("resize_", "set_tensor_", "set_storage_", "resize_storage")  # leave new bytes undefined
DTYPES = (torch.float32, torch.float32, torch.int32, torch.int64, torch.complex64, torch.uint8, torch.bool, torch.int16)
SHAPES = ((2, 3), (4,), (3, 2), (2, 2, 2), (), (1, 4), (2, 0), (6,), (3, 3))


class Step(NamedTuple):
    """`kind` chooses what is done, `first` and `second` to which tensors, `seed` how."""

    kind: int
    first: int
    second: int
    seed: int


class Skip(Exception):
    """The step makes no sense on these tensors, or its result is not defined on the CPU."""


class Choices:
    """Small numbers drawn from a seed, the same in both worlds."""

    def __init__(self, seed: int) -> None:
        self._rest = seed * 2654435761 % 2**32 | 1 << 40

    def below(self, n: int) -> int:
        """A number in [0, n)."""
        self._rest = self._rest * 6364136223846793005 % 2**61 + 1442695040888963407 % 2**61
        return (self._rest >> 29) % max(n, 1)

    def one(self, *options: Any) -> Any:
        return options[self.below(len(options))]

    def dim(self, x: Tensor) -> int:
        """A dimension of `x`, sometimes counted from its end."""
        if x.dim() == 0:
            raise Skip
        d = self.below(x.dim())
        return d - x.dim() if self.below(4) == 0 else d


class World:
    """The tensors of one device."""

    def __init__(self, device: str, mixes_kinds: bool = True) -> None:
        self.device = device
        self.tensors: list[Tensor] = []
        self.shared = 0  # the first so many tensors are not written to and never die
        self.mixes_kinds = mixes_kinds  # whether integers may be looked at as floats: XLA takes subnormals for zero

    def make(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        values = (torch.arange(math.prod(shape)) % 5 - (0 if dtype is torch.uint8 else 1)).to(dtype).view(shape)
        return values.clone() if self.device == "cpu" else values.to(self.device)

    def is_shared(self, x: Tensor) -> bool:
        return any(same_storage(x, y) for y in self.tensors[: self.shared])

    def may_be_seen_as(self, x: Tensor, dtype: torch.dtype) -> bool:
        if (x.dtype is torch.bool) != (dtype is torch.bool):  # a bool's bytes are 0 and 1
            return False
        return self.mixes_kinds or is_inexact(x.dtype) == is_inexact(dtype)

    def add(self, made: Any) -> None:
        for tensor in (made,) if isinstance(made, Tensor) else made:
            if len(self.tensors) < MAX_TENSORS:
                self.tensors.append(tensor)


def is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


Action = Callable[[World, Tensor, Tensor, Choices], Any]
# Filled by aliasing_steps: what only looks, what changes its first tensor, and what makes, reads or drops tensors.
VIEWS: list[Action] = []
WRITES: list[Action] = []
OTHERS: list[Action] = []


def actions() -> list[Action]:
    """Every step there is."""
    return [*VIEWS, *WRITES, *OTHERS]


# ---- what is defined on the CPU


def places(x: Tensor) -> list[int]:
    """The bytes that each element of a tensor starts at, in its storage."""
    found = [x.storage_offset()]
    for size, stride in zip(x.shape, x.stride(), strict=True):
        found = [p + i * stride for p in found for i in range(size)]
    return [p * x.element_size() for p in found]


def same_storage(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata


def overlaps_itself(x: Tensor) -> bool:
    return len(set(places(x))) < x.numel()


def in_storage(x: Tensor) -> bool:
    """False after the storage was shrunk: to touch such a tensor is the user's error, unchecked on the CPU."""
    return not x.numel() or max(places(x)) + x.element_size() <= x.untyped_storage().nbytes()


def may_write(x: Tensor, *read: Tensor, is_checked: bool = True) -> None:
    """Skips a write whose result depends on the order of memory accesses; `is_checked` if the CPU raises for some."""
    is_expanded = any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True))
    if overlaps_itself(x) and not (is_checked and is_expanded):
        raise Skip
    for y in read:
        if same_storage(x, y) and not is_same_view(x, y) and x.numel():
            touched = {p + b for p in places(x) for b in range(x.element_size())}
            if any(p + b in touched for p in places(y) for b in range(y.element_size())):
                raise Skip


def is_same_view(x: Tensor, y: Tensor) -> bool:
    return is_same_place(x, y) and x.dtype == y.dtype and x.is_conj() == y.is_conj() and x.is_neg() == y.is_neg()


def is_same_place(x: Tensor, y: Tensor) -> bool:
    return x.stride() == y.stride() and x.shape == y.shape and x.storage_offset() == y.storage_offset()


# ---- comparing


def facts(x: Tensor) -> tuple[Any, ...]:
    # Where nothing is stepped over a stride means nothing, and torch's own devices differ.
    strides = tuple(s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1) if x.numel() else ()
    offset = x.storage_offset() if x.numel() else 0
    return (
        x.dtype, tuple(x.shape), strides, offset, x._version, x.is_contiguous(), x.is_conj(), x.is_neg(),
        x._is_view(), x.untyped_storage().nbytes(),
    )  # fmt: skip


def aliases(world: World) -> list[int]:
    """For each tensor the first one with the same storage."""
    storages = [x.untyped_storage()._cdata for x in world.tensors]
    return [storages.index(s) for s in storages]


def same_values(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor):
        if x.dtype != y.dtype or x.shape != y.shape:
            return False
        if x.is_complex():
            return same_values(torch.view_as_real(x.resolve_conj()), torch.view_as_real(y.resolve_conj()))
        return bool(((x == y) | ((x != x) & (y != y))).all())
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and all(map(same_values, x, y))
    return type(x) is type(y) and (x == y or (x != x and y != y))


class Difference(AssertionError):
    """The device did not do what the CPU did."""


def check(what: str, cpu: Any, device: Any, is_same: Callable[[Any, Any], bool] = lambda x, y: x == y) -> None:
    if not is_same(cpu, device):
        raise Difference(f"{what}:\n  cpu {cpu}\n  tpu {device}")


# ---- running


class Program:
    """One run: both worlds, and a log that says what was done."""

    def __init__(self, shared: tuple[World, World] | None = None, *, mixes_kinds: bool = True) -> None:
        self.cpu, self.tpu = World("cpu", mixes_kinds), World("tpu", mixes_kinds)
        self.log: list[str] = []
        for mine, theirs in zip((self.cpu, self.tpu), shared or (), strict=False):
            mine.tensors += theirs.tensors
            mine.shared = len(mine.tensors)

    def run(self, steps: list[Step]) -> None:
        """Raises `Difference`, with the log, where the worlds part."""
        try:
            for step in steps:
                self.step(step)
            self.compare_values()
        except AssertionError as difference:
            raise Difference(f"{difference}\n" + "\n".join(self.log)) from None

    def step(self, step: Step) -> None:
        action = actions()[step.kind]
        count = len(self.cpu.tensors)
        first, second = (step.first % count, step.second % count) if count else (-1, -1)
        if action in WRITES and first >= 0 and self.cpu.is_shared(self.cpu.tensors[first]):
            return
        sizes = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in self.cpu.tensors}
        outcomes = []
        for world in (self.cpu, self.tpu):
            try:
                made = self._act(world, action, first, second, step.seed)
            except Skip:
                return
            if world is self.cpu and isinstance(made, Raised) and "not implemented for" in made.text:
                return  # the device has lowerings for more dtypes than the CPU has kernels
            if world is self.cpu:
                self.log.append(f"{action.__name__}({first}, {second}, {step.seed})")
                if action.__name__ in RESIZES:
                    self._clear_new_bytes(sizes)
            outcomes.append(made)
        self.log[-1] += f" -> {outcomes[0] if not isinstance(outcomes[0], Tensor) else facts(outcomes[0])}"
        check("outcome", *outcomes, is_same=same_outcome)
        if not isinstance(outcomes[0], Raised):
            for world, made in zip((self.cpu, self.tpu), outcomes, strict=True):
                if isinstance(made, Tensor) or (isinstance(made, tuple) and made and isinstance(made[0], Tensor)):
                    world.add(made)
        self.compare_facts()

    def _act(self, world: World, action: Action, first: int, second: int, seed: int) -> Any:
        if action not in OTHERS and first < 0:
            raise Skip
        x, y = (world.tensors[first], world.tensors[second]) if first >= 0 else (torch.empty(0), torch.empty(0))
        if not (in_storage(x) and in_storage(y)):
            raise Skip
        try:
            return action(world, x, y, Choices(seed))
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError) as error:
            return Raised(type(error), str(error))

    def _clear_new_bytes(self, sizes: dict[int, int]) -> None:
        """What the CPU leaves uninitialised is zero on the device."""
        for x in self.cpu.tensors:
            storage = x.untyped_storage()
            old = sizes.get(storage._cdata, storage.nbytes())
            if old < storage.nbytes():
                bytes_ = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
                bytes_[old:] = 0

    def compare_facts(self) -> None:
        for i, (x, y) in enumerate(zip(self.cpu.tensors, self.tpu.tensors, strict=True)):
            check(f"tensor {i}", facts(x), facts(y))
        check("aliases", aliases(self.cpu), aliases(self.tpu))

    def compare_values(self) -> None:
        for i, (x, y) in enumerate(zip(self.cpu.tensors, self.tpu.tensors, strict=True)):
            if in_storage(x):
                check(f"tensor {i}", x, y.cpu(), same_values)


class Raised(NamedTuple):
    kind: type[Exception]
    text: str


def same_outcome(cpu: Any, tpu: Any) -> bool:
    if isinstance(cpu, Raised) or isinstance(tpu, Raised):
        both = isinstance(cpu, Raised) and isinstance(tpu, Raised)
        return both and cpu.kind is tpu.kind and _plain(cpu) == _plain(tpu)
    if isinstance(cpu, Tensor) or (isinstance(cpu, tuple) and cpu and isinstance(cpu[0], Tensor)):
        return type(cpu) is type(tpu)  # the tensors are compared once they have joined their worlds
    return same_values(cpu, tpu)


def _plain(raised: Raised) -> str:
    """The text without what names the device or torch's own C++ stack."""
    text = raised.text.split("\nException raised from")[0].replace("tpu:0", "cpu")
    # as PyTorch names a type of PrivateUse1
    return re.sub(r"(?:torch\.(\w+)Tensor|CPU(\w+)Type)\{", r"tpu\1\2Type{", text)
