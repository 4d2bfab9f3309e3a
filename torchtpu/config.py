"""Every knob, set by TORCHTPU_* variables, by `set(...)` calls or by `using(...)` blocks.

    TORCHTPU_SYNC=1 python train.py           # the environment
    torchtpu.config.set(sync=True)            # code
    with torchtpu.config.using(sync=True):    # a block
        ...

A value holds for the whole process; a block restores what it found.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

_SIZES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Knob(NamedTuple):
    """One knob; `kind` is bool, int, str, "bytes", one word of "a|b", or words of "a,b"; an `is_early` one counts only
    until the device starts."""

    name: str
    default: Any
    kind: Any
    meaning: str
    is_early: bool = False

    @property
    def variable(self) -> str:
        return f"TORCHTPU_{self.name.upper()}"

    @property
    def words(self) -> list[str]:
        return re.split("[|,]", self.kind) if self.kind not in (bool, int, str, "bytes") else []

    @property
    def takes_many(self) -> bool:
        return bool(self.words) and "," in self.kind


KNOBS: Mapping[str, Knob] = {
    knob.name: knob
    for knob in (
        Knob(
            "platform", "auto", "auto|cpu|tpu|gpu", "where programs run; auto: tpu if chips are found, else cpu", True
        ),
        Knob("num_devices", 1, int, "devices that platform cpu pretends to have", True),
        Knob("sync", False, bool, "run each op at once, so that an error is raised on its own line (slow)"),
        Knob("log", (), "launch,cluster,stablehlo", "what to log: a line per launch, per cluster, program texts"),
        Knob("check", "off", "off|padding", "run each padded program twice, with other surplus, and compare (slow)"),
        Knob("debug_nans", "off", "off|nan|inf", "check what each op makes for NaN, or for NaN and infinities (slow)"),
        Knob(
            "policy",
            "background",
            "background|block|frozen",
            "block: a program never stands in for one that is being compiled; frozen: nothing is compiled, what exists "
            "runs or the region raises",
        ),
        Knob("deterministic", False, bool, "as torch.use_deterministic_algorithms(True): see docs/policies.md"),
        Knob("fallback", "warn", "warn|error|silent", "what happens before an op without a lowering runs on the CPU"),
        Knob("memory_limit", 0, "bytes", "most bytes of buffers and temporaries per device; 0: what the device has"),
        Knob("max_region_ops", 2048, int, "a region without a read is cut after at most this many ops"),
        Knob("max_region_bytes", 1 << 37, "bytes", "a region without a read is cut after producing this many bytes"),
        Knob("clusters", True, bool, "compile what repeats in a region once, as programs that are launched many times"),
        Knob(
            "tiers",
            "on",
            "on|pieces|off",
            "compile what is new quickly, and well once its launches have paid for that; pieces: all of it in pieces",
        ),
        Knob("sweep", True, bool, "try hot programs with other compile options too, and keep what is faster"),
        Knob(
            "compare",
            "spare",
            "spare|always",
            "when such programs are compiled; spare: in at most 5 % of the CPU time and, with one or two cores, only "
            "once the process has been idle; always: as soon as a program is hot",
        ),
        Knob("padding", True, bool, "compile regions whose sizes keep changing for longer arrays, which serve many"),
        Knob("max_in_flight", 32, int, "regions queued before recording waits"),
        Knob("max_trie_nodes", 200_000, int, "recorded ops a thread remembers; what came longest ago is forgotten"),
        Knob("max_programs", 1024, int, "programs in memory, per thread; beyond it the one used longest ago goes"),
        Knob("max_fragments", 16_384, int, "lowered ops in memory; beyond it the one used longest ago goes"),
        Knob("cache", "on", "on|read|off", "keep compiled programs on disk; read: use them, write none", True),
        Knob("cache_dir", "", str, "where; empty: torchtpu in the user's cache directory", True),
        Knob("cache_max_bytes", 10 << 30, "bytes", "above this the cache drops what was used longest ago", True),
        Knob("cache_trusted_dirs", "", str, "more cache directories to read, separated by colons", True),
        Knob("target", "", str, "pass for this TPU, such as v5e:2x2; `torchtpu warm --target` sets it", True),
        Knob("journal", "", str, "directory for a line about every program; `torchtpu warm` sets it", True),
        Knob("reads", "run", "run|standin|error", "how reads are answered; `torchtpu warm --reads` sets it", True),
        Knob(
            "world_size", 0, int, "ranks of the job that `torchtpu warm --world-size` makes a dry run of one of", True
        ),
        Knob("explain", "", str, "files for a report of the process, or -: `torchtpu explain` sets it", True),
        Knob("max_steps", 0, int, "end the process after this many optimizer steps; 0: never", True),
        Knob(
            "excess_precision",
            False,
            bool,
            "let fused ops keep float32 between them where eager PyTorch rounds to bfloat16 or float16",
            True,
        ),
        Knob("fuse_collectives", True, bool, "compile collectives into the programs around them", True),
        Knob("num_compile_threads", 0, int, "threads that compile; 0: one per two cores", True),
    )
}


@dataclass
class _State:
    """`values` are what `set` and `using` gave; `listeners` hear each change. Guarded by `lock`."""

    lock: threading.RLock
    values: dict[str, Any]
    listeners: list[Callable[[str, Any], None]]


_state = _State(threading.RLock(), {}, [])


def get(name: str) -> Any:
    """The knob's value: what code set, else its environment variable, else its default."""
    knob = _knob(name)
    with _state.lock:
        if name in _state.values:
            return _state.values[name]
    text = os.environ.get(knob.variable)
    return knob.default if text is None else _parse(knob, text, knob.variable)


