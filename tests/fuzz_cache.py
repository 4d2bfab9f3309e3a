"""Changes real entries, plans, manifests and bundles at random, and collects those that are neither taken nor refused.

python tests/fuzz_cache.py KIND [--seed S] [--start N] [--count N]      input N of a seed is always the same
python tests/fuzz_cache.py KIND --atheris [libFuzzer's options]        guided by coverage, where atheris is installed
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from torchtpu.compiler_cache import BundleError, DamagedEntry, DirectoryStore, Key, NullStore, export_bundle
from torchtpu.compiler_cache import import_bundle as take_bundle
from torchtpu.compiler_cache.entry import HEAD_BYTES, decode_whole, encode

GUIDED = ("torchtpu.compiler_cache", "torchtpu.runtime.ir.checked", "torchtpu.runtime.ir.manifest")
KINDS = ("entries", "plans", "manifests", "bundles")


class Target(NamedTuple):
    """What is fuzzed: files to begin with, how one is changed, and what reads it: whether it was taken."""

    corpus: list[bytes]
    change: Callable[[random.Random, bytes], bytes]
    read: Callable[[bytes], bool]


class Crash(NamedTuple):
    """An input that raised what no reader of a damaged file expects."""

    number: int
    data: bytes
    error: str


# Changes

NUMBERS = (0, -1, 1, 2, 7, 255, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**4000)
WORDS = ("", "x", "torch", "builtins", "os", "system", "ValueError", "@", "é", "\ud800", "\0", "tpu:0", "f", "i")
VALUES = tuple(
    json.dumps(value)
    for value in (
        *(*NUMBERS, *WORDS, None, True, False, 0.5, -0.0, float("nan"), float("inf"), [], {}, [[]], [{}], {"x": []}),
        *({"dtype": name} for name in ("float32", "float64", "bits8", "manual_seed", "__name__", "")),
        *({"Lifted": ["i", number]} for number in (0, 1, -1, 2**62)),
        *({name: []} for name in ("Base", "Operand", "Result", "Scalar", "Random", "complex", "device", "layout")),
    )
)


def change_bytes(chance: random.Random, data: bytes) -> bytes:
    """The bytes with a few of them flipped, cut out, doubled, or put in the place of others."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(changed) + 1)
        length = chance.choice((1, 2, 4, 8, 64, 512))
        match chance.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                del changed[at : at + length]
            case 2:
                changed[at:at] = changed[at : at + length]
            case 3:
                changed[at : at + length] = chance.randbytes(length)
            case 4:
                del changed[at:]
            case _:
                changed[at : at + 8] = struct.pack("<Q", chance.choice(NUMBERS) % 2**64)
    return bytes(changed)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value, with each index or name in it."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        inside = found.items() if isinstance(found, dict) else enumerate(found)
        for name, item in inside:
            yield found, name
            if isinstance(item, dict | list):
                waiting.append(item)


def change_json(chance: random.Random, data: bytes) -> bytes:
    """The JSON text with a few of its values replaced, removed, repeated or exchanged; now and then its bytes."""
    if not chance.randrange(8):
        return change_bytes(chance, data)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return change_bytes(chance, data)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        known = list(places(value)) if isinstance(value, dict | list) else []
        if not known:
            value = json.loads(chance.choice(VALUES))
            continue
        inside, name = chance.choice(known)
        match chance.randrange(8):
            case 0:
                del inside[name]
            case 1 if isinstance(inside, list):
                inside.insert(name, inside[name])
            case 2:
                other, at = chance.choice(known)
                if at in other if isinstance(other, dict) else at < len(other):
                    inside[name] = json.loads(json.dumps(other[at]))
            case 3 if isinstance(inside, dict):
                inside[chance.choice(WORDS)] = inside.pop(name)
            case 4 | 5 if type(inside[name]) is int:
                inside[name] += chance.choice((-1, 1, 2, -2, 64))
            case 6 if isinstance(inside[name], str):
                inside[name] = change_bytes(chance, inside[name].encode("utf-8", "replace")).decode("latin-1")
            case _:
                inside[name] = json.loads(chance.choice(VALUES))
    try:
        return json.dumps(value, separators=(",", ":")).encode("ascii")
    except ValueError:  # a number of too many digits
        return data[: chance.randrange(len(data))] + b"9" * 5000


def sealed(key: bytes, note: bytes, payload: bytes) -> bytes:
    """A file with a right checksum, whatever it holds."""
    lengths = struct.pack("<8sIIIQ", b"TORCHTPU", 1, len(key), len(note), len(payload))
    return lengths + hashlib.sha256(lengths + key + note + payload).digest() + key + note + payload


