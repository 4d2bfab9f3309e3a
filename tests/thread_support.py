"""In: functions. Out: what they returned, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def run_all(*works: Callable[[], Any]) -> list[Any]:
    """Runs each in a thread of its own; returns their results, raises the first error."""
    results: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = works[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]
    return results
