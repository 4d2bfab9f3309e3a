"""Variants: in comes a platform, out go the compile options that its hot programs are tried with, and when that pays.

What loosens the numbers has no place here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torchtpu.runtime.device.client import Options


class Sweep(NamedTuple):
    """What is tried on one platform, in this order; names are for people.

    A variant is compiled where the program has run for `worth` times what it and those before it take to compile.
    A program from the cache compiles `loading` times as long as it loads.
    """

    variants: Mapping[str, Options]
    worth: float
    loading: float

    def is_due(self, run_ms: float, compile_ms: float, tried: int) -> bool:
        """Whether one more variant is worth compiling, after so many."""
        return run_ms > self.worth * compile_ms * (tried + 1)


# Version 1, measured with jaxlib 0.10.2 and libtpu 0.0.51 by benchmarks/compile_options.py; its README has the figures.
SWEEPS: Mapping[str, Sweep] = {
    "cpu": Sweep(
        {"memory schedule": (("xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"),)},
        worth=20.0,
        loading=40.0,
    ),
}
