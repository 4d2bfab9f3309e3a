"""`torchtpu warm` compiles the programs that a later process needs before it starts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from script import run_python

STEPS = """
import gc, os, sys, torch
from torchtpu import metrics
{"": gc.enable, "off": gc.disable, "often": lambda: gc.set_threshold(1)}[os.environ.get("GC", "")]()
torch.manual_seed(int(os.environ.get("SEED", "0")))
class Data(torch.utils.data.Dataset):
    def __len__(self): return 32 * steps
    def __getitem__(self, i): return torch.randn(8), torch.randint(0, 4, ())
lr, steps, every = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).to("tpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
loader = torch.utils.data.DataLoader(Data(), 32, num_workers=int(os.environ.get("WORKERS", "0")))
for step, (x, y) in enumerate(loader):
    x, y = x.to("tpu"), y.to("tpu")
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % every == 0:
        print("loss", loss.item())
torch.tpu.synchronize()
counts = metrics.snapshot()
print("steps", step + 1, "compiled", counts["programs_compiled"], "traced", counts["fragment_traces"])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir(0o700)
    (tmp_path / "train.py").write_text(textwrap.dedent(STEPS))
    return tmp_path


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "TORCHTPU_CACHE_DIR": str(folder / "cache"), "TORCHTPU_FALLBACK": "error", **more}


def torchtpu(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "torchtpu.cli", *words, folder=folder, environment=environment(folder, **more))


def warm(folder: Path, *words: str, status: int = 0, **more: str) -> dict[str, Any]:
    done = torchtpu(folder, "warm", "--json", *words, **more)
    assert done.returncode == status, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


GROWS = """
import torch
from torchtpu import metrics
keys = torch.ones(4, 3, device="tpu")
for i in range(50):
    keys = torch.cat([keys, torch.full((1, 3), float(i), device="tpu")])
    (keys.sin() @ keys[-1]).softmax(0).cpu()
for n in range(3, 9):
    x = torch.ones(n, 3, device="tpu")
    for _ in range(20):
        x = (x * 2).tanh() + x.std(0)
    x.cpu()
print("compiled", metrics.snapshot()["programs_compiled"])
"""


@pytest.mark.parametrize("reads", ["run", "standin"])
def test_programs_with_room_are_warmed(folder: Path, reads: str) -> None:
    (folder / "train.py").write_text(GROWS)
    warm(folder, f"--reads={reads}", "--", sys.executable, str(folder / "train.py"))
    assert train(folder) == "compiled 0"


@pytest.mark.parametrize("reads", ["run", "standin"])
def test_programs_of_which_longer_arrays_are_not_known_are_warmed_as_they_are(folder: Path, reads: str) -> None:
    (folder / "train.py").write_text(GROWS.replace("keys.sin()", "torch.fft.fft(keys, dim=0).abs()"))
    report = warm(folder, f"--reads={reads}", "--", sys.executable, str(folder / "train.py"))
    assert report["failed"] == 0
    assert train(folder) == "compiled 0"


def train(folder: Path, lr: float = 0.1, steps: int = 5, every: int = 2, **more: str) -> str:
    words = folder / "train.py", str(lr), str(steps), str(every)
    done = run_python(*words, folder=Path("/"), environment=environment(folder, **more), check=True)
    return done.stdout.splitlines()[-1]


def script(*words: object) -> list[str]:
    return [sys.executable, "train.py", *map(str, words)]


