"""In: scripts that are interrupted, end early or fork. Out: they end at once, with the right status and no noise."""

from __future__ import annotations

import pytest
import torch
from script import run_script
from torch.utils.data import DataLoader, TensorDataset

SETUP = """
    import os, signal, sys, threading, time
    import torch
    from torchtpu import startup
    from torchtpu.runtime import _C
    x = torch.arange(5.0, device="tpu")
    x.cpu()
    compile = startup.engine().client.compile
    def slow(seconds):
        def compile_slowly(*args):
            time.sleep(seconds)
            return compile(*args)
        startup.engine().client.compile = compile_slowly
        startup.engine().compiler._store = type("None", (), {"keeps": False})()
"""


def test_ctrl_c_ends_a_wait_and_the_value_can_be_read_later() -> None:
    ended = run_script(
        SETUP
        + """
    def interrupted(value):
        started = time.monotonic()
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            value.sum().item()
        except KeyboardInterrupt:
            print("interrupted", time.monotonic() - started < 2)
        timer.join()

    slow(2.5)
    y = x * 3 + 1
    interrupted(y)                       # while it is compiled
    print(y.tolist())
    slow(0)
    z = torch.eye(800, device="tpu") * 0.5
    for _ in range(400):  # seconds, whatever the machine
        z = z @ z
    launches = startup.engine().counters.launches
    _C.cut('test')
    while startup.engine().counters.launches == launches:
        time.sleep(0.01)
    interrupted(z)                       # while it runs
    print(z[0, 1].item())
    """
    )
    assert ended.err == ""
    assert ended.out.splitlines() == ["interrupted True", "[1.0, 4.0, 7.0, 10.0, 13.0]", "interrupted True", "0.0"]
    assert ended.status == 0


EXITS = {
    "pending": "y = x * 2 + 1",
    "queued": "slow(0.5)\nfor i in range(5):\n    y = (x * 2).cos()\n    _C.cut('test')",
    "compiling": "slow(1)\ny = (x * 2).tan()\n_C.cut('test')\ntime.sleep(0.2)",
    "recording": """
def record():
    z = torch.zeros(3, device="tpu")
    while True:
        z = z + 1
        if threading.current_thread().name == "reads":
            z.tolist()
for name in ("reads", "records"):
    threading.Thread(target=record, daemon=True, name=name).start()
time.sleep(0.5)
""",
    "waiting": "slow(2)\nthreading.Thread(target=lambda: (x * 2).sin().cpu(), daemon=True).start()\ntime.sleep(0.3)",
    "unread error": "y = x[torch.tensor([9], device='tpu')]\n_C.cut('test')\ntime.sleep(0.3)",
    "cycle": "class A: pass\na = A()\na.a, a.x = a, x + 1\nsys.keep = x * 3",
    "thread exit": """
def leave():
    (x * 2).cpu()
    y = x * 3
    sys.exit(3)
thread = threading.Thread(target=leave)
thread.start()
thread.join()
""",
}


@pytest.mark.parametrize("name", EXITS)
def test_the_interpreter_ends_at_once_and_quietly_with(name: str) -> None:
    code = "\n".join("    " + text for text in EXITS[name].splitlines())
    ended = run_script(SETUP + code + "\n    print(time.time())\n    sys.stdout.flush()\n", seconds=60)
    assert (ended.status, ended.err) == (0, "")


FORKS = (
    SETUP
    + """
    ready = x + 1
    ready.cpu()
    pending = x * 2
    queued = (x * 5).tan()

    def child(use):
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            try:
                use()
                print("used", flush=True)
            except RuntimeError as error:
                print(str(error)[:48], flush=True)
            print(torch.nn.Linear(3, 3)(torch.ones(2, 3)).shape[0], flush=True)
            sys.exit(0) if use is torch.tpu.synchronize else os._exit(0)
        print("status", os.waitpid(pid, 0)[1], flush=True)

    child(lambda: (x + 1).cpu())
    child(lambda: pending.cpu())
    child(lambda: print(torch.ones(2, device="tpu")))
    child(torch.tpu.synchronize)
    slow(1)
    _C.cut('test')
    child(lambda: queued.cpu())          # while the region is compiled
    print(pending.tolist(), queued.shape[0], queued.isfinite().all().item())
    """
)


def test_a_forked_child_is_told_so_and_the_parent_goes_on() -> None:
    ended = run_script(FORKS)
    refused = ["Cannot re-initialize tpu in forked subprocess. T", "2", "status 0"]
    assert ended.err == ""
    assert ended.out.splitlines() == [*refused * 5, "[0.0, 2.0, 4.0, 6.0, 8.0] 5 True"]
    assert ended.status == 0


def test_forked_loader_workers_feed_a_device_that_is_in_use() -> None:
    total = torch.zeros((), device="tpu")
    loader = DataLoader(TensorDataset(torch.arange(12.0)), 3, num_workers=2, multiprocessing_context="fork")
    for (batch,) in loader:
        total += batch.to("tpu").sum()
    assert total.item() == 66


def test_a_spawned_child_has_a_device_of_its_own() -> None:
    ended = run_script(
        """
    import torch
    import torch.multiprocessing as mp

    def work(rank, x):
        assert (x.to("tpu") + rank).sum().item() == 3 + 3 * rank

    if __name__ == "__main__":
        x = torch.ones(3, device="tpu") * 1
        x.cpu()
        mp.spawn(work, (x.cpu(),), nprocs=1)
        print("done")
    """
    )
    assert (ended.status, ended.out, ended.err) == (0, "done\n", "")


def test_a_forked_child_is_told_so_by_the_first_op() -> None:
    ended = run_script(
        SETUP
        + """
    pid = os.fork()
    if pid == 0:
        try:
            x + 1
        except RuntimeError as error:
            os._exit(7)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    )
    assert ended == (0, "7\n", "")
