"""The client: compiles program texts to executables, launches them, and moves arrays.

The only file that touches jaxlib. On the CPU platform the client is our own: no JAX backend starts, no TPU is probed
for, and the user's JAX stays as it is. There jax itself is imported when something is traced, which takes ten times as
long as to load a cached program; launching needs jaxlib alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jaxlib
import ml_dtypes  # noqa: F401 - numpy knows bfloat16 and float8 by it
import numpy as np
import torch

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # as jax does: else jaxlib lists the devices on stderr

from jaxlib import _jax, xla_client

from torchtpu.compiler_cache import Key, Target, compiler_line, host_cpu_features, program_key
from torchtpu.runtime import _C
from torchtpu.runtime.device.sizes import nbytes_of

from . import jax_modules, miscompiled
from .chips import topology_of
from .compile_process import compile_apart
from .jaxlib_versions import UNCHECKED_HANDLER
from .process_group import Homes, KeyValueStore, ProcessGroup

Aval = tuple[tuple[int, ...], torch.dtype]
Options = tuple[tuple[str, bool | int | str], ...]  # of XLA, by name

_POLL_SECONDS = 1e-3
_LATE = 0.05  # of its time that a wait may last longer, about
_NEVER_SECONDS = 10 * 365 * 24 * 3600
_M_MMAP_THRESHOLD, _MMAP_BYTES = -3, 1 << 20  # of mallopt(3)
_COMPILES_BETWEEN_TRIMS = 32
# What XLA takes beside the options of its flags.
_BUILD_OPTIONS = frozenset(
    {"exec_time_optimization_effort", "memory_fitting_effort", "optimization_level", "memory_fitting_level"}
)


class Client:
    """One PJRT client and its devices, numbered from 0.

    With a `process group` the others' devices are known too: programs may be compiled for several of them, by their
    `home`s. Making the client then waits for the others to make theirs.

    Where it `runs_at_once`, on platform cpu, a program has run when its launch returns, without the GIL, and what it
    raises is raised there: the hand-off to a thread of XLA's costs several times what a small program takes.
    """

    def __init__(
        self,
        platform: str,
        num_devices: int = 1,
        *,
        excess_precision: bool = False,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self.platform = platform
        self.runs_at_once = platform == "cpu"
        self._coordinator: _Coordinator | None = None
        self._connected: set[Any] = set()  # executables whose collectives have met those of the other processes
        if platform == "cpu" and process_group is not None:
            self._coordinator, self._client = _make_group_client(process_group)
        elif platform == "cpu":
            self._client = xla_client.make_cpu_client(asynchronous=False, num_devices=num_devices)
        else:
            jax_modules.load()
            import jax.extend

            self._client = jax.extend.backend.get_backend(platform)
        found = list(self._client.local_devices())
        # A rank that has one chip of several may call it by any index.
        self.devices: list[Any] = [found[i % len(found)] for i in range(max(num_devices, len(found)))]
        self._shardings = [
            _jax.GSPMDSharding(xla_client.DeviceList((d,)), xla_client.HloSharding.replicate()) for d in self.devices
        ]
        self._excess_precision = excess_precision
        self._options = [compile_options((d.id,), excess_precision) for d in self.devices]
        self.uploaded_bytes = [0 for _ in self.devices]  # so far
        self._num_compiled = 0
        self._keeps_memory = True  # what is freed, for a while

    def close(self) -> None:
        """Leaves the process group."""
        if self._coordinator is not None:
            self._coordinator.close()

    @property
    def lowering_platform(self) -> str:
        """The platform's name in `lowering_platforms`: cpu, tpu or cuda."""
        return {"gpu": "cuda"}.get(self.platform, self.platform)

    @functools.cached_property
    def target(self) -> Target:
        """What programs are compiled for."""
        line = compiler_line(jaxlib.__version__, self._client.platform_version)
        where = topology_of(self._client.devices())
        return Target(self.lowering_platform, self.devices[0].device_kind, line, where, host_cpu_features())

    def options(self, device: int, homes: Homes = (), more: Options = ()) -> bytes:
        """The compile options for a device, or for all of `homes`, serialized."""
        data: bytes = self._options_for(device, homes, more).SerializeAsString()
        return data

    def home(self, device: int) -> int:
        """What the device is called among those of all processes."""
        return int(self.devices[device].id)

    def memory_bytes(self, device: int) -> int:
        """The bytes a device has; 0 where the platform does not say."""
        stats = self.devices[device].memory_stats() or {}
        return int(stats.get("bytes_limit", 0))

    def start_profile(self) -> Any:
        """An XProf session; `stop_and_export(directory)` ends it. jax.profiler would start clients of its own."""
        from jaxlib import _profiler

        return _profiler.ProfilerSession()

    def live_arrays(self, device: int) -> list[Any]:
        """The arrays on a device, pending ones included (about half a microsecond per array)."""
        home = self._device_list(device)
        found = (a for a in self._client.live_arrays() if not a.is_deleted())
        return [a for a in found if a._sharding._internal_device_list == home]

    def live_bytes(self, device: int) -> int:
        """The bytes of these."""
        return sum(map(nbytes_of, self.live_arrays(device)))

    def keep_no_memory(self) -> None:
        """From now on freed arrays go back to the system at once: on the CPU platform malloc would keep them."""
        if self.platform == "cpu":
            self._keeps_memory = False
            with contextlib.suppress(AttributeError, OSError):  # another C library
                ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)

    def device_name(self, device: int) -> str:
        """What the platform calls the device."""
        return str(self.devices[device].device_kind)

    # compile

    def load_lapack(self) -> None:
        """Readies what a program that `calls_lapack` calls, before it is compiled or loaded."""
        if self.platform == "cpu":
            _register_lapack()

    def compile(self, text: str, device: int, homes: Homes = (), more: Options = ()) -> Any:
        """Compiles a StableHLO module for one device, or for it and its like at all `homes`, which will launch it
        together, with `more` options than usual; raises what XLA raises. The GIL is released meanwhile."""
        more = (*more, *self._cautions(text))
        devices, options = self._device_list(device), self._options_for(device, homes, more)
        executable = self._client.compile_and_load(text, devices, options)
        compiled = self._compiled_texts(text, executable)
        if any(map(miscompiled.hides_nan, compiled)):
            text = miscompiled.with_choices(text)
            executable = self._client.compile_and_load(text, devices, options)
            compiled = self._compiled_texts(text, executable)
        if any(map(miscompiled.is_miscompiled, compiled)):
            options = self._options_for(device, homes, (*more, *miscompiled.WITHOUT))
            executable = self._client.compile_and_load(text, devices, options)
        self._num_compiled += 1
        if not self._keeps_memory or self._num_compiled % _COMPILES_BETWEEN_TRIMS == 0:
            with contextlib.suppress(AttributeError, OSError):  # another C library
                ctypes.CDLL(None).malloc_trim(0)  # the compiler frees far more than malloc would give back
        return executable

    def is_miscompiled(self, text: str, executable: Any) -> bool:
        """Whether an executable of a StableHLO module computes something else, and is to be compiled again."""
        return any(map(miscompiled.is_miscompiled, self._compiled_texts(text, executable)))

    def _cautions(self, text: str) -> Options:
        return miscompiled.options_for(text) if self.platform == "cpu" else ()

    def _compiled_texts(self, text: str, executable: Any) -> list[str]:
        """What an executable of a StableHLO module was optimized to, where that may be wrong."""
        may_be_wrong = self.platform == "cpu" and miscompiled.may_be(text)
        return [module.to_string() for module in executable.hlo_modules()] if may_be_wrong else []

    def compile_apart(
        self, text: str, device: int, more: Options = (), *, is_wanted: Callable[[], bool]
    ) -> bytes | None:
        """As `compile`, for one device, serialized, in a process of its own: nothing in this one waits behind it. None
        where that is not possible; raises CancelledError as soon as it is not wanted any more."""
        if self.platform != "cpu" or self._coordinator is not None:
            return None
        try:
            options = self.options(device, more=(*more, *self._cautions(text)))
            return compile_apart(text, device, len(self.devices), options, is_wanted)
        except (OSError, RuntimeError):  # no process may be started here
            return None

    def serialize(self, executable: Any) -> bytes:
        """The executable as bytes that `deserialize` reads: native code, to be trusted like a shared library."""
        data: bytes = executable.serialize()
        return data

    def deserialize(self, data: bytes, device: int, homes: Homes = (), more: Options = ()) -> Any:
        """Loads a serialized executable onto one device; raises where the bytes do not fit this client."""
        options = self._options_for(device, homes, more)
        return self._client.deserialize_executable(data, self._device_list(device), options)

    def memory(self, executable: Any) -> tuple[int, int, int, int]:
        """Bytes of (arguments, outputs, outputs that reuse an argument, temporaries) of one launch."""
        stats = executable.get_compiled_memory_stats()
        return (
            stats.argument_size_in_bytes,
            stats.output_size_in_bytes,
            stats.alias_size_in_bytes,
            stats.temp_size_in_bytes,
        )

    # run

    @functools.cached_property
    def array_type(self) -> type:
        """The type of the arrays."""
        return type(self.upload(torch.zeros(1), 0))

    def handlers(self, avals: Sequence[Aval], device: int) -> list[Any]:
        """What makes arrays of a launch's outputs; made once per executable."""
        return [
            _jax.array_result_handler(_aval(shape, dtype), self._shardings[device], True, **UNCHECKED_HANDLER)
            for shape, dtype in avals
        ]

    # Enqueues one launch of an executable, or runs the program where the client `runs_at_once`: makes of arguments and
    # handlers the arrays, which may still be pending, and what `wait_for_launch` waits for. See launch/execute.h.
    execute: Callable[[Any, list[Any], list[Any]], tuple[list[Any], Any]] = staticmethod(_C.execute)

    def execute_together(self, executable: Any, arguments: list[Any], handlers: list[Any]) -> tuple[list[Any], Any]:
        """The same for a program that other processes launch too."""
        if self._coordinator is None:
            return self.execute(executable, arguments, handlers)
        with contextlib.nullcontext() if executable in self._connected else self._coordinator.exchanging():
            launched = self.execute(executable, arguments, handlers)
        self._connected.add(executable)
        return launched

    def wait_for_launch(self, token: Any) -> None:
        """Returns when a launch has run, raises what it raised."""
        token.block_until_ready()

    def upload(self, tensor: torch.Tensor, device: int) -> Any:
        """An array with the contents of a contiguous CPU tensor, which must not change afterwards.

        On the CPU platform the array shares the tensor's memory where that is aligned to 64 bytes.
        """
        # A transposed tensor would import with a transposed layout, and a launch checks only the size in bytes.
        assert tensor.is_contiguous() and tensor.is_cpu, "only contiguous CPU tensors are uploaded"
        self.uploaded_bytes[device] += tensor.nbytes
        aval = _aval(tuple(tensor.shape), tensor.dtype)
        data, home = _numpy(tensor.detach()), self.devices[device]
        # Without enable_x64, 64-bit types would lose half their bits.
        return _jax.batched_device_put(aval, self._shardings[device], [data], [home], enable_x64=True)

    def download(self, array: Any) -> torch.Tensor:
        """A contiguous CPU tensor of the array's contents (on the CPU platform of its memory); waits for it."""
        if self.platform == "cpu":
            self.wait(array)
            tensor: torch.Tensor = torch._C._from_dlpack(_jax.buffer_to_dlpack_managed_tensor(array))
            return tensor
        array._copy_single_device_array_to_host_async()  # as soon as it is ready, not when somebody has seen that
        self.wait(array)
        return _from_numpy(np.asarray(array))

    def is_ready(self, array: Any) -> bool:
        """Whether the array's contents are there."""
        ready: bool = array.is_ready()
        return ready

    def wait(self, array: Any) -> None:
        """Returns when the array is ready, raises what its computation raised. Ctrl-C works in the main thread."""
        if not array.is_ready() and threading.current_thread() is threading.main_thread():
            pause = 1e-5
            while not array.is_ready():
                time.sleep(pause)
                pause = min((1 + _LATE) * pause, _POLL_SECONDS)
        array.block_until_ready()

    def aval(self, array: Any) -> Aval:
        """Shape and dtype of an array."""
        return tuple(array.aval.shape), _torch_dtype(array.aval.dtype)

    # trace

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Within it this thread's JAX traces with 64-bit types on, in full precision, and else with JAX's defaults."""
        jax_modules.load()
        import jax

        _let_no_handler_into_gc()
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.enable_x64(True))
            # Without a default device of our own, tracing would start the user's JAX backends.
            stack.enter_context(jax.default_device(self.devices[0]))
            stack.enter_context(jax.default_matmul_precision("highest"))
            stack.enter_context(jax.numpy_dtype_promotion("standard"))
            stack.enter_context(jax.numpy_rank_promotion("allow"))
            stack.enter_context(jax.threefry_partitionable(True))
            stack.enter_context(jax.default_prng_impl("threefry2x32"))
            stack.enter_context(jax.debug_nans(False))
            stack.enter_context(jax.debug_infs(False))
            stack.enter_context(jax.disable_jit(False))
            yield

    def forget_traces(self) -> None:
        """Drops what jax has traced of its own functions, such as jnp.where: it keeps that for ever, for each shape."""
        from jax._src.interpreters.partial_eval import trace_to_jaxpr

        for function in {key[0]() for key in trace_to_jaxpr.cache_keys()}:
            if function is not None and function.__module__.startswith("jax."):
                trace_to_jaxpr.evict_weakref(function)

    def _device_list(self, device: int) -> Any:
        return xla_client.DeviceList((self.devices[device],))

    def _options_for(self, device: int, homes: Homes, more: Options) -> Any:
        if homes or more:
            return compile_options(homes or (self.devices[device].id,), self._excess_precision, more)
        return self._options[device]


class Compiles(Protocol):
    """What a key needs of a client, with chips or without."""

    @property
    def target(self) -> Target: ...
    def options(self, device: int, homes: Homes = (), more: Options = ()) -> bytes: ...


def key_of(digest: str, client: Compiles, homes: Homes = (), more: Options = ()) -> Key:
    """The key of the executable of the program with this digest, compiled with `more` options than usual: of the client
    only what it compiles for counts, not whether it has chips, nor which of its devices is used."""
    target = client.target
    flags: Sequence[str] = (miscompiled.CHECK,) if target.platform == "cpu" else ()
    if target.platform == "tpu":
        flags = os.environ.get("LIBTPU_INIT_ARGS", "").split()
    options = client.options(0, homes, more)
    return program_key(digest, target, options=options, flags=flags, positions=homes or None)


def calls_lapack(text: str) -> bool:
    """Whether a program's text calls LAPACK, which only programs for platform cpu do."""
    return "lapack_" in text


