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

    The recorder's:

    - `ops_recorded`, `trie_hits`, `trie_misses`, `trie_nodes`, `trie_plans`, `array_shapes`, `streams_forgotten`.
    - `shapes_inferred`: what no earlier call answered; `shapes_inferred_on_meta`: {op: count} of those that PyTorch's
      meta kernels answered, most of them Python.
    - `regions`, `cuts` {reason: count}, `live_buffers`, `live_nodes`, `queue`, and `launched_ahead` of earlier regions,
      for a read.

    The engine's:

    - `programs_compiled`, `compiles_abandoned` (nobody wanted them any more), `compile_ms`, `load_ms`, `lower_ms`,
      `plan_hits_disk`, `fragment_traces` (ops that jax traced), `fragments_from_templates` (that came with the
      package, or were made of other sizes), `cache_hits_memory`, `cache_hits_disk`, `cache_misses`.
    - `launches`, `uploads`, `bytes_uploaded`, `downloads`, `bytes_downloaded`.
    - `tiers`: {tier: {programs, compile_ms, launches}}, the programs compiled and launched as `pieces`, which regions
      share, `quick`, `usual`, `whole` (regions of repeated parts as one program), and `swept` (other compile options).
    - `regions_in_first_tier`, of which `regions_in_pieces` are made of pieces and `regions_promoted` have been
      compiled well since; of hot regions `regions_climbing` were compiled whole and `regions_fused` stayed so;
      `programs_swept` were timed with other compile options, and `variants_kept` stayed with them.
    - `recompilations`: {reason: count}, by the op, its line, and what of which argument varied.
    - `regions_padded` serve several sizes that change, `regions_not_padded` {cause and line: count} do not.
    - `bailouts`: {optimisation and error: count} of optimisations that failed: their regions run in the plain form.
    - `memory_waits`, `memory_collections`, `regions_split`, `ops_repeated`, `out_of_memory`: for want of memory;
      `memory_map_collections`: fewer programs stay since then, for want of memory maps.

    Of single ops:

    - `count_reads`: {op: count} of the ops whose results' shapes depend on data.
    - `cpu_fallbacks` {op: count} and `bytes_fallback` of the ops that ran on the CPU.
    - `collectives` {name: count}, `bytes_collectives`, and `collective_ms`, which launches waited.
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
