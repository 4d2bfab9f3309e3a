"""Ranks that do different things in every step learn what ranks in step learn."""

from __future__ import annotations

import datetime as dt
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from distributed_fusion import counts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

PLACES = ("at the start", "in forward", "after forward", "after backward", "after clipping", "after the step")
STEPS_IN_STEP = 10  # at the end, when nobody differs any more


class InStep:
    """What ranks do that do not differ: at every place they note the mean of a value, which is read at the end."""

    does_log = True

    def __init__(self) -> None:
        self._noted: dict[tuple[int, str], torch.Tensor] = {}
        self._step = 0

    def begin(self, step: int) -> None:
        self._step = step

    def at(self, place: str, value: torch.Tensor) -> None:
        self._noted[self._step, place] = mean(value)

    def seen(self) -> dict[tuple[int, str], float]:
        """The means by step and place."""
        return {key: value.item() for key, value in self._noted.items()}


class Differing:
    """What a rank does that differs: some acts at random places. `name` is no other run's."""

    def __init__(self, name: str, steps: int) -> None:
        self._own = random.Random(f"{name} {dist.get_rank()}")
        self._everyones = random.Random(name)  # draws alike on all ranks
        self._name = name
        self._last_step = steps - STEPS_IN_STEP - 1
        self._step, self._place = 0, ""
        self._speaker: int | None = None
        self._acts: list[tuple[str, Callable[[torch.Tensor], None]]] = []
        self._kept: list[Any] = []
        self._threads: list[threading.Thread] = []
        self._seen: dict[tuple[int, str], float] = {}
        self.does_log = True
        self.done: Counter[str] = Counter()

    def begin(self, step: int) -> None:
        """Chooses what this rank does in a step, and where."""
        own, everyones = self._own, self._everyones
        self._step, self._acts, self.does_log = step, [], True
        if step > self._last_step:
            self._kept = []
            return
        acts = (self.read, self.read_beside, self.evaluate, self.keep, self.copy, self.synchronize, self.collect)
        for _ in range(own.choice((0, 0, 1, 2))):
            self._acts.append((own.choice(PLACES), own.choice(acts)))
        if own.random() < 0.02:
            self._acts.append((own.choice(PLACES), self.sleep))
        self.does_log = own.random() < 0.9
        self._speaker, place = everyones.randrange(dist.get_world_size()), everyones.choice(PLACES)
        if everyones.random() < 0.05:
            self._acts.append((place, self.wait_for_speaker))
        self._kept = self._kept[-3:]

    def at(self, place: str, value: torch.Tensor) -> None:
        with torch.no_grad():
            for wanted, act in self._acts:
                if wanted == place:
                    self.done[act.__name__] += 1
                    self._place = place
                    act(value)

    def seen(self) -> dict[tuple[int, str], float]:
        for thread in self._threads:
            thread.join()
        return self._seen

    def read(self, value: torch.Tensor) -> None:
        str(local(value))
        self._seen[self._step, self._place] = mean(value).item()

    def read_beside(self, value: torch.Tensor) -> None:
        """Another thread reads while this one goes on."""
        thread = threading.Thread(target=local(value).tolist)
        thread.start()
        self._threads = [*(t for t in self._threads if t.is_alive()), thread]

    def evaluate(self, value: torch.Tensor) -> None:
        """Ops that no other rank has; of half of them nobody sees the result."""
        found = (local(value) * 2).softmax(-1).sum(-1)
        if self._own.random() < 0.5:
            torch.testing.assert_close(found, torch.ones_like(found))

    def keep(self, value: torch.Tensor) -> None:
        """What else dies in the step lives on."""
        self._kept.append(value)

    def copy(self, value: torch.Tensor) -> None:
        self._kept.append(local(value).to("cpu", non_blocking=True))

    def synchronize(self, value: torch.Tensor) -> None:
        torch.tpu.synchronize()

    def collect(self, value: torch.Tensor) -> None:
        gc.collect()

    def sleep(self, value: torch.Tensor) -> None:
        time.sleep(0.6)  # others' collectives are launched meanwhile

    def wait_for_speaker(self, value: torch.Tensor) -> None:
        """One rank reads a value, for which the others wait in the store."""
        store = dist.distributed_c10d._get_default_store()
        key = f"{self._name} {self._step}"
        if dist.get_rank() == self._speaker:
            store.set(key, str(local(value).sum().item()))
        else:
            store.wait([key], dt.timedelta(seconds=100))


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def mean(value: torch.Tensor) -> torch.Tensor:
    return local(value).detach().mean()


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 13), nn.GELU(), nn.Linear(13, 16), nn.Tanh(), nn.Linear(16, 8)).to("tpu")


