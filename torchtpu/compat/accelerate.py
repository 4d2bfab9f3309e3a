"""Makes accelerate find tpu where it asks for each vendor's device in turn.

Several processes are its MULTI_GPU, the one of its kinds that stands for one device a process and PyTorch's own DDP
and FSDP. Each function names the part of accelerate that it stands in for.
"""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


def find_device(state: ModuleType) -> None:
    """PartialState.default_device, _prepare_backend and set_device, in accelerate/state.py."""
    PartialState, kinds = state.PartialState, state.DistributedType
    prepare, set_device = PartialState._prepare_backend, PartialState.set_device

    def _prepare_backend(
        self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str | None, Any]:
        is_rank = int(os.environ.get("LOCAL_RANK", "-1")) != -1
        if cpu or sagemaker_dp or not is_rank:
            chosen: tuple[str | None, Any] = prepare(self, cpu, sagemaker_dp, backend)
            return chosen
        return backend or "tpu", kinds.MULTI_GPU

    def set_own_device(self: Any) -> None:
        if self.device is None and self.distributed_type == kinds.MULTI_GPU:
            torch.accelerator.set_device_index(self.local_process_index % torch.accelerator.device_count())
            self.device = torch.device("tpu", torch.accelerator.current_device_index())
        else:
            set_device(self)

    PartialState.default_device = property(lambda self: torch.device("tpu"))
    PartialState._prepare_backend = _prepare_backend
    PartialState.set_device = set_own_device


def allow_float16(accelerator: ModuleType) -> None:
    """The tuple of devices that take mixed_precision="fp16", a constant in Accelerator.__init__."""
    function = accelerator.Accelerator.__init__
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    constants = function.__code__.co_consts
    (devices,) = (each for each in constants if isinstance(each, tuple) and {"cuda", "mps", "hpu"}.issubset(each))
    more = tuple((*each, "tpu") if each is devices else each for each in constants)
    function.__code__ = function.__code__.replace(co_consts=more)


def keep_generators(checkpointing: ModuleType) -> None:
    """The states of random number generators in save_accelerator_state and load_accelerator_state."""
    save, load = checkpointing.save_accelerator_state, checkpointing.load_accelerator_state

    def states(directory: Any, index: int) -> Path:
        return Path(directory, f"{checkpointing.RNG_STATE_NAME}_{index}.pkl")

    @functools.wraps(save)
    def save_accelerator_state(output_dir: Any, model_states: Any, optimizers: Any, schedulers: Any, dataloaders: Any,
                               process_index: int, *arguments: Any, **options: Any) -> Any:  # fmt: skip
        saved = save(
            output_dir, model_states, optimizers, schedulers, dataloaders, process_index, *arguments, **options
        )
        path = states(output_dir, process_index)
        kept = torch.load(path, weights_only=False)
        torch.save({**kept, "torch_tpu_manual_seed": torch.tpu.get_rng_state_all()}, path)  # type: ignore[attr-defined]
        return saved

    @functools.wraps(load)
    def load_accelerator_state(input_dir: Any, models: Any, optimizers: Any, schedulers: Any, dataloaders: Any,
                               process_index: int, *arguments: Any, **options: Any) -> Any:  # fmt: skip
        loaded = load(input_dir, models, optimizers, schedulers, dataloaders, process_index, *arguments, **options)
        with suppress(OSError, KeyError):  # saved elsewhere, or for another number of processes
            kept = torch.load(states(input_dir, process_index), weights_only=False)
            torch.tpu.set_rng_state_all(kept["torch_tpu_manual_seed"])  # type: ignore[attr-defined]
        return loaded

    checkpointing.save_accelerator_state = save_accelerator_state  # type: ignore[attr-defined]
    checkpointing.load_accelerator_state = load_accelerator_state  # type: ignore[attr-defined]


def initialize_shards(dataclasses: ModuleType) -> None:
    """The device of `param_init_fn` in FullyShardedDataParallelPlugin, which raises where it finds none."""
    plugin = dataclasses.FullyShardedDataParallelPlugin
    post_init = plugin.__post_init__

    def __post_init__(self: Any) -> None:
        try:
            post_init(self)
        except RuntimeError:  # the last thing that it does here
            if not self.sync_module_states:
                raise
            device = torch.accelerator.current_device_index()
            self.param_init_fn = lambda module: module.to_empty(device=device, recurse=False)

    plugin.__post_init__ = __post_init__


