"""Makes Lightning's accelerators "auto" and "tpu" these devices.

Lightning keeps accelerators in a registry, where "tpu" asks for torch_xla, and names the strategies, precisions and log
lines that belong to an accelerator in its connectors. Each function names the part of Lightning that it stands in for.
It serves lightning and pytorch_lightning with lightning_fabric alike.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch


def serve_trainer(connector: ModuleType) -> None:
    """_AcceleratorConnector, in pytorch/trainer/connectors/accelerator_connector.py."""
    _serve(connector._AcceleratorConnector, connector)


def serve_fabric(connector: ModuleType) -> None:
    """_Connector, in fabric/connector.py."""
    _serve(connector._Connector, connector)


def _serve(Connector: Any, module: ModuleType) -> None:
    """Both classes have the same steps."""
    accelerator = _accelerator(module)
    set_devices = Connector._set_parallel_devices_and_init_accelerator
    make_precision = Connector._check_and_init_precision

    @functools.wraps(set_devices)
    def _set_parallel_devices_and_init_accelerator(self: Any) -> None:
        if self._accelerator_flag == "tpu":
            self._accelerator_flag = accelerator()  # not the one of torch_xla
        set_devices(self)

    @functools.wraps(make_precision)
    def _check_and_init_precision(self: Any) -> Any:
        made = make_precision(self)
        if isinstance(self._accelerator_flag, accelerator) and isinstance(made, module.MixedPrecision):
            made.device = "tpu"
            if made.scaler is not None and made.scaler._device == "cuda":
                made.scaler = torch.amp.GradScaler("tpu")
        return made

    Connector._choose_auto_accelerator = staticmethod(lambda: "tpu")
    Connector._set_parallel_devices_and_init_accelerator = _set_parallel_devices_and_init_accelerator
    Connector._check_and_init_precision = _check_and_init_precision
    for name in ("_choose_strategy", "_check_strategy_and_fallback"):
        setattr(Connector, name, _as_if_cuda(getattr(Connector, name), accelerator))


def _as_if_cuda(step: Any, accelerator: type) -> Any:
    """A step of a connector that takes strategies to be those of CUDA, and all others to lack FSDP."""

    @functools.wraps(step)
    def call(self: Any) -> Any:
        flag = self._accelerator_flag
        if not isinstance(flag, accelerator):
            return step(self)
        self._accelerator_flag = "cuda"
        try:
            return step(self)
        finally:
            self._accelerator_flag = flag

    return call


def _accelerator(connector: ModuleType) -> Any:
    """The accelerator class for a connector, whose Accelerator it is derived from."""

    class TPUAccelerator(connector.Accelerator):  # type: ignore[name-defined]
        """Accelerator for tpu devices."""

        def setup_device(self, device: torch.device) -> None:
            if device.type != "tpu":
                raise ValueError(f"Device should be TPU, got {device} instead.")
            torch.accelerator.set_device_index(device)

        def teardown(self) -> None:
            torch.tpu.empty_cache()  # type: ignore[attr-defined]

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            stats: dict[str, Any] = torch.tpu.memory_stats(device)  # type: ignore[attr-defined]
            return stats

        @staticmethod
        def parse_devices(devices: int | str | list[int]) -> list[int]:
            return _parse_devices(devices)

        @staticmethod
        def get_parallel_devices(devices: list[int]) -> list[torch.device]:
            return [torch.device("tpu", index) for index in devices]

        @staticmethod
        def auto_device_count() -> int:
            return torch.accelerator.device_count()

        @staticmethod
        def is_available() -> bool:
            return torch.accelerator.is_available()

        @staticmethod
        def name() -> str:
            return "tpu"

    return TPUAccelerator


def _parse_devices(devices: int | str | list[int] | tuple[int, ...]) -> list[int]:
    """The indices that Trainer(devices=...) means: a count, -1 for all, or a list, also as text."""
    count = torch.accelerator.device_count()
    if isinstance(devices, str):
        indices = [int(part) for part in devices.split(",") if part.strip()]
        devices = indices if "," in devices else indices[0]
    if isinstance(devices, int):
        devices = range(count) if devices == -1 else range(devices)  # type: ignore[assignment]
    wanted = list(devices)  # type: ignore[arg-type]
    missing = [index for index in wanted if not 0 <= index < count]
    if missing or len(set(wanted)) < len(wanted):
        raise ValueError(f"You requested tpu devices {wanted}, but this machine has {list(range(count))}")
    return wanted


def log_devices(setup: ModuleType) -> None:
    """_log_device_info, in pytorch/trainer/setup.py, which looks for GPUs and for torch_xla."""

    def _log_device_info(trainer: Any) -> None:
        setup.rank_zero_info(f"TPU available: True, used: {trainer.strategy.root_device.type == 'tpu'}")

    setup._log_device_info = _log_device_info  # type: ignore[attr-defined]


def wrap_without_streams(ddp: ModuleType) -> None:
    """DDPStrategy, in pytorch/strategies/ddp.py and fabric/strategies/ddp.py: a device takes a stream of CUDA there."""
    (name,) = {"determine_ddp_device_ids", "_determine_ddp_device_ids"} & set(vars(ddp.DDPStrategy))
    determine = getattr(ddp.DDPStrategy, name)

    @functools.wraps(determine)
    def device_ids(self: Any) -> Any:
        return None if self.root_device.type == "tpu" else determine(self)

    setattr(ddp.DDPStrategy, name, device_ids)


def cast_in_shards(fsdp: ModuleType) -> None:
    """FSDPPrecision.forward_context, in plugins/precision/fsdp.py: autocast of CUDA."""
    forward_context = fsdp.FSDPPrecision.forward_context

    @functools.wraps(forward_context)
    def casting(self: Any) -> Any:
        if "mixed" not in self.precision:
            return forward_context(self)
        return torch.autocast("tpu", dtype=torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16)

    fsdp.FSDPPrecision.forward_context = casting


def keep_generators(seed: ModuleType) -> None:
    """_collect_rng_states and _set_rng_states, in fabric/utilities/seed.py."""
    collect, restore = seed._collect_rng_states, seed._set_rng_states

    @functools.wraps(collect)
    def _collect_rng_states(include_cuda: bool = True) -> dict[str, Any]:
        states: dict[str, Any] = collect(include_cuda)
        if include_cuda:
            states["torch.tpu"] = torch.tpu.get_rng_state_all()  # type: ignore[attr-defined]
        return states

    @functools.wraps(restore)
    def _set_rng_states(rng_state_dict: dict[str, Any]) -> None:
        restore(rng_state_dict)
        if "torch.tpu" in rng_state_dict:
            torch.tpu.set_rng_state_all(rng_state_dict["torch.tpu"])  # type: ignore[attr-defined]

    seed._collect_rng_states = _collect_rng_states  # type: ignore[attr-defined]
    seed._set_rng_states = _set_rng_states  # type: ignore[attr-defined]
