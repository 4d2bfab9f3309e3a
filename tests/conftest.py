"""Fixtures of all tests; a test fails where it leaves a pending region, a buffer, an error or a thread behind."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compiled_before
import pytest
import torch
from rotation import number_of_commit
from xdist.scheduler import LoadFileScheduling

from torchtpu import config, metrics, startup
from torchtpu.runtime import _C
from torchtpu.runtime.device import client

SITE = Path(__file__).parent / "site"
MOST_WORKERS = 8  # the longest file then takes as long as all others
GIGABYTES_PER_WORKER = 6  # a worker of its own accord takes 2.5, the processes that a test starts about as much
SHARES_NOTHING = {"test_opinfo.py", "test_lowerings.py"}
LONGEST_FIRST = (
    "test_sanitizers.py", "test_warm.py", "test_distributed.py", "test_interrupts.py", "test_dead_ranks.py",
    "test_distributed_examples.py", "test_memory.py", "test_cuts.py", "test_style.py", "test_fuzz_cache.py",
    "test_opinfo.py", "test_lowerings.py",
)  # fmt: skip

OUTCOME = pytest.StashKey[pytest.CallInfo[None]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the long versions of the tests (some hours)")
    parser.addoption("--compile", action="store_true", help="compile every program, also those that an earlier run did")
    parser.addoption("--rotation", type=int, metavar="N", help="check what the commit of this number checked")
    parser.addoption("--shard", default="0/1", metavar="I/N", help="of the long version of test_opinfo.py")
    parser.addoption("--results", metavar="FILE", help="where test_opinfo.py keeps its results and goes on from")


def pytest_configure(config: pytest.Config) -> None:
    """The cache begins empty, for child processes too: what a test sees does not hang on earlier runs."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    compiled_before.install(client)
    if str(SITE) not in sys.path:
        sys.path.append(str(SITE))
    importlib.import_module("hooks").install()
    if (worker := getattr(config, "workerinput", None)) is not None:
        os.environ["TORCHTPU_CACHE_DIR"] = os.path.join(os.environ["TORCHTPU_CACHE_DIR"], worker["workerid"])
        return
    directory = tempfile.TemporaryDirectory(prefix="torchtpu-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(directory.cleanup)
    os.environ["TORCHTPU_CACHE_DIR"] = directory.name
    os.environ[compiled_before.VARIABLE] = "" if config.getoption("--compile") else str(compiled_before.directory())
    paths = (str(SITE), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A worker per core and one for what waits, at most one per file; none, which is to run the tests in this process,
    for a single file."""
    paths = {Path(argument.split("::")[0]) for argument in config.args}
    cores, gigabytes = len(os.sched_getaffinity(0)), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30
    workers = max(1, min(cores + 1, gigabytes // GIGABYTES_PER_WORKER, MOST_WORKERS))
    if all(path.is_file() for path in paths):
        workers = min(workers, len(paths))
    return workers if workers > 1 else 0


class Scheduling(LoadFileScheduling):  # type: ignore[misc]
    """A file's tests run in one worker, but for those of files whose tests take long and share nothing."""

    def _split_scope(self, nodeid: str) -> str:
        path = str(super()._split_scope(nodeid))
        return nodeid if Path(path).name in SHARES_NOTHING else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    return Scheduling(config, log)


def rotation_of(config: pytest.Config) -> int:
    """The number that decides which part is checked of what is too much for one run."""
    given: int | None = config.getoption("--rotation")
    return number_of_commit() if given is None else given


def pytest_report_header(config: pytest.Config) -> str:
    return f"rotation {rotation_of(config)} (again: pytest --rotation {rotation_of(config)})"


@pytest.fixture
def rotation(pytestconfig: pytest.Config) -> int:
    """What tests draw from that look elsewhere with each commit; a failure says how to look there again."""
    number = rotation_of(pytestconfig)
    print(f"again: pytest --rotation {number}")
    return number


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that the workers end together."""
    order = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    if not config.getoption("--full"):
        skip = pytest.mark.skip(reason="long: runs with --full")
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    if call.when == "call":
        item.stash[OUTCOME] = call
    return (yield)


def user_threads() -> set[threading.Thread]:
    """Every Python thread but the runtime's own, and tqdm's, which live as long as the process."""
    return {
        t
        for t in threading.enumerate()
        if not t.name.startswith(("torchtpu", "tqdm")) and not isinstance(t, threading._DummyThread)  # autograd's
    }


def left_alive() -> dict[str, int]:
    now = metrics.snapshot()
    return {name: now[name] for name in ("live_buffers", "live_nodes", "queue")}


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test starts with the counters at zero and ends with nothing pending, alive or failed."""
    torch.tpu.synchronize()
    metrics.reset()
    before, threads = left_alive(), user_threads()
    yield
    call = request.node.stash.get(OUTCOME, None)
    if call is None or call.excinfo is not None:  # its traceback holds its tensors; its error is reported already
        with contextlib.suppress(Exception):
            torch.tpu.synchronize()
        return
    torch.tpu.synchronize()  # raises an error that the test did not read
    deadline = time.monotonic() + 10
    while any(left_alive()[name] > before[name] for name in before) and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread's region ends with the system's thread, a moment after `join` has returned
        gc.collect()
        torch.tpu.synchronize()
    grown = {name: count - before[name] for name, count in left_alive().items() if count > before[name]}
    assert not grown, "buffers or pending values outlive the test"  # fewer: a cycle of an earlier test went
    for thread in user_threads() - threads:
        thread.join(timeout=5)
    assert user_threads() <= threads, "a thread outlives the test"


@pytest.fixture(autouse=True, scope="module")
def what_is_here_to_stay_is_not_searched_for_garbage() -> None:
    """Models' libraries, jax and torch's compiler leave millions of objects: a collection of them takes a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_optimisation_fails(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test ends without an optimisation that raised, but for those that its marker `bailouts` names."""
    bailouts = startup.engine_counters().bailouts.last
    bailouts.clear()
    yield
    expected = {name for marker in request.node.iter_markers("bailouts") for name in marker.args}
    unexpected = [str(bailout) for bailout in bailouts if bailout.what not in expected]
    assert not unexpected, "\n".join(unexpected)


@pytest.fixture(autouse=True)
def programs_are_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests marked `compiles` use nothing that was compiled before, nor do the processes that they start."""
    if request.node.get_closest_marker("compiles"):
        monkeypatch.setenv(compiled_before.VARIABLE, "")


@pytest.fixture
def fresh_dynamo(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """torch.compile as in a new process; its progress bars start no thread, and no log keeps its tracebacks."""
    with contextlib.suppress(ImportError):  # torch takes tqdm where it is installed
        from tqdm import tqdm

        tqdm.monitor_interval = 0
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    caplog.get_records("call").clear()


@pytest.fixture
def in_one_tier() -> Iterator[None]:
    """Each region is one program: in the first tier it may be several, which others share."""
    _C.forget_streams()
    with config.using(tiers="off"):
        yield
