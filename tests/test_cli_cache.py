"""`torchtpu cache` says what lies in the cache, and `torchtpu doctor` what is wrong here."""

from __future__ import annotations

import importlib.metadata
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from torchtpu import _autoload
from torchtpu.cli import app, doctor
from torchtpu.cli.output import show_count, show_seconds
from torchtpu.compiler_cache import DirectoryStore, Key
from torchtpu.runtime.device.sizes import show_bytes


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DirectoryStore:
    home = tmp_path / "cache"
    home.mkdir(0o700)
    monkeypatch.setenv("TORCHTPU_CACHE_DIR", str(home))
    for name in ("TORCHTPU_CACHE", "TORCHTPU_CACHE_MAX_BYTES", "TORCHTPU_CACHE_TRUSTED_DIRS"):
        monkeypatch.delenv(name, raising=False)
    return DirectoryStore(home)


def key(number: int, platform: str = "cpu") -> Key:
    parts = {"program": f"text {number}", "platform": platform, "options": "3.31=3 3.5=1", "device_kind": platform}
    return Key.of("program", parts)


def fill(store: DirectoryStore) -> list[str]:
    for number in range(3):
        store.put(key(number), b"code" * 100, {"build_ms": 1500.0, "line": f"train.py:{number}"})
    store.put(key(0, "tpu"), b"tpu code", {"build_ms": 2.0})
    store.put(Key.of("fragment", {"op": "add"}), b"text", {"op": "add.Tensor"})
    return [key(number).digest for number in range(3)]


def cache(*words: str, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["cache", *words])
    assert done.exit_code == status, done.output
    return done.output


def cache_json(*words: str, status: int = 0) -> Any:
    return json.loads(cache(*words, "--json", status=status))


def test_entries_are_listed(store: DirectoryStore) -> None:
    digests = fill(store)
    rows = cache_json("ls")
    assert {row["digest"] for row in rows} == {*digests, key(0, "tpu").digest}
    assert len(cache_json("ls", "--all")) == 5
    assert [row["note"]["op"] for row in cache_json("ls", "--kind", "fragment")] == ["add.Tensor"]
    shown = cache("ls", "--limit", "2")
    assert "and 2 more" in shown and "4 entries" in shown
    assert "train.py:1" in cache("ls") and "1.5 s" in cache("ls")
    assert cache("path").strip() == str(store.directory)


def test_info_shows_the_cache_or_one_entry(store: DirectoryStore) -> None:
    digests = fill(store)
    whole = cache_json("info")
    assert (whole["programs"], whole["fragments"], whole["writable"]) == (4, 1, True)
    one = cache_json("info", digests[0][:16])
    assert one["key"]["platform"] == "cpu" and one["note"]["line"] == "train.py:0"
    assert "train.py:0" in cache("info", digests[0])
    assert "no entry" in cache("info", "ffff" * 8, status=1)


def test_explain_names_the_parts_that_differ(store: DirectoryStore) -> None:
    fill(store)
    here, there = key(0).digest, key(0, "tpu").digest
    found = cache_json("explain", here, there)
    assert [part["name"] for part in found["differences"]] == ["device_kind", "platform"]
    assert "platform: cpu -> tpu" in cache("explain", here, there)
    nearest = cache_json("explain", here)
    assert [part["name"] for part in nearest["differences"]] == ["program"]


def test_verify_finds_and_deletes_damage(store: DirectoryStore) -> None:
    digests = fill(store)
    assert cache_json("verify") == {"entries": 5, "damaged": [], "deleted": False}
    assert store.directory is not None
    (path,) = store.directory.glob(f"v1/program/*/{digests[0]}")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    found = cache_json("verify", status=1)
    assert [row["digest"] for row in found["damaged"]] == [digests[0]]
    assert "1 damaged" in cache("verify", status=1)
    cache("verify", "--delete")
    assert cache_json("verify")["entries"] == 4


def test_prune_deletes_down_to_a_size(store: DirectoryStore) -> None:
    fill(store)
    assert cache_json("prune")["deleted"] == 0
    assert cache_json("prune", "--max-bytes", "9K") == {"deleted": 3, "entries": 2, "nbytes": 8192}
    assert cache_json("prune", "--max-bytes", "0")["entries"] == 0
    assert "expected a size" in cache("prune", "--max-bytes", "many", status=2)


def test_pipes_and_directories_among_the_entries_are_damage(store: DirectoryStore, tmp_path: Path) -> None:
    digests = fill(store)
    paths = {file.digest: file.path for file in store.entries()}
    for digest in digests[:2]:
        paths[digest].unlink()
    os.mkfifo(paths[digests[0]])
    paths[digests[1]].mkdir()
    answers: list[Any] = []

    def ask() -> None:
        answers.append(len(cache_json("verify", status=1)["damaged"]))
        answers.append(sum("damaged" in row for row in cache_json("ls")))
        answers.append(cache("info", digests[0], status=1))
        answers.append(cache("explain", digests[0], status=1))
        answers.append(len(cache_json("export", str(tmp_path / "bundle"))["left_out"]))
        answers.append(cache("verify", "--delete", status=1))

    asking = threading.Thread(target=ask, daemon=True)  # before, it waited for somebody to write into the pipe
    asking.start()
    asking.join(120)
    assert answers[:2] == [2, 2]
    assert "not a regular file" in answers[2]
    assert "not a regular file" in answers[3]
    assert answers[4] == 2
    assert "2 damaged, 1 of them deleted" in answers[5]
    assert not paths[digests[0]].exists()


