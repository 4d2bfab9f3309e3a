"""The report of `torchtpu warm`: its numbers and tables, from journals, manifests and workers' answers."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from torchtpu.cli.output import err, out, show_count, show_seconds, table
from torchtpu.cli.pool import Completed, Pool
from torchtpu.compiler_cache import DirectoryStore
from torchtpu.runtime.device.sizes import show_bytes
from torchtpu.runtime.ir.manifest import decode_recorded, read_lines, write_lines

_ROWS = 40
_GAPS = 4
_UNKNOWN = Completed("")
_BETTER = {"": 0, "recorded": 0, "failed": 1, "hit": 2, "compiled": 3}  # which of two is told


@dataclass
class Seen:
    """One recorded program: as its line of JSON has it, and what became of it."""

    recorded: dict[str, Any]
    line: str
    ops: int
    guessed_since: str
    done: Completed = _UNKNOWN


class Report:
    """Gathers; `programs` are by identity. Workers answer from their own threads, under `_lock`."""

    def __init__(self, target: str, store: DirectoryStore, command: Sequence[str], reads: str) -> None:
        self.target = target
        self.store = store
        self.command = list(command)
        self.reads = reads
        self.programs: dict[str, Seen] = {}
        self.fallbacks: Counter[str] = Counter()
        self.guessed: dict[str, None] = {}
        self._lock = threading.Lock()
        self._offsets: dict[Path, int] = {}
        self._pool: Pool | None = None

    # gather

    def read_manifest(self, path: Path) -> None:
        """Takes over a manifest's programs; ManifestError where it is none."""
        for fields in read_lines(path):
            self._add(fields["identity"], fields["program"])

    def write_manifest(self, path: Path) -> None:
        """Writes the programs seen to a manifest."""
        about = {"command": self.command, "reads": self.reads}
        write_lines(path, ({"identity": i, "program": seen.recorded} for i, seen in self.programs.items()), about)

    def follow(self, folder: str) -> None:
        """Takes in what the command's processes have written since."""
        for path in sorted(Path(folder).glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):  # it is still being written
                        break
                    self._offsets[path] = self._offsets.get(path, 0) + len(line)
                    self._take(json.loads(line))

    def start(self, environment: Mapping[str, str], jobs: int) -> None:
        """From now on programs are compiled by workers."""
        self._pool = Pool(self.target, jobs, environment, self._answer)

    def finish(self, *, is_quiet: bool) -> None:
        """Waits for the workers, with a progress bar."""
        assert self._pool is not None
        columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=err, transient=True, disable=is_quiet) as progress:
            task = progress.add_task("compiling", total=len(self.programs))
            self._pool.close(lambda: progress.update(task, completed=sum(1 for _ in self.ended)))

    def stop(self) -> None:
        """Ends the workers, if there are any."""
        if self._pool is not None:
            self._pool.kill()

    def compile(self, environment: Mapping[str, str], jobs: int, *, is_quiet: bool) -> None:
        """Compiles every program by workers."""
        self.start(environment, jobs)
        for identity, seen in self.programs.items():
            self._submit(identity, seen)
        self.finish(is_quiet=is_quiet)

    def compile_rest(self, environment: Mapping[str, str], jobs: int, *, is_quiet: bool) -> None:
        """Compiles by workers what the command recorded and has not built, as what it would build once it is hot."""
        rest = [identity for identity, seen in self.programs.items() if not seen.done.outcome]
        if rest:
            self.start(environment, jobs)
            for identity in rest:
                self._submit(identity, self.programs[identity])
            self.finish(is_quiet=is_quiet)

    def _take(self, fields: dict[str, Any]) -> None:
        if "program" in fields:
            self._add(fields["identity"], fields["program"])
        elif "guessed" in fields:
            self.guessed[fields["guessed"]] = None
        elif "facts" in fields:
            self.fallbacks.update(fields["facts"].get("fallbacks", {}))
        elif self._pool is None:
            outcome = fields["outcome"]
            done = Completed(outcome["outcome"], outcome["digest"], outcome["milliseconds"], error=outcome["error"])
            self._answer(outcome["identity"], self._looked_up(done))

    def _add(self, identity: str, fields: dict[str, Any]) -> None:
        if identity not in self.programs:
            recorded = decode_recorded(fields)
            program = recorded.program
            seen = Seen(fields, program.line, len(program.ops), recorded.guessed_since)
            self.programs[identity] = seen
            if self._pool is not None:
                self._submit(identity, seen)

    def _submit(self, identity: str, seen: Seen) -> None:
        assert self._pool is not None
        self._pool.submit(identity, seen.recorded)

    def _answer(self, identity: str, done: Completed) -> None:
        with self._lock:
            seen = self.programs[identity]
            if _BETTER[done.outcome] > _BETTER[seen.done.outcome]:
                seen.done = done

    def _looked_up(self, done: Completed) -> Completed:
        """With what the cache knows of the entry."""
        entry = self.store.find("program", done.digest) if done.digest else None
        if entry is None:
            return done
        return done._replace(nbytes=len(entry.payload), is_stored=True, note=dict(entry.note))

    # tell

    @property
    def ended(self) -> Iterator[Seen]:
        """The programs whose outcome is known."""
        return (seen for seen in list(self.programs.values()) if seen.done.outcome)

    @property
    def distinct(self) -> list[Seen]:
        """One program per executable, the costliest first."""
        found: dict[str, Seen] = {}
        for identity, seen in self.programs.items():
            found.setdefault(seen.done.digest or identity, seen)
        return sorted(found.values(), key=lambda seen: (-seen.done.note.get("seconds", 0), -seen.ops))

    @property
    def failed(self) -> list[Seen]:
        return [seen for seen in self.distinct if seen.done.outcome in ("failed", "")]

    @property
    def unstored(self) -> list[Seen]:
        return [seen for seen in self.distinct if seen.done.outcome in ("hit", "compiled") and not seen.done.is_stored]

    def count(self, outcome: str) -> int:
        return sum(1 for seen in self.distinct if seen.done.outcome == outcome)

    @property
    def seconds_saved(self) -> float:
        """What a next start will not spend on compiling."""
        return sum(seen.done.note.get("build_ms", 0.0) for seen in self.distinct if seen.done.is_stored) / 1e3

    def document(self, status: int) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "target": self.target or None,
            "command": self.command,
            "status": status,
            "reads": self.reads,
            "cache": str(self.store.directory),
            "programs": len(self.distinct),
            "hits": self.count("hit"),
            "compiled": self.count("compiled"),
            "failed": len(self.failed),
            "not_stored": len(self.unstored),
            "seconds_saved": round(self.seconds_saved, 3),
            "stand_in_reads": list(self.guessed),
            "cpu_fallbacks": dict(self.fallbacks),
            "regions": [_fields(seen) for seen in self.distinct],
        }


