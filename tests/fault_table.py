"""Faults by injection: a step that fails at a given boundary of the engine, for each kind of training.

`tests/test_fault_table.py` runs the table; the ranks of a group run this file.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from torchtpu import startup
from torchtpu.runtime import _C


def refuse(*args: Any, **named: Any) -> Any:
    raise ValueError("refused by the test")


def refuse_memory(*args: Any, **named: Any) -> Any:
    raise RuntimeError("RESOURCE_EXHAUSTED: refused by the test")


def refuse_to_lower(*args: Any, **named: Any) -> Any:
    raise RuntimeError("refused by the test")


def has_marked_op(ops: Any) -> bool:
    return any("cosh" in op.name for op in ops)


def patch_where(patch: pytest.MonkeyPatch, owner: Any, name: str, is_meant: Callable[..., bool], fails: Any) -> None:
    works = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **named: (fails if is_meant(*args) else works)(*args, **named))


def lowering(patch: pytest.MonkeyPatch) -> None:
    patch_where(patch, startup.engine().fragments, "find", has_marked_op, refuse_to_lower)


def compiling(patch: pytest.MonkeyPatch) -> None:
    patch_where(patch, startup.engine().compiler, "_load_or_compile", lambda plan, *rest: "cosh" in plan.text(), refuse)


def loading(patch: pytest.MonkeyPatch) -> None:
    """What was compiled is refused where it becomes a program of the device."""
    compiler: Any = startup.engine().compiler
    works = compiler._load_or_compile

    def load(plan: Any, *rest: Any) -> Any:
        made = works(plan, *rest)
        return refuse() if "cosh" in plan.text() else made

    patch.setattr(compiler, "_load_or_compile", load)


def all_by_engine(patch: pytest.MonkeyPatch) -> None:
    """The recorder repeats no launch without the engine."""
    patch.setattr(startup.engine()._executor, "may_launch_directly", lambda work: False)
    _C.forget_direct_launches()


def launching(patch: pytest.MonkeyPatch, fails: Any = refuse) -> None:
    executor: Any = startup.engine()._executor
    works, execute = executor.run, executor._client.execute

    def run(work: Any, *rest: Any, **named: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            if has_marked_op(work.program.ops):
                inner.setattr(executor._client, "execute", fails)
                inner.setattr(executor._client, "execute_together", fails)
            return works(work, *rest, **named)

    patch.setattr(executor, "run", run)
    all_by_engine(patch)
    assert execute


def allocating(patch: pytest.MonkeyPatch) -> None:
    launching(patch, refuse_memory)


def launching_too_late(patch: pytest.MonkeyPatch) -> None:
    """The program has run, and has taken the memory of its inputs."""
    client: Any = startup.engine().client

    def fail_after(works: Any) -> Any:
        def run(*args: Any) -> Any:
            works(*args)
            return refuse()

        return run

    executor: Any = startup.engine()._executor
    run_works = executor.run

    def run(work: Any, *rest: Any, **named: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            if has_marked_op(work.program.ops):
                inner.setattr(client, "execute", fail_after(client.execute))
            return run_works(work, *rest, **named)

    patch.setattr(executor, "run", run)
    all_by_engine(patch)


def filling_the_disk(patch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **named: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(Path, "replace", full)


def turning_the_clock(patch: pytest.MonkeyPatch) -> None:
    now = time.time
    patch.setattr(time, "time", lambda: now() - 1e7)


class Fault(NamedTuple):
    """What is broken while a step runs, how that op raises on the CPU, and what is raised for it."""

    breaks: Callable[[pytest.MonkeyPatch], None] = lambda patch: None
    error: type[Exception] | None = RuntimeError
    match: str = "refused by the test"
    is_in_every_step: bool = False  # the op that fails: a program that is known fails at its launch alone
    is_undone: bool = True


FAULTS = {
    "allocation refused": Fault(allocating, torch.OutOfMemoryError, is_in_every_step=True),
    "lowering raises": Fault(lowering),
    "compile raises": Fault(compiling),
    "load raises": Fault(loading),
    "launch raises": Fault(launching, is_in_every_step=True),
    "launch raises after its inputs are gone": Fault(launching_too_late, is_in_every_step=True, is_undone=False),
    "a check on the device fails": Fault(error=IndexError, match="out of bounds", is_in_every_step=True),
    "a hook of the user's raises": Fault(error=ArithmeticError, match="by the hook", is_in_every_step=True),
    "the disk is full": Fault(filling_the_disk, None),
    "the clock jumps": Fault(turning_the_clock, None),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("begun", torch.zeros(()))
        self.register_buffer("ended", torch.zeros(()))

    def forward(self, x: torch.Tensor, places: torch.Tensor, is_marked: bool) -> torch.Tensor:
        with torch.no_grad():
            self.begun.add_(1)
        made = self.first(x).tanh()
        if is_marked:
            made = made.cosh()
        made = made[:, places]
        with torch.no_grad():
            self.ended.add_(1)
        return self.last(made)


class Training:
    """Steps of a model that `wrap` has made ready: compiled, or one of several ranks'. With `rows` that no other case
    has, its programs are new."""

    def __init__(
        self, device: str, rows: int, wrap: Callable[[nn.Module], Any] = lambda model: model, seed: int = 0
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        self.inner = Model().to(device)
        self.model = wrap(self.inner)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, eps=1e-3)
        self._rows = rows
        self._seed = seed

    def step(self, number: int, fault: str = "", *, is_failing: bool = False) -> torch.Tensor:
        """Raises on the CPU where the fault is; the same on the device as soon as its op does on the host."""
        generator = torch.Generator().manual_seed(100 * self._seed + number)
        x = torch.randn(self._rows, 6, generator=generator).to(self.device)
        places = torch.arange(8)
        if is_failing and fault == "a check on the device fails":
            places[3] = 99
        known = FAULTS.get(fault, Fault(error=None))
        self.optimizer.zero_grad()
        made = self.model(x, places.to(self.device), is_failing or known.is_in_every_step)
        if is_failing and fault == "a hook of the user's raises":
            made.register_hook(_raise)
        made.square().mean().backward()
        self.optimizer.step()
        return made.detach().sum()

    def state(self) -> dict[str, torch.Tensor]:
        found = {**self.inner.state_dict()}
        for n, own in enumerate(self.optimizer.state.values()):
            found.update((f"{n}.{name}", value) for name, value in own.items())
        return {name: _local(value).detach().cpu().clone() for name, value in found.items()}


def _raise(gradient: torch.Tensor) -> None:
    raise ArithmeticError("by the hook")


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def assert_alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys(), (one.keys(), other.keys())
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@contextlib.contextmanager
def broken(fault: str) -> Iterator[None]:
    torch.tpu.synchronize()
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault].breaks(patch)
        yield
        torch.tpu.synchronize()


def fail(training: Training, number: int, fault: str) -> None:
    """A step that fails, and reads."""
    known = FAULTS[fault]
    with broken(fault):
        if known.error is None:
            training.step(number, fault, is_failing=True).item()
            return
        with pytest.raises(known.error, match=known.match) as raised:
            training.step(number, fault, is_failing=True).item()
        assert raised.value.args


def run_case(fault: str, settled: int, ours: Training, reference: Training, *, is_compiled: bool = False) -> None:
    """The same steps on the device and on the CPU, of which one fails: the right error, once, and the state of the
    CPU's, from which both go on."""
    for number in range(settled):
        ours.step(number, fault).item()
        reference.step(number, fault)
    fail(ours, 50, fault)
    if FAULTS[fault].error is None:
        reference.step(50, fault, is_failing=True)
    elif is_compiled:  # in which nothing can be put in the way of an op: a graph writes its buffers at its end
        stops = fault if fault == "a hook of the user's raises" else "a check on the device fails"
        with pytest.raises(FAULTS[stops].error or Exception):
            reference.step(50, stops, is_failing=True)
    else:
        with pytest.raises(ZeroDivisionError), _stops_before_its_op(fault):
            reference.step(50, fault, is_failing=True)
    if FAULTS[fault].is_undone:
        assert_alike(ours.state(), reference.state())
    else:  # what the program took is gone, until it is loaded
        with pytest.raises(RuntimeError, match="refused by the test"):
            ours.state()
        ours.inner.load_state_dict(reference.inner.state_dict())
        ours.optimizer.load_state_dict(copy.deepcopy(reference.optimizer.state_dict()))
    torch.tpu.synchronize()
    for number in range(60, 62):
        ours.step(number, fault).item()
        reference.step(number, fault)
    assert_alike(ours.state(), reference.state())


