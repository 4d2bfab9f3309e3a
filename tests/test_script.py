"""In: scripts that end in many ways, run by `run_script`. Out: what Python itself would have made of them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from script import run_script

SCRIPTS = {
    "end": "import atexit\natexit.register(print, 'bye')\nprint(__name__)",
    "exit": "import sys\nsys.exit(5)",
    "message": "raise SystemExit('a message')",
    "error": "def f():\n    raise ValueError('a mistake')\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    f()",
    "interrupt": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: pass",
    "signal": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nwhile True: pass",
    "place": "import os, sys\nprint(sys.argv == [__file__], sys.path[0] == os.path.dirname(__file__), os.getcwd())",
    "imports": "import sys\nprint('torch' in sys.modules, 'torchtpu' in sys.modules)\nimport torch\n"
    "print('torchtpu' in sys.modules, torch.__spec__.name, sys.modules['torch'] is torch, torch.tpu.is_available())",
    "signals": "import signal\nprint([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)])",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_run_as_python_runs_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPTS[name]))
    expected = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    found = run_script(SCRIPTS[name])

    def plain(err: str) -> list[str]:
        return [line for line in err.splitlines() if not line.startswith("  File ")]  # lines and folders differ

    assert (found.status, found.out) == (expected.returncode, expected.stdout)
    assert plain(found.err) == plain(expected.stderr)


def test_a_script_has_the_environment_that_it_is_given() -> None:
    code = "import os, torch\nprint(os.environ.get('SOME'), os.environ.get('OMP_NUM_THREADS'), torch.get_num_threads())"
    assert run_script(code, SOME="thing", OMP_NUM_THREADS="1").out == "thing 1 1\n"
    assert run_script(code, OMP_NUM_THREADS="2").out == "None 2 2\n"


def test_a_script_that_hangs_prints_where() -> None:
    ended = run_script("import threading\nthreading.Event().wait()", seconds=1)
    assert ended.status < 0
    assert "Current thread" in ended.err and "script.py" in ended.err
