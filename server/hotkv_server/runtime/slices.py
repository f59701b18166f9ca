"""Long work on the event loop, a slice at a time, so that others are served between."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import TypeVar

SLICE_S = 0.004
"""Steps are taken until so much time has passed; a step of the core takes no longer, as a rule."""
T = TypeVar("T")


async def slices(steps: Iterator[T]) -> AsyncIterator[tuple[list[T], bool]]:
    """What the steps of each slice gave, and whether more come: at least one slice. The caller goes
    on before others are served."""
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