def print_report(report: Report, status: int) -> None:
    """Prints the report for people."""
    shown = report.distinct
    if report.target and shown:
        out.print(table(_COST_COLUMNS, (_cost_cells(seen) for seen in shown[:_ROWS])))
        if len(shown) > _ROWS:
            out.print(f"and {len(shown) - _ROWS} more (--json lists them all)")
    for seen in report.failed:
        out.print(f"failed: the region recorded at {seen.line} ({seen.ops} ops): {_reason(seen)}", markup=False)
    for op, count in sorted(report.fallbacks.items()):
        out.print(f"on the CPU: {op}, {count} times: it has no lowering", markup=False)
    for line in report.guessed:
        later = sum(1 for seen in shown if seen.guessed_since == line)
        text = f"stand-in: the read at {line} was answered with zeros; {later} programs were recorded after it"
        out.print(f"{text}, and a real answer may lead to others", markup=False)
    out.print(_summary(report), markup=False)
    if report.target and shown:
        out.print(f"They are for {report.target} and load only where such a chip is: none was run or loaded here.")
    if not shown:
        out.print("Nothing was recorded: does the command use device 'tpu'?")
    if report.unstored:
        out.print(f"{len(report.unstored)} could not be stored in {report.store.directory}", markup=False)
    if status:
        out.print(f"The command ended with status {status}.")


def _summary(report: Report) -> str:
    parts = [f"{len(report.distinct)} programs", f"{report.count('hit')} hits", f"{report.count('compiled')} compiled"]
    parts.append(f"{len(report.failed)} failed")
    nbytes = sum(seen.done.nbytes for seen in report.distinct)
    saved = f"{report.seconds_saved:.1f} s saved at the next start"
    return f"{', '.join(parts)}; {show_bytes(nbytes)} in {report.store.directory}; reads: {report.reads}; {saved}"


_COSTS = ("flops", "traffic", "memory", "of HBM", "code", "cycles", "time")
_COST_COLUMNS = ("region", "ops", *_COSTS, "not in the estimate")


def _cost_cells(seen: Seen) -> list[str]:
    note = seen.done.note
    if "cycles" not in note:
        return [_short(seen.line), str(seen.ops), *["-"] * len(_COSTS), seen.done.outcome or "stopped"]
    return [
        _short(seen.line),
        str(seen.ops),
        show_count(note["flops"]),
        show_bytes(note["bytes_accessed"]),
        show_bytes(note["peak_bytes"]),
        f"{100 * note['peak_bytes'] / note['device_bytes']:.1f} %",
        show_bytes(note["code_bytes"]),
        show_count(note["cycles"]) if note["cycles"] else "-",
        show_seconds(note["seconds"]) if note["cycles"] else "-",
        _first_gaps(note["gaps"]),
    ]


def _first_gaps(gaps: str) -> str:
    first, rest = gaps.split(", ")[:_GAPS], gaps.split(", ")[_GAPS:]
    return ", ".join(first) + (f" and {len(rest)} other kinds" if rest else "") or "-"


def _short(line: str) -> str:
    """A line of code by its file's last two names."""
    return "/".join(line.split("/")[-2:])


def _fields(seen: Seen) -> dict[str, Any]:
    done = seen.done._asdict()
    return {"line": seen.line, "ops": seen.ops, "guessed_since": seen.guessed_since or None, **done}


def _reason(seen: Seen) -> str:
    return seen.done.error.partition("\n")[0] or "stopped before it was compiled"
