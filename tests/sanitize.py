"""Runs tests with the extension built under the compiler's sanitizers, and prints what these report.

    python tests/sanitize.py address,undefined [pytest's arguments]
    python tests/sanitize.py thread tests/test_threads.py -k reads

Without arguments for pytest it runs the files in TESTS.  The build goes to build/ beside the ordinary one, which it
leaves alone, and is made again where a source has changed.  It ends with 1 where a test failed or something was
reported.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = (
    *("recorder", "locks", "threads", "cuts", "reading", "subgraphs", "materialization", "interrupts", "faults"),
    *("leaks", "growth", "aliasing", "serialization", "distributed"),
)
# What the process loads before everything else: the runtimes of the compiler that built the extension.
RUNTIMES = {"address": ["libasan.so"], "undefined": ["libubsan.so"], "thread": ["libtsan.so"]}


def runtimes(sanitizers: str) -> list[str] | None:
    """The libraries to preload; none where the compiler lacks one."""
    found = []
    for name in [library for sanitizer in sanitizers.split(",") for library in RUNTIMES[sanitizer]]:
        asked = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=False)
        path = asked.stdout.strip()
        if not os.path.isabs(path):
            return None
        found.append(os.path.realpath(path))
    return found


def build(sanitizers: str) -> Path:
    """A folder like the checkout, in which the package has the extension under the sanitizers."""
    base = ROOT / "build" / sanitizers.replace(",", "-")
    lib = base / "lib"
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build", f"--build-base={base}", f"--build-lib={lib}"],
        cwd=ROOT,
        env={**os.environ, "TORCHTPU_SANITIZE": sanitizers},
        check=True,
    )
    for name in ("tests", "benchmarks", "examples", "docs", "pyproject.toml"):
        if not (lib / name).exists():
            (lib / name).symlink_to(ROOT / name)
    return lib


def environment(sanitizers: str, lib: Path, reports: Path) -> dict[str, str]:
    """Tests and the processes that they start report into files `reports`.*."""
    preload = runtimes(sanitizers)
    assert preload, f"gcc has no runtime for {sanitizers}"
    suppressions = ROOT / "tests" / "sanitize_thread.txt"
    return {
        **os.environ,
        "LD_PRELOAD": ":".join(preload),
        "PYTHONPATH": str(lib),
        "PYTHONMALLOC": "malloc",
        # The interpreter and torch free nothing at the end.  A report does not end the process: the test goes on.
        "ASAN_OPTIONS": f"detect_leaks=0:detect_odr_violation=0:log_path={reports}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={reports}",
        "TSAN_OPTIONS": f"ignore_noninstrumented_modules=1:exitcode=0:die_after_fork=0:second_deadlock_stack=1:suppressions={suppressions}:log_path={reports}",  # noqa: E501
    }


def run(sanitizers: str, arguments: list[str]) -> tuple[int, str]:
    """pytest's exit status, and all that was reported."""
    lib = build(sanitizers)
    with tempfile.TemporaryDirectory(prefix="torchtpu-sanitize-") as folder:
        reports = Path(folder, "report")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=lib, env=environment(sanitizers, lib, reports), check=False)
        return done.returncode, "".join(path.read_text(errors="replace") for path in sorted(Path(folder).iterdir()))


def main() -> None:
    sanitizers, *arguments = sys.argv[1:]
    status, found = run(sanitizers, arguments or [f"tests/test_{name}.py" for name in TESTS])
    print(found)
    print(f"{sanitizers}: {found.count('WARNING: ThreadSanitizer') + found.count('ERROR: AddressSanitizer')} reports")
    print(f"{found.count('runtime error:')} of undefined behaviour" if "undefined" in sanitizers else "", flush=True)
    sys.exit(status != 0 or bool(found))


if __name__ == "__main__":
    main()
