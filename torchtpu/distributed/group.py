"""A process group on the device: in come the calls of c10d, out go recorded collectives and copies of their results.

The C++ backend calls the methods by name. Tensors of the CPU go to a gloo group of their own at once.
Arithmetic that no transport knows (averages, factors, dtypes) is recorded on the device around the collective.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ReduceOp

from torchtpu.runtime import _C

from .calls import Call, record
from .gloo import Gloo, is_reducible
from .peers import Peers

Tensors = list[torch.Tensor]


class Done:
    """What a c10d Work asks: the calls behind it, and the tensors it leaves."""

    def __init__(self, calls: Sequence[Call], outputs: Tensors, finish: Callable[[], None] | None = None) -> None:
        self._calls = list(calls)
        self._outputs = outputs
        self._finish = finish

    def wait(self) -> bool:
        """Orders what follows after the calls, and does not wait for them; raises what is known to have failed."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        for call in self._calls:
            if call.error is not None:
                raise call.error
        return True

    def is_completed(self) -> bool:
        return all(call.finished.is_set() for call in self._calls)

    def is_success(self) -> bool:
        return self.is_completed() and all(call.error is None for call in self._calls)

    def results(self) -> Tensors:
        return self._outputs


class Group:
    """One group of ranks; `ranks` are their global numbers."""

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, name: str, ranks: Sequence[int]
    ) -> None:
        self.rank = rank
        self.size = size
        self._transport = Gloo(PrefixStore("device", store), rank, size, timeout)
        self._host: Any = dist.ProcessGroupGloo(PrefixStore("host", store), rank, size, timeout)
        self._peers = Peers(store, rank, size, name, ranks)
        self._sequence = 0
        self._lock = threading.Lock()  # guards what follows
        self._unfinished: list[Call] = []
        self._coalesced: list[Done] | None = None
        self._error: BaseException | None = None

    # what c10d calls

    def broadcast(self, tensors: Tensors, root: int) -> Any:
        if _is_on_host(tensors):
            return self._host.broadcast(tensors, _options(dist.BroadcastOptions, rootRank=root))
        calls = [self._move("broadcast", t, t.numel(), (root,)) for t in tensors]
        return self._done(calls, tensors)

    def all_reduce(self, tensors: Tensors, op: Any) -> Any:
        if _is_on_host(tensors):
            return self._host.allreduce(tensors, _options(dist.AllreduceOptions, reduceOp=op))
        return self._done([self._reduce("all_reduce", t, t, op, ()) for t in tensors], tensors)

    def reduce(self, tensors: Tensors, op: Any, root: int) -> Any:
        if _is_on_host(tensors):
            return self._host.reduce(tensors, _options(dist.ReduceOptions, reduceOp=op, rootRank=root))
        outputs = tensors if self.rank == root else [None] * len(tensors)
        return self._done(
            [self._reduce("reduce", t, o, op, (root,)) for t, o in zip(tensors, outputs, strict=True)], tensors
        )

    def all_gather(self, outputs: list[Tensors], inputs: Tensors) -> Any:
        if _is_on_host(inputs):
            return self._host.allgather(outputs, inputs)
        calls = []
        for parts, tensor in zip(outputs, inputs, strict=True):
            if any(part.numel() != tensor.numel() for part in parts):  # as NCCL does: a broadcast of each rank's
                for root, part in enumerate(parts):
                    source = tensor if root == self.rank else part
                    calls.append(self._move("broadcast", source, part.numel(), (root,), [part]))
            else:
                calls.append(self._move("all_gather", tensor, tensor.numel() * self.size, (), parts))
        return self._done(calls, [part for parts in outputs for part in parts])

    def all_gather_coalesced(self, outputs: list[Tensors], inputs: Tensors) -> Any:
        if _is_on_host(inputs):
            return self._host.allgather_coalesced(outputs, inputs)
        return self.all_gather([list(parts) for parts in zip(*outputs, strict=True)], inputs)

    def all_gather_into_tensors(self, outputs: Tensors, inputs: Tensors) -> Any:
        if _is_on_host(inputs):
            return _last(self._host._allgather_base(o, i) for o, i in zip(outputs, inputs, strict=True))
        _check_sizes(outputs, inputs, self.size)
        calls = [
            self._move("all_gather", i, o.numel(), (), [o]) for o, i in zip(outputs, inputs, strict=True)
        ]
        return self._done(calls, outputs)

    def gather(self, outputs: list[Tensors], inputs: Tensors, root: int) -> Any:
        if _is_on_host(inputs):
            return self._host.gather(outputs, inputs, _options(dist.GatherOptions, rootRank=root))
        parts = outputs[0] if self.rank == root else []
        count = inputs[0].numel() * self.size if self.rank == root else 1
        return self._done([self._move("gather", inputs[0], count, (root,), parts)], parts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], root: int) -> Any:
        if _is_on_host(outputs):
            return self._host.scatter(outputs, inputs, _options(dist.ScatterOptions, rootRank=root))
        (output,) = outputs
        source = _joined(inputs[0]) if self.rank == root else output.new_empty(1)
        call = self._move("scatter", source, output.numel(), (output.numel(), root), [output], part=output)
        return self._done([call], outputs)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], op: Any) -> Any:
        if _is_on_host(outputs):
            options = _options(dist.ReduceScatterOptions, reduceOp=op)
            return self._host.reduce_scatter(outputs, inputs, options)
        calls = []
        for output, parts in zip(outputs, inputs, strict=True):
            if any(part.numel() != output.numel() for part in parts):  # as NCCL does: a reduction to each rank
                for root, part in enumerate(parts):
                    calls.append(self._reduce("reduce", part, output if root == self.rank else None, op, (root,)))
            else:
                calls.append(self._reduce("reduce_scatter", _joined(parts), output, op, ()))
        return self._done(calls, outputs)

    def reduce_scatter_tensors(self, outputs: Tensors, inputs: Tensors, op: Any) -> Any:
        if _is_on_host(inputs):
            options = _options(dist.ReduceScatterOptions, reduceOp=op)
            pairs = zip(outputs, inputs, strict=True)
            return _last(self._host._reduce_scatter_base(o, i, options) for o, i in pairs)
        _check_sizes(inputs, outputs, self.size)
        calls = [self._reduce("reduce_scatter", i, o, op, ()) for o, i in zip(outputs, inputs, strict=True)]
        return self._done(calls, outputs)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Any:
        if _is_on_host([input]):
            return self._host.alltoall_base(output, input, output_splits, input_splits)
        received = self._split(output, output_splits, "output")
        sent = self._split(input, input_splits, "input")
        call = self._move("all_to_all", input, sum(received), (received, sent), [output])
        return self._done([call], [output])

    def all_to_all(self, outputs: Tensors, inputs: Tensors) -> Any:
        if _is_on_host(inputs):
            return self._host.alltoall(outputs, inputs)
        received, sent = [t.numel() for t in outputs], [t.numel() for t in inputs]
        call = self._move("all_to_all", _joined(inputs), sum(received), (received, sent), outputs)
        return self._done([call], outputs)

    def send(self, tensors: Tensors, destination: int, tag: int) -> Any:
        if _is_on_host(tensors):
            return self._host.send(tensors, destination, tag)
        return self._done([self._move("send", tensors[0], 1, (destination, tag), [])], tensors)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Any:
        """Receiving begins now, so that crossed sends meet; the tensor is written, in program order, by `wait`."""
        if _is_on_host(tensors):
            return self._host.recv(tensors, source, tag)
        self._refuse_after_failure()
        (tensor,) = tensors
        handle, received = self._transport.start_receiving(tensor.numel(), tensor.dtype, source, tag)

        def receive(_: torch.Tensor) -> torch.Tensor:
            handle.wait()
            return received

        call = self._call("recv", f"recv from rank {source}", receive)

        def finish() -> None:
            _write([tensor], record(call, tensor.new_empty(1), tensor.numel()))

        return self._done([call], tensors, finish)

    def recv_any_source(self, tensors: Tensors, tag: int) -> Any:
        if _is_on_host(tensors):
            return self._host.recv_anysource(tensors, tag)
        raise NotImplementedError("recv from any source: name the source rank of a tensor on the device, as for NCCL")

    def barrier(self) -> Any:
        call = self._call("barrier", "barrier", torch.clone)
        record(call, torch.zeros(1, device="tpu"), 1)
        return self._done([call], [], call.finished.wait)

    def start_coalescing(self) -> None:
        self._coalesced = []

    def end_coalescing(self) -> Any:
        works, self._coalesced = self._coalesced or [], None
        outputs = [tensor for work in works for tensor in work.results()]

        def finish() -> None:
            for work in works:
                work.wait()

        return Done([call for work in works for call in work._calls], outputs, finish)

    def set_timeout(self, timeout: timedelta) -> None:
        self._transport.group._set_default_timeout(timeout)
        self._host._set_default_timeout(timeout)

    def has_failed(self) -> bool:
        return self._error is not None

    def drain(self, seconds: float | None = None) -> bool:
        """Waits until every call has run or one has failed; False where that takes longer."""
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._lock:
            unfinished = list(self._unfinished)
        for call in unfinished:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not call.finished.wait(left):
                return False
        if self._error is None:
            self._transport.finish_sends()
        return True

    def shutdown(self) -> None:
        """Ends the group after its last call."""
        self.drain()
        self.close()

    def abort(self) -> None:
        """Ends the group at once; what waits in it fails."""
        self._error = self._error or dist.DistBackendError(f"rank {self.rank} has aborted its process group")
        self._transport.group.abort()
        self._host.abort()
        self.close()

    def close(self) -> None:
        """Ends what is told to other ranks."""
        self._peers.close()

    # what a recorded call asks of its group

    def begin(self, call: Call) -> None:
        self._refuse_after_failure()
        with self._lock:
            self._unfinished = [c for c in self._unfinished if not c.finished.is_set()]
            self._unfinished.append(call)

    def explain(self, call: Call, error: BaseException) -> BaseException:
        if self._error is None:
            self._error = self._peers.explain(call, error)
        return self._error

    # how a call is made

    def _call(self, name: str, what: str, run: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        is_agreed = name not in ("send", "recv")
        self._sequence += is_agreed
        call = Call(self, name, what, self._sequence, _C.current_line(), run)

        def begin(tensor: torch.Tensor) -> torch.Tensor:
            self._refuse_after_failure()
            self._peers.begin(call)
            if is_agreed:
                self._peers.agree(call, self._transport.meet)
            return run(tensor)

        call.run = begin
        return call

    def _move(
        self,
        name: str,
        tensor: torch.Tensor,
        count: int,
        arguments: tuple[Any, ...],
        outputs: Tensors | None = None,
        part: torch.Tensor | None = None,
    ) -> Call:
        """Records a collective that moves `tensor`, and writes its `count` elements to `outputs` (None: in place)."""
        part = tensor if part is None else part
        shape = "" if name == "all_to_all" else f"[{part.numel()}]"
        run = functools.partial(getattr(self._transport, name), **_named(name, arguments))
        call = self._call(name, f"{name} {_dtype(part)}{shape}{_told(name, arguments)}", run)
        _write([tensor] if outputs is None else outputs, record(call, tensor, count))
        return call

    def _reduce(
        self, name: str, tensor: torch.Tensor, output: torch.Tensor | None, op: Any, arguments: tuple[int, ...]
    ) -> Call:
        """Records a reduction and writes its result to `output`, where there is one."""
        kind, factor = _parts(op)
        with torch.no_grad():
            source, plain = _prepared(tensor.detach(), kind, factor)
        run = functools.partial(getattr(self._transport, name), op=plain, **_named(name, arguments))
        shape = f"{_dtype(tensor)}[{tensor.numel()}]"
        call = self._call(name, f"{name} {kind.name} {shape}{_told(name, arguments)}", run)
        count = source.numel() // self.size if name == "reduce_scatter" else source.numel()
        result = record(call, source, count)
        if output is not None:
            with torch.no_grad():
                if kind == ReduceOp.AVG:
                    is_integral = not (result.is_floating_point() or result.is_complex())
                    result = result.div(self.size, rounding_mode="trunc" if is_integral else None)
                if tensor.is_complex():
                    result = torch.view_as_complex(result.view(-1, 2))
                _write([output], result)
        return call

    def _done(self, calls: Sequence[Call], outputs: Tensors, finish: Callable[[], Any] | None = None) -> Done:
        done = Done(calls, outputs, finish)
        if self._coalesced is not None:
            self._coalesced.append(done)
        return done

    def _split(self, tensor: torch.Tensor, splits: list[int], which: str) -> list[int]:
        rows = tensor.size(0)
        if not splits:
            if rows % self.size:
                raise ValueError(f"Tensor's dim 0 does not divide equally across group size: {rows} by {self.size}")
            splits = [rows // self.size] * self.size
        if sum(splits) != rows:
            raise ValueError(f"Split sizes doesn't match total dim 0 size: {which} {splits} of {rows}")
        width = tensor.numel() // rows if rows else 0
        return [n * width for n in splits]

    def _refuse_after_failure(self) -> None:
        if self._error is not None:
            raise self._error


def _parts(op: Any) -> tuple[Any, Any]:
    """What kind of reduction an op is, and the factor of PREMUL_SUM."""
    reduce_op: Any = ReduceOp(op) if isinstance(op, ReduceOp.RedOpType) else op
    kind, factor = reduce_op.__getstate__()
    return kind, factor


def _prepared(tensor: torch.Tensor, kind: Any, factor: Any) -> tuple[torch.Tensor, Any]:
    """The tensor as a transport can reduce it, and with which op."""
    if kind == ReduceOp.PREMUL_SUM:
        tensor, kind = tensor * factor, ReduceOp.SUM
    if tensor.dtype == torch.bool:
        if kind == ReduceOp.AVG:
            raise ValueError("Cannot use ReduceOp.AVG with Boolean inputs")
        return tensor.to(torch.uint8), _BOOLEAN.get(kind, kind)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not is_reducible(tensor.dtype):
        tensor = tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)
    return tensor, ReduceOp.SUM if kind == ReduceOp.AVG else kind


_BOOLEAN = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}


