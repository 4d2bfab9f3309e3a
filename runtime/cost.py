"""What a TPU program costs by its compiler's account: in comes a compiled executable, out go its numbers.

XLA's own totals count a loop's body once, and its estimate in seconds can be negative: cycles are summed here,
instruction by instruction, loops by their trip counts.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jax.errors import JaxRuntimeError

from .chips import Chip


class Cost(NamedTuple):
    """One launch. Sizes are bytes; `gaps` counts, by opcode, the instructions that the cycles leave out.

    Where jaxlib cannot read the compiled module there are no cycles, and the gap says so.
    """

    flops: float
    bytes_accessed: float
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    code_bytes: int
    device_bytes: int
    cycles: int
    seconds: float
    gaps: Mapping[str, int]

    @property
    def peak_bytes(self) -> int:
        """The most memory that a launch holds, its code included."""
        held = self.argument_bytes + self.output_bytes - self.aliased_bytes
        return held + self.temporary_bytes + self.code_bytes


def cost_of(executable: Any, chip: Chip) -> Cost:
    """The cost of a compiled executable on one device of `chip`."""
    totals = executable.cost_analysis() or {}
    memory = executable.get_compiled_memory_stats()
    try:
        text = "\n".join(module.to_string() for module in executable.hlo_modules())
    except JaxRuntimeError:  # libtpu's modules may be newer than jaxlib; the executable is as good as any
        cycles, gaps = 0, {"module that jaxlib cannot read": 1}
    else:
        cycles, gaps = estimate(text)
    return Cost(
        flops=max(0.0, totals.get("flops", 0.0)),
        bytes_accessed=max(0.0, totals.get("bytes accessed", 0.0)),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        device_bytes=chip.nbytes,
        cycles=cycles,
        seconds=cycles * chip.seconds_per_cycle,
        gaps=gaps,
    )


def estimate(text: str) -> tuple[int, dict[str, int]]:
    """The cycles that a compiled module's text estimates, and how many instructions of each opcode have none."""
    computations, entry = _computations(text)

    @functools.cache
    def walk(name: str) -> tuple[int, Counter[str]]:
        cycles, gaps = 0, Counter[str]()
        for line in computations.get(name, ()):
            found = _OPCODE.search(line)
            opcode = found[1] if found else ""
            own = _CYCLES.search(line)
            if opcode == "while":
                parts = [walk(part) for part in _named(line, "body", "condition")]
                trips = _trips(line, computations)
                if trips is None:
                    gaps["while of unknown count"] += 1
                cycles += (1 if trips is None else trips) * sum(part[0] for part in parts)
                for _, missing in parts:
                    gaps.update(missing)
            elif opcode == "conditional":
                parts = [walk(part) for part in _branches(line)]
                worst = max(parts, key=lambda part: part[0], default=(0, Counter[str]()))
                cycles += worst[0]
                gaps.update(worst[1])
            elif own is not None and int(own[1]) > 0:
                cycles += int(own[1])
            elif opcode in ("call", "async-start"):
                for part in _named(line, "to_apply", "calls"):
                    cycles += walk(part)[0]
                    gaps.update(walk(part)[1])
            elif opcode and opcode not in _FREE and not _SCALAR.search(line):
                gaps[opcode] += 1
        return cycles, gaps

    cycles, gaps = walk(entry)
    return cycles, dict(sorted(gaps.items()))


_NO_WORK = (
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency opt-barrier partition-id replica-id "
    "copy-done slice-done async-done async-update"
)
_FREE = frozenset(_NO_WORK.split())
_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) (?:\(.*)?\{$")
_OPCODE = re.compile(r" = .*?[\]})] ([a-z][a-z0-9-]*)\(")
_SCALAR = re.compile(r" = \w+\[\]")  # what makes one number costs next to nothing
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_TRIPS = re.compile(r'known_trip_count":\{"n":"?(\d+)')
_BOUND = re.compile(r"s32\[\][^=]*constant\((\d+)\)")


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Each computation's lines by its name, and the entry's name."""
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    entry = ""
    for line in text.splitlines():
        if current is None:
            header = _HEADER.match(line)
            if header and not line.startswith("HloModule"):
                current = found[header[2]] = []
                entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        else:
            current.append(line)
    return found, entry


def _named(line: str, *attributes: str) -> list[str]:
    return [name for attribute in attributes for name in re.findall(rf"\b{attribute}=%?([\w.-]+)", line)]


def _branches(line: str) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", line)
    if listed:
        return [name.strip().lstrip("%") for name in listed[1].split(",")]
    return _named(line, "true_computation", "false_computation")


def _trips(line: str, computations: Mapping[str, list[str]]) -> int | None:
    """A loop's trip count. libtpu's text has none, so it is read from the bound that the condition compares with."""
    known = _TRIPS.search(line)
    if known:
        return int(known[1])
    reached = _reached(_named(line, "condition"), computations)
    return max((int(bound) for text in reached for bound in _BOUND.findall(text)), default=None)


def _reached(names: list[str], computations: Mapping[str, list[str]]) -> Iterator[str]:
    for name in names:
        for line in computations.get(name, ()):
            yield line
            yield from _reached(_named(line, "calls", "to_apply"), computations)
