"""The key of a program's executable, from its digest, a `Target` and compile options.

The local client and the compile-only client both come here, so that what one stores the other finds.
"""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .key import Key, digest_of

# Field numbers of XLA's CompileOptionsProto; "3" is ExecutableBuildOptionsProto, "3.3" DebugOptions.
_MESSAGES = frozenset({"3", "3.3"})
_MAPS = frozenset({"7", "3.3.357"})
_NOT_IN_KEY = frozenset(
    [
        "3.1",  # device_ordinal
        "3.9",  # device_assignment: positions in the topology stand for it
        "3.3.61",  # xla_gpu_cuda_data_dir
        "3.3.102",  # xla_force_host_platform_device_count
        # xla_dump_*: what the compiler writes beside the executable
        *(f"3.3.{field}" for field in (109, 110, 111, 112, 113, 114, 115, 116, 118, 131, 132, 144, 149, 151, 153, 154)),
        *(f"3.3.{field}" for field in (182, 185, 290, 381, 405, 433)),
    ]
)
_FLAGS_NOT_IN_KEY = (
    "--xla_dump_",
    "--xla_force_host_platform_device_count",
    "--xla_gpu_cuda_data_dir",
    "--xla_tpu_use_enhanced_launch_barrier",  # always given: jax adds it where there are chips
)

# What /proc/cpuinfo lists that is no instruction a compiler emits: it varies with kernel, firmware and hypervisor.
_CPUINFO_NOISE = (
    "acpi amd_lbr_v2 aperfmperf apic arat arch_capabilities arch_lbr arch_perfmon art avic bts bus_lock_detect "
    "cat_l2 cat_l3 cdp_l2 cdp_l3 cmp_legacy constant_tsc cpb cppc cpuid cpuid_fault cqm cqm_llc cqm_mbm_local "
    "cqm_mbm_total cqm_occup_llc cr8_legacy dca de debug_swap decodeassists ds_cpl dtes64 dtherm dts epb ept "
    "ept_ad est extapic extd_apicid flexpriority flush_l1d flushbyasid fsrc fsrm fsrs hfi ht hw_pstate hwp "
    "hwp_act_window hwp_epp hwp_notify hwp_pkg_req hypervisor ibpb ibpb_brtype ibrs ibrs_enhanced ibs ibt ida "
    "intel_ppin intel_pt invpcid_single irperf la57 lbrv lm mba mca mce md_clear monitor msr mtrr mwaitx "
    "nonstop_tsc nopl npt nrip_save nx ospke osvw overflow_recov pae pat pausefilter pbe pcid pconfig pdcm "
    "pdpe1gb pebs perfctr_core perfctr_llc perfctr_nb perfmon_v2 pfthreshold pge pln pse pse36 pti pts rapl "
    "rdt_a rep_good retpoline rsb_ctxsw sep sev sev_es sev_snp skinit smap smca sme smep smx spec_ctrl "
    "split_lock_detect ss ssbd stibp stibp_always_on succor svm svm_lock syscall tm tm2 tme topoext tpr_shadow "
    "tsc tsc_adjust tsc_deadline_timer tsc_known_freq tsc_reliable tsc_scale tsx_force_abort umip user_shstk "
    "v_spec_ctrl v_vmsave_vmload vgif vmcb_clean vme vmmcall vmx vnmi vpid wdt x2apic x2avic xtopology xtpr"
)
_NOT_INSTRUCTIONS = frozenset(_CPUINFO_NOISE.split())

_QUOTED_OR_LOCATION = re.compile(
    r'"(?:[^"\\]|\\.)*"|//[^\n]*|^[ \t]*#loc\d*[ \t]*=[^\n]*\n?|[ \t]*(?<![\w%@#$.!-])loc\(', re.MULTILINE
)
_BRACKET_OR_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|[()]')


@dataclass(frozen=True, slots=True)
class Target:
    """What a program is compiled for.

    `device_kind` and `compiler` are as the client names them (`compiler_line`).  `topology` (as "2x2") counts for
    programs with collectives only, `host_features` for platform "cpu" only; for others they may be anything.
    """

    platform: str
    device_kind: str
    compiler: str
    topology: str = ""
    host_features: tuple[str, ...] = ()


def program_digest(program: str) -> str:
    """What of a program (StableHLO text) stands in its key."""
    return digest_of(canonical_text(program).encode("utf-8", "surrogatepass"))


