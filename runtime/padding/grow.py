"""Sizes that grow: in comes a program that differs in one size from an earlier one, out goes one with room for more.

A dimension that keeps changing, such as the length of a cache, gets *room*: it is as long as the next power of two, its
elements come first, and what comes after them is some number. Programs of all lengths with the same room have the same
text, and are given the lengths at run time. What an op makes of such arrays is the business of its rule (see `Call`);
where an op has none, or where two sizes change, the program is left as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torchtpu.runtime.ir.calls import results_of, schema_of
from torchtpu.runtime.ir.program import Base, Lifted, Op, Operand, Program, Result, Write
from torchtpu.runtime.ir.values import bases_of, operands

from .layout import Fixed, Room, axis_of, length_of, room_for, row_major, with_room

FIRST = "torchtpu::first"  # (self, count, dim, fill): `fill` in place of what follows the first `count` elements
_LEAST_BUCKET = 8  # sizes of a compiled graph are powers of two from here on

Rule = Callable[["Call"], None]
RuleOf = Callable[[str], Rule | None]  # by the recorded name of an op


@dataclass(frozen=True, slots=True)
class Grown:
    """A program with room. After its own run-time ints it takes `numbers`; `inputs` and `outputs` are the shapes that
    count, by place, of the arrays that have room."""

    program: Program
    numbers: tuple[int, ...]
    inputs: Mapping[int, tuple[int, ...]]
    outputs: Mapping[int, tuple[int, ...]]


class Roomy(NamedTuple):
    """A tensor argument with room: of each growing dimension, how much counts."""

    operand: Operand
    counts: Mapping[int, int]


class Changed(NamedTuple):
    """An int argument that changes."""

    value: int


def grow(program: Program, before: Program, rule_of: RuleOf) -> Grown:
    """The program with room where it differs from `before`, which has the same ops; raises `Fixed`."""
    return _Grower(program, before, rule_of).grown()


def skeleton(program: Program) -> str:
    """What programs have in common that differ in sizes alone."""
    ops = [(op.name, [o.value for o in operands(op)], [made.value for made in results_of(op)]) for op in program.ops]
    return hashlib.sha256(repr(ops).encode()).hexdigest()


class Call:
    """One op of a program that is given room, as its rule sees it.

    A rule looks at what grows, hides what the op must not see, and adds what makes the op's results: with `keep`, the
    op itself. It raises `Fixed` where it does not know how.
    """

    def __init__(self, grower: _Grower, op: Op, before: Op) -> None:
        self.op = op
        self.room = grower.room
        self.args = [grower.argument(now, then) for now, then in zip(op.args, before.args, strict=True)]
        self._grower = grower
        self._before = before
        self._places = {argument.name: place for place, argument in enumerate(schema_of(op.name).arguments)}

    def get(self, name: str) -> Any:
        """An argument by its name in the schema; None where the call has none."""
        place = self._places.get(name, len(self.args))
        return self.args[place] if place < len(self.args) else None

    def constant(self, name: str) -> Any:
        """An argument that the meaning of the call hangs on; None where the call has none."""
        given = self.get(name)
        plain(given)
        return given

    def put(self, name: str, value: Any) -> None:
        """Replaces an argument, which the op does not write."""
        place = self._places[name]
        if any(write.arg == place for write in self.op.writes):
            raise Fixed(f"{self.op.name} writes {name}")
        self.args[place] = value

    def grows(self, name: str) -> set[int]:
        """The growing dimensions of an argument; none where it is no tensor."""
        given = self.get(name)
        return set(given.counts) if isinstance(given, Roomy) else set()

    def tensor(self, name: str) -> Operand:
        """A tensor argument, with room."""
        operand = plain(self.get(name))
        if not isinstance(operand, Operand):
            raise Fixed(f"{name} is no tensor")
        return operand

    def hide(self, name: str, fill: float, dims: set[int] | None = None) -> None:
        """Replaces what does not count of an argument, along these dimensions or all that grow, by `fill`."""
        for dim in sorted(self.grows(name) if dims is None else self.grows(name) & dims):
            given = self.get(name)
            self.put(name, self.apply(FIRST, given, given.counts[dim], dim, fill))

    def settle(self, name: str) -> None:
        """Sees to it that what does not count of an argument is finite, so that nothing comes of it times zero."""
        given = self.get(name)
        if isinstance(given, Roomy) and not self._grower.is_finite(given.operand):
            self.hide(name, 0)

    def apply(self, name: str, given: Operand | Roomy, count: int, *rest: Any) -> Roomy:
        """What an op makes of a tensor and a count of its elements that count: one of the same sizes and dtype."""
        operand = plain(given)
        sizes, dtype = operand.sizes, operand.dtype
        made = Result(self._grower.new_value(), sizes, row_major(sizes), dtype, Base(sizes, dtype))
        self.emit(Op(name, (operand, self._grower.count(count), *rest), (made,), (), self.op.line))
        counts = given.counts if isinstance(given, Roomy) else {}
        return Roomy(Operand(made.value, sizes, made.strides, 0, dtype, made.base), counts)

    def number(self, value: int) -> Lifted:
        """The run-time int that is `value` this time."""
        return self._grower.number(value)

    def emit(self, op: Op) -> None:
        """Adds an op to the program."""
        self._grower.ops.append(op)

    def keep(self) -> None:
        """Adds the op itself, with the arguments as they are now."""
        self.emit(self._grower.rewritten(self.op, self._before, plain(self.args)))

    def only_result(self) -> Result:
        """The single result of the op, with room, for a rule that makes it otherwise."""
        (made,), (then,) = self.op.results, self._before.results
        result = self._grower.result(made, then)
        assert isinstance(result, Result)
        return result

    def copy(self, source: Operand, into: Result) -> None:
        """Adds a copy of a tensor, which is the result from now on."""
        if self._grower.is_finite(source):
            self._grower.finite.add(into.value)
        empty = Operand(None, into.sizes, into.strides, 0, into.dtype, into.base)
        target = Write(0, None, into.value, into.sizes, into.strides, 0, into.dtype, into.base, replaces=True)
        self.emit(Op("copy_", (empty, source, False), (None,), (target,), self.op.line))

    def write(self, result: Result, given: Operand | Roomy, dim: int, start: int) -> Result:
        """Adds a copy of a tensor into the result, from `start` on along `dim`; the result with it."""
        new: Operand = plain(given)
        offset = self._grower.number(start * result.strides[dim])
        view = Operand(result.value, new.sizes, result.strides, offset, result.dtype, result.base)
        value = self._grower.new_value()
        target = Write(0, None, value, view.sizes, view.strides, offset, view.dtype, view.base, replaces=False)
        self.emit(Op("copy_", (view, new, False), (None,), (target,), self.op.line))
        if self._grower.is_finite(view) and (isinstance(given, Operand) or self._grower.is_finite(new)):
            self._grower.finite.add(value)
        return replace(result, value=value)

    def stands_for(self, result: Result) -> None:
        """From now on this is the op's single result."""
        (made,) = self.op.results
        assert isinstance(made, Result)
        self._grower.values[made.value] = result.value


