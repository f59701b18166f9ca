"""Growth of the arena: after the start, its memory is prefaulted in the background, while stores
may wait for it.

Always true: a store waits at most PATIENCE_S, and only while the arena grows; then it may evict.
Stores continue in order of arrival. After a wait in vain none waits for PATIENCE_S, because
later calls of its session wait with it. On the event loop only.
"""

import asyncio
import time
from collections.abc import Sequence

from hotkv_server.cache.room.space import Space
from hotkv_server.cache.sessions import Catalog
from hotkv_server.cache.values import Run

PATIENCE_S = 2.0
"""A growing arena gets memory every few hundredths of a second."""


class ArenaGrowth:
    """is_growing: else there is nothing to wait for."""

    def __init__(self, space: Space, catalog: Catalog) -> None:
        self._space = space
        self._catalog = catalog
        self.is_growing = space.room.coming_bytes > 0
        self._grown = asyncio.Event()
        self._turn = asyncio.Lock()
        # Stores do not wait before this time, in seconds of time.monotonic.
        self._wait_from_s = 0.0

    def __repr__(self) -> str:
        return f"ArenaGrowth({'growing' if self.is_growing else 'done'})"

    def grow(self, filled_bytes: int, coming_bytes: int) -> None:
        """The first `filled_bytes` have memory. `coming_bytes`: about what follows within a
        second; 0 when filling has ended."""
        self.is_growing = coming_bytes > 0
        self._space.grow(filled_bytes, coming_bytes)
        self._grown.set()
        self._grown = asyncio.Event()

    async def await_room(self, key_space_id: int, runs: Sequence[Run]) -> bool:
        """Waits until the missing blocks of `runs` have room without an eviction. True if it
        waited, so that other tasks have run."""
        if time.monotonic() < self._wait_from_s or self._has_room(key_space_id, runs):
            return False
        waiting = asyncio.create_task(self._wait(key_space_id, runs))
        try:
            # Not `wait_for`: before Python 3.12 it ignores a cancellation if `waiting` has just
            # ended, and a closing session would read further requests.
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
        if not self.is_growing or key_space_id not in self._catalog.records:
            return True
        space, record = self._space, self._catalog.record(key_space_id)
        for run in runs:
            words = space.index.find(key_space_id, run.group_index, run.hashes)
            num_missing = int((words == 0).sum())
            if num_missing and not space.has_room(record.slot_bytes(run.group_index), num_missing):
                return False
        return True
