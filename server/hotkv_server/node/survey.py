"""Surveys for metrics and status pages. A survey counts all entries (records in the block table) of
the cache (a census), and computes how each part of the arena is used (a map of the arena).

Always true: a caller never waits for a survey of many entries. Such a survey runs in the
background, in steps with pauses between them. A survey begins only when a caller asks for it. While
a survey runs, it uses about BUSY_SHARE of the event loop's time. The next survey begins only after
a pause, so that all surveys together use at most about RESTING_SHARE of the time. On the event loop
only.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

from hotkv_server.cache import inspect
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.inspect import ArenaMap, Census

BUSY_SHARE = 0.2
RESTING_SHARE = 0.05
AT_ONCE_ENTRIES = 1 << 15
"""If the block table has at most this many entries, `LiveSurvey.latest` makes the survey itself, in
some milliseconds, instead of starting a task."""
FRESH_S = 0.5
"""A survey is not repeated before this time has passed, in seconds."""


@dataclass(frozen=True, slots=True)
class Survey:
    """A finished survey: a census (a count of all blocks and other records of the cache), and a map
    of the arena.

    ended_s: when the survey ended, in seconds of the monotonic clock.
    took_s: time of the event loop that the survey used, in seconds.
    """

    census: Census
    arena: ArenaMap
    ended_s: float
    took_s: float


class LiveSurvey:
    """Stores a node's latest survey (census of its entries, and map of the arena). If a caller asks
    for the survey and the latest survey is old, makes another."""

    def __init__(self, core: CacheCore) -> None:
        self._core = core
        self._latest: Survey | None = None
        self._making: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return (
            f"LiveSurvey({'none yet' if self._latest is None else f'{self._latest.took_s:.3f} s'})"
        )

    def latest(self, now_s: float) -> Survey | None:
        """Returns the latest survey (a census of the cache's entries, and a map of the arena); None
        until the first survey is complete.

        If the latest survey is old, makes another survey. For a cache with few entries
        (AT_ONCE_ENTRIES), this call makes it and returns it. For a larger cache, it is made in the
        background, and a later call returns it. A survey is old after FRESH_S; if it took long, it
        is old only after a longer time (RESTING_SHARE).
        """
        latest = self._latest
        if not self._is_idle:
            return latest
        rest_s = FRESH_S if latest is None else max(FRESH_S, latest.took_s / RESTING_SHARE)
        if latest is not None and now_s - latest.ended_s < rest_s:
            return latest
        if self._core.space.index.num_numbers <= AT_ONCE_ENTRIES:
            for _ in self._make():
                pass
        else:
            self._making = asyncio.get_running_loop().create_task(self._make_slowly())
            self._making.add_done_callback(_raise)
        return self._latest

    @property
    def _is_idle(self) -> bool:
        return self._making is None or self._making.done()

    def close(self) -> None:
        """Cancels the survey that is running, if any."""
        if self._making is not None:
            self._making.cancel()

    async def _make_slowly(self) -> None:
        for took_s in self._make():
            await asyncio.sleep(took_s * (1 / BUSY_SHARE - 1))

    def _make(self) -> Iterator[float]:
        """Makes a survey (counts all entries and maps the arena) in steps. Yields after each step
        the step's duration in seconds."""
        sum_s, census, arena = 0.0, None, None
        began_s = time.perf_counter()
        for census in inspect.census(self._core):  # noqa: B007 Only the last one is complete.
            sum_s += (took_s := time.perf_counter() - began_s)
            yield took_s
            began_s = time.perf_counter()
        for arena in inspect.arena_map(self._core, time.monotonic()):  # noqa: B007 As above.
            sum_s += (took_s := time.perf_counter() - began_s)
            yield took_s
            began_s = time.perf_counter()
        assert census is not None and arena is not None, "a walk ended without an answer"
        self._latest = Survey(census, arena, time.monotonic(), sum_s)


def _raise(task: "asyncio.Task[None]") -> None:
    """Raises the exception of a survey's background task, so that the event loop's exception
    handler receives it."""
    if not task.cancelled():
        task.result()
