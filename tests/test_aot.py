"""What the TPU compiler refuses of the lowerings, and what the cost estimate leaves out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aot_check
import lowering_check
import pytest
import torch
from jax.errors import JaxRuntimeError
from script import compiled_for

from torchtpu.compiler_cache import Target, compiler_line, program_digest
from torchtpu.runtime.device.chips import CHIPS, devices_of_host, find_chip
from torchtpu.runtime.device.client import Client, key_of
from torchtpu.runtime.telemetry.cost import arrays, cost_of, estimate, text_of
from torchtpu.runtime.telemetry.traffic import traffic

needs_libtpu = pytest.mark.skipif(
    not aot_check.HAS_LIBTPU, reason="the TPU compiler is not installed: pip install 'torchtpu[aot]'"
)
CORE = {"add.Tensor", "mm", "convolution", "sum.dim_IntList", "_softmax", "gather", "sort", "index.Tensor"}
INTEGERS = {"mm", "bmm", "addmm", "dot", "linear", "convolution", "_trilinear"}
# Their algorithm for TPUs is compiled for TPUs alone.
TPU_ONLY = {"_linalg_svd", "linalg_lstsq"}


@needs_libtpu
@pytest.mark.timeout(900)
def test_core_lowerings_compile_for_v5e() -> None:
    samples = aot_check.collect({*CORE, *TPU_ONLY}, [torch.float32])
    assert {sample.name for sample in samples} == {*CORE, *TPU_ONLY}
    samples += aot_check.collect(INTEGERS, [torch.int64], in_all=2)
    compiler = aot_check.Compiler("v5e")
    try:
        assert {sample.shown: error for sample, error in aot_check.refused(samples, compiler.compile)} == {}
    finally:
        compiler.close()


COMPILE_IN_TIERS = """
import json, sys
import jax
from torchtpu.runtime.compile.aot import AotClient
from torchtpu.runtime.compile.tiers import FIRST_TIERS
from torchtpu.runtime.device.client import key_of

target, size = sys.argv[1], json.loads(sys.argv[2])["size"]
x = jax.ShapeDtypeStruct((size, size), "float32")
text = jax.jit(lambda x, y: jax.nn.gelu(x @ y) + y).trace(x, x).lower(lowering_platforms=("tpu",)).as_text()
client, tiers = AotClient(target), ((), FIRST_TIERS["tpu"].options)
built = [client.compile(text, (), options) for options in tiers]
keys = [key_of("sha256:0", client, (), options).digest for options in tiers]
print(json.dumps({"cycles": [each.cost.cycles for each in built], "keys": keys}))
"""


@needs_libtpu
@pytest.mark.timeout(600)
def test_libtpu_compiles_otherwise_in_the_first_tier() -> None:
    found = compiled_for("v5e", COMPILE_IN_TIERS, {"size": 1024})
    usual, first = found["cycles"]
    assert 0 < usual < first
    assert len(set(found["keys"])) == 2


@needs_libtpu
@pytest.mark.full
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("target", ["v5e", "v6e", "v5p", "tpu7x"])
def test_every_lowering_compiles_for_tpus(target: str) -> None:
    done = subprocess.run(
        [sys.executable, aot_check.__file__, "--target", target, "--dtypes", "float32,bfloat16,int64"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def _depends_on_platform(name: str, lowerings: dict[str, lowering_check.Any]) -> bool:
    module = sys.modules[lowerings[name].function.__module__]
    assert module.__file__ is not None
    return "ctx.platform" in Path(module.__file__).read_text()


@pytest.mark.timeout(900)
def test_what_tpus_compute_in_another_way_is_what_the_cpu_computes() -> None:
    """A lowering that asks for its platform is traced as on a TPU and runs on the CPU."""
    lowerings = lowering_check.load_ops()
    targets = {name for name in lowerings if _depends_on_platform(name, lowerings)} - TPU_ONLY
    assert "convolution" in targets
    check = lowering_check.Check(targets, per_op=2, in_all=6, platform="tpu")
    names = lowering_check.names_reaching(targets, lowerings, 1)
    lowering_check.run_samples(check, [*names, "extra"], [torch.float32], 2, backward=True)
    lowering_check.run_samples(check, [*names, "extra"], [torch.int64], 2, backward=False)
    assert {name: outcome.failures for name, outcome in check.outcomes.items() if outcome.failures} == {}
    assert sum(1 for outcome in check.outcomes.values() if outcome.checked) > len(targets) / 2


# Targets


@pytest.mark.parametrize(
    ("target", "kind", "devices"),
    [
        ("v5e", "TPU v5 lite", 4),
        ("v5e:1x1", "TPU v5 lite", 1),
        ("v5e:4x8", "TPU v5 lite", 8),
        ("v5p:4x4x4", "TPU v5", 4),
        ("v6e:2x4", "TPU v6 lite", 8),
        ("v4", "TPU v4", 4),
        ("tpu7x", "TPU7x", 8),
    ],
)
def test_a_target_names_a_chip_and_a_topology(target: str, kind: str, devices: int) -> None:
    chip, topology = find_chip(target)
    assert chip.kind == kind
    assert devices_of_host(chip, topology) == devices


@pytest.mark.parametrize("target", ["v3", "v7x:2x2x1", "", "v5e:2x2x1", "v5p:2x2", "v5e:2xtwo", "v5e:"])
def test_what_is_no_target_is_refused(target: str) -> None:
    if target == "v5e:":
        assert find_chip(target)[1] == "2x2"
        return
    with pytest.raises(ValueError, match=r"v5e|topology"):
        find_chip(target)


class Chipless:
    """What a key needs of a compile-only client; `Client` with chips gives the same."""

    line = compiler_line("0.10.2", "PJRT C API\nBuilt on a day (1) cl/2")
    target = Target("tpu", "TPU v5 lite", line, topology="2x4")

    def options(self, device: int, homes: tuple[int, ...] = (), more: Any = ()) -> bytes:
        return Client("cpu").options(device, homes, more)


class WithChips(Chipless):
    target = Target(
        "tpu",
        "TPU v5 lite",
        compiler_line("0.10.2", "PJRT C API\nTFRT TPU v5 lite\nBuilt on a day (1) cl/2"),
        host_features=("x86_64", "amx"),
    )


def test_a_program_has_one_key_with_chips_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_use_enhanced_launch_barrier=true --a=1")  # jax adds the first
    with_chips = key_of(program_digest("module {}"), WithChips())
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--a=1")
    assert key_of(program_digest("module {}"), Chipless()) == with_chips
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--a=2")
    assert key_of(program_digest("module {}"), Chipless()) != with_chips


@needs_libtpu
def test_the_topologies_of_libtpu_are_the_chips_that_are_known() -> None:
    """Kind and number of devices, as the compile-only client has them."""
    code = (
        "from torchtpu.runtime.compile.aot import AotClient\n"
        "for name in ('v4', 'v5e', 'v5p', 'v6e', 'tpu7x'):\n"
        "    client = AotClient(name)\n"
        "    print(name, client.target.device_kind, len(client.devices), sep='|')\n"
        "try:\n"
        "    AotClient('v5e:3x3')\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    from torchtpu.runtime.compile.aot import environment

    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    expected = [f"{c.name}|{c.kind}|{devices_of_host(c, c.topology)}" for c in CHIPS.values() if c.name != "v3"]
    assert done[:-1] == expected
    assert "not divisible" in done[-1]


# Costs

HLO = """HloModule jit_f, is_scheduled=true

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  ROOT %fusion.1 = f32[8]{0:T(256)} fusion(%p), kind=kLoop, calls=%x, backend_config={"estimated_cycles":"100"}
}

