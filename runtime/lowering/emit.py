"""Lowers a recorded `Program` to the StableHLO module that computes it.

Its text is a function of the program, the platform and the lowerings alone: no ids, addresses or locations.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from torchtpu.runtime.device.client import calls_lapack
from torchtpu.runtime.ir.calls import Parameter, results_of, written
from torchtpu.runtime.ir.list_ops import take_apart
from torchtpu.runtime.ir.liveness import find_live
from torchtpu.runtime.ir.program import Base, Lifted, Op, Operand, Program, Random, Result, Write
from torchtpu.runtime.ir.strided_access import Digit, row_major
from torchtpu.runtime.ir.types import tensor_type
from torchtpu.runtime.ir.values import size_of

from . import views
from .constant_folding import folded
from .cse_barriers import barrier, repeated
from .fragments import Fragments
from .materialization import STORED, boundary, find_boundaries
from .quotients import find_divided
from .tracing import Fragment
from .views import View

Aval = tuple[tuple[int, ...], torch.dtype]

CHECKS_PER_WORD = 32

_COMPARES = re.compile(r"(?:eq|ne|lt|le|gt|ge)\.Tensor$")
_INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_CHANGES_IN_PLACE = re.compile(r"\bstablehlo\.(?:scatter|dynamic_update_slice)\b")


@dataclass(frozen=True, slots=True)
class Check:
    """What to raise where a device-side check fails; `sources` are the inputs that it depends on, a bit each.

    `op` and `line` are those of the program's op number `place`.
    """

    message: str
    error: type[Exception]
    op: str
    line: str
    place: int
    sources: int


@dataclass(frozen=True, slots=True)
class Module:
    """A program's text. If it has `checks`, the set of those that failed follows its `outputs`
    (see `failed_aval`).

    `sources[k]` is what output k depends on: bit i is input i, bit len(inputs) + c is check c. A version of a storage
    that was there before a check does not depend on it: where that fails, it is the version before the op that checks.
    `offsets` is what the program takes for granted of its run-time ints, by their index.
    """

    text: str
    inputs: tuple[Aval, ...]
    outputs: tuple[Aval, ...]
    checks: tuple[Check, ...]
    sources: tuple[int, ...]
    offsets: Mapping[int, frozenset[Digit]]


def _zero(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "false"
    return "(0.0, 0.0)" if dtype.is_complex else "0.0" if dtype.is_floating_point else "0"


def failed_aval(checks: int) -> Aval:
    """The array that says which of so many checks failed: a bit of its words each, the lowest first."""
    return (-(-checks // CHECKS_PER_WORD),), torch.uint32


def lower(program: Program, fragments: Fragments, *, is_flat: bool = False) -> Module:
    """The program's module; raises an error that names op and line where an op cannot be lowered.

    With `is_flat` nothing is taken for granted of run-time offsets; views at them are slower.
    """
    live = _live_calls(program, fragments)
    waits: dict[int, int] = {}
    with fragments.bailouts.attempt("repetitions", program.line):
        waits = repeated(live, fragments.repeats)
    constants: set[int] = set()
    with fragments.bailouts.attempt("constants", program.line):
        constants = folded(live)
    shields = _find_shields(live, program.outputs)
    boundaries: set[int] = set()
    with fragments.bailouts.attempt("boundaries", program.line):
        boundaries = find_boundaries(live, program.outputs, fragments.platform, shields)
    divided = find_divided(live) - boundaries
    writer = _Writer(program, is_flat, boundaries, divided, shields)
    for place, call in enumerate(live):
        writer.add(call, waits.get(place), is_folded=place in constants)
    return writer.finish()


class _EmittedCall:
    """The program's op number `place`, or one element of it: its fragment, the arrays it takes and makes, and the value
    that each of those is written into."""

    __slots__ = ("fragment", "made", "op", "parameters", "place", "under")

    def __init__(self, place: int, op: Op, fragment: Fragment, parameters: list[Parameter]) -> None:
        self.place = place
        self.op = op
        self.fragment = fragment
        self.parameters = parameters
        self.made = results_of(op)
        before: dict[int, int | None] = {}
        newest: dict[int | None, int] = {}  # values that this op has already written to
        for write in op.writes:
            old = written(op, write).value
            while old in newest:
                old = newest[old]
            if old is not None:
                newest[old] = write.value
            before[write.value] = old
        self.under = [before.get(target.value) for target in self.made]

    def kept(self) -> Iterator[int | None]:
        """For each array it makes: the value of which a part stays, or None."""
        for target, old in zip(self.made, self.under, strict=True):
            yield None if self.is_whole(target) else old

    def is_whole(self, target: Result | Write) -> bool:
        """Whether nothing stays of what the array held."""
        return isinstance(target, Result) or target.replaces or views.covers(target.base, _view(target))

    def read(self) -> set[int]:
        """The values that it takes, those of which a part stays included."""
        return {value for value in (*self.taken(), *self.kept()) if value is not None}

    def fallbacks(self, shields: Mapping[int, bool]) -> Iterator[int]:
        """The versions that are what it makes where a check has failed."""
        for target, old in zip(self.made, self.under, strict=True):
            if old is not None and shields.get(target.value, False):
                yield old

    def taken(self) -> list[int | None]:
        """The values that the parameters of its function are, or parts of them; None for numbers."""
        parameters = [self.parameters[n] for n in self.fragment.used]
        return [p.value if type(p) is Operand else None for p in parameters]

    @property
    def compares(self) -> bool:
        """Whether it compares floating-point numbers with others."""
        return _COMPARES.match(self.op.name) is not None and any(
            type(argument) is Operand and argument.dtype.is_floating_point for argument in self.op.args
        )

    @property
    def is_constant(self) -> bool:
        """Whether it makes arrays of nothing, as `zeros_like` does."""
        return not (self.fragment.checks or self.read() or any(isinstance(a, Random) for a in self.op.args))

    @property
    def changes_in_place(self) -> bool:
        """Whether XLA changes some elements of an array where they lie, if nobody else needs it as it was."""
        return len(self.made) == 1 and _CHANGES_IN_PLACE.search(self.fragment.text) is not None

    @property
    def calls_lapack(self) -> bool:
        """Whether it calls LAPACK, on the CPU."""
        return calls_lapack(self.fragment.text)

    def stored_whole(self) -> Iterator[tuple[int, Base]]:
        """The values that it computes every element of, and their arrays."""
        for target, forwarded, old in zip(self.made, self.fragment.forwards, self.kept(), strict=True):
            if forwarded is None and old is None:
                yield target.value, target.base


def _live_calls(program: Program, fragments: Fragments) -> list[_EmittedCall]:
    """The ops whose results or checks are needed, in order."""
    ops, mapped = list(program.ops), {id(op) for op in program.ops if fragments.maps(op)}
    with fragments.bailouts.attempt("lists", program.line):
        ops = take_apart(program.ops, lambda op: id(op) in mapped)
    places = {id(op): place for place, op in enumerate(program.ops)}
    places_of = {made.value: place for place, op in enumerate(program.ops) for made in results_of(op)}
    found = zip(ops, fragments.find(ops), strict=True)
    calls = [
        _EmittedCall(places[id(op)] if id(op) in places else places_of[results_of(op)[0].value], op, *fragment)
        for op, fragment in found
    ]
    lasting = _versions_before(calls, program.outputs)
    checks = list(itertools.accumulate(len(call.fragment.checks) for call in calls))

    def read(place: int) -> Iterator[int | None]:
        call = calls[place]
        yield from call.read()
        if checks[place]:  # what a storage held is wanted where one fails
            yield from (old for made, old in zip(call.made, call.under, strict=True) if made.value in lasting)

    live = find_live(
        range(len(calls)),
        program.outputs,
        lambda place: [made.value for made in calls[place].made],
        read,
        lambda place: bool(calls[place].fragment.checks),
    )
    return [calls[place] for place in live]


def _versions_before(calls: list[_EmittedCall], outputs: Collection[int]) -> set[int]:
    """The versions of storages that lead to an output."""
    under = {target.value: old for call in calls for target, old in zip(call.made, call.under, strict=True)}
    found: set[int] = set()
    for output in outputs:
        value: int | None = output
        while value is not None and under.get(value) is not None and value not in found:
            found.add(value)
            value = under[value]
    return found


def _find_shields(calls: list[_EmittedCall], outputs: Collection[int]) -> dict[int, bool]:
    """The versions of storages that lead to an output: whether each has to be right itself where a check has failed.
    It need not where nothing is made of it but the next version, in the same loop and before another check."""
    shields = dict.fromkeys(_versions_before(calls, outputs), True)
    readers = Counter(value for call in calls for value in call.read())
    checks = 0
    fused: dict[int | None, int] = {}  # versions made in a loop, and how many checks there are before them
    for call in calls:
        checks += len(call.fragment.checks)
        for target, old in zip(call.made, call.under, strict=True):
            if target.value in shields and call.is_whole(target) and not STORED.search(call.fragment.text):
                if old is not None and fused.get(old) == checks and readers[old] == 1 and old not in outputs:
                    shields[old] = False
                fused[target.value] = checks
    return shields


def _view(target: Operand | Write) -> View:
    offset = target.offset if type(target.offset) is int else None
    return View(target.sizes, target.strides, offset, target.dtype)


class _Writer:
    """Writes main's lines.

    `names`, `layouts` and `sources` hold, per value, its name in the text, the array it is, and what it depends on.
    Where a check fails, the versions of a storage in `shields` that are made from there on are the one before that:
    `unshielded` holds for each how many checks come before the first one of which that is so, and `sound` is the newest
    version that is so itself.
    """

    def __init__(
        self, program: Program, is_flat: bool, fenced: set[int], divided: set[int], shields: Mapping[int, bool]
    ) -> None:
        self._program = program
        self._is_flat = is_flat
        self._fenced = fenced
        self._divided = divided
        self._shields = shields
        self._unshielded: dict[int | None, int] = {~i: 0 for i in range(len(program.inputs))}
        self._sound: dict[int | None, int | None] = {}
        self._passed = 0, ""  # so many checks, and whether they have passed
        self._offsets: dict[int, frozenset[Digit]] = {}
        self._lines: list[str] = []
        self._functions: dict[str, str] = {}
        self._checks: list[Check] = []
        self._check_names: list[str] = []
        self._asserted = 0  # checks of ops without results: what is made after them depends on them
        self._sources: dict[int | None, int] = {~i: 1 << i for i in range(len(program.inputs))}
        self._count = 0
        self._names: dict[int, str] = {~i: f"%in{i}" for i in range(len(program.inputs))}
        self._layouts: dict[int, Base] = {~i: base for i, base in enumerate(program.inputs)}
        self._roots: dict[int, int] = {~i: i for i in range(len(program.inputs))}
        self._read: dict[tuple[int | None, View, int | Lifted], str] = {}
        self._numbers: dict[Lifted, str] = {}
        self._never = ""  # what is false, as is known once LAPACK has returned

    def add(self, call: _EmittedCall, after: int | None = None, *, is_folded: bool = False) -> None:
        """Adds an op: the views it reads, the call, which waits for value `after` or, where XLA would fold it, is given
        no constants, and its results and writes."""
        fragment = call.fragment
        arguments = [self._argument(call.parameters[n]) for n in fragment.used]
        if after is not None or is_folded:
            arguments = self._wait(call, arguments, after)
        if call.calls_lapack and self._never:
            arguments = self._behind_lapack(call, arguments)
        self._layouts.update((target.value, target.base) for target in call.made)
        self._trace_sources(call)
        shielded = [self._is_shielded(target.value, old) for target, old in zip(call.made, call.under, strict=True)]
        made: list[str] = [""] * len(fragment.forwards)
        is_conditional = shielded == [True] and call.changes_in_place and self._lies_as_made(call)
        if fragment.checks or (fragment.is_call and not is_conditional):
            made = self._call(fragment, arguments)
        if is_conditional:
            made, shielded = [self._call_if_passed(call, arguments)], [False]
        if call.calls_lapack:
            self._note_lapack(call, made)
        for i, forwarded in enumerate(fragment.forwards):
            if forwarded is not None:
                made[i] = arguments[fragment.used.index(forwarded)]
        for target, name, old, is_shielded in zip(call.made, made, call.under, shielded, strict=True):
            if isinstance(target, Result):
                self._names[target.value] = name if _is_whole(target, target.base) else self._laid_out(target, name)
            else:
                self._names[target.value] = self._apply(call, target, name, old, is_shielded=is_shielded)
            if target.value in self._fenced:
                self._names[target.value] = self._stored(self._names[target.value], target.base)
            elif target.value in self._divided:
                array = self._names[target.value], tensor_type(*target.base)
                line, (self._names[target.value],) = barrier(f"%r{self._next()}", [array])
                self._lines.append(line)

    def finish(self) -> Module:
        """The module's text, with its outputs, its checks and its donated inputs."""
        program = self._program
        outputs = [(self._names[v], tensor_type(*self._layouts[v])) for v in program.outputs]
        avals = tuple((self._layouts[v].shape, self._layouts[v].dtype) for v in program.outputs)
        if self._check_names:
            outputs.append((self._failed(), tensor_type(*failed_aval(len(self._check_names)))))
        donations = self._donations()
        heads = [f"%in{i}: {tensor_type(*base)}{donations.get(i, '')}" for i, base in enumerate(program.inputs)]
        if program.floats:
            heads.append(f"%floats: tensor<{program.floats}xf64>")
        if program.ints:
            heads.append(f"%ints: tensor<{program.ints}xi64>")
        types = ", ".join(t for _, t in outputs)
        returned = f"    return {', '.join(n for n, _ in outputs)} : {types}" if outputs else "    return"
        head = f"  func.func public @main({', '.join(heads)}) -> ({types}) {{"
        text = "\n".join(["module @region {", head, *self._lines, returned, "  }", *self._functions.values(), "}", ""])
        inputs = tuple((b.shape, b.dtype) for b in program.inputs)
        sources = tuple(map(self._sources_of, program.outputs))
        return Module(text, inputs, avals, tuple(self._checks), sources, self._offsets)

    def _trace_sources(self, call: _EmittedCall) -> None:
        """Notes the op's checks and what its results depend on."""
        op, fragment, sources = call.op, call.fragment, self._sources
        taken = [sources.get(p.value, 0) if type(p) is Operand else 0 for p in call.parameters]
        read = functools.reduce(operator.or_, (taken[n] for n in fragment.used), 0)
        checked = 0
        for message, error in fragment.checks:
            checked |= 1 << len(self._program.inputs) + len(self._checks)
            self._checks.append(Check(message, error, op.name, op.line, call.place, read))
        if not call.made:
            self._asserted |= checked
        for target, forwarded, kept, old in zip(call.made, fragment.forwards, call.kept(), call.under, strict=True):
            own = read if forwarded is None else taken[forwarded]
            sources[target.value] = own | checked | self._asserted | sources.get(kept, 0)
            self._shield(call, target, old)

    def _shield(self, call: _EmittedCall, target: Result | Write, old: int | None) -> None:
        """Notes which checks a version of a storage does not depend on, as the one before it stays where they fail."""
        value, checks = target.value, len(self._checks)
        self._sound[value] = value
        if old is None:
            self._unshielded[value] = 0 if call.is_constant else checks
        elif value in self._shields and size_of(target.base) == self._known_bytes(old):
            self._unshielded[value] = self._unshielded[old]
            if self._unshielded[value] < checks:  # what is made of it depends on them
                self._sources[value] |= (1 << checks) - 1 << len(self._program.inputs)
            if not self._shields[value]:
                self._sound[value] = self._sound.get(old, old)
        else:
            self._unshielded[value] = checks

    def _known_bytes(self, value: int) -> int | None:
        """The size of a value; None where nothing needed it, which is so before the first check alone."""
        return size_of(self._layouts[value]) if value in self._layouts else None

    def _is_shielded(self, value: int, old: int | None) -> bool:
        """Whether a version has to be the one before it where a check has failed."""
        return old is not None and self._shields.get(value, False) and self._unshielded[value] < len(self._checks)

    def _sources_of(self, output: int) -> int:
        sources = self._sources[output]
        if output not in self._shields:
            return sources
        return sources & (1 << len(self._program.inputs) + self._unshielded[output]) - 1

    def _wait(self, call: _EmittedCall, arguments: list[str], value: int | None) -> list[str]:
        """The arguments behind a barrier, and numbers as they are; behind it the value is too."""
        parameters = [call.parameters[n] for n in call.fragment.used]
        places = [i for i, p in enumerate(parameters) if type(p) is Operand]
        arrays = [(arguments[i], tensor_type(p.sizes, p.dtype)) for i, p in enumerate(parameters) if type(p) is Operand]
        waited = [] if value is None else [(self._names[value], tensor_type(*self._layouts[value]))]
        line, made = barrier(f"%r{self._next()}", [*arrays, *waited])
        if value is not None:
            self._names[value] = made.pop()
        self._lines.append(line)
        behind = dict(zip(places, made, strict=True))
        return [behind.get(i, argument) for i, argument in enumerate(arguments)]

    def _behind_lapack(self, call: _EmittedCall, arguments: list[str]) -> list[str]:
        """The arguments, whose arrays are not there before LAPACK has returned from what was called before. It shares a
        batch among the threads that XLA:CPU runs programs with, and waits for them: as many calls at once as there are
        threads would wait for ever (jaxlib 0.10)."""
        behind = []
        for n, argument in zip(call.fragment.used, arguments, strict=True):
            given = call.parameters[n]
            if type(given) is Operand:
                kind = tensor_type(given.sizes, given.dtype)
                zeros, made = f"%r{self._next()}", f"%r{self._next()}"
                self._lines += [
                    f"    {zeros} = stablehlo.constant dense<{_zero(given.dtype)}> : {kind}",
                    f"    {made} = stablehlo.select {self._never}, {zeros}, {argument} : tensor<i1>, {kind}",
                ]
                argument = made
            behind.append(argument)
        return behind

    def _note_lapack(self, call: _EmittedCall, made: Sequence[str]) -> None:
        """Notes what an op made that calls LAPACK: a number of it that is below -1 and above 1."""
        for target, name in zip(call.made, made, strict=True):
            sizes, dtype = target.sizes, target.dtype
            if not name or 0 in sizes or not (dtype in _INTS or dtype.is_floating_point or dtype.is_complex):
                continue
            one, kind = tensor_type((1,) * len(sizes), dtype), tensor_type((), dtype)
            part, number, real, low, high, below, above, never = (f"%r{self._next()}" for _ in range(8))
            ranges = ", ".join("0:1" for _ in sizes)
            self._lines += [
                f"    {part} = stablehlo.slice {name} [{ranges}] : ({tensor_type(sizes, dtype)}) -> {one}",
                f"    {number} = stablehlo.reshape {part} : ({one}) -> {kind}",
            ]
            if dtype.is_complex:
                real_kind = tensor_type((), dtype.to_real())
                self._lines.append(f"    {real} = stablehlo.real {number} : ({kind}) -> {real_kind}")
                number, kind = real, real_kind
            dot, order = ("", "SIGNED") if dtype in _INTS else (".0", "FLOAT")
            self._lines += [
                f"    {low} = stablehlo.constant dense<-1{dot}> : {kind}",
                f"    {high} = stablehlo.constant dense<1{dot}> : {kind}",
                f"    {below} = stablehlo.compare LT, {number}, {low}, {order} : ({kind}, {kind}) -> tensor<i1>",
                f"    {above} = stablehlo.compare GT, {number}, {high}, {order} : ({kind}, {kind}) -> tensor<i1>",
                f"    {never} = stablehlo.and {below}, {above} : tensor<i1>",
            ]
            if self._never:
                both = f"%r{self._next()}"
                self._lines.append(f"    {both} = stablehlo.or {self._never}, {never} : tensor<i1>")
                never = both
            self._never = never

    def _stored(self, name: str, base: Base) -> str:
        symbol, text, kind = boundary(base)
        self._functions.setdefault(symbol, text)
        stored = f"%r{self._next()}"
        self._lines.append(f"    {stored} = call @{symbol}({name}) {kind}")
        return stored

    def _all_passed(self) -> str:
        """Whether all checks so far have passed."""
        known, name = self._passed
        for check in self._check_names[known:]:
            both = f"%passed{self._next()}"
            if name:
                self._lines.append(f"    {both} = stablehlo.and {name}, {check} : tensor<i1>")
            name = both if name else check
        self._passed = len(self._check_names), name
        return name

    def _if_passed(self, new: str, old: str, kind: str) -> str:
        """An array, or another of the same type where a check has failed."""
        chosen = f"%r{self._next()}"
        self._lines.append(f"    {chosen} = stablehlo.select {self._all_passed()}, {new}, {old} : tensor<i1>, {kind}")
        return chosen

    def _lies_as_made(self, call: _EmittedCall) -> bool:
        """Whether an op's only result is the array of a storage as it stands, and that of the version before it."""
        (write,), (old,) = call.made, call.under
        assert isinstance(write, Write)
        if old is None or self._layouts[old] != write.base:
            return False
        return write.offset == 0 and _is_whole(write, write.base)

    def _call_if_passed(self, call: _EmittedCall, arguments: list[str]) -> str:
        """What an op makes of a storage, whose elements are changed where they lie and only if all checks have passed,
        its own included: of the call that makes these, nothing else is left. XLA copies what stablehlo.if is given."""
        (write,), (old,) = call.made, call.under
        assert isinstance(write, Write)
        fragment, kind = call.fragment, tensor_type(*write.base)
        self._functions.setdefault(fragment.symbol, fragment.text)
        chosen, called = f"%r{self._next()}", f"%r{self._next()}"
        count = 1 + len(fragment.checks)
        left, made = (f"{called}:{count}", f"{called}#0") if count > 1 else (called, called)
        self._lines += [
            f"    {chosen}_branch = stablehlo.convert {self._all_passed()} : (tensor<i1>) -> tensor<i32>",
            f'    {chosen} = "stablehlo.case"({chosen}_branch) ({{',
            f"      stablehlo.return {self._names[self._sound_version(old)]} : {kind}",
            "    }, {",
            f"      {left} = call @{fragment.symbol}({', '.join(arguments)}) : {fragment.signature}",
            f"      stablehlo.return {made} : {kind}",
            f"    }}) : (tensor<i32>) -> {kind}",
        ]
        return chosen

    def _sound_version(self, value: int | None) -> int:
        """The newest version of a storage that is right where a check has failed."""
        found = self._sound.get(value, value)
        assert found is not None
        return found

    def _call(self, fragment: Fragment, arguments: list[str]) -> list[str]:
        self._functions.setdefault(fragment.symbol, fragment.text)
        count = len(fragment.forwards) + len(fragment.checks)
        name = f"%r{self._next()}"
        left = f"{name}:{count}" if count > 1 else name
        self._lines.append(f"    {left} = call @{fragment.symbol}({', '.join(arguments)}) : {fragment.signature}")
        names = [f"{name}#{i}" for i in range(count)] if count > 1 else [name]
        self._check_names += names[len(fragment.forwards) :]
        return names[: len(fragment.forwards)]

    def _argument(self, parameter: Parameter) -> str:
        if type(parameter) is Lifted:
            return self._number(parameter)
        assert type(parameter) is Operand
        value = parameter.value
        if value is not None and parameter.offset == 0 and _is_whole(parameter, self._layouts[value]):
            return self._names[value]
        view = _view(parameter)
        key = (value, view, parameter.offset)
        name = self._read.get(key)
        if name is None:
            base = None if value is None else self._layouts[value]
            array = "" if value is None else self._names[value]
            snippet = views.read(base, view, is_flat=self._takes_flat(base, view, parameter.offset))
            name = self._read[key] = self._paste(snippet, array, "", parameter.offset)
        return name

    def _takes_flat(self, base: Base | None, view: View, offset: int | Lifted) -> bool:
        """Whether a view is taken at any run-time offset; else what it takes for granted is noted."""
        if base is None or type(offset) is not Lifted or self._is_flat:
            return self._is_flat and view.offset is None
        known = self._offsets.get(offset.index, frozenset())
        self._offsets[offset.index] = known.union(views.digits(base, view))
        return False

    def _laid_out(self, result: Result, new: str) -> str:
        """A new tensor's array, whose dimensions are in memory order."""
        return self._write(result.base, View(result.sizes, result.strides, 0, result.dtype), new, None, 0)

    def _apply(self, call: _EmittedCall, write: Write, new: str, old: int | None, *, is_shielded: bool) -> str:
        """The array after a write into value `old`; where `is_shielded`, what was there if a check has failed."""
        if old in self._roots:
            self._roots[write.value] = self._roots[old]
        if not call.is_whole(write):
            return self._write(write.base, _view(write), new, old, write.offset, is_shielded=is_shielded)
        made = self._write(write.base, _view(write), new, None, write.offset)
        if not is_shielded:
            return made
        return self._if_passed(made, self._as(write.base, self._sound_version(old)), tensor_type(*write.base))

    def _as(self, base: Base, value: int) -> str:
        """A value's array in another layout of its bytes."""
        layout = self._layouts[value]
        if layout == base:
            return self._names[value]
        whole = View(base.shape, row_major(base.shape), 0, base.dtype)
        return self._paste(views.read(layout, whole), self._names[value], "", 0)

    def _write(
        self, base: Base, view: View, new: str, old: int | None, offset: int | Lifted, *, is_shielded: bool = False
    ) -> str:
        array = "" if old is None else self._as(base, old)
        is_flat = self._takes_flat(base, view, offset)
        if is_shielded:
            before = self._paste(views.read(base, view, is_flat=is_flat), array, "", offset)
            new = self._if_passed(new, before, tensor_type(view.sizes, view.dtype))
        return self._paste(views.write(base, view, is_fresh=old is None, is_flat=is_flat), array, new, offset)

    def _paste(self, snippet: views.Snippet, array: str, new: str, offset: int | Lifted) -> str:
        start = self._number(offset) if type(offset) is Lifted else ""
        text, result = snippet.paste(f"%v{self._next()}_" if snippet.text else "", array, new, start)
        if text:
            self._lines.append(text)
        return result

    def _number(self, lifted: Lifted) -> str:
        name = self._numbers.get(lifted)
        if name is None:
            name = self._numbers[lifted] = f"%{lifted.kind}{lifted.index}"
            many, count, element = (
                ("floats", self._program.floats, "f64") if lifted.kind == "f" else ("ints", self._program.ints, "i64")
            )
            i = lifted.index
            one = f"tensor<1x{element}>"
            self._lines += [
                f"    {name}_ = stablehlo.slice %{many} [{i}:{i + 1}] : (tensor<{count}x{element}>) -> {one}",
                f"    {name} = stablehlo.reshape {name}_ : ({one}) -> tensor<{element}>",
            ]
        return name

    def _failed(self) -> str:
        """A set of bits: which checks failed. Made of numbers, not of arrays, each of which is a kernel on a TPU."""
        one = "tensor<ui32>"
        words: list[str] = []
        for start in range(0, len(self._check_names), CHECKS_PER_WORD):
            word = ""
            for i, name in enumerate(self._check_names[start : start + CHECKS_PER_WORD]):
                bit = f"%failed{start + i}"
                self._lines += [
                    f"    {bit}_if = stablehlo.constant dense<{1 << i}> : {one}",
                    f"    {bit}_else = stablehlo.constant dense<0> : {one}",
                    f"    {bit}_ = stablehlo.select {name}, {bit}_else, {bit}_if : tensor<i1>, {one}",
                ]
                if word:
                    self._lines.append(f"    {bit} = stablehlo.or {word}, {bit}_ : {one}")
                word = bit if word else f"{bit}_"
            words.append(f"%failed_word{len(words)}")
            self._lines.append(f"    {words[-1]} = stablehlo.reshape {word} : ({one}) -> tensor<1xui32>")
        if len(words) == 1:
            return words[0]
        types = ", ".join(["tensor<1xui32>"] * len(words))
        self._lines.append(
            f"    %failed = stablehlo.concatenate {', '.join(words)}, dim = 0 : ({types}) -> tensor<{len(words)}xui32>"
        )
        return "%failed"

    def _donations(self) -> dict[int, str]:
        """An input that nobody else holds gives its memory to its own newest version, else to any output of as many
        elements: where there is none, whether somebody holds the input makes no other program."""
        program, donated = self._program, {*self._program.donated}
        attributes: dict[int, str] = {}
        sizes = set[tuple[int, torch.dtype]]()  # of outputs that have no memory yet
        for k, value in enumerate(program.outputs):
            root = self._roots.get(value)
            if root in donated and value != ~root and self._layouts[value] == program.inputs[root]:
                attributes[root] = f" {{tf.aliasing_output = {k} : i32}}"
            else:
                sizes.add(_elements_of(self._layouts[value]))
        donors = {i for i in donated - attributes.keys() if _elements_of(program.inputs[i]) in sizes}
        return attributes | dict.fromkeys(donors, " {jax.buffer_donor = true}")

    def _next(self) -> int:
        self._count += 1
        return self._count


def _elements_of(base: Base) -> tuple[int, torch.dtype]:
    return math.prod(base.shape), base.dtype


def _is_whole(tensor: Operand | Result | Write, base: Base) -> bool:
    """Whether a tensor at offset 0 is its array as it stands."""
    return tensor.sizes == base.shape and tensor.dtype == base.dtype and tensor.strides == row_major(base.shape)
