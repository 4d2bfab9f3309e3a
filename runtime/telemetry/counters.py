"""Counters of what the engine did: the engine counts, torchtpu.metrics reads.

Plain attributes: an increment may be lost when two threads race, which a metric can bear and a lock cannot pay for.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from torchtpu.runtime import _C

from .bailouts import Bailouts

_MOST_CAUSES = 100
_BY_TIER = "compiled_by_tier", "launched"


@dataclass
class Counters:
    """Totals since the process started, or since `reset`."""

    regions_planned: int = 0
    regions_clustered: int = 0
    regions_in_first_tier: int = 0
    regions_in_pieces: int = 0
    regions_promoted: int = 0
    regions_climbing: int = 0
    regions_fused: int = 0
    regions_padded: int = 0
    regions_not_padded: dict[tuple[str, str], int] = field(default_factory=dict)  # by cause and line
    arrays_moved: int = 0
    programs_swept: int = 0
    variants_kept: int = 0
    programs_compiled: int = 0
    compiles_abandoned: int = 0
    compile_ms: float = 0.0
    load_ms: float = 0.0
    lower_ms: float = 0.0
    plan_hits_disk: int = 0
    fragment_traces: int = 0
    fragments_from_templates: int = 0
    fragment_hits_disk: int = 0
    cache_hits_memory: int = 0
    cache_hits_disk: int = 0
    cache_misses: int = 0
    cache_load_failures: int = 0
    host_calls: int = 0
    uploads: int = 0
    bytes_uploaded: int = 0
    downloads: int = 0
    bytes_downloaded: int = 0
    offset_variants: int = 0
    memory_waits: int = 0
    memory_collections: int = 0
    memory_map_collections: int = 0
    regions_split: int = 0
    ops_repeated: int = 0
    out_of_memory: int = 0
    regions_taken_apart: int = 0
    compiled_by_tier: dict[str, tuple[int, float]] = field(default_factory=dict)  # programs, milliseconds
    launched: _C.LaunchCounts = field(default_factory=_C.LaunchCounts)
    bailouts: Bailouts = field(default_factory=Bailouts)

    @property
    def launches(self) -> int:
        """The launches of programs."""
        return self.launched.total()

    def compiled(self, tier: str, milliseconds: float) -> None:
        """A program of this tier was compiled."""
        self.programs_compiled += 1
        self.compile_ms += milliseconds
        programs, before = self.compiled_by_tier.get(tier, (0, 0.0))
        self.compiled_by_tier[tier] = programs + 1, before + milliseconds

    def not_padded(self, cause: str, line: str) -> None:
        """A program whose sizes keep changing is compiled as it is."""
        known, event = self.regions_not_padded, (cause, line)
        if event in known or len(known) < _MOST_CAUSES:
            known[event] = known.get(event, 0) + 1

    def snapshot(self) -> dict[str, Any]:
        """The totals as a plain dict."""
        texts = {f"{cause} (the region at {line})": count for (cause, line), count in self.regions_not_padded.items()}
        totals = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _BY_TIER}
        own = {"launches": self.launches, "tiers": self._tiers(), "bailouts": self.bailouts.counts()}
        return {**totals, "regions_not_padded": texts, **own}

    def _tiers(self) -> dict[str, dict[str, float]]:
        """What was compiled and launched of each tier."""
        launches = {tier: count for tier, count in self.launched.by_tier().items() if count}
        found = {}
        for tier in sorted({*self.compiled_by_tier, *launches}):
            programs, milliseconds = self.compiled_by_tier.get(tier, (0, 0.0))
            found[tier] = {"programs": programs, "compile_ms": milliseconds, "launches": launches.get(tier, 0)}
        return found

    def reset(self) -> None:
        """Sets every total to zero."""
        self.bailouts.reset()
        self.launched.reset()  # in place: direct launches count in it
        self.__init__(bailouts=self.bailouts, launched=self.launched)  # type: ignore[misc]