%compare (a: s32[]) -> pred[] {
  %bound = s32[]{:T(128)} constant(7)
  ROOT %lt = pred[] compare(%a, %bound), direction=LT, backend_config={"estimated_cycles":"1"}
}

%condition (p.1: (s32[], f32[8])) -> pred[] {
  ROOT %fusion.2 = pred[]{:T(512)} fusion(%p.1), kind=kLoop, calls=%compare, backend_config={"estimated_cycles":"2"}
}

%cheap (q: f32[8]) -> f32[8] {
  ROOT %fusion.3 = f32[8]{0} fusion(%q), kind=kLoop, calls=%x, backend_config={"estimated_cycles":"10"}
}

%dear (r: f32[8]) -> f32[8] {
  %r = f32[8]{0} parameter(0)
  %sorted = f32[8]{0} sort(%r), dimensions={0}, to_apply=%x
  ROOT %fusion.4 = f32[8]{0} fusion(%sorted), kind=kLoop, calls=%x, backend_config={"estimated_cycles":"20"}
}

%until (s: f32[8]) -> pred[] {
  ROOT %any = pred[] fusion(%s), kind=kLoop, calls=%x, backend_config={"estimated_cycles":"3"}
}

ENTRY %main.9 (arg: f32[8]) -> f32[8] {
  %arg = f32[8]{0:T(256)} parameter(0)
  %while.1 = (s32[], f32[8]{0}) while(%arg), condition=%condition, body=%body
  %conditional.1 = f32[8]{0} conditional(%i, %arg, %arg), branch_computations={%cheap, %dear}
  %while.2 = f32[8]{0} while(%conditional.1), condition=%until, body=%cheap
  %number = s32[]{:T(128)} add(%i, %i)
  ROOT %reshape.1 = f32[2,4]{1,0:T(8,128)} reshape(%while.2)
}
"""


class Unreadable:
    """An executable whose module jaxlib cannot read."""

    def cost_analysis(self) -> dict[str, float]:
        return {"flops": 8.0, "bytes accessed": -1.0}

    def get_compiled_memory_stats(self) -> SimpleNamespace:
        names = ("argument", "output", "alias", "temp", "generated_code")
        return SimpleNamespace(**{f"{name}_size_in_bytes": 10**i for i, name in enumerate(names)})

    def hlo_modules(self) -> list[str]:
        raise JaxRuntimeError("INTERNAL: RET_CHECK failure")


def test_a_module_that_cannot_be_read_costs_what_else_is_known() -> None:
    cost = cost_of(Unreadable(), CHIPS["v6e"], text_of(Unreadable()))
    assert (cost.cycles, cost.flops, cost.bytes_accessed) == (0, 8.0, 0.0)
    assert cost.gaps == {"module that jaxlib cannot read": 1}
    assert cost.peak_bytes == 1 + 10 - 100 + 1000 + 10000


def test_cycles_count_loops_by_their_trips_and_name_what_they_leave_out() -> None:
    found = estimate(HLO)
    assert found.cycles == 7 * (100 + 2) + 20 + (10 + 3)
    assert found.gaps == {"reshape": 1, "sort": 1, "while of unknown count": 1}
    assert found.unpriced_bytes == (32 + 32) + (32 + 32)  # the sort and the reshape


@pytest.mark.parametrize(
    ("types", "sizes"),
    [
        ("f32[2,4]{1,0:T(8,128)}", [32]),
        ("(s32[], bf16[3]{0}, pred[5])", [4, 6, 5]),
        ("c64[2]", [16]),
        ("f8e4m3fn[7]", [7]),
        ("u4[3]", [2]),
        ("token[]", []),
    ],
)
def test_types_have_their_bytes(types: str, sizes: list[int]) -> None:
    assert arrays(types) == sizes


JOB = """HloModule region, is_scheduled=true, replica_count=8

