"""`torchtpu warm`: compiles the programs of the user's own command, or of a manifest, into the cache."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from torchtpu.cli import interpreter
from torchtpu.cli.output import Json, err, fail, print_json
from torchtpu.cli.warm_report import Report, print_report
from torchtpu.compiler_cache import DirectoryStore

_POLL_SECONDS = 0.2
_HOST_RANKS = 8
_STOP_SECONDS = 10.0


class Reads(StrEnum):
    """How the command's reads of device results are answered."""

    run = "run"
    standin = "standin"
    error = "error"


def warm(
    command: Annotated[list[str] | None, typer.Argument(help="The command to run, with its own arguments.")] = None,
    target: Annotated[
        str, typer.Option(help="Compile for this TPU, which need not be here: v4, v5e, v5p, v6e or tpu7x, as v5e:2x2.")
    ] = "",
    jobs: Annotated[int, typer.Option(min=0, help="Programs compiled at a time; 0: one per two cores.")] = 0,
    steps: Annotated[int, typer.Option(min=0, help="End the command after this many steps; 0: let it end.")] = 0,
    reads: Annotated[
        Reads, typer.Option(help="For results that the command reads: run programs here, answer zeros, or fail.")
    ] = Reads.run,
    world_size: Annotated[
        int, typer.Option(min=0, help="Rehearse a job of so many ranks, one after the other, in one process each.")
    ] = 0,
    ranks: Annotated[
        str, typer.Option(help="Which of them, as 0,7; none: the first and the last, whose shards differ if any do.")
    ] = "",
    manifest: Annotated[Path | None, typer.Option(help="Write the recorded programs here, for --from.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Compile the programs of this manifest; no command runs.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile a command's programs ahead of time and keep them in the cache.

    torchtpu warm -- python train.py --steps 10

    torchtpu warm --target v5e:2x2 -- torchrun --nproc-per-node 4 train.py

    torchtpu warm --target v5e:16x16 --world-size 256 -- python train.py
    """
    if bool(command) == (source is not None):
        fail("give a command, or a manifest with --from", 2)
    if target:
        _check_target(target)
    if world_size and reads is Reads.run:
        reads = Reads.standin  # what the other ranks would send is not known
    each = [_rank(world_size, rank, target) for rank in _ranks(world_size, ranks)] or [{}]
    if command:
        interpreter.check(command)
    report = Report(target, _store(), command or [], reads.value)
    environment = _environment(target)
    jobs = jobs or max(1, len(os.sched_getaffinity(0)) // 2)
    status = 0
    try:
        if source is not None:
            report.read_manifest(source)
            report.compile(environment, jobs, is_quiet=as_json)
        else:
            knobs = {"WORLD_SIZE": str(world_size), "MAX_STEPS": str(steps)}
            status = _collect(report, environment, jobs, knobs, each, is_quiet=as_json)
        if manifest is not None:
            report.write_manifest(manifest)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except (OSError, ValueError) as error:
        fail(str(error))
    finally:
        report.stop()
    print_json(report.document(status)) if as_json else print_report(report, status)
    raise typer.Exit(status or (1 if report.failed or report.unstored or not report.programs else 0))


def _store() -> DirectoryStore:
    from torchtpu import startup

    store = startup.open_store()
    if not isinstance(store, DirectoryStore) or store.directory is None:
        fail(f"nothing can be kept: {getattr(store, 'reason', 'no directory may be written')}")
    if not store.may_write():
        fail("nothing can be kept: TORCHTPU_CACHE=read")
    return store


def _check_target(target: str) -> None:
    from torchtpu.runtime.device.chips import find_chip

    try:
        find_chip(target)
    except ValueError as error:
        fail(f"--target {error}", 2)
    if importlib.util.find_spec("libtpu") is None:
        fail("--target compiles with libtpu, which is not installed: pip install 'torchtpu[aot]'")


def _environment(target: str) -> dict[str, str]:
    """The compiling processes' environment."""
    if not target:
        return dict(os.environ)
    from torchtpu.runtime.compile.aot import environment

    return environment()


def _ranks(world_size: int, ranks: str) -> list[int]:
    """The ranks that are made in a dry run, none where there is no such job."""
    try:
        chosen = {int(rank) for rank in ranks.split(",")} if ranks else {0, world_size - 1}
    except ValueError:
        fail(f"--ranks {ranks}: expected numbers such as 0,7", 2)
    if ranks and not all(0 <= rank < world_size for rank in chosen):
        fail(f"--ranks {ranks}: a job of --world-size {world_size} has no such ranks", 2)
    return sorted(chosen) if world_size else []


def _rank(world_size: int, rank: int, target: str) -> dict[str, str]:
    """What torchrun tells a rank of a job, on hosts of as many devices as those of the target."""
    from torchtpu.runtime.device.chips import devices_of_host, find_chip

    local = min(world_size, devices_of_host(*find_chip(target)) if target else _HOST_RANKS)
    names = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank % local,
        "LOCAL_WORLD_SIZE": local,
        "GROUP_RANK": rank // local,
        "GROUP_WORLD_SIZE": -(-world_size // local),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29500,
    }
    return {name: str(value) for name, value in names.items()}


def _collect(
    report: Report,
    environment: Mapping[str, str],
    jobs: int,
    knobs: Mapping[str, str],
    each: Sequence[Mapping[str, str]],
    *,
    is_quiet: bool,
) -> int:
    """Runs the command in `each` of these environments, compiles what it records; the first exit status that is not
    0."""
    with tempfile.TemporaryDirectory(prefix="torchtpu-warm-") as folder:
        runs_here = not report.target and report.reads == "run"
        if not runs_here:
            report.start(environment, jobs)
        status = 0
        for more in each:
            status = status or _run(report, folder, jobs, knobs, more, is_quiet=is_quiet)
            report.follow(folder)
        if runs_here:
            report.compile_rest(environment, jobs, is_quiet=is_quiet)
        else:
            report.finish(is_quiet=is_quiet)
    return status


def _run(
    report: Report, folder: str, jobs: int, knobs: Mapping[str, str], more: Mapping[str, str], *, is_quiet: bool
) -> int:
    knobs = {**knobs, "JOURNAL": folder, "TARGET": report.target, "READS": report.reads}
    if not report.target:
        knobs["NUM_COMPILE_THREADS"] = str(jobs)
    environment = {**os.environ, **more, **{f"TORCHTPU_{name}": value for name, value in knobs.items()}}
    try:
        # Its output is its own; with --json the document alone is on the standard output.
        process = subprocess.Popen(report.command, env=environment, stdout=2 if is_quiet else None)
    except OSError as error:
        fail(f"{report.command[0]} does not start: {error.strerror}", 127)
    try:
        while process.poll() is None:
            report.follow(folder)
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        try:
            process.wait(_STOP_SECONDS)  # the terminal has told it too
        except subprocess.TimeoutExpired:
            process.kill()
        report.follow(folder)
        raise
    status = process.returncode
    if status < 0:
        err.print(f"torchtpu warm: the command was ended by signal {-status}")
    return status if status >= 0 else 128 - status