def test_a_bundle_moves_entries(store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store)
    (tmp_path / "secret").write_text("of the team\n")
    signed, plain = str(tmp_path / "signed"), str(tmp_path / "plain")
    assert cache_json("export", signed, "--secret", str(tmp_path / "secret"))["entries"] == 5
    assert cache_json("export", plain, "--platform", "tpu")["entries"] == 1
    (tmp_path / "other").mkdir(0o700)
    monkeypatch.setenv("TORCHTPU_CACHE_DIR", str(tmp_path / "other"))
    assert "--secret FILE or --trust" in cache("import", plain, status=1)
    assert cache_json("import", plain, "--trust") == {"stored": 1, "present": 0, "refused": []}
    assert cache_json("import", signed, "--secret", str(tmp_path / "secret"))["stored"] == 4
    (tmp_path / "secret").write_text("of another team")
    assert "another secret" in cache("import", signed, "--secret", str(tmp_path / "secret"), status=1)
    assert "cannot be read" in cache("import", str(tmp_path / "missing"), "--trust", status=1)


def test_without_a_cache_the_commands_say_why(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHTPU_CACHE", "off")
    assert "TORCHTPU_CACHE=off" in cache("ls", status=1)
    monkeypatch.setenv("TORCHTPU_CACHE", "on")
    assert store.directory is not None
    store.directory.chmod(0o777)
    assert "others may write" in cache("ls", status=1)


def test_a_read_only_cache_is_listed_and_not_pruned(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store)
    monkeypatch.setenv("TORCHTPU_CACHE", "read")
    assert len(cache_json("ls")) == 4
    assert cache_json("prune", "--max-bytes", "0")["deleted"] == 0
    assert len(cache_json("ls")) == 4


# doctor


def findings() -> dict[str, list[doctor.Finding]]:
    found: dict[str, list[doctor.Finding]] = {}
    for finding in doctor.examine():
        found.setdefault(finding.name, []).append(finding)
    return found


@pytest.mark.usefixtures("store")
def test_doctor_finds_a_working_machine() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    rows = json.loads(done.stdout)  # a wait that takes long is told beside it
    assert done.exit_code == 0, rows
    assert {row["name"] for row in rows} >= {"versions", "extension", "devices", "libtpu", "cache", "run"}
    assert "arange(4) * 2 + 1 is [1, 3, 5, 7]" in CliRunner().invoke(app, ["doctor"]).output


def test_doctor_names_a_rival_device(monkeypatch: pytest.MonkeyPatch) -> None:
    rival = importlib.metadata.EntryPoint("tpu", "torch_tpu:load", "torch.backends")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [rival])
    (finding,) = list(doctor._rivals())
    assert finding.state == "fault"
    assert "pip uninstall" in finding.remedy


@pytest.mark.parametrize("point", ["tpu", "a_tpu"])
def test_a_rival_that_is_installed_as_well_is_one_clear_error(point: str, tmp_path: Path) -> None:
    about = tmp_path / "torch_tpu-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_tpu\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text(f"[torch.backends]\n{point} = torch_tpu:load\n")
    (tmp_path / "torch_tpu.py").write_text(
        "from torch.utils import backend_registration\n\n"
        "def load():\n    backend_registration.rename_privateuse1_backend('tpu')\n"
    )

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=environment)

    ended = run("-c", "import torch")
    assert ended.returncode == 1
    assert ended.stderr.count("torchtpu and torch_tpu are both installed, and both are the device 'tpu'") == 1
    examined = run("-m", "torchtpu", "doctor", "--json")
    assert examined.returncode == 1
    faults = [finding for finding in json.loads(examined.stdout) if finding["state"] == "fault"]
    assert [fault["name"] for fault in faults] == ["other devices", "extension"]
    assert faults[0]["remedy"] == "a process has one such device: pip uninstall torch_tpu"


def test_doctor_says_which_frameworks_were_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"accelerate": "1.15.3", "lightning": "1.15.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert [finding[:3] for finding in doctor._frameworks()] == [
        ("accelerate", "ok", "1.15.3, tested"),
        ("lightning", "note", "1.15.0, not tested; 2.6 was"),
    ]


def test_doctor_tells_why_the_extension_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ImportError("torchtpu was built against torch 1, but torch 2 is running. Rebuild torchtpu: pip")
    monkeypatch.setattr(_autoload, "_failures", [error])
    finding = findings()["extension"][0]
    assert finding.state == "fault"
    assert finding.text == "torchtpu was built against torch 1, but torch 2 is running"
    assert finding.remedy.startswith("Rebuild torchtpu")
    assert "run" not in findings()


def test_doctor_names_a_cache_that_cannot_be_used(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.directory is not None
    store.directory.chmod(0o777)
    (finding,) = list(doctor._cache())
    assert (finding.state, "chmod go-w" in finding.text) == ("fault", True)
    store.directory.chmod(0o500)
    if os.geteuid():
        (finding,) = list(doctor._cache())
        assert finding.state == "fault" and "TORCHTPU_CACHE=read" in finding.remedy
    store.directory.chmod(stat.S_IRWXU)
    monkeypatch.setenv("TORCHTPU_CACHE", "off")
    (finding,) = list(doctor._cache())
    assert finding.state == "note"


def test_doctor_names_a_variable_that_nothing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHTPU_CACH_DIR", "/tmp")
    (finding,) = [found for found in doctor._variables() if found.state == "fault"]
    assert "TORCHTPU_CACHE_DIR" in finding.text


def test_sizes_are_shown_in_units() -> None:
    assert [show_bytes(n) for n in (0, 999, 1500, 5e9)] == ["0 B", "999 B", "1.50 kB", "5.00 GB"]
    assert [show_count(n) for n in (0, 999, 1500, 2.5e12)] == ["0", "999", "1.5 K", "2.5 T"]
    assert [show_seconds(s) for s in (5e-6, 0.0025, 61)] == ["5 us", "2.5 ms", "61.0 s"]
