"""Passes what a future's callback raises, which nobody would hear of, on to those who wait."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import InvalidStateError
from typing import Any


@contextlib.contextmanager
def failing(fail: Callable[[BaseException], Any]) -> Iterator[None]:
    """What is raised within it, whatever it is, goes to `fail`: a future's `set_exception`, or a plan's `failed`."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001 -- whoever waits raises it
        with contextlib.suppress(InvalidStateError):  # cancelled meanwhile, as the engine was closed
            fail(error)
