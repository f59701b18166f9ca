"""Removes blocks and key spaces, and notifies sessions and capabilities of every removal."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.keys import KeySpace, Sketch
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.space import keep_bounds
from hotkv_server.cache.values import EvictionNotice, TenantShare
from hotkv_server.node.capability import NodeEvents
from hotkv_server.node.event_loop import slices
from hotkv_server.node.live_session import LiveSession

# Effects: notices to sessions and capabilities, sent in the order of the core's decisions. On
# the event loop only.


NOTICE_BLOCKS = 1 << 16
"""Most blocks in an eviction notice: 2 MiB of hashes."""


class Effects:
    """drained: set when the core is draining and its last transfer has ended.
    room_taken: set when the core's reserve is low.
    """

    def __init__(
        self,
        core: CacheCore,
        events: NodeEvents,
        sessions: Callable[[], Iterable[LiveSession]],
        drained: asyncio.Event,
        room_taken: asyncio.Event,
    ) -> None:
        self._core = core
        self._events = events
        self._sessions = sessions
        self._drained = drained
        self._room_taken = room_taken

    def run(self, flushed_key_space_id: int = 0) -> None:
        """Carries out the core's new effects.

        flushed_key_space_id: a flush has begun to empty it; 0 for none.
        """
        notices = [piece for notice in self._core.take_effects() for piece in _pieces(notice)]
        places = [one.space for one in self._core.below if one.space is not None]
        below = [notice for space in places for notice in space.removal.take_effects()]
        for notice in notices:
            for session in self._sessions():
                if (
                    session.wants_evictions
                    and session.record.key_space_id == notice.key_space_id
                    and not session.closing
                ):
                    session.notify(notice)
        if self._core.draining and not len(self._core.transfers):
            self._drained.set()
        if self._core.space.reserve.is_low:
            self._room_taken.set()
        # Last: if a capability raises, the sessions have their notices.
        if notices or below or flushed_key_space_id:
            pieces = [piece for notice in below for piece in _pieces(notice)]
            self._events.blocks_removed(notices, pieces, flushed_key_space_id)


def _pieces(notice: EvictionNotice) -> Iterator[EvictionNotice]:
    for start in range(0, len(notice.hashes), NOTICE_BLOCKS):
        yield replace(notice, hashes=notice.hashes[start : start + NOTICE_BLOCKS])


# Removals run in slices of time. Always true: when other tasks run, sessions and capabilities
# have been notified of all earlier removals. On the event loop only.


log = logging.getLogger(__name__)

MAX_FORGOTTEN = 64
"""At one turn of the timer, or to make room for one new key space."""
KEEPING_S = 0.1
KEEP_EVERY_S = 1.0


class Removals:
    def __init__(
        self,
        core: CacheCore,
        events: NodeEvents,
        run_effects: Callable[[int], None],
    ) -> None:
        self._core = core
        self._events = events
        self._run_effects = run_effects
        self._keeping: Iterator[None] | None = None
        self._keep_at_s = 0.0
        # Released pins and stored blocks when `keep_bounds` last began to examine all blocks.
        # While both are unchanged, no other block can have become evictable.
        self._seen: tuple[int, int] | None = None

    async def evict(
        self, key_space_id: int, group_index: int, hashes: NDArray[np.uint32]
    ) -> tuple[int, int]:
        """Counts of evicted blocks, and of those kept as pinned or reserved.

        hashes: a row of eight uint32 words for each.
        """
        return await self._evicted(self._core.evict(key_space_id, group_index, hashes))

    async def evict_all(self, key_space_id: int) -> tuple[int, int]:
        """As `evict`. Key space 0: all."""
        return await self._evicted(self._core.evict_all(key_space_id))

    async def would_evict(
        self, key_space_id: int, group_index: int = 0, hashes: NDArray[np.uint32] | None = None
    ) -> tuple[int, int, int]:
        """Blocks to evict, blocks to keep, and bytes that `evict`, or `evict_all` without
        hashes, would free."""
        dropped = kept = num_bytes = 0
        async for counts, _ in slices(self._core.would_evict(key_space_id, group_index, hashes)):
            for part_dropped, part_kept, part_bytes in counts:
                dropped, kept = dropped + part_dropped, kept + part_kept
                num_bytes += part_bytes
        return dropped, kept, num_bytes

    async def _evicted(self, evicting: Iterator[tuple[int, int]]) -> tuple[int, int]:
        dropped = kept = 0
        async for counts, _ in slices(evicting):
            dropped, kept = (
                dropped + sum(count for count, _ in counts),
                kept + sum(count for _, count in counts),
            )
            self._run_effects(0)
        return dropped, kept

    async def flush(self, key_space_id: int, *, elsewhere: bool = False) -> int:
        """Removes a key space's blocks from host memory, perhaps also some stored during the
        call. Returns their number. `elsewhere`: another node has requested it."""
        num_blocks = await self._empty(key_space_id)
        self._events.key_space_flushed(key_space_id, elsewhere)
        log.info("key space flushed key_space=%d blocks=%d", key_space_id, num_blocks)
        return num_blocks

    def flushed_elsewhere(self, key_space_id: int) -> None:
        """The key space has no blocks here."""
        self._run_effects(key_space_id)
        self._events.key_space_flushed(key_space_id, True)

    async def _empty(self, key_space_id: int) -> int:
        self._run_effects(0)
        num_blocks, cleared = 0, key_space_id
        async for counts, _ in slices(self._core.flush(key_space_id)):
            num_blocks += sum(counts)
            # Now: after this slice, sessions may store the same blocks again.
            self._run_effects(cleared)
            cleared = 0
        return num_blocks

    def share_out(self, shares: Mapping[str, TenantShare]) -> None:
        """Sets the tenants' shares of arena and catalog; the timer evicts later. Raises
        INVALID_FIELD (`TenantBook.check_shares`)."""
        self._core.space.tenants.share_out(shares)
        self._core.catalog.share_out(len(shares))
        self._keeping, self._keep_at_s, self._seen = None, 0.0, None

    async def keep_bounds(self, now_s: float) -> None:
        """Evicts blocks of tenants above their burst bound. Called at each turn of the timer;
        continues at the next after KEEPING_S. A pass begins at most every KEEP_EVERY_S, and only
        after new unpins or stores."""
        space = self._core.space
        if self._keeping is None:
            freed = (space.index.num_unpins, self._core.counters.stored_blocks)
            if now_s < self._keep_at_s or freed == self._seen or not space.tenants.over_bound():
                return
            self._keep_at_s, self._seen = now_s + KEEP_EVERY_S, freed
            self._keeping = keep_bounds(space.books, space.removal)
        keeping, ends_s = self._keeping, time.monotonic() + KEEPING_S
        async for _, has_more in slices(keeping):
            self._run_effects(0)
            if self._keeping is not keeping:
                return
            if not has_more:
                self._keeping = None
            elif time.monotonic() >= ends_s:
                return

    async def forget_for(self, key_space: KeySpace, sketches: tuple[Sketch, ...]) -> None:
        """Forgets key spaces with their blocks until `key_space` can be registered, but at most
        MAX_FORGOTTEN and none in use; registering may then raise OVERLOADED."""
        # A key space already tried stays if a hanging tier uses its slots; then choose another.
        tried = set[int]()
        for _ in range(0 if self._core.draining else MAX_FORGOTTEN):
            number = self._core.catalog.surplus(key_space, sketches, tried)
            if not number:
                return
            tried.add(number)
            if self._core.catalog.has_blocks(number):
                await self._empty(number)
            # Does nothing if another task has forgotten it meanwhile, or opened a session of it.
            self.forget(number)

    def forget_outlived(self, now_s: float) -> None:
        """Forgets key spaces without blocks that had no session for FORGET_S."""
        for number in list(itertools.islice(self._core.catalog.outlived(now_s), MAX_FORGOTTEN)):
            self.forget(number)

    def forget(self, key_space_id: int) -> bool:
        """Does nothing and returns False if the key space has a session or a block."""
        if not self._core.catalog.forget(key_space_id):
            return False
        self._events.key_space_forgotten(key_space_id)
        log.info(
            "key space forgotten key_space=%d known=%d", key_space_id, len(self._core.key_spaces)
        )
        return True
