"""What `torchtpu.explain` costs the host while it is on, and after it was on.

OMP_NUM_THREADS=1 python benchmarks/explain_cost.py
OMP_NUM_THREADS=1 python benchmarks/explain_cost.py --instructions     # of the recorder, per known op; Linux on x86-64
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import peers
import torch
from torch import nn

import torchtpu

OVERHEAD = 1.05  # with it on
CHANGE = 1.01  # of the instructions per known op, once it was on
STEPS = 50
OPS = 50

_TRACEME, _PEEKUSER, _SINGLESTEP, _INSTRUCTION_POINTER = 0, 3, 9, 16 * 8  # of ptrace


def training_step() -> Callable[[], object]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(64, 64, device="tpu")

    def step() -> object:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def seconds(step: Callable[[], object]) -> float:
    """CPU seconds of the process per step."""
    begun = time.process_time()
    for _ in range(STEPS):
        step()
    torch.tpu.synchronize()
    return (time.process_time() - begun) / STEPS


def overhead(rounds: int) -> list[str]:
    step = training_step()
    for _ in range(3):
        seconds(step)
    off, on = [], []
    for _ in range(rounds):
        off.append(seconds(step))
        with torchtpu.explain():
            on.append(seconds(step))
    ratio = statistics.median(on) / statistics.median(off)
    return ["explain on / off, CPU of a step", peers.verdict(ratio, OVERHEAD)]


def chain(blocks: int) -> None:
    """Records known ops after `blocks` of explain, and stops before and after the last of them."""
    ptrace = _ptrace()
    x = torch.ones(1, device="tpu")
    for _ in range(blocks):
        with torchtpu.explain():
            x.relu()
        torch.tpu.synchronize()
    for turn in range(6):
        if turn == 5:
            if ptrace(_TRACEME, 0, 0, 0):
                sys.exit("ptrace is not permitted here")
            os.kill(os.getpid(), signal.SIGSTOP)
        with torch.no_grad():
            for _ in range(OPS):
                x.relu()
        if turn == 5:
            os.kill(os.getpid(), signal.SIGSTOP)
        torch.tpu.synchronize()


def instructions(blocks: int) -> float:
    """What a process executes in the extension's code for a known op, counted step by step."""
    ptrace = _ptrace()
    with subprocess.Popen([sys.executable, __file__, "--chain", str(blocks)]) as child:
        if not os.WIFSTOPPED(os.waitpid(child.pid, 0)[1]):
            sys.exit(1)
        with open(f"/proc/{child.pid}/maps") as maps:
            lines = [line.split() for line in maps if "runtime/_C.cpython" in line and "x" in line.split()[1]]
        spans = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
        count = 0
        while True:
            ptrace(_SINGLESTEP, child.pid, 0, 0)
            _, status = os.waitpid(child.pid, 0)
            if os.WSTOPSIG(status) == signal.SIGSTOP:
                break
            place = ptrace(_PEEKUSER, child.pid, _INSTRUCTION_POINTER, 0)
            count += any(first <= place < last for first, last in spans)
        child.kill()
    return count / OPS


def _ptrace() -> Callable[[int, int, int, int], int]:
    function = ctypes.CDLL(None).ptrace
    function.restype = ctypes.c_long
    function.argtypes = [ctypes.c_long] * 4
    return function


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--instructions", action="store_true")
    parser.add_argument("--chain", type=int, help=argparse.SUPPRESS)
    a = parser.parse_args()
    torch.set_num_threads(1)
    if a.chain is not None:
        chain(a.chain)
    elif a.instructions:
        before, after = instructions(0), instructions(1)
        rows = [["instructions of the recorder per known op", "never on", "once on", "ratio"]]
        print(peers.table([*rows, ["relu", f"{before:.0f}", f"{after:.0f}", peers.verdict(after / before, CHANGE)]]))
    else:
        print(peers.table([["what", "ratio"], overhead(a.rounds)]))


if __name__ == "__main__":
    main()
