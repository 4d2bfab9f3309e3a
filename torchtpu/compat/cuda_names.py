"""Makes CUDA's names mean tpu in a process that runs a script written for CUDA.

Every 'cuda' string, `torch.cuda` call and `.cuda()` is mapped and counted.

Only Python-visible entry points that take a device are wrapped; ops are not, so that recording costs what it costs.
`tensor.device.type` stays "tpu": a script that compares it with "cuda" takes its other branch.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.cuda.nvtx
from torch.utils._device import _device_constructors

from torchtpu.api import tensor_types
from torchtpu.api.tensor_types import TensorType
from torchtpu.compat import lightning_names

_device = torch.device
_TENSOR_METHODS = ("to", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided", "type")
_MODULE_METHODS = ("to", "to_empty")
_FUNCTIONS = (
    (torch, ("load", "set_default_device", "set_default_tensor_type", "get_device_module")),
    (torch, ("get_autocast_dtype", "set_autocast_dtype", "is_autocast_enabled", "set_autocast_enabled")),
    (torch.amp, ("custom_fwd", "custom_bwd", "is_autocast_available")),
    (torch.random, ("fork_rng",)),
    (torch.accelerator, ("set_device_index", "synchronize", "current_stream")),
)


def install() -> Counter[str]:
    """Maps the names in this process, for good; the counter fills as the script uses them."""
    mapped: Counter[str] = Counter()
    swap = functools.partial(_swap, mapped)

    constructors: Any = _device_constructors()
    for function in constructors:
        name: str = function.__name__
        for module in (torch, torch.fft, torch.signal.windows):
            if getattr(module, name, None) is function:
                setattr(module, name, _swapping(function, swap))
    for owner, names in ((torch.Tensor, _TENSOR_METHODS), (torch.nn.Module, _MODULE_METHODS), *_FUNCTIONS):
        for name in names:
            setattr(owner, name, _swapping(getattr(owner, name), swap))
    for kind in (torch.amp.autocast, torch.amp.GradScaler):
        _fill_device(kind, swap)
    for name in ("device", "Generator", "Stream", "Event"):
        setattr(torch, name, _stand_in(getattr(torch, name), swap))

    def cuda(self: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        mapped[f"{type(self).__name__}.cuda()"] += 1
        return self.tpu(swap(device), *args, **kwargs)

    torch.Tensor.cuda = cuda  # type: ignore[method-assign]
    torch.nn.Module.cuda = cuda  # type: ignore[method-assign]
    torch.Tensor.is_cuda = property(lambda self: self.device.type in ("cuda", "tpu"))  # type: ignore[assignment]
    _map_module(mapped, swap)
    lightning_names.install(mapped)
    _CountedType.mapped = mapped
    for name, made in tensor_types.make(_CountedType, "torch.cuda").items():
        setattr(torch.cuda, name, made)
    bindings: Any = torch._C
    bindings._cuda_getCurrentRawStream = lambda device: 0  # bitsandbytes takes it at its import; 0 is the default one
    return mapped


def _swap(mapped: Counter[str], value: Any) -> Any:
    """`value`, unless it names a CUDA device: then the tpu device of that index."""
    if type(value) is str and (value == "cuda" or value.startswith("cuda:")):
        mapped[f"'{value}'"] += 1
        return "tpu" + value.removeprefix("cuda")
    if isinstance(value, _CountedType) or (type(value) is str and value.startswith("torch.cuda.")):
        name = value.rpartition(".")[2] if isinstance(value, str) else value.__name__
        mapped[f"torch.cuda.{name}"] += 1
        return f"torch.tpu.{name}"
    if type(value) is _device and value.type == "cuda":
        mapped[f"device('{value}')"] += 1
        return _device("tpu", value.index or 0)
    return value


def _swapping(function: Any, swap: Callable[[Any], Any]) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(swap, args), **{name: swap(value) for name, value in kwargs.items()})

    return call


def _fill_device(kind: Any, swap: Callable[[Any], Any]) -> None:
    """Maps the device a class is made with, also where that defaults to "cuda"."""
    original = kind.__init__
    name, parameter = list(inspect.signature(original).parameters.items())[1]

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if not args and name not in kwargs and parameter.default is not parameter.empty:
            kwargs[name] = parameter.default
        original(self, *map(swap, args), **{key: swap(value) for key, value in kwargs.items()})

    kind.__init__ = __init__


def _stand_in(kind: Any, swap: Callable[[Any], Any]) -> Any:
    """A class that makes `kind`s, with CUDA devices mapped, and whose instances `kind`s are."""

    class MappedClass(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return kind(*map(swap, args), **{name: swap(value) for name, value in kwargs.items()})

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, kind)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, kind)

    return MappedClass(kind.__name__, (), {"__doc__": kind.__doc__, "__module__": "torch"})


class _CountedType(TensorType):
    """The type of torch.cuda.FloatTensor and its like."""

    is_cuda = True
    mapped: Counter[str]

    def __call__(cls, *args: Any) -> torch.Tensor:
        cls.mapped[f"torch.cuda.{cls.__name__}()"] += 1
        return super().__call__(*args)


def _map_module(mapped: Counter[str], swap: Callable[[Any], Any]) -> None:
    """Puts torch.tpu's functions and classes in the places of torch.cuda's."""
    tpu, cuda = torch.tpu, torch.cuda  # type: ignore[attr-defined]
    for source, target, label in (
        (tpu, cuda, "torch.cuda"),
        (tpu.amp, cuda.amp, "torch.cuda.amp"),
        (tpu.memory, cuda.memory, "torch.cuda.memory"),
        (tpu.random, cuda.random, "torch.cuda.random"),
    ):
        for name in dir(source):
            value = getattr(source, name)
            if not hasattr(target, name) or inspect.ismodule(value) or (name.startswith("__")):
                continue
            if isinstance(value, type) or not callable(value):
                setattr(target, name, value)
            else:
                setattr(target, name, _counting(value, f"{label}.{name}()", mapped, swap))
    cuda.default_generators = tpu.default_generators
    for name in tpu.nvtx.__all__:
        setattr(cuda.nvtx, name, getattr(tpu.nvtx, name))


def _counting(function: Any, label: str, mapped: Counter[str], swap: Callable[[Any], Any]) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        mapped[label] += 1
        return function(*map(swap, args), **{name: swap(value) for name, value in kwargs.items()})

    return call
