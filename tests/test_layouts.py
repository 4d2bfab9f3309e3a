"""Results of ops on elements, over tensors of many layouts, have the CPU's strides, also where a size is 1.

Nobody steps over a dimension of size 1, but a view through another dtype asks what its stride is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from reference_engine import reference_engine
from torch import Tensor
from torch.nn import functional as F

from torchtpu import config
from torchtpu.ops import registry
from torchtpu.runtime.ir.calls import schema_of

# (shape, strides) of arguments that broadcast to (4, 3), (4, 1) or (1, 3): dense, transposed, gaps, sizes of 1
LAYOUTS = {
    (4, 3): ((3, 1), (1, 4), (6, 2), (1, 8), (0, 1)),
    (4, 1): ((1, 1), (1, 4), (1, 7), (2, 1), (2, 9)),
    (1, 3): ((3, 1), (1, 1), (40, 2), (0, 1)),
    (3,): ((1,), (2,)),
    (1, 1): ((1, 1), (5, 1), (1, 5)),
}


def make(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return torch.ones(64, dtype=dtype, device=device).as_strided(shape, strides)


def calls(name: str, dtype: torch.dtype, device: str) -> Iterator[list[Any]]:
    """Arguments for the op in many pairs of layouts; its numbers are 2."""
    arguments = [a for a in schema_of(name).arguments if not a.has_default_value() and not a.kwarg_only]
    geometries = [(shape, strides) for shape, many in LAYOUTS.items() for strides in many]
    count = sum(str(a.type) == "Tensor" for a in arguments)
    for one, other in itertools.product(geometries, geometries[:: 5 if count > 1 else len(geometries)]):
        tensors = itertools.cycle((one, other))
        yield [
            make(*next(tensors), dtype, device) if str(a.type) == "Tensor" else False if str(a.type) == "bool" else 2
            for a in arguments
        ]


def elementwise_ops() -> list[str]:
    names = [n for n in registry.LOWERINGS if "::" not in n]
    ops = {name: registered(name) for name in names}
    return sorted(n for n, op in ops.items() if torch.Tag.pointwise in op.tags and not op._schema.is_mutable)


def registered(name: str) -> torch._ops.OpOverload:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def strides_of(made: Any) -> list[tuple[int, ...]]:
    return [t.stride() for t in torch.utils._pytree.tree_leaves(made) if isinstance(t, Tensor)]


@pytest.mark.filterwarnings("ignore")
def test_ops_on_elements_lay_out_their_results_as_the_cpu_does() -> None:
    checked, wrong = set(), []
    with reference_engine(), config.using(fallback="error"), torch.no_grad():
        for name, dtype in itertools.product(elementwise_ops(), (torch.float32, torch.int64)):
            if name in checked:
                continue
            op, taken = registered(name), set()
            for ours, theirs in zip(calls(name, dtype, "tpu"), calls(name, dtype, "cpu"), strict=True):
                try:
                    expected = strides_of(op(*theirs))
                except (RuntimeError, TypeError):
                    continue
                taken.add(name)
                if strides_of(op(*ours)) != expected:
                    wrong.append((name, dtype, [t.stride() for t in theirs if isinstance(t, Tensor)], expected))
            checked |= taken
    assert not wrong, sorted({name for name, *_ in wrong})
    assert len(checked) > 150


def test_a_product_may_be_seen_as_another_dtype_wherever_the_cpus_may() -> None:
    for device in ("cpu", "tpu"):
        x = torch.ones(1, 4, dtype=torch.int32, device=device).t()
        with pytest.raises(RuntimeError, match=r"self.stride\(-1\) must be 1 to view Int as Short"):
            (x * 2).view(torch.int16)


def test_quotients_of_what_broadcasts_are_laid_out_as_on_the_cpu() -> None:
    def made(device: str) -> Tensor:
        x = make((2, 3, 4), (1, 8, 2), torch.float32, device)
        return x.floor_divide(x[0])

    assert made("tpu").stride() == made("cpu").stride()


def _normalized(x: Tensor) -> Tensor:
    return F.batch_norm(x, x.new_zeros(x.shape[1]), x.new_ones(x.shape[1]), training=True)


def _gradient(loss: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(loss(x, torch.zeros_like(x)).sum(), x)[0]


@pytest.mark.parametrize(
    "made_of",
    [
        F.logsigmoid,
        _normalized,
        lambda x: _gradient(lambda y, _: _normalized(y), x),
        lambda x: torch.normal(x, 1.0),
        lambda x: torch.normal(x, x.abs() + 1),
        lambda x: torch.normal(0.0, x.abs() + 1),
        lambda x: _gradient(F.huber_loss, x),
        lambda x: _gradient(F.smooth_l1_loss, x),
        lambda x: _gradient(lambda y, _: F.glu(y, 0), x),
        lambda x: _gradient(lambda y, _: F.hardswish(y) + F.relu6(y), x),
        lambda x: torch.ops.aten.hardswish_backward(x, x.contiguous()),
        lambda x: torch.ops.aten.hardtanh_backward(x.contiguous(), x, -1, 1),
        lambda x: _gradient(lambda y, _: F.glu(y.mT[None], 2), x),
        lambda x: F.nll_loss(x[None], torch.zeros_like(x[:1], dtype=torch.long), reduction="none"),
        lambda x: torch.ldexp(x, x),
        lambda x: x[:, :1, :1].rad2deg(),
        lambda x: x[:, :1, :1].deg2rad(),
    ],
)
@pytest.mark.parametrize("strides", [(1, 8, 2), (1, 2, 6), (12, 1, 3), (24, 8, 2)])
def test_results_of_rearranged_arguments_are_laid_out_as_on_the_cpu(
    made_of: Callable[[Tensor], Tensor], strides: tuple[int, ...]
) -> None:
    made = {device: made_of(make((2, 3, 4), strides, torch.float32, device)) for device in ("cpu", "tpu")}
    assert made["tpu"].stride() == made["cpu"].stride()


@pytest.mark.parametrize("shape", [(3,), (2, 3), (3, 2, 4)])
def test_what_is_read_at_indices_lies_as_these_do(shape: tuple[int, ...]) -> None:
    def strides(device: str) -> list[tuple[int, ...]]:
        x = torch.ones(4, 3, 2, device=device)
        lying = [torch.ones(shape, dtype=torch.long, device=device)]
        lying.append(torch.ones(shape[::-1], dtype=torch.long, device=device).permute(*range(len(shape))[::-1]))
        found = [x[:, index].stride() for index in lying]
        for one, other in itertools.product(lying, lying):
            found += [x[one, other].stride(), x[one, :, other].stride(), x.mT[:, one, other].stride()]
        return found

    assert strides("tpu") == strides("cpu")


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 4, 5, 6)])
def test_batches_are_normalized_in_the_memory_format_they_have(shape: tuple[int, ...]) -> None:
    channels_last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    for arranged in (lambda x: x.contiguous(memory_format=channels_last), lambda x: x.transpose(0, 1).contiguous().mT):
        made = {d: [_normalized(arranged(torch.ones(shape, device=d)))] for d in ("cpu", "tpu")}
        made["cpu"].append(_gradient(lambda y, _: _normalized(y), arranged(torch.ones(shape))))
        made["tpu"].append(_gradient(lambda y, _: _normalized(y), arranged(torch.ones(shape, device="tpu"))))
        assert [t.stride() for t in made["tpu"]] == [t.stride() for t in made["cpu"]]


@pytest.mark.parametrize("op", [torch.add, torch.eq, torch.maximum])
def test_outputs_that_are_resized_are_laid_out_as_on_the_cpu(op: Any) -> None:
    def results(device: str) -> Iterator[tuple[Any, ...]]:
        x = torch.arange(24.0).view(2, 3, 4).to(device)
        for order, length in itertools.product(itertools.permutations(range(3)), (3, 9, 60)):
            one = x.permute(order)
            out = torch.empty(length, dtype=op(one, one).dtype, device=device)[2:2]
            op(one, one[:1] + 1, out=out)
            yield order, out.stride(), out.storage_offset(), out.tolist(), out.untyped_storage().nbytes()

    assert list(results("tpu")) == list(results("cpu"))


@pytest.mark.parametrize(
    ("fill", "numbers"),
    [(torch.arange, (6,)), (torch.ops.aten.range, (0, 5)), (torch.linspace, (0, 5, 6)), (torch.logspace, (0, 5, 6, 2))],
)
def test_counts_go_into_an_output_of_as_many_elements_as_it_lies(fill: Any, numbers: tuple[int, ...]) -> None:
    def filled(device: str) -> tuple[Any, ...]:
        x = torch.ones(4, 5, device=device)
        part, empty = x[1:3, ::2].t(), torch.empty(0, device=device)
        fill(*numbers, out=part)
        return x.tolist(), part.tolist(), part.stride(), fill(*numbers, out=empty).shape

    assert filled("tpu") == filled("cpu")


def test_a_range_warns_where_its_output_has_another_number_of_elements() -> None:
    out = torch.ones(2, device="tpu")
    with pytest.warns(UserWarning, match="does not match the computed number of elements 3"):
        torch.arange(3, out=out)
    assert out.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("sizes", "strides"), [((2,), ()), ((), (1,)), ((2, 3), (-1, 1))])
def test_strides_that_do_not_fit_are_refused_as_on_the_cpu(sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
    messages = set()
    for device in ("cpu", "tpu"):
        with pytest.raises(RuntimeError) as error:
            torch.empty_strided(sizes, strides, device=device)
        messages.add(str(error.value))
    assert len(messages) == 1


def test_empty_vectors_join_along_any_dimension() -> None:
    none = torch.empty(0, device="tpu")
    assert torch.cat([none, none], dim=1).shape == (0,)
    assert torch.cat([none, torch.ones(2, 3, device="tpu"), none], dim=1).shape == (2, 3)


def test_a_tensor_without_elements_is_not_written_with_itself_even_where_it_was_with_an_alias() -> None:
    def put(device: str, name: str) -> str:
        x = torch.ones(2, 0, device=device)
        index = torch.tensor([1, 0], device=device)
        try:
            x[index] = {"alias": x.detach(), "self": x}[name]
        except RuntimeError as error:
            return str(error)
        return "written"

    with config.using(sync=True):
        for name in ("alias", "self", "alias", "self"):
            assert put("tpu", name) == put("cpu", name)
        assert put("tpu", "alias") == "written"
        assert "single memory location" in put("tpu", "self")


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0)])
def test_attention_lays_out_its_result_as_the_cpu_does(order: tuple[int, ...], dropout: float) -> None:
    shape, back = (2, 3, 4, 5), [order.index(k) for k in range(4)]
    for turned in range(3):
        found = []
        for device in ("cpu", "tpu"):
            given = [torch.ones(shape, device=device) for _ in range(3)]
            given[turned] = torch.ones([shape[k] for k in order], device=device).permute(back)
            found.append(F.scaled_dot_product_attention(*given, dropout_p=dropout))
        assert found[1].stride() == found[0].stride()
        assert found[1].cpu().shape == found[0].shape


@pytest.mark.parametrize("channels", [1, 3])
def test_a_pooled_volume_without_a_batch_keeps_its_memory_format(channels: int) -> None:
    found = []
    for device in ("cpu", "tpu"):
        batch = torch.ones(1, channels, 4, 5, 6, device=device).contiguous(memory_format=torch.channels_last_3d)
        found.append(F.max_pool3d(batch.squeeze(0), 2, return_indices=True))
    for expected, got in zip(*found, strict=True):
        assert got.stride() == expected.stride()
        assert got.tolist() == expected.tolist()
