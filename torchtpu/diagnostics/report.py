"""The report of what a listener noted: one dict of plain values, and its text."""

from __future__ import annotations

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from torchtpu.diagnostics.differences import first_difference, nearest
from torchtpu.diagnostics.listener import CompileRecord, LaunchRecord, Listener
from torchtpu.runtime.device.sizes import nbytes_of, show_bytes

_MAX_HOLDERS = 20
_MAX_BARS = 5000  # per thread of the timeline
_READ_ADVICE = "Keep the values on the device and read them together, after the loop or every n steps."
_FALLBACK_ADVICE = "The op has no lowering: it waits for the device and copies to the host and back. Use one that has."


def build(listener: Listener) -> dict[str, Any]:
    """The report. Times are milliseconds since the block began; sizes are bytes."""
    start = listener.started
    spans = device_spans(listener.runs)
    timeline = _timeline(listener, spans)
    recompilations = _recompilations(listener.builds, start)
    return {
        "wall_ms": _ms(listener.finished - start),
        "launches": len(listener.runs),
        "steps": _steps(listener, spans),
        "tiers": _tiers(listener, spans),
        "regions": _regions(listener, spans),
        "recompilations": recompilations,
        "fallbacks": _fallbacks(listener),
        "reads": _reads(listener),
        "builds": [_build(b, start) for b in listener.builds],
        "memory": _memory(listener),
        "room": _room(listener),
        "bailouts": [{"optimisation": b.what, "line": _where(b.line), "cause": b.cause} for b in listener.bailouts],
        "not_padded": [
            {"cause": cause, "line": _where(line), "count": count}
            for (cause, line), count in listener.not_padded.items()
        ],
        "timeline": timeline,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def device_spans(runs: Sequence[LaunchRecord]) -> list[tuple[float, float]]:
    """When the device worked on each launch: it begins one when the one before is done."""
    last: dict[int, float] = defaultdict(float)
    spans = []
    for run in runs:
        device = run.launch.device
        begin = max(run.launch.started, last[device])
        end = max(begin, run.finished)
        last[device] = end
        spans.append((begin, end))
    return spans


def _timeline(listener: Listener, spans: list[tuple[float, float]]) -> dict[str, list[list[Any]]]:
    """Bars [begin, end, label] of each thread."""
    start = listener.started

    def bar(begin: float, end: float, label: str) -> list[Any]:
        return [_ms(begin - start), _ms(end - start), label]

    waits = sorted((r.started, r.started + r.seconds) for r in listener.reads)
    record, previous = [], start
    for run in sorted(listener.runs, key=lambda r: r.launch.cut_at):
        cut_at = run.launch.cut_at
        waited = max((end for begin, end in waits if begin < cut_at and end <= cut_at), default=start)
        record.append(bar(max(previous, waited), max(cut_at, previous, waited), _where(run.launch.line)))
        previous = max(previous, cut_at)
    bars = {
        "record": record,
        "compile": [
            bar(b.finished - b.milliseconds / 1e3, b.finished, f"{b.source} {_where(b.program.line)}")
            for b in listener.builds
            if b.source in ("compile", "disk")
        ],
        "launch": [bar(r.launch.started, r.launch.ended, _where(r.launch.line)) for r in listener.runs],
        "device": [
            bar(*span, f"{run.launch.about.ops} ops from {_where(run.launch.about.line)}")
            for run, span in zip(listener.runs, spans, strict=True)
        ],
        "collective": [bar(c.started, c.ended, f"{c.op} {_where(c.line)}") for c in listener.calls],
        "wait": [bar(r.started, r.started + r.seconds, _where(r.line)) for r in listener.reads],
    }
    return {name: rows[:_MAX_BARS] for name, rows in bars.items()}


def _steps(listener: Listener, spans: list[tuple[float, float]]) -> dict[str, Any]:
    """How the time between two steps of an optimizer, of several the one that steps most often, was spent; the whole
    block where there are not two."""
    marks = max(listener.steps.values(), key=len, default=[])
    bounds = list(itertools.pairwise(marks)) or [(listener.started, listener.finished)]
    waits = [(r.started, r.started + r.seconds) for r in listener.reads]
    rows = [
        {"wall_ms": _ms(b - a), "device_ms": _ms(_overlap(spans, a, b)), "waited_ms": _ms(_overlap(waits, a, b))}
        for a, b in bounds
    ]
    wall = sum(row["wall_ms"] for row in rows) or 1.0
    device = min(1.0, sum(row["device_ms"] for row in rows) / wall)
    return {
        "unit": "optimizer.step" if len(marks) > 1 else "block",
        "count": len(rows),
        "device_bound": round(device, 3),
        "host_bound": round(1 - device, 3),
        "rows": rows,
    }


def _overlap(spans: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """The length of the spans' union within [begin, end]."""
    total, reached = 0.0, begin
    for a, b in sorted(spans):
        a, b = max(a, reached), min(b, end)
        if b > a:
            total += b - a
            reached = b
    return total


def _tiers(listener: Listener, spans: list[tuple[float, float]]) -> list[dict[str, Any]]:
    """What was compiled and launched in each tier."""
    rows: dict[str, dict[str, Any]] = {}

    def row(tier: str) -> dict[str, Any]:
        return rows.setdefault(tier, {"tier": tier, "programs": 0, "build_ms": 0.0, "launches": 0, "device_ms": 0.0})

    for build in listener.builds:
        if build.source in ("compile", "disk"):
            row(build.tier)["programs"] += 1
            row(build.tier)["build_ms"] += build.milliseconds
    for run, (begin, end) in zip(listener.runs, spans, strict=True):
        row(run.launch.about.tier)["launches"] += 1
        row(run.launch.about.tier)["device_ms"] += _ms(end - begin)
    return [{**each, **{k: round(each[k], 3) for k in ("build_ms", "device_ms")}} for each in rows.values()]


def _regions(listener: Listener, spans: list[tuple[float, float]]) -> list[dict[str, Any]]:
    """One row per program, the longest on the device first."""
    rows: dict[str, dict[str, Any]] = {}
    programs = {b.identity: b.program for b in listener.builds}
    cuts: dict[str, Counter[str]] = defaultdict(Counter)
    for run, (begin, end) in zip(listener.runs, spans, strict=True):
        about = run.launch.about
        row = rows.setdefault(
            about.identity,
            {
                "region": about.identity[:8],
                "line": about.line,
                "ops": about.ops,
                "tier": about.tier,
                "launches": 0,
                "device_ms": 0.0,
            },
        )
        row["launches"] += 1
        row["device_ms"] = round(row["device_ms"] + _ms(end - begin), 3)
        cuts[about.identity][f"{run.launch.reason} at {_where(run.launch.line)}"] += 1
    for identity, row in rows.items():
        program = programs.get(identity)
        row["cut"] = dict(cuts[identity])
        row["first_line"] = _where(program.ops[0].line) if program and program.ops else ""
        row["most_used"] = dict(Counter(op.name for op in program.ops).most_common(8)) if program else {}
    return sorted(rows.values(), key=lambda r: -r["device_ms"])


def _recompilations(builds: Sequence[CompileRecord], start: float) -> list[dict[str, Any]]:
    """Programs that were made although a similar one was there."""
    found = []
    known: list[CompileRecord] = []
    for made in builds:
        if made.source != "memory" and made.program.ops:
            near = nearest(made.program, [k.program for k in known])
            if near is not None and known[near[0]].program != made.program:
                old = known[near[0]]
                found.append(
                    {
                        **_build(made, start),
                        "nearest": old.identity[:8],
                        "nearest_line": _where(old.program.line),
                        "likeness": round(near[1], 3),
                        "difference": first_difference(old.program, made.program).as_dict(),
                    }
                )
        known.append(made)
    return found


def _build(made: CompileRecord, start: float) -> dict[str, Any]:
    return {
        "region": made.identity[:8],
        "line": _where(made.program.line),
        "ops": len(made.program.ops),
        "at_ms": _ms(made.at - start),
        "source": made.source,
        "build_ms": round(made.milliseconds, 3),
    }


def _fallbacks(listener: Listener) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for event in listener.fallbacks:
        groups[event.name, event.dtype, event.line].append(event.nbytes)
    return [
        {"op": op, "dtype": dtype, "line": line, "count": len(n), "bytes": sum(n), "advice": _FALLBACK_ADVICE}
        for (op, dtype, line), n in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]


def _reads(listener: Listener) -> list[dict[str, Any]]:
    groups: dict[str, list[Any]] = defaultdict(list)
    for read in listener.reads:
        groups[read.line].append(read)
    rows = [
        {
            "line": line,
            "count": len(reads),
            "waited_ms": _ms(sum(r.seconds for r in reads)),
            "bytes": sum(r.nbytes for r in reads),
            "advice": _READ_ADVICE if len(reads) > 2 else "",
        }
        for line, reads in groups.items()
    ]
    return sorted(rows, key=lambda r: -r["waited_ms"])


def _memory(listener: Listener) -> list[dict[str, Any]]:
    """The lines that made what is alive now, the largest first."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for made in listener.made:
        for op, reference in zip(made.ops, made.arrays, strict=False):
            array = reference()
            if op is not None and array is not None and not array.is_deleted():
                groups[op.name, op.line].append(nbytes_of(array))
    rows: list[dict[str, Any]] = [
        {"op": op, "line": line, "count": len(sizes), "bytes": sum(sizes)} for (op, line), sizes in groups.items()
    ]
    return sorted(rows, key=lambda r: -r["bytes"])[:_MAX_HOLDERS]


def _room(listener: Listener) -> list[dict[str, Any]]:
    """What launches did for want of memory, by region."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for room in listener.rooms:
        groups[room.action, room.line].append(room.detail)
    return [
        {"action": action, "line": line, "count": len(details), "last": details[-1]}
        for (action, line), details in groups.items()
    ]


def _where(line: str) -> str:
    """The line, with a path relative to the working directory where that is shorter."""
    root = os.getcwd() + os.sep
    return line.removeprefix(root)


# ---- text


def text(data: dict[str, Any]) -> str:
    """The report for a terminal."""
    if not data:
        return "torchtpu.explain: the block has not ended"
    steps = data["steps"]
    shares = f"{steps['device_bound']:.0%} of the time the device worked, {steps['host_bound']:.0%} it waited"
    lines = [
        f"torchtpu.explain: {data['wall_ms']:.0f} ms, {data['launches']} launches of {len(data['regions'])} regions",
        f"  {steps['count']} x {steps['unit']}: {shares} for the host",
    ]
    lines += _section("tiers", [_tier_text(t) for t in data["tiers"]])
    lines += _section("recompilations", [_recompilation_text(r) for r in data["recompilations"]])
    lines += _section(
        "fallbacks",
        [
            f"{f['op']} ({f['dtype']}) at {_where(f['line'])}: {f['count']} x, {show_bytes(f['bytes'])} moved\n"
            f"      {f['advice']}"
            for f in data["fallbacks"]
        ],
    )
    lines += _section("reads", [_read_text(r) for r in data["reads"][:20]])
    lines += _section("regions", [_region_text(r) for r in data["regions"][:20]])
    lines += _section(
        "builds",
        [
            f"{b['at_ms']:>10.1f} ms  {b['source']:<8}{b['build_ms']:>9.1f} ms  {b['ops']} ops at {b['line']}"
            for b in data["builds"][:40]
        ],
    )
    lines += _section(
        "memory",
        [f"{show_bytes(m['bytes']):>10}  {m['count']} x {m['op']} at {_where(m['line'])}" for m in data["memory"]],
    )
    lines += _section(
        "room", [f"{r['count']} x {r['action']} at {_where(r['line'])}: {r['last']}" for r in data["room"]]
    )
    lines += _section("bailouts", [f"{b['optimisation']} at {b['line']}: {b['cause']}" for b in data["bailouts"]])
    lines += _section("not padded", [f"{n['count']} x {n['line']}: {n['cause']}" for n in data["not_padded"]])
    return "\n".join(lines)


def _section(title: str, rows: list[str]) -> list[str]:
    return [title, *(f"    {row}" for row in rows)] if rows else []


def _recompilation_text(row: dict[str, Any]) -> str:
    found = row["difference"]
    of = f" of argument '{found['argument']}'" if found["argument"] else ""
    change = f"{found['before']} -> {found['after']}" if found["before"] or found["after"] else "differs"
    return (
        f"{found['op']} at {_where(found['line'])}: {found['what']}{of}: {change} "
        f"({row['source']} {row['build_ms']:.0f} ms, {row['ops']} ops)\n      {found['advice']}"
    )


def _tier_text(row: dict[str, Any]) -> str:
    return (
        f"{row['tier']}: {row['programs']} programs built in {row['build_ms']:.1f} ms, {row['launches']} launches, "
        f"{row['device_ms']:.1f} ms"
    )


def _read_text(row: dict[str, Any]) -> str:
    advice = f"\n      {row['advice']}" if row["advice"] else ""
    return f"{_where(row['line'])}: {row['count']} x, waited {row['waited_ms']:.1f} ms{advice}"


def _region_text(row: dict[str, Any]) -> str:
    cuts = ", ".join(f"{reason} ({count} x)" for reason, count in row["cut"].items())
    return (
        f"{row['region']}  {row['ops']} ops from {row['first_line']}: {row['launches']} launches, "
        f"{row['device_ms']:.1f} ms; cut: {cuts}"
    )