def set(**values: Any) -> None:  # noqa: A001
    """Sets knobs for the whole process; a text is parsed as the environment variable's would be.

    Raises ValueError for a knob that does not exist or a value it cannot take.
    """
    for name, value in values.items():
        knob = _knob(name)
        parsed = _parse(knob, value, name) if isinstance(value, str) else _checked(knob, value)
        with _state.lock:
            _state.values[name] = parsed
        _tell(name, parsed)


@contextlib.contextmanager
def using(**values: Any) -> Iterator[None]:
    """Sets knobs inside a `with` block."""
    with _state.lock:
        before = {name: _state.values[name] for name in values if name in _state.values}
    set(**values)
    try:
        yield
    finally:
        for name in values:
            with _state.lock:
                if name in before:
                    _state.values[name] = before[name]
                else:
                    _state.values.pop(name, None)
            _tell(name, get(name))


def on_change(listener: Callable[[str, Any], None]) -> None:
    """Calls `listener(name, value)` for every knob now and whenever one is set."""
    with _state.lock:
        _state.listeners.append(listener)
    for name in KNOBS:
        listener(name, get(name))


def warn_unknown(environ: Mapping[str, str] | None = None) -> None:
    """Warns about each TORCHTPU_* variable that names no knob, with the closest one that does."""
    known = {knob.variable for knob in KNOBS.values()}
    for variable in os.environ if environ is None else environ:
        if variable.startswith("TORCHTPU_") and variable not in known:
            close = difflib.get_close_matches(variable, known, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"Known: {', '.join(sorted(known))}."
            warnings.warn(f"{variable} is not a knob of torchtpu. {hint}", stacklevel=2)


def table() -> str:
    """The knobs as a Markdown table, for the documentation."""
    rows = [f"| `{k.variable}` | `{_show(k)}` | {k.meaning} |" for k in KNOBS.values()]
    return "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows])


def __getattr__(name: str) -> Any:
    if name in KNOBS:
        return get(name)
    raise AttributeError(f"module 'torchtpu.config' has no attribute {name!r}")


def _knob(name: str) -> Knob:
    if name not in KNOBS:
        close = difflib.get_close_matches(name, KNOBS, n=1)
        raise ValueError(f"torchtpu has no knob {name!r}." + (f" Did you mean {close[0]!r}?" if close else ""))
    return KNOBS[name]


def _tell(name: str, value: Any) -> None:
    with _state.lock:
        listeners = list(_state.listeners)
    for listener in listeners:
        listener(name, value)


def _show(knob: Knob) -> str:
    if knob.kind is bool:
        return str(int(knob.default))
    if knob.kind == "bytes" and knob.default:
        return next(f"{knob.default // size}{unit}" for unit, size in reversed(_SIZES.items()) if knob.default >= size)
    return ",".join(knob.default) if knob.takes_many else str(knob.default)


def _parse(knob: Knob, text: str, source: str) -> Any:
    try:
        return _checked(knob, _read(knob, text.strip()))
    except (ValueError, KeyError, IndexError):
        raise ValueError(f"{source}={text!r}: expected {_expected(knob)}") from None


def _read(knob: Knob, text: str) -> Any:
    if knob.kind is bool:
        return {"0": False, "1": True, "false": False, "true": True, "off": False, "on": True, "": False}[text.lower()]
    if knob.kind is int:
        return int(text)
    if knob.kind == "bytes":
        digits = text.upper().removesuffix("B").removesuffix("I")
        return int(float(digits[:-1]) * _SIZES[digits[-1]]) if digits[-1] in _SIZES else int(digits)
    if knob.takes_many:
        return tuple(word.strip() for word in text.split(",") if word.strip())
    return text


def _checked(knob: Knob, value: Any) -> Any:
    if knob.takes_many:
        value = tuple(value)
        fits = all(word in knob.words for word in value)
    elif knob.words:
        fits = value in knob.words
    elif knob.kind in (int, "bytes"):
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    else:
        fits = isinstance(value, knob.kind)
    if not fits:
        raise ValueError(f"{knob.name}={value!r}: expected {_expected(knob)}")
    return value


def _expected(knob: Knob) -> str:
    if knob.words:
        joined = ", ".join(knob.words)
        return f"any of {joined}, separated by commas" if knob.takes_many else f"one of {joined}"
    expected = {bool: "0 or 1", int: "a whole number, 0 or more", "bytes": "a size such as 512M or 2G", str: "a text"}
    return expected[knob.kind]
