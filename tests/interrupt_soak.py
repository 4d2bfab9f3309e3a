"""Interrupts training loops at random moments and compares what is left, each time, with PyTorch on the CPU.

    python tests/interrupt_soak.py --model mlp --every 10 --interrupts 1000

After each interrupt the very exception that the handler raised must have left the loop, the state must be that of the
CPU at a boundary between two ops of the step that was interrupted, and 20 further steps must agree with the CPU's.
Prints one line of counts; its status is 1 where any of them is wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

SIGNALS = signal.SIGINT, signal.SIGALRM, signal.SIGTERM
LONGEST_SECONDS = 0.05  # until a signal comes
PATIENCE_SECONDS = 60.0  # until it must have raised
STEPS_AFTER = 20
BATCHES = 8

# What is raised in these files, or in a __del__, PyTorch or Python itself logs and drops, on any device.
SWALLOWS = (
    str(Path("torch", "autograd", "profiler.py")),
    str(Path("torch", "_dynamo", "guards.py")),
    "weakref.py",
    "_weakrefset.py",
)


class Failure(Exception):
    """What a handler of the user's raises."""


class Stop(BaseException):
    """The same, where `except Exception` is not meant to catch it."""


KINDS: tuple[type[BaseException], ...] = (KeyboardInterrupt, Failure, Stop)


class Attention(nn.Module):
    """A transformer's block of one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norm1(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.feed(self.norm2(x))


def make_model(name: str) -> nn.Module:
    torch.manual_seed(1)
    if name == "gpt":
        return nn.Sequential(nn.Linear(8, 16), Attention(16), Attention(16), nn.Linear(16, 4))
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def make_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(4, 6, 8, generator=generator), torch.randn(4, 6, 4, generator=generator)) for _ in range(BATCHES)
    ]


class Batches(Dataset[tuple[int, Tensor, Tensor]]):
    def __len__(self) -> int:
        return 100 * BATCHES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index % BATCHES, *make_batches()[index % BATCHES]


class Training:
    """A model with its optimizer on one device."""

    def __init__(self, name: str, device: str, *, compiles: bool = False) -> None:
        self.device = device
        self.model = make_model(name).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, foreach=True)
        self.forward: Callable[[Tensor], Tensor] = self.model
        if compiles:
            self.forward = torch.compile(self.model, backend="aot_eager" if device == "cpu" else "inductor")
        self.batches = [(x.to(device), y.to(device)) for x, y in make_batches()]

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = ((self.forward(x) - y) ** 2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def tensors(self) -> list[Tensor]:
        parameters = list(self.model.parameters())
        return parameters + [self.optimizer.state[p]["momentum_buffer"] for p in parameters]

    def state(self) -> list[Tensor]:
        return [tensor.detach().to("cpu", copy=True) for tensor in self.tensors()]

    def load(self, state: list[Tensor]) -> None:
        with torch.no_grad():
            for own, given in zip(self.tensors(), state, strict=True):
                own.copy_(given)


class Boundaries(TorchDispatchMode):
    """The states between the ops that run under it."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self._training = training
        self.states = [training.state()]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function._schema.is_mutable:
            with torch.utils._python_dispatch._disable_current_modes():
                self.states.append(self._training.state())
        return made


