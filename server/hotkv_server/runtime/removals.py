"""Removes blocks and key spaces on request, a part at a time.

Always true: between two parts others are served, and subscribers have been told of all that was
removed before. On the event loop only.
"""

import itertools
import logging
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from hotkv.keys import KeySpace, Representation
from hotkv_server.core import incremental
from hotkv_server.core.cache import CacheCore
from hotkv_server.runtime.events import EventHub
from hotkv_server.runtime.slices import slices
from hotkv_server.sparse.remembered import RememberedHotSets

log = logging.getLogger(__name__)

MAX_FORGOTTEN = 64
"""Most key spaces that are forgotten in one turn of the timer, or for one session."""


class Removals:
    """See the module. `remembered`: what sparse decode remembers of key spaces; `run_effects`
    carries out what the core's decisions call for."""

    def __init__(
        self,
        core: CacheCore,
        events: EventHub,
        remembered: RememberedHotSets,
        run_effects: Callable[[int], None],
    ) -> None:
        self._core = core
        self._events = events
        self._remembered = remembered
        self._run_effects = run_effects

    async def evict(
        self, key_space_id: int, group_index: int, hashes: NDArray[np.uint32]
    ) -> tuple[int, int]:
        """Evicts blocks, as `incremental.evict`. Returns how many were dropped and how many were
        kept."""
        return await self._evicted(incremental.evict(self._core, key_space_id, group_index, hashes))

    async def evict_all(self, key_space_id: int) -> tuple[int, int]:
        """Evicts all blocks of a key space, as `incremental.evict_all`. Returns as `evict`."""
        return await self._evicted(incremental.evict_all(self._core, key_space_id))

    async def _evicted(self, evicting: Iterator[tuple[int, int]]) -> tuple[int, int]:
        dropped = kept = 0
        async for counts, _ in slices(evicting):
            dropped, kept = (
                dropped + sum(count for count, _ in counts),
                kept + sum(count for _, count in counts),
            )
            self._run_effects(0)
        return dropped, kept

    async def flush(self, key_space_id: int) -> int:
        """Flushes a key space, as `incremental.flush`, and returns the number of blocks. Blocks
        that others store meanwhile may be flushed, too."""
        self._run_effects(0)
        num_stored, num_blocks = self._core.counters.stored_blocks, 0
        async for counts, has_more in slices(incremental.flush(self._core, key_space_id)):
            num_blocks += sum(counts)
            # Removals are told of before anybody stores the blocks anew.
            is_clear = not has_more and self._core.counters.stored_blocks == num_stored
            self._run_effects(key_space_id if is_clear else 0)
        async for _ in slices(self._remembered.forget(key_space_id)):
            pass
        log.info("key space flushed key_space=%d blocks=%d", key_space_id, num_blocks)
        return num_blocks

    async def forget_for(
        self, key_space: KeySpace, representations: tuple[Representation, ...]
    ) -> None:
        """Forgets key spaces, with their blocks, to make room for another one, as far as any may be
        forgotten; opening a session says if not."""
        for _ in range(0 if self._core.draining else MAX_FORGOTTEN):
            number = self._core.catalog.surplus(key_space, representations)
            if not number:
                return
            if self._core.catalog.has_blocks(number):
                await self.flush(number)
            if not await self._forget(number):
                return

    async def forget_outlived(self, now_s: float) -> None:
        """Forgets key spaces without blocks that no session has had for long."""
        for number in list(itertools.islice(self._core.catalog.outlived(now_s), MAX_FORGOTTEN)):
            await self._forget(number)

    async def _forget(self, key_space_id: int) -> bool:
        """Forgets a key space. False if a session has it, or it has a block, by now."""
        async for _ in slices(self._remembered.forget(key_space_id)):
            pass
        if not self._core.catalog.forget(key_space_id):
            return False
        self._events.forget_key_space(key_space_id)
        log.info(
            "key space forgotten key_space=%d known=%d", key_space_id, len(self._core.key_spaces)
        )
        return True
