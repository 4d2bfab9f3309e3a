"""What a TPU program costs, by its compiler's account.

XLA's own totals count a loop's body once, and its estimate in seconds can be negative: cycles are summed here,
instruction by instruction, loops by their trip counts.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jax.errors import JaxRuntimeError

from torchtpu.runtime.device.chips import Chip


class Cost(NamedTuple):
    """One launch. Sizes are bytes; `gaps` counts, by opcode, the instructions that the cycles leave out, and
    `unpriced_bytes` is what those read and write.

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
    unpriced_bytes: int
    gaps: Mapping[str, int]

    @property
    def peak_bytes(self) -> int:
        """The most memory that a launch holds, its code included."""
        held = self.argument_bytes + self.output_bytes - self.aliased_bytes
        return held + self.temporary_bytes + self.code_bytes


def text_of(executable: Any) -> str | None:
    """A compiled executable's instructions in their order; None where jaxlib cannot read them: libtpu's modules may be
    newer, and the executable is as good as any."""
    try:
        return "\n".join(module.to_string() for module in executable.hlo_modules())
    except JaxRuntimeError:
        return None


def cost_of(executable: Any, chip: Chip, text: str | None) -> Cost:
    """The cost of a compiled executable with this text on one device of `chip`."""
    totals = executable.cost_analysis() or {}
    memory = executable.get_compiled_memory_stats()
    found = Estimate(0, 0, {"module that jaxlib cannot read": 1}) if text is None else estimate(text)
    return Cost(
        flops=max(0.0, totals.get("flops", 0.0)),
        bytes_accessed=max(0.0, totals.get("bytes accessed", 0.0)),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        device_bytes=chip.nbytes,
        cycles=found.cycles,
        seconds=found.cycles * chip.seconds_per_cycle,
        unpriced_bytes=found.unpriced_bytes,
        gaps=found.gaps,
    )


class Estimate(NamedTuple):
    """What a compiled module's text says of one run; `gaps` counts by opcode the instructions without cycles."""

    cycles: int
    unpriced_bytes: int
    gaps: Mapping[str, int]

    def times(self, trips: int) -> Estimate:
        """That of a loop's body; its instructions are counted once."""
        return Estimate(trips * self.cycles, trips * self.unpriced_bytes, self.gaps)


def estimate(text: str) -> Estimate:
    """The sum over a module's text: loops by their trips, of a condition's branches the longest."""
    return _sum(found for _, found in timeline(text))


def timeline(text: str) -> Iterator[tuple[Instruction, Estimate]]:
    """Each instruction of a module's entry in the order in which they run, with its cost."""
    computations, entry = _computations(text)
    nbytes = {found[1]: sum(arrays(found[2])) for lines in computations.values() for found in _defined(lines)}

    def priced(line: str, found: re.Match[str]) -> Estimate:
        opcode = found[3]
        own = _CYCLES.search(line)
        if opcode == "while":
            trips = _trips(line, computations)
            unknown = [] if trips is not None else [Estimate(0, 0, {"while of unknown count": 1})]
            return _sum([*unknown, *(walk(part).times(trips or 1) for part in _named(line, "body", "condition"))])
        if opcode == "conditional":
            return max(map(walk, _branches(line)), key=lambda part: part.cycles, default=_NOTHING)
        if own is not None and int(own[1]) > 0:
            return Estimate(int(own[1]), 0, {})
        if opcode in ("call", "async-start"):
            return _sum(map(walk, _named(line, "to_apply", "calls")))
        if opcode in _FREE or _SCALAR.search(line):
            return _NOTHING
        if opcode.endswith("-start"):
            # A transfer's result names its source again, of which it may take a slice, and a flag.
            moved = min((n for n in arrays(found[2]) if n > _FLAG_BYTES), default=0)
        else:
            moved = nbytes[found[1]] + sum(nbytes.get(name, 0) for name in _OPERAND.findall(found[4]))
        return Estimate(0, moved, {opcode: 1})

    @functools.cache
    def walk(name: str) -> Estimate:
        return _sum(priced(found.string, found) for found in _defined(computations.get(name, ())))

    def instruction(found: re.Match[str]) -> Instruction:
        line = found.string
        inner = [instruction(one) for part in _named(line, "calls") for one in _defined(computations.get(part, ()))]
        return Instruction(found[1], found[3], found[2], tuple(_OPERAND.findall(found[4])), line, tuple(inner))

    for found in _defined(computations.get(entry, ())):
        yield instruction(found), priced(found.string, found)


class Instruction(NamedTuple):
    """An instruction, and those of the fusion or asynchronous computation that it calls."""

    name: str
    opcode: str
    types: str
    operands: tuple[str, ...]
    line: str
    inner: tuple[Instruction, ...]


_NOTHING = Estimate(0, 0, {})


def _sum(parts: Iterable[Estimate]) -> Estimate:
    cycles, unpriced_bytes, gaps = 0, 0, Counter[str]()
    for part in parts:
        cycles += part.cycles
        unpriced_bytes += part.unpriced_bytes
        gaps.update(part.gaps)
    return Estimate(cycles, unpriced_bytes, dict(sorted(gaps.items())))


def _defined(lines: Iterable[str]) -> Iterator[re.Match[str]]:
    """Each instruction: its name, type, opcode and operands."""
    return (found for line in lines if (found := _INSTRUCTION.match(line)))


def arrays(types: str) -> list[int]:
    """The bytes of each array that a type has."""
    return [
        math.ceil(math.prod(int(n) for n in dims.split(",") if n) * int(bits or 8) / 8)
        for bits, dims in _SHAPE.findall(types)
    ]


_NO_WORK = (
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency opt-barrier partition-id replica-id "
    "copy-done slice-done async-done async-update"
)
_FLAG_BYTES = 4
_FREE = frozenset(_NO_WORK.split())
_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) (?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.-]+) = (.*?[\]})]) ([a-z][a-z0-9-]*)\(([^)]*)")
_OPERAND = re.compile(r"%([\w.-]+)")
_SHAPE = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
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