def plain(argument: Any) -> Any:
    """An argument as an op has it. Raises `Fixed` where a number is left that has grown."""
    match argument:
        case Roomy():
            return argument.operand
        case Changed():
            raise Fixed("a number that changes")
        case tuple() | list():
            return tuple(map(plain, argument))
        case _:
            return argument


class _Grower:
    """`values` has the new number of each value of the program, `ops` the new ops; of `finite` values what does not
    count is so."""

    def __init__(self, program: Program, before: Program, rule_of: RuleOf) -> None:
        self._program, self._before = program, before
        self._rule_of = rule_of
        self._bases, earlier = bases_of(program), bases_of(before)
        if len(program.ops) != len(before.ops) or self._bases.keys() != earlier.keys():
            raise Fixed("other ops")
        self._step = 0
        self._axes = {v: self._changed(base.shape, earlier[v].shape) for v, base in self._bases.items()}
        self.room = self._find_room()
        self.values = {~i: ~i for i in range(len(program.inputs))}
        self.finite = set(self.values)
        self.ops: list[Op] = []
        self._made = 0
        self._numbers: list[int] = []
        self._counts: dict[int, Lifted] = {}

    def grown(self) -> Grown:
        program = self._program
        for op, before in zip(program.ops, self._before.ops, strict=True):
            self._add(op, before)
        settled = tuple(map(self._settled, program.outputs))
        made = Program(
            ops=tuple(self.ops),
            inputs=tuple(with_room(base, self._axes[~i], self.room) for i, base in enumerate(program.inputs)),
            outputs=settled,
            donated=program.donated,
            floats=program.floats,
            ints=program.ints + len(self._numbers),
            line=program.line,
        )
        inputs = {i: base.shape for i, base in enumerate(program.inputs) if self._axes[~i]}
        outputs = {k: self._bases[v].shape for k, v in enumerate(program.outputs) if self._axes[v]}
        return Grown(made, tuple(self._numbers), inputs, outputs)

    def is_finite(self, tensor: Operand) -> bool:
        """Whether what does not count of a tensor is a finite number for sure."""
        dtype = tensor.dtype
        is_known = tensor.value in self.finite and dtype == tensor.base.dtype
        return is_known or not (dtype.is_floating_point or dtype.is_complex)

    def _settled(self, old: int) -> int:
        """The new number of an output, or of a copy in which what does not count is finite."""
        value, base, axes = self.values[old], self._bases[old], self._axes[old]
        whole = with_room(base, axes, self.room)
        tensor = Operand(value, whole.shape, row_major(whole.shape), 0, whole.dtype, whole)
        if not axes or self.is_finite(tensor):
            return value
        line = next(op.line for op in self._program.ops if any(made.value == old for made in results_of(op)))
        for axis in axes:
            count = self.count(base.shape[axis])
            made = Result(self.new_value(), tensor.sizes, tensor.strides, whole.dtype, whole)
            self.ops.append(Op(FIRST, (tensor, count, axis, 0), (made,), (), line))
            tensor = replace(tensor, value=made.value)
        return made.value

    def argument(self, now: Any, then: Any) -> Any:
        """An argument with room; an int that has grown is marked."""
        if isinstance(now, Operand) and isinstance(then, Operand):
            return self._operand(now, then)
        if isinstance(now, (tuple, list)) and isinstance(then, (tuple, list)) and len(now) == len(then):
            return tuple(map(self.argument, now, then))
        if type(now) is type(then) and now == then:
            return now
        if type(now) is int and type(then) is int:
            return Changed(now)
        raise Fixed(f"{now} was {then}")

    def number(self, value: int) -> Lifted:
        """A run-time int of its own: that it equals another one this time means nothing."""
        self._numbers.append(value)
        return Lifted("i", self._program.ints + len(self._numbers) - 1)

    def count(self, value: int) -> Lifted:
        """The run-time int that says how much counts."""
        known = self._counts.get(value)
        if known is None:
            known = self._counts[value] = self.number(value)
        return known

    def new_value(self) -> int:
        self._made += 1
        return self._made - 1

    def result(self, now: Any, then: Any) -> Any:
        """A result with room and its new number."""
        if isinstance(now, tuple):
            return tuple(map(self.result, now, then))
        if now is None:
            return None
        value = self.values[now.value] = self.new_value()
        if not self._axes[now.value]:
            return replace(now, value=value)
        dims = self._changed(now.sizes, then.sizes)
        axes = self._axes[now.value]
        sizes, strides = Room(now.base.shape, axes, self.room).view(now, dims, 0)
        base = with_room(now.base, axes, self.room)
        return replace(now, value=value, sizes=sizes, strides=strides, base=base)

    def rewritten(self, op: Op, before: Op, args: tuple[Any, ...]) -> Op:
        """The op with these arguments, and its results and writes with room."""
        results = tuple(map(self.result, op.results, before.results))
        writes = tuple(map(self._write, op.writes, before.writes))
        return replace(op, args=args, results=results, writes=writes)

    def _add(self, op: Op, before: Op) -> None:
        if op.name != before.name or op.precision != before.precision or len(op.writes) != len(before.writes):
            raise Fixed("other ops")
        call = Call(self, op, before)
        if not any(self._axes[made.value] for made in results_of(op)) and not any(_grown(call.args)):
            call.keep()
            return
        rule = self._rule_of(op.name)
        if rule is None:
            raise Fixed(f"{op.name} has no rule")
        rule(call)

    def _operand(self, now: Operand, then: Operand) -> Operand | Roomy:
        if now.value != then.value:
            raise Fixed("other ops")
        value = None if now.value is None else self.values[now.value]
        axes = self._changed(now.base.shape, then.base.shape)
        if not axes and now.sizes == then.sizes:
            return replace(now, value=value, offset=self._offset(now, then))
        dims = self._changed(now.sizes, then.sizes)
        sizes, strides, offset = self._place(axes, now, then, dims)
        made = Operand(value, sizes, strides, offset, now.dtype, with_room(now.base, axes, self.room))
        return Roomy(made, {dim: now.sizes[dim] for dim in dims}) if dims else made

    def _write(self, now: Write, then: Write) -> Write:
        value = self.values[now.value] = self.new_value()
        axes = self._axes[now.value]
        dims = self._changed(now.sizes, then.sizes)
        if not axes and not dims:
            return replace(now, value=value, offset=self._offset(now, then))
        if any(axis_of(now, dim) not in axes or now.sizes[dim] != length_of(now, dim) for dim in dims):
            raise Fixed("a write into a part that grows")
        sizes, strides, offset = self._place(axes, now, then, dims)
        base = with_room(now.base, axes, self.room)
        return replace(now, value=value, sizes=sizes, strides=strides, offset=offset, base=base)

    # ---- geometry

    def _offset(self, now: Operand | Write, then: Operand | Write) -> int | Lifted:
        """The offset of a view that does not grow, in an array that does not either."""
        if now.offset == then.offset:
            offset = now.offset
        elif isinstance(now.offset, Lifted) or isinstance(then.offset, Lifted):
            raise Fixed("a view at a place that changes")
        else:
            offset = self.number(now.offset)
        if (now.strides, now.dtype, now.base.dtype) != (then.strides, then.dtype, then.base.dtype):
            raise Fixed("a view that changes")
        return offset

    def _find_room(self) -> int:
        """The room of all that grows; notes by how much it has grown."""
        largest = [self._bases[v].shape[axis] for v, axes in self._axes.items() for axis in axes]
        most = []
        for op, before in zip(self._program.ops, self._before.ops, strict=True):
            for now, then in zip(operands(op), operands(before), strict=False):
                for dim in self._changed(now.sizes, then.sizes):
                    largest.append(now.sizes[dim])
                    if axis_of(now, dim) not in self._changed(now.base.shape, then.base.shape):
                        most.append(length_of(now, dim))
        if not largest:
            raise Fixed("no size changes")
        size, earlier = max(largest), max(largest) - self._step
        if min(size, earlier) >= _LEAST_BUCKET and size & (size - 1) == 0 and earlier & (earlier - 1) == 0:
            raise Fixed("sizes that are buckets already")
        room = min([room_for(size), *most])
        if room < size:
            raise Fixed("there is no room")
        return room

    def _changed(self, now: Sequence[int], then: Sequence[int]) -> tuple[int, ...]:
        """The dimensions that have grown, all by the same step."""
        if len(now) != len(then):
            raise Fixed("other dimensions")
        dims = tuple(d for d, (n, t) in enumerate(zip(now, then, strict=True)) if n != t)
        for dim in dims:
            self._step = self._step or now[dim] - then[dim]
            # A dimension of one element has any stride, and may be broadcast.
            if now[dim] - then[dim] != self._step or min(now[dim], then[dim]) < 2:
                raise Fixed("two sizes change")
        return dims

    def _place(
        self, axes: Sequence[int], now: Operand | Write, then: Operand | Write, dims: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...], int | Lifted]:
        """A view's sizes, strides and offset with room."""
        if isinstance(now.offset, Lifted) or isinstance(then.offset, Lifted):
            raise Fixed("a view at a place that changes")
        if now.dtype.itemsize != now.base.dtype.itemsize:
            raise Fixed("a view of other elements")
        room = Room(now.base.shape, axes, self.room)
        digits = room.digits(now.offset)
        offset, has_moved = room.offset(digits), digits != Room(then.base.shape, axes, self.room).digits(then.offset)
        return *room.view(now, dims, now.offset), self.number(offset) if has_moved else offset


def _grown(arguments: Any) -> Iterator[bool]:
    """Whether each of the arguments has grown."""
    for argument in arguments:
        if type(argument) in (tuple, list):
            yield from _grown(argument)
        else:
            yield isinstance(argument, (Roomy, Changed))