class Sender:
    """Sends one signal at a time and raises, in the user's thread, an exception that is never the same."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._thread: threading.Thread | None = None
        self.raised: BaseException | None = None
        self.num_repeated = 0  # calls of the handler beyond one for each signal
        self.sent: Counter[str] = Counter()
        self._kind: type[BaseException] = KeyboardInterrupt
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        at = frame
        while at is not None:
            if at.f_code.co_name == "__del__" or at.f_code.co_filename.endswith(SWALLOWS):
                signal.setitimer(signal.ITIMER_REAL, 1e-4)
                return
            at = at.f_back
        if self.raised is not None:
            self.num_repeated += 1
            return
        self.raised = self._kind(self.sent.total())
        self.raised.add_note("".join(traceback.format_stack(frame, 3)))
        raise self.raised

    def start(self) -> None:
        number, self._kind = self._random.choice(SIGNALS), self._random.choice(KINDS)
        self.raised = None
        self.sent[f"{number.name} {self._kind.__name__}"] += 1
        seconds = self._random.uniform(1e-3, LONGEST_SECONDS)
        if number == signal.SIGALRM:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            return
        self._thread = threading.Timer(seconds, os.kill, (os.getpid(), number))
        self._thread.start()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def is_close(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(left, right, strict=True))


def batches_of(training: Training, *, with_workers: bool) -> Iterator[tuple[int, Tensor, Tensor]]:
    if not with_workers:
        while True:
            for index, (x, y) in enumerate(training.batches):
                yield index, x, y
    while True:
        for index, x, y in DataLoader(Batches(), batch_size=None, num_workers=2):
            yield int(index), x.to(training.device), y.to(training.device)


def replay(training: Training, index: int) -> Tensor:
    return training.step(*training.batches[index])


class Soak:
    def __init__(self, model: str, every: int, seed: int, device: str) -> None:
        self._every = every
        self._with_workers = model == "loader"
        self.device, self.cpu = Training(model, device, compiles=model == "compiled"), Training(model, "cpu")
        for training in (self.device, self.cpu):
            for index in range(3):  # makes the momentum, and what the loop needs of programs
                replay(training, index).item()
        self._sender = Sender(seed)
        self.counts: Counter[str] = Counter()

    @property
    def num_repeated(self) -> int:
        return self._sender.num_repeated

    @property
    def sent(self) -> Counter[str]:
        return self._sender.sent

    def interrupt(self) -> None:
        """One interrupt, and what is left after it."""
        before = self.device.state()
        used: list[int] = []  # the batches of the steps that have begun
        done = 0
        sender, caught = self._sender, None
        batches = batches_of(self.device, with_workers=self._with_workers)
        first = next(batches)  # workers start before a signal comes: they would be told to end by it
        try:
            sender.start()
            deadline = time.monotonic() + PATIENCE_SECONDS
            index, x, y = first
            while time.monotonic() < deadline:
                used.append(index)
                loss = self.device.step(x, y)
                done += 1
                if done % self._every == 0:
                    loss.item()
                index, x, y = next(batches)
        except BaseException as error:
            caught = error
        sender.join()
        batches.close()
        torch.set_grad_enabled(
            True
        )  # what is raised in the first line of a torch.no_grad() leaves it off, on any device
        self.counts["steps"] += done
        if caught is None:
            self._fail("swallowed", f"{sender.raised!r} was swallowed\n{''.join(sender.raised.__notes__)}")
        elif caught is not sender.raised:
            self._fail("changed", f"{sender.raised!r} became {caught!r}")
        self._compare(before, used, done)

    def _compare(self, before: list[Tensor], used: list[int], done: int) -> None:
        try:
            left = self.device.state()
        except BaseException as error:
            self._fail("lost", repr(error))
            self.device.load(before)
            return
        self.cpu.load(before)
        for index in used[:done]:
            replay(self.cpu, index)
        with Boundaries(self.cpu) as boundaries:
            for index in used[done:]:
                replay(self.cpu, index)
        if not any(is_close(left, state) for state in boundaries.states):
            self._fail("wrong", f"after {done} steps the state is none of {len(boundaries.states)} on the CPU")
        self.cpu.load(left)
        for training in (self.cpu, self.device):
            for step in range(STEPS_AFTER):
                replay(training, step % BATCHES)
        if not is_close(self.device.state(), self.cpu.state()):
            self._fail("diverged", f"{STEPS_AFTER} steps later")

    def _fail(self, what: str, text: str) -> None:
        self.counts[what] += 1
        print(f"{what}: {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("mlp", "gpt", "compiled", "loader"), default="mlp")
    parser.add_argument("--device", default="tpu", help="cpu: what PyTorch itself does under the same treatment")
    parser.add_argument("--every", type=int, default=1, help="steps between two reads")
    parser.add_argument("--interrupts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="to stop after")
    options = parser.parse_args()
    ignored: list[Any] = []
    sys.unraisablehook = ignored.append
    soak = Soak(options.model, options.every, options.seed, options.device)
    end = time.monotonic() + options.seconds
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(options.interrupts):
            soak.interrupt()
            if time.monotonic() > end:
                break
    wrong = {name: soak.counts[name] for name in ("lost", "wrong", "diverged", "changed", "swallowed")}
    wrong["repeated"] = soak.num_repeated
    wrong["warnings"] = len({str(warning.message) for warning in warned if "tpu" in str(warning.message).lower()})
    wrong["ignored"] = len(ignored)
    print(
        f"{options.device} {options.model} every {options.every}:",
        f"{soak.sent.total()} interrupts of {soak.counts['steps']} steps,",
        ", ".join(f"{count} {name}" for name, count in wrong.items()),
        f"({', '.join(f'{count} {name}' for name, count in sorted(soak.sent.items()))})",
    )
    for unraisable in ignored[:5]:
        print("ignored:", repr(unraisable.exc_value), "in", unraisable.object)
    for text in {str(warning.message) for warning in warned}:
        print("warning:", text)
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
