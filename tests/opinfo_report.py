"""Writes docs/ops.md from the result files of a full run: what passes, by dtype and by mode.

python tests/opinfo_report.py shard0.jsonl shard1.jsonl
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from known_gaps import KNOWN_GAPS
from opinfo_checks import DTYPES, NO_DTYPE, Check, listed
from opinfo_run import Result, finished

PAGE = Path(__file__).resolve().parent.parent / "docs" / "ops.md"
INTRODUCTION = """# Ops

PyTorch describes its ops, modules and optimizers in databases of samples that its own tests run.
`tests/opinfo_checks.txt` lists every check that they declare for the CPU, before any skip: {count} of them.
A check passes where the device does what the CPU does: values, dtypes, shapes, strides and the type of an exception.
Values may differ by the tolerance of PyTorch's own tests, or by twice the error of the CPU's result.
Results of random ops agree in everything but their values.
A check that differs, is skipped, times out, crashes or runs an op on the CPU does not pass.
In *region* checks many samples are recorded and then read; in *sync* checks each op runs at once.
An exception that depends on values is raised at the read; in a sync check, at the call.

This page is written by `tests/opinfo_report.py` from results on platform `cpu` with PyTorch {torch}.
"""


def table(title: str, checks: Iterable[Check], results: dict[str, Result], row_of: Callable[[Check], str]) -> list[str]:
    """Rows of counts: all checks of the list, those that passed, fell back, differ, and those that were not run."""
    rows: dict[str, Counter[str]] = {}
    for check in checks:
        result = results.get(check.id)
        status = "not run" if result is None else result.status
        kind = status if status in ("pass", "fallback", "not run") else "gap"
        for row in (row_of(check), "all"):
            rows.setdefault(row, Counter())[kind] += 1
    rows["all"] = rows.pop("all")
    head = f"| {title} | checks | not run | passed | gap | fallback | passed of run |"
    lines = [head, "|---|--:|--:|--:|--:|--:|--:|"]
    for row, counts in rows.items():
        numbers = " | ".join(str(counts[kind]) for kind in ("not run", "pass", "gap", "fallback"))
        run = counts.total() - counts["not run"]
        share = f"{100 * counts['pass'] / run:.1f} %" if run else ""
        lines.append(f"| {row} | {counts.total()} | {numbers} | {share} |")
    return lines


def page(results: dict[str, Result]) -> str:
    checks = listed()
    by_dtype = sorted(checks, key=lambda c: (*DTYPES, NO_DTYPE).index(c.dtype))
    by_mode = sorted(checks, key=lambda c: c.kind, reverse=True)
    unexplained = {
        c.id
        for c in checks
        if c.id in results and results[c.id].status not in ("pass", "skip") and (c.name, c.dtype) not in KNOWN_GAPS
    }
    fallbacks = sorted({op for result in results.values() for op in result.fallbacks})
    gaps = [f"| {name} | {dtype} | {gap.reason} |" for (name, dtype), gap in sorted(KNOWN_GAPS.items())]
    return "\n".join(
        [
            INTRODUCTION.format(count=len(checks), torch=torch.__version__),
            *table("dtype", by_dtype, results, lambda c: c.dtype),
            "",
            *table("mode", by_mode, results, lambda c: f"{c.kind}: {c.mode}"),
            "",
            *table("execution", checks, results, lambda c: c.execution),
            "",
            "Checks that differ and have no line below:",
            "",
            *([f"- `{check}`: {results[check].status}" for check in sorted(unexplained)] or ["none"]),
            "",
            f"Ops that ran on the CPU: {', '.join(f'`{op}`' for op in fallbacks) or 'none'}.",
            "",
            "## Known gaps",
            "",
            "| name | dtype | reason |",
            "|---|---|---|",
            *gaps,
            "",
        ]
    )


def main() -> None:
    results: dict[str, Result] = {}
    for path in sys.argv[1:]:
        results |= finished(Path(path))
    PAGE.write_text(page(results))
    print(f"{PAGE}: {len(results)} results")


if __name__ == "__main__":
    main()
