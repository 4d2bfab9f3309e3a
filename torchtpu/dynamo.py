"""torch.compile: in come graphs, out go callables.

A graph with tpu tensors runs op by op on the device, which compiles it itself in the background; all others go to
inductor untouched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch


def install() -> None:
    """Makes `route` the default backend at the first torch.compile: setting it now would import torch._dynamo (1 s)."""
    original = torch.compile

    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:  # noqa: A001
        torch.compile = original
        if hasattr(torch.compiler, "set_default_backend") and torch.compiler.get_default_backend() == "inductor":
            torch.compiler.set_default_backend(route)
        return original(*args, **kwargs)

    torch.compile = compile


def route(
    graph: torch.fx.GraphModule, inputs: list[Any], *, mode: str | None = None, options: Any = None
) -> Callable[..., Any]:
    """The default backend of torch.compile."""
    if any(device.type == "tpu" for device in _devices(graph, inputs)):
        return graph.forward
    inductor: Any = torch._TorchCompileInductorWrapper
    compiled: Callable[..., Any] = inductor(mode or "default", options, dynamic=None)(graph, inputs)
    return compiled


def _devices(graph: torch.fx.GraphModule, inputs: list[Any]) -> Iterator[torch.device]:
    values = [*inputs, *graph.parameters(), *graph.buffers()]
    for node in graph.graph.nodes:
        values += [node.meta.get("example_value"), *node.kwargs.values()]
    for value in torch.utils._pytree.tree_leaves(values):
        if isinstance(value, torch.Tensor):
            yield value.device
        elif isinstance(value, torch.device):
            yield value
