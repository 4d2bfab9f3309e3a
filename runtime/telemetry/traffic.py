"""Estimates what the devices of a job send each other, from a compiled TPU module's text.

A collective that runs beside other work is exposed only where it takes longer than that. The compiler gives no cycles
for most of them, so what a device receives is charged at the published bandwidth of its links, which the topology of a
job may not reach.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torchtpu.runtime.device.chips import Chip

from .cost import Estimate, Instruction, arrays, timeline


class Traffic(NamedTuple):
    """The collectives of one launch by opcode: alone, or beside other work. Bytes are what one device receives."""

    alone: Mapping[str, int]
    beside: Mapping[str, int]
    nbytes: int
    seconds: float
    exposed_seconds: float


def traffic(text: str, chip: Chip) -> Traffic:
    """That of a scheduled module on devices of `chip`."""
    alone, beside = Counter[str](), Counter[str]()
    nbytes, seconds, exposed = 0, 0.0, 0.0
    sources: dict[str, tuple[str, ...]] = {}
    begun: dict[str, tuple[float, float]] = {}  # by the name that started it: its own seconds, and when
    clock = 0.0
    for instruction, cost in timeline(text):
        sources[instruction.name] = instruction.operands
        found = next(_collectives(instruction), None)
        if found is not None and "calls=%all-reduce-scatter" in instruction.line:  # one step of the fused form
            found = instruction._replace(opcode="reduce-scatter", line=found.line)
        part = _part_of(instruction)
        if part == "done":
            start = next((name for name in _back(instruction.name, sources) if name in begun), None)
            if start is not None:
                own, since = begun.pop(start)
                exposed += max(0.0, own - (clock - since))
        elif found is not None and part != "middle":
            received = _received(found)
            own = received / chip.link_bytes_per_second
            nbytes, seconds = nbytes + received, seconds + own
            if part == "start":
                beside[_kind(found)] += 1
                begun[instruction.name] = own, clock
                continue
            alone[_kind(found)] += 1
            exposed += own
            continue
        clock += _seconds(cost, chip)
    exposed += sum(own for own, _ in begun.values())
    return Traffic(dict(sorted(alone.items())), dict(sorted(beside.items())), nbytes, seconds, exposed)


_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


def _kind(instruction: Instruction) -> str:
    return instruction.opcode.removesuffix("-start")


def _collectives(instruction: Instruction) -> Iterator[Instruction]:
    if _kind(instruction) in _KINDS:
        yield instruction
    for inner in instruction.inner:
        yield from _collectives(inner)


def _part_of(instruction: Instruction) -> str:
    """Which part of a collective that runs beside other work this is; "" where none."""
    lines = [instruction.line, *(inner.line for inner in instruction.inner)]
    if any('"AsyncCollectiveStart"' in line for line in lines):
        return "start"
    if any('"AsyncCollectiveDone"' in line for line in lines):
        return "done"
    for part in ("start", "done"):
        if instruction.opcode.endswith(f"-{part}"):
            return part
    return "middle" if "%async_collective_fusion" in instruction.line else ""


def _back(name: str, sources: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """The names that lead to this one, nearest first, through what takes apart or goes on with a collective."""
    waiting, known = [name], {name}
    for found in waiting:
        yield found
        for source in sources.get(found, ()):
            if source not in known:
                known.add(source)
                waiting.append(source)


def _received(instruction: Instruction) -> int:
    """The bytes that a device receives of a collective."""
    size = _group_size(instruction.line)
    made = arrays(instruction.types)
    match _kind(instruction):
        case "all-gather":  # a start's result names its operand too
            whole = max(made) if instruction.opcode.endswith("-start") else sum(made)
            return whole * (size - 1) // size
        case "all-reduce":
            return 2 * sum(made) * (size - 1) // size
        case "reduce-scatter":
            return sum(made) * (size - 1)
        case "all-to-all":
            return sum(made) * (size - 1) // size
        case _:  # a start's result names its operand, and flags
            return max(made)


def _group_size(line: str) -> int:
    """The ranks that a collective joins."""
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    if listed:
        return listed[1].count(",") + 1
    spread = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    return int(spread[1]) if spread else 1


def _seconds(cost: Estimate, chip: Chip) -> float:
    return cost.cycles * chip.seconds_per_cycle + cost.unpriced_bytes / chip.bytes_per_second