@contextlib.contextmanager
def _stops_before_its_op(fault: str) -> Iterator[None]:
    """The CPU's step ends with ZeroDivisionError where the device's has failed."""

    def stop(*args: Any, **named: Any) -> Any:
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        if fault == "a check on the device fails":
            patch.setattr(torch.Tensor, "__getitem__", stop)
        elif fault == "a hook of the user's raises":
            patch.setitem(globals(), "_raise", stop)
        else:
            patch.setattr(torch.Tensor, "cosh", stop)
        yield


def rows_of(fault: str, settled: int) -> int:
    return 5 + 2 * list(FAULTS).index(fault) + (settled > 0)


def run_ranks(cases: list[str]) -> None:
    """What each of two ranks runs: these cases, each a fault and how many steps come before it, with both wrappers, all
    ranks failing alike. Each case has a group of its own, which ends where a collective fails."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("cpu:gloo,tpu:tpu")
    wrappers: dict[str, Callable[[nn.Module, Any], Any]] = {
        "DDP": lambda model, group: DistributedDataParallel(model, process_group=group),
        "FSDP2": lambda model, group: fully_shard(model, mesh=DeviceMesh.from_group(group, "tpu")),
    }
    for name, wrap in wrappers.items():
        for case in cases:
            fault, settled = case.rsplit(" ", 1)
            group = dist.new_group(backend="tpu")
            try:
                fail_on_all_ranks(fault, int(settled), lambda model, w=wrap, g=group: w(model, g))
            except Exception as error:
                print(f"{name} {case}: {type(error).__name__}: {error}"[:600], flush=True)
            else:
                print(f"{name} {case}: right", flush=True)
            dist.barrier()
    dist.destroy_process_group()


def fail_on_all_ranks(fault: str, settled: int, wrap: Callable[[nn.Module], Any]) -> None:
    import torch.distributed as dist

    known = FAULTS[fault]
    ours = Training("tpu", rows_of(fault, settled), wrap, seed=dist.get_rank())
    for number in range(settled):
        ours.step(number, fault).item()
    torch.tpu.synchronize()
    before = ours.state()
    with pytest.MonkeyPatch.context() as patch:
        known.breaks(patch)
        if known.error is None:
            ours.step(50, fault, is_failing=True).item()
            return
        with pytest.raises((known.error, dist.DistBackendError), match=known.match):
            ours.step(50, fault, is_failing=True).item()
        with contextlib.suppress(dist.DistBackendError):  # what other ranks have told meanwhile
            torch.tpu.synchronize()
    if known.is_undone:
        after = ours.state()
        for count in ("begun", "ended"):  # of a region of which nothing was launched
            after[count] = before[count]
        assert_alike(before, after)


if __name__ == "__main__":
    assert os.environ["WORLD_SIZE"] == "2"
    run_ranks(sys.argv[1:])