def test_what_was_warmed_is_not_compiled_again(folder: Path) -> None:
    first = warm(folder, "--", *script(0.1, 5, 2))
    assert first["compiled"] == first["programs"] > 0
    assert first["hits"] == first["failed"] == first["not_stored"] == 0
    assert first["seconds_saved"] > 0
    assert all("train.py:" in region["line"] for region in first["regions"])
    # Another learning rate, number of steps, log interval, seed, order of hashes, garbage collection, folder and number
    # of workers; nothing is written.
    changed = {"PYTHONHASHSEED": "7", "TORCHTPU_NUM_COMPILE_THREADS": "3", "SEED": "5", "GC": "off", "WORKERS": "2"}
    assert train(folder, 0.02, 9, 4, TORCHTPU_CACHE="read", **changed) == "steps 9 compiled 0 traced 0"
    changed = {"PYTHONHASHSEED": "0", "SEED": "6", "GC": "often"}
    assert train(folder, 0.5, 4, 1, TORCHTPU_CACHE="read", **changed) == "steps 4 compiled 0 traced 0"
    second = warm(folder, "--", *script(0.1, 5, 2))
    assert second["compiled"] == 0
    assert second["hits"] == second["programs"] == first["programs"]


def test_comments_and_the_place_of_a_models_code_change_no_key(folder: Path) -> None:
    warm(folder, "--", *script(0.1, 3, 1))
    text = (folder / "train.py").read_text()
    model = next(line for line in text.splitlines() if line.startswith("model = "))
    (folder / "elsewhere.py").write_text(f"# A comment.\n\n\nimport torch\n{model}\n")
    (folder / "train.py").write_text(text.replace(model, "# Another one.\n\nfrom elsewhere import model"))
    assert train(folder, 0.1, 3, 1, TORCHTPU_CACHE="read") == "steps 3 compiled 0 traced 0"
    (folder / "elsewhere.py").write_text(f"import torch\n{model.replace('16', '24')}\n")
    assert train(folder, 0.1, 3, 1, TORCHTPU_CACHE="read") != "steps 3 compiled 0 traced 0"


DEEP = """
import sys, torch
from torchtpu import config, metrics
from torchtpu.runtime.partition import clusters
clusters._HOT, clusters.MS_A_LAUNCH = 5, float("inf")  # launches after which a region is compiled whole
config.set(compare="always")
layers = [m for _ in range(12) for m in (torch.nn.Linear(16, 16), torch.nn.LayerNorm(16), torch.nn.GELU())]
model = torch.nn.Sequential(*layers).to("tpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    loss = model(torch.randn(4, 16).to("tpu")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.tpu.synchronize()
counts = metrics.snapshot()
print(counts["regions_clustered"] > 0, counts["regions_climbing"] > 0, counts["programs_compiled"])
"""


@pytest.mark.parametrize("reads", ["run", "standin"])
def test_clusters_and_what_comes_after_them_are_warmed(folder: Path, reads: str) -> None:
    (folder / "train.py").write_text(DEEP)
    report = warm(folder, "--reads", reads, "--", *script(4))
    assert report["failed"] == report["not_stored"] == 0
    done = run_python(folder / "train.py", "20", environment=environment(folder, TORCHTPU_CACHE="read"), check=True)
    assert done.stdout.splitlines()[-1] == "True True 0"


JOB = """
import os, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("tpu")
assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 13), torch.nn.Tanh(), torch.nn.Linear(13, 13)).to("tpu")
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(8, 6).to("tpu")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss := loss.detach(), dist.ReduceOp.AVG)
    print("loss", loss.item())
dist.barrier()
dist.destroy_process_group()
"""


def test_one_process_makes_a_dry_run_of_a_rank_of_a_job(folder: Path) -> None:
    (folder / "train.py").write_text(JOB)
    report = warm(folder, "--world-size", "4", "--", *script())
    assert report["reads"] == "standin"
    assert report["failed"] == 0
    assert report["compiled"] == report["programs"] > 0
    one = warm(folder, "--world-size", "4", "--ranks", "0", "--", *script())
    assert 0 < one["hits"] == one["programs"] < report["programs"]  # 13 rows on 4 ranks: the last has fewer


@pytest.mark.usefixtures("libtpu")
def test_a_jobs_programs_with_collectives_are_compiled_for_its_topology(folder: Path) -> None:
    (folder / "train.py").write_text(JOB)
    report = warm(folder, "--target", "v5e:2x2", "--world-size", "4", "--ranks", "1", "--", *script())
    assert report["failed"] == 0
    assert report["compiled"] == report["programs"] > 0
    keys = [
        json.loads(torchtpu(folder, "cache", "info", r["digest"], "--json").stdout)["key"] for r in report["regions"]
    ]
    joint = [key for key in keys if key["positions"] is not None]
    assert joint
    assert all((key["positions"], key["topology"]) == ("0 1 2 3", "2x2x1") for key in joint)


