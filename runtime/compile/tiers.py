"""The tiers of each platform: the compile options that programs begin with, when they move on to the usual options, and
which options hot programs are tried with.

Whether a program has paid for its next tier is counted by a model of the ops, never by the clock: which programs there
are hangs on the op streams alone. What loosens the numbers has no place here: tiers differ in the last bits only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from torchtpu.runtime.device.client import Options
from torchtpu.runtime.device.jaxlib_versions import HAS_FUSION_EMITTERS_OPTION
from torchtpu.runtime.ir.program import Op, Program, Random

from .computed import computed, made

_SURE = 2.0  # a training loop has a few regions: its first step makes the optimizer's states
_BYTES_AN_OP = 1400  # of a program's text, about
_NORMAL = "normal", "randn", "log_normal"


class FirstTier(NamedTuple):
    """How a platform compiles what it has not seen before: quickly, for code that runs slower.

    With the usual options a program compiles for `program_ms`, and `kilobyte_ms` for each 1000 bytes of its text;
    without them a launch takes `op_us` longer for each op, `element_ns` for each element that an op has `computed`,
    `padded_ns` where its arrays are padded, `drawn_ns` for a random one, `normal_ns` if that is normally distributed,
    and `launch_us` for each program that it is made of. A piece for whose usual options `large_launches` launches pay
    is compiled with these. Nobody waits for a program that compiles longer than `patience_ms`, if there is one of the
    first tier to run meanwhile.

    A region of at least `least_ops` ops, or of two where new ones keep coming, is made of pieces where those that are
    new take at most `most_missing` of the time to compile that what would have to be compiled otherwise takes; a
    program takes what `program_ops` of its ops do beside them. Where new regions keep ending on its line, so is one
    whose pieces take half the time that it and those before it there take whole: others may come that have pieces in
    common with it. Where there were more than `most_visits`, pieces may have at most `most_missing` of the region's ops
    that are new: what is there of the whole is not asked.
    """

    options: Options
    program_ms: float
    kilobyte_ms: float
    op_us: float
    element_ns: float
    padded_ns: float
    drawn_ns: float
    normal_ns: float
    launch_us: float
    program_ops: float
    computed: Callable[[Op], float] = made
    least_ops: int = 5
    most_missing: float = 0.78
    most_visits: int = 4
    patience_ms: float = 10_000.0
    large_launches: int = 8

    def may_divide(self, program: Program, *, is_often_new: bool) -> bool:
        """Whether a program may be made of pieces: should a part of a padded one fail, the whole could not be run as it
        was recorded."""
        least = 2 if is_often_new else self.least_ops
        return len(program.ops) >= least and not any(op.padding is not None for op in program.ops)

    def is_divided(self, pieces: Iterable[int], undivided: float, spent: float) -> bool:
        """Whether a region is better compiled as pieces of so many ops, where it is `undivided` work otherwise, and
        regions that ended on its line before were `spent` work."""
        work = self.work(pieces)
        return work <= self.most_missing * undivided or (spent > 0 and _SURE * work <= spent + undivided)

    def work(self, programs: Iterable[int]) -> float:
        """What programs of so many ops take to compile, in ops."""
        return sum(self.program_ops + num_ops for num_ops in programs)

    def is_large(self, program: Program, text_bytes: int) -> bool:
        """Whether a piece with so long a text is compiled with the usual options from the beginning."""
        return self.large_launches * self.loss_ms(program) >= self.price_ms(text_bytes)

    def is_paid_at_once(self, program: Program) -> bool:
        """Whether one launch of a program whose text is not written yet pays for the usual options, about."""
        return self.loss_ms(program) >= self.price_ms(_BYTES_AN_OP * len(program.ops))

    def price_ms(self, text_bytes: float) -> float:
        """How long a program with so long a text compiles with the usual options, about."""
        return self.program_ms + self.kilobyte_ms * text_bytes / 1000

    def loss_ms(self, program: Program) -> float:
        """How much longer than with them it takes, in one launch, about."""
        return sum(self.op_us * 1e-3 + self._element_ns(op) * 1e-6 * self.computed(op) for op in program.ops)

    def _element_ns(self, op: Op) -> float:
        if any(isinstance(argument, Random) for argument in op.args):
            return self.normal_ns if op.name.startswith(_NORMAL) else self.drawn_ns
        return self.element_ns if op.padding is None else self.padded_ns


# Version 7. The options and `normal_ns` are measured with jaxlib 0.10.2 by benchmarks/compile_tiers.py, and what cpu
# has of `program_ms`, `kilobyte_ms`, `op_us`, `element_ns`, `padded_ns` and `drawn_ns` by
# benchmarks/compile_price.py; `program_ops` is what both tell of the first tier. What tpu has is measured by libtpu
# 0.0.51's account of GPT-2's step on v5e by benchmarks/tpu_tiers.py, for each op, which has some 1400 bytes. The
# options of gpu are measured by compile_tiers.py on an H200 with jaxlib 0.11.2, and its `kilobyte_ms` is a third of
# what compile_price.py found there for each op: such a machine has cores to spare. The README there has the figures.
# The others are estimates that no script measures. A platform that is not named here was not measured, and has one
# tier.
FIRST_TIERS: Mapping[str, FirstTier] = {
    "cpu": FirstTier(
        (
            ("xla_backend_optimization_level", 0),
            *((("xla_cpu_use_fusion_emitters", False),) if HAS_FUSION_EMITTERS_OPTION else ()),
        ),
        program_ms=38.0,
        kilobyte_ms=17.0,
        op_us=0.3,
        element_ns=4.0,
        padded_ns=10.0,
        drawn_ns=33.0,
        normal_ns=350.0,
        launch_us=15.0,
        program_ops=6.0,
        computed=computed,
    ),
    "tpu": FirstTier(
        (("optimization_level", 19),),  # XLA's O1
        program_ms=50.0,
        kilobyte_ms=120.0,
        op_us=0.0,
        element_ns=0.02,
        padded_ns=0.02,
        drawn_ns=0.02,
        normal_ns=0.02,
        launch_us=15.0,
        program_ops=0.5,
    ),
    "gpu": FirstTier(
        # Every matrix product and convolution is otherwise tried in many forms, on the device.
        (("xla_gpu_autotune_level", 0), ("xla_gpu_enable_triton_gemm", False)),
        program_ms=10.0,
        kilobyte_ms=3.0,
        op_us=1.0,
        element_ns=0.002,
        padded_ns=0.002,
        drawn_ns=0.002,
        normal_ns=0.002,
        launch_us=45.0,
        program_ops=3.0,
    ),
}


# What else makes programs give the same bits each time, where the usual options do not see to that.
DETERMINISTIC: Mapping[str, Options] = {"gpu": (("xla_gpu_deterministic_ops", True),)}


class Sweep(NamedTuple):
    """What is tried on one platform, in this order; names are for people.

    A variant is compiled where the program has run for `worth` times what it and those before it take to compile.
    A program from the cache compiles `loading` times as long as it loads.
    """

    options: Mapping[str, Options]
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
