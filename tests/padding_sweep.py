"""Checks padding op by op: which lowerings serve sizes that change, by PyTorch's own op samples.

Every ATen call that a sample makes, forward and backward, is traced by its lowering with one of its sizes symbolic, and
computed on longer arrays for three lengths, with NaN, huge numbers and plausible indices behind what counts. It has to
make what the lowering makes of arrays of just that length.

    python tests/padding_sweep.py                 # all; some ten minutes of CPU time
    python tests/padding_sweep.py --part 3/40     # one of forty parts
    python tests/padding_sweep.py add cumsum
    python tests/padding_sweep.py --results sweep.jsonl     # goes on where it ended
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import types
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_CPU_ENABLE_ASYNC_DISPATCH", "false")  # XLA:CPU came to a halt with it, now and then
if __name__ == "__main__":  # no device is needed
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import lowering_check
import numpy as np
import torch

DTYPES = (torch.float32, torch.int64, torch.bool)
LEAST_SIZE = 3  # smaller ones are no sizes in most samples
MOST_SIZES = 3  # of one call
ROOM = 32
ENOUGH = 2  # calls of a lowering that were served


@dataclass
class Verdict:
    """What became of a lowering's calls: how often which size was served, and why others were not."""

    served: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Verdict) -> None:
        """Adds what became of other calls."""
        self.served += other.served
        self.reasons += other.reasons
        self.wrong += other.wrong


class Sweep(lowering_check.Check):
    """Runs each call on the CPU, and those with a lowering also on longer arrays."""

    def __init__(self, targets: set[str], known: Mapping[str, Verdict]) -> None:
        super().__init__(targets, per_op=3, in_all=6)
        self.verdicts: dict[str, Verdict] = {}
        self._known = known

    def _wanted(self, name: str, func: Any, args: Any, kwargs: Any) -> bool:
        served = sum(verdicts[name].served for verdicts in (self._known, self.verdicts) if name in verdicts)
        return served < ENOUGH and super()._wanted(name, func, args, kwargs)

    def _compare_lowering(
        self, entry: Any, func: Any, args: Any, kwargs: Any, expected: list[Any], truth: Any
    ) -> Iterator[str]:
        result = self.verdicts.setdefault(entry.name, Verdict())
        call = _Sample(entry, func, args, kwargs, expected, self.platform)
        for size in call.sizes():
            try:
                call.check(size)
                result.served += 1
            except _WrongError as error:
                result.wrong.append(f"size {size}: {error}")
            except Exception as error:  # why it is compiled for each size
                result.reasons[_reason(error)] += 1
        yield from ()


class _WrongError(Exception):
    """Longer arrays make something else."""