def compile_options(homes: Homes, excess_precision: bool, more: Options = ()) -> Any:
    """What every program is compiled with, for a replica on each of these devices of whichever client, and `more`.

    Eager PyTorch rounds to bfloat16 after each op; with `excess_precision` XLA may keep more bits between fused ops.
    """
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = len(homes), 1
    options.device_assignment = xla_client.DeviceAssignment.create(np.array(homes).reshape(-1, 1))
    overrides = {"xla_allow_excess_precision": excess_precision, **dict(more)}
    for name in _BUILD_OPTIONS.intersection(overrides):
        setattr(options.executable_build_options, name, overrides.pop(name))
    options.env_option_overrides = list(overrides.items())
    return options


class _Coordinator:
    """A coordinator of this process's own that has the entries of a whole process group: JAX's ends all processes that
    it coordinates when it ends, or when one of them does."""

    def __init__(self, key_values: KeyValueStore) -> None:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            address = f"localhost:{probe.getsockname()[1]}"
        # It has no one to miss: what it would end for want of a heartbeat is this process, which was only paused.
        self._service = _jax.get_distributed_runtime_service(
            address, 1, heartbeat_timeout=_NEVER_SECONDS, shutdown_timeout=1
        )
        self.client = _jax.get_distributed_runtime_client(
            address, 0, heartbeat_timeout=_NEVER_SECONDS, shutdown_timeout=1, shutdown_on_destruction=False
        )
        self.client.connect()
        self._key_values = key_values
        self._known: set[str] = set()

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Within it entries go back and forth."""
        is_over = threading.Event()
        thread = threading.Thread(target=self._exchange, args=(is_over,), name="torchtpu-coordinator", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def close(self) -> None:
        """Nobody waits for this one: it is alone."""
        self.client.shutdown()
        self._service.shutdown()

    def _exchange(self, is_over: threading.Event) -> None:
        with contextlib.suppress(RuntimeError):  # the key-value store is gone: whoever waits for an entry hears of it
            is_last = False
            while not is_last:
                is_last = is_over.wait(_POLL_SECONDS)  # what was entered last is for the others
                for folder in ("cpu:local_topology", "cpu:global_topology", "cpu:gloo"):
                    for key, value in self.client.key_value_dir_get_bytes(folder):
                        if key not in self._known:
                            self._known.add(key)
                            self._key_values.put(key, value)
                for key, value in self._key_values.news():
                    self._known.add(key)
                    self.client.key_value_set_bytes(key, value)


def _let_no_handler_into_gc() -> None:
    """What signal handlers raise in Python code that the garbage collector calls is lost: jax has such code as a
    callback, and where it forgets traced functions that died."""
    from jax._src import lib, pjit

    if lib._xla_gc_callback in gc.callbacks:
        index = gc.callbacks.index(lib._xla_gc_callback)
        gc.callbacks[index] = _C.without_arguments(_jax.collect_garbage)
    traced = getattr(pjit, "_seen_qdds", None)
    if traced is not None:
        traced._remove = traced.data.pop


def _make_group_client(process_group: ProcessGroup) -> tuple[_Coordinator, Any]:
    coordinator = _Coordinator(process_group.key_values)
    with coordinator.exchanging():
        client = xla_client.make_cpu_client(
            asynchronous=False,
            distributed_client=coordinator.client,
            node_id=process_group.rank,
            num_nodes=process_group.size,
            collectives=_jax.make_gloo_tcp_collectives(distributed_client=coordinator.client),
        )
    return coordinator, client


class _Aval(NamedTuple):
    """What jaxlib asks of an array's type; jax's own class would bring jax."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    weak_type: bool = False


