"""Interrupts of both ranks leave what stock DDP on gloo leaves.

Each rank is interrupted once a round, at a random time, by a handler that raises while the rank runs forward or reads
and else leaves a note. The ranks then do as many steps as either has begun, and go on.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Stopped(Exception):
    pass


class Ended(BaseException):
    pass


class Training:
    """The same steps on the device and, later, on the CPU."""

    def __init__(self, device: str, group: Any) -> None:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).to(device)
        self._device = device
        self._model = DistributedDataParallel(layers, process_group=group)
        self._optimizer = torch.optim.SGD(layers.parameters(), lr=0.02, momentum=0.9)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self._inputs = torch.randn(64, 8, 16, generator=generator)
        self._targets = torch.randn(64, 8, 4, generator=generator)
        self.num_steps = 0

    def forward(self) -> torch.Tensor:
        self._optimizer.zero_grad()
        place = self.num_steps % len(self._inputs)
        made = self._model(self._inputs[place].to(self._device))
        loss: torch.Tensor = (made - self._targets[place].to(self._device)).square().mean()
        return loss

    def finish(self, loss: torch.Tensor) -> None:
        loss.backward()
        self._optimizer.step()
        self.num_steps += 1

    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().cpu() for parameter in self._model.parameters()]


class Interrupts:
    """What the handler raises, and when."""

    def __init__(self) -> None:
        self.kind: type[BaseException] = KeyboardInterrupt
        self.may_raise = False
        self.num_handled = 0

    def __call__(self, *_: Any) -> None:
        self.num_handled += 1
        if self.may_raise:
            raise self.kind("mine")


class Rank:
    """One of the two, and the store in which they tell each other how far they are."""

    def __init__(self) -> None:
        self._rank = dist.get_rank()
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._on_device = Training("tpu", dist.group.WORLD)
        self._on_host = Training("cpu", dist.new_group(backend="gloo"))
        self._interrupts = Interrupts()
        signal.signal(signal.SIGINT, self._interrupts)
        self.raised: Counter[str] = Counter()
        self._store.set(f"begun/{self._rank}", "0")
        self.go_on(12)  # DDP makes its buckets anew

    def _begin(self) -> None:
        self._store.set(f"begun/{self._rank}", str(self._on_device.num_steps + 1))

    def _begun(self) -> int:
        """The step that either rank has begun."""
        return max(int(self._store.get(f"begun/{rank}")) for rank in range(2))

    def go_on(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._begin()
            self._on_device.finish(self._on_device.forward())

    def train_until_interrupted(self, kind: type[BaseException], seconds: float, steps_per_read: int) -> None:
        interrupts, training = self._interrupts, self._on_device
        interrupts.kind = kind
        before = interrupts.num_handled
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        where = "forward"
        raised: list[BaseException] = []
        try:
            while interrupts.num_handled == before:
                where = "forward"
                self._begin()
                interrupts.may_raise = True
                loss = training.forward()
                interrupts.may_raise = False
                training.finish(loss)
                where = "read"
                if training.num_steps % steps_per_read == 0:
                    interrupts.may_raise = True
                    if interrupts.num_handled == before:  # else the other rank may be waiting for this one
                        loss.item()
                    interrupts.may_raise = False
        except (KeyboardInterrupt, Stopped, Ended) as error:
            raised.append(error)
        finally:
            interrupts.may_raise = False
        timer.join()
        assert interrupts.num_handled == before + 1
        if raised:
            assert [(type(error), error.args) for error in raised] == [(kind, ("mine",))], raised
            self.raised[where] += 1

    def meet(self, number: int) -> None:
        """Goes on until both are interrupted and have done what either has begun."""
        self._store.set(f"stopped/{number}/{self._rank}", "")
        is_last = False
        while not is_last:
            is_last = self._store.check([f"stopped/{number}/{1 - self._rank}"])
            self.go_on(self._begun() - self._on_device.num_steps)
            time.sleep(0.001)

    def check(self) -> None:
        while self._on_host.num_steps < self._on_device.num_steps:
            self._on_host.finish(self._on_host.forward())
        found, wanted = self._on_device.parameters(), self._on_host.parameters()
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def check_all(num_interrupts: int) -> None:
    rank = Rank()
    own, common = random.Random(dist.get_rank()), random.Random(7)
    for number in range(num_interrupts):
        kind = (KeyboardInterrupt, Stopped, Ended)[number % 3]
        rank.train_until_interrupted(kind, own.uniform(0.001, 0.05), common.choice([1, 1, 10, 50]))
        rank.meet(number)
        rank.check()
    rank.go_on(20)
    rank.check()
    assert rank.raised["read"] > num_interrupts // 10, rank.raised
    signal.signal(signal.SIGINT, signal.default_int_handler)