class _Sample:
    """A call of an op, with sizes that may be others."""

    def __init__(self, entry: Any, func: Any, args: Any, kwargs: Any, expected: list[Any], platform: str) -> None:
        self._entry, self._func, self._given = entry, func, (args, kwargs)
        self._expected, self._platform = expected, platform
        self._leaves = self._call(0, 0).leaves

    def sizes(self) -> list[int]:
        """Those that most arrays have."""
        found = Counter(n for leaf in self._leaves for n in np.shape(leaf) if LEAST_SIZE <= n <= ROOM - 2)
        return [n for n, _ in found.most_common(MOST_SIZES)]

    def _call(self, size: int, new: Any) -> lowering_check.Call:
        """The lowering, with `new` for each size that is `size`."""
        func, (args, kwargs) = self._func, self._given
        named = {}
        for argument, value in lowering_check._arguments(func, args, kwargs):
            is_size = "SymInt" in str(getattr(argument, "real_type", argument.type)) or "SymInt" in str(argument)
            named[argument.name] = _replaced(value, size, new) if is_size else value
        return lowering_check.lowered_call(
            self._entry, func, (), named, self._expected, False, self._platform, lambda n: new if n == size else n
        )

    def check(self, size: int) -> None:
        """Compares three lengths in place of the size; raises _WrongError, or why there is nothing to compare."""
        import jax

        from torchtpu.runtime.ir.program import PaddedExtent
        from torchtpu.runtime.padding.evaluate import Symbols
        from torchtpu.runtime.padding.refusals import Refused

        symbols = Symbols([(2, ROOM, ROOM)])
        variable = symbols.size("a")
        call = self._call(size, variable)
        shapes = [tuple("a" if n == size else n for n in np.shape(leaf)) for leaf in self._leaves]
        parts = [PaddedExtent(shape, shape) if "a" in shape else None for shape in shapes]
        wanted = [_sizes_of(t, size, variable) for t in self._expected]

        def symbolic(*given: Any) -> list[Any]:
            made, passed = call.program(*given)
            pairs = zip(made, [*wanted, *[None] * len(made)], strict=False)
            return [m if sizes is None else symbols.checked(m, sizes) for m, sizes in pairs if m is not None] + passed

        def padded(count: Any, *given: Any) -> list[Any]:
            return symbols.evaluate(symbolic, parts, [*given, count], [])

        with jax.enable_x64(True):
            run = jax.jit(padded, keep_unused=True)
            for turn, length in enumerate((size, size + 1, size + 2)):
                leaves = [_lengthened(leaf, size, length) for leaf in self._leaves]
                longer = [_with_surplus(leaf, shape, turn) for leaf, shape in zip(leaves, shapes, strict=True)]
                made = run(np.int64(length), *longer)
                if any(_is_zero(text, length) for text in symbols.unequal()):
                    if turn == 0:
                        raise Refused(f"the lowering compares sizes: {', '.join(symbols.unequal())}")
                    continue
                exact = self._call(size, length)
                self._compare(made, exact, leaves, length)
                if self._entry.elementwise and _are_alike(shapes, wanted, variable):
                    whole, passed = jax.jit(self._call(size, ROOM).program)(*longer)
                    self._compare([a for a in whole if a is not None] + passed, exact, leaves, length)

    def _compare(self, made: Sequence[Any], exact: lowering_check.Call, leaves: list[Any], length: int) -> None:
        import jax

        arrays, passed = jax.jit(exact.program)(*leaves)
        if not all(bool(ok) for ok in passed):
            return  # the longer call is an error
        for found, expected in zip(made, [a for a in arrays if a is not None] + passed, strict=True):
            right = np.asarray(expected)
            counting = np.asarray(found)[tuple(map(slice, right.shape))]
            kind = right.dtype.kind
            if kind not in "fciub":
                right, counting = right.astype(np.float32), counting.astype(np.float32)
            try:
                np.testing.assert_allclose(counting, right, 1e-4, 1e-4)
            except AssertionError as error:
                where = lowering_check.overload_name(self._func)
                shown = ", ".join(lowering_check._show(v) for v in self._given[0])
                lines = " ".join(str(error).split())[:300]
                raise _WrongError(f"{where}({shown}) of length {length}: {lines}") from None


def _are_alike(shapes: Sequence[tuple[Any, ...]], made: Sequence[Any], variable: Any) -> bool:
    """Whether all results have one shape, to which all arguments are broadcast."""
    results = {tuple("a" if n is variable else n for n in sizes) for sizes in made if sizes is not None}
    if len(results) != 1:
        return False
    (result,) = results
    ends = [(shape, result[len(result) - len(shape) :]) for shape in shapes if len(shape) <= len(result)]
    return len(ends) == len(shapes) and all(n in (1, m) for shape, end in ends for n, m in zip(shape, end, strict=True))


def _sizes_of(value: Any, size: int, variable: Any) -> tuple[Any, ...] | None:
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(variable if n == size else n for n in value.shape)


def _replaced(value: Any, size: int, new: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_replaced(item, size, new) for item in value]
    return new if type(value) is int and value == size else value


def _lengthened(leaf: Any, size: int, length: int) -> Any:
    """An array with more of the same along each axis of this size; matrices that have inverses keep having them."""
    is_square = np.shape(leaf)[-2:] == (size, size) and leaf.dtype.kind in "fc"
    for axis, n in enumerate(np.shape(leaf)):
        if n == size:
            leaf = np.take(leaf, np.arange(length) % size, axis)
    if is_square:
        more = np.arange(size, length)
        leaf[..., more, more] += 1
    return leaf


def _with_surplus(leaf: Any, shape: Sequence[Any], turn: int) -> Any:
    if "a" not in shape:
        return leaf
    kind = leaf.dtype.kind
    if kind in "iu":
        limits = np.iinfo(leaf.dtype)
        kinds = np.array([1, limits.max, limits.min, 0], leaf.dtype)
    else:
        kinds = np.array([1, 0] if kind == "b" else [np.nan, 1e30, -1e30, 1.0]).astype(leaf.dtype)
    made = np.resize(np.roll(kinds, turn), [ROOM if n == "a" else n for n in shape]).astype(leaf.dtype)
    made[tuple(map(slice, leaf.shape))] = leaf
    return made


