"""A key differs exactly when the compiled code would."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import cache_support
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxlib import xla_client

from torchtpu.compiler_cache import (
    DirectoryStore,
    Key,
    Target,
    canonical_text,
    compiler_line,
    difference,
    explain,
    fingerprint,
    host_cpu_features,
    program_digest,
    program_key,
)
from torchtpu.compiler_cache.target import canonical_options

home = pytest.fixture(cache_support.home)
store = pytest.fixture(cache_support.store)

CPU = Target("cpu", "cpu", "jaxlib 0.10.2 | cpu", host_features=("x86_64", "avx2", "fma"))
TPU = Target("tpu", "TPU v5 lite", "jaxlib 0.10.2 | Built on a day cl/1", topology="2x2")
PROGRAM = 'module @m {\n  func.func public @main() {\n    return loc("a.py":1:0)\n  }\n}\n'


def key_of(program: str, target: Target, **how: Any) -> Key:
    return program_key(program_digest(program), target, **how)


# Keys


def test_a_key_is_the_same_whatever_the_order_of_its_parts() -> None:
    assert Key.of("plan", {"a": 1, "b": "x"}) == Key.of("plan", {"b": "x", "a": 1})
    assert Key.of("plan", {"a": 1}).digest != Key.of("program", {"a": 1}).digest
    assert Key.of("plan", {"a": 1}).digest != Key.of("plan", {"a": "1"}).digest
    assert Key.of("plan", {"a": True}) != Key.of("plan", {"a": 1}) != Key.of("plan", {"a": "1"})
    assert len(difference(Key.of("plan", {"a": 1, "b": True}), Key.of("plan", {"a": "1", "b": 1}))) == 2


def test_a_keys_digest_does_not_change_between_versions() -> None:
    key = Key.of("fragment", {"op": "add.Tensor", "shape": "2x3", "weak": False, "none": None, "text": "é" * 9000})
    assert key.digest == "87de0b20a464db23e104827fe027b640c85860d615163e2e0014b110aabff4ba"


PARTS = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name != "kind"),
    st.one_of(st.text(max_size=20), st.binary(max_size=20), st.integers(), st.booleans(), st.none()),
    max_size=5,
)


@given(PARTS, PARTS)
def test_keys_are_equal_exactly_when_nothing_differs(left: dict[str, Any], right: dict[str, Any]) -> None:
    one, two = Key.of("plan", left), Key.of("plan", right)
    assert Key.decode(one.encoded) == one
    assert (one.digest == two.digest) == (one == two) == (difference(one, two) == ())


@pytest.mark.parametrize(
    "encoded", [b"", b"{}", b"[]", b"null", b'{"kind":1,"parts":{}}', b'{"kind":"a","parts":{"x":[]}}', b"[" * 10**5]
)
def test_what_is_no_key_is_refused(encoded: bytes) -> None:
    with pytest.raises(ValueError):
        Key.decode(encoded)
    with pytest.raises(ValueError):
        Key.decode(b" " + Key.of("plan", {}).encoded)


def test_explain_names_only_what_differs() -> None:
    left = Key.of("program", {"options": "3.4=1 3.5=1 7=x00", "program": b"one", "gone": 1, "same": "x"})
    right = Key.of("program", {"options": "3.4=2 3.5=1 7=x00", "program": b"three", "same": "x"})
    lines = explain(left, right).splitlines()
    assert lines[0] == "gone: 1 -> absent"
    assert lines[1] == "options: 3.4=1 -> 3.4=2"
    assert lines[2].startswith("program: sha256:")
    assert lines[2].endswith("(5 bytes)")
    assert len(lines) == 3
    assert explain(left, left) == "equal keys"


def test_the_nearest_entry_is_found(store: DirectoryStore) -> None:
    for i in range(5):
        store.put(Key.of("program", {"a": i, "b": i}), b"code")
    store.put(Key.of("plan", {"a": 3, "b": 7}), b"plan")
    found = store.nearest(Key.of("program", {"a": 3, "b": 7}))
    assert found is not None
    assert [(part.name, part.left, part.right) for part in found.differences] == [("b", "3", "7")]
    assert store.nearest(Key.of("fragment", {"a": 3})) is None


def test_a_fingerprint_changes_with_each_source_and_version() -> None:
    base = fingerprint([b"a", b"bc"], {"torch": "2.13"})
    others = [
        fingerprint([b"ab", b"c"], {"torch": "2.13"}),
        fingerprint([b"bc", b"a"], {"torch": "2.13"}),
        fingerprint([b"a", b"bc"], {"torch": "2.14"}),
    ]
    assert len({base, *others}) == 4


# Program text


def test_text_without_locations_is_the_text_that_had_some() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.numpy.sin(x @ x.T).sum() + 1

    lowered = jax.jit(step).lower(np.ones((3, 3), np.float32))
    plain, located = lowered.as_text(), lowered.as_text(debug_info=True)
    assert "loc(" in located
    assert canonical_text(located) == canonical_text(plain) == plain.rstrip("\n")


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ('%0 = "op"(%1) : f32 loc("a.py":1:0)', '%0 = "op"(%1) : f32'),
        ('f(%a: i1 loc("x"), %b: i1 loc(#loc2)) {', "f(%a: i1, %b: i1) {"),
        ('x loc(callsite("f"("a.py":1:2) at "b)":3:4)) y', "x y"),
        ('#loc = loc(unknown)\n#loc12 = loc("a")\nx', "x"),
        ("x // a comment\n\n  y  \n", "x\n  y"),
        ('{s = "loc(not one) // nor this \\" loc("}', '{s = "loc(not one) // nor this \\" loc("}'),
        ("call @loc(%0) // x", "call @loc(%0)"),
        ("%alloc(1) loc(unknown)", "%alloc(1)"),
        ("x loc(", "x"),
    ],
)
def test_only_locations_comments_and_blanks_go(text: str, canonical: str) -> None:
    assert canonical_text(text) == canonical
    assert canonical_text(canonical) == canonical


# Options


def options(change: Callable[[Any], None] = lambda options: None) -> bytes:
    made = xla_client.CompileOptions()
    change(made)
    return made.SerializeAsString()


def on_device(*devices: int) -> bytes:
    def change(made: Any) -> None:
        made.num_replicas = len(devices)
        made.device_assignment = xla_client.DeviceAssignment.create(np.array(devices).reshape(-1, 1))

    return options(change)


def debug(**values: object) -> bytes:
    def change(made: Any) -> None:
        for name, value in values.items():
            setattr(made.executable_build_options.debug_options, name, value)

    return options(change)


def test_device_ids_and_dumps_are_not_in_the_key() -> None:
    assert on_device(0) != on_device(1)
    assert canonical_options(on_device(0)) == canonical_options(on_device(1))
    assert canonical_options(on_device(0)) != canonical_options(on_device(0, 1))
    assert canonical_options(debug(xla_dump_to="/tmp/x", xla_dump_hlo_as_text=True)) == canonical_options(options())
    assert canonical_options(debug(xla_dump_hlo_module_re="main")) == canonical_options(options())


def test_options_that_change_code_are_in_the_key() -> None:
    def overrides(*pairs: tuple[str, Any]) -> bytes:
        return options(lambda made: setattr(made, "env_option_overrides", list(pairs)))

    different = [
        options(),
        debug(xla_cpu_enable_fast_math=True),
        debug(xla_backend_optimization_level=1),
        overrides(("xla_tpu_a", True)),
        overrides(("xla_tpu_a", False)),
        on_device(0, 1),
    ]
    assert len({key_of(PROGRAM, TPU, options=one).digest for one in different}) == len(different)
    orders = overrides(("xla_a", 1), ("xla_b", 2)), overrides(("xla_b", 2), ("xla_a", 1))
    assert canonical_options(orders[0]) == canonical_options(orders[1])
    explained = explain(*(key_of(PROGRAM, TPU, options=one) for one in different[:2]))
    assert explained == "options: 3.3.99=0 -> 3.3.99=1"


@given(st.binary(max_size=60))
def test_what_are_no_options_is_a_value_error(serialized: bytes) -> None:
    with suppress(ValueError):
        assert isinstance(canonical_options(serialized), str)


# Targets


def test_program_keys_do_not_change_between_versions() -> None:
    """A digest that changes here makes every stored program a miss: change it on purpose only."""
    assert (
        key_of(PROGRAM, CPU, options=b"\x20\x01").digest
        == "e9ff0703a8f690973a3fb5513f08965cb40f31e24ea198a93f7b712cf04e6ac8"
    )
    assert (
        key_of(PROGRAM, TPU, options=b"\x20\x01", positions=(0, 1)).digest
        == "87698002903575fbb8d71cd7be7607bd331d58386cb9d51df18b513b9aa66edd"
    )


def test_a_tpus_key_does_not_depend_on_the_machine_that_compiles() -> None:
    for spoofed in (replace(TPU, host_features=("sse2",)), replace(TPU, host_features=("x86_64", "avx512f"))):
        assert key_of(PROGRAM, spoofed) == key_of(PROGRAM, TPU)
    assert key_of(PROGRAM, replace(CPU, host_features=("sse2",))) != key_of(PROGRAM, CPU)
    assert key_of(PROGRAM, replace(CPU, host_features=("fma", "avx2", "x86_64"))) == key_of(PROGRAM, CPU)


def test_the_topology_counts_for_collectives_only() -> None:
    larger = replace(TPU, topology="4x4")
    assert key_of(PROGRAM, larger) == key_of(PROGRAM, TPU)
    assert key_of(PROGRAM, larger, positions=(0, 1)) != key_of(PROGRAM, TPU, positions=(0, 1))
    assert key_of(PROGRAM, TPU, positions=(1, 0)) != key_of(PROGRAM, TPU, positions=(0, 1))


@pytest.mark.parametrize("changed", ["device_kind", "compiler", "platform"])
def test_each_field_of_a_target_counts(changed: str) -> None:
    other = key_of(PROGRAM, replace(TPU, **{changed: "another"}))
    assert [part.name for part in difference(key_of(PROGRAM, TPU), other)] == [changed]


def test_moving_the_source_changes_no_key_and_changing_the_program_does() -> None:
    moved = PROGRAM.replace('"a.py":1:0', '"models/b.py":70:3')
    assert key_of(moved, TPU) == key_of(PROGRAM, TPU)
    assert [part.name for part in difference(key_of(PROGRAM + "x", TPU), key_of(PROGRAM, TPU))] == ["program"]


def test_flags_count_by_what_the_compiler_takes() -> None:
    def with_flags(*flags: str) -> Key:
        return key_of(PROGRAM, TPU, flags=flags)

    assert with_flags("--a=1", "--b=2") == with_flags("--b=2", "--a=0", "", "--a=1")
    assert with_flags("--a=1", "--xla_dump_to=/tmp/x") == with_flags("--a=1")
    assert explain(with_flags("--a=1", "--b=2"), with_flags("--a=2", "--b=2")) == "flags: --a=1 -> --a=2"


def test_the_compilers_line_leaves_the_client_out() -> None:
    chip = "PJRT C API\nTFRT TPU v5 lite\nBuilt on Nov 5 2025 17:35:54 (1762392954) cl/828472571"
    compile_only = "PJRT C API\nBuilt on Nov 5 2025 17:35:54 (1762392954) cl/828472571"
    assert compiler_line("0.10.2", chip) == compiler_line("0.10.2", compile_only)
    assert compiler_line("0.10.2", "cpu") == "jaxlib 0.10.2 | cpu"
    assert compiler_line("0.10.2", chip) != compiler_line("0.10.3", chip)


def test_host_features_are_instruction_sets_that_all_cores_have() -> None:
    text = (
        "processor: 0\nflags\t\t: avx2 fma hypervisor ibrs sse2 amx_new\nprocessor: 1\nflags : sse2 avx2 amx_new pti\n"
    )
    assert host_cpu_features(text)[1:] == ("amx_new", "avx2", "sse2")
    assert host_cpu_features() == host_cpu_features()
    assert json.dumps(host_cpu_features())
