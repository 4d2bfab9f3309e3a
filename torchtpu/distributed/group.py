"""A process group on the device: turns c10d's calls into recorded collectives and copies of their results.

The C++ backend calls the methods by name. Tensors of the CPU go to a gloo group of their own at once.
Arithmetic that no transport knows (averages, factors, dtypes) is recorded on the device around the collective.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ReduceOp

from torchtpu import config
from torchtpu.runtime import _C
from torchtpu.runtime.spmd.regions import Proposal, VoteResult

from .call import CollectiveCall
from .calls import await_end, record, stop_waiting, whole
from .flight import recorder
from .gloo import Gloo, connect
from .lowering import is_compiled
from .peers import Peers, tell
from .tensors import (  # fmt: skip
    Tensors,
    check_sizes,
    dtype_name,
    is_on_host,
    joined,
    kind_of,
    last,
    named,
    options,
    prepared,
    shift,
    told,
    write,
)


class FinishedWork:
    """What a c10d Work asks: the calls behind it, and the tensors it leaves."""

    def __init__(
        self, calls: Sequence[CollectiveCall], outputs: Tensors, finish: Callable[[], None] | None = None
    ) -> None:
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
    """One group of ranks; `ranks` are their global numbers, `homes` their devices where programs may span those."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        ranks: Sequence[int],
        homes: tuple[int, ...],
    ) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self._homes = homes
        self._timeout = timeout
        self._transport = Gloo(connect(PrefixStore("device", store), rank, size, timeout), rank, size)
        self._host: Any = connect(PrefixStore("host", store), rank, size, timeout)
        everyone = list(ranks) or list(range(size))
        recorder.join(name, everyone, everyone[rank])
        self._sequence = 0
        self._lock = threading.Lock()  # guards what follows
        self._unfinished: deque[CollectiveCall] = deque()
        self._coalesced: list[FinishedWork] | None = None
        self._error: BaseException | None = None
        self._peers = Peers(rank, size, name, ranks, functools.partial(stop_waiting, self))
        if not config.get("world_size"):  # else nobody else is there
            self._peers.connect(PrefixStore("peers", store), timeout)

    # what c10d calls

    def broadcast(self, tensors: Tensors, root: int) -> Any:
        if is_on_host(tensors):
            return self._host.broadcast(tensors, options(dist.BroadcastOptions, rootRank=root))
        calls = [self._move("broadcast", t, t.numel(), (root,)) for t in tensors]
        return self._done(calls, tensors)

    def all_reduce(self, tensors: Tensors, op: Any) -> Any:
        if is_on_host(tensors):
            return self._host.allreduce(tensors, options(dist.AllreduceOptions, reduceOp=op))
        return self._done([self._reduce("all_reduce", t, t, op, ()) for t in tensors], tensors)

    def reduce(self, tensors: Tensors, op: Any, root: int) -> Any:
        if is_on_host(tensors):
            return self._host.reduce(tensors, options(dist.ReduceOptions, reduceOp=op, rootRank=root))
        outputs = tensors if self.rank == root else [None] * len(tensors)
        return self._done(
            [self._reduce("reduce", t, o, op, (root,)) for t, o in zip(tensors, outputs, strict=True)], tensors
        )

    def all_gather(self, outputs: list[Tensors], inputs: Tensors) -> Any:
        if is_on_host(inputs):
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
        if is_on_host(inputs):
            return self._host.allgather_coalesced(outputs, inputs)
        return self.all_gather([list(parts) for parts in zip(*outputs, strict=True)], inputs)

    def all_gather_into_tensors(self, outputs: Tensors, inputs: Tensors) -> Any:
        if is_on_host(inputs):
            return last(self._host._allgather_base(o, i) for o, i in zip(outputs, inputs, strict=True))
        check_sizes(outputs, inputs, self.size)
        calls = [self._move("all_gather", i, o.numel(), (), [o]) for o, i in zip(outputs, inputs, strict=True)]
        return self._done(calls, outputs)

    def gather(self, outputs: list[Tensors], inputs: Tensors, root: int) -> Any:
        if is_on_host(inputs):
            return self._host.gather(outputs, inputs, options(dist.GatherOptions, rootRank=root))
        parts = outputs[0] if self.rank == root else []
        count = inputs[0].numel() * self.size if self.rank == root else 1
        return self._done([self._move("gather", inputs[0], count, (root,), parts)], parts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], root: int) -> Any:
        if is_on_host(outputs):
            return self._host.scatter(outputs, inputs, options(dist.ScatterOptions, rootRank=root))
        (output,) = outputs
        source = joined(inputs[0]) if self.rank == root else output.new_empty(1)
        call = self._move("scatter", source, output.numel(), (output.numel(), root), [output], part=output)
        return self._done([call], outputs)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], op: Any) -> Any:
        if is_on_host(outputs):
            given = options(dist.ReduceScatterOptions, reduceOp=op)
            return self._host.reduce_scatter(outputs, inputs, given)
        calls = []
        for output, parts in zip(outputs, inputs, strict=True):
            if any(part.numel() != output.numel() for part in parts):  # as NCCL does: a reduction to each rank
                for root, part in enumerate(parts):
                    calls.append(self._reduce("reduce", part, output if root == self.rank else None, op, (root,)))
            else:
                calls.append(self._reduce("reduce_scatter", joined(parts), output, op, ()))
        return self._done(calls, outputs)

    def reduce_scatter_tensors(self, outputs: Tensors, inputs: Tensors, op: Any) -> Any:
        if is_on_host(inputs):
            given = options(dist.ReduceScatterOptions, reduceOp=op)
            pairs = zip(outputs, inputs, strict=True)
            return last(self._host._reduce_scatter_base(o, i, given) for o, i in pairs)
        check_sizes(inputs, outputs, self.size)
        calls = [self._reduce("reduce_scatter", i, o, op, ()) for o, i in zip(outputs, inputs, strict=True)]
        return self._done(calls, outputs)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Any:
        if is_on_host([input]):
            return self._host.alltoall_base(output, input, output_splits, input_splits)
        received = self._split(output, output_splits, "output")
        sent = self._split(input, input_splits, "input")
        call = self._move("all_to_all", input, sum(received), (received, sent), [output])
        return self._done([call], [output])

    def all_to_all(self, outputs: Tensors, inputs: Tensors) -> Any:
        if is_on_host(inputs):
            return self._host.alltoall(outputs, inputs)
        received, sent = [t.numel() for t in outputs], [t.numel() for t in inputs]
        call = self._move("all_to_all", joined(inputs), sum(received), (received, sent), outputs)
        return self._done([call], outputs)

    def send(self, tensors: Tensors, destination: int, tag: int) -> Any:
        if is_on_host(tensors):
            return self._host.send(tensors, destination, tag)
        return self._done([self._move("send", tensors[0], 1, (destination, tag), [])], tensors)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Any:
        """Receiving begins now, so that crossed sends meet; the tensor is written, in program order, by `wait`."""
        if is_on_host(tensors):
            return self._host.recv(tensors, source, tag)
        (tensor,) = tensors

        def receive(_: torch.Tensor) -> torch.Tensor:
            handle.wait()
            return received

        call = self._call("recv", f"recv from rank {source}", receive, partner=source)
        call.route = f" {self.rank}<-{source}"
        self._refuse_after_failure(call)
        handle, received = self._transport.start_receiving(tensor.numel(), tensor.dtype, source, tag)

        def finish() -> None:
            write([tensor], record(call, tensor.new_empty(1), [max(1, tensor.numel())]))

        return self._done([call], tensors, finish)

    def recv_any_source(self, tensors: Tensors, tag: int) -> Any:
        if is_on_host(tensors):
            return self._host.recv_anysource(tensors, tag)
        raise NotImplementedError("recv from any source: name the source rank of a tensor on the device, as for NCCL")

    def barrier(self) -> Any:
        call = self._call("barrier", "barrier", torch.clone)
        record(call, torch.zeros(1, device="tpu"), [1])
        return self._done([call], [], functools.partial(await_end, call))

    def start_coalescing(self) -> None:
        self._coalesced = []

    def end_coalescing(self) -> Any:
        works, self._coalesced = self._coalesced or [], None
        outputs = [tensor for work in works for tensor in work.results()]

        def finish() -> None:
            for work in works:
                work.wait()

        return FinishedWork([call for work in works for call in work._calls], outputs, finish)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._transport.group._set_default_timeout(timeout)
        self._host._set_default_timeout(timeout)

    def has_failed(self) -> bool:
        return self._error is not None

    def drain(self, seconds: float | None = None) -> bool:
        """Waits until every call has run or one has failed; False where that takes longer."""
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._lock:
            unfinished = list(self._unfinished)
        _C.cut_all()
        for call in unfinished:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not await_end(call, left):
                return False
        if self._error is None:
            self._transport.finish_sends()
        return True

    def shutdown(self) -> None:
        """Ends the group after its last call."""
        self.drain()
        self.close()

    def abort(self, why: str = "has aborted its process group") -> None:
        """Ends the group at once; what waits in it fails, here and on the other ranks, which are told why."""
        self._error = self._error or dist.DistBackendError(f"rank {self.rank} {why}")
        stop_waiting(self, None)
        self._host.abort()
        self._peers.abandon(why)
        self.close()

    def close(self) -> None:
        """Ends what is told to other ranks."""
        self._peers.close()

    # what a recorded call asks of its group

    def begin(self, call: CollectiveCall) -> None:
        self._refuse_after_failure(call)
        with self._lock:
            while self._unfinished and self._unfinished[0].finished.is_set():  # they finish in order
                self._unfinished.popleft()
            self._unfinished.append(call)

    def vote(self, calls: Sequence[CollectiveCall], proposal: Proposal) -> VoteResult:
        self._refuse_after_failure(calls[0])
        self._peers.begin(calls[0])
        calls[0].is_agreed = True
        return self._peers.vote(calls, proposal, self._meet)

    def tell(self, numbers: Sequence[int]) -> list[list[int]]:
        return tell(numbers, self._meet)

    def timeout(self) -> float:
        return self._timeout.total_seconds()

    def explain(self, call: CollectiveCall, error: BaseException) -> BaseException:
        if self._error is None:
            self._error = self._peers.explain(call, error)
            recorder.dump()
        return self._error

    # how a call is made

    def _call(
        self,
        name: str,
        what: str,
        run: Callable[[torch.Tensor], torch.Tensor],
        kind: str = "",
        homes: tuple[int, ...] = (),
        partner: int | None = None,
    ) -> CollectiveCall:
        self._sequence += partner is None
        call = CollectiveCall(self, name, what, self._sequence, _C.current_line(), run, kind or name, homes, partner)

        def begin(tensor: torch.Tensor) -> torch.Tensor:
            self._refuse_after_failure(call)
            self._peers.begin(call)
            if partner is None and not call.is_agreed:
                self._peers.vote([call], Proposal("", 1, ""), self._meet)
            return run(tensor)

        call.run = begin
        return call

    def _homes_for(self, kind: str, tensor: torch.Tensor) -> tuple[int, ...]:
        """The devices whose programs may have such a collective."""
        return self._homes if is_compiled(kind, dtype_name(tensor)) and tensor.numel() else ()

    def _sizes(self, name: str, shape: Sequence[int], count: int) -> Sequence[int]:
        """The shape of a collective's result; ranks' parts lie one after the other in the first dimension."""
        if name in ("all_reduce", "reduce", "broadcast"):
            return shape
        if name == "all_gather":
            return [self.size * shape[0], *shape[1:]]
        return [shape[0] // self.size, *shape[1:]] if name == "reduce_scatter" else [max(1, count)]

    def _move(
        self,
        name: str,
        tensor: torch.Tensor,
        count: int,
        arguments: tuple[Any, ...],
        outputs: Tensors | None = None,
        part: torch.Tensor | None = None,
    ) -> CollectiveCall:
        """Records a collective that moves `tensor`, and writes its `count` elements to `outputs` (None: in place)."""
        part = tensor if part is None else part
        shape = "" if name == "all_to_all" else f"[{part.numel()}]"
        run = functools.partial(getattr(self._transport, name), **named(name, arguments))
        what = f"{name} {dtype_name(part)}{shape}{told(name, arguments)}"
        is_even = name != "all_to_all" or len({*arguments[0], *arguments[1]}) == 1
        kind = " ".join([name, *map(str, arguments)]) if name in ("broadcast", "gather", "scatter") else name
        if not is_even and (step := shift(self.rank, *arguments)):
            is_even, kind = True, f"shift {step}"
        source = whole(tensor)
        homes = self._homes_for(kind, tensor) if is_even else ()
        partner = arguments[0] if name == "send" else None
        call = self._call(name, what, run, kind, homes, partner)
        call.route = "" if partner is None else f" {self.rank}->{partner}"
        result = record(call, source, self._sizes(name, source.shape, count))
        write([tensor] if outputs is None else outputs, result)
        return call

    def _reduce(
        self, name: str, tensor: torch.Tensor, output: torch.Tensor | None, op: Any, arguments: tuple[int, ...]
    ) -> CollectiveCall:
        """Records a reduction and writes its result to `output`, where there is one."""
        kind, factor = kind_of(op)
        with torch.no_grad():
            source, plain = prepared(tensor.detach(), kind, factor)
            source = whole(source)
            if name == "reduce_scatter" and source.shape[0] % self.size:
                source = source.view(-1)
        run = functools.partial(getattr(self._transport, name), op=plain, **named(name, arguments))
        shape = f"{dtype_name(tensor)}[{tensor.numel()}]"
        what = f"{name} {kind.name} {shape}{told(name, arguments)}"
        compiled = f"{name} {plain.name}"
        call = self._call(name, what, run, compiled, self._homes_for(compiled, source) if tensor.numel() else ())
        result = record(call, source, self._sizes(name, source.shape, 1))
        if output is not None:
            with torch.no_grad():
                if kind == ReduceOp.AVG:
                    is_integral = not (result.is_floating_point() or result.is_complex())
                    result = result.div(self.size, rounding_mode="trunc" if is_integral else None)
                if tensor.is_complex():
                    result = torch.view_as_complex(result.view(-1, 2))
                write([output], result)
        return call

    def _done(
        self, calls: Sequence[CollectiveCall], outputs: Tensors, finish: Callable[[], Any] | None = None
    ) -> FinishedWork:
        done = FinishedWork(calls, outputs, finish)
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

    def _meet(self, words: Sequence[int]) -> list[list[int]]:
        """Nobody begins to wait for a rank that has ended: one ends when all have come to its last meeting."""
        if missing := self._peers.missing():
            raise ConnectionError(missing)
        return self._transport.meet(words)

    def _refuse_after_failure(self, call: CollectiveCall) -> None:
        if self._error is None and (why := self._peers.failure()):
            self.explain(call, ConnectionError(why))
        if self._error is not None:
            raise self._error
