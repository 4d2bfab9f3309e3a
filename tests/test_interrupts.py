"""Scripts that are interrupted, end early or fork end at once, with the right status and no noise."""

from __future__ import annotations

import dataclasses
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from script import run_script
from torch.utils.data import DataLoader, TensorDataset

from torchtpu import metrics
from torchtpu.distributed.links import Links
from torchtpu.ops.registry import LOWERINGS
from torchtpu.runtime.compile.variants import RegionVariants

SETUP = """
    import math, os, signal, sys, threading, time
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
            print("interrupted", time.monotonic() - started < 5)
        timer.join()

    slow(6)
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


STAYS = """
def stay(*args):  # Python code that nothing ends
    while True:
        try:
            math.sqrt(time.sleep(1e-4) or 2)
        except BaseException:
            pass
def stay_in_a_binding(*args):  # which has C++ frames with a `catch (...)` on the stack
    from jax.tree_util import tree_map
    tree_map(stay, [1])
def stay_in_a_hook(*args):  # above C++ frames that hold Python objects
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(stay)
    weight.sum().backward()
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)
sys.slow = Slow()  # Python ends so slowly that each thread asks for the GIL meanwhile
{}
y = (x * 2).tan()
_C.cut('test')
time.sleep(0.3)
"""
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
    "planner that stays": STAYS.format("startup._lazy.plan = stay"),
    "launcher that stays": STAYS.format("startup._lazy.launch = stay"),
    "compiler that stays": STAYS.format("slow(0)\nstartup.engine().client.compile = stay"),
    "planner that stays in a binding": STAYS.format("startup._lazy.plan = stay_in_a_binding"),
    "planner that stays in a hook": STAYS.format("startup._lazy.plan = stay_in_a_hook"),
    "compiler that stays in a binding": STAYS.format("slow(0)\nstartup.engine().client.compile = stay_in_a_binding"),
    "user's thread that stays in a hook": STAYS.format(
        "threading.Thread(target=lambda: [(x + 1).cpu(), stay_in_a_hook()], daemon=True).start()"
    ),
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


def test_a_child_that_is_forked_before_the_first_op_uses_the_device() -> None:
    ended = run_script(
        """
    import os, torch
    for _ in range(2):
        if os.fork() == 0:
            os._exit(int((torch.ones(2, device="tpu") + 1).sum().item()))
    print([os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)], torch.ones(2, device="tpu").sum().item())
    """
    )
    assert ended == (0, "[4, 4] 2.0\n", "")


def test_a_child_that_is_forked_after_a_backward_ends_without_waiting_for_threads() -> None:
    ended = run_script(
        """
    import os, signal, sys, torch
    weight = torch.ones(2, device="tpu", requires_grad=True)
    weight.sum().backward()
    if os.fork() == 0:
        signal.alarm(8)
        sys.exit(5)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
    """
    )
    assert ended == (0, "5\n", "")


def test_an_interrupt_in_a_shape_function_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes as it is, and the op does not run on the CPU."""
    x = torch.rand(7, device="tpu")
    entry = LOWERINGS["multinomial"]
    before = metrics.snapshot()["cpu_fallbacks"]

    def interrupted(*_: object) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setitem(LOWERINGS, "multinomial", dataclasses.replace(entry, infer=interrupted))
    with pytest.raises(KeyboardInterrupt):
        torch.multinomial(x, 3)
    monkeypatch.undo()
    assert torch.multinomial(x, 3).shape == (3,)
    assert metrics.snapshot()["cpu_fallbacks"] == before


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