def change_entry(chance: random.Random, data: bytes) -> bytes:
    """The entry changed anywhere, or changed in what it holds and with a checksum that is right."""
    if not chance.randrange(3) or len(data) < HEAD_BYTES:
        return change_bytes(chance, data)
    key, note, payload = struct.unpack("<8sIIIQ", data[:28])[2:]
    start = HEAD_BYTES
    parts = [data[start : start + key], data[start + key : start + key + note], data[start + key + note :][:payload]]
    at = chance.randrange(3)
    parts[at] = (change_bytes if at == 2 else change_json)(chance, parts[at])
    return sealed(*parts)


def change_bundle(chance: random.Random, data: bytes) -> bytes:
    """The tar changed anywhere, or in a header whose checksum is then right, or in its manifest."""
    at = 512 * chance.randrange(max(1, len(data) // 512))
    block = bytearray(data[at : at + 512])
    manifest, end = data.find(b'{"format"'), data.rfind(b"}")
    match chance.randrange(4):
        case 0 | 1 if len(block) == 512:
            first = chance.choice((0, 100, 124, 136, 148, 156, 257, 345))
            length = chance.choice((1, 8, 12))
            block[first : first + length] = chance.choice(
                (b"77777777777\0", b"0" * 11 + b"\0", b"-0000000001\0", bytes(12))
            )[:length].ljust(length, b"7")
            block[156:157] = chance.choice((b"0", b"0", b"1", b"5", b"x", b"L", b"S", b"g", b"\0"))
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block[:512])
            return data[:at] + bytes(block[:512]) + data[at + 512 :]
        case 2 if 0 <= manifest < end:
            text = change_json(chance, data[manifest : end + 1])
            return data[:manifest] + text.ljust(end + 1 - manifest, b" ") + data[end + 1 :]
        case _:
            return change_bytes(chance, data)


# What is fuzzed


def entries() -> Target:
    keys = [
        Key.of("program", {"program": "sha256:1", "flags": "", "positions": None}),
        Key.of("plan", {"i": 7, "b": True}),
    ]
    corpus = [encode(k, b"code" * n, {"line": "train.py:3", "build_ms": 2.5}) + b"code" * n for n, k in enumerate(keys)]

    def read(data: bytes) -> bool:
        try:
            found = decode_whole(data)
        except DamagedEntry:
            return False
        assert decode_whole(encode(found.key, found.payload, found.note) + found.payload) == found
        assert Key.of(found.key.kind, dict(found.key.parts)).kind == found.key.kind
        return True

    return Target(corpus, change_entry, read)


def bundles() -> Target:
    with tempfile.TemporaryDirectory() as folder:
        store = DirectoryStore(Path(folder) / "cache")
        for number in range(2):
            store.put(Key.of("program", {"i": number}), b"code" * 9, {"line": "train.py:3"})
        os.chmod(folder, 0o700)
        assert export_bundle(store, Path(folder) / "bundle", secret=b"secret") == (2, ())
        content = (Path(folder) / "bundle").read_bytes()
    descriptor = os.memfd_create("bundle")
    nothing = NullStore("fuzzed")

    def read(data: bytes) -> bool:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, data, 0)
        try:
            done = take_bundle(nothing, f"/proc/self/fd/{descriptor}", trusts=True)
        except BundleError:
            return False
        assert all(isinstance(name, str) and isinstance(why, str) for name, why in done.refused)
        return True

    return Target([content.rstrip(b"\0") + bytes(1024)], change_bundle, read)


def manifests() -> Target:
    import program_samples

    from torchtpu.runtime.ir import manifest

    programs = [program_samples.PROGRAM, program_samples.at_an_offset()]
    recorded = [manifest.RecordedProgram(program, guessed_since="train.py:1") for program in programs]
    corpus = [json.dumps(manifest._encode_recorded(one)).encode() for one in recorded]

    def read(data: bytes) -> bool:
        try:
            found = manifest.decode_recorded(manifest.parsed(data))
        except ValueError:
            return False
        assert repr(manifest.decode(manifest.encode(found.program))) == repr(found.program)
        assert found.identity
        str(found.program)
        return True

    return Target(corpus, change_json, read)


