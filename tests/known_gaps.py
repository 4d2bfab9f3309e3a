"""Ops that differ from PyTorch on the CPU: (name, dtype) -> why. A gap that has closed fails the run.

A name is one of `opinfo_checks.txt`, or that of a lowering with "aten::" before it.
"""

from __future__ import annotations

KNOWN_GAPS: dict[tuple[str, str], str] = {}
