"""Programs that some test compiled before, in this run or an earlier one, are loaded instead of compiled once more.

What is replaced is the compiler itself, below everything that counts, stores or waits: a test sees a program compiled,
in a cache that begins empty, and spares the seconds that XLA takes. The programs lie in a store of the tests' own. Its
keys are made of all that a program is compiled from and by, so that none stands for another. Of programs for TPUs the
bytes and the cost are kept. Each process of a test does this, by `site/hooks.py`; `pytest --compile` does without it,
as do tests marked `compiles`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
from collections import deque
from pathlib import Path
from typing import Any

VARIABLE = "COMPILED_BEFORE_DIR"  # where the programs are; every program is compiled where it is empty


def directory() -> Path:
    """Where all runs of the tests on this machine keep them."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "torchtpu-tests"


def install(client: Any) -> None:
    """Replaces the compiler of `client`, the module of that name, once."""
    compile_anew, serialize_anew = client.Client.compile, client.Client.serialize
    if hasattr(compile_anew, "__wrapped__"):
        return
    loaded: deque[tuple[Any, bytes]] = deque(maxlen=8)  # who stores a program asks for its bytes at once

    @functools.wraps(compile_anew)
    def load_or_compile(self: Any, text: str, device: int, homes: Any = (), more: Any = ()) -> Any:
        store = _store(os.environ.get(VARIABLE, ""), os.getpid())
        if store is None or self.platform != "cpu":
            return compile_anew(self, text, device, homes, more)
        key = client.key_of(hashlib.sha256(text.encode()).hexdigest(), self, homes, more)
        payload = store.get(key)
        if payload is not None:
            try:
                executable = self.deserialize(payload, device, homes, more)
            except Exception as error:
                store.discard(key, str(error))
            else:
                loaded.append((executable, payload))
                return executable
        executable = compile_anew(self, text, device, homes, more)
        store.put(key, serialize_anew(self, executable))
        return executable

    @functools.wraps(serialize_anew)
    def serialize(self: Any, executable: Any) -> bytes:
        """XLA writes what was loaded without its code."""
        found = next((payload for known, payload in list(loaded) if known is executable), None)
        return found or serialize_anew(self, executable)

    compile_apart = client.Client.compile_apart

    @functools.wraps(compile_apart)
    def compile_apart_or_here(self: Any, *args: Any, **named: Any) -> bytes | None:
        return None if os.environ.get(VARIABLE, "") else compile_apart(self, *args, **named)

    client.Client.compile, client.Client.serialize = load_or_compile, serialize
    client.Client.compile_apart = compile_apart_or_here


def install_for_tpus(aot: Any) -> None:
    """Replaces the compiler of `aot`, the module of that name, once: it has no executable, but bytes and what libtpu
    says of them."""
    compile_anew = aot.AotClient.compile
    if hasattr(compile_anew, "__wrapped__"):
        return

    @functools.wraps(compile_anew)
    def find_or_compile(self: Any, text: str, homes: Any = (), more: Any = ()) -> Any:
        from torchtpu.runtime.device import client

        store = _store(os.environ.get(VARIABLE, ""), os.getpid())
        if store is None:
            return compile_anew(self, text, homes, more)
        key = client.key_of(hashlib.sha256(text.encode()).hexdigest(), self, homes, more)
        payload = store.get(key)
        if payload is not None:
            return pickle.loads(payload)
        built = compile_anew(self, text, homes, more)
        store.put(key, pickle.dumps(built))
        return built

    aot.AotClient.compile = find_or_compile


@functools.cache
def _store(directory: str, process: int) -> Any:
    """The store of a process: a forked one inherits no locks."""
    from torchtpu.compiler_cache import open_store

    return open_store({"TORCHTPU_CACHE_DIR": directory, "TORCHTPU_CACHE_MAX_BYTES": "4G"}) if directory else None