_OTHER_USER = 54321


@pytest.fixture(params=["this user", "another user"])
def other_user(request: pytest.FixtureRequest) -> int:
    if request.param == "this user":
        return os.geteuid()
    if os.geteuid() != 0:
        pytest.skip("becoming another user takes root")
    return _OTHER_USER


@pytest.fixture
def other_folder(other_user: int) -> Iterator[Path]:
    """The user's, in a place that this user may reach."""
    path = Path(tempfile.mkdtemp())
    (path / "cache").mkdir(0o700)
    for made in (path, path / "cache"):
        os.chown(made, other_user, -1)
    yield path
    shutil.rmtree(path)


def test_a_bundle_serves_another_user_at_another_path(folder: Path, other_user: int, other_folder: Path) -> None:
    warm(folder, "--", *script(0.1, 3, 1))
    assert torchtpu(folder, "cache", "export", str(other_folder / "bundle")).returncode == 0
    shutil.copy(folder / "train.py", other_folder)
    for file in ("bundle", "train.py"):
        (other_folder / file).chmod(0o644)
    become = {} if other_user == os.geteuid() else {"user": other_user, "group": other_user, "extra_groups": []}

    def run(*words: str, **more: str) -> str:
        command = [sys.executable, *words]
        where = environment(other_folder, HOME=str(other_folder), **more)
        try:
            done = subprocess.run(
                command, cwd=other_folder, env=where, capture_output=True, text=True, check=False, **become
            )
        except PermissionError:
            pytest.skip("other users cannot run this interpreter")
        if become and ("PermissionError" in done.stderr or "No module named" in done.stderr):
            pytest.skip("other users cannot read this checkout")
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    assert "0 refused" in run("-m", "torchtpu.cli", "cache", "import", "bundle", "--trust")
    assert run("train.py", "0.1", "3", "1", TORCHTPU_CACHE="read") == "steps 3 compiled 0 traced 0"


def test_steps_end_the_command(folder: Path) -> None:
    done = torchtpu(folder, "warm", "--steps", "2", "--", *script(0.1, 1000, 1))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss") == 2
    assert "saved at the next start" in done.stdout


def test_the_commands_failure_is_passed_on_and_what_it_recorded_is_kept(folder: Path) -> None:
    (folder / "train.py").write_text("import torch, sys\nprint((torch.ones(3, device='tpu') + 2).sum())\nsys.exit(5)\n")
    report = warm(folder, "--", *script(), status=5)
    assert report["compiled"] == report["programs"] == 1


def test_a_command_that_records_nothing_is_no_success(folder: Path) -> None:
    (folder / "train.py").write_text("print('done')")
    done = torchtpu(folder, "warm", "--", *script())
    assert done.returncode == 1
    assert "Nothing was recorded" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a command"),
        (["--from", "a", "--", "python"], "give a command"),
        (["--world-size", "4", "--ranks", "4", "--", "python"], "has no such ranks"),
        (["--target", "v9", "--", "python"], "v4, v5e, v5p, v6e, tpu7x"),
        (["--target", "v5p:2x2", "--", "python"], "a topology of v5p is written as 2x2x1"),
    ],
)
def test_a_wrong_command_line_says_what_is_right(folder: Path, words: list[str], message: str) -> None:
    done = torchtpu(folder, "warm", *words)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.usefixtures("libtpu")
def test_a_topology_that_libtpu_does_not_have_is_named(folder: Path) -> None:
    report = warm(folder, "--target", "v5e:3x3", "--reads", "standin", "--", *script(0.1, 2, 1), status=1)
    assert report["failed"] == report["programs"] > 0
    assert all("not divisible" in region["error"] for region in report["regions"])


