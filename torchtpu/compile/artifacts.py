"""torch.compiler's portable cache: `save_cache_artifacts` holds this process's programs, and `load_cache_artifacts`
puts them into the cache.

The programs are those of the whole process: compiled graphs share them with eager code.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

from torchtpu import startup
from torchtpu.compiler_cache.entry import DamagedEntry, decode_whole, encode


@CacheArtifactFactory.register
class ProgramArtifact(CacheArtifact):
    """One entry of the compiler cache, checksum included. It is native code: load only what you trust."""

    @staticmethod
    def type() -> str:
        return "torchtpu_program"

    def populate_cache(self) -> None:
        try:
            entry = decode_whole(self.content)
        except DamagedEntry:
            return  # a miss, like any damaged entry
        startup.engine().store.put(entry.key, entry.payload, entry.note)


@functools.cache
def install() -> None:
    """Adds this process's programs to what torch.compiler saves."""
    original = torch.compiler.save_cache_artifacts

    @functools.wraps(original)
    def save_cache_artifacts() -> Any:
        engine = startup.engine()
        for digest in engine.compiler.digests():
            entry = engine.store.find("program", digest) if engine.store.keeps else None
            if entry is not None:
                content = encode(entry.key, entry.payload, entry.note) + entry.payload
                CacheArtifactManager.record_artifact(ProgramArtifact.type(), digest, content)
        return original()

    torch.compiler.save_cache_artifacts = save_cache_artifacts
