"""Checks padded programs: each launch is made a second time with another surplus, and what counts has to be the same.

The second launch has arrays of its own, and nobody else sees what it makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchtpu.runtime.device.client import Client
from torchtpu.runtime.ir.calls import full_name, results_of
from torchtpu.runtime.ir.program import Program

from .arrays import PaddedWork, download


class SecondLaunch:
    """The launch of a padded program with another surplus."""

    is_subgraph = True  # its device-side checks are the first launch's

    def __init__(self, client: Client, work: PaddedWork) -> None:
        self.error: BaseException | None = None  # why it was not made
        self._client = client
        self._work = work
        self._arrays: list[Any] = []
        self._guards: list[Any] = []

    @property
    def recorded(self) -> SecondLaunch:
        """Itself: where it fails, nothing is computed in its stead."""
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def inputs(self) -> list[Any]:
        found = []
        for array, shape in zip(self._work.inputs(), self._work.shapes, strict=True):
            values = self._client.download(array).clone()
            if shape is not None:
                counting, values = values, surplus(tuple(values.shape), values.dtype)
                part = tuple(map(slice, shape))
                values[part] = counting[part]
            found.append(self._client.upload(values, self._work.device))
        return found

    def done(self, arrays: list[Any], guards: list[Any]) -> None:
        self._arrays, self._guards = list(arrays), list(guards)

    def failed(self, error: BaseException) -> None:
        self.error = error

    def difference(self, arrays: Sequence[Any], guards: Sequence[Any], shapes: Sequence[Any]) -> RuntimeError | None:
        """What to raise where the first launch made something else, of which so much counts; waits for both."""
        if self.error is not None:
            return None
        program: Program = self._work.program
        differing = {
            program.outputs[k]
            for k, (one, other, shape) in enumerate(zip(arrays, self._arrays, shapes, strict=True))
            if _has_failed(guards, k) != _has_failed(self._guards, k)
            or not _are_equal(*(_counting(download(self._client, array), shape) for array in (one, other)))
        }
        for op in program.ops:
            if any(made.value in differing for made in results_of(op)):
                return RuntimeError(
                    f"{full_name(op.name)} recorded at {op.line}, or an op that it depends on, makes something else of "
                    "longer arrays where what is behind their data differs: a wrong rule of padding. "
                    "TORCHTPU_PADDING=0 does without."
                )
        return None


def surplus(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An array of what shows in every result that it reaches."""
    if dtype.is_floating_point or dtype.is_complex:
        kinds = torch.tensor([float("nan"), 1e30, -1e30, 1.0])
    elif dtype == torch.bool:
        kinds = torch.tensor([True, False])
    else:
        kinds = torch.tensor([1, torch.iinfo(dtype).max, torch.iinfo(dtype).min, 0])
    count = torch.Size(shape).numel()
    return kinds.repeat(count // len(kinds) + 1)[:count].to(dtype).reshape(tuple(shape))


def _counting(values: torch.Tensor, shape: Sequence[int] | None) -> torch.Tensor:
    return values if shape is None else values[tuple(map(slice, shape))]


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    bits = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(*bits)


def _has_failed(guards: Sequence[Any], output: int) -> bool:
    return bool(guards) and guards[output] is not None and guards[output].has_failed()