def test_without_a_cache_nothing_is_warmed(folder: Path) -> None:
    for more in ({"TORCHTPU_CACHE": "off"}, {"TORCHTPU_CACHE": "read"}):
        done = torchtpu(folder, "warm", "--", *script(0.1, 1, 1), **more)
        assert done.returncode == 1
        assert "nothing can be kept" in done.stderr
    (folder / "cache").chmod(0o777)
    done = torchtpu(folder, "warm", "--", *script(0.1, 1, 1))
    assert done.returncode == 1
    assert "others may write" in done.stderr


def test_programs_that_could_not_be_stored_are_no_success(folder: Path) -> None:
    (folder / "train.py").write_text("import torch\nprint((torch.ones(3, device='tpu') + 2).tolist())\n")
    report = warm(folder, "--", *script(), status=1, TORCHTPU_CACHE_MAX_BYTES="1K")  # as a full disk does
    assert report["compiled"] == report["not_stored"] == 1
    assert report["seconds_saved"] == 0


@pytest.mark.compiles
def test_a_killed_command_leaves_no_damage_and_what_it_compiled(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "torchtpu.cli", "warm", "--", *script(0.1, 10**6, 1)],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("loss"):
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    done = torchtpu(folder, "cache", "verify", "--json")
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["entries"] > 0
    report = warm(folder, "--", *script(0.1, 5, 2))
    assert report["hits"] > 0
    assert report["failed"] == 0


