"""Training loops of libraries, on tiny models, have the CPU's losses, run no op on the CPU, and compile nothing later.

They need the extra `models`, which `test` has.
"""

from __future__ import annotations

import ecosystem
import pytest

SHORT = {"trainer", "accelerator", "classifier", "counted", "reinforced"}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.full) for name in ecosystem.PROGRAMS]
)
def test_a_librarys_own_loop_does_on_tpu_what_it_does_on_the_cpu(name: str) -> None:
    if not ecosystem.is_installed(name):
        pytest.skip(f"{ecosystem.PROGRAMS[name].library} is not installed: the extra `models`")
    found = ecosystem.measured(name)
    assert found["distance"] <= ecosystem.TOLERANCE
    assert found["fallbacks"] == {}
    assert found["later"] == 0
