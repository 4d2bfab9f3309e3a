"""Keys, payloads, and child processes that use the cache without torch, for the cache's tests."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from torchtpu import compiler_cache
from torchtpu.compiler_cache import DirectoryStore, Key, catalog

PACKAGE = Path(compiler_cache.__file__).parent

# A child loads the package by its path and without torch: it starts at once, and nothing of torchtpu is imported.
PRELUDE = f"""
import importlib.util, os, random, sys, time, types
sys.modules["torchtpu"] = types.ModuleType("torchtpu")
spec = importlib.util.spec_from_file_location("torchtpu.compiler_cache", {str(PACKAGE / "__init__.py")!r})
package = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from torchtpu.compiler_cache import DirectoryStore, Key, open_store
def payload(i): return random.Random(i).randbytes(1000) * (1 + 300 * (i % 4))
def key(i): return Key.of("program", {{"i": i}})
"""


def payload(i: int) -> bytes:
    return random.Random(i).randbytes(1000) * (1 + 300 * (i % 4))


def key(i: int) -> Key:
    return Key.of("program", {"i": i})


def child(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def finish(process: subprocess.Popen[str]) -> str:
    with process:
        return process.communicate(timeout=120)[0]


def ready(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def must_not_build() -> bytes:
    raise AssertionError("built although it is stored")


def entry_file(store: DirectoryStore, wanted: Key) -> Path:
    assert store.directory is not None
    return catalog.entry_path(store.directory, wanted.kind, wanted.digest)


def home(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir(0o700)
    return tmp_path / "cache"


def store(home: Path) -> DirectoryStore:
    return DirectoryStore(home)


def lines() -> Iterator[list[str]]:
    """The warnings that the cache logs during the test."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("torchtpu.compiler_cache")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)
