"""Counters of the recorder and the engine, as one plain dict."""

from __future__ import annotations

from typing import Any

from torchtpu import distributed, startup
from torchtpu.api import fallback
from torchtpu.ops import counts
from torchtpu.runtime import _C

__all__ = ["reset", "snapshot"]


def snapshot() -> dict[str, Any]:
    """Counts since the start or `reset`.

    ops_recorded, trie_hits, trie_misses, shapes_inferred (what no earlier call answered) and
    shapes_inferred_on_meta {op: count} (by PyTorch's meta kernels, most of them Python), trie_nodes, trie_plans,
    array_shapes, streams_forgotten, regions, cuts {reason: count}, live_buffers, live_nodes, queue and launched_ahead
    (of earlier regions, for a read) come from the recorder; programs_compiled, compiles_abandoned (nobody wanted
    them any more), plan_hits_disk, fragment_traces, cache_hits_memory, cache_hits_disk, launches, bytes_uploaded,
    bytes_downloaded and their like from the engine; regions_in_first_tier were compiled quickly, regions_in_pieces
    of them in small programs that they share with others, of which regions_promoted were compiled
    well since; of hot regions regions_climbing and regions_fused were compiled whole and stayed so, programs_swept
    and variants_kept were timed with other compile options and stayed with them; memory_waits, memory_collections,
    regions_split, ops_repeated and out_of_memory are what it did for want of memory; recompilations {reason: count}
    name the op, its line, and what of which argument varied; bailouts {optimisation and error: count} are
    optimisations that failed, so that their regions run in the plain form; regions_padded serve several sizes that
    change, and regions_not_padded {cause and line: count} do not; count_reads {op: count} from the ops whose
    results' shapes depend on data; cpu_fallbacks {op: count} and bytes_fallback from the ops that ran on the CPU;
    collectives {name: count}, bytes_collectives and collective_ms (what launches waited) from torch.distributed.
    """
    recompilations = startup.recompilations()
    return {
        **startup.engine_counters().snapshot(),
        **_C.stats(),
        "recompilations": recompilations.counts() if recompilations else {},
        "count_reads": counts.count_reads(),
        "cpu_fallbacks": fallback.cpu_fallback_counts(),
        "bytes_fallback": fallback.bytes_moved(),
        **distributed.snapshot(),
    }


def reset() -> None:
    """Sets every count to zero; what is alive or queued stays counted."""
    startup.engine_counters().reset()
    _C.reset_stats()
    if startup.recompilations():
        startup.recompilations().reset()
    counts.reset()
    fallback.reset()
    distributed.reset()