def name_device(environment: ModuleType) -> None:
    """get_current_device_type, which notebook_launcher asks."""
    environment.get_current_device_type = lambda: ("tpu", "MULTI_GPU")  # type: ignore[attr-defined]


def empty_cache(memory: ModuleType) -> None:
    """clear_device_cache, in accelerate/utils/memory.py."""
    clear = memory.clear_device_cache

    @functools.wraps(clear)
    def clear_device_cache(garbage_collection: bool = False) -> None:
        clear(garbage_collection)
        torch.tpu.empty_cache()  # type: ignore[attr-defined]

    memory.clear_device_cache = clear_device_cache  # type: ignore[attr-defined]


def count_memory(modeling: ModuleType) -> None:
    """get_max_memory, in accelerate/utils/modeling.py: device maps number the tpu devices. And get_grad_scaler."""
    find, make_scaler = modeling.get_max_memory, modeling.get_grad_scaler

    @functools.wraps(make_scaler)
    def get_grad_scaler(distributed_type: Any = None, **options: Any) -> Any:
        if distributed_type == modeling.DistributedType.FSDP:
            return make_scaler(distributed_type, device="tpu", **options)
        return torch.amp.GradScaler("tpu", **options)

    @functools.wraps(find)
    def get_max_memory(max_memory: dict[int | str, int | str] | None = None) -> dict[int | str, int]:
        count = torch.accelerator.device_count()
        if max_memory is None:
            free = {index: torch.tpu.mem_get_info(index)[0] for index in range(count)}  # type: ignore[attr-defined]
            return {**free, **{key: size for key, size in find().items() if not isinstance(key, int)}}
        numbered = sorted(key for key in max_memory if isinstance(key, int))
        missing = [index for index in numbered if not 0 <= index < count]
        if missing:
            modeling.logger.warning("Devices %s are not available, available are %s", missing, list(range(count)))
        # accelerate would look for them among CUDA's
        others = find({key: size for key, size in max_memory.items() if not isinstance(key, int)})
        sizes = {index: max_memory[index] for index in numbered}
        read = modeling.convert_file_size_to_int
        return {**{key: read(size) if isinstance(size, str) else size for key, size in sizes.items()}, **others}

    modeling.get_grad_scaler = get_grad_scaler  # type: ignore[attr-defined]
    modeling.get_max_memory = get_max_memory  # type: ignore[attr-defined]


def count_processes(launch: ModuleType) -> None:
    """_validate_launch_command: without a configuration there are as many processes as devices, each a rank."""
    validate = launch._validate_launch_command

    @functools.wraps(validate)
    def _validate_launch_command(args: Any) -> Any:
        is_configured = args.config_file is not None or os.path.isfile(launch.default_config_file)
        if is_configured or args.cpu:
            return validate(args)
        count = torch.accelerator.device_count()
        is_unset = args.num_processes is None
        if is_unset and (count > 1 or not args.multi_gpu):  # --multi_gpu may find one device, but not ask for one
            args.num_processes = count
        validated = validate(args)
        if is_unset:
            args.num_processes = count
        if count > 1 and args.num_processes > 1:
            args.multi_gpu = True
        return validated

    launch._validate_launch_command = _validate_launch_command  # type: ignore[attr-defined]


def write_config(default: ModuleType) -> None:
    """write_basic_config, which writes that there is but a CPU."""
    write = default.write_basic_config

    @functools.wraps(write)
    def write_basic_config(*arguments: Any, **options: Any) -> Any:
        path = write(*arguments, **options)
        if path:
            config = default.ClusterConfig.from_json_file(path)
            count = torch.accelerator.device_count()
            config.use_cpu, config.num_processes = False, count
            config.distributed_type = "MULTI_GPU" if count > 1 else "NO"
            config.to_json_file(path)
        return path

    default.write_basic_config = write_basic_config  # type: ignore[attr-defined]


def name_tested_device(testing: ModuleType) -> None:
    """get_backend, in accelerate/test_utils/testing.py, and what is made of it there; peft's tests ask it too."""

    def get_backend() -> tuple[str, int, Any]:
        return "tpu", torch.accelerator.device_count(), torch.accelerator.memory_allocated

    testing.get_backend = get_backend  # type: ignore[attr-defined]
    found = get_backend()
    testing.torch_device, testing.device_count, testing.memory_allocated_func = found  # type: ignore[attr-defined]
    command = testing.get_launch_command(num_processes=testing.device_count, monitor_interval=0.1)
    testing.DEFAULT_LAUNCH_COMMAND = command  # type: ignore[attr-defined]
