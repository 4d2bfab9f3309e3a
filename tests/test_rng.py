"""Random numbers are the same for the same (seed, offset), wherever a region is cut."""

from __future__ import annotations

import pytest
import torch
from script import run_script
from torch import nn
from torch.utils.checkpoint import checkpoint


def test_a_seed_gives_the_same_numbers_again():
    torch.manual_seed(7)
    first = torch.randn(5, device="tpu").tolist()
    torch.manual_seed(7)
    assert torch.randn(5, device="tpu").tolist() == first
    assert torch.tpu.initial_seed() == 7


def test_numbers_do_not_depend_on_where_a_region_is_cut():
    torch.tpu.manual_seed(1)
    together = [torch.rand(3, device="tpu") for _ in range(4)]
    together = [x.tolist() for x in together]
    torch.tpu.manual_seed(1)
    apart = [torch.rand(3, device="tpu").tolist() for _ in range(4)]
    assert together == apart
    assert len({tuple(x) for x in together}) == 4


def test_a_state_is_seed_and_offset():
    torch.tpu.manual_seed(5)
    state = torch.tpu.get_rng_state()
    assert (state.dtype, state.shape, state.device.type) == (torch.uint8, (16,), "cpu")
    assert state.view(torch.int64).tolist() == [5, 0]
    torch.rand(3, device="tpu")
    moved = torch.tpu.get_rng_state().view(torch.int64).tolist()
    assert moved[0] == 5
    assert moved[1] > 0
    torch.tpu.set_rng_state(state)
    assert torch.equal(torch.tpu.get_rng_state(), state)
    assert len(torch.tpu.get_rng_state_all()) == torch.tpu.device_count()
    torch.tpu.set_rng_state_all(torch.tpu.get_rng_state_all())
    assert torch.tpu.default_generators[0].get_offset() == 0


def test_generators_are_independent():
    g = torch.Generator("tpu").manual_seed(3)
    assert g.device == torch.device("tpu:0")
    assert g.initial_seed() == 3
    before = torch.tpu.get_rng_state()
    first = torch.rand(4, device="tpu", generator=g).tolist()
    assert torch.equal(torch.tpu.get_rng_state(), before)
    copy = torch.Generator("tpu")
    copy.set_state(g.get_state())
    assert torch.rand(4, device="tpu", generator=g).tolist() == torch.rand(4, device="tpu", generator=copy).tolist()
    assert torch.rand(4, device="tpu", generator=g.manual_seed(3)).tolist() == first
    assert g.clone_state().get_offset() == g.get_offset()
    assert isinstance(g.seed(), int)


def test_a_generator_of_another_device_is_refused():
    with pytest.raises(RuntimeError, match="Expected a 'tpu' device type for generator but found 'cpu'"):
        torch.rand(2, device="tpu", generator=torch.Generator())


def test_a_wrong_state_is_refused():
    with pytest.raises(RuntimeError, match="RNG state is wrong size"):
        torch.tpu.set_rng_state(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"RNG state must be a torch\.ByteTensor"):
        torch.tpu.set_rng_state(torch.zeros(2))


def test_fork_rng_restores():
    torch.tpu.manual_seed(2)
    with torch.random.fork_rng(device_type="tpu"):
        torch.rand(3, device="tpu")
    assert torch.tpu.get_rng_state().view(torch.int64).tolist() == [2, 0]


def test_checkpointed_dropout_repeats_its_mask():
    torch.manual_seed(0)
    x = torch.ones(64, device="tpu", requires_grad=True)
    y = checkpoint(lambda a: nn.functional.dropout(a, 0.5), x, use_reentrant=False)
    kept = y.detach().cpu()
    y.sum().backward()
    assert torch.equal(x.grad.cpu(), kept)
    assert 0 < kept.count_nonzero() < 64


def test_dropout_rates_follow_p():
    torch.manual_seed(0)
    x = torch.ones(20000, device="tpu")
    for p in (0.1, 0.5, 0.9):
        assert abs(nn.functional.dropout(x, p).count_nonzero().item() / 20000 - (1 - p)) < 0.02


TRACED = """
    import sys, threading, numpy, torch

    numpy.random.seed(3)
    expected = numpy.random.RandomState(3)
    assert "jax" not in sys.modules
    done = threading.Event()

    def draw_until_done():
        while not done.is_set():
            assert numpy.random.rand(2).tolist() == expected.rand(2).tolist()

    drawing = threading.Thread(target=draw_until_done)
    if BESIDE:
        drawing.start()
    torch.ones(3, device="tpu").logcumsumexp(0).tolist()
    done.set()
    if BESIDE:
        drawing.join()
    assert "jax" in sys.modules and numpy.random.rand.__self__ is numpy.random.mtrand._rand
    print(numpy.random.rand() == expected.rand())
"""


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a thread"])
def test_numpy_draws_the_same_whenever_jax_is_imported(beside: bool) -> None:
    ended = run_script(TRACED.replace("BESIDE", str(beside)), TORCHTPU_CACHE="off")
    assert ended.status == 0, ended.err
    assert ended.out == "True\n"
