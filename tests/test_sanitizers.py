"""In: the extension, built anew under the compiler's address and undefined-behaviour sanitizers. Out: no report.

`tests/sanitize.py` runs more files, and the thread sanitizer.
"""

from __future__ import annotations

import pytest
import sanitize

SANITIZERS = "address,undefined"
# What records, cuts, launches and reads, in one thread and in several, and compiles little.
QUICK = (
    "tests/test_recorder.py",
    "tests/test_locks.py",
    "tests/test_threads.py",
    "tests/test_cuts.py::test_random_numbers_are_the_same_wherever_a_cap_cuts",
)


@pytest.mark.timeout(1800)
@pytest.mark.skipif(sanitize.runtimes(SANITIZERS) is None, reason="the compiler has no sanitizers")
def test_the_extension_under_address_and_undefined_behaviour_sanitizers_reports_nothing() -> None:
    status, reports = sanitize.run(SANITIZERS, ["-n", "0", *QUICK])
    assert (status, reports) == (0, "")
