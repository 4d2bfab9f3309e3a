"""Builds, launches, checks and hooks that fail raise the right error in the right place, and the device goes on."""

from __future__ import annotations

import _thread
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from script import run_script
from torch import nn
from torch.nn import functional as F

import torchtpu
from torchtpu import config, startup
from torchtpu.runtime import _C
from torchtpu.runtime.device.client import Client
from torchtpu.runtime.device.sizes import nbytes_of


def line(offset: int = 0) -> str:
    """This file and the line that is `offset` below the caller's."""
    return f"{__file__}:{sys._getframe(1).f_lineno + offset}"


def refuse(*args: Any, **named: Any) -> Any:
    raise ValueError("refused by the test")


def host(*values: float) -> torch.Tensor:
    """A tensor of the device that is no part of a pending region."""
    return torch.tensor(values, device="tpu")


BREAKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "compile": lambda patch: patch.setattr(startup.engine().compiler, "_load_or_compile", refuse),
    "lower": lambda patch: patch.setattr(startup.engine().plans, "find", refuse),
    "launch": lambda patch: patch.setattr(startup.engine().client, "execute", refuse),
}


@pytest.mark.parametrize("stage", BREAKS)
def test_a_failure_is_raised_by_the_read_and_poisons_only_what_depends_on_it(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, other = host(1.0, 2.0, 3.0), host(5.0, 6.0)
    op = {"compile": torch.sinh, "lower": torch.cosh, "launch": torch.atan}[stage]

    def compute() -> torch.Tensor:
        return op(x).neg()

    with monkeypatch.context() as patch:
        BREAKS[stage](patch)
        y = compute()
        with pytest.raises(RuntimeError, match="refused by the test") as first:
            y.cpu()
    z = y + 1
    with pytest.raises(RuntimeError, match="refused by the test") as second:
        z.cpu()
    assert str(second.value) == str(first.value)
    assert (other * 2).tolist() == [10.0, 12.0]
    torch.testing.assert_close(compute().cpu(), op(x.cpu()).neg())  # the same region is built anew
    torch.tpu.synchronize()  # the error has been read


@pytest.mark.bailouts("padding")
def test_an_op_that_fails_where_it_is_padded_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for length in (4, 5, 6, 7):
        assert torch.ones(length).to("tpu").acosh().tolist() == [0.0] * length
    client, refused = startup.engine().client, []
    execute = client.execute

    def refuse_padded(executable: Any, arguments: Any, *rest: Any) -> Any:
        if any(nbytes_of(argument) > 11 * 4 for argument in arguments):
            refused.append(executable)
            raise ValueError("refused by the test")
        return execute(executable, arguments, *rest)

    monkeypatch.setattr(client, "execute", refuse_padded)
    assert torch.ones(11).to("tpu").acosh().tolist() == [0.0] * 11
    assert len(refused) == 1


@pytest.mark.parametrize("stage", ["compile", "launch"])
def test_a_failure_names_the_op_and_the_lines(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = host(1.0, 2.0, 3.0)
    BREAKS[stage](monkeypatch)
    recorded = line(1)
    y = (torch.asinh if stage == "compile" else torch.expm1)(x)
    read = line(2)
    with pytest.raises(RuntimeError) as failure:
        y.cpu()
    for part in ("aten::asinh" if stage == "compile" else "aten::expm1", recorded, read):
        assert part in str(failure.value)


def test_what_goes_wrong_while_a_build_is_reported_reaches_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    BREAKS["compile"](monkeypatch)
    monkeypatch.setattr("torchtpu.runtime.engine._not_compiled", refuse)
    read = torchtpu.async_read(host(1.0, 2.0).cosh() * 3)
    with pytest.raises(RuntimeError, match="refused by the test"):
        read.result(60)  # a reader that nobody tells waits for ever


def test_an_op_that_cannot_be_lowered_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 13, device="tpu")
    x.cpu()
    monkeypatch.setattr(startup.engine().fragments, "_lowerings", SimpleNamespace(entry=refuse))
    recorded = line(1)
    y = x.cosh()
    with pytest.raises(RuntimeError, match=re.escape(f"recorded at {recorded} cannot be lowered: ValueError: refused")):
        y.cpu()
    del y


CHECKS: dict[str, tuple[type[Exception], Callable[[], torch.Tensor]]] = {
    "index": (IndexError, lambda: host(1.0, 2.0)[torch.tensor([0, 9], device="tpu")]),
    "embedding": (IndexError, lambda: F.embedding(torch.tensor([7], device="tpu"), torch.ones(3, 2, device="tpu"))),
    "nll_loss": (IndexError, lambda: F.nll_loss(torch.ones(2, 3, device="tpu"), torch.tensor([0, 3], device="tpu"))),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_on_the_device_is_raised_by_the_read_as_the_ops_error(name: str) -> None:
    error, compute = CHECKS[name]
    y = compute()
    z = y * 2
    for tensor in (y, z):
        with pytest.raises(error, match=rf"\(aten::\w*{name}[\w.]* recorded at {re.escape(__file__)}:\d+\)"):
            tensor.cpu()
    assert host(1.0, 2.0).add(1).tolist() == [2.0, 3.0]
    torch.tpu.synchronize()


TYPED = """
def run():
    x = torch.ones(size, device="tpu")
    y = x[torch.tensor([7], device="tpu")]
    try:
        y.cpu()
    except IndexError as error:
        raised.append(str(error))
    ended.release()
"""


@pytest.mark.parametrize(("path", "size"), [("<string>", 3), ("<stdin>", 4), ("<ipython-input-3-0e1c>", 5)])
def test_an_error_names_the_line_of_code_that_is_in_no_file(path: str, size: int) -> None:
    ended, names = _thread.allocate_lock(), dict[str, Any]()
    ended.acquire()
    names |= {"torch": torch, "raised": [], "ended": ended, "size": size}  # a stream for each
    exec(compile(TYPED, path, "exec"), names)
    _thread.start_new_thread(names["run"], ())  # no file calls it
    assert ended.acquire(timeout=60)
    assert f"recorded at {path}:4)" in names["raised"][0]


def test_a_failed_check_is_raised_by_work_launched_later() -> None:
    weight = torch.ones(3, 2, device="tpu")
    weight.cpu()
    y = F.embedding(torch.tensor([7], device="tpu"), weight)
    _C.cut("test")  # the region ends here
    z = y + 1
    with pytest.raises(IndexError, match="aten::embedding"):
        z.cpu()
    assert (weight + 1).sum().item() == 12


def test_a_failed_check_spares_what_does_not_depend_on_it() -> None:
    weight = torch.ones(3, 2, device="tpu")  # made in the same region
    y = F.embedding(torch.tensor([7], device="tpu"), weight)
    with pytest.raises(IndexError, match="aten::embedding"):
        y.cpu()
    assert weight.tolist() == [[1.0, 1.0]] * 3


def test_what_depends_on_a_failed_check_raises_the_error_of_the_first() -> None:
    x, bad = host(1.0, 2.0, 3.0), torch.tensor([7], device="tpu")
    first = x[bad]
    second = F.embedding(bad, torch.ones(3, 2, device="tpu"))
    both, neither = second.sum() + first, x[1:] * 2
    assert neither.tolist() == [4.0, 6.0]
    for tensor in (second, first, both):
        with pytest.raises(IndexError, match=r"aten::index\.Tensor"):
            tensor.cpu()
    assert (x + 1).tolist() == [2.0, 3.0, 4.0]
    torch.tpu.synchronize()


def test_checks_cost_the_same_however_far_the_device_lags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight weights of which each new one depends on all and on a check: a guard asks once, not along every path. A
    region is one program, as where devices lag."""
    weights = [torch.ones(3, 2, device="tpu") for _ in range(8)]
    index, one = torch.tensor([1], device="tpu"), torch.ones((), device="tpu")
    asked = 0
    is_ready = Client.is_ready

    def lagging(client: Client, array: Any) -> bool:
        nonlocal asked
        asked += 1
        return not is_lagging and is_ready(client, array)

    def step() -> None:
        nonlocal weights
        picked = torch.stack([F.embedding(index, w).sum() for w in weights]).sum()
        weights = [w * 0.5 + picked * i for i, w in enumerate(weights)]
        assert (one + 1).item() == 2  # ends the region

    is_lagging = True
    monkeypatch.setattr(Client, "is_ready", lagging)
    counts = []
    with config.using(tiers="off"):
        for _ in range(20):
            asked = 0
            step()
            counts.append(asked)
    assert max(counts[10:]) <= max(counts[1:5]), counts
    is_lagging = False
    assert all(bool(w.isfinite().all()) for w in weights)


def test_a_failed_input_fails_what_depends_on_it_and_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    x, index = host(1.0, 2.0, 3.0), torch.tensor([1, 2], device="tpu")
    index.cpu()
    with monkeypatch.context() as patch:
        BREAKS["launch"](patch)
        index = index + 40
        with pytest.raises(RuntimeError, match="refused"):
            index.cpu()
    taken, other = x[index], x * 3  # one region
    assert other.tolist() == [3.0, 6.0, 9.0]
    with pytest.raises(RuntimeError, match="refused"):
        taken.cpu()
    torch.tpu.synchronize()  # no index was out of range


def test_an_error_in_a_stream_recorded_elsewhere_names_the_line_of_its_run() -> None:
    x = host(1.0, 2.0, 3.0)
    good, bad = torch.tensor([1], device="tpu"), torch.tensor([9], device="tpu")
    _C.forget_streams()  # of other tests
    recorded = line(1)
    (x[good] * 3.5).cpu()
    entered = line(2)
    with pytest.raises(IndexError) as failure:
        (x[bad] * 3.5).cpu()
    assert f"first recorded at {recorded}; this run entered from {entered})" in str(failure.value)
    with pytest.raises(IndexError, match=rf"\(aten::index\.Tensor recorded at {re.escape(line(1))}\)"):
        (x.neg()[bad] * 3.5).cpu()


@pytest.mark.parametrize("stage", BREAKS)
def test_a_failure_of_a_stream_recorded_elsewhere_names_the_line_of_its_run(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, scale = host(1.0, 2.0, 3.0), {"compile": 1.25, "lower": 1.375, "launch": 1.5}[stage]
    kept = x.expand(2, 3) / 7  # its first op is recorded with another live set
    x.expand(2, 3) / 7 * 1.0 - scale
    del kept
    torch.tpu.synchronize()
    with monkeypatch.context() as patch:
        BREAKS[stage](patch)
        entered = line(2)
        with pytest.raises(RuntimeError) as failure:
            (x.expand(2, 3) / 7 * 1.0 - scale).cpu()
        assert f"this run entered from {entered}" in str(failure.value)


def test_synchronize_raises_an_unread_error_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = host(1.0, 2.0, 3.0)
    with monkeypatch.context() as patch:
        BREAKS["compile"](patch)
        y = x.erfc()
        with pytest.raises(RuntimeError, match="refused by the test"):
            torch.tpu.synchronize()
    torch.tpu.synchronize()
    with pytest.raises(RuntimeError, match="refused by the test"):  # the value stays poisoned
        y.cpu()
    y = torch.ones(3, device="tpu")[torch.tensor([5], device="tpu")]
    with pytest.raises(IndexError, match="aten::index"):
        torch.tpu.synchronize()
    torch.tpu.synchronize()
    del y


def test_a_read_error_keeps_no_frame_and_no_tensor_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    x = host(1.0, 2.0, 3.0)
    BREAKS["compile"](monkeypatch)
    y = x.log1p()
    lengths = []
    for _ in range(3):
        with pytest.raises(RuntimeError, match="refused") as failure:
            y.cpu()
        lengths.append(len(failure.traceback))
    assert lengths[0] == lengths[1] == lengths[2]


@pytest.mark.parametrize(
    "heal",
    [
        pytest.param(lambda x: x.copy_(torch.full((3,), 4.0)), id="copy from the host"),
        pytest.param(lambda x: setattr(x, "data", torch.full((3,), 4.0, device="tpu")), id="data"),
        pytest.param(lambda x: x.fill_(4), id="fill"),
        pytest.param(lambda x: x.zero_().add_(4), id="zero"),
        pytest.param(lambda x: x.copy_(torch.full((3,), 2.0, device="tpu") + 2), id="copy on the device"),
    ],
)
def test_a_poisoned_tensor_is_healed_by_a_write_that_replaces_it(
    heal: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = host(1.0, 2.0, 3.0)
    with monkeypatch.context() as patch:
        BREAKS["launch"](patch)
        x = x.add(1)
        with pytest.raises(RuntimeError, match="refused"):
            x.cpu()
    heal(x)
    assert x.tolist() == [4.0, 4.0, 4.0]


def test_too_large_a_program_is_out_of_memory_and_a_smaller_one_runs() -> None:
    x = torch.ones(1000, device="tpu")
    x.cpu()
    torch.tpu.synchronize()
    recorded = line(2)
    with torchtpu.config.using(memory_limit=2_000_000):
        y = x.expand(2000, 1000).cosh()
        with pytest.raises(torch.OutOfMemoryError) as failure:
            y.cpu()
        del y
        assert (x + 1).sum().item() == 2000
    for part in ("tpu:0 out of memory", "8.01 MB more", "of 2.00 MB", "aten::cosh", recorded):
        assert part in str(failure.value)
    del failure
    assert x.expand(2000, 1000).cosh().sum().item() > 0


@pytest.mark.parametrize("tiers", ["first", "pieces"])
def test_a_batch_that_does_not_fit_leaves_what_was_made_before_it(tiers: str) -> None:
    """The upload is the last thing before the error: eager PyTorch had the weights by then."""
    with torchtpu.config.using(memory_limit=2 << 20, **({"tiers": tiers} if tiers == "pieces" else {})):
        net = torch.nn.Linear(300, 10, device="tpu")
        with pytest.raises(torch.OutOfMemoryError):
            net(torch.ones(4000, 300).to("tpu")).sum().item()
        loss = net(torch.ones(100, 300).to("tpu")).sum()
        loss.backward()
        total = 100 * (net.weight.sum() + net.bias.sum()).item()
        assert loss.item() == pytest.approx(total, rel=1e-3, abs=1e-2)
        assert net.bias.grad.tolist() == [100.0] * 10


def test_sync_raises_on_the_ops_own_line() -> None:
    x = host(1.0, 2.0)
    indices = torch.tensor([3], device="tpu")
    with torchtpu.config.using(sync=True):
        number = line(2)
        with pytest.raises(IndexError) as failure:
            x[indices]
        assert f"{failure.traceback[0].path}:{failure.traceback[0].lineno + 1}" == number
        assert (x + 1).tolist() == [2.0, 3.0]


class HookError(Exception):
    pass


def fail(*args: Any, **kwargs: Any) -> Any:
    raise HookError


def model_and_loss() -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to("tpu")
    return model, model(torch.ones(4, 3, device="tpu")).square().mean()


def test_an_exception_in_a_backward_hook_propagates() -> None:
    model, loss = model_and_loss()
    handle = model.weight.register_hook(fail)
    with pytest.raises(HookError):
        loss.backward(retain_graph=True)
    handle.remove()
    model.zero_grad()
    loss.backward()
    reference = nn.Linear(3, 2)
    reference.load_state_dict(model.state_dict())
    reference(torch.ones(4, 3)).square().mean().backward()
    torch.testing.assert_close(model.weight.grad.cpu(), reference.weight.grad)


def test_an_exception_in_a_saved_tensor_hook_propagates() -> None:
    x = torch.ones(3, device="tpu", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(fail, fail), pytest.raises(HookError):
        x.exp()
    x.exp().sum().backward()
    torch.testing.assert_close(x.grad.cpu(), torch.ones(3).exp())


def test_an_exception_in_an_unpack_hook_propagates() -> None:
    """In a process of its own: PyTorch keeps such a graph for ever, on the CPU too."""
    ended = run_script(
        """
    import torch
    def fail(tensor):
        raise KeyError("unpack")
    x = torch.ones(3, device="tpu", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, fail):
        y = x.exp().sum()
    try:
        y.backward()
    except KeyError as error:
        print(error)
    (2 * x).sum().backward()
    print(x.grad.tolist())
    """
    )
    assert ended == (0, "'unpack'\n[2.0, 2.0, 2.0]\n", "")


def test_an_exception_in_an_optimizer_hook_propagates() -> None:
    model, loss = model_and_loss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss.backward()
    before = model.bias.detach().clone()
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        handle = register(fail)
        with pytest.raises(HookError):
            optimizer.step()
        handle.remove()
    torch.testing.assert_close((before - model.bias).cpu(), 0.1 * model.bias.grad.cpu())  # one step was made
    optimizer.step()
    torch.testing.assert_close((before - model.bias).cpu(), 0.2 * model.bias.grad.cpu())
