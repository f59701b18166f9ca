"""ArenaGrowth of the arena: after the start, the arena's memory is allocated (prefaulted) in the
background. `ArenaGrowth` reports the new memory to the core, and lets stores wait for it.

Always true: a store waits at most PATIENCE_S, and only while the arena grows. After the wait the
store may evict blocks, as if the arena were full. Waiting stores continue in the order of their
arrival. If a store has waited in vain, the stores of the next PATIENCE_S do not wait. The reason:
while a store waits, the later calls of its session (for example loads) wait too. On the event loop
only.
"""

import asyncio
import time
from collections.abc import Sequence

from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import Run

PATIENCE_S = 2.0
"""Longest time that a store waits for memory. While the arena grows, it gets a piece of memory
every few hundredths of a second."""


class ArenaGrowth:
    """Reports to the core (the cache's records and decisions) how much of the arena has been
    prefaulted in the background, and lets stores wait until there is enough."""

    def __init__(self, core: CacheCore) -> None:
        self._core = core
        self._is_growing = core.space.room.coming_bytes > 0
        self._grown = asyncio.Event()
        self._turn = asyncio.Lock()
        # Before this time stores do not wait for room, because the last store that waited got none.
        # In seconds of time.monotonic.
        self._wait_from_s = 0.0

    def __repr__(self) -> str:
        return f"ArenaGrowth({'growing' if self._is_growing else 'done'})"

    def grow(self, filled_bytes: int, coming_bytes: int) -> None:
        """Reports to the core, which places blocks in the arena, that the first `filled_bytes` of
        the arena have memory now. Wakes waiting stores. `coming_bytes`: about how many more bytes
        get memory within a second; 0 if filling the arena has ended."""
        self._is_growing = coming_bytes > 0
        self._core.space.grow(filled_bytes, coming_bytes)
        self._grown.set()
        self._grown = asyncio.Event()

    async def await_room(self, key_space_id: int, runs: Sequence[Run]) -> bool:
        """Waits until the new blocks of a store (the blocks of `runs` that are not in host memory)
        have room without an eviction, at most PATIENCE_S. Returns True if it waited, so that other
        tasks have run meanwhile."""
        if time.monotonic() < self._wait_from_s or self._has_room(key_space_id, runs):
            return False
        waiting = asyncio.create_task(self._wait(key_space_id, runs))
        try:
            # Use `asyncio.wait` instead of `wait_for`: before Python 3.12, `wait_for` ignores a
            # cancellation if `waiting` has just ended. Then a session that is being closed would
            # read further requests.
            await asyncio.wait((waiting,), timeout=PATIENCE_S)
        finally:
            has_waited_in_vain = waiting.cancel()
        if has_waited_in_vain:
            self._wait_from_s = time.monotonic() + PATIENCE_S
        else:
            waiting.result()
        return True

    async def _wait(self, key_space_id: int, runs: Sequence[Run]) -> None:
        async with self._turn:
            while not self._has_room(key_space_id, runs):
                await self._grown.wait()

    def _has_room(self, key_space_id: int, runs: Sequence[Run]) -> bool:
        if not self._is_growing or key_space_id not in self._core.key_spaces:
            return True
        space, record = self._core.space, self._core.catalog.record(key_space_id)
        for run in runs:
            words = space.index.find(key_space_id, run.group_index, run.hashes)
            num_missing = int((words == 0).sum())
            if num_missing and not space.has_room(
                record.shape(run.group_index).slot_bytes, num_missing
            ):
                return False
        return True