%begin (p: bf16[1,128]) -> (bf16[1,128], bf16[8,128], u32[]) {
  %p = bf16[1,128] parameter(0)
  %all-gather.1 = bf16[8,128] all-gather(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  ROOT %custom-call.1 = (bf16[1,128], bf16[8,128], u32[]) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (q: bf16[1,128], r: bf16[8,128]) -> (f32[4], bf16[8,128]) {
  %q = bf16[1,128] parameter(0)
  %all-gather.2 = bf16[8,128] all-gather(%q), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  ROOT %pair = (f32[4], bf16[8,128]) tuple(%q, %all-gather.2)
}

%end (s: bf16[1,128], t: bf16[8,128]) -> bf16[8,128] {
  %s = bf16[1,128] parameter(0)
  %all-gather.3 = bf16[8,128] all-gather(%s), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  ROOT %custom-call.2 = bf16[8,128] custom-call(%s, %all-gather.3), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter (u: bf16[16,128]) -> bf16[2,128] {
  %u = bf16[16,128] parameter(0)
  %all-reduce.1 = bf16[16,128] all-reduce(%u), replica_groups=[1,8]<=[8], to_apply=%sum
  ROOT %mine = bf16[2,128] dynamic-slice(%all-reduce.1)
}

ENTRY %main (arg: bf16[1,128]) -> f32[2,128] {
  %arg = bf16[1,128] parameter(0)
  %start = (bf16[1,128], bf16[8,128], u32[]) fusion(%arg), kind=kCustom, calls=%begin
  %one = bf16[1,128] get-tuple-element(%start), index=0
  %many = bf16[8,128] get-tuple-element(%start), index=1
  %both = (f32[4], bf16[8,128]) fusion(%one, %many), kind=kOutput, calls=%async_collective_fusion.1, backend_config={"estimated_cycles":"CYCLES"}
  %rest = bf16[8,128] get-tuple-element(%both), index=1
  %done = bf16[8,128] fusion(%one, %rest), kind=kCustom, calls=%end
  %scattered = bf16[2,128] fusion(%done), kind=kCustom, calls=%all-reduce-scatter, backend_config={"estimated_cycles":"9"}
  ROOT %total = f32[2,128] all-reduce(%scattered), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%sum
}
"""  # noqa: E501 -- as the compiler writes it


def test_a_collective_is_exposed_where_less_runs_beside_it() -> None:
    chip = CHIPS["v5e"]
    gathered, scattered, reduced = 7 * 256, 7 * 2 * 256, 2 * 1024 // 2
    own = [n / chip.link_bytes_per_second for n in (gathered, scattered, reduced)]
    for cycles in (1, 10**6):
        found = traffic(JOB.replace("CYCLES", str(cycles)), chip)
        assert found.beside == {"all-gather": 1}
        assert found.alone == {"all-reduce": 1, "reduce-scatter": 1}
        assert found.nbytes == gathered + scattered + reduced
        assert found.seconds == pytest.approx(sum(own))
        hidden = min(own[0], cycles * chip.seconds_per_cycle)
        assert found.exposed_seconds == pytest.approx(sum(own) - hidden)


def test_a_transfer_is_charged_once_and_for_its_slice_only() -> None:
    text = """HloModule jit_f

ENTRY %main (arg: f32[8,4]) -> f32[2,4] {
  %arg = f32[8,4]{1,0:T(8,128)} parameter(0)
  %slice-start = ((f32[8,4]{1,0}), f32[2,4]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%arg), slice={[0:2], [0:4]}
  ROOT %slice-done = f32[2,4]{1,0:T(8,128)S(1)} slice-done(%slice-start)
}
"""
    assert estimate(text) == (0, 32, {"slice-start": 1})