HANDLED = """
    class Failure(Exception): pass
    class Stop(BaseException): pass
    raised = []
    def handle(number, frame):
        raised.append(kind(number))
        raise raised[-1]
    signal.signal(signal.SIGTERM, handle)

    def during(owner, name):
        # A signal comes in the middle of the next call, which is Python code of the runtime's.
        call = getattr(owner, name)
        def interrupted(*args):
            setattr(owner, name, call)
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(100):  # where a handler would run
                pass
            return call(*args)
        setattr(owner, name, interrupted)

    def is_raised(call):
        raised.clear()
        try:
            call()
        except BaseException as error:
            return [error] == raised
        return False

    def step():
        global w
        w = w * 2 + 1
        return w.tolist()

    w = x
    for _ in range(3):
        step()  # from now on the thread that reads launches it
"""


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "Failure", "Stop", "TimeoutError"])
def test_what_a_handler_raises_during_a_launch_leaves_the_read_and_the_values_stay(kind: str) -> None:
    ended = run_script(
        SETUP
        + HANDLED
        + f"""
    kind = {kind}
    for name in ("execute", "wait"):
        for _ in range(3):
            during(startup.engine().client, name)
            print(is_raised(step), end=" ")
    print(len(raised), w.tolist() == [(2 ** 9) * (i + 1) - 1 for i in range(5)])
    """
    )
    assert (ended.status, ended.out, ended.err) == (0, "True " * 6 + "1 True\n", "")


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "Failure", "Stop", "NotImplementedError"])
def test_what_a_handler_raises_during_shape_inference_is_no_reason_to_run_on_the_cpu(kind: str) -> None:
    ended = run_script(
        SETUP
        + HANDLED
        + f"""
    import torchtpu
    kind = {kind}
    engine, made = startup._lazy, None
    def norm():
        global made
        made = torch.native_group_norm(image, None, None, 1, 4, 9, 2, 1e-5)[0]
    image = torch.arange(36.0, device="tpu").reshape(1, 4, 3, 3)
    during(engine, "infer")
    print(is_raised(norm), torchtpu.metrics.snapshot()["cpu_fallbacks"])
    norm()
    print(torch.allclose(made.cpu(), torch.native_group_norm(image.cpu(), None, None, 1, 4, 9, 2, 1e-5)[0], atol=1e-5))
    """
    )
    assert (ended.status, ended.out, ended.err) == (0, "True {}\nTrue\n", "")


def test_an_op_recorded_as_several_is_recorded_whole_though_a_handler_raises() -> None:
    ended = run_script(
        SETUP
        + HANDLED
        + """
    kind = Failure
    signal.signal(signal.SIGALRM, handle)
    def whole(milliseconds):
        values = [torch.zeros(milliseconds * 100 + i, device="tpu") for i in range(100)]
        def add():
            signal.setitimer(signal.ITIMER_REAL, milliseconds / 1e3)
            torch._foreach_add_(values, [1.0] * len(values))  # one call, though the recorder is new to each shape
            time.sleep(1)
        return is_raised(add), torch.cat(values).cpu().unique().tolist()
    print([whole(milliseconds) for milliseconds in (1, 2, 3)])
    """
    )
    assert (ended.status, ended.out, ended.err) == (0, f"{[(True, [1.0])] * 3}\n", "")


def test_a_signal_that_waits_reaches_the_wakeup_descriptor_and_the_handler_of_the_day() -> None:
    ended = run_script(
        SETUP
        + HANDLED
        + """
    import socket
    kind, client = Failure, startup.engine().client
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno())
    during(client, "execute")
    print(is_raised(step), ours.recv(8) == bytes([signal.SIGTERM]))
    signal.set_wakeup_fd(-1)

    heard = []
    execute = client.execute
    def resetting(*args):
        if threading.current_thread() is threading.main_thread():
            client.execute = execute
            signal.signal(signal.SIGTERM, lambda *_: heard.append("new"))
        return execute(*args)
    client.execute = resetting
    while client.execute is resetting:
        step()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)
    print(heard)

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what has no handler in Python is left alone
    def dying(*args):
        os.kill(os.getpid(), signal.SIGTERM)
    client.execute = dying
    sys.stdout.flush()
    step()
    """
    )
    assert (ended.status, ended.out, ended.err) == (-15, "True True\n['new']\n", "")