def program_key(
    digest: str,
    target: Target,
    *,
    options: bytes = b"",
    flags: Iterable[str] = (),
    positions: Sequence[int] | None = None,
) -> Key:
    """The key of the executable of the program with this `program_digest`.

    `options` are the serialized compile options; device ids in them do not count.  `flags` are the compiler's flags
    that come by the environment and are not in `options` (LIBTPU_INIT_ARGS), as "--name=value".  A program with
    collectives names the `positions` of its devices in the topology.
    """
    return Key.of(
        "program",
        {
            "program": digest,
            "platform": target.platform,
            "device_kind": target.device_kind,
            "compiler": target.compiler,
            "options": canonical_options(options),
            "flags": _canonical_flags(flags),
            "topology": None if positions is None else target.topology,
            "positions": None if positions is None else " ".join(map(str, positions)),
            "host_features": " ".join(sorted(set(target.host_features))) if target.platform == "cpu" else None,
        },
    )


def compiler_line(jaxlib_version: str, platform_version: str) -> str:
    """The compiler's build line: jaxlib's version and, for a plugin such as libtpu, the line that dates its build.

    A plugin's other lines name the client, which is not the same for a compile-only client.
    """
    built = [line.strip() for line in platform_version.splitlines() if line.strip().startswith("Built on")]
    return " | ".join([f"jaxlib {jaxlib_version}", *(built or [platform_version.strip()])])


def host_cpu_features(cpuinfo: str | None = None) -> tuple[str, ...]:
    """The instruction sets of this machine's CPU, sorted, its architecture first.

    `cpuinfo` is the text of /proc/cpuinfo; what is read where it is None.  Where there is no such file the CPU's own
    description stands in.
    """
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return (platform.machine(), platform.processor())
    # Only what all cores have: big and little cores of one machine may differ.
    cores = [
        frozenset(value.split())
        for name, _, value in (line.partition(":") for line in cpuinfo.splitlines())
        if name.strip() in ("flags", "Features")
    ]
    common = frozenset.intersection(*cores) if cores else frozenset()
    return (platform.machine(), *sorted(common - _NOT_INSTRUCTIONS))


def canonical_text(program: str) -> str:
    """The program without locations, comments and trailing blanks: what moves when source code moves."""
    if "loc(" not in program and "#loc" not in program and "//" not in program:
        return _stripped(program)
    kept, position = [], 0
    while found := _QUOTED_OR_LOCATION.search(program, position):
        token = found.group()
        kept.append(program[position : found.start()])
        position = found.end()
        if token.startswith('"'):
            kept.append(token)
        elif token.endswith("loc("):
            position = _closing(program, position)
    kept.append(program[position:])
    return _stripped("".join(kept))


@functools.lru_cache(maxsize=16)  # about a millisecond, and a process has few different ones
def canonical_options(serialized: bytes) -> str:
    """Serialized CompileOptionsProto as sorted words "field=value"; ValueError where it is none.

    Left out is what decides nothing about the code: device ids, dump settings, the number of host devices.
    """
    try:
        words = [(path, str(value)) for path, value in _fields(serialized, "") if path not in _NOT_IN_KEY]
    except IndexError as error:
        raise ValueError("not serialized compile options") from error
    # A map's entries have no order of their own; everything else keeps the one it has within its field.
    words.sort(key=lambda word: (_field_numbers(word[0]), word[1] if word[0] in _MAPS else ""))
    return " ".join(f"{path}={value}" for path, value in words)


def _stripped(text: str) -> str:
    return "\n".join(line for line in (line.rstrip() for line in text.splitlines()) if line)


def _closing(text: str, position: int) -> int:
    """Where the bracket that was opened before `position` ends."""
    depth = 1
    for found in _BRACKET_OR_QUOTED.finditer(text, position):
        depth += {"(": 1, ")": -1}.get(found.group(), 0)
        if depth == 0:
            return found.end()
    return len(text)


def _field_numbers(path: str) -> tuple[int, ...]:
    return tuple(map(int, path.split(".")))


def _fields(message: bytes, prefix: str) -> Iterator[tuple[str, int | str]]:
    """Every field of a protobuf message: its path of field numbers, and a number or hexadecimal bytes."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        path, wire = f"{prefix}{tag >> 3}", tag & 7
        if wire == 0:
            number, position = _varint(message, position)
            yield path, number
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"not serialized compile options: wire type {wire} at {path}")
        length, position = _varint(message, position) if wire == 2 else ({1: 8, 5: 4}[wire], position)
        value = message[position : position + length]
        if len(value) != length:
            raise ValueError(f"not serialized compile options: {path} is cut short")
        position += length
        if path in _MESSAGES and wire == 2:
            yield from _fields(value, f"{path}.")
        else:
            yield path, f"x{value.hex()}"


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position


def _canonical_flags(flags: Iterable[str]) -> str:
    """The flags that count, sorted; of a flag given twice the last, as the compiler takes it."""
    chosen = {}
    for flag in flags:
        if flag and not flag.startswith(_FLAGS_NOT_IN_KEY):
            chosen[flag.partition("=")[0]] = flag
    return " ".join(sorted(chosen.values()))