def _is_zero(text: str, length: int) -> bool:
    from torchtpu.runtime.padding.layout import value_of

    return value_of(text, {"a": length}) == 0


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def sweep(
    names: Iterable[str], lowerings: Iterable[str], known: Mapping[str, Verdict] | None = None
) -> dict[str, Verdict]:
    """What becomes of the calls of these OpInfos; "extra" stands for our own samples. What is known to be served is not
    tried again."""
    check = Sweep(set(lowerings), known or {})
    lowering_check.run_samples(check, list(names), DTYPES, 3, backward=True)
    return check.verdicts


def part_of(number: int, of: int) -> list[str]:
    """The OpInfos of a part of all."""
    names = [*lowering_check.opinfo_groups(), "extra"]
    return [name for name in names if zlib.crc32(name.encode()) % of == number % of]


def summary(verdicts: dict[str, Verdict], *, verbose: bool = False) -> str:
    """How many lowerings are served, and why the others are not."""
    counts: Counter[str] = Counter()
    lines = []
    for name, result in sorted(verdicts.items()):
        kind = "wrong" if result.wrong else "served" if result.served else "not" if result.reasons else "no size"
        counts[kind] += 1
        if kind == "wrong":
            lines.append(f"{name:44} WRONG {result.wrong[0]}")
        elif kind == "not":
            lines.append(f"{name:44} {result.reasons.most_common(1)[0][0]}")
        elif verbose:
            lines.append(f"{name:44} {kind} {result.served}")
    lines.append(
        f"{counts.total()} lowerings reached: {counts['served']} served, {counts['not']} compiled for each size, "
        f"{counts['no size']} without a size of {LEAST_SIZE} or more in their samples, {counts['wrong']} wrong"
    )
    return "\n".join(lines)


def _add(found: dict[str, Verdict], made: Mapping[str, Verdict]) -> None:
    for op, verdict in made.items():
        found.setdefault(op, Verdict()).add(verdict)


def _read_results(path: Path | None) -> tuple[dict[str, Verdict], set[str]]:
    """What earlier runs found, and the OpInfos that they ran."""
    found: dict[str, Verdict] = {}
    done = set()
    if path is not None and path.exists():
        for line in map(json.loads, path.read_text().splitlines()):
            done.add(line["opinfo"])
            for op, verdict in line["verdicts"].items():
                reasons = Counter(verdict["reasons"])
                found.setdefault(op, Verdict()).add(Verdict(verdict["served"], reasons, verdict["wrong"]))
    return found, done


def document(verdicts: dict[str, Verdict]) -> str:
    """docs/padding.md."""
    *lines, counts = summary(verdicts).splitlines()
    rows = [f"| `{line.split()[0]}` | {' '.join(line.split()[1:])} |" for line in lines]
    return "\n".join(
        [
            "# Ops that are compiled for each size",
            "",
            (
                "Written by `python tests/padding_sweep.py --results FILE --document docs/padding.md` with "
                f"PyTorch {torch.__version__.partition('+')[0]}. "
                f"It tries the sizes of PyTorch's own samples from {LEAST_SIZE} to {ROOM - 2}, on arrays of {ROOM}. "
                "Where dimensions of one sample are equal by chance, they change together, "
                "and an op may be listed that is served elsewhere."
            ),
            "",
            f"{counts}.",
            "",
            "| lowering | why |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="OpInfo names; none: all")
    parser.add_argument("--part", default="0/1", help="one of so many parts")
    parser.add_argument("--results", type=Path, help="a file of what is found, from which a later run goes on")
    parser.add_argument("--document", type=Path, help="where to list what is not served")
    parser.add_argument("--verbose", "-v", action="store_true", help="name those that are served, too")
    options = parser.parse_args()
    # The ops need no device: keep torchtpu/__init__.py, which starts one, out of this process.
    package = types.ModuleType("torchtpu")
    package.__path__ = [str(Path(__file__).resolve().parent.parent / "torchtpu")]  # type: ignore[attr-defined]
    sys.modules["torchtpu"] = package
    torch.set_num_threads(1)
    lowerings = lowering_check.load_ops()
    number, of = map(int, options.part.split("/"))
    names = options.names or part_of(number, of)
    found, done = _read_results(options.results)
    for name in names:
        if name not in done:
            made = sweep([name], lowerings, found)
            _add(found, made)
            if options.results:
                with options.results.open("a") as file:
                    verdicts = {op: vars(verdict) for op, verdict in made.items()}
                    file.write(json.dumps({"opinfo": name, "verdicts": verdicts}) + "\n")
    if options.document:
        options.document.write_text(document(found))
    print(summary(found, verbose=options.verbose))
    return 1 if any(result.wrong for result in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
