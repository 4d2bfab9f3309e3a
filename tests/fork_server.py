"""In: scripts, one a line of JSON on a socket. Out: a process for each, forked of this one, which has imported torch.

A script's process is as one that Python started: what it imports first as `torch` loads the device then, its end is the
interpreter's own, and a traceback begins with the script. What is read before `main()` of Python, or as torch's
libraries load, is this process's: `starts_as` says what of an environment that is.
"""

from __future__ import annotations

import array
import json
import os
import runpy
import select
import signal
import socket
import sys
import types
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any

_EARLY = ("OMP_", "MKL_", "GOMP_", "OPENBLAS_", "KMP_", "PYTHON", "LD_", "MALLOC_", "GLIBC_", "TSAN_", "ASAN_", "LC_")
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_MOST_BYTES = 1 << 20


def starts_as(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """What of an environment a process reads before it runs Python code, or as torch is imported."""
    return tuple(sorted((name, value) for name, value in environment.items() if name.startswith(_EARLY)))


class _Torch(MetaPathFinder, Loader):
    """Finds the torch that is imported already, and loads the device, as `import torch` does."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._spec = torch.__spec__

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name == "torch" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        found: ModuleType = self._torch
        return found

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        module.__spec__, module.__loader__ = self._spec, self._spec.loader
        if os.environ.get(_AUTOLOAD, "1") == "1":
            self._torch._import_device_backends()


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Forks until the other end of the socket is closed; returns the request in the process that is to run it."""
    wakes, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    statuses: dict[int, int] = {}  # where the status of each process goes
    while True:
        ready, _, _ = select.select([control, wakes], [], [])
        if wakes in ready:
            os.read(wakes, 4096)
            while statuses:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                os.write(statuses[pid], str(os.waitstatus_to_exitcode(status)).encode())
                os.close(statuses.pop(pid))
        if control not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(control, _MOST_BYTES, 3)
        if not data:
            return None
        out, err, told = fds
        pid = os.fork()
        if pid == 0:
            for fd in (told, wakes, woken, *statuses.values()):
                os.close(fd)
            signal.set_wakeup_fd(-1)
            control.close()
            request: dict[str, Any] = json.loads(data)
            _become(request, out, err)
            return request
        for fd in (out, err):
            os.close(fd)
        statuses[pid] = told
        control.send(array.array("q", [pid]).tobytes())


def _become(request: dict[str, Any], out: int, err: int) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for place, fd in enumerate((nothing, out, err)):
        os.dup2(fd, place)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])


def run(request: dict[str, Any]) -> None:
    """Runs the script, or the module, as the main module."""
    import torch

    words = request["words"]
    sys.orig_argv = [sys.executable, *words]
    is_module = words[0] == "-m"
    sys.argv = words[1:] if is_module else words
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(words[0]))
    if request["ignores_warnings"]:
        import warnings

        sys.warnoptions.append("ignore")
        warnings.simplefilter("ignore")
    del sys.modules["torch"], sys.modules["fork_server"]
    sys.meta_path.insert(0, _Torch(torch))
    sys.excepthook = _shown_from_the_script
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if is_module:
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]  # what `python -m` itself calls
    else:
        main.__dict__.update(__file__=words[0], __builtins__=__builtins__)
        with open(words[0]) as file:
            code = compile(file.read(), words[0], "exec")
        exec(code, main.__dict__)


def _shown_from_the_script(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename in (__file__, "<string>"):
        traceback = traceback.tb_next
    sys.__excepthook__(kind, error.with_traceback(traceback), traceback)