def test_a_process_forked_during_a_launch_has_its_own_handlers() -> None:
    ended = run_script(
        SETUP
        + HANDLED
        + """
    kind, client, execute = Failure, startup.engine().client, startup.engine().client.execute
    def forking(*args):
        if os.fork() == 0:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(5)
            except Failure:
                os._exit(7)
            os._exit(0)
        return execute(*args)
    client.execute = forking
    step()
    client.execute = execute
    print(os.waitstatus_to_exitcode(os.wait()[1]), is_raised(step))
    """
    )
    assert (ended.status, ended.out, ended.err) == (0, "7 False\n", "")


SOAK = """
    import sys
    sys.path.insert(0, {folder!r})
    sys.argv[1:] = {arguments!r}
    import interrupt_soak
    sys.exit(interrupt_soak.main())
"""


def soak(model: str, every: int, interrupts: int) -> None:
    arguments = ["--model", model, "--every", str(every), "--interrupts", str(interrupts)]
    ended = run_script(SOAK.format(folder=str(Path(__file__).parent), arguments=arguments), seconds=60 + interrupts)
    assert ended.status == 0, ended.out + ended.err


@pytest.mark.parametrize(("model", "every"), [("mlp", 1), ("mlp", 50)])
def test_an_interrupted_loop_has_the_state_of_an_op_boundary_and_goes_on(model: str, every: int) -> None:
    soak(model, every, 20)


@pytest.mark.full
@pytest.mark.parametrize("every", [1, 10, 50])
@pytest.mark.parametrize("model", ["mlp", "gpt", "compiled", "loader"])
def test_a_thousand_interrupts_lose_change_and_swallow_nothing(model: str, every: int) -> None:
    soak(model, every, 1000)


