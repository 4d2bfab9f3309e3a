"""The torch.compile backend: turns dynamo's graphs into callables that record them.

A graph with tpu tensors goes through AOTAutograd and is recorded as its ops (`graphs.py`), so that it joins the pending
region like any other op: forward, backward and optimizer become one program. All other graphs go to inductor untouched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchtpu.compat.imports import after
from torchtpu.compile import flex
from torchtpu.runtime import _C

Compiled = Callable[..., Any]


def install() -> None:
    """Readies torch.compile at its first call: now it would import torch._dynamo, which takes a second."""
    original = torch.compile

    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:  # noqa: A001
        torch.compile = original
        _register()
        return original(*args, **kwargs)

    torch.compile = compile
    after("torch.nn.attention.flex_attention", _admit_to_flex_attention)
    after("torch._higher_order_ops.flex_attention", flex.serve)


def _admit_to_flex_attention(module: Any) -> None:
    """flex_attention refuses devices that it does not know by name."""
    refuse = module._validate_device

    @functools.wraps(refuse)
    def validate(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.device.type != "tpu":
            refuse(query, key, value)

    module._validate_device = validate


def backend(
    graph: torch.fx.GraphModule,
    inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """`torch.compile(backend="tpu")`.

    All of torch.compile's mode names are taken and mean the same: launches are asynchronous and a region is one program
    already. There are no options.
    """
    if mode is not None:
        torch._inductor.list_mode_options(mode)  # raises for a name that torch does not know
    if options:
        raise RuntimeError(f"Unexpected optimization option {next(iter(options))}, known options are []")
    return _aot(graph, inputs)


@functools.cache  # `from torch import compile` goes on calling what readies
def _register() -> None:
    from torch._dynamo import allow_in_graph, device_interface, register_backend, trace_rules

    from torchtpu import kernels, optimizer_steps

    _C.set_eval_frame_setter(torch._C._dynamo.eval_frame.set_eval_frame)
    register_backend(backend, name="tpu")
    device_interface.init_device_reg()  # torch's own idea of a tpu, registered now, would replace ours later
    device_interface.register_interface_for_device("tpu", _interface())
    for hook in (optimizer_steps.begin, optimizer_steps.end):
        vars(hook)["_torchdynamo_disable"] = True
    trace_rules.add("torchtpu.distributed")  # c10d calls it from C++ in the middle of a frame that dynamo traces
    allow: Any = allow_in_graph
    for kernel in kernels.callables():
        allow(kernel)
    _infer_for_fake_tensors()
    _route_inductor()


def _infer_for_fake_tensors() -> None:
    """Shapes of what PyTorch's own inference refuses for devices that it does not know."""
    from torch._subclasses.fake_impls import register_op_impl

    from torchtpu.ops.linalg.grouped import infer_grouped_mm

    grouped_mm = torch.ops.aten._grouped_mm.default

    @register_op_impl(grouped_mm)
    def infer(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        if args[0].device.type != "tpu":
            return NotImplemented
        with mode:
            return infer_grouped_mm(*args, **kwargs)


def _route_inductor() -> None:
    """inductor, the default, hands graphs with tpu tensors to this backend."""
    wrapper: Any = torch._TorchCompileInductorWrapper
    original = wrapper.__call__

    @functools.wraps(original)
    def route(self: Any, graph: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Compiled:
        if any(device.type == "tpu" for device in _devices(graph, inputs)):
            return _aot(graph, inputs)
        compiled: Compiled = original(self, graph, inputs, **kwargs)
        return compiled

    wrapper.__call__ = route


def _devices(graph: torch.fx.GraphModule, inputs: list[Any]) -> Iterator[torch.device]:
    values = [*inputs, *graph.parameters(), *graph.buffers()]
    for node in graph.graph.nodes:
        values += [node.meta.get("example_value"), *node.kwargs.values()]
    for value in torch.utils._pytree.tree_leaves(values):
        if isinstance(value, torch.Tensor):
            yield value.device
        elif isinstance(value, torch.device):
            yield value


def _aot(graph: torch.fx.GraphModule, inputs: list[Any]) -> Compiled:
    from torch._dynamo.backends.common import aot_autograd

    from torchtpu.compile.graphs import compile_graph

    if torch._functorch.config.bundled_autograd_cache:
        raise NotImplementedError(
            "aot_compile does not serve tpu: there a compiled function is recorded, and its programs are in torchtpu's "
            "cache. Save the model with torch.export.save, and compile its programs ahead of time with `torchtpu warm`."
        )
    compiled: Compiled = aot_autograd(
        fw_compiler=compile_graph,
        bw_compiler=compile_graph,
        inference_compiler=compile_graph,
        decompositions=_parts(),
        partition_fn=_partition,
        keep_inference_input_mutations=True,
    )(graph, inputs)
    return compiled


def _parts() -> dict[Any, Callable[..., Any]]:
    """Ops that run as others, which a graph had better hold."""
    from torchtpu.ops.nn import encoder

    aten = torch.ops.aten
    return {
        aten._native_multi_head_attention.default: encoder.native_multi_head_attention,
        aten._transformer_encoder_layer_fwd.default: encoder.transformer_encoder_layer_fwd,
    }


def _partition(joint: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Saves what backward needs: both halves are in one program, where recomputing would cost and save nothing.

    What activation checkpointing asks to recompute is recomputed, except for random draws: they are saved.
    """
    from torch._functorch.partitioners import default_partition
    from torch.utils.checkpoint import CheckpointPolicy

    for node in joint.graph.nodes:
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if is_random and "recompute" in node.meta:
            for drawn in (node, *(user for user in node.users if user.target.__name__ == "getitem")):
                drawn.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    halves: tuple[Any, Any] = default_partition(joint, inputs, **kwargs)
    return halves


def _interface() -> type:
    """What dynamo asks a device."""
    from torch._dynamo.device_interface import DeviceInterface

    from torchtpu.api import device as module
    from torchtpu.api import streams

    class Worker:
        set_device = staticmethod(module.set_device)
        current_device = staticmethod(module.current_device)
        get_device_properties = staticmethod(module.get_device_properties)

    class Interface(DeviceInterface):
        device = module.device
        Event = streams.Event
        Stream = streams.Stream
        current_device = staticmethod(module.current_device)
        set_device = staticmethod(module.set_device)
        device_count = staticmethod(module.device_count)
        is_available = staticmethod(module.is_available)
        synchronize = staticmethod(module.synchronize)
        current_stream = staticmethod(streams.current_stream)
        set_stream = staticmethod(streams.set_stream)
        get_device_properties = staticmethod(module.get_device_properties)
        is_bf16_supported = staticmethod(module.is_bf16_supported)

    interface: Any = Interface
    interface.Worker = Worker
    return Interface