@pytest.mark.compiles
def test_ranks_compile_each_program_once(folder: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = torchtpu(folder, "warm", "--json", "--", *launcher, "train.py", "0.1", "5", "2")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    compiled = [int(count) for count in re.findall(r"steps 5 compiled (\d+)", done.stderr)]
    assert len(compiled) == 2
    assert sum(compiled) == report["compiled"] == report["programs"] > 0
    listed = json.loads(torchtpu(folder, "cache", "ls", "--json").stdout)
    assert {entry["digest"] for entry in listed} == {region["digest"] for region in report["regions"]}


def test_stand_ins_answer_reads_and_are_told(folder: Path) -> None:
    report = warm(folder, "--reads", "standin", "--", *script(0.1, 5, 2))
    assert report["compiled"] == report["programs"] > 0
    (line,) = report["stand_in_reads"]
    assert line.endswith("train.py:20")
    assert any(region["guessed_since"] == line for region in report["regions"])
    assert report["regions"][0]["guessed_since"] is None
    assert train(folder, TORCHTPU_CACHE="read") == "steps 5 compiled 0 traced 0"


def test_reads_can_be_refused(folder: Path) -> None:
    done = torchtpu(folder, "warm", "--reads", "error", "--", *script(0.1, 5, 2))
    assert done.returncode == 1
    assert "a result of the device is read at" in done.stderr
    assert "train.py:20" in done.stderr


@pytest.fixture
def libtpu() -> None:
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'torchtpu[aot]'")


@pytest.mark.usefixtures("libtpu")
def test_programs_are_compiled_for_a_tpu_that_is_not_here(folder: Path) -> None:
    here = warm(folder, "--target", "v5e:2x2", "--manifest", "programs", "--", *script(0.1, 4, 2))
    assert here["compiled"] == here["programs"] > 0
    assert here["failed"] == 0
    for region in here["regions"]:
        note = region["note"]
        assert note["cycles"] > 0 and note["code_bytes"] > 0 and note["flops"] > 0
        assert 0 < note["peak_bytes"] < note["device_bytes"] == 16 << 30
    # Without the command; programs without collectives are the same on every topology.
    again = warm(folder, "--target", "v5e:2x4", "--from", "programs")
    assert again["hits"] == again["programs"] == here["programs"]
    other = warm(folder, "--target", "v6e", "--from", "programs")
    assert other["compiled"] == here["programs"]
    shown = torchtpu(folder, "warm", "--target", "v5e", "--from", "programs").stdout
    assert "of HBM" in shown
    assert "load only where such a chip is" in shown
    explained = torchtpu(folder, "cache", "explain", here["regions"][0]["digest"], other["regions"][0]["digest"])
    assert "device_kind: lite" not in explained.stdout
    assert "v5 -> v6" in explained.stdout


SPOOF = """
import importlib.abc, os, sys
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
os.cpu_count = lambda: 96
from torchtpu.compiler_cache import target
import torchtpu.runtime.device.client
torchtpu.runtime.device.client.host_cpu_features = lambda: ("x86_64", "sse2")
import runpy
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.usefixtures("libtpu")
def test_a_tpus_keys_do_not_depend_on_the_machine_that_warms(folder: Path) -> None:
    (folder / "spoof.py").write_text(SPOOF)
    plain = warm(folder, "--target", "v5e", "--jobs", "1", "--", *script(0.1, 3, 2))
    spoofed = warm(folder, "--target", "v5e", "--jobs", "2", "--", sys.executable, "spoof.py", *script(0.1, 3, 2)[1:])
    keys = [sorted(region["digest"] for region in report["regions"]) for report in (plain, spoofed)]
    assert keys[0] == keys[1]


TARGET = """
import torch
properties = torch.tpu.get_device_properties()
assert (properties.name, properties.platform, properties.total_memory) == ("TPU v6 lite", "tpu", 32 << 30), properties
assert torch.tpu.device_count() == 8 and torch.tpu.get_device_capability() == (6, 0)
assert torch.tpu.mem_get_info()[1] == 32 << 30
print((torch.ones(2, device="tpu:7") * 3).tolist())
"""


def test_under_a_target_the_device_answers_as_the_target(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TARGET],
        env=environment(folder, TORCHTPU_TARGET="v6e:2x4"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "[3.0, 3.0]\n", done.stderr


@pytest.mark.compiles
@pytest.mark.full
def test_processes_that_start_together_compile_each_program_once(folder: Path) -> None:
    command = [sys.executable, str(folder / "train.py"), "0.1", "5", "2"]
    where = environment(folder, TORCHTPU_NUM_COMPILE_THREADS="2")
    processes = [subprocess.Popen(command, env=where, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    last = [process.communicate()[0].splitlines()[-1] for process in processes]
    compiled = [int(re.fullmatch(r"steps 5 compiled (\d+) traced \d+", line)[1]) for line in last]  # type: ignore[index]
    listed = json.loads(torchtpu(folder, "cache", "ls", "--json").stdout)
    assert sum(compiled) == len(listed) > 0


EXAMPLE = [
    str(Path(__file__).parents[1] / "examples" / "train_gpt.py"),
    "--steps",
    "3",
    "--layers",
    "2",
    "--sample",
    "3",
]
COUNT = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
from torchtpu import metrics
counts = metrics.snapshot()
print("compiled", counts["programs_compiled"], "traced", counts["fragment_traces"])
"""


@pytest.mark.full
def test_the_example_compiles_nothing_once_it_was_warmed(folder: Path) -> None:
    report = warm(folder, "--", sys.executable, *EXAMPLE)
    assert report["compiled"] == report["programs"] > 0
    command = [sys.executable, "-c", COUNT, *EXAMPLE]
    where = environment(folder, TORCHTPU_CACHE="read")
    done = subprocess.run(command, cwd="/", env=where, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "compiled 0 traced 0"


@pytest.mark.compiles
@pytest.mark.full
def test_kills_at_random_moments_leave_a_cache_that_works(folder: Path) -> None:
    for attempt in range(10):
        process = subprocess.Popen(
            [sys.executable, "-m", "torchtpu.cli", "warm", "--", *script(0.1, 10**6, 1)],
            cwd=folder,
            env=environment(folder),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        time.sleep(3 + 0.7 * attempt)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert torchtpu(folder, "cache", "verify").returncode == 0
    assert warm(folder, "--", *script(0.1, 5, 2))["failed"] == 0
    assert train(folder, TORCHTPU_CACHE="read") == "steps 5 compiled 0 traced 0"