@functools.lru_cache(maxsize=4096)
def _aval(shape: tuple[int, ...], dtype: torch.dtype) -> _Aval:
    return _Aval(shape, np.dtype(str(dtype).removeprefix("torch.")))


def _torch_dtype(dtype: Any) -> torch.dtype:
    found = getattr(torch, dtype.name)
    assert isinstance(found, torch.dtype)
    return found


def _numpy(tensor: torch.Tensor) -> Any:
    """The tensor's memory as a numpy array; numpy's own types do not include bfloat16 and float8."""
    try:
        return tensor.numpy()
    except TypeError:
        width = {1: torch.uint8, 2: torch.int16}[tensor.dtype.itemsize]
        return tensor.view(width).numpy().view(np.dtype(str(tensor.dtype).removeprefix("torch.")))


def _from_numpy(array: Any) -> torch.Tensor:
    array = np.require(array, requirements=["C", "W"])
    try:
        return torch.from_numpy(array)
    except TypeError:
        width = {1: np.uint8, 2: np.int16}[array.dtype.itemsize]
        return torch.from_numpy(array.view(width)).view(_torch_dtype(array.dtype))


@functools.cache
def _register_lapack() -> None:
    """A program with LAPACK calls, launched without this, ends the process."""
    from jaxlib import lapack
    from jaxlib.cpu import _lapack

    for platform, targets in lapack.registrations().items():
        for name, value, version in targets:
            xla_client.register_custom_call_target(name, value, platform=platform, api_version=version)
    _lapack.initialize()
