"""The ladder: in come launches of one region, out goes each in the form that runs it best by now.

A region of clusters is quick to compile and runs first. One that is launched often is compiled whole as well, when
nothing else is; then both forms take turns a few times, each with the device to itself, and the faster one stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from .sequence import Sequence

_TURNS = 3  # timed launches of each form


class Ladder:
    """What a plan is given whose region is launched as clusters; only one thread at a time launches it.

    `climb` submits the whole program, once the region has been launched `hot` times; `is_fixed` says, at each launch,
    whether the form has to stay as it is; `chosen` hears whether the whole stays, with the seconds of both forms.
    """

    def __init__(
        self,
        clusters: Sequence,
        climb: Callable[[], Future[Any]],
        hot: int,
        is_fixed: Callable[[], bool],
        chosen: Callable[[bool, tuple[float, float]], None],
    ) -> None:
        self.clusters = clusters
        self._climb = climb
        self._hot = hot
        self._is_fixed = is_fixed
        self._chosen = chosen
        self._launches = 0
        self._whole: Future[Any] | None = None
        self._times: dict[bool, list[float]] = {True: [], False: []}  # seconds: of the whole program, of the clusters
        self._is_whole = False
        self._is_settled = False

    def run(self, work: Any, launch: Callable[..., None], wait_until_idle: Callable[[int], None]) -> None:
        """Launches the work; `wait_until_idle` is given a device."""
        if self._is_settled or self._is_fixed():
            self._launch(work, launch, self._is_whole)
            return
        self._launches += 1
        if self._whole is None and self._launches > self._hot:
            self._whole = self._climb()
        if self._whole is None or not self._whole.done():
            self._launch(work, launch, False)
        elif self._whole.cancelled() or self._whole.exception() is not None:
            self._is_settled = True
            self._launch(work, launch, False)
        else:
            self._time(work, launch, wait_until_idle)

    def _launch(self, work: Any, launch: Callable[..., None], is_whole: bool) -> None:
        if is_whole:
            assert self._whole is not None
            launch(work, self._whole.result())
        else:
            self.clusters.run(work, launch)

    def _time(self, work: Any, launch: Callable[..., None], wait_until_idle: Callable[[int], None]) -> None:
        is_whole = len(self._times[True]) <= len(self._times[False])
        device = work.device
        wait_until_idle(device)
        started = time.perf_counter()
        self._launch(work, launch, is_whole)
        wait_until_idle(device)
        self._times[is_whole].append(time.perf_counter() - started)
        if len(self._times[False]) > _TURNS:  # the first turn of each warms caches up
            whole, clusters = (min(self._times[form][1:]) for form in (True, False))
            self._is_whole = whole < clusters
            self._is_settled = True
            if not self._is_whole:
                self._whole = None
            self._chosen(self._is_whole, (whole, clusters))
