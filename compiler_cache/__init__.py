"""The cache of compiled programs, shared by processes.

`open_store()` gives the store that the environment asks for.  Nothing here imports torch, jax or the rest of torchtpu.
"""

from __future__ import annotations

if __name__ != "torchtpu.compiler_cache":
    raise ImportError(f"import this package as torchtpu.compiler_cache, not as {__name__}: there must be one copy")

from .bundle import BundleError, Imported, export_bundle, import_bundle
from .catalog import EntryFile, Nearest
from .entry import CacheEntry, DamagedEntry, Note
from .files import UNREADABLE, cause_of
from .key import Key, KeyDifference, difference, explain, fingerprint
from .locate import default_directory, open_store, parse_nbytes
from .store import DirectoryStore, NullStore, Stats, Store
from .target import Target, canonical_text, compiler_line, host_cpu_features, program_digest, program_key
from .trust import untrusted

__all__ = [
    "UNREADABLE",
    "BundleError",
    "CacheEntry",
    "DamagedEntry",
    "DirectoryStore",
    "EntryFile",
    "Imported",
    "Key",
    "KeyDifference",
    "Nearest",
    "Note",
    "NullStore",
    "Stats",
    "Store",
    "Target",
    "canonical_text",
    "cause_of",
    "compiler_line",
    "default_directory",
    "difference",
    "explain",
    "export_bundle",
    "fingerprint",
    "host_cpu_features",
    "import_bundle",
    "open_store",
    "parse_nbytes",
    "program_digest",
    "program_key",
    "untrusted",
]
