"""Waits for programs to be loaded."""

from __future__ import annotations

import contextlib
from concurrent.futures import CancelledError
from pathlib import Path

import torch

from torchtpu import startup
from torchtpu.runtime.ir.manifest import decode_recorded, read_lines

__all__ = ["ready"]


def ready(manifest: str | Path | None = None) -> int:
    """Waits until every program asked for so far, and every program of the manifest, is loaded; how many are.

    Manifests are written by `torchtpu warm --manifest`. Raises what kept a program from being loaded: under policy
    frozen also that it would have to be compiled. Raises ManifestError for a file that is no manifest.
    """
    engine = startup.engine()
    torch.tpu.synchronize()  # type: ignore[attr-defined]
    lines = [] if manifest is None else read_lines(manifest)
    flights = engine.load(decode_recorded(line["program"]) for line in lines)
    for flight in [*flights, *engine.compiler.outstanding()]:
        with contextlib.suppress(CancelledError):  # nobody wants it any more
            flight.result()
    return len(engine.compiler.digests())
