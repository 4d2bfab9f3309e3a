"""Recurrent layers, whose steps are one op, and packed sequences have the CPU's values, gradients and errors."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

from torchtpu import metrics

STEPS, BATCH, FEATURES, WIDTH = 6, 3, 5, 4
LAYERS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "without biases": {"bias": False},
    "both ways": {"bidirectional": True, "num_layers": 2},
}


def layer(kind: str, dtype: torch.dtype = torch.float64, **options: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    return LAYERS[kind](FEATURES, WIDTH, **options).to(dtype)


def flat(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else [t for each in results for t in flat(each)]


def outputs(net: nn.RNNBase, x: torch.Tensor, states: Any, lengths: torch.Tensor | None) -> list[torch.Tensor]:
    if lengths is None:
        return flat(net(x, states))
    packed = pack_padded_sequence(x, lengths, batch_first=net.batch_first, enforce_sorted=False)
    made, last = net(packed, states)
    padded, _ = pad_packed_sequence(made, batch_first=net.batch_first, padding_value=0.5, total_length=STEPS)
    return flat([made.data, padded, last])


def results(
    net: nn.RNNBase, device: str, *, has_states: bool, is_packed: bool, is_differentiated: bool = False
) -> list[torch.Tensor]:
    """Outputs, and gradients by the input, the first states and the weights; the gradients of these as well."""
    torch.manual_seed(1)
    net = copy.deepcopy(net).to(device)
    dtype = net.weight_ih_l0.dtype
    shape = (BATCH, STEPS, FEATURES) if net.batch_first else (STEPS, BATCH, FEATURES)
    x = torch.randn(shape, dtype=dtype).to(device).requires_grad_()
    count = net.num_layers * (2 if net.bidirectional else 1)
    hx, cx = (torch.randn(count, BATCH, WIDTH, dtype=dtype).to(device).requires_grad_() for _ in range(2))
    states: Any = None
    given = [x, *net.parameters()]
    if has_states:
        states = (hx, cx) if isinstance(net, nn.LSTM) else hx
        given += flat(states)
    found = outputs(net, x, states, torch.tensor([4, STEPS, 2]) if is_packed else None)
    loss = sum((i + 1) * (t * t.cos()).sum() for i, t in enumerate(found))
    grads = torch.autograd.grad(loss, given, create_graph=is_differentiated)
    if is_differentiated:
        of_grads = torch.autograd.grad(sum((g * g).sum() for g in grads), given, allow_unused=True)
        found += [g for g in of_grads if g is not None]
    return [*found, *grads]


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float = 1e-10) -> None:
    for f, w in zip(found, wanted, strict=True):
        assert f.stride() == w.stride()
        torch.testing.assert_close(f.detach().cpu(), w.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_have_the_cpus_results_and_gradients(kind: str, form: str, is_packed: bool) -> None:
    net = layer(kind, **FORMS[form])
    for has_states in (False, True):
        found, wanted = (results(net, device, has_states=has_states, is_packed=is_packed) for device in ("tpu", "cpu"))
        assert_same(found, wanted)


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_single_step_is_one_too(kind: str, is_packed: bool) -> None:
    def of(device: str) -> list[torch.Tensor]:
        net = layer(kind, bidirectional=True).to(device)
        x = torch.linspace(-1, 1, BATCH * FEATURES, dtype=torch.float64).view(1, BATCH, FEATURES)
        x = x.to(device).requires_grad_()
        made, last = net(pack_padded_sequence(x, torch.ones(BATCH, dtype=torch.int64)) if is_packed else x)
        found = flat([made.data, last])
        grads = torch.autograd.grad(
            sum((i + 1) * (t * t.cos()).sum() for i, t in enumerate(found)), [x, *net.parameters()]
        )
        return [*found, *grads]

    assert_same(of("tpu"), of("cpu"))


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_of_gradients_too(kind: str) -> None:
    net = layer(kind)
    found, wanted = (
        results(net, device, has_states=True, is_packed=True, is_differentiated=True) for device in ("tpu", "cpu")
    )
    assert_same(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layers_of_fewer_digits(dtype: torch.dtype) -> None:
    net = layer("lstm", dtype, num_layers=2)
    found, wanted = (results(net, device, has_states=True, is_packed=False) for device in ("tpu", "cpu"))
    assert_same(found, wanted, 1e-5 if dtype == torch.float32 else 5e-2)


def test_autocast_computes_layers_in_its_dtype() -> None:
    net = layer("gru", torch.float32).to("tpu")
    x = torch.randn(STEPS, BATCH, FEATURES, device="tpu")
    with torch.autocast("tpu", torch.bfloat16):
        made, last = net(x)
    made.float().sum().backward()
    assert made.dtype == last.dtype == torch.bfloat16
    assert net.weight_hh_l0.grad.dtype == torch.float32
    torch.testing.assert_close(made.float().cpu(), net.to("cpu")(x.cpu())[0], rtol=5e-2, atol=5e-2)


def test_layers_are_left_to_pytorchs_form_where_that_is_watched_transformed_or_asked_for() -> None:
    net = layer("gru")
    x = torch.randn(STEPS, BATCH, FEATURES, dtype=torch.float64)

    def of(device: str) -> list[torch.Tensor]:
        there, given = copy.deepcopy(net).to(device), x.to(device)
        found = [
            torch.func.grad(lambda each: there(each)[0].cos().sum())(given),
            torch.autograd.functional.jacobian(lambda each: there(each)[1], given[:2], vectorize=True),
            torch.autograd.functional.jacobian(
                lambda each: there(pack_padded_sequence(each, torch.tensor([2, 2, 1])))[0].data,
                given[:2],
                vectorize=True,
            ),
        ]
        with torch.backends.cudnn.flags(enabled=False):
            found.append(there(given)[0])
        with torch.inference_mode():
            found += there(given)
        return found

    assert_same(of("tpu"), of("cpu"))


def test_an_error_is_that_of_the_cpu() -> None:
    net = layer("lstm")

    def says(device: str, call: Callable[[nn.RNNBase, torch.Tensor], Any]) -> str:
        x = torch.randn(STEPS, BATCH, FEATURES, dtype=torch.float64).to(device)
        with pytest.raises((RuntimeError, ValueError)) as raised:
            call(copy.deepcopy(net).to(device), x)
        return str(raised.value)

    calls: tuple[Callable[[nn.RNNBase, torch.Tensor], Any], ...] = (
        lambda net, x: net(x[:0]),
        lambda net, x: net(x[..., :3]),
        lambda net, x: pack_padded_sequence(x, torch.tensor([3, 2, 0])),
        lambda net, x: pack_padded_sequence(x, torch.tensor([1, 2, 3])),
        lambda net, x: torch._VF._pack_padded_sequence(x, torch.tensor([[3, 2, 1]]), False),
        lambda net, x: torch._VF._pad_packed_sequence(x[0], torch.tensor([4, 2]), False, 0.0, 0),
        lambda net, x: torch._VF._pad_packed_sequence(x[0], torch.tensor([1, 3]), False, 0.0, 0),
        lambda net, x: pad_packed_sequence(pack_padded_sequence(x, torch.tensor([3, 2, 1])), total_length=2),
    )
    for call in calls:
        assert says("tpu", call) == says("cpu", call)


def test_gates_that_do_not_fit_are_refused_by_the_call() -> None:
    net = layer("lstm").to("tpu")
    x, state = torch.zeros(STEPS, BATCH, FEATURES), torch.zeros(1, 2, WIDTH)
    x, state = (t.double().to("tpu") for t in (x, state))
    with pytest.raises(RuntimeError, match=r"\[3, 16\] does not equal \[2, 16\]"):
        torch.lstm(x, (state, state), net._flat_weights, True, 1, 0.0, False, False, False)


def test_rows_that_have_a_last_step_later_than_there_are_steps_are_left_out_as_on_the_cpu() -> None:
    x = torch.randn(STEPS, BATCH, FEATURES)
    found, wanted = (pack_padded_sequence(x.to(device), torch.tensor([7, 2, 1])) for device in ("tpu", "cpu"))
    assert torch.equal(found.data.cpu(), wanted.data) and torch.equal(found.batch_sizes, wanted.batch_sizes)


@pytest.mark.bailouts
def test_sequences_of_ever_other_lengths_take_few_programs() -> None:
    dice = random.Random(0)
    torch.manual_seed(0)
    nets = {"cpu": nn.ModuleList([nn.LSTM(8, 16, bidirectional=True), nn.Linear(32, 3)]).double()}
    nets["tpu"] = copy.deepcopy(nets["cpu"]).to("tpu")
    optimizers = {device: torch.optim.SGD(net.parameters(), 0.1) for device, net in nets.items()}
    programs = []
    for _ in range(16):
        sequences = [torch.randn(dice.randint(2, 30), 8, dtype=torch.float64) for _ in range(4)]
        lengths = sorted(map(len, sequences), reverse=True)
        x, targets = nn.utils.rnn.pad_sequence(sorted(sequences, key=len, reverse=True)), torch.randint(0, 3, (4,))
        losses = []
        for device, (recurrent, head) in nets.items():
            made, (last, _) = recurrent(pack_padded_sequence(x.to(device), torch.tensor(lengths)))
            padded, _ = pad_packed_sequence(made)
            scores = head(padded.sum(0) + torch.cat([last[0], last[1]], 1))
            loss = functional.cross_entropy(scores, targets.to(device))
            optimizers[device].zero_grad()
            loss.backward()
            optimizers[device].step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], abs=1e-10)
        programs.append(metrics.snapshot()["programs_compiled"])
    assert programs[-1] <= programs[7] + 1


def num_ops(call: Callable[[], Any]) -> int:
    before = metrics.snapshot()["ops_recorded"]
    call()
    return int(metrics.snapshot()["ops_recorded"] - before)


def test_a_layer_is_one_op_whatever_its_length() -> None:
    net = layer("lstm", torch.float32, num_layers=2, bidirectional=True).to("tpu")
    packed = pack_sequence([torch.randn(9, FEATURES, device="tpu"), torch.randn(5, FEATURES, device="tpu")])
    x = torch.randn(50, 2, FEATURES, device="tpu")
    assert num_ops(lambda: net(x)) < 60
    assert num_ops(lambda: net(packed)) < 60
    with torch.backends.cudnn.flags(enabled=False):
        assert num_ops(lambda: net(x)) > 4 * len(x)


def test_forward_mode_derivatives_are_refused_as_on_cuda() -> None:
    net, x = layer("gru").to("tpu"), torch.randn(STEPS, BATCH, FEATURES, dtype=torch.float64).to("tpu")
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward AD"):
        net(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
