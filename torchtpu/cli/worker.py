"""A process that compiles recorded programs, one for each line of JSON, and answers with a line about each.

python -m torchtpu.cli.worker [TARGET], a TPU with its topology, or nothing for this machine's own platform.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Protocol, TextIO

import torch

from torchtpu import config, distributed, startup
from torchtpu.cli.pool import READY, Completed
from torchtpu.compiler_cache import DirectoryStore, Store
from torchtpu.runtime.compile.plan_cache import Plan, Plans
from torchtpu.runtime.device.client import Client, Compiles
from torchtpu.runtime.ir.manifest import RecordedProgram, decode_recorded
from torchtpu.runtime.ir.program import Program
from torchtpu.runtime.lowering.fragments import Fragments
from torchtpu.runtime.telemetry.counters import Counters


class TargetBuilder(Protocol):
    """Compiles programs for one target."""

    @property
    def client(self) -> Compiles: ...
    def build(self, plan: Plan) -> tuple[bytes, dict[str, Any]]: ...


class LocalBuilder:
    """Compiles for this machine."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def build(self, plan: Plan) -> tuple[bytes, dict[str, Any]]:
        if plan.calls_lapack:
            self.client.load_lapack()
        return self.client.serialize(self.client.compile(plan.text(), 0)), {}


class TpuBuilder:
    """Compiles for a TPU that is not here."""

    def __init__(self, target: str) -> None:
        from torchtpu.runtime.compile.aot import AotClient

        self.client = AotClient(target, excess_precision=config.get("excess_precision"))

    def build(self, plan: Plan) -> tuple[bytes, dict[str, Any]]:
        built = self.client.compile(plan.text(), plan.homes)
        fields = built.cost._asdict()
        most = sorted(built.cost.gaps.items(), key=lambda item: (-item[1], item[0]))
        fields["gaps"] = ", ".join(f"{count} {opcode}" for opcode, count in most)
        return built.executable, {**fields, "peak_bytes": built.cost.peak_bytes}


class WarmWorker:
    """Lowers and compiles; what it makes goes to the store."""

    def __init__(self, target: str, store: Store) -> None:
        where = "cpu" if target else startup.platform()
        client = Client(where, excess_precision=config.get("excess_precision"))
        platform = "tpu" if target else client.lowering_platform
        self._builder: TargetBuilder = TpuBuilder(target) if target else LocalBuilder(client)
        self._fragments = Fragments(startup.lowerings(), client, store, Counters(), platform)
        self._plans = Plans(self._fragments, self._builder.client, store, Counters())
        self._store = store

    def compile(self, recorded: RecordedProgram) -> Completed:
        """Compiles one program, and the clusters that run in its stead at first, or finds them compiled; an error is
        part of the answer."""
        program = recorded.program
        try:
            clusters = None if recorded.is_flat else self._plans.clusters(program)
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is this program's line of the report
            return _failed(error)
        parts = {id(part.program): part.program for part in clusters.parts} if clusters else {}
        done = [self._compile(part, is_flat=False) for part in parts.values()]
        return _together([*done, self._compile(program, is_flat=recorded.is_flat)])

    def _compile(self, program: Program, *, is_flat: bool) -> Completed:
        digest = ""
        try:
            plan = self.plan(program, is_flat=is_flat)
            digest = plan.key.digest
            return self._built(plan, {"line": program.line, "ops": len(program.ops)})
        except Exception as error:  # noqa: BLE001 -- as above
            return _failed(error, digest)

    def plan(self, program: Program, *, is_flat: bool = False) -> Plan:
        """A program's text and what its launches must know; raises where it cannot be lowered."""
        return self._plans.find(program, is_flat=is_flat, homes=self._homes(program))

    def _homes(self, program: Program) -> tuple[int, ...]:
        """The devices of all ranks that launch a program together."""
        calls = (op for op in program.ops if op.name == distributed.RecordedCollectives.op)
        return next(map(distributed.RecordedCollectives().homes, calls), ())

    def _built(self, plan: Plan, note: dict[str, Any]) -> Completed:
        started = time.perf_counter()
        is_built = False

        def build() -> bytes:
            nonlocal is_built
            data, cost = self._builder.build(plan)
            is_built = True
            note.update(cost, build_ms=round((time.perf_counter() - started) * 1e3, 3))
            return data

        data = self._store.get_or_build(plan.key, build, note)
        milliseconds = (time.perf_counter() - started) * 1e3
        kept = self._store.find(plan.key.kind, plan.key.digest) if isinstance(self._store, DirectoryStore) else None
        told = note if kept is None else dict(kept.note)
        outcome = "compiled" if is_built else "hit"
        return Completed(outcome, plan.key.digest, milliseconds, len(data), kept is not None, "", told)


def _failed(error: Exception, digest: str = "") -> Completed:
    return Completed("failed", digest, error=f"{type(error).__name__}: {error}")


def _together(found: list[Completed]) -> Completed:
    """What became of a program, the last one, and of its clusters."""
    *parts, whole = found
    worst = next((done for outcome in ("failed", "compiled") for done in found if done.outcome == outcome), whole)
    build_ms = sum(done.note.get("build_ms", 0.0) for done in found)
    return whole._replace(
        outcome=worst.outcome,
        error=worst.error,
        milliseconds=sum(done.milliseconds for done in found),
        nbytes=sum(done.nbytes for done in found),
        is_stored=all(done.is_stored for done in found),
        note={**whole.note, "build_ms": build_ms} if parts else whole.note,
    )


def main(arguments: list[str], lines: TextIO) -> None:
    """Answers each line of `lines` on the standard output, until they end."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is no answer
    torch.set_num_threads(1)
    worker = WarmWorker(arguments[0] if arguments else "", startup.open_store())
    answers.write(READY)
    answers.flush()
    for line in lines:
        done = worker.compile(decode_recorded(json.loads(line)))
        answers.write(json.dumps(done._asdict()) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdin)