def plans() -> Target:
    """What plans, fragments, places of clusters and programs that grew are kept as, the kind before each."""
    import engine_support
    import program_samples
    import record_support
    import torch

    from torchtpu.runtime.compile import plan_cache
    from torchtpu.runtime.ir import manifest
    from torchtpu.runtime.lowering import fragments
    from torchtpu.runtime.partition.clusters import Places

    programs = {b"p": program_samples.recorded(), b"q": program_samples.at_an_offset()}
    ops = {op.name: op for program in programs.values() for op in program.ops}
    with tempfile.TemporaryDirectory() as folder:
        store = DirectoryStore(folder)
        engine = engine_support.make_engine(store=store)
        try:
            for program in programs.values():
                engine.plans.find(program, is_flat=False)
            found = [file.read() for file in store.entries()]
        finally:
            engine.close()
    corpus = []
    for entry in found:
        if entry.key.kind == "plan":
            names = [name for name, program in programs.items() if len(program.ops) == entry.note["ops"]]
            corpus.append(names[0] + entry.payload)
        elif entry.key.kind == "fragment" and len(entry.payload) < 1500:
            corpus.append(b"f" + json.dumps([entry.note["op"], json.loads(entry.payload)]).encode())
    assert {data[:1] for data in corpus} == {b"p", b"q", b"f"}
    with record_support.Record() as record:
        x = record.input(torch.randn(2, 3))
        for _ in range(3):
            x = (x + 1) * x
        repeated = record.program(x)
    runs = Places([*range(6)], {0: [~0]}, [range(0, 6, 2)], 9)
    corpus.append(b"c" + plan_cache._encode_places(runs))
    corpus.append(b"g" + json.dumps([manifest.encode(programs[b"q"])]).encode())

    def change(chance: random.Random, data: bytes) -> bytes:
        return data[:1] + change_json(chance, data[1:])

    def read(data: bytes) -> bool:
        kind, content = data[:1], data[1:]
        try:
            if kind in programs:
                made = plan_cache._decode(content, programs[kind])
                assert len(made.sources) == len(programs[kind].outputs)
            elif kind == b"f":
                name, fields = manifest.items(manifest.parsed(content), 2)
                op = ops.get(name) if isinstance(name, str) else None
                if op is None:
                    return False
                fragments._decode(json.dumps(fields).encode(), op)
            elif kind == b"c":
                plan_cache._decode_clusters(content, repeated, repeated.ops)
            elif kind == b"g":
                plan_cache._decode_samples(content)
        except ValueError:
            return False
        return True

    return Target(corpus, change, read)


def target(kind: str) -> Target:
    return {"entries": entries, "plans": plans, "manifests": manifests, "bundles": bundles}[kind]()


# Running


def seed_of_commit() -> str:
    """Another seed for each commit, so that the short runs of many commits together are a long one."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, check=False)
    return found.stdout.decode().strip()[:12] or "none"


def input_of(tried: Target, seed: str, number: int) -> bytes:
    chance = random.Random(f"{seed} {number}")
    data = chance.choice(tried.corpus)
    for _ in range(chance.choice((1, 1, 2))):
        data = tried.change(chance, data)
    return data


def run(tried: Target, seed: str, start: int, count: int) -> tuple[int, list[Crash]]:
    """How many of these inputs were taken, and the first that crashed."""
    for data in tried.corpus:
        assert tried.read(data), "a real file is not taken"
    taken, crashes = 0, list[Crash]()
    for number in range(start, start + count):
        data = input_of(tried, seed, number)
        try:
            taken += tried.read(data)
        except Exception:  # any of them is a find
            crashes.append(Crash(number, data, traceback.format_exc()))
            if len(crashes) == 20:
                break
    return taken, crashes


def report(kind: str, seed: str, crash: Crash) -> str:
    """The crash, and how to see it again."""
    again = f"python tests/fuzz_cache.py {kind} --seed {seed} --start {crash.number} --count 1"
    return f"{crash.error}\n{crash.data[:2000]!r}\nagain: {again}"


def run_guided(kind: str, options: list[str]) -> None:
    import atheris

    tried = target(kind)
    for module in [m for name, m in sys.modules.items() if name.startswith(GUIDED)]:
        for found in vars(module).values():
            for function in (found, *(vars(found).values() if isinstance(found, type) else ())):
                if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                    atheris.instrument_func(function)
    folder = Path(tempfile.mkdtemp())
    for number, data in enumerate(tried.corpus):
        (folder / str(number)).write_bytes(data)

    def change(data: bytes, most: int, seed: int) -> bytes:
        return tried.change(random.Random(seed), data or tried.corpus[0])[:most]

    atheris.Setup([sys.argv[0], str(folder), *options], tried.read, custom_mutator=change)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seed", default=seed_of_commit())
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--atheris", action="store_true")
    chosen, rest = parser.parse_known_args()
    if chosen.atheris:
        run_guided(chosen.kind, rest)
        return
    tried = target(chosen.kind)
    started = time.process_time()
    taken, crashes = run(tried, chosen.seed, chosen.start, chosen.count)
    for crash in crashes:
        print(report(chosen.kind, chosen.seed, crash))
    seconds = f"{time.process_time() - started:.0f} s"
    print(f"{chosen.kind}, seed {chosen.seed}: {chosen.count} inputs, {taken} taken, {len(crashes)} crashes, {seconds}")
    sys.exit(bool(crashes))


if __name__ == "__main__":
    main()