def _named(name: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    names = {
        "broadcast": ("root",),
        "reduce": ("root",),
        "gather": ("root",),
        "scatter": ("count", "root"),
        "all_to_all": ("received", "sent"),
        "send": ("destination", "tag"),
    }
    return dict(zip(names.get(name, ()), arguments, strict=True))


def _told(name: str, arguments: tuple[Any, ...]) -> str:
    root = _named(name, arguments).get("root")
    return "" if root is None else f" root {root}"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_on_host(tensors: Tensors) -> bool:
    return tensors[0].device.type == "cpu"


def _joined(tensors: Tensors) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([t.detach().reshape(-1) for t in tensors])


def _write(outputs: Tensors, result: torch.Tensor) -> None:
    """Writes the flat result to the outputs, one after the other. As other backends do, it tells autograd nothing."""
    at = 0
    with torch.no_grad():
        for output in outputs:
            if output.numel():
                output.data.copy_(result[at : at + output.numel()].view(output.shape))
            at += output.numel()


def _check_sizes(large: Tensors, small: Tensors, size: int) -> None:
    for whole, part in zip(large, small, strict=True):
        if whole.dtype != part.dtype:
            raise TypeError(f"output tensor must have the same type as input tensor: {whole.dtype}, {part.dtype}")
        if whole.numel() != part.numel() * size:
            raise ValueError(
                f"output tensor size must be equal to world_size times input tensor size: {whole.numel()} elements "
                f"for {size} ranks of {part.numel()}"
            )


def _options(kind: Any, **values: Any) -> Any:
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    return options


def _last(works: Any) -> Any:
    *earlier, last = list(works)
    for work in earlier:
        work.wait()
    return last
