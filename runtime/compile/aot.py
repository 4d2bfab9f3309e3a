"""Compiles programs for TPUs on a machine without one, and estimates their cost.

libtpu loads once per process and reads its settings from the environment: whoever makes an `AotClient` starts a
process for it with `environment()` set.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jaxlib
from jaxlib import xla_client
from jaxlib.mlir import ir

from torchtpu.compiler_cache import Target, compiler_line
from torchtpu.runtime.device.chips import find_chip, topology_of
from torchtpu.runtime.device.client import Options, compile_options
from torchtpu.runtime.device.jax_modules import mlir, xla_bridge
from torchtpu.runtime.device.process_group import Homes
from torchtpu.runtime.telemetry.cost import Cost, cost_of, text_of

# What jax adds on a machine with chips; a program compiled without it would not be the one compiled there.
_BARRIER = "--xla_tpu_use_enhanced_launch_barrier=true"


class Built(NamedTuple):
    """An executable that a TPU loads, what one launch of it costs by the compiler's own account, and its text."""

    executable: bytes
    cost: Cost
    text: str | None


def environment(outer: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`outer` with what libtpu needs to start on a machine without a chip, several times at once, quietly."""
    arguments = outer.get("LIBTPU_INIT_ARGS", "")
    if _BARRIER.partition("=")[0] not in arguments:
        arguments = f"{arguments} {_BARRIER}".strip()
    return {
        **outer,
        "LIBTPU_INIT_ARGS": arguments,
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_MIN_LOG_LEVEL": "3",
    }


class AotClient:
    """libtpu's compile-only client for one topology; ValueError where there is no such chip or topology."""

    platform = lowering_platform = "tpu"

    def __init__(self, target: str, *, excess_precision: bool = False) -> None:
        self.chip, self.topology = find_chip(target)
        # As on a machine with v4 chips, where the two cores of a chip are one device.
        settings = {"chip_config_name": "megacore"} if self.chip.name == "v4" else {}
        try:
            described = xla_bridge.make_pjrt_tpu_topology(f"{self.chip.name}:{self.topology}", **settings)
        except xla_client.XlaRuntimeError as error:
            raise ValueError(f"{target}: {str(error).partition(chr(10))[0]}") from error
        self.devices: list[Any] = list(described._make_compile_only_devices())
        self._client = self.devices[0].client
        self._excess_precision = excess_precision

    @functools.cached_property
    def target(self) -> Target:
        """What programs are compiled for: the same record that a client with chips makes."""
        line = compiler_line(jaxlib.__version__, self._client.platform_version)
        return Target("tpu", self.devices[0].device_kind, line, topology=topology_of(self.devices))

    def options(self, device: int, homes: Homes = (), more: Options = ()) -> bytes:
        """The compile options, serialized."""
        data: bytes = self._options_for(homes, more).SerializeAsString()
        return data

    def compile(self, text: str, homes: Homes = (), more: Options = ()) -> Built:
        """Compiles a StableHLO module for one device, or a replica of it for each of `homes`, with `more` options than
        usual; raises what the compiler raises."""
        if len(homes) > len(self.devices):
            raise ValueError(f"{self.topology} has {len(self.devices)} devices, the program {len(homes)} ranks")
        devices = xla_client.DeviceList(tuple(d for d in self.devices if d.id in (homes or (self.devices[0].id,))))
        with mlir.make_ir_context():
            executable = self._client.compile(ir.Module.parse(text), devices, self._options_for(homes, more))
        made = text_of(executable)
        return Built(executable.serialize(), cost_of(executable, self.chip, made), made)

    def _options_for(self, homes: Homes, more: Options) -> Any:
        return compile_options(homes or (self.devices[0].id,), self._excess_precision, more)
