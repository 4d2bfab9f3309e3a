"""Runs checks of the fixed list, by name or by shard, and writes one JSON line per check.

    python tests/opinfo_run.py add nn.functional.conv2d --dtypes float32,int8
    python tests/opinfo_run.py --shard 0/4 --results shard0.jsonl     # started again, goes on where it ended

A check passes where the device does what the CPU does: values, dtypes, shapes, strides, the type of an exception.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import signal
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from opinfo_cases import Case, cases, seed
from opinfo_checks import Check, listed
from opinfo_compare import difference, to_host, value_difference
from opinfo_move import Move
from torch.utils._python_dispatch import TorchDispatchMode

import torchtpu

CHECKS_IN_A_REGION = 24
SECONDS_PER_CHECK = 300


@dataclass(frozen=True)
class Result:
    """`status` is pass, wrong, raises (the CPU does not), accepts (what the CPU refuses), fallback, timeout, crash or
    skip (nothing to compare)."""

    check: str
    status: str
    detail: str = ""
    fallbacks: tuple[str, ...] = ()


@dataclass
class Trial:
    """One case on both devices; `ours` and `theirs` are results or the exception raised."""

    case: Case
    theirs: Any
    ours: Any
    fallbacks: set[str]


def run(checks: Iterable[Check], announce: Callable[[list[Check]], None] = lambda some: None) -> Iterator[Result]:
    """Runs checks, those of one subject and execution together; `announce` hears what is about to run."""
    with torchtpu.config.using(fallback="silent"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for (_, _, execution), some in itertools.groupby(checks, lambda c: (c.kind, c.name, c.execution)):
            with torchtpu.config.using(sync=execution == "sync"):
                while batch := list(itertools.islice(some, CHECKS_IN_A_REGION)):
                    announce(batch)
                    yield from _run_together(batch)


def _run_together(batch: list[Check]) -> Iterator[Result]:
    """Records the cases of several checks, then reads; where a region breaks, its checks run one by one."""
    recorded = [(check, _within_time(check, lambda check=check: _record(check))) for check in batch]
    try:
        torch.tpu.synchronize()
        is_broken = False
    except Exception:
        is_broken = len(recorded) > 1
    for check, trials in recorded:
        if is_broken:
            trials = _within_time(check, lambda check=check: _record(check))
        if isinstance(trials, Result):
            yield trials
        else:
            yield _within_time(check, lambda check=check, trials=trials: _judge(check, trials))
    with contextlib.suppress(Exception):  # it is in a result by now
        torch.tpu.synchronize()


def _within_time(check: Check, work: Callable[[], Any]) -> Any:
    """What `work` returns, or the Result that says why it did not."""

    def stop(signum: int, frame: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS_PER_CHECK)
    try:
        return work()
    except TimeoutError:
        return Result(check.id, "timeout", f"more than {SECONDS_PER_CHECK} s")
    except Exception as error:  # PyTorch makes no sample on this machine
        return Result(check.id, "skip", _first_line(error))
    finally:
        signal.alarm(0)


def _record(check: Check) -> list[Trial]:
    trials = []
    for case in cases(check):
        trials.append(_try(case))
        if check.mode == "error":  # what is recorded behind an op that fails on the device is rolled back with it
            with contextlib.suppress(Exception):  # the value raises it again
                torch.tpu.synchronize()
    return [trial for trial in trials if not _lacks_reference(trial)]


def _lacks_reference(trial: Trial) -> bool:
    """Whether the device does what the CPU cannot, although PyTorch's database says that it can."""
    is_missing = isinstance(trial.theirs, NotImplementedError) and "not implemented for '" in str(trial.theirs)
    return is_missing and not isinstance(trial.ours, Exception)


def _try(case: Case) -> Trial:
    seed()
    theirs = _attempt(case, Move("cpu"))
    seed()
    counts = torch.tpu.cpu_fallback_counts()
    ours = _attempt(case, Move("tpu"))
    fallbacks = {op for op, n in torch.tpu.cpu_fallback_counts().items() if n != counts.get(op)}
    return Trial(case, theirs, ours, fallbacks)


def _attempt(case: Case, move: Move) -> Any:
    try:
        return case.run(move)
    except TimeoutError:
        raise
    except Exception as error:
        return error.with_traceback(None)


def _judge(check: Check, trials: list[Trial]) -> Result:
    problems = [(*problem, trial) for trial in trials if (problem := _problem(trial)) is not None]
    fell_back = [trial.fallbacks for trial in trials if not isinstance(trial.theirs, Exception)]
    fallbacks = tuple(sorted(set().union(*fell_back)))
    if problems:
        status, detail, _ = problems[0]
        return Result(check.id, status, f"{len(problems)}/{len(trials)}: {detail}", fallbacks)
    if fallbacks:
        return Result(check.id, "fallback", "", fallbacks)
    if not trials:
        return Result(check.id, "skip", "PyTorch has no sample, or the CPU no kernel")
    return Result(check.id, "pass")


