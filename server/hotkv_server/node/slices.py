"""Long work on the event loop, a slice at a time. Others are served between two slices."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

from hotkv_server.cache.room.removal import Parts

SLICE_S = 0.004
"""Length of a slice: steps are taken until it is over. As a rule a step of the core is shorter."""
T = TypeVar("T")


class Breaks:
    """Breaks in the work of a coroutine that has many short parts."""

    def __init__(self) -> None:
        self._ends_s = time.perf_counter() + SLICE_S

    async def between(self) -> None:
        """Between two parts: others are served if a slice is over."""
        if time.perf_counter() >= self._ends_s:
            await asyncio.sleep(0)
            self._ends_s = time.perf_counter() + SLICE_S


async def slices(steps: Iterator[T]) -> AsyncIterator[tuple[list[T], bool]]:
    """Yields the results of the steps of each slice, and whether more come: one slice at least. The
    caller's loop body runs before others are served."""
    has_more = True
    taken: list[T]
    while has_more:
        ends_s, taken = time.perf_counter() + SLICE_S, []
        has_more = False
        for step in steps:
            taken.append(step)
            if time.perf_counter() >= ends_s:
                has_more = True
                break
        yield taken, has_more
        if has_more:
            await asyncio.sleep(0)


async def in_slices(parts: Parts[T], after_slice: Callable[[], object]) -> T:
    """Does all parts and returns their result. `after_slice` runs before others are served, and at
    the end, also if a part raises."""
    while True:
        ends_s = time.perf_counter() + SLICE_S
        try:
            while time.perf_counter() < ends_s:
                next(parts)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            after_slice()
        await asyncio.sleep(0)
