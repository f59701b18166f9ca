"""Surveys for metrics and status pages: a census of all entries, and a map of the arena.

Always true: a survey begins only when asked for. One of many entries runs in the background, in
steps, for which no caller waits: it takes BUSY_SHARE of the event loop's time, and RESTING_SHARE
with the pause before the next. On the event loop only.
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
"""A survey of so many takes some milliseconds."""
FRESH_S = 0.5


@dataclass(frozen=True, slots=True)
class Survey:
    """ended_s: of the monotonic clock.
    took_s: time of the event loop.
    """

    census: Census
    arena: ArenaMap
    ended_s: float
    took_s: float


class LiveSurvey:
    def __init__(self, core: CacheCore) -> None:
        self._core = core
        self._latest: Survey | None = None
        self._making: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return (
            f"LiveSurvey({'none yet' if self._latest is None else f'{self._latest.took_s:.3f} s'})"
        )

    def latest(self, now_s: float) -> Survey | None:
        """None until the first is complete. Replaces one older than FRESH_S, or longer if it
        took long: at once up to AT_ONCE_ENTRIES, else in the background for a later call."""
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
        if self._making is not None:
            self._making.cancel()

    async def _make_slowly(self) -> None:
        for took_s in self._make():
            await asyncio.sleep(took_s * (1 / BUSY_SHARE - 1))

    def _make(self) -> Iterator[float]:
        """Yields the duration of each step in seconds."""
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
    """Passes the exception to the event loop's handler."""
    if not task.cancelled():
        task.result()