def _problem(trial: Trial) -> tuple[str, str] | None:
    """(status, detail) of a case that differs."""
    ours, theirs, case = trial.ours, trial.theirs, trial.case
    is_error = isinstance(theirs, Exception)
    if not isinstance(ours, Exception):
        try:
            host = to_host(ours)
        except Exception as error:
            ours = error
    if isinstance(ours, Exception) and not (is_error and type(ours) is type(theirs)):
        expected = f"; the CPU raises {_first_line(theirs)}" if is_error else ""
        return ("wrong" if is_error else "raises"), _first_line(ours) + expected
    if is_error:
        return None if isinstance(ours, Exception) else ("accepts", f"the CPU raises {_first_line(theirs)}")
    problem = difference(ours, theirs)
    if problem is None and case.has_values:
        expected = case.process(to_host(theirs))
        problem = value_difference(case.process(host), expected, lambda: _truth(case, expected), case.tolerance)
        if problem and _draws(case):
            return None
    return ("wrong", problem) if problem else None


def _truth(case: Case, expected: Any) -> Any:
    """The results in wider dtypes; `expected` where the op has no such form."""
    made = _attempt(case, Move("cpu", is_wider=True))
    return expected if isinstance(made, Exception) else case.process(to_host(made))


class _Draws(TorchDispatchMode):
    """Notices ops that draw random numbers."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _draws(case: Case) -> bool:
    with _Draws() as draws:
        case.run(Move("cpu"))
    return draws.seen


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"


def chosen(
    names: Collection[str] = (),
    dtypes: Collection[str] = (),
    modes: Collection[str] = (),
    executions: Collection[str] = (),
    shard: str = "0/1",
) -> list[Check]:
    """The listed checks with these properties; nothing stands for all."""
    index, count = map(int, shard.split("/"))
    return [
        check
        for check in listed()
        if (not names or check.name in names)
        and (not dtypes or check.dtype in dtypes)
        and (not modes or check.mode in modes)
        and (not executions or check.execution in executions)
        and zlib.crc32(check.name.encode()) % count == index
    ]


def finished(path: Path) -> dict[str, Result]:
    """The results in a file, by check; the last line of a check counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {r["check"]: Result(**{**r, "fallbacks": tuple(r["fallbacks"])}) for r in map(json.loads, lines)}


def run_into(path: Path, checks: list[Check], retries: bool = False) -> Iterator[Result]:
    """Runs what `path` lacks and appends it; a check that ended its process the last time is a line: crash.

    With `retries` what did not pass runs again.
    """
    running = path.with_suffix(".running")
    with path.open("a") as file:

        def write(result: Result) -> Result:
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            return result

        suspects = running.read_text().splitlines() if running.exists() else []
        if len(suspects) == 1:
            write(Result(suspects[0], "crash"))
        done = {r.check for r in finished(path).values() if r.status == "pass" or not retries}
        left = [c for c in checks if c.id not in done]
        announce = lambda batch: running.write_text("\n".join(c.id for c in batch if c.id not in done))
        for check in [c for c in left if c.id in suspects]:  # one of them did it
            yield from map(write, run([check], announce))
        yield from map(write, run([c for c in left if c.id not in suspects], announce))
    running.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of the list; none: all")
    for option in ("dtypes", "modes", "executions"):
        parser.add_argument(f"--{option}", default="", help="separated by commas; none: all")
    parser.add_argument("--shard", default="0/1", metavar="I/N")
    parser.add_argument("--results", type=Path, help="a file to append to; what it holds is not run again")
    parser.add_argument("--retry", action="store_true", help="run again what did not pass")
    parser.add_argument("--verbose", "-v", action="store_true", help="print what passes, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    words = lambda text: [word for word in text.split(",") if word]
    checks = chosen(options.names, *map(words, (options.dtypes, options.modes, options.executions)), options.shard)
    results = run_into(options.results, checks, options.retry) if options.results else run(checks)
    counts: Counter[str] = Counter()
    for result in results:
        counts[result.status] += 1
        if options.verbose or result.status != "pass":
            print(result.status.ljust(8), result.check, result.detail, *result.fallbacks, flush=True)
    print(f"{sum(counts.values())} checks: {', '.join(f'{n} {status}' for status, n in counts.most_common())}")
    return int(counts.total() != counts["pass"])


if __name__ == "__main__":
    sys.exit(main())
