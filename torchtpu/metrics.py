"""Numbers for the curious: in come the counters of the recorder and the engine, out goes one plain dict."""

from __future__ import annotations

from typing import Any

from torchtpu import distributed, fallback, startup
from torchtpu.ops import counts
from torchtpu.runtime import _C

__all__ = ["reset", "snapshot"]


def snapshot() -> dict[str, Any]:
    """Counts since the start or `reset`.

    ops_recorded, trie_hits, trie_misses, trie_nodes, regions, cuts {reason: count}, live_buffers, live_nodes and queue
    come from the recorder; programs_compiled, plan_hits_disk, fragment_traces, cache_hits_memory, cache_hits_disk,
    launches, bytes_uploaded, bytes_downloaded and their like from the engine; count_reads {op: count} from the ops
    whose results' shapes depend on data; cpu_fallbacks {op: count} and bytes_fallback from the ops that ran on the CPU;
    collectives {name: count}, bytes_collectives and collective_ms (what launches waited) from torch.distributed.
    """
    return {
        **startup.engine_counters().snapshot(),
        **_C.stats(),
        "count_reads": counts.count_reads(),
        "cpu_fallbacks": fallback.cpu_fallback_counts(),
        "bytes_fallback": fallback.bytes_moved(),
        **distributed.snapshot(),
    }


def reset() -> None:
    """Sets every count to zero; what is alive or queued stays counted."""
    startup.engine_counters().reset()
    _C.reset_stats()
    counts.reset()
    fallback.reset()
    distributed.reset()
