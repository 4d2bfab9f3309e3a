"""torch.nn.DataParallel and its parts give one device's values on two."""

from __future__ import annotations

import pytest
import torch
from script import run_script
from torch.nn.parallel import comm, data_parallel


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


@pytest.mark.parametrize("device_ids", [None, [0], [torch.device("tpu", 0)]])
def test_on_one_device_a_module_is_what_it_is_without(device_ids: list[int] | None) -> None:
    model, plain = torch.nn.DataParallel(small_model(), device_ids), small_model().to("tpu")
    assert model.device_ids == [0] and next(model.parameters()).device == torch.device("tpu", 0)
    for x in (torch.randn(6, 4), torch.randn(6, 4, device="tpu")):  # inputs may be anywhere
        found, wanted = model(x), plain(x.to("tpu"))
        assert torch.equal(found, wanted)
        found.square().sum().backward()
        wanted.square().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_module_may_be_called_without_the_class_and_without_inputs() -> None:
    plain, x = small_model().to("tpu"), torch.randn(6, 4, device="tpu")
    assert torch.equal(data_parallel(plain, x, [0]), plain(x))

    class Constant(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.ones(2, device="tpu")

    assert torch.nn.DataParallel(Constant())().tolist() == [1.0, 1.0]


def test_copies_to_one_device_have_pytorchs_errors() -> None:
    x = torch.randn(6, 4, device="tpu")
    (part,) = comm.scatter(x, [0])
    assert part.data_ptr() == x.data_ptr(), "as on CUDA, what is there already is not copied"
    with pytest.raises(RuntimeError, match="at least one device to scatter to"):
        comm.scatter(x, [])
    with pytest.raises(RuntimeError, match="same length, but got len\\(devices\\) = 1"):
        comm.scatter(x, [0], chunk_sizes=[3, 3])
    with pytest.raises(RuntimeError, match="tensor at index 1 has device 'cpu'"):
        comm.gather([x, x.cpu()], destination=0)
    with pytest.raises(RuntimeError, match="index 1 has invalid shape \\[6, 3\\], but expected \\[6, 4\\]"):
        comm.gather([x, x[:, :3]], destination=0)
    with pytest.raises(RuntimeError, match="same number of dimensions, but tensor at index 1 has 1"):
        comm.gather([x, x[0]], destination=0)
    with pytest.raises(RuntimeError, match="same shape as the source tensor \\[6, 4\\]"):
        comm.broadcast(x, out=[x[:3]])
    with pytest.raises(RuntimeError, match="Expected out tensor to have shape \\[12, 4\\]"):
        comm.gather([x, x], out=x)


def test_two_devices_have_the_values_and_gradients_of_one() -> None:
    ended = run_script(
        """
        import warnings
        import torch
        from torch.nn.parallel import comm, gather, parallel_apply, replicate, scatter

        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Was asked to gather along dimension 0")
        first, second = torch.device("tpu:0"), torch.device("tpu:1")
        assert torch.tpu.device_count() == 2

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
                self.tied = self.layers[0].weight
                self.phase = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))
                self.register_buffer("scale", torch.tensor(2.0))

            def forward(self, x, *, shift=None):
                here = torch.device("tpu", torch.tpu.current_device())
                assert x.device == self.scale.device == self.phase.device == here
                y = self.layers(x) * self.scale + (x @ self.tied.t()).sum() * 0 + (self.phase * self.phase.conj()).real
                return {"y": y if shift is None else y + shift, "mean": y.mean()}

        torch.manual_seed(0)
        plain = Model().to("tpu")
        torch.manual_seed(0)
        model = torch.nn.DataParallel(Model().to("tpu"))
        assert model.device_ids == [0, 1]
        for rows in (7, 8, 1):  # 1: only one device has work
            x, shift = torch.randn(rows, 4), torch.randn(rows, 3, device="tpu")
            made = model(x, shift=shift)
            wanted = plain(x.to("tpu"), shift=shift)
            assert made["y"].device == first and made["mean"].shape == ((2,) if rows > 1 else (1,)), made["mean"].shape
            torch.testing.assert_close(made["y"], wanted["y"])
            made["y"].square().sum().backward()
            wanted["y"].square().sum().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert one.grad.device == first
            torch.testing.assert_close(one.grad, other.grad)
        with torch.no_grad():
            torch.testing.assert_close(model(x.repeat(4, 1))["y"], plain(x.to("tpu").repeat(4, 1))["y"])

        x = torch.arange(24.0, device="tpu").view(6, 4).requires_grad_()
        parts = scatter(x, [0, 1])
        assert [part.device for part in parts] == [first, second]
        gather(parts, 1).mul(torch.arange(24.0, device="tpu:1").view(6, 4)).sum().backward()
        assert x.grad.device == first and x.grad.tolist() == x.tolist()
        parts = comm.scatter(x.detach(), [1, 0], chunk_sizes=[1, 3], dim=1)
        assert [tuple(part.shape) for part in parts] == [(6, 1), (6, 3)] and parts[0].device == second
        outs = [torch.empty(2, 4, device="tpu:1"), torch.empty(4, 4, device="tpu:0")]
        assert comm.scatter(x.detach(), out=outs)[0] is outs[0] and outs[1].tolist() == x[2:].tolist()
        whole = torch.empty(6, 4)
        assert comm.gather(outs, out=whole) is whole and whole.tolist() == x.tolist()
        assert comm.gather(outs, destination="cpu").device.type == "cpu"
        copies = comm.broadcast(x.detach(), [0, 1])
        assert copies[1].device == second and torch.equal(copies[1].cpu(), x.detach().cpu())
        both = [torch.empty(6, 4, device=where) for where in (first, second)]
        assert comm.broadcast(x.detach().cpu(), out=both)[1] is both[1] and both[1].tolist() == x.tolist()
        assert torch.equal(comm.reduce_add([x.detach(), copies[1]], 0), 2 * x.detach())
        sums = comm.reduce_add_coalesced([[x.detach(), x.detach()[0]], [copies[1], copies[1][0]]], 0)
        assert torch.equal(sums[1], 2 * x.detach()[0]) and sums[0].device == first
        many = comm.broadcast_coalesced([x.detach(), x.detach()[0]], [0, 1])
        assert [t.device for t in many[1]] == [second] * 2 and torch.equal(many[1][1].cpu(), x[0].detach().cpu())
        assert not many[1][0]._is_view()

        class Raises(torch.nn.Module):
            def forward(self, x):
                raise KeyError("mine") if x.device == second else ValueError("other")

        try:
            torch.nn.DataParallel(Raises())(x.detach())
        except ValueError as error:
            assert "Caught ValueError in replica 0 on device 0" in str(error)
        print("equal")
        """,
        TORCHTPU_NUM_DEVICES="2",
    )
    assert ended.out.endswith("equal\n"), ended.err
