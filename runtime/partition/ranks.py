"""Stages of unequal programs: divides this rank's program into parts that all ranks launch together and, between them,
parts that each rank has to itself.

Ranks whose shards are unequal record the same collectives and mostly the same ops, between others of their own shapes:
what fills a padded buffer, what the optimizer does. An op that all ranks have is common; common and own ops take turns,
as seldom as their dependences allow. All ranks ask each other at once, and each finds the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from torchtpu.runtime.device.process_group import hash_of
from torchtpu.runtime.ir.liveness import find_live, made_by
from torchtpu.runtime.ir.program import Lifted, Op, Program
from torchtpu.runtime.ir.scalar_lifting import IsStructural, Numbers
from torchtpu.runtime.ir.values import operands, rewrite

from .split import Part, split

Tell = Callable[[Sequence[int]], list[list[int]]]  # tells all ranks some ints, and their ints


class Stage(NamedTuple):
    """A part, and whether all ranks launch it together."""

    part: Part
    is_common: bool


def find_stages(program: Program, collective: str, is_structural: IsStructural, tell: Tell, shared: int) -> list[Stage]:
    """The program as stages, where `collective` is the op that ranks run together and all have the first `shared` of
    them: what comes later is the last stage. Empty where there are no such stages."""
    places = [n for n, op in enumerate(program.ops) if op.name == collective]
    end = places[shared] if shared < len(places) else len(program.ops)
    ops = program.ops[:end]
    own = _signatures(program, collective, is_structural)[:end]
    common = _common(tell(own), own)
    if common is None or not all(common[n] for n in places[:shared]):
        return []
    phases = _phases(ops, common, tell)
    if end < len(program.ops):  # what nothing common needs waits with it
        read = [[operand.value for operand in operands(op)] for op in ops]
        needed = set(find_live(range(end), (), lambda n: made_by(ops[n]), read.__getitem__, common.__getitem__))
        later = max(phases) + 2
        phases = [phases[n] if n in needed else later for n in range(end)]
        phases += [later] * (len(program.ops) - end)
    order = sorted(range(len(program.ops)), key=phases.__getitem__)
    ends = [n for n in range(1, len(order)) if phases[order[n]] != phases[order[n - 1]]]
    ordered = replace(program, ops=tuple(program.ops[place] for place in order))
    parts = split(ordered, ends)
    bounds = [0, *ends, len(order)]
    firsts = [order[begin] for begin in bounds[:-1]]
    joint = [
        first < end and common[first] and any(op.name == collective for op in part.program.ops)
        for first, part in zip(firsts, parts, strict=True)
    ]
    made = [[*_made(ordered.ops[bounds[n] : bounds[n + 1]])] for n in range(len(parts))]
    agreed = _agreed([(parts[n], made[n]) for n in range(len(parts)) if joint[n]], tell)
    if agreed is None:
        return []
    rest = iter(agreed)
    return [Stage(next(rest), True) if joint[n] else Stage(part, False) for n, part in enumerate(parts)]


def _signatures(program: Program, collective: str, is_structural: IsStructural) -> list[int]:
    """A number for each op: what it is and after how many collectives, whatever values and numbers it takes."""
    found, count = [], 0
    for op in Numbers(program, is_structural).blank.ops:
        plain = rewrite(op, lambda value: 0, lambda value: 0, lambda lifted: Lifted(lifted.kind, 0))
        text = repr((count, replace(plain, line="")))
        found.append(hash_of(text))
        count += op.name == collective
    return found


def _common(everyones: list[list[int]], own: list[int]) -> list[bool] | None:
    """Which of the own ops all ranks have: of equal ones as many as the rank with the fewest. None where these come in
    different orders."""
    counts = [Counter(signatures) for signatures in everyones]
    least = {signature: min(count[signature] for count in counts) for signature in counts[0]}

    def are_common(signatures: list[int]) -> list[bool]:
        seen: Counter[int] = Counter()
        found = []
        for signature in signatures:
            seen[signature] += 1
            found.append(seen[signature] <= least.get(signature, 0))
        return found

    shared = [[s for s, kept in zip(each, are_common(each), strict=True) if kept] for each in everyones]
    return are_common(own) if all(each == shared[0] for each in shared) else None


def _phases(ops: Sequence[Op], common: list[bool], tell: Tell) -> list[int]:
    """When each op runs: common ones in odd phases, the same on all ranks, and a rank's own between them."""
    least = [1] * sum(common)
    while True:
        floors = iter(least)
        phase_of: dict[int | None, tuple[int, bool]] = {}
        phases = []
        for op, is_common in zip(ops, common, strict=True):
            phase = next(floors) if is_common else 0
            for operand in operands(op):
                earlier, was_common = phase_of.get(operand.value, (0, is_common))
                phase = max(phase, earlier + (is_common != was_common))
            phases.append(phase)
            phase_of.update((value, (phase, is_common)) for value in _made([op]))
        everyones = tell([phase for phase, is_common in zip(phases, common, strict=True) if is_common])
        least = [max(each) for each in zip(*everyones, strict=True)]
        if all(each == least for each in everyones):
            return phases


def _made(ops: Sequence[Op]) -> Iterator[int]:
    """The values that ops make, in the order in which a part numbers them."""
    for op in ops:
        for result in op.results:
            for one in result if isinstance(result, tuple) else (result,):
                if one is not None:
                    yield one.value
        for write in op.writes:
            yield write.value


def _agreed(parts: list[tuple[Part, list[int]]], tell: Tell) -> list[Part] | None:
    """The parts with what any rank wants of them as outputs, and with what all ranks can spare donated. None where they
    do not take and make as much on all ranks."""
    words = []
    for part, made in parts:
        words += [int(number in part.program.outputs) for number in range(len(made))]
        words += [int(i not in part.program.donated) for i in range(len(part.inputs))]
    everyones = tell(words)
    if len(set(map(len, everyones))) > 1:
        return None
    wanted = iter(map(any, zip(*everyones, strict=True)))
    agreed = []
    for part, made in parts:
        outputs = [number for number in range(len(made)) if next(wanted)]
        donated = [i for i in range(len(part.inputs)) if not next(wanted)]
        program = replace(part.program, outputs=tuple(outputs), donated=tuple(donated))
        agreed.append(replace(part, program=program, outputs=tuple(made[number] for number in outputs)))
    return agreed