def sharded() -> nn.Module:
    model = make_model()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def replicated() -> nn.Module:
    return DistributedDataParallel(make_model(), bucket_cap_mb=0.0005)


def hybrid() -> nn.Module:
    """Sharded among half of the ranks, replicated in the other half: programs of two kinds of groups."""
    mesh = init_device_mesh("tpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model = make_model()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: nn.Module, steps: int, ranks: InStep | Differing) -> tuple[list[float], dict[str, int]]:
    """The losses, and the counts of the last step."""
    layers: Any = model.module if isinstance(model, DistributedDataParallel) else model
    layers[2].register_forward_hook(lambda module, given, made: ranks.at("in forward", made))
    first = layers[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    losses = []
    running = torch.zeros((), device="tpu")
    before: dict[str, Any] = {}
    for step in range(steps):
        ranks.begin(step)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank())).to("tpu")
        ranks.at("at the start", x)
        loss = (model(x) - x).pow(2).mean()
        ranks.at("after forward", loss)
        loss.backward()
        ranks.at("after backward", first.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        ranks.at("after clipping", first.grad)
        optimizer.step()
        ranks.at("after the step", first)
        optimizer.zero_grad()
        losses.append(loss.detach())
        if ranks.does_log:
            running = running * 0.9 + loss.detach() * 0.1
        if step >= steps - STEPS_IN_STEP:
            torch.tpu.synchronize()
            last = {name: value - before.get(name, 0) for name, value in counts().items()}
            before = counts()
    assert running.item() > 0
    return [loss.item() for loss in losses], last


def check_all(steps: int) -> None:
    """So many steps of each kind of training, and some more in which nobody differs."""
    steps += STEPS_IN_STEP
    for make in (sharded, replicated, *([hybrid] if dist.get_world_size() > 2 else [])):
        ranks_in_step = InStep()
        model = make()
        losses, _ = train(model, steps, ranks_in_step)
        wanted = ranks_in_step.seen()
        parameters = [local(p.detach()).cpu() for p in model.parameters()]
        model, before = make(), counts()
        ranks = Differing(make.__name__, steps)
        found, last = train(model, steps, ranks)
        torch.testing.assert_close(found, losses, rtol=1e-6, atol=1e-6)
        for place, value in ranks.seen().items():
            torch.testing.assert_close(value, wanted[place], rtol=1e-5, atol=1e-6, msg=str(place))
        for parameter, expected in zip(model.parameters(), parameters, strict=True):
            torch.testing.assert_close(local(parameter.detach()).cpu(), expected, rtol=1e-5, atol=1e-6)
        assert last["collectives_alone"] == 0, last  # they agree again
        made = {name: value - before[name] for name, value in counts().items()}
        share = made["collectives_fused"] / (made["collectives_fused"] + made["collectives_alone"])
        print(
            f"rank {dist.get_rank()}: {make.__name__}: {made['votes'] / steps:.2f} votes and "
            f"{made['launches'] / steps:.1f} launches a step, {share:.0%} of the collectives fused; {dict(ranks.done)}",
            flush=True,
        )