COMPILES = (
    SETUP
    + """
    import atexit
    atexit.register(lambda: print("atexit"))
    table, rows, source = torch.zeros(9, 4, device="tpu"), torch.arange(1200, device="tpu") % 9, x[:4] + 1
    table.cpu(), rows.cpu(), source.cpu()
    compiling = threading.Event()
    def compile_and_say(*args):
        compiling.set()
        return compile(*args)
    startup.engine().client.compile = compile_and_say
    startup.engine().compiler._store = type("None", (), {"keeps": False})()
    for i in range(1200):  # half a minute of compiling, on a fast machine
        table[rows[i]] += source
    _C.cut("test")
    compiling.wait()
    time.sleep(0.3)
    def later(seconds):
        threading.Thread(target=lambda: (time.sleep(seconds), os.kill(os.getpid(), signal.SIGINT)), daemon=True).start()
    def leave():
        print(time.time(), end=" ")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
"""
)
LEAVES = {
    "return": ("leave()", 0),
    "status": ("leave(); sys.exit(3)", 3),
    "exception": ("leave(); raise ValueError('mine')", 1),
    "at once": ("print(time.time(), 'atexit', flush=True); os._exit(4)", 4),
    "SIGTERM handled": ("leave(); os.kill(os.getpid(), signal.SIGTERM); table.cpu()", 5),
    "Ctrl-C": ("later(0.3); leave(); table.cpu()", -2),
    "Ctrl-C twice": ("later(0.3); later(0.6); leave(); table.cpu()", -2),
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_process_that_ends_while_xla_compiles_has_its_own_status(name: str) -> None:
    code, status = LEAVES[name]
    ended = run_script(COMPILES + "    " + code, TORCHTPU_CLUSTERS="0", TORCHTPU_TIERS="off")
    assert (ended.status, ended.out.split()[1:]) == (status, ["atexit"]), ended.err
    assert "terminate" not in ended.err and "FATAL" not in ended.err


def test_a_program_that_cannot_be_handed_over_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise KeyError("refused by the test")

    x = torch.arange(4.0, device="tpu")
    x.cpu()  # what follows is a region of one op, which has no smaller pieces
    for size, name in enumerate(("_form", "_compiles_for"), 2):
        monkeypatch.setattr(RegionVariants, name, refuse)
        taken_apart = metrics.snapshot()["regions_taken_apart"]
        torch.testing.assert_close(torch.cosh(x[:size]).cpu(), torch.arange(4.0)[:size].cosh())
        assert metrics.snapshot()["regions_taken_apart"] == taken_apart + 1
        monkeypatch.undo()


def test_what_a_handler_raises_while_ranks_are_awaited_is_raised_as_it_is() -> None:
    """A TimeoutError is what the sockets raise too."""
    links = Links(1, lambda notice: None)

    def handler(*_: object) -> None:
        raise TimeoutError("mine")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(TimeoutError, match="mine"):
            links.connect(dist.HashStore(), 2, timedelta(seconds=3))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert links._thread
    links._thread.join()


ENDS = {
    "nobody catches it": ("raise KeyboardInterrupt", -2),
    "it is caught": ("try: raise KeyboardInterrupt\nexcept KeyboardInterrupt: sys.exit(1)", 1),
    "another error follows": ("try: raise KeyboardInterrupt\nfinally: raise ValueError", 1),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_interrupt_that_nobody_catches_is_how_the_process_ends(name: str) -> None:
    code, status = ENDS[name]
    begin = "import atexit, sys, torch\ntorch.ones(2, device='tpu').sum().item()\n"
    ended = run_script(
        f"{begin}atexit.register(lambda: exec('1'))\n{code}\n"
    )  # Python forgets the interrupt as it runs a text
    assert ended.status == status
    assert status == 1 or ended.err.endswith("\nKeyboardInterrupt\n")


SENT = """
    import _thread, ctypes, random, threading, time
    import torch

    class TimedOut(Exception):
        pass

    def send():
        time.sleep(dice.uniform(0.002, 0.02))
        if error is None:
            _thread.interrupt_main()
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(me), ctypes.py_object(error))

    me, dice, torn = threading.get_ident(), random.Random(0), 0
    for i in range(120):
        w, steps = torch.zeros(4, device="tpu"), 0
        sender = threading.Thread(target=send)
        try:
            sender.start()
            while True:
                w.add_(1)
                steps += 1
                w.sum().item()
        except (KeyboardInterrupt, TimedOut):
            pass
        while sender.is_alive():
            try:
                sender.join()
            except (KeyboardInterrupt, TimedOut):
                pass
        torn += w[0].item() not in (steps, steps + 1)
    print(torn)
"""


def test_a_collection_runs_no_code_that_could_swallow_what_a_handler_raises() -> None:
    ended = run_script(
        """
    import gc, sys, weakref, torch, torchtpu
    collect, ran = gc.collect, []
    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and frame.f_back.f_code.co_name == "<module>" and code.co_filename == weakref.__file__:
            ran.append((code.co_filename, code.co_name))
    gc.disable()
    w = torch.randn(8, 8, device="tpu", requires_grad=True)
    for n in range(5, 25):
        x = torch.randn(n, 8, device="tpu")
        torch.cdist(torch.special.i0e((x @ w).logsumexp(1, True)), x[:, :1]).mean().backward()
        w.grad.sum().item()
    sys.setprofile(note)
    collect()
    sys.setprofile(None)
    print("jax" in sys.modules, ran)
    """
    )
    assert ended.err == ""
    assert ended.out.split(maxsplit=1) == ["True", "[]\n"]


@pytest.mark.parametrize("error", ["None", "KeyboardInterrupt", "TimedOut"])
def test_what_another_thread_sends_during_a_launch_loses_nothing(error: str) -> None:
    """By `_thread.interrupt_main`, or by `PyThreadState_SetAsyncExc`, as time limits and stop buttons do."""
    ended = run_script(SENT.replace("me, dice", f"error = {error}\n    me, dice"))
    assert (ended.status, ended.out, ended.err) == (0, "0\n", "")
